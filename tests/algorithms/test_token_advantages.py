"""Estimators that give each token its own advantage, against sums in float64, a sequence at a time."""

from __future__ import annotations

from itertools import groupby

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal_jax.algorithms.advantages import (
    gae,
    group_normalized,
    leave_one_out,
    overlong_penalty,
    reward_to_go,
    teacher_gap,
    whitened,
    with_overlong_penalty,
)
from areal_jax.types import NOT_SAMPLED, ArealError, PreparedBatch
from tests.algorithms import advantage_reference as reference
from tests.algorithms.batches import prepared

ROWS = ((9, 7), (5, 11), (16,), (3, 4, 6))
TOLERANCE = dict(rtol=2e-5, atol=2e-5)


def with_tools(seed: int) -> PreparedBatch:
    """Prompts, tool turns inside sequences and after their last sampled token, truncated samples, no KL."""
    rng = np.random.default_rng(seed)
    _, batch = prepared(seed, rows=ROWS)
    mask = batch.loss_mask & (rng.random(batch.tokens.shape) < 0.7)
    gaps = np.cumsum(np.diff(mask.astype(int), axis=1, prepend=0) == 1, axis=1)  # a turn a run of tokens
    return batch._replace(
        loss_mask=mask,
        turn_ids=np.where(mask, gaps // 2, -1).astype(np.int32),
        versions=np.where(mask, batch.versions, NOT_SAMPLED).astype(np.int32),
        token_rewards=None,
        truncated=rng.random(len(batch.reward)) < 0.5,
        bootstrap=np.where(rng.random(len(batch.reward)) < 0.5, rng.normal(size=len(batch.reward)), 0).astype(
            np.float32
        ),
    )


def turns_of(batch: PreparedBatch):
    ids = np.asarray(batch.turn_ids).ravel()
    return lambda where: [list(run) for _, run in groupby(where, key=lambda i: ids[i])]


@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 1.0), (1.0, 0.95), (0.9, 0.8), (0.97, 0.0)])
def test_gae_is_the_sum_of_its_definition(gamma: float, lam: float):
    """In packed rows, over tool text, with and without a value beyond the end."""
    batch = with_tools(0)
    got = jax.jit(gae, static_argnames=("gamma", "lam"))(batch.reward, batch, gamma=gamma, lam=lam)

    def exact(earned: np.ndarray, values: np.ndarray, sequence: int) -> np.ndarray:
        return reference.gae(earned, values, float(batch.bootstrap[sequence]), gamma, lam)

    want = reference.whole_row(exact, batch.reward.astype(float), batch)
    np.testing.assert_allclose(got.advantages, want, **TOLERANCE)
    returns = want + np.where(batch.loss_mask, batch.values, 0)
    np.testing.assert_allclose(got.returns, returns, **TOLERANCE)


def test_the_length_of_an_answer_sets_its_lambda_and_the_critic_has_its_own():
    """VAPO: lam = 1 - 1 / (0.05 L) for the policy, at least 0, and 1 for the returns."""
    batch = with_tools(1)
    got = gae(batch.reward, batch, lam_length=0.4, critic_lam=1.0)

    def exact(lam: float | None):
        def estimate(earned: np.ndarray, values: np.ndarray, sequence: int) -> np.ndarray:
            own = max(0.0, 1 - 1 / (0.4 * len(earned))) if lam is None else lam
            return reference.gae(earned, values, float(batch.bootstrap[sequence]), 1.0, own)

        return reference.whole_row(estimate, batch.reward.astype(float), batch)

    np.testing.assert_allclose(got.advantages, exact(None), **TOLERANCE)
    returns = exact(1.0) + np.where(batch.loss_mask, batch.values, 0)
    np.testing.assert_allclose(got.returns, returns, **TOLERANCE)


def test_a_step_may_be_a_turn():
    """One value and one step a turn, shared by its tokens; what tokens earn stays theirs, outside returns."""
    batch = with_tools(2)
    kl = np.random.default_rng(2).normal(size=batch.tokens.shape).astype(np.float32)
    got = gae(batch.reward, batch._replace(token_rewards=kl), gamma=0.9, lam=0.8, step="turn")
    values: dict[int, np.ndarray] = {}

    def exact(earned: np.ndarray, own: np.ndarray, sequence: int) -> np.ndarray:
        values[sequence] = own
        return reference.gae(earned, own, float(batch.bootstrap[sequence]), 0.9, 0.8)

    def exact_returns(earned: np.ndarray, own: np.ndarray, sequence: int) -> np.ndarray:
        return exact(earned, own, sequence) + own

    rewards, turns = batch.reward.astype(float), turns_of(batch)
    want = reference.whole_row(exact, rewards, batch, turns)
    assert any(len(own) > 1 for own in values.values())  # several turns
    np.testing.assert_allclose(got.advantages, want + np.where(batch.loss_mask, kl, 0), **TOLERANCE)
    want = reference.whole_row(exact_returns, rewards, batch, turns)
    np.testing.assert_allclose(got.returns, want, **TOLERANCE)


def test_rewards_of_tokens_enter_each_estimator():
    """Summed for those that give a sequence one number, token by token for the others."""
    batch = with_tools(3)
    kl = np.random.default_rng(3).normal(size=batch.tokens.shape).astype(np.float32)
    charged = batch._replace(token_rewards=kl)
    on_mask = np.where(batch.loss_mask, kl, 0)
    sums = np.array([on_mask[batch.segment_ids == s + 1].sum() for s in range(len(batch.reward))])
    for estimator in (group_normalized, leave_one_out):
        got = estimator(batch.reward, charged)
        np.testing.assert_allclose(got, estimator(batch.reward + sums, batch), rtol=1e-4, atol=1e-5)
    plain = np.asarray(reward_to_go(batch.reward, batch, baseline=0.25))
    got = np.asarray(reward_to_go(batch.reward, charged, baseline=0.25))
    for sequence, reward in enumerate(batch.reward):
        where = (batch.segment_ids == sequence + 1) & batch.loss_mask
        np.testing.assert_allclose(plain[where], reward - 0.25, rtol=1e-6)
        np.testing.assert_allclose(got[where], reward - 0.25 + np.cumsum(kl[where][::-1])[::-1], **TOLERANCE)
    got = gae(batch.reward, charged._replace(values=0 * batch.values, bootstrap=0 * batch.bootstrap))
    np.testing.assert_allclose(got.advantages, reward_to_go(batch.reward, charged), **TOLERANCE)


TO_GO = jax.jit(reward_to_go)


@given(st.lists(st.booleans(), min_size=16, max_size=16), st.floats(-3, 3, width=32))
def test_a_reward_reaches_every_token_of_its_sequence(is_sampled: list[bool], reward: float):
    """Wherever the last sampled token is: before a tool's text, before padding, before a neighbour."""
    _, batch = prepared(4, rows=((9, 6),), length=16)
    mask = np.array([is_sampled]) & (batch.segment_ids > 0)
    rewards = np.array([reward, 1 - reward], np.float32)
    got = TO_GO(rewards, batch._replace(loss_mask=mask, token_rewards=None, reward=rewards))
    want = np.where(mask, np.concatenate([[0], rewards])[batch.segment_ids], 0)
    np.testing.assert_array_equal(got, want)


def test_only_a_sample_cut_by_its_length_has_a_value_beyond_its_end():
    """The longest finished answer of a batch is like any other: its row's width says nothing."""
    widths = [(10, 12), (10,)]
    answers = []
    for row in widths:
        _, batch = prepared(4, rows=((10,),), length=row[-1])
        batch = batch._replace(
            reward=np.ones(1, np.float32),
            token_rewards=None,
            values=np.zeros_like(batch.values),
            bootstrap=np.zeros(1, np.float32),
        )
        answers.append(np.asarray(gae(batch.reward, batch).advantages)[0, 1:10])
    np.testing.assert_array_equal(answers[0], np.ones(9))
    np.testing.assert_array_equal(answers[1], np.ones(9))


def test_a_neighbour_in_the_row_moves_not_one_bit():
    batch = with_tools(5)
    mine = batch.segment_ids == 7  # with a neighbour on either side
    other = batch._replace(
        values=np.where(mine, 3 - 7 * batch.values, batch.values).astype(np.float32),
        reward=np.where(np.arange(len(batch.reward)) == 6, 9.0, batch.reward).astype(np.float32),
        loss_mask=batch.loss_mask & ~(mine & (batch.positions % 2 == 0)),
    )
    for step in ("token", "turn"):
        one, two = (gae(x.reward, x, gamma=0.9, lam=0.7, step=step) for x in (batch, other))
        for a, b in zip(one, two, strict=True):
            assert np.asarray(a)[~mine].tobytes() == np.asarray(b)[~mine].tobytes()
            assert np.abs(np.asarray(a) - np.asarray(b))[mine].max() > 0.1


def test_leave_one_out_compares_with_the_others():
    _, batch = prepared(6, rows=((2,),) * 6)
    rewards = np.array([1, 0, 0.5, 3, 3, 8], np.float32)
    batch = batch._replace(group_ids=np.array([0, 0, 0, 1, 1, 2], np.int32), token_rewards=None)
    got = np.asarray(leave_one_out(rewards, batch))[:, 0]
    np.testing.assert_allclose(got, [0.75, -0.75, 0, 0, 0, 0], atol=1e-6)


def test_the_spread_may_be_that_of_the_batch_around_group_means():
    """REINFORCE++-baseline divides by the deviation of R - mean_g, LitePPO by that of R."""
    _, batch = prepared(7, rows=((2,),) * 5)
    rewards = np.array([1, 2, 10, 14, 5], np.float32)
    groups = np.array([0, 0, 1, 1, 2], np.int32)
    batch = batch._replace(group_ids=groups, token_rewards=None)
    centred = np.array([-0.5, 0.5, -2, 2, 0])
    for scale, spread in (("batch_centered", centred.std(ddof=1)), ("batch", rewards.std(ddof=1))):
        got = np.asarray(group_normalized(rewards, batch, scale=scale))[:, 0]
        np.testing.assert_allclose(got, centred / spread, rtol=1e-5)
    got = np.asarray(group_normalized(rewards, batch, center="none", scale="none"))[:, 0]
    np.testing.assert_array_equal(got, rewards)


def test_a_teachers_gap_is_a_difference_of_log_probs():
    _, batch = prepared(8)
    batch = batch._replace(token_rewards=None)
    want = np.where(batch.loss_mask, batch.teacher_logp - batch.behavior_logp, 0)
    np.testing.assert_array_equal(teacher_gap(batch.reward, batch), want)


def test_an_estimator_without_what_it_reads_says_what_to_set():
    _, batch = prepared(9)
    with pytest.raises(ArealError, match=r"set algorithm.critic.kind"):
        gae(batch.reward, batch._replace(values=None))
    with pytest.raises(ArealError, match=r"set algorithm.teacher"):
        teacher_gap(batch.reward, batch._replace(teacher_logp=None))


def test_whitened_tokens_have_mean_0_and_deviation_1():
    rng = np.random.default_rng(10)
    mask = rng.random((5, 9)) < 0.6
    x = np.where(mask, rng.normal(3, 2, mask.shape), np.nan).astype(np.float32)
    got = np.asarray(whitened(x, mask))
    want = (x[mask].astype(float) - x[mask].mean(dtype=float)) / x[mask].std(dtype=float)
    np.testing.assert_allclose(got[mask], want, rtol=1e-4, atol=1e-5)
    np.testing.assert_array_equal(got[~mask], 0)
    np.testing.assert_array_equal(whitened(np.where(mask, np.float32(0.7), np.nan), mask), 0)


def test_the_overlong_penalty_falls_over_its_margin_and_no_further():
    """DAPO, Eq. 13, with a limit of 20 and a margin of 5."""
    lengths = np.array([0, 14, 15, 16, 19, 20, 31], np.float32)
    np.testing.assert_allclose(overlong_penalty(lengths, 20, 5), [0, 0, 0, -0.2, -0.8, -1, -1], atol=1e-6)


def test_the_overlong_penalty_counts_the_tokens_of_each_sequence_s_longest_turn():
    """The limit is that of one turn: three turns of 3 tokens are not longer than a limit of 4."""
    batch = with_tools(3)
    mask, segments = np.asarray(batch.loss_mask), np.asarray(batch.segment_ids)

    def longest(number: int) -> int:
        runs = groupby(zip(mask[segments == number], batch.turn_ids[segments == number], strict=True))
        return max((len(list(run)) for (is_sampled, _), run in runs if is_sampled), default=0)

    lengths = np.array([longest(number + 1) for number in range(len(batch.reward))])
    whole = [(mask & (segments == number + 1)).sum() for number in range(len(batch.reward))]
    assert len(set(lengths.tolist())) > 2 and any(lengths < whole)
    want = np.asarray(batch.reward) + np.clip((4 - 3 - lengths) / 3, -1, 0)
    np.testing.assert_allclose(with_overlong_penalty(batch, 4, 3), want, rtol=1e-6)


def test_a_turn_ends_where_the_next_one_begins_without_a_gap():
    _, batch = prepared(0, rows=((7,), (7,)))
    turn_ids = np.array([[-1, 0, 0, 1, 1, 2, 2, -1], [-1, 0, 0, 0, 0, 0, 0, -1]], np.int32)
    batch = batch._replace(reward=np.ones(2, np.float32), turn_ids=turn_ids)
    np.testing.assert_array_equal(with_overlong_penalty(batch, 4, 1), [1, 0])


def test_whitening_does_not_blow_up_rounding():
    """Advantages that differ in their last bit say nothing; divided by their deviation they would be ±1."""
    noise = np.nextafter(np.full((2, 4), 300.0, np.float32), np.float32([[301], [0]]))
    assert len(np.unique(noise)) == 2
    np.testing.assert_array_equal(whitened(noise, np.ones((2, 4), bool)), 0)
    assert np.abs(whitened(noise * np.float32([[1.001], [1]]), np.ones((2, 4), bool))).min() > 0.9
