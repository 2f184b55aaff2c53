"""A Triton kernel for attention over pages of KV, written in Pallas: decode steps, prefill and recompute.

It reads the pages in place, without a copy. Shapes: N slots, C query tokens per slot, M entries of a slot's
page table, P pages, L layers, H query heads, K kv heads, R = H / K, h head dimension, S splits of the keys.
This module imports Pallas, which takes a third of a second: `models.kernels.paged_attention` imports it when
a kernel is called.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array, Float, Int

from areal_jax.models.kv_pages import KVPages

ROWS = 64
"""Maximum number of query rows of a GPU program; a row is one query head of one token."""
LEAST_ROWS = 16
"""The smallest number of rows that tensor cores multiply."""
BLOCK = 64
"""Keys that a GPU program reads at once."""
SPLIT_TOKENS = 256
"""With one query token, a slot's keys are split over several programs; each gets at least this many."""
MOST_SPLITS = 16
"""Maximum number of programs over which a slot's keys are split."""
NEGATIVE = -1e30
"""Largest score of a row without keys; finite, so that the difference of two of them is 0."""

Carry = tuple[Array, Array, list[Array]]
"""Of rows: the largest score so far, the sum of the weights, and the output in parts of columns, unscaled."""


def attend(
    q: Float[Array, "N C H h"],
    cache: KVPages,
    layer: Int[Array, ""],
    table: Int[Array, "N M"],
    lengths: Int[Array, "N C"],
    *,
    interpret: bool = False,
) -> Float[Array, "N C H h"]:
    """Returns the attention of a `PagedKernel`; a query of length 0 gets 0.

    The softmax is computed online, block by block (Dao, FlashAttention-2, https://arxiv.org/abs/2307.08691).
    With one token per slot, the keys are split over programs whose results are joined by their log-sum-exp;
    the number of splits depends only on the width of the table. With more tokens, each program computes ROWS
    query rows over all their keys. Products read bfloat16 (float32 if the pages are float32), sums are
    float32, and the outputs of splits are rounded to the dtype of the products. `interpret`: run as JAX code
    on any device.
    """
    slots, tokens, heads, head_dim = q.shape
    kv_heads, room = cache.k.shape[2], table.shape[1] * cache.page_tokens
    group = heads // kv_heads
    rows = min(ROWS, max(LEAST_ROWS, pl.next_power_of_2(tokens * group)))
    splits = min(MOST_SPLITS, pl.cdiv(room, SPLIT_TOKENS)) if tokens == 1 else 1
    dtype = jnp.float32 if cache.k.dtype == jnp.float32 else jnp.bfloat16
    shape = (splits, slots, tokens, kv_heads, group, head_dim)
    out, logsumexp = pl.pallas_call(
        partial(_program, rows=rows, keys=pl.cdiv(room, splits * BLOCK) * BLOCK),
        out_shape=[jax.ShapeDtypeStruct(shape, dtype), jax.ShapeDtypeStruct(shape[:-1], jnp.float32)],
        grid=(pl.cdiv(tokens * group, rows), splits, kv_heads, slots),
        compiler_params=plgpu.CompilerParams(num_warps=4, num_stages=2),
        name="paged_attention",
        interpret=interpret,
    )(
        q.astype(dtype).reshape(shape[1:]),
        _words(cache.k),
        _words(cache.v),
        table.astype(jnp.int32),
        lengths.astype(jnp.int32),
        jnp.asarray(layer, jnp.int32).reshape(1),
        *([] if cache.k_scale is None else [cache.k_scale, cache.v_scale]),
    )
    out = out.astype(jnp.float32)
    if splits > 1:
        out = (out * jax.nn.softmax(logsumexp, axis=0)[..., None]).sum(0)
    return out.reshape(q.shape)


def _words(held: Array) -> Array:
    """Returns the stored numbers as the kernel reads them: int8 codes in pairs, as int16 words.

    Up to 2**32 bytes Pallas computes offsets as signed 32-bit numbers of elements: too few for more than
    2**31 int8 codes, and enough for the words. Beyond, its offsets have 64 bits. XLA copies nothing here.
    """
    if held.dtype == jnp.uint16:  # on a CPU, the bits of bfloat16
        return held.view(jnp.bfloat16)
    if held.dtype != jnp.int8:
        return held
    return lax.bitcast_convert_type(held.reshape(*held.shape[:-1], -1, 2), jnp.int16)


def _program(
    q_ref: Any,  # (N, C, K, R, h)
    k_ref: Any,  # (L, P, K, page, h), or h / 2 words of int8 codes
    v_ref: Any,
    table_ref: Any,  # (N, M)
    lengths_ref: Any,  # (N, C)
    layer_ref: Any,  # (1,)
    *others: Any,  # scales of keys and values (L, P, K, page, 1) if int8; then the two results
    rows: int,
    keys: int,
) -> None:
    """One GPU program: `rows` query rows of a slot and kv head, over at most `keys` of the slot's keys.

    Writes the output (S, N, C, K, R, h) and the logarithm of the weights' sum (S, N, C, K, R). A row without
    keys gets output 0 and NEGATIVE.
    """
    *scale_refs, out_ref, logsumexp_ref = others
    tile, split, head, slot = (pl.program_id(axis) for axis in range(4))
    _, tokens, _, group, head_dim = q_ref.shape
    row = tile * rows + jnp.arange(rows)
    token, query_head = lax.div(row, group), lax.rem(row, group)
    is_row = token < tokens
    length = plgpu.load(lengths_ref.at[slot, token], mask=is_row, other=0)
    first = split * keys
    end = jnp.minimum(length.max(), first + keys)
    # An int8 word has the codes of columns 2 i and 2 i + 1, which are multiplied apart.
    width = k_ref.shape[-1]
    parts = head_dim // width
    columns = [(jnp.arange(width) * parts + part)[None] for part in range(parts)]
    at = [(slot, token[:, None], head, query_head[:, None], each) for each in columns]
    queries = [plgpu.load(q_ref.at[each], mask=is_row[:, None], other=0) for each in at]

    def visit(block: Array, carry: Carry) -> Carry:
        key = first + block * BLOCK + jnp.arange(BLOCK)
        is_read = key < end
        size = k_ref.shape[3]
        page = plgpu.load(table_ref.at[slot, lax.div(key, size)], mask=is_read, other=0)
        place = layer_ref[0], page, head, lax.rem(key, size)
        k, v = (_floats(_read(ref, place, is_read), queries[0].dtype) for ref in (k_ref, v_ref))
        scales = [plgpu.load(ref.at[*place, 0], mask=is_read, other=0)[None] for ref in scale_refs]
        return _online_softmax(carry, queries, k, v, scales, key[None] < length[:, None])

    start = (
        jnp.full(rows, NEGATIVE, jnp.float32),
        jnp.zeros(rows, jnp.float32),
        [jnp.zeros((rows, width), jnp.float32) for _ in columns],
    )
    blocks = lax.div(jnp.maximum(end - first, 0) + BLOCK - 1, BLOCK)
    largest, total, outs = lax.fori_loop(0, blocks, visit, start)
    total = jnp.where(total == 0, 1.0, total)  # NaN stays
    for each, out in zip(at, outs, strict=True):
        value = (out / total[:, None]).astype(out_ref.dtype)
        plgpu.store(out_ref.at[split, *each], value, mask=is_row[:, None])
    logsumexp = largest * math.log(2) + jnp.log(total)
    plgpu.store(logsumexp_ref.at[split, slot, token, head, query_head], logsumexp, mask=is_row)


def _read(ref: Any, place: tuple[Any, ...], is_read: Array) -> Array:
    """Returns the stored numbers (BLOCK, width) of a block of tokens; 0 where `is_read` (BLOCK,) is False."""
    layer, page, head, token = place
    at = layer, page[:, None], head, token[:, None], jnp.arange(ref.shape[-1])[None]
    return plgpu.load(ref.at[at], mask=is_read[:, None], other=0)


def _floats(held: Array, dtype: Any) -> list[Array]:
    """Returns stored numbers as `dtype`, in parts of columns: of int8 words the even and the odd columns."""
    if held.dtype != jnp.int16:
        return [held]
    eight = jnp.int16(8)
    codes = [lax.shift_right_arithmetic(x, eight) for x in (lax.shift_left(held, eight), held)]
    return [x.astype(jnp.float32).astype(dtype) for x in codes]


def _online_softmax(
    carry: Carry,
    queries: list[Array],
    keys: list[Array],
    values: list[Array],
    scales: list[Array],
    is_seen: Array,
) -> Carry:
    """Returns the carry after one more block of keys and values, given in parts of columns.

    `scales`: those of the keys and values of a block (1, BLOCK), or []. `is_seen`: (rows, BLOCK).
    """
    largest, total, outs = carry
    scores = sum(plgpu.dot(q, k.T) for q, k in zip(queries, keys, strict=True))
    if scales:
        scores *= scales[0]
    # In units of log 2: a GPU has an instruction for powers of 2.
    head_dim = sum(q.shape[1] for q in queries)
    scores = jnp.where(is_seen, scores * (head_dim**-0.5 * math.log2(math.e)), -jnp.inf)
    now = jnp.maximum(largest, scores.max(1))
    shrink, weights = jnp.exp2(largest - now), jnp.exp2(scores - now[:, None])
    total = total * shrink + weights.sum(1)
    if scales:
        weights *= scales[1]
    added = [plgpu.dot(weights.astype(v.dtype), v) for v in values]
    return now, total, [out * shrink[:, None] + more for out, more in zip(outs, added, strict=True)]
