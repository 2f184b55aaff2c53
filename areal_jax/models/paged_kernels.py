"""Kernels of CUDA devices for a decode step over pages of KV, and the self-test that decides which is used.

As for packed rows (`models.attention_kernels`), none is trusted by its name. A kernel sees one query token a
slot; calls with more, float32 and exact numerics keep to the blocks of `models.attention.PagedAttention`:
cuDNN can mask a padded row but not one that begins at another position in each slot. Shapes: N slots, M
places in a slot's table, P pages, L layers, H query heads, K kv heads, h head dimension.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import lru_cache, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Array, Float, Int

from areal_jax.models.attention import KVPages, PagedKernel
from areal_jax.models.attention_kernels import BLOCKS, HALF_TOLERANCE, Choice
from areal_jax.models.config import ModelConfig

BLOCK = 64
"""Tokens of KV that the Triton kernel multiplies at once."""
SPLIT_TOKENS = 256
"""A slot's table is divided among programs of at least so many tokens each,"""
MOST_SPLITS = 16
"""and among so many at most. Both depend on the table's width alone, never on what lies in it."""


def pages(
    q: Float[Array, "N H h"],
    cache: KVPages,
    layer: Int[Array, ""],
    table: Int[Array, "N M"],
    lengths: Int[Array, " N"],
    interpret: bool = False,
) -> Float[Array, "N H h"]:
    """jax's Triton kernel, which reads pages where they lie: the whole pool is its operand, as it is.

    To it every kv head of a slot is a row of its own with a table of its own: (L, P, K, page, h) is read as
    one head's L * P * K * page/tile pages of a tile, so that neither a layer's pages nor a head's are copied.
    Scores and sums are float32; what a part of the table gives is rounded to bfloat16, and the sum of parts
    too, as the product that follows would.
    """
    from jax.experimental.pallas.ops.gpu.paged_attention import paged_attention

    slots, _, head_dim = q.shape
    _, count, kv_heads, size, _ = cache.k.shape
    tile = math.gcd(size, BLOCK)
    head = jnp.arange(kv_heads)[:, None]
    first = ((layer * count + table)[:, None] * kv_heads + head) * (size // tile)  # (N, K, M)
    tiles = (first[..., None] + jnp.arange(size // tile)).reshape(slots * kv_heads, -1)
    splits = min(MOST_SPLITS, -(-table.shape[1] * size // SPLIT_TOKENS))
    tiles = jnp.pad(tiles, ((0, 0), (0, -tiles.shape[1] % (splits * BLOCK // tile))))
    scales = [None if x is None else x.reshape(1, -1, tile) for x in (cache.k_scale, cache.v_scale)]
    held = (x.view(jnp.bfloat16) if x.dtype == jnp.uint16 else x for x in (cache.k, cache.v))  # on a CPU
    asked = (q * head_dim**-0.5).astype(jnp.bfloat16).reshape(slots * kv_heads, -1, head_dim)
    attend: Any = paged_attention
    out = attend(
        asked, *(x.reshape(1, -1, tile, head_dim) for x in held), tiles.astype(jnp.int32),
        jnp.repeat(lengths, kv_heads), *scales, k_splits=splits, pages_per_compute_block=BLOCK // tile,
        interpret=interpret,
    )  # fmt: skip
    return out.reshape(q.shape).astype(jnp.float32)


def cudnn(q: Array, cache: KVPages, layer: Array, table: Array, lengths: Array) -> Array:
    """cuDNN over each slot's pages gathered side by side: it reads and writes a slot's whole room a step."""
    slots, _, head_dim = q.shape
    room, kv_heads = table.shape[1] * cache.page_tokens, cache.k.shape[2]
    is_seen = (jnp.arange(room) < lengths[:, None])[..., None, None]

    def gathered(x: Array) -> Array:
        side_by_side = jnp.swapaxes(x, 2, 3).reshape(slots, room, kv_heads, head_dim)
        return jnp.where(is_seen, side_by_side.astype(jnp.bfloat16), 0)

    keys, values = map(gathered, cache.read(layer, table))
    out = jax.nn.dot_product_attention(
        q[:, None].astype(jnp.bfloat16),
        keys,
        values,
        key_value_seq_lengths=jnp.maximum(lengths, 1),
        implementation="cudnn",
    )
    return out[:, 0].astype(jnp.float32)


KERNELS: Mapping[str, PagedKernel] = {"pages": pages, "cudnn": cudnn}
"""In the order in which they are tried."""


def choose_for(
    config: ModelConfig, mesh: Mesh, kv_dtype: str, page_tokens: int, pages: int
) -> tuple[Choice, PagedKernel | None]:
    """What decodes a model on a host's mesh, and the kernel; None for blocks.

    `pages`: those of the pool. Heads that the tensor axis does not divide stay whole on every device.
    """
    if config.numerics == "exact":
        return _none("divides a slot's keys otherwise than the trainer does; trainer.numerics is exact"), None
    shards = mesh.shape["tensor"] if config.kv_heads % mesh.shape["tensor"] == 0 else 1
    heads, kv_heads = config.heads // shards, config.kv_heads // shards
    codes = config.layers * (pages + 1) * page_tokens * kv_heads * config.head_dim
    if kv_dtype == "int8" and 2**31 < codes <= 2**32:
        # Offsets are 32 bits wide up to 2**32 bytes, and signed: too few bits for so many int8.
        return _none(f"does not address {codes} codes; use fewer or more than 2 to 4 GiB of them"), None
    platform = mesh.devices.flat[0].platform
    choice = choose(platform, heads, kv_heads, config.head_dim, config.dtype, kv_dtype, page_tokens)
    if choice.path == BLOCKS or mesh.size == 1:
        return choice, KERNELS.get(choice.path)
    by_head = PartitionSpec(None, "tensor" if shards > 1 else None)
    of_cache = PartitionSpec(None, None, *by_head[1:])
    whole = PartitionSpec()
    attend = jax.shard_map(
        KERNELS[choice.path],
        mesh=mesh,
        in_specs=(by_head, of_cache, whole, whole, whole),
        out_specs=by_head,
        check_vma=False,
    )
    return choice, attend


def _none(reason: str) -> Choice:
    return Choice(BLOCKS, dict.fromkeys(KERNELS, reason))


@lru_cache
def choose(
    platform: str, heads: int, kv_heads: int, head_dim: int, dtype: str, kv_dtype: str, page_tokens: int
) -> Choice:
    """The first kernel that passes its self-test on this device, or blocks."""
    if platform not in ("gpu", "cuda"):
        return _none(f"is for CUDA; this is {platform}")
    if dtype != "bfloat16" or kv_dtype == "float32":
        return _none(f"reads bfloat16; model.dtype is {dtype}, KV pages are {kv_dtype}")
    rejected: dict[str, str] = {}
    for name, kernel in KERNELS.items():
        if (problem := self_test(kernel, heads, kv_heads, head_dim, kv_dtype, page_tokens)) is None:
            return Choice(name, rejected)
        rejected[name] = problem
    return Choice(BLOCKS, rejected)


def self_test(
    kernel: PagedKernel,
    heads: int,
    kv_heads: int,
    head_dim: int,
    kv_dtype: str,
    page_tokens: int,
    length: int = 1024,
) -> str | None:
    """What is wrong with the kernel here; None where it may be used.

    Slots of ragged lengths, two of which share pages and one of which is empty, in the second of two layers,
    against a softmax in float32; what is not theirs in the pool has keys that are no numbers and very large
    values. Not one bit of a slot may move with its neighbours' queries, tables, lengths and pages.
    """
    first, second, want = _trials(heads, kv_heads, head_dim, kv_dtype, page_tokens, -(-length // page_tokens))
    run = jax.jit(kernel)
    try:
        got, again = (np.asarray(run(*trial)) for trial in (first, second))
    except Exception as error:  # noqa: BLE001 - a kernel that cannot run here fails in ways of its own
        return f"{type(error).__name__}: {str(error).strip().splitlines()[0][:200] if str(error) else ''}"
    is_used = np.asarray(first.lengths) > 0
    one, want = got[is_used], np.asarray(want)[is_used]
    if not np.isfinite(one).all():
        return "it reads keys beyond a slot's length, or of pages that are not the slot's"
    gap = float((np.abs(one - want).max((1, 2)) / np.abs(want).max((1, 2))).max())
    if not gap <= HALF_TOLERANCE:
        return f"its output differs from float32 by {gap:.2g} of a slot's largest, over {HALF_TOLERANCE:g}"
    if got[WATCHED].tobytes() != again[WATCHED].tobytes():
        return "one slot's output moves with its neighbours' content or length"
    return None


WATCHED, SHARING, TRIED_SLOTS = 2, 3, 7
"""The slot whose bits may not move, the one that shares its pages, and how many there are."""
LARGE = 1e30


class _Trial(NamedTuple):
    """What a kernel is called with."""

    q: Array
    cache: KVPages
    layer: Array
    table: Array
    lengths: Array


@partial(jax.jit, static_argnums=range(6))
def _trials(
    heads: int, kv_heads: int, head_dim: int, kv_dtype: str, page_tokens: int, places: int
) -> tuple[_Trial, _Trial, Array]:
    """Two that differ in all but the watched slot, and what the first should give."""
    room, shared = places * page_tokens, max(1, places // 2)
    is_watched = np.arange(TRIED_SLOTS) == WATCHED
    own = 1 + np.random.default_rng(0).permutation(TRIED_SLOTS * places).reshape(TRIED_SLOTS, places)
    table, elsewhere = own.copy(), np.roll(own, 1, axis=1)
    elsewhere[WATCHED] = own[WATCHED]
    table[SHARING, :shared] = own[WATCHED, :shared]
    lengths = np.array([5, room, room // 2 + 3, shared * page_tokens, 0, room - 1, 1], np.int32)
    shorter = np.where(is_watched, lengths, np.roll(lengths, 2) // 4)
    keys = jax.random.split(jax.random.key(0), 3)
    q = jax.random.normal(keys[0], (TRIED_SLOTS, heads, head_dim))

    def filled(key: Array, cache: KVPages, table: np.ndarray, lengths: np.ndarray) -> KVPages:
        """Random tokens in the second layer, as many of each slot's pages as its length; others in page 0."""
        at = np.broadcast_to(np.arange(room), (TRIED_SLOTS, room))
        page = np.where(at < lengths[:, None], np.repeat(table, page_tokens, axis=1), 0)
        k, v = jax.random.normal(key, (2, *page.shape, kv_heads, head_dim))
        return cache.written(1, jnp.asarray(page), jnp.asarray(at % page_tokens), k, v)

    def littered(cache: KVPages, pages: int) -> KVPages:
        """Nothing that may be read in the first pages, in either layer."""
        page, place = np.mgrid[:pages, :page_tokens]
        k, v = (jnp.full((*page.shape, kv_heads, head_dim), x) for x in (jnp.nan, LARGE))
        for layer in range(2):
            cache = cache.written(layer, jnp.asarray(page), jnp.asarray(place), k, v)
        return cache

    pool = KVPages.zeros(2, TRIED_SLOTS * places, page_tokens, kv_heads, head_dim, kv_dtype)
    cache = filled(keys[1], littered(pool, TRIED_SLOTS * places + 1), table, lengths)
    moved = filled(keys[2], cache, own, np.where(is_watched, 0, room))
    layer = jnp.int32(1)
    first = _Trial(q, littered(cache, 1), layer, jnp.asarray(table, jnp.int32), jnp.asarray(lengths))
    others = jnp.where(is_watched[:, None, None], q, -3 * q)
    second = _Trial(others, moved, layer, jnp.asarray(elsewhere, jnp.int32), jnp.asarray(shorter))
    return first, second, softmax_over(*first)


def softmax_over(q: Array, cache: KVPages, layer: Array, table: Array, lengths: Array) -> Array:
    """What kernels are measured by: softmax in float32 over all of a slot's room at once (Vaswani et al.)."""
    slots, _, head_dim = q.shape
    keys, values = (
        jnp.moveaxis(x.astype(jnp.float32), 1, 2).reshape(slots, x.shape[2], -1, head_dim)
        for x in cache.read(layer, table)
    )  # (N, K, M * page, h)
    grouped = q.reshape(slots, keys.shape[1], -1, head_dim)
    scores = jnp.einsum("nkrh,nkth->nkrt", grouped, keys, precision="highest") * head_dim**-0.5
    is_seen = jnp.arange(keys.shape[2]) < lengths[:, None, None, None]
    weights = jax.nn.softmax(scores, where=is_seen, axis=-1)
    return jnp.einsum("nkrt,nkth->nkrh", weights, values, precision="highest").reshape(q.shape)
