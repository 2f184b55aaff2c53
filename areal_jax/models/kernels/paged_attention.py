"""CUDA kernels for a decode step over pages of KV, and the self-test that decides which of them is used.

As for packed rows (`models.kernels.packed_attention`), no kernel is trusted untested. A kernel computes one
query token per slot (the place of one sample). Calls with more tokens per slot, float32 and exact numerics
use JAX code instead (`models.attention`, `models.exact`). Shapes: N slots, M entries of a slot's page table,
P pages, L layers, H query heads, K kv heads, h head dimension.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import lru_cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Array, Float, Int

from areal_jax.models.config import ModelConfig
from areal_jax.models.kernels.packed_attention import (
    BLOCKS,
    HALF_TOLERANCE,
    Choice,
    abstract_on,
    compiled_trial,
    first_passing,
)
from areal_jax.models.kernels.trials import Trial, failure, tried_apart
from areal_jax.models.kv_pages import KVPages, PagedKernel
from areal_jax.parallel.mesh import absent_device, platform_of

BLOCK = 64
"""Tokens of KV that the Triton kernel multiplies at once."""
SPLIT_TOKENS = 256
"""A slot's tokens are split over several GPU programs; each one gets at least this many."""
MOST_SPLITS = 16
"""Maximum number of programs per slot. Their number depends only on the page table's width."""


def pages(
    q: Float[Array, "N H h"],
    cache: KVPages,
    layer: Int[Array, ""],
    table: Int[Array, "N M"],
    lengths: Int[Array, " N"],
) -> Float[Array, "N H h"]:
    """Returns attention by jax's Triton kernel, which reads the pages in place, without a copy.

    `table` has the page numbers of each slot, `lengths` its number of tokens. To the kernel every kv head of
    a slot is a row with its own page table, and the pages of all layers and heads are a list of small pages,
    each of one head and at most BLOCK tokens. Scores and sums are float32; the outputs of a slot's parts
    (splits) and their sum are rounded to bfloat16, as the matrix product after attention would round them.
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
    )  # fmt: skip
    return out.reshape(q.shape).astype(jnp.float32)


def cudnn(q: Array, cache: KVPages, layer: Array, table: Array, lengths: Array) -> Array:
    """Returns attention by cuDNN; each call first copies the pages of every slot into a contiguous array."""
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
"""The kernels, in the order in which `choose` tries them."""


def choose_for(
    config: ModelConfig, mesh: Mesh, kv_dtype: str, page_tokens: int, pages: int
) -> tuple[Choice, PagedKernel | None]:
    """Returns the attention path for a model on a generator's mesh, and its kernel (BLOCKS, JAX code: None).

    `pages`: number of pages in the pool. Heads are split over the devices if the mesh's tensor axis divides
    the number of kv heads; else every device computes all heads.
    """
    if config.numerics == "exact":
        return _none(
            "splits a slot's keys differently from the trainer, but trainer.numerics=exact "
            "requires the trainer's order"
        ), None
    shards = mesh.shape["tensor"] if config.kv_heads % mesh.shape["tensor"] == 0 else 1
    heads, kv_heads = config.heads // shards, config.kv_heads // shards
    codes = config.layers * (pages + 1) * page_tokens * kv_heads * config.head_dim
    if kv_dtype == "int8" and 2**31 < codes <= 2**32:
        # Up to 2**32 bytes the kernel's offsets are signed 32-bit numbers: too few for so many codes.
        return _none(
            f"cannot address {codes} int8 key values per device; change generation.kv_tokens, so that there "
            "are at most 2**31 or more than 2**32 of them"
        ), None
    platform = platform_of(mesh)
    choice = choose(
        platform, heads, kv_heads, config.head_dim, config.dtype, kv_dtype=kv_dtype, page_tokens=page_tokens,
        absent=absent_device(mesh),
    )  # fmt: skip
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
    platform: str,
    heads: int,
    kv_heads: int,
    head_dim: int,
    dtype: str,
    *,
    kv_dtype: str,
    page_tokens: int,
    absent: Any | None = None,
) -> Choice:
    """Returns the choice of the first kernel that passes `self_test`, or BLOCKS (JAX code) if none does.

    Each self-test runs in a process of its own. Off GPUs, if `dtype` is not bfloat16, or if `kv_dtype` is
    float32, the choice is BLOCKS without a test. `absent`: a device of `platform` that is not there; the
    choice is then the first kernel that compiles for this device.
    """
    if platform not in ("gpu", "cuda"):
        return _none(f"needs CUDA; this device is {platform}")
    if dtype != "bfloat16" or kv_dtype == "float32":
        return _none(
            f"needs model.dtype=bfloat16 (it is {dtype}) and bfloat16 or int8 KV pages (they are {kv_dtype})"
        )
    if absent is not None:
        q, layer, table, lengths = abstract_on(
            absent, ((4, heads, head_dim), "float32"), ((), "int32"), ((4, 4), "int32"), ((4,), "int32")
        )
        sizes = (2, 16, page_tokens, kv_heads, head_dim, kv_dtype)
        pool = jax.eval_shape(lambda: KVPages.zeros(*sizes, platform=platform))
        cache = jax.tree.map(lambda leaf: abstract_on(absent, (leaf.shape, leaf.dtype))[0], pool)
        arguments = (q, cache, layer, table, lengths)
        return first_passing(KERNELS, lambda kernel: compiled_trial(kernel, *arguments))
    pages: dict[str, Any] = {"kv_dtype": kv_dtype, "page_tokens": page_tokens}
    return first_passing(
        KERNELS, lambda each: tried_apart(self_test, each, heads, kv_heads, head_dim, **pages)
    )


def self_test(
    kernel: PagedKernel,
    heads: int,
    kv_heads: int,
    head_dim: int,
    *,
    kv_dtype: str,
    page_tokens: int,
    length: int = 1024,
) -> Trial:
    """Tests a kernel on this device.

    The test slots have different lengths; two share pages and one is empty. Their output, from the second of
    two layers, is compared with a softmax in float32. The rest of the pool has NaN keys and very large
    values, which must not be read. Changing the other slots' queries, tables, lengths and pages must not
    change a bit of a slot's output.
    """
    places = -(-length // page_tokens)
    litter = jnp.array([jnp.nan, LARGE])  # an argument: XLA would take seconds to fold constant pages
    first, second, want = _trials(heads, kv_heads, head_dim, kv_dtype, page_tokens, places, litter=litter)
    run = jax.jit(kernel)
    try:
        got, again = (np.asarray(run(*trial)) for trial in (first, second))
    except Exception as error:  # noqa: BLE001 - a kernel that cannot run here may raise anything
        return Trial(failure(error))
    is_used = np.asarray(first[-1]) > 0
    one, want = got[is_used], np.asarray(want)[is_used]
    if not np.isfinite(one).all():
        return Trial("it reads keys beyond a slot's length or from another slot's pages")
    gap = float((np.abs(one - want).max((1, 2)) / np.abs(want).max((1, 2))).max())
    if not gap <= HALF_TOLERANCE:
        return Trial(
            f"its output differs from float32 by {gap:.2g} of a slot's largest value, more than "
            f"the tolerance {HALF_TOLERANCE:g}",
            gap,
        )
    if got[WATCHED].tobytes() != again[WATCHED].tobytes():
        return Trial("one slot's output depends on its neighbours' content or length", gap)
    return Trial(None, gap)


WATCHED, SHARING, TRIED_SLOTS = 2, 3, 7
"""Index of the slot in which no bit may change, index of the slot that shares its pages, number of slots."""
LARGE = 1e30


@partial(jax.jit, static_argnums=range(6))
def _trials(
    heads: int, kv_heads: int, head_dim: int, kv_dtype: str, page_tokens: int, places: int, *, litter: Array
) -> tuple[tuple, tuple, Array]:
    """Returns two trials that are equal only in the slot WATCHED, and the expected output of the first.

    A trial is a kernel's arguments (q, cache, layer, table, lengths); `places`: entries of a slot's table;
    `litter`: the key and the value in pages that must not be read.
    """
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
        """Returns the cache with random tokens in layer 1; those beyond a slot's length go to page 0."""
        at = np.broadcast_to(np.arange(room), (TRIED_SLOTS, room))
        page = np.where(at < lengths[:, None], np.repeat(table, page_tokens, axis=1), 0)
        k, v = jax.random.normal(key, (2, *page.shape, kv_heads, head_dim))
        return cache.written(1, jnp.asarray(page), jnp.asarray(at % page_tokens), k, v)

    def littered(cache: KVPages, pages: int) -> KVPages:
        """Returns the cache with NaN keys and large values in pages 0 to `pages` - 1."""
        page, place = np.mgrid[:pages, :page_tokens]
        k, v = (jnp.broadcast_to(x, (*page.shape, kv_heads, head_dim)) for x in litter)
        for layer in range(2):
            cache = cache.written(layer, jnp.asarray(page), jnp.asarray(place), k, v)
        return cache

    pool = KVPages.zeros(2, TRIED_SLOTS * places, page_tokens, kv_heads, head_dim, kv_dtype)
    cache = filled(keys[1], littered(pool, TRIED_SLOTS * places + 1), table, lengths)
    moved = filled(keys[2], cache, own, np.where(is_watched, 0, room))
    layer = jnp.int32(1)
    first = q, littered(cache, 1), layer, jnp.asarray(table, jnp.int32), jnp.asarray(lengths)
    others = jnp.where(is_watched[:, None, None], q, -3 * q)
    second = others, moved, layer, jnp.asarray(elsewhere, jnp.int32), jnp.asarray(shorter)
    return first, second, softmax_over(*first)


def softmax_over(q: Array, cache: KVPages, layer: Array, table: Array, lengths: Array) -> Array:
    """Returns the correct result, to test kernels: a float32 softmax over all pages of a slot at once."""
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
