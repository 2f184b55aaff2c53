"""Updates on batches in which tokens are too old: packed, shared and over trees; nothing left is no error."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import chex
import jax
import numpy as np
import pytest

from areal_jax.trajectories.age_mask import trained_mask, trained_tokens
from areal_jax.trajectories.packing import pack
from areal_jax.trajectories.plan import BatchLayout
from areal_jax.trees.tree_learner import TreeLearner
from areal_jax.types import Group
from tests.trainer.conftest import LENGTH, MakeLearner, make_groups

pytestmark = pytest.mark.few_optimizations

PPO: dict[str, Any] = dict(preset="ppo", kl={"coef": 0.1, "place": "loss", "estimator": "k3"}, minibatches=2)
AREAL: dict[str, Any] = dict(preset="decoupled_ppo", minibatches=2)
OVERLONG: dict[str, Any] = dict(
    preset="dapo",
    minibatches=2,
    group_filter="none",
    overlong_margin=14,
    loss_settings={"low": 0.2, "high": 0.2},  # AREAL's, so both are trained by the same programs
)
each_setting = pytest.mark.parametrize(
    "settings",
    [pytest.param(PPO, id="critic", marks=pytest.mark.slow), pytest.param(OVERLONG, id="overlong")],
)


def old_groups() -> list[Group]:
    """Tokens of versions 0 to 2; all tokens of group 2, and of each group's member 3, are of version 0."""

    def aged(group: Group) -> Group:
        members = [
            replace(t, versions=np.where(t.loss_mask, 0, -1).astype(np.int32))
            if group.ordinal == 2 or t.sample.member == 3
            else t
            for t in group.trajectories
        ]
        return replace(group, trajectories=tuple(members))

    return [aged(group) for group in make_groups()]


def prepared(
    learner: TreeLearner, params: Any, groups: list[Group], layout: BatchLayout, oldest: int | None
) -> Any:
    """(first state, prepared batch) for an update on what is left of the groups' tokens."""
    state = learner.init(params)
    batch = pack(groups, learner.rows, LENGTH, learner.algorithm.minibatches, layout)
    batch = batch._replace(loss_mask=trained_mask(batch, oldest))
    return state, way(learner, layout).prepare(state, batch)


def way(learner: TreeLearner, layout: BatchLayout) -> Any:
    return learner.over_trees() if layout == "apart" else learner


def updated(
    learner: TreeLearner, params: Any, groups: list[Group], layout: BatchLayout, oldest: int | None
) -> Any:
    """(state, metrics, prepared batch) of that update."""
    state, ready = prepared(learner, params, groups, layout, oldest)
    of_batch = jax.device_get(ready.batch if layout == "apart" else ready)
    state, metrics = way(learner, layout).update(state, ready)
    return jax.device_get(state), metrics, of_batch


def edited(groups: list[Group], oldest: int) -> list[Group]:
    """The groups as if old tokens had never been sampled here, like a prompt's."""
    return [
        replace(g, trajectories=tuple(replace(t, loss_mask=trained_mask(t, oldest)) for t in g.trajectories))
        for g in groups
    ]


@pytest.mark.slow
def test_reduction_weights_count_only_what_is_left(learner: MakeLearner, params: Any):
    """float64 references: token_mean over a minibatch, sequence_mean over sequences with tokens."""
    groups = old_groups()
    left = [[int((t.versions >= 1).sum()) for t in group.trajectories] for group in groups]
    assert left[2] == [0] * 4 and all(0 in group for group in left)
    for reduction in ("token_mean", "sequence_mean"):
        of = learner(preset="grpo", minibatches=2, reduction=reduction)
        batch = jax.device_get(prepared(of, params, groups, "repeated", 1)[1])
        assert batch.loss_mask.sum() == sum(map(sum, left))
        for sequence, count in enumerate(count for group in left for count in group):
            own = batch.loss_weights[(batch.segment_ids == sequence + 1) & batch.loss_mask]
            minibatch = left[:2] if sequence < 8 else left[2:]
            tokens = float(sum(map(sum, minibatch)))
            sequences = float(sum(n > 0 for group in minibatch for n in group))
            each = 1 / tokens if reduction == "token_mean" else 1 / (sequences * max(count, 1))
            np.testing.assert_allclose(own, np.full(count, each, np.float64), rtol=1e-6)


@pytest.mark.slow
@each_setting
def test_old_tokens_change_no_bit_of_an_update(learner: MakeLearner, params: Any, settings: dict[str, Any]):
    groups = old_groups()
    of = learner(**settings)
    state, metrics, _ = updated(of, params, groups, "shared", 1)
    other = [
        replace(
            group,
            trajectories=tuple(
                replace(t, behavior_logp=np.where(t.versions == 0, -9.0, t.behavior_logp).astype(np.float32))
                for t in group.trajectories
            ),
        )
        for group in groups
    ]
    again, same, _ = updated(of, params, other, "shared", 1)
    chex.assert_trees_all_equal(state.params, again.params)
    chex.assert_trees_all_equal(state.critic, again.critic)
    assert metrics == same
    free, _, _ = updated(of, params, groups, "shared", None)
    moved = jax.tree.map(lambda x, y: np.abs(x - y).max(), state.params, free.params)
    assert max(jax.tree.leaves(moved)) > 1e-3


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "settings"),
    [
        pytest.param("shared", PPO, id="shared-ppo"),
        *(pytest.param(layout, AREAL, id=f"{layout}-areal") for layout in ("repeated", "shared", "apart")),
    ],
)
def test_each_way_of_computing_gives_the_update_of_old_tokens_as_prompts(
    learner: MakeLearner, params: Any, layout: BatchLayout, settings: dict[str, Any]
):
    groups, of = old_groups(), learner(**settings)
    one, of_one, _ = updated(of, params, groups, layout, 1)
    two, of_two, _ = updated(of, params, edited(groups, 1), "repeated", None)
    chex.assert_trees_all_close(one.params, two.params, rtol=1e-4, atol=1e-5)
    chex.assert_trees_all_close(one.critic, two.critic, rtol=1e-4, atol=1e-5)
    assert of_one["trained_tokens"] == of_two["trained_tokens"]
    assert of_one["trained_tokens"] == trained_tokens([t for g in groups for t in g.trajectories], 1)
    for name in of_two:
        np.testing.assert_allclose(of_one[name], of_two[name], rtol=1e-3, atol=1e-5, err_msg=name)


@each_setting
@pytest.mark.parametrize("layout", ["shared", pytest.param("apart", marks=pytest.mark.slow)])
def test_a_batch_in_which_nothing_is_left_changes_no_parameter(
    learner: MakeLearner, params: Any, layout: BatchLayout, settings: dict[str, Any]
):
    state, metrics, _ = updated(learner(**settings), params, old_groups(), layout, 9)
    chex.assert_trees_all_equal(state.params, params)
    assert metrics["trained_tokens"] == metrics["grad_norm"] == 0
    assert all(np.isfinite(value) for value in metrics.values()), metrics
    assert state.version == 1


def test_the_overlong_penalty_is_by_the_length_of_the_completion(learner: MakeLearner, params: Any):
    """An old head does not make an overlong sample short: advantages are those without a mask."""
    groups, of = old_groups(), learner(**OVERLONG)
    free, masked = (prepared(of, params, groups, "repeated", oldest)[1] for oldest in (None, 1))
    kept = np.asarray(masked.loss_mask)
    np.testing.assert_array_equal(np.asarray(masked.advantages)[kept], np.asarray(free.advantages)[kept])
