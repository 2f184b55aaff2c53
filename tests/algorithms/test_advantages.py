"""Advantage estimators against float64 references."""

from __future__ import annotations

import numpy as np
import pytest

from areal_jax.algorithms.advantages import (
    group_normalized,
    leave_one_out,
    ones,
    whitened,
    with_overlong_penalty,
)
from areal_jax.types import PreparedBatch
from tests.algorithms import reference
from tests.algorithms.batches import prepared

REWARDS = np.array([0.0, 1.0, 0.25, 0.25, 0.25, 3.0, -2.0, 0.5, 7.0], np.float32)
GROUPS = np.array([0, 0, 1, 1, 1, 2, 2, 2, 3], np.int32)
"""A group of two, a flat one, a group of three, a singleton."""


def one_sequence_a_row() -> PreparedBatch:
    _, batch = prepared(0, rows=((2,),) * len(REWARDS))
    return batch._replace(group_ids=GROUPS, reward=REWARDS, token_rewards=None)


@pytest.mark.parametrize("ddof", [0, 1])
@pytest.mark.parametrize("scale", ["group", "batch", "none"])
@pytest.mark.parametrize("center", ["group", "batch"])
def test_group_normalized_is_its_formula(center: str, scale: str, ddof: int):
    batch = one_sequence_a_row()
    got = np.asarray(group_normalized(REWARDS, batch, center=center, scale=scale, ddof=ddof))  # type: ignore[arg-type]
    want = reference.group_normalized(REWARDS.astype(np.float64), GROUPS, center, scale, ddof)
    np.testing.assert_allclose(got[:, 0], want, rtol=2e-6, atol=2e-6)
    np.testing.assert_array_equal(got[:, 1], got[:, 0])
    np.testing.assert_array_equal(got[:, 2], 0)


SAMPLES = np.array([0, 1, 1, 1, 2, 3, 4, 5, 5, 6, 7, 8, 8, 8, 8, 8], np.int32)
"""Sample of each sequence: some have several, and the last one is filled up with empty ones."""


def branched() -> PreparedBatch:
    """The samples of `one_sequence_a_row`, in as many sequences as SAMPLES says, each in a row."""
    _, batch = prepared(0, rows=((2,),) * len(SAMPLES))
    own = dict(group_ids=GROUPS[SAMPLES], reward=REWARDS[SAMPLES], sample_ids=SAMPLES, token_rewards=None)
    return batch._replace(**own)


@pytest.mark.parametrize("scale", ["group", "batch", "batch_centered", "none"])
@pytest.mark.parametrize("center", ["group", "batch", "none"])
def test_a_sample_counts_once_however_many_sequences_it_has(center: str, scale: str):
    batch = branched()
    got = np.asarray(group_normalized(REWARDS[SAMPLES], batch, center=center, scale=scale))  # type: ignore[arg-type]
    want = reference.group_normalized(REWARDS.astype(np.float64), GROUPS, center, scale, 1)
    np.testing.assert_allclose(got[:, 1], want[SAMPLES], rtol=2e-6, atol=2e-6)


def test_leave_one_out_leaves_out_the_whole_sample():
    got = np.asarray(leave_one_out(REWARDS[SAMPLES], branched()))
    others = [np.delete(REWARDS[g == GROUPS], i) for g in range(4) for i in range((g == GROUPS).sum())]
    want = np.array([r - o.mean() if o.size else 0 for r, o in zip(REWARDS, others, strict=True)])
    np.testing.assert_allclose(got[:, 1], want[SAMPLES], rtol=1e-6, atol=1e-6)


def test_token_rewards_are_those_of_the_whole_sample():
    """Sample 1 has three sequences of one trained token: three token rewards."""
    batch = branched()
    paid = np.where(batch.loss_mask, 0.5, 0).astype(np.float32)
    rewards = np.zeros(len(SAMPLES), np.float32)
    got = np.asarray(
        group_normalized(rewards, batch._replace(token_rewards=paid), center="none", scale="none")
    )
    np.testing.assert_allclose(got[:4, 1], [0.5, 1.5, 1.5, 1.5])


def test_one_overlong_turn_of_a_branch_costs_the_whole_sample():
    """The second of a sample's two sequences has a turn of 3 tokens, the others have turns of 1 token."""
    _, batch = prepared(0, rows=((2,), (4,), (2,)))
    rewards = np.zeros(3, np.float32)
    batch = batch._replace(reward=rewards, sample_ids=np.array([0, 0, 1], np.int32))
    np.testing.assert_allclose(with_overlong_penalty(batch, 4.0, 3.0), [-2 / 3, -2 / 3, 0], rtol=1e-6)


def test_sample_and_population_deviation_differ_by_the_known_factor():
    """1.155 at G = 4: systems that differ in it train with other effective rates."""
    rewards = np.array([0, 0, 1, 1], np.float32)
    _, batch = prepared(0, rows=((2,),) * 4)
    batch = batch._replace(group_ids=np.zeros(4, np.int32), token_rewards=None)
    population = np.asarray(group_normalized(rewards, batch, ddof=0, eps=0.0))
    sample = np.asarray(group_normalized(rewards, batch, ddof=1, eps=0.0))
    np.testing.assert_allclose(population[:, 0], [-1, -1, 1, 1], rtol=1e-6)
    np.testing.assert_allclose(population[:, 0] / sample[:, 0], np.sqrt(4 / 3), rtol=1e-6)


@pytest.mark.parametrize("scale", ["group", "batch", "none"])
@pytest.mark.parametrize("center", ["group", "batch"])
def test_equal_rewards_give_exactly_zero(center: str, scale: str):
    """No rounding error, divided by epsilon or not: 0.7 eleven times has a float32 mean that is not 0.7."""
    rewards = np.full(11, 0.7, np.float32)
    assert np.cumsum(rewards)[-1] / np.float32(11) != rewards[0]
    _, batch = prepared(0, rows=((2,),) * 11)
    batch = batch._replace(group_ids=np.zeros(11, np.int32), token_rewards=None)
    got = group_normalized(rewards, batch, center=center, scale=scale)  # type: ignore[arg-type]
    np.testing.assert_array_equal(got, 0)


NOISE = np.array([3.0, np.nextafter(np.float32(3), np.float32(4)), 3.0, 3.0], np.float32)
"""Rewards that differ in the last bit of a float32, as the same sum in another order does."""


@pytest.mark.parametrize("scale", ["group", "batch", "batch_centered", "none"])
@pytest.mark.parametrize("center", ["group", "batch"])
def test_rewards_that_are_equal_but_for_rounding_give_exactly_zero(center: str, scale: str):
    """Divided by its own deviation, a last bit would be an advantage of 1.5."""
    _, batch = prepared(0, rows=((2,),) * 4)
    batch = batch._replace(group_ids=np.zeros(4, np.int32), token_rewards=None)
    assert len(set(NOISE.tolist())) == 2
    got = group_normalized(NOISE, batch, center=center, scale=scale, eps=1e-12)  # type: ignore[arg-type]
    np.testing.assert_array_equal(got, 0)
    np.testing.assert_array_equal(leave_one_out(NOISE, batch), 0)
    assert np.all(np.asarray(group_normalized(NOISE + np.float32([0, 1e-3, 0, 0]), batch))[:, 0] != 0)


def test_advantages_follow_sequences_and_not_rows():
    _, batch = prepared(1)
    batch = batch._replace(token_rewards=None)
    got = np.asarray(group_normalized(batch.reward, batch))
    want = reference.group_normalized(batch.reward.astype(np.float64), batch.group_ids, "group", "group", 1)
    np.testing.assert_allclose(got, np.concatenate([[0], want])[batch.segment_ids], atol=2e-6)


def test_ones_are_one_on_tokens_and_zero_on_padding():
    _, batch = prepared(2)
    np.testing.assert_array_equal(ones(batch.reward, batch), batch.segment_ids > 0)


LARGEST = float(np.finfo(np.float32).max)
EXTREME = {
    "squares overflow": [1e20, 0, 0, 0],
    "squares vanish": [1e-24, 0, 0, -1e-24],
    "sums overflow": [LARGEST, LARGEST, LARGEST, 0.9 * LARGEST],
    "gaps overflow": [LARGEST, LARGEST, LARGEST, -LARGEST],
    "deviation overflows": [LARGEST, -0.7 * LARGEST],
}


@pytest.mark.parametrize("rewards", EXTREME.values(), ids=EXTREME)
@pytest.mark.parametrize("scale", ["group", "batch", "batch_centered"])
@pytest.mark.parametrize("center", ["group", "batch", "none"])
def test_rewards_of_any_finite_size_are_normalised(center: str, scale: str, rewards: list[float]):
    """A second group of ordinary rewards keeps its own scale beside them."""
    given = np.array([*rewards, 0, 1, 1, 3], np.float32)
    groups = np.array([0] * len(rewards) + [1] * 4, np.int32)
    _, batch = prepared(0, rows=((2,),) * len(given))
    batch = batch._replace(group_ids=groups, token_rewards=None)
    got = group_normalized(given, batch, center=center, scale=scale, eps=0.0)  # type: ignore[arg-type]
    exact = given.astype(float)
    want = reference.group_normalized(exact, groups, center, scale, 1, eps=0.0)
    is_representable = np.abs(want) <= LARGEST  # centred by the batch, divided by another group's deviation
    np.testing.assert_allclose(
        np.asarray(got)[is_representable, 0], want[is_representable], rtol=2e-5, atol=1e-30
    )


@pytest.mark.parametrize("rewards", [x for x in EXTREME.values() if min(x) >= 0], ids=str)
def test_leave_one_out_takes_rewards_of_any_finite_size(rewards: list[float]):
    given = np.array(rewards, np.float32)
    _, batch = prepared(0, rows=((2,),) * len(given))
    batch = batch._replace(group_ids=np.zeros(len(given), np.int32), token_rewards=None)
    exact = given.astype(float)
    want = exact - (exact.sum() - exact) / (len(given) - 1)
    np.testing.assert_allclose(leave_one_out(given, batch)[:, 0], want, rtol=1e-5)


@pytest.mark.parametrize("rewards", EXTREME.values(), ids=EXTREME)
def test_advantages_of_any_finite_size_are_whitened(rewards: list[float]):
    given = np.array([[*rewards, np.nan]], np.float32)
    exact = given[:, :-1].astype(float)
    want = (exact - exact.mean()) / (exact.std() + 1e-8)
    np.testing.assert_allclose(whitened(given, np.isfinite(given))[:, :-1], want, rtol=1e-5)
