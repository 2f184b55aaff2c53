"""The two forms of attention: blocks of queries, and pages of keys."""

from __future__ import annotations

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from areal_jax.models import attention
from areal_jax.models.attention import PackedAttention, PagedAttention
from areal_jax.models.kv_pages import KVPages


def arrays(seed: int, length: int) -> tuple[Any, Any, Any, Any]:
    rng = np.random.default_rng(seed)
    q = rng.normal(size=(2, length, 4, 6)).astype(np.float32)
    k, v = rng.normal(size=(2, 2, length, 2, 6)).astype(np.float32)
    segments = np.sort(rng.integers(1, 4, (2, length)), axis=1).astype(np.int32)
    segments[1, -3:] = 0
    return q, k, v, segments


def summed(
    q: Any, k: Any, v: Any, segments: Any, weights: Any, ends: Any = None
) -> tuple[jax.Array, jax.Array]:
    out, _ = PackedAttention(segments, ends)(jnp.int32(0), q, k, v, None)
    return (weights * out).sum(), out


def dense(q: Any, k: Any, v: Any, segments: Any, contexts: Any, weights: Any) -> list[np.ndarray]:
    """Output and slopes of sum(weights * output) in float64, a row and a head at a time.

    With P the softmax of the scores and G the slope of the output: dV = P'G, and the scores' slope is
    P * (G V' - rowsum(G * output)).
    """
    q, k, v, weights = (np.asarray(x, np.float64) for x in (q, k, v, weights))
    out, of_q, of_k, of_v = (np.zeros_like(x) for x in (q, q, k, v))
    for row, head in np.ndindex(q.shape[0], q.shape[2]):
        shared = (row, slice(None), head // (q.shape[2] // k.shape[2]))
        mine = (row, slice(None), head)
        ids, named = segments[row], contexts[row]
        same = ((ids[:, None] == ids) & (ids > 0)) | np.eye(len(ids), dtype=bool)
        same |= (named[:, None] == ids) & (named[:, None] > 0)
        scores = np.where(same & np.tri(len(ids), dtype=bool), q[mine] @ k[shared].T, -np.inf)
        weight = np.exp((scores - scores.max(1, keepdims=True)) / np.sqrt(q.shape[-1]))
        weight /= weight.sum(1, keepdims=True)
        out[mine] = weight @ v[shared]
        of_v[shared] += weight.T @ weights[mine]
        along = (weights[mine] * out[mine]).sum(1, keepdims=True)
        of_scores = weight * (weights[mine] @ v[shared].T - along) / np.sqrt(q.shape[-1])
        of_q[mine] = of_scores @ k[shared]
        of_k[shared] += of_scores.T @ q[mine]
    return [out, of_q, of_k, of_v]


def contexts_of(segments: np.ndarray) -> np.ndarray:
    """Segments from 2 on see segment 1 of their row besides their own."""
    return np.where(segments > 1, 1, 0).astype(np.int32)


def ends_of(segments: np.ndarray) -> np.ndarray:
    """The ends by which `PackedAttention` shows segment 1 to the segments from 2 on."""
    ends = np.zeros_like(segments)
    for row, ids in enumerate(segments):
        for segment in set(ids.tolist()) - {0}:
            seen_by = (ids > 0) if segment == 1 else ids == segment
            ends[row, ids == segment] = np.flatnonzero(seen_by)[-1] + 1
    return ends


@pytest.mark.parametrize("block", [pytest.param(4, marks=pytest.mark.slow), 8, 64])
@pytest.mark.parametrize("has_context", [False, True], ids=["alone", "with a context"])
def test_blocks_are_the_dense_reference(monkeypatch: pytest.MonkeyPatch, block: int, has_context: bool):
    """Values and slopes of a row whose length is no multiple of the block, and of one within a block."""
    monkeypatch.setattr(attention, "CPU_BLOCK", block)
    q, k, v, segments = arrays(0, 21)
    contexts = contexts_of(segments) if has_context else np.zeros_like(segments)
    weights = np.random.default_rng(1).normal(size=q.shape).astype(np.float32)
    both = jax.value_and_grad(summed, argnums=(0, 1, 2), has_aux=True)
    ends = ends_of(segments) if has_context else None
    (_, out), slopes = jax.jit(lambda *args: both(*args))(q, k, v, segments, weights, ends)
    for got, want in zip((out, *slopes), dense(q, k, v, segments, contexts, weights), strict=True):
        np.testing.assert_allclose(got, want, rtol=0, atol=1e-5)


def test_no_array_of_a_row_by_itself_exists(monkeypatch: pytest.MonkeyPatch):
    """The compiled program, forward and backward, holds scores of a pair of blocks and never of a row."""
    monkeypatch.setattr(attention, "CPU_BLOCK", 16)
    q, k, v, segments = arrays(0, 250)
    both = jax.jit(lambda *args: jax.value_and_grad(summed, argnums=(0, 1, 2), has_aux=True)(*args))
    text = both.lower(q, k, v, segments, q, ends_of(segments)).compile().as_text()
    shapes = [tuple(map(int, found.split(","))) for found in re.findall(r"\[([\d,]+)\]", text)]
    assert (2, 2, 2 * 16, 16) in shapes
    assert max(int(np.prod(shape)) for shape in shapes) < 250 * 250


def test_blocks_that_no_query_sees_are_not_computed(monkeypatch: pytest.MonkeyPatch):
    """Keys that are NaN in segment 1's own blocks reach no output of segment 2, nor its context's blocks'."""
    monkeypatch.setattr(attention, "CPU_BLOCK", 8)
    q, k, v, _ = arrays(0, 32)
    segments = np.repeat([[1, 2, 3, 3]] * 2, 8, axis=1).astype(np.int32)
    k[:, 8:16] = np.nan  # segment 2
    ends = ends_of(segments)
    out = np.asarray(jax.jit(lambda *args: summed(*args, 1.0, ends)[1])(q, k, v, segments))
    assert np.isnan(out[:, 8:16]).all()
    assert np.isfinite(np.delete(out, np.s_[8:16], axis=1)).all()


@pytest.mark.parametrize("has_context", [False, True], ids=["alone", "with a context"])
@pytest.mark.parametrize("block", [8, pytest.param(64, marks=pytest.mark.slow)])
def test_one_segment_never_moves_another(monkeypatch: pytest.MonkeyPatch, block: int, has_context: bool):
    """Change segment 2: not one bit of the others, nor of their slopes, within a block and across blocks."""
    monkeypatch.setattr(attention, "CPU_BLOCK", block)
    q, k, v, segments = arrays(2, 21)
    ends = ends_of(segments) if has_context else None
    mine = (segments == 2)[..., None, None]
    assert 0 < mine.sum() < mine.size
    moved = [np.where(mine, 3 - x, x) for x in (q, k, v)]
    others = (segments != 2) & (segments != 1)  # segment 1 is seen by 2, so its slopes move
    both = jax.jit(jax.value_and_grad(summed, argnums=(0, 1, 2), has_aux=True))
    (_, before), slopes_before = both(q, k, v, segments, 1.0, ends)
    (_, after), slopes_after = both(*moved, segments, 1.0, ends)
    for one, other in zip((before, *slopes_before), (after, *slopes_after), strict=True):
        assert np.asarray(one)[others].tobytes() == np.asarray(other)[others].tobytes()
    first = segments == 1
    assert np.asarray(before)[first].tobytes() == np.asarray(after)[first].tobytes()


KV_DTYPES = {"float32": 1e-6, "bfloat16": 2e-2, "int8": 5e-2}
"""Of pages, and how far attention over them may be from that over what was written."""

WRITTEN = jax.jit(KVPages.written)


def random_pages(rng: np.random.Generator, dtype: str, page_tokens: int) -> KVPages:
    """Two layers of eight pages, every token of them written."""
    cache = KVPages.zeros(2, 8, page_tokens, 2, 6, dtype)
    for layer in range(2):
        k, v = rng.normal(size=(2, 9, page_tokens, 2, 6)).astype(np.float32)
        page, place = np.mgrid[:9, :page_tokens]
        cache = WRITTEN(cache, layer, page, place, k, v)
    return cache


@pytest.mark.parametrize("dtype", KV_DTYPES)
@pytest.mark.parametrize(
    "page_tokens", [24, pytest.param(100, marks=pytest.mark.slow)]
)  # two pages a block, one
def test_blocks_beyond_a_slot_change_no_bit(dtype: str, page_tokens: int):
    """A neighbour with more tokens makes the loop visit more blocks: an exact no-op for this slot."""
    rng = np.random.default_rng(4)
    q, k, v = rng.normal(size=(3, 2, 1, 2, 6)).astype(np.float32)
    cache = random_pages(rng, dtype, page_tokens)
    table = jnp.arange(1, 9).reshape(2, 4)[:, :3]  # three pages, so that two a block do not divide them

    @jax.jit
    def first_slot(other_position: Any) -> jax.Array:
        positions = jnp.array([[2], [0]]).at[1, 0].set(other_position)
        attend = PagedAttention(table, positions, jnp.ones((2, 1), bool))
        return attend(jnp.int32(0), q, k, v, cache)[0][0]

    alone = np.asarray(first_slot(0))
    far = (page_tokens, 2 * page_tokens + 2, 3 * page_tokens - 1)
    assert all(np.asarray(first_slot(at)).tobytes() == alone.tobytes() for at in far)


@pytest.mark.parametrize("dtype", KV_DTYPES)
@pytest.mark.parametrize("page_tokens", [5, 16, pytest.param(80, marks=pytest.mark.slow)])
def test_paged_attention_is_softmax_over_what_was_written(dtype: str, page_tokens: int):
    """Against float64, two query heads a kv head, tokens of one call and of earlier ones."""
    rng = np.random.default_rng(6)
    known, new, places = 70, 3, -(-73 // page_tokens)
    k, v = rng.normal(size=(2, 2, known + new, 2, 6)).astype(np.float32)
    q = rng.normal(size=(2, new, 4, 6)).astype(np.float32)
    cache = KVPages.zeros(1, 2 * places, page_tokens, 2, 6, dtype)
    table = rng.permutation(2 * places).reshape(2, places) + 1
    at = np.tile(np.arange(known + new), (2, 1))
    page = np.take_along_axis(table, at // page_tokens, axis=1)
    early = slice(None), slice(0, known)
    cache = WRITTEN(cache, 0, page[early], at[early] % page_tokens, k[early], v[early])
    attend = PagedAttention(jnp.asarray(table), jnp.asarray(at[:, known:]), jnp.ones((2, new), bool))
    out, _ = jax.jit(lambda *given: attend(*given))(jnp.int32(0), q, k[:, known:], v[:, known:], cache)
    for slot, token, head in np.ndindex(2, new, 4):
        seen = slice(0, known + token + 1)
        scores = k[slot, seen, head // 2].astype(np.float64) @ q[slot, token, head] / np.sqrt(6)
        weights = np.exp(scores - scores.max())
        want = weights @ v[slot, seen, head // 2] / weights.sum()
        np.testing.assert_allclose(out[slot, token, head], want, atol=KV_DTYPES[dtype])


@pytest.mark.slow
@pytest.mark.parametrize("page_tokens", [8, 16, 64])
def test_a_token_gets_the_same_bits_alone_and_in_a_chunk(page_tokens: int):
    """So that KV that is computed again, in one row or in many, is the KV that decoding wrote."""
    rng = np.random.default_rng(8)
    k, v = rng.normal(size=(2, 1, 128, 3, 16)).astype(np.float32)
    q = rng.normal(size=(1, 128, 9, 16)).astype(np.float32)

    def outputs(slots: int, tokens: int) -> np.ndarray:
        cache = KVPages.zeros(1, slots * 128 // page_tokens, page_tokens, 3, 16, "float32")
        table = 1 + jnp.arange(slots * 128 // page_tokens).reshape(slots, -1)

        @jax.jit
        def attend(cache: KVPages, start: Any) -> tuple[jax.Array, KVPages]:
            of = (jnp.repeat(jax.lax.dynamic_slice_in_dim(x, start, tokens, 1), slots, 0) for x in (q, k, v))
            positions = jnp.broadcast_to(start + jnp.arange(tokens), (slots, tokens))
            return PagedAttention(table, positions, jnp.ones(positions.shape, bool))(0, *of, cache)

        found = []
        for start in range(0, 128, tokens):
            out, cache = attend(cache, start)
            found.append(np.asarray(out)[-1])
        return np.concatenate(found)

    alone = outputs(5, 1)
    for slots, tokens in ((1, 1), (1, 4), (5, 4)):
        assert outputs(slots, tokens).tobytes() == alone.tobytes()


@pytest.mark.parametrize(("dtype", "spacing"), [("bfloat16", 2**-7), ("int8", 1 / 127)])
def test_pages_hold_the_nearest_value_of_their_dtype(dtype: str, spacing: float):
    rng = np.random.default_rng(7)
    k, v = rng.normal(size=(2, 1, 4, 2, 6)).astype(np.float32) * np.array([1e-3, 1, 30, 0])[:, None, None]
    cache = KVPages.zeros(1, 1, 4, 2, 6, dtype)
    cache = WRITTEN(cache, 0, np.ones((1, 4), int), np.arange(4)[None], k, v)
    for found, want in zip(cache.read(0, 1), (k, v), strict=True):
        largest = np.abs(want).max(-1, keepdims=True)  # of the token and head, which share int8's scale
        assert (np.abs(np.swapaxes(found, 0, 1) - want[0]) <= largest[0] * spacing * 0.501).all()


@pytest.mark.slow
def test_unwritten_tokens_touch_no_page_but_the_scratch_page():
    rng = np.random.default_rng(5)
    q, k, v = rng.normal(size=(3, 2, 4, 2, 6)).astype(np.float32)
    cache = KVPages.zeros(1, 4, 4, 2, 6, "float32")
    table = jnp.array([[1, 2], [3, 4]])
    positions = jnp.broadcast_to(jnp.arange(4), (2, 4))
    is_written = jnp.array([[True, True, False, False], [False] * 4])
    attend = jax.jit(lambda *given: PagedAttention(table, positions, is_written)(*given))
    _, after = attend(jnp.int32(0), q, k, v, cache)
    want = np.zeros_like(np.asarray(after.k[0, 1:]))
    want[0, :, :2] = np.swapaxes(k[0, :2], 0, 1)
    np.testing.assert_array_equal(after.k[0, 1:], want)
