"""The choice of the attention kernel over pages of KV for GPUs, and the self-test that decides it.

As for packed rows (`models.kernels.packed_attention`), no kernel is trusted untested. Float32 and exact
numerics use JAX code instead (`models.attention`, `models.exact`). Shapes: N slots (the places of samples), C
query tokens per slot, M entries of a slot's page table, H query heads, K kv heads, h head dimension.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Array

from areal_jax.models.config import ModelConfig
from areal_jax.models.kernels.packed_attention import (
    BLOCKS,
    HALF_TOLERANCE,
    KernelChoice,
    abstract_on,
    compiled_trial,
    first_passing,
)
from areal_jax.models.kernels.trials import Trial, failure, tried_apart
from areal_jax.models.kv_pages import KVPages, PagedKernel
from areal_jax.parallel.mesh import absent_device, platform_of


def pages(q: Array, cache: KVPages, layer: Array, table: Array, lengths: Array) -> Array:
    """Returns attention by the Triton kernel of `models.kernels.paged_triton`."""
    from areal_jax.models.kernels.paged_triton import attend

    return attend(q, cache, layer, table, lengths)


KERNELS: Mapping[str, PagedKernel] = {"pages": pages}
"""The kernels, in the order in which `choose` tries them."""


def choose_for(
    config: ModelConfig, mesh: Mesh, kv_dtype: str, page_tokens: int
) -> tuple[KernelChoice, PagedKernel | None]:
    """Returns the attention path for a model on a generator's mesh, and its kernel (BLOCKS, JAX code: None).

    Heads are split over the devices if the mesh's tensor axis divides the number of kv heads; else every
    device computes all heads.
    """
    if config.numerics == "exact":
        return _none(
            "splits a slot's keys differently from the trainer, but trainer.numerics=exact "
            "requires the trainer's order"
        ), None
    shards = mesh.shape["tensor"] if config.kv_heads % mesh.shape["tensor"] == 0 else 1
    heads, kv_heads = config.heads // shards, config.kv_heads // shards
    platform = platform_of(mesh)
    choice = choose(
        platform, heads, kv_heads, config.head_dim, config.dtype, kv_dtype=kv_dtype, page_tokens=page_tokens,
        absent=absent_device(mesh),
    )  # fmt: skip
    if choice.path == BLOCKS or mesh.size == 1:
        return choice, KERNELS.get(choice.path)
    by_head = PartitionSpec(None, None, "tensor" if shards > 1 else None)  # of queries and of pages
    whole = PartitionSpec()
    attend = jax.shard_map(
        KERNELS[choice.path],
        mesh=mesh,
        in_specs=(by_head, by_head, whole, whole, whole),
        out_specs=by_head,
        check_vma=False,
    )
    return choice, attend


def _none(reason: str) -> KernelChoice:
    return KernelChoice(BLOCKS, dict.fromkeys(KERNELS, reason))


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
) -> KernelChoice:
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
        pool = jax.eval_shape(
            lambda: KVPages.zeros(2, 16, page_tokens, kv_heads, head_dim, kv_dtype, platform=platform)
        )
        cache = jax.tree.map(lambda leaf: abstract_on(absent, (leaf.shape, leaf.dtype))[0], pool)
        layer, table = abstract_on(absent, ((), "int32"), ((4, 4), "int32"))
        calls = [
            abstract_on(absent, ((4, tokens, heads, head_dim), "float32"), ((4, tokens), "int32"))
            for tokens in TRIED_TOKENS
        ]
        arguments = [(q, cache, layer, table, lengths) for q, lengths in calls]

        def compiled(kernel: PagedKernel) -> Trial:
            return compiled_trial(lambda calls: [kernel(*call) for call in calls], arguments)

        return first_passing(KERNELS, compiled)
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
    """Tests a kernel on this device, with one query token per slot and with several (TRIED_TOKENS).

    The test slots have different lengths, and queries of several tokens begin at different positions and end
    in padding; two slots share pages and one is empty. Their output, from the second of two layers, is
    compared with a softmax in float32. The rest of the pool has NaN keys and very large values, which must
    not be read. Changing the other slots' queries, tables, lengths and pages must not change a bit of a
    slot's output.
    """
    places = -(-length // page_tokens)
    litter = jnp.array([jnp.nan, LARGE])  # an argument: XLA would take seconds to fold constant pages
    trials = _trials(heads, kv_heads, head_dim, kv_dtype, page_tokens, places, litter=litter)
    found = [_trial(kernel, *each) for each in trials]
    problems = [
        f"with {tokens} query token{'s' * (tokens > 1)} per slot: {one.problem}"
        for tokens, one in zip(TRIED_TOKENS, found, strict=True)
        if one.problem is not None
    ]
    gaps = [one.gap for one in found if one.gap is not None]
    return Trial(problems[0] if problems else None, max(gaps, default=None))


def _trial(kernel: PagedKernel, first: tuple, second: tuple, want: Array) -> Trial:
    """Returns the result of one of the `_trials`."""
    run = jax.jit(kernel)
    try:
        got, again = (np.asarray(run(*arguments)) for arguments in (first, second))
    except Exception as error:  # noqa: BLE001 - a kernel that cannot run here may raise anything
        return Trial(failure(error))
    is_token = np.asarray(first[-1]) > 0
    one, wanted = got[is_token], np.asarray(want)[is_token]
    if not np.isfinite(one).all():
        return Trial("it reads keys beyond a token's position or from another slot's pages")
    gap = float((np.abs(one - wanted).max((1, 2)) / np.abs(wanted).max((1, 2))).max())
    if not gap <= HALF_TOLERANCE:
        return Trial(
            f"its output differs from float32 by {gap:.2g} of a token's largest value, more than "
            f"the tolerance {HALF_TOLERANCE:g}",
            gap,
        )
    if got[WATCHED][is_token[WATCHED]].tobytes() != again[WATCHED][is_token[WATCHED]].tobytes():
        return Trial("one slot's output depends on its neighbours' content or length", gap)
    return Trial(None, gap)


WATCHED, SHARING, TRIED_SLOTS = 2, 3, 7
"""Index of the slot in which no bit may change, index of the slot that shares its pages, number of slots."""
TRIED_TOKENS = 1, 37
"""Numbers of query tokens per slot in the self-test: that of a decode step, and that of a small chunk."""
LARGE = 1e30


@partial(jax.jit, static_argnums=range(6))
def _trials(
    heads: int, kv_heads: int, head_dim: int, kv_dtype: str, page_tokens: int, places: int, *, litter: Array
) -> list[tuple[tuple, tuple, Array]]:
    """Returns two calls for each of TRIED_TOKENS, and the correct result of the first.

    The two are equal only in the slot WATCHED. A call is a kernel's arguments (q, cache, layer, table,
    lengths); `places`: entries of a slot's table; `litter`: the key and the value in pages that must not be
    read.
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
    layer, cache = jnp.int32(1), littered(cache, 1)

    def seen(lengths: np.ndarray, tokens: int) -> Array:
        """Returns (N, tokens): the tokens that each query sees; some slots end in padding."""
        padding = np.minimum(np.arange(TRIED_SLOTS), tokens - 1)
        at = np.maximum(lengths - tokens + padding, 0)[:, None] + np.arange(tokens)
        return jnp.asarray(np.where(at < lengths[:, None], at + 1, 0), jnp.int32)

    def trial(tokens: int) -> tuple[tuple, tuple, Array]:
        q = jax.random.normal(keys[0], (TRIED_SLOTS, tokens, heads, head_dim))
        first = q, cache, layer, jnp.asarray(table, jnp.int32), seen(lengths, tokens)
        others = jnp.where(is_watched[:, None, None, None], q, -3 * q)
        second = others, moved, layer, jnp.asarray(elsewhere, jnp.int32), seen(shorter, tokens)
        return first, second, softmax_over(*first)

    return [trial(tokens) for tokens in TRIED_TOKENS]


def softmax_over(q: Array, cache: KVPages, layer: Array, table: Array, lengths: Array) -> Array:
    """Returns the correct result, to test kernels: a float32 softmax over all pages of a slot at once."""
    slots, tokens, _, head_dim = q.shape
    keys, values = (
        jnp.moveaxis(x.astype(jnp.float32), 1, 2).reshape(slots, x.shape[2], -1, head_dim)
        for x in cache.read(layer, table)
    )  # (N, K, M * page, h)
    grouped = q.reshape(slots, tokens, keys.shape[1], -1, head_dim)
    scores = jnp.einsum("nckrh,nkth->nkrct", grouped, keys, precision="highest") * head_dim**-0.5
    is_seen = jnp.arange(keys.shape[2]) < lengths[:, None, None, :, None]
    weights = jax.nn.softmax(scores, where=is_seen, axis=-1)
    return jnp.einsum("nkrct,nkth->nckrh", weights, values, precision="highest").reshape(q.shape)
