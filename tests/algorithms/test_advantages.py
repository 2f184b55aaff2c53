"""Advantage estimators against float64 references."""

from __future__ import annotations

import numpy as np
import pytest

from areal_jax.algorithms.advantages import group_normalized, ones
from areal_jax.types import Batch
from tests.algorithms import reference
from tests.algorithms.batches import prepared

REWARDS = np.array([0.0, 1.0, 0.25, 0.25, 0.25, 3.0, -2.0, 0.5, 7.0], np.float32)
GROUPS = np.array([0, 0, 1, 1, 1, 2, 2, 2, 3], np.int32)
"""A group of two, a flat one, a group of three, a singleton."""


def one_sequence_a_row() -> Batch:
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


def test_advantages_follow_sequences_and_not_rows():
    _, batch = prepared(1)
    batch = batch._replace(token_rewards=None)
    got = np.asarray(group_normalized(batch.reward, batch))
    want = reference.group_normalized(batch.reward.astype(np.float64), batch.group_ids, "group", "group", 1)
    np.testing.assert_allclose(got, np.concatenate([[0], want])[batch.segment_ids], atol=2e-6)


def test_ones_are_one_on_tokens_and_zero_on_padding():
    _, batch = prepared(2)
    np.testing.assert_array_equal(ones(batch.reward, batch), batch.segment_ids > 0)
