"""Triton kernels for a mixture's experts, written in Pallas: their products, both gradients, tokens' sums.

The rows are sorted by expert (`models.experts`). A GPU program computes a tile of the result: of some rows of
one expert, or of one expert's matrix. It reads and writes that expert's rows alone, so nothing is padded, and
each element of a result is summed by one program in a fixed order. This module imports Pallas, which takes a
third of a second: `models.kernels.expert_products` imports it when a kernel is called. Shapes: M rows, E
experts, I inputs and O outputs of a matrix.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array, Float, Int

from areal_jax.models.experts import Blocks

LEAST_ROWS, MOST_ROWS = 16, 128
"""Rows of a tile: tensor cores multiply at least 16 at once."""
COLUMNS = 128
"""Columns of a tile."""
DEPTH = 64
"""Products that a program adds to each element at once."""


def rows_times_matrices(
    x: Float[Array, "M I"],
    matrices: Float[Array, "E I O"],
    starts: Int[Array, " E+1"],
    axis: int,
    dtype: Any,
    *,
    interpret: bool = False,
) -> Float[Array, "M O"]:
    """Returns each row of `x` times the matrix of its expert, summed in float32, in `dtype`.

    `axis`: of a matrix, over which the products are summed; 0, or 1 for the transposed matrix. Expert e has
    the rows from `starts[e]` up to, but without, `starts[e + 1]`; rows of no expert are undefined.
    `interpret`: run as JAX code on any device.
    """
    (count, depth), (experts, width) = x.shape, (len(matrices), matrices.shape[2 - axis])
    rows = min(MOST_ROWS, max(LEAST_ROWS, pl.next_power_of_2(pl.cdiv(count, experts))))
    blocks = Blocks.of(starts, rows, count)
    is_used = jnp.arange(len(blocks.expert)) < blocks.count
    sizes = jnp.where(is_used, jnp.minimum(starts[blocks.expert + 1] - blocks.first, rows), 0)
    return pl.pallas_call(
        partial(_rows_program, rows=rows, depth=depth, axis=axis),
        out_shape=jax.ShapeDtypeStruct((count, width), dtype),
        grid=(pl.cdiv(width, COLUMNS), len(sizes)),
        compiler_params=plgpu.CompilerParams(num_warps=8 if rows == MOST_ROWS else 4, num_stages=3),
        name="expert_products",
        interpret=interpret,
    )(x, matrices, *(part.astype(jnp.int32) for part in (blocks.expert, blocks.first, sizes)))


def _rows_program(
    x_ref: Any,  # (M, I)
    matrices_ref: Any,  # (E, I, O)
    expert_ref: Any,  # (blocks,)
    first_ref: Any,
    size_ref: Any,
    out_ref: Any,  # (M, O)
    *,
    rows: int,
    depth: int,
    axis: int,
) -> None:
    """One GPU program: COLUMNS columns of the result's rows of one block, which has at most `rows`."""
    tile, block = pl.program_id(0), pl.program_id(1)
    expert, first, size = expert_ref[block], first_ref[block], size_ref[block]
    row, column = jnp.arange(rows), tile * COLUMNS + jnp.arange(COLUMNS)
    is_row, is_column = row < size, column < out_ref.shape[1]

    def add(step: Array, total: Array) -> Array:
        at = step * DEPTH + jnp.arange(DEPTH)
        is_there = at < depth
        left = _load(x_ref, (first + row[:, None], at[None]), is_row[:, None] & is_there)
        if axis == 0:
            place = expert, at[:, None], column[None]
            return total + plgpu.dot(left, _load(matrices_ref, place, is_there[:, None] & is_column))
        place = expert, column[:, None], at[None]
        return total + plgpu.dot(left, _load(matrices_ref, place, is_column[:, None] & is_there).T)

    steps = jnp.where(size > 0, jnp.int32(pl.cdiv(depth, DEPTH)), jnp.int32(0))  # int32, as Triton needs
    total = lax.fori_loop(0, steps, add, jnp.zeros((rows, COLUMNS), jnp.float32))
    place = out_ref.at[first + row[:, None], column[None]]
    plgpu.store(place, total.astype(out_ref.dtype), mask=is_row[:, None] & is_column)


def rows_times_rows(
    x: Float[Array, "M I"],
    slope: Float[Array, "M O"],
    starts: Int[Array, " E+1"],
    *,
    interpret: bool = False,
) -> Float[Array, "E I O"]:
    """Returns for each expert the sum over its rows of the outer products of `x` and `slope`, in float32.

    `starts`, `interpret`: as for `rows_times_matrices`. An expert without rows gets 0.
    """
    experts, inputs, outputs = len(starts) - 1, x.shape[1], slope.shape[1]
    return pl.pallas_call(
        _matrices_program,
        out_shape=jax.ShapeDtypeStruct((experts, inputs, outputs), jnp.float32),
        grid=(pl.cdiv(outputs, COLUMNS), pl.cdiv(inputs, COLUMNS), experts),
        compiler_params=plgpu.CompilerParams(num_warps=8, num_stages=3),
        name="expert_gradients",
        interpret=interpret,
    )(x, slope, starts.astype(jnp.int32))


def _matrices_program(
    x_ref: Any,  # (M, I)
    slope_ref: Any,  # (M, O)
    starts_ref: Any,  # (E + 1,)
    out_ref: Any,  # (E, I, O)
) -> None:
    """One GPU program: a tile of COLUMNS x COLUMNS of one expert's gradient."""
    right, left, expert = (pl.program_id(axis) for axis in range(3))
    start, end = starts_ref[expert], starts_ref[expert + 1]
    row, column = left * COLUMNS + jnp.arange(COLUMNS), right * COLUMNS + jnp.arange(COLUMNS)
    is_row, is_column = row < x_ref.shape[1], column < slope_ref.shape[1]

    def add(step: Array, total: Array) -> Array:
        at = start + step * DEPTH + jnp.arange(DEPTH)
        is_own = (at < end)[:, None]
        x = _load(x_ref, (at[:, None], row[None]), is_own & is_row)
        return total + plgpu.dot(x.T, _load(slope_ref, (at[:, None], column[None]), is_own & is_column))

    steps = lax.div(end - start + DEPTH - 1, DEPTH)
    total = lax.fori_loop(0, steps, add, jnp.zeros((COLUMNS, COLUMNS), jnp.float32))
    plgpu.store(out_ref.at[expert, row[:, None], column[None]], total, mask=is_row[:, None] & is_column)


def sums_of_rows(
    y: Float[Array, "M D"], place: Int[Array, "n k"], *, interpret: bool = False
) -> Float[Array, "n D"]:
    """Returns for each token the sum of the rows of `y` at its places, added in order in float32.

    A place of -1 counts 0, and reads nothing. `interpret`: as for `rows_times_matrices`.
    """
    tokens, width = len(place), y.shape[1]
    return pl.pallas_call(
        partial(_sums_program, each=place.shape[1]),
        out_shape=jax.ShapeDtypeStruct((tokens, width), jnp.float32),
        grid=(pl.cdiv(width, COLUMNS), pl.cdiv(tokens, LEAST_ROWS)),
        compiler_params=plgpu.CompilerParams(num_warps=4, num_stages=2),
        name="expert_sums",
        interpret=interpret,
    )(y, place.astype(jnp.int32))


def _sums_program(
    y_ref: Any,  # (M, D)
    place_ref: Any,  # (n, k)
    out_ref: Any,  # (n, D)
    *,
    each: int,
) -> None:
    """One GPU program: COLUMNS columns of LEAST_ROWS tokens."""
    tile, block = pl.program_id(0), pl.program_id(1)
    token, column = block * LEAST_ROWS + jnp.arange(LEAST_ROWS), tile * COLUMNS + jnp.arange(COLUMNS)
    is_token, is_column = token < out_ref.shape[0], column < out_ref.shape[1]
    total = jnp.zeros((LEAST_ROWS, COLUMNS), jnp.float32)
    for number in range(each):
        place = plgpu.load(place_ref.at[token, number], mask=is_token, other=-1)
        row = _load(y_ref, (place[:, None], column[None]), (place >= 0)[:, None] & is_column)
        total += row.astype(jnp.float32)
    plgpu.store(out_ref.at[token[:, None], column[None]], total, mask=is_token[:, None] & is_column)


def _load(ref: Any, place: tuple[Any, ...], is_read: Array) -> Array:
    """Returns the elements at `place`; 0 where `is_read` is False."""
    return plgpu.load(ref.at[place], mask=is_read, other=0)
