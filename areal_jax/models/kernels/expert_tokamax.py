"""Products of a mixture's experts by the library tokamax, which has kernels for each kind of GPU.

The extra `tokamax` installs it. This module imports it: `models.kernels.expert_products` imports the module
when a kernel is called. Shapes: M rows, sorted by expert, E experts, I inputs and O outputs of a matrix.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import tokamax  # pyright: ignore[reportMissingImports]
from jax.lax import RaggedDotDimensionNumbers
from jaxtyping import Array, Float, Int

IMPLEMENTATION = "mosaic_gpu"
"""Left to itself, tokamax computes the products with XLA on a GPU for which it has no kernel."""


def rows_times_matrices(
    x: Float[Array, "M I"], matrices: Float[Array, "E I O"], starts: Int[Array, " E+1"], axis: int, dtype: Any
) -> Float[Array, "M O"]:
    """Returns each row times its expert's matrix; arguments as in `expert_triton.rows_times_matrices`."""
    return _product(x, matrices, starts, (1, 1 + axis), [0]).astype(dtype)


def rows_times_rows(
    x: Float[Array, "M I"], slope: Float[Array, "M O"], starts: Int[Array, " E+1"]
) -> Float[Array, "E I O"]:
    """Returns for each expert the sum of its rows' outer products; see `expert_triton.rows_times_rows`."""
    return _product(x, slope, starts, (0, 0), [])


def _product(x: Array, y: Array, starts: Array, summed: tuple[int, int], experts: list[int]) -> Array:
    """Returns the products, summed in float32 over the axes `summed` of `x` and `y`.

    `experts`: the axis of `y` that numbers the experts; without one, they divide the rows of `y` too.
    """
    axes = (((summed[0],), (summed[1],)), ((), ()))
    return tokamax.ragged_dot_general(
        x,
        y,
        jnp.diff(starts),
        RaggedDotDimensionNumbers(axes, [0], experts),
        preferred_element_type=jnp.float32,
        implementation=IMPLEMENTATION,
    )
