"""An update over prefix trees is the packed update: the same parameters, metrics and prepared batches."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import chex
import jax
import numpy as np
import pytest

from areal_jax.trajectories import shared_prefixes
from areal_jax.trajectories.leaf_order import Blocks
from areal_jax.trajectories.leaf_ranges import LeafCosts
from areal_jax.trajectories.packing import pack
from areal_jax.trajectories.prefix_tree import Sampled, tree_of
from areal_jax.trajectories.walk import plan_walk
from areal_jax.trees import tree_update
from areal_jax.trees.tree_learner import TreeLearner
from areal_jax.trees.tree_passes import TreePasses
from areal_jax.trees.tree_update import TreeUpdate
from areal_jax.types import ArealError, Group
from tests.trainer.branches import branched_groups
from tests.trainer.conftest import LENGTH, VOCAB, MakeLearner, make_groups
from tests.trainer.prefix_trees import tree_groups
from tests.trainer.test_shared_prompts import levels

pytestmark = pytest.mark.few_optimizations

PLAIN: dict[str, Any] = dict(preset="decoupled_ppo", minibatches=2)
EVERYTHING: dict[str, Any] = dict(
    preset="ppo",
    kl={"coef": 0.1, "place": "loss", "estimator": "k3"},
    entropy_coef=0.05,
    truncation="mask",
    minibatches=2,
)


def conversations() -> list[Group]:
    """Groups that begin with the same tokens, share a task, and in pairs of samples also a turn."""
    rng = np.random.default_rng(0)
    text = lambda size: rng.integers(0, VOCAB, size).astype(np.int32)  # noqa: E731
    rules, groups = text(3), []
    for group in make_groups():
        task = np.concatenate([rules, text(1)])
        turns = [np.concatenate([task, text(1)]), task]
        members = []
        for t in group.trajectories:
            prefix = turns[t.sample.member % 2]
            size = len(prefix) + int(rng.integers(1, 3))
            is_own = np.arange(size) >= len(prefix)
            members.append(
                replace(
                    t,
                    tokens=np.concatenate([prefix, text(size - len(prefix))]),
                    loss_mask=is_own,
                    behavior_logp=np.where(is_own, rng.normal(-4, 1, size), 0).astype(np.float32),
                    versions=np.where(is_own, 1, -1).astype(np.int32),
                    turn_ids=np.where(is_own, 0, -1).astype(np.int32),
                )
            )
        groups.append(replace(group, trajectories=tuple(members)))
    return groups


def trained(learner: TreeLearner, params: Any, batches: list[list[Group]], is_tree: bool) -> tuple[Any, Any]:
    """The state and the metrics after updates on these groups."""
    state, metrics = learner.init(params), []
    layout = "apart" if is_tree else "shared"
    for groups in batches:
        batch = pack(groups, learner.rows, LENGTH, learner.algorithm.minibatches, layout)
        learns: Any = learner.over_trees() if is_tree else learner
        state, of_step = learns.update(state, learns.prepare(state, batch))
        metrics.append(of_step)
    return jax.device_get(state), metrics


def assert_equal_updates(learner: TreeLearner, params: Any, batches: list[list[Group]] | None = None) -> None:
    batches = batches or [tree_groups(seed, LENGTH) for seed in range(2)]
    one, of_one = trained(learner, params, batches, is_tree=True)
    two, of_two = trained(learner, params, batches, is_tree=False)
    moved = jax.tree.map(lambda x, y: np.abs(x - y).max(), two.params, params)
    assert max(jax.tree.leaves(moved)) > 1e-2
    chex.assert_trees_all_close(one.params, two.params, rtol=1e-4, atol=1e-5)
    chex.assert_trees_all_close(one.critic, two.critic, rtol=1e-4, atol=1e-5)
    for found, right in zip(of_one, of_two, strict=True):
        assert found.keys() == right.keys()
        for name in right:
            np.testing.assert_allclose(found[name], right[name], rtol=1e-3, atol=1e-5, err_msg=name)


@pytest.mark.slow
def test_an_update_over_trees_is_the_packed_one(learner: MakeLearner, params: Any):
    assert_equal_updates(learner(**PLAIN), params)
    assert_equal_updates(learner(**PLAIN), params, [branched_groups()])


@pytest.mark.slow
def test_a_tree_mask_of_many_levels_gives_the_update_over_trees(
    learner: MakeLearner, params: Any, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(shared_prefixes, "LEAST_ACROSS_GROUPS", 3)
    groups = conversations()
    packed = pack(groups, 2, LENGTH, 2)
    stored = (packed.segment_ids > 0).sum()
    assert levels(packed) == {0, 1, 2, 3}
    flat = [Sampled.of(t) for group in groups for t in group.trajectories]
    assert tree_of(flat).tokens < stored < 0.7 * sum(len(each.tokens) for each in flat)
    assert_equal_updates(learner(**PLAIN), params, [groups])


@pytest.mark.slow
def test_an_update_with_critic_reference_and_entropy_is_the_packed_one(
    learner: MakeLearner, params: Any, monkeypatch: pytest.MonkeyPatch
):
    assert_equal_updates(learner(**EVERYTHING), params)
    monkeypatch.setattr(shared_prefixes, "LEAST_ACROSS_GROUPS", 3)
    assert_equal_updates(learner(**EVERYTHING), params, [conversations()])


@pytest.mark.slow
@pytest.mark.parametrize(
    "mesh", [pytest.param({"data": 2}, marks=pytest.mark.soak), {"fsdp": 2, "tensor": 2}]
)
def test_walks_on_several_devices_give_the_update_of_one(learner: MakeLearner, params: Any, mesh):
    """Five times two updates; the last batch has fewer leaves than a mesh of four devices has walks."""
    of = learner(mesh=mesh, **PLAIN)
    for seed in range(0, 8, 2):
        assert_equal_updates(of, params, [tree_groups(seed, LENGTH), tree_groups(seed + 1, LENGTH)])
    assert_equal_updates(of, params, [tree_groups(9, LENGTH), tree_groups(8, LENGTH, count=2, size=1)])


def test_the_leaves_are_cut_by_the_given_costs(
    learner: MakeLearner, params: Any, monkeypatch: pytest.MonkeyPatch
):
    of, costs = learner(**PLAIN), LeafCosts(3.0, 1.0, 0.5)
    seen = []

    def planned(tree: Any, walks: int, blocks: Blocks, given: LeafCosts, **options: Any) -> Any:
        seen.append(given)
        return plan_walk(tree, walks, blocks, given, **options)

    monkeypatch.setattr(tree_update, "plan_walk", planned)
    batch = pack(tree_groups(0, LENGTH), of.rows, LENGTH, 2, "apart")
    of.over_trees(costs).prepare(of.init(params), batch)
    assert seen == [costs] * 4  # two minibatches, each scored and trained


def test_a_batch_of_another_layout_is_refused(learner: MakeLearner, params: Any):
    of = learner(**PLAIN)
    batch = pack(tree_groups(0, LENGTH), of.rows, LENGTH, 1, "apart")
    with pytest.raises(ArealError, match=r"rows of 15 tokens.*layout=apart"):
        of.over_trees().prepare(of.init(params), batch._replace(tokens=batch.tokens[:, :15]))


@pytest.mark.slow
def test_a_tree_needs_three_programs_for_each_bucket(
    learner: MakeLearner, params: Any, monkeypatch: pytest.MonkeyPatch
):
    """Over batches with trees of many shapes: push, push with scores, and pop."""
    of, blocks = learner(**PLAIN), Blocks(8, smallest=4, call_tokens=0)
    most = len(blocks.buckets)
    monkeypatch.setattr(TreePasses, "push", chex.assert_max_traces(TreePasses.push, n=2 * most))
    monkeypatch.setattr(TreePasses, "pop", chex.assert_max_traces(TreePasses.pop, n=most))
    tree, state = TreeUpdate(of.objective, of.programs, of.mesh, LENGTH, blocks), of.init(params)
    used = set()
    for seed in range(5):
        prepared = tree.prepare(state, pack(tree_groups(seed, LENGTH), 2, LENGTH, 2, "apart"), 2, {}, None)
        state, _ = tree.update(state, prepared, None)
        used |= {size for walks in prepared.walks for size in walks.training.buckets.tolist()}
    assert used == set(blocks.buckets)
