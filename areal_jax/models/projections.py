"""The matrices of a layer: in floats, as quantised codes, with LoRA adapters, and in a CPU's layout.

Each parameter is declared with its shape, initializer and logical axis names, which `parallel.mesh` maps onto
devices.
"""

from __future__ import annotations

import math
from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx, struct
from jaxtyping import Array, Float

from areal_jax.models.config import ModelConfig
from areal_jax.models.products import product
from areal_jax.models.quantize import dequantized, inputs_of, quantized

Axes = tuple[str | None, ...]
"""Logical names of an array's axes; an axis with the name None is not sharded on any mesh."""


def param(value: Array, axes: Axes) -> nnx.Param:
    return nnx.Param(value, out_sharding=axes, eager_sharding=False)


def normal(key: Array, shape: tuple[int, ...], axes: Axes, scale: float) -> nnx.Param:
    return param(scale * jax.random.normal(key, shape), axes)


def ones(size: int, axis: str) -> nnx.Param:
    return param(jnp.ones(size), (axis,))


class FeatureMajor(struct.PyTreeNode):
    """A matrix stored transposed, a row per output: a CPU multiplies few rows of x by it without a copy."""

    rows: Float[Array, "O I"]

    def product(self, x: Float[Array, "... I"], dtype: str) -> Float[Array, "... O"]:
        flat = x.reshape(-1, x.shape[-1]).astype(dtype)
        count = len(flat)
        if dtype == "bfloat16" and count < FEWEST_ROWS:
            flat = jnp.pad(flat, ((0, FEWEST_ROWS - count), (0, 0)))
        out = jax.lax.dot_general(
            self.rows.astype(dtype), flat, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32
        )
        # The barrier keeps XLA from rewriting this as x @ rows.T, which repacks the matrix.
        return jax.lax.optimization_barrier(out).T[:count].reshape(*x.shape[:-1], -1)


FEWEST_ROWS = 8
"""bfloat16 products are padded to this many rows: for fewer, XLA's CPU kernel is several times slower."""


def project(x: Float[Array, "... I"], weight: Array | FeatureMajor, dtype: str) -> Float[Array, "... O"]:
    """Returns x @ weight as `products.product` computes it; the output axes are flattened to one.

    Both operands are reshaped to two dimensions, as fast CPU kernels require.
    """
    if isinstance(weight, FeatureMajor):
        return weight.product(x, dtype)
    flat = weight.reshape(x.shape[-1], -1)
    return product(x.reshape(-1, x.shape[-1]), flat, dtype).reshape(*x.shape[:-1], -1)


class Adapter(nnx.Module):
    """The low-rank factors a and b that adapt a matrix of `shape`; its first `inputs` axes are its inputs.

    Initially a is random and b is zero, so that a b adds 0 (Hu et al., arXiv:2106.09685). The rank's axis is
    not sharded.
    """

    def __init__(self, key: Array, shape: tuple[int, ...], axes: Axes, inputs: int, rank: int) -> None:
        scale = math.prod(shape[:inputs]) ** -0.5
        self.a = normal(key, (*shape[:inputs], rank), (*axes[:inputs], None), scale)
        self.b = param(jnp.zeros((rank, *shape[inputs:])), (None, *axes[inputs:]))


class Quantized(nnx.Module):
    """A frozen matrix's codes and scale (`models.quantize`), all zeros until `Model.from_base` sets them."""

    def __init__(self, kind: str, shape: tuple[int, ...], axes: Axes, inputs: int) -> None:
        matrix = jax.ShapeDtypeStruct((1, *shape), jnp.float32)
        for name, leaf in jax.eval_shape(partial(quantized, kind=kind, inputs=inputs), matrix).items():
            setattr(self, name, param(jnp.zeros(leaf.shape[1:], leaf.dtype), axes))


class Projections(nnx.Module):
    """The matrices of attention or of the MLP, in floats or quantised, and their adapters."""

    def __init__(self, c: ModelConfig) -> None:
        self.config = nnx.static(c)

    def add(self, rngs: nnx.Rngs, name: str, shape: tuple[int, ...], axes: Axes, scale: float) -> None:
        """Add the matrix `name` of `shape`, and its adapter, if the config has one.

        `axes`: logical names of its axes. `scale`: standard deviation of its initial values.
        """
        c, inputs = self.config, inputs_of(name)
        if c.quantize == "none":
            setattr(self, name, normal(rngs.params(), shape, axes, scale))
        else:
            setattr(self, name, Quantized(c.quantize, shape, axes, inputs))
        if c.lora is not None and name in c.lora.names:
            setattr(self, f"{name}_lora", Adapter(rngs.params(), shape, axes, inputs, c.lora.rank))

    def matrix(self, name: str) -> Array | FeatureMajor:
        """Returns the matrix W of the projection `name`, dequantised if it is stored as codes."""
        weight, kind = getattr(self, name), self.config.quantize
        if kind == "none":
            return weight.get_value()
        return dequantized(weight.codes[...], weight.scale[...], kind)

    def projected(self, name: str, x: Float[Array, "... I"]) -> Float[Array, "... O"]:
        """Returns x W, plus (alpha / rank) (x a) b if W has an adapter; `project` computes each product."""
        c = self.config
        x, by = x.astype(c.activations), partial(project, dtype=c.dtype)
        out = by(x, self.matrix(name))
        if c.lora is None or name not in c.lora.names:
            return out
        adapter = getattr(self, f"{name}_lora")
        return out + c.lora.scale * by(by(x, adapter.a[...]), adapter.b[...])
