"""The two forms of attention: blocks of queries, and pages of keys."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from areal_jax.models import attention
from areal_jax.models.attention import KVPages, PackedAttention, PagedAttention

SHAPE = (2, 21, 4, 6)


def arrays(seed: int, length: int) -> tuple[Any, Any, Any, Any]:
    rng = np.random.default_rng(seed)
    q = rng.normal(size=(2, length, 4, 6)).astype(np.float32)
    k, v = rng.normal(size=(2, 2, length, 2, 6)).astype(np.float32)
    segments = np.sort(rng.integers(1, 4, (2, length)), axis=1).astype(np.int32)
    segments[1, -3:] = 0
    return q, k, v, segments


def summed(q: Any, k: Any, v: Any, segments: Any, weights: Any) -> tuple[jax.Array, jax.Array]:
    out, _ = PackedAttention(segments)(jnp.int32(0), q, k, v, None)
    return (weights * out).sum(), out


@pytest.mark.parametrize("length", [24, 21], ids=["blocks divide", "last block is short"])
def test_blocks_of_queries_change_nothing(monkeypatch: pytest.MonkeyPatch, length: int):
    """Values and gradients of rows longer than QUERY_BLOCK, whatever their length."""
    q, k, v, segments = arrays(0, length)
    weights = np.random.default_rng(1).normal(size=q.shape).astype(np.float32)
    both = jax.value_and_grad(summed, argnums=(0, 1, 2), has_aux=True)
    (_, direct), direct_slopes = jax.jit(both)(q, k, v, segments, weights)
    monkeypatch.setattr(attention, "QUERY_BLOCK", 8)
    (_, blocked), slopes = jax.jit(lambda *args: both(*args))(q, k, v, segments, weights)
    np.testing.assert_allclose(blocked, direct, rtol=0, atol=1e-6)
    for one, other in zip(slopes, direct_slopes, strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=1e-5)


def test_blocks_keep_scores_small(monkeypatch: pytest.MonkeyPatch):
    """No [B, H, T, T] array in the compiled program, forward or backward."""
    q, k, v, segments = arrays(0, 21)
    monkeypatch.setattr(attention, "QUERY_BLOCK", 4)
    both = jax.jit(lambda *args: jax.value_and_grad(summed, argnums=(0, 1, 2), has_aux=True)(*args))
    text = both.lower(q, k, v, segments, q).compile().as_text()
    assert "f32[2,2,2,4,21]" in text
    assert "21,21]" not in text
    assert "24,21]" not in text


@pytest.mark.parametrize("length", [8, 16])
def test_one_segment_never_moves_another(monkeypatch: pytest.MonkeyPatch, length: int):
    """Change segment 1: not one bit of the others, blocked or not."""
    monkeypatch.setattr(attention, "QUERY_BLOCK", 8)
    q, k, v, segments = arrays(2, length)
    mine = (segments == 1)[..., None, None]
    assert 0 < mine.sum() < mine.size
    moved = [np.where(mine, 3 - x, x) for x in (q, k, v)]
    call = jax.jit(lambda *args: summed(*args, 1.0)[1])
    before, after = np.asarray(call(q, k, v, segments)), np.asarray(call(*moved, segments))
    others = segments != 1
    assert before[others].tobytes() == after[others].tobytes()


def test_pages_beyond_a_slot_change_no_bit():
    """A neighbour with more tokens makes the loop visit more pages: an exact no-op for this slot."""
    rng = np.random.default_rng(4)
    q, k, v = rng.normal(size=(3, 2, 1, 2, 6)).astype(np.float32)
    cache = KVPages(*jnp.asarray(rng.normal(size=(2, 1, 9, 3, 2, 6)), jnp.float32))
    table = jnp.arange(1, 9).reshape(2, 4)

    @jax.jit
    def first_slot(other_position: Any) -> jax.Array:
        positions = jnp.array([[2], [0]]).at[1, 0].set(other_position)
        attend = PagedAttention(table, positions, jnp.ones((2, 1), bool))
        return attend(jnp.int32(0), q, k, v, cache)[0][0]

    alone = np.asarray(first_slot(0))
    assert all(np.asarray(first_slot(at)).tobytes() == alone.tobytes() for at in (5, 11))


def test_unwritten_tokens_touch_no_page_but_the_scratch_page():
    rng = np.random.default_rng(5)
    q, k, v = rng.normal(size=(3, 2, 4, 2, 6)).astype(np.float32)
    cache = KVPages.zeros(1, 4, 4, 2, 6, "float32")
    table = jnp.array([[1, 2], [3, 4]])
    positions = jnp.broadcast_to(jnp.arange(4), (2, 4))
    is_written = jnp.array([[True, True, False, False], [False] * 4])
    _, after = PagedAttention(table, positions, is_written)(jnp.int32(0), *map(jnp.asarray, (q, k, v)), cache)
    want = np.zeros_like(np.asarray(after.k[0, 1:]))
    want[0, :2] = k[0, :2]
    np.testing.assert_array_equal(after.k[0, 1:], want)
