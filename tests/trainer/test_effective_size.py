"""Effective sample sizes: Kish's formula in float64, however the batch is cut, packed or walked over."""

from __future__ import annotations

from dataclasses import replace
from functools import reduce
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from areal_jax.trainer.effective_size import WeightSums, weight_sums
from areal_jax.trajectories.packing import pack
from areal_jax.types import Batch, Group
from tests.trainer.conftest import LENGTH, MakeLearner, make_groups
from tests.trees.test_tree_update import conversations

pytestmark = pytest.mark.few_optimizations

SUMS = jax.jit(weight_sums)
TOKENS, SEQUENCES = "effective_token_share", "effective_sequence_share"
NO_WEIGHT = WeightSums(*[jnp.zeros(())] * 4)


def kish(log_weights: np.ndarray) -> float:
    """(Σ w)² / (n Σ w²) in float64; the factor that all weights share cancels."""
    x = np.asarray(log_weights, np.float64)
    weights = np.exp(x - x.max())
    return float(weights.sum() ** 2 / (len(weights) * (weights**2).sum()))


def reference(prepared: Batch, logp: np.ndarray) -> dict[str, float]:
    """Both shares of a batch, from its log-probs and the segment of each token."""
    gap = np.asarray(logp, np.float64) - np.asarray(prepared.behavior_logp, np.float64)
    mask, ids = np.asarray(prepared.loss_mask), np.asarray(prepared.segment_ids)
    sums = [gap[mask & (ids == number)].sum() for number in np.unique(ids[mask])]
    return {TOKENS: kish(gap[mask]), SEQUENCES: kish(np.array(sums))}


def shares(metrics: dict[str, float]) -> dict[str, float]:
    return {name: metrics[name] for name in (TOKENS, SEQUENCES)}


def test_figures_by_hand():
    """Weights 1 and 3: 16 / (2 · 10). Equal ones: all. One against a million times less: 1 of 4."""
    for weights, share in (([1, 3], 0.8), ([7, 7, 7], 1.0), ([1, 1e-6, 1e-6, 1e-6], 0.2500015)):
        x = np.log(np.array(weights, np.float32))
        assert SUMS(x, np.ones(len(x), bool)).share() == pytest.approx(share, rel=1e-6)


@pytest.mark.parametrize("centre", [0.0, -700.0, 900.0])
def test_sums_of_parts_are_those_of_the_whole_without_overflow(centre: float):
    """Also of parts far from each other, of parts without a weight, and of weights that float32 lacks."""
    rng = np.random.default_rng(0)
    x = (centre + rng.normal(0, 1.5, 4000)).astype(np.float32)
    x[:50] += 5
    mask = rng.random(x.shape) < 0.7
    wanted = kish(x[mask])
    assert 0.005 < wanted < 0.5
    whole = SUMS(x, mask)
    assert whole.share() == pytest.approx(wanted, rel=1e-4)
    parts = [SUMS(part, own) for part, own in zip(x.reshape(8, -1), mask.reshape(8, -1), strict=True)]
    for order in (parts, parts[::-1]):
        joined = reduce(WeightSums.joined, [NO_WEIGHT, *order[:4], NO_WEIGHT, *order[4:], NO_WEIGHT])
        assert joined.share() == pytest.approx(wanted, rel=1e-4)
        assert joined.count == mask.sum()
    far = SUMS(x - np.float32(3000), mask).joined(whole)
    assert far.share() == pytest.approx(wanted / 2, rel=1e-4)


def test_no_weight_is_full_size_and_no_number_is_none():
    x, mask = np.zeros((2, 3), np.float32), np.zeros((2, 3), bool)
    assert SUMS(x, mask).share() == NO_WEIGHT.share() == 1
    poisoned = np.where(mask, x, np.nan).astype(np.float32)
    assert SUMS(poisoned, mask).share() == 1
    assert np.isnan(SUMS(poisoned, ~mask).share())
    assert np.isnan(SUMS(np.array([0, np.inf], np.float32), np.ones(2, bool)).share())


@pytest.fixture(scope="module")
def wanted(params: Any, learner: MakeLearner) -> dict[str, float]:
    of = learner()
    prepared = of.prepare(of.init(params), pack(make_groups(), 2, LENGTH))
    return reference(prepared, np.asarray(prepared.proximal_logp))


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"rows": 1, "proximal": "reuse"},
        {"minibatches": 2, "off_policy_settings": {"cap": 1.01}},
        {"mesh": {"data": 2}, "proximal": "none", "off_policy": "none"},
    ],
    ids=str,
)
def test_neither_cut_nor_correction_changes_them(
    params: Any, learner: MakeLearner, wanted: dict[str, float], settings: dict[str, Any]
):
    """The weights are those before the batch's first update, also if a cap or a loss takes others."""
    assert all(0.05 < share < 0.7 for share in wanted.values())
    of = learner(**settings)
    state, rows = of.init(params), settings.get("rows", 2)
    batch = pack(make_groups(), rows, LENGTH, settings.get("minibatches", 1))
    _, metrics = of.update(state, of.prepare(state, batch))
    assert shares(metrics) == pytest.approx(wanted, rel=1e-4)


@pytest.mark.slow
def test_shared_prefixes_and_trees_weigh_each_sequence_once(params: Any, learner: MakeLearner):
    of, groups = learner(), conversations()
    state = of.init(params)
    apart = of.prepare(state, pack(groups, 2, LENGTH))
    wanted = reference(apart, np.asarray(apart.proximal_logp))
    assert 0.05 < wanted[SEQUENCES] < 0.9
    shared = of.prepare(state, pack(groups, 2, LENGTH, layout="shared"))
    assert (np.asarray(shared.segment_ids) > len(shared.group_ids)).any()
    over = of.over_trees()
    tree = over.prepare(state, pack(groups, 2, LENGTH, layout="apart"))
    for learns, prepared in ((of, shared), (over, tree)):
        _, metrics = learns.update(of.init(params), prepared)
        assert shares(metrics) == pytest.approx(wanted, rel=1e-4)


def behaving(groups: list[Group], logp: dict[tuple[int, int], np.ndarray]) -> list[Group]:
    """The groups, sampled with these log-probs."""
    return [
        replace(
            group,
            trajectories=tuple(
                replace(t, behavior_logp=logp[group.ordinal, t.sample.member]) for t in group.trajectories
            ),
        )
        for group in groups
    ]


def test_fresh_weights_have_full_size_and_truncated_samples_do_not_count(params: Any, learner: MakeLearner):
    of, groups = learner(truncation="mask"), make_groups()
    flat = [(group.ordinal, t) for group in groups for t in group.trajectories]
    prepared = learner().prepare(of.init(params), pack(groups, 2, LENGTH))
    ids, found = np.asarray(prepared.segment_ids), np.asarray(prepared.proximal_logp)
    logp = {}
    for number, (ordinal, t) in enumerate(flat):
        # What is not trained weighs e^8 times as much as the rest.
        off = 8.0 * t.truncated / t.loss_mask.sum()
        logp[ordinal, t.sample.member] = np.where(t.loss_mask, found[ids == number + 1] - off, 0)
    state = of.init(params)
    batch = pack(behaving(groups, {name: x.astype(np.float32) for name, x in logp.items()}), 2, LENGTH)
    _, metrics = of.update(state, of.prepare(state, batch))
    assert shares(metrics) == pytest.approx({TOKENS: 1, SEQUENCES: 1}, abs=1e-5)
    whole = learner()
    state = whole.init(params)
    _, metrics = whole.update(state, whole.prepare(state, batch))
    assert metrics[SEQUENCES] == pytest.approx(0.25, abs=0.01)  # the 4 truncated of 16 outweigh the others


def test_only_what_is_trained_counts(params: Any, learner: MakeLearner):
    of, whole = learner(truncation="mask"), pack(make_groups(), 2, LENGTH)
    state = of.init(params)
    prepared = of.prepare(state, whole)
    wanted = reference(prepared, np.asarray(prepared.proximal_logp))
    assert prepared.loss_mask.sum() < whole.loss_mask.sum()
    _, metrics = of.update(state, prepared)
    assert shares(metrics) == pytest.approx(wanted, rel=1e-4)


def test_reference_answers_have_no_weights(params: Any, learner: MakeLearner):
    of, batch = learner(), pack(make_groups(), 2, LENGTH)
    state = of.init(params)
    _, metrics = of.update(state, of.prepare(state, batch._replace(versions=0 * batch.versions - 1)))
    assert shares(metrics) == {TOKENS: 1, SEQUENCES: 1}
