"""The five reductions."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from areal_jax.algorithms.reduction import reduction_weights
from tests.algorithms import reference
from tests.algorithms.batches import prepared, segments_of

REDUCTIONS = ("token_mean", "token_mean_batch", "sequence_mean", "sequence_sum", "constant")

# Two rows, three sequences; of sequence 1 (4 tokens) 3 are trained, of 2 (2 tokens) 1, of 3 (5 tokens) none.
SEGMENTS = np.array([[1, 1, 1, 1, 2, 2, 0], [3, 3, 3, 3, 3, 0, 0]], np.int32)
MASK = np.array([[0, 1, 1, 1, 0, 1, 0], [0, 0, 0, 0, 0, 0, 0]], bool)


@pytest.mark.parametrize(
    ("reduction", "of_first", "of_second"),
    [
        ("token_mean", 1 / 4, 1 / 4),
        ("token_mean_batch", 1 / 4, 1 / 4),
        ("sequence_mean", 1 / 6, 1 / 2),
        ("sequence_sum", 1 / 2, 1 / 2),
        ("constant", 1 / 16, 1 / 16),
    ],
)
def test_reductions_by_hand(reduction: str, of_first: float, of_second: float):
    """4 loss tokens; 2 sequences have any (the third is out of every denominator); C = 8."""
    got = reduction_weights(jnp.asarray(MASK), jnp.asarray(SEGMENTS), 3, 1, reduction, 8.0)
    want = np.array([[0, of_first, of_first, of_first, 0, of_second, 0], [0] * 7])
    np.testing.assert_allclose(got, want, rtol=1e-6)


@pytest.mark.parametrize(
    ("reduction", "of_first", "of_second"),
    [
        ("token_mean", 1 / 7, 1 / 7),
        ("sequence_mean", 1 / 8, 1 / 6),
        ("sequence_sum", 1 / 2, 1 / 2),
        ("constant", 1 / 16, 1 / 16),
    ],
)
def test_sequences_of_one_sample_are_reduced_together(reduction: str, of_first: float, of_second: float):
    """Sequences 1 and 2 are one sample with 4 loss tokens, sequence 3 is one with 3; the fourth is empty."""
    mask = MASK | np.array([[0] * 7, [0, 1, 1, 1, 0, 0, 0]], bool)
    ids = jnp.array([0, 0, 1, 1], jnp.int32)
    got = reduction_weights(jnp.asarray(mask), jnp.asarray(SEGMENTS), 4, 1, reduction, 8.0, sample_ids=ids)
    np.testing.assert_allclose(got, mask * np.array([[of_first], [of_second]]), rtol=1e-6)


@pytest.mark.parametrize("minibatches", [1, 2, 4])
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_reductions_of_minibatches(reduction: str, minibatches: int):
    """A minibatch's weights look at its own rows alone, but for token_mean_batch."""
    rng = np.random.default_rng(0)
    segments = segments_of(((5, 4), (3, 6), (9,), (2, 2, 4), (1, 1), (8,), (4, 4), (7, 2)))
    mask = (segments > 0) & (rng.random(segments.shape) < 0.6)
    got = reduction_weights(
        jnp.asarray(mask), jnp.asarray(segments), int(segments.max()), minibatches, reduction, 12.0
    )
    want = reference.reduction_weights(mask, segments, minibatches, reduction, 12.0)
    np.testing.assert_allclose(got, want, rtol=1e-6)


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_a_minibatch_without_loss_tokens_weighs_nothing(reduction: str):
    got = reduction_weights(jnp.asarray(MASK), jnp.asarray(SEGMENTS), 3, 2, reduction, 8.0)
    assert np.isfinite(got).all()
    np.testing.assert_array_equal(got[1], 0)


def test_no_such_reduction():
    with pytest.raises(ValueError, match="sequence_median"):
        reduction_weights(jnp.asarray(MASK), jnp.asarray(SEGMENTS), 3, 1, "sequence_median")


def test_weights_are_the_same_under_jit():
    _, batch = prepared(2)
    plain = reduction_weights(batch.loss_mask, batch.segment_ids, 8, 2, "sequence_mean")
    jitted = jax.jit(reduction_weights, static_argnums=(2, 3, 4))(
        batch.loss_mask, batch.segment_ids, 8, 2, "sequence_mean"
    )
    np.testing.assert_allclose(jitted, plain, rtol=1e-6)
