"""Matrix products with a weight: operands in the model's dtype, sums in `sum_dtype`, forward and backward.

JAX's own backward pass of a bfloat16 product with a float32 result multiplies in float32, at half of a GPU's
speed and twice the bytes, and then rounds the gradient to bfloat16. Here the two backward products read
bfloat16 too, and their float32 sums are the gradients. Shapes: n rows, I inputs, O outputs.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float


def sum_dtype(x: Array) -> Any:
    """Returns the dtype in which products of `x` are summed: float64 if `x` is float64, else float32."""
    return jnp.promote_types(x.dtype, jnp.float32)


def product(x: Float[Array, "n I"], weight: Array, dtype: str, axis: int = 0) -> Float[Array, "n O"]:
    """Returns x @ weight, of operands cast to `dtype`: float64 if `dtype` is float64, else float32.

    `axis`: that of the inputs in the weight, which is (I, O), or (O, I) with axis 1. The gradient with
    respect to x has the dtype of x.
    """
    if dtype in ("float32", "float64"):
        return summed(x.astype(dtype), weight.astype(dtype), 1, axis)
    return _reduced(x, weight, dtype, axis, (x.dtype, weight.dtype))


@partial(jax.custom_vjp, nondiff_argnums=(2, 3, 4))
def _reduced(x: Array, weight: Array, dtype: str, axis: int, kinds: Any) -> Array:
    """Returns `product` with the backward pass of this module; `kinds`: the dtypes of x and weight."""
    return _forward(x, weight, dtype, axis, kinds)[0]


def _forward(x: Array, weight: Array, dtype: str, axis: int, kinds: Any) -> tuple[Array, tuple]:
    read = x.astype(dtype), weight.astype(dtype)
    return summed(*read, 1, axis), read


def _backward(dtype: str, axis: int, kinds: Any, kept: tuple, slope: Array) -> tuple[Array, Array]:
    """Returns the gradients with respect to x and weight.

    `kept`: x and weight as the forward pass read them; `slope`: the gradient with respect to the result.
    """
    (x, weight), slope = kept, slope.astype(dtype)
    of_x = summed(slope, weight, 1, 1 - axis, kinds[0])
    of_weight = summed(x, slope, 0, 0) if axis == 0 else summed(slope, x, 0, 0)
    return of_x, of_weight.astype(kinds[1])


_reduced.defvjp(_forward, _backward)


def summed(left: Array, right: Array, left_axis: int, right_axis: int, result: Any = None) -> Array:
    """Returns left times right, two arrays of one dtype, summed over the two axes in `sum_dtype`.

    `result`: the dtype to which the sums are rounded; None: `sum_dtype`.
    """
    numbers = (((left_axis,), (right_axis,)), ((), ()))
    return jax.lax.dot_general(left, right, numbers, preferred_element_type=result or sum_dtype(left))


@partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def gathered(shard: Array, axis: int, dtype: str) -> Array:
    """Returns the matrix of which each fsdp device has a `shard` along `axis`, as values of `dtype`.

    It is cast before the devices exchange it. Its gradient is summed in the shard's dtype, float32, and each
    device gets the sum of its shard alone.
    """
    return jax.lax.all_gather(shard.astype(dtype), "fsdp", axis=axis, tiled=True).astype(shard.dtype)


gathered.defvjp(
    lambda shard, axis, dtype: (gathered(shard, axis, dtype), None),
    lambda axis, dtype, _, slope: (jax.lax.psum_scatter(slope, "fsdp", scatter_dimension=axis, tiled=True),),
)
