"""Costs fitted to synthetic seconds, and the work of batches counted one token at a time."""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate

import numpy as np
import pytest

from areal_jax.trajectories.leaf_order import Blocks
from areal_jax.trajectories.leaf_ranges import TOKENS
from areal_jax.trajectories.packing import plan_batch
from areal_jax.trajectories.prefix_tree import Sampled
from areal_jax.trajectories.train_cost import (
    MeasuredBatch,
    TrainCosts,
    Work,
    default_costs,
    fitted_costs,
    packed_work,
    tree_work,
)
from areal_jax.types import Group, Prompt, SampleId, Sampling
from tests.trajectories.samples import trajectory

TRUE = TrainCosts(call=2e-3, backward_token=5e-5, forward_token=1e-5, pair=4e-8)


def measured(count: int, seed: int, noise: float, costs: TrainCosts = TRUE) -> list[MeasuredBatch]:
    """Batches of varied work; `noise`: standard deviation of the relative error of the seconds."""
    rng = np.random.default_rng(seed)
    found = []
    for _ in range(count):
        calls, tokens, pushed, depth = rng.uniform([5, 2e3, 1e3, 100], [60, 3e4, 3e4, 1500])
        work = Work(calls, tokens, pushed, (tokens + pushed) * depth)
        found.append(MeasuredBatch(work, costs.seconds(work) * (1 + noise * rng.normal())))
    return found


def error(costs: TrainCosts, batches: list[MeasuredBatch]) -> float:
    """Mean relative error of the forecasts."""
    return float(np.mean([abs(costs.seconds(one.work) / one.seconds - 1) for one in batches]))


def test_known_costs_are_found():
    batches = measured(64, 0, noise=0)
    found = fitted_costs(batches, default_costs(64, batches))
    np.testing.assert_allclose(found, TRUE, rtol=5e-3)


def test_a_fit_to_noisy_seconds_forecasts_better_than_the_defaults():
    batches, others = measured(64, 1, noise=0.05), measured(64, 2, noise=0)
    defaults = default_costs(64, batches)
    found = fitted_costs(batches, defaults)
    assert error(found, others) < 0.03 < 0.15 < error(defaults, others)
    np.testing.assert_allclose(found, TRUE, rtol=0.3)
    assert min(found) >= 0


def test_a_quantity_that_is_never_there_keeps_its_default():
    batches = [one._replace(work=one.work._replace(forward_tokens=0)) for one in measured(16, 3, noise=0)]
    batches = [one._replace(seconds=TRUE.seconds(one.work)) for one in batches]
    defaults = default_costs(64, batches)
    found = fitted_costs(batches, defaults)
    assert found.forward_token == pytest.approx(defaults.forward_token)
    np.testing.assert_allclose(found[:2], TRUE[:2], rtol=0.01)


def test_quantities_in_proportion_share_the_seconds_as_by_default():
    """A packed batch: all of it is proportional to the micro-batches."""
    batches = [MeasuredBatch(Work(2 * n, 4096 * n, 4096 * n, 0), 0.5 * n) for n in range(1, 17)]
    defaults = default_costs(64, batches)
    found = fitted_costs(batches, defaults)
    np.testing.assert_allclose(found, defaults, rtol=1e-3, atol=1e-12)
    assert found.seconds(Work(200, 409_600, 409_600, 0)) == pytest.approx(50.0, rel=1e-3)


def test_default_costs_have_the_mean_seconds_of_a_token():
    work = Work(calls=2, backward_tokens=100, forward_tokens=72, pairs=9)
    assert default_costs(64, []).seconds(work) == 2 * 64 + 3 * 100 + 72
    found = default_costs(64, [MeasuredBatch(work, 1.0), MeasuredBatch(work, 3.0)])
    assert found.seconds(work) == pytest.approx(2.0)
    assert found.pair == 0


def groups_of(prompt: int, answers: list[int]) -> list[Group]:
    """One group whose members share a prompt of this many tokens, with answers of these lengths."""
    members = []
    for member, size in enumerate(answers):
        one = trajectory(SampleId(0, member), prompt + size)
        one.tokens[:prompt] = np.arange(prompt)
        one.loss_mask[:] = np.arange(prompt + size) >= prompt
        members.append(one)
    return [Group(0, Prompt("?"), tuple(members))]


def test_the_work_of_a_packed_batch():
    """Rows of 16 tokens, two to a micro-batch; a prompt of 4 tokens is computed once in each row."""
    groups = groups_of(4, [6, 6, 6, 6])
    repeated = packed_work(plan_batch(groups, 2, 16, layout="repeated"), 2, shards=1, passes=2)
    assert repeated[:3] == (3 * 2, 2 * 32, 2 * 2 * 32)
    assert repeated.pairs == (3 + 2) * 4 * 55
    shared = packed_work(plan_batch(groups, 2, 16, layout="shared"), 2, shards=1, passes=0)
    assert shared[:3] == (1, 32, 0)
    assert shared.pairs == 3 * (2 * 10 + 4 * (6 * 4 + 21))
    assert packed_work(plan_batch(groups, 2, 16), 2, shards=2, passes=0) == Work(1, 16, 0, shared.pairs / 2)


def test_the_work_over_a_tree():
    """A prompt of 4 tokens is pushed; two answers share a call, the last one is popped with the prompt."""
    (group,) = groups_of(4, [6, 6, 6])
    sequences = [[Sampled.of(one) for one in group.trajectories]]
    blocks = Blocks(16, 4, call_tokens=8)
    trained = tree_work(sequences, 1, blocks, TOKENS, passes=0)
    backward = 12 * 4 + 2 * 21 + 10 * 11 / 2
    assert trained == Work(3, 12 + 12, 4, 10 + 3 * backward)
    scored = tree_work(sequences, 1, blocks, TOKENS, passes=1)
    # The same calls in reverse: one answer with the prompt, and two.
    assert scored.backward_tokens == trained.backward_tokens
    assert scored.forward_tokens - trained.forward_tokens == 12 + 12
    assert scored.calls - trained.calls == 2
    assert scored.pairs - trained.pairs == 10 + 3 * (6 * 4 + 21)


def test_devices_take_as_long_as_the_longest_of_them():
    texts = [np.arange(n) + 100 * n for n in (8, 16)]
    sequences = [Sampled(text.astype(np.int32), np.ones(len(text), bool), 1.0, None) for text in texts]
    found = tree_work([sequences], 2, Blocks(16, 4, call_tokens=0), TOKENS, passes=0)
    assert found == Work(1, 16, 0, 3 * 16 * 17 / 2)


def test_conversations_cost_less_over_the_tree_and_texts_apart_less_packed():
    """By default costs, at a compression of 4 and of 1."""
    rng = np.random.default_rng(0)
    blocks, costs = Blocks(256), default_costs(64, [])

    def seconds(texts: list[np.ndarray]) -> tuple[float, float]:
        members = []
        for member, text in enumerate(texts):
            one = replace(trajectory(SampleId(0, member), len(text)), sampling=Sampling())
            one.tokens[:] = text
            members.append(one)
        plan = plan_batch([Group(0, Prompt("?"), tuple(members))], 2, 128)
        of_tree = tree_work([[Sampled.of(one) for one in members]], 1, blocks, TOKENS, passes=1)
        return costs.seconds(packed_work(plan, 2, 1, 1)), costs.seconds(of_tree)

    turns = [list(accumulate(rng.integers(0, 999, (8, 12)), lambda a, b: np.append(a, b))) for _ in range(4)]
    packed, tree = seconds([text for turn in turns for text in turn])
    assert tree < 0.5 * packed
    packed, tree = seconds([rng.integers(0, 999, 64) for _ in range(32)])
    assert packed <= tree
