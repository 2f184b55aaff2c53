"""The workloads of `bench tree` share what they say, and its ladder ends with the tree as it is trained."""

from __future__ import annotations

import numpy as np
import pytest

from areal_jax.lab.bench.prefix_trees import _groups, _ladder
from areal_jax.trajectories.leaf_order import Blocks, depth_first
from areal_jax.trajectories.prefix_tree import PrefixTree, Sampled, tree_of
from areal_jax.trajectories.walk import POP, PUSH, plan_walk
from areal_jax.types import ArealError


def workload(name: str, leaves: int = 1) -> PrefixTree:
    groups = _groups(name, 1.0, leaves, vocab_size=10**9)
    return tree_of([Sampled.of(trajectory) for group in groups for trajectory in group.trajectories])


def test_turns_share_ten_times_groups_their_prompts_and_apart_nothing():
    turns, groups, apart = map(workload, ("turns", "groups", "apart"))
    assert turns.sequence_tokens == 32 * (512 + 64) + 8 * (48 + 96 + 144 + 192)
    assert turns.tokens == 512 + 2 * 64 + 8 * 192
    assert (groups.sequence_tokens, groups.tokens) == (64 * 192, 4 * 64 + 64 * 128)
    assert apart.sequence_tokens == apart.tokens == 64 * 192
    with pytest.raises(ArealError, match="unknown workload turn; choose turns, groups or apart"):
        workload("turn")


def test_more_leaves_have_the_same_depth():
    once, twice = workload("turns"), workload("turns", leaves=2)
    assert len(twice.lengths) == 2 * len(once.lengths)
    assert twice.lengths.max() == once.lengths.max()


def test_each_rung_of_the_ladder_computes_no_more_than_the_one_before():
    found, ladder = workload("turns"), _ladder(Blocks(512))
    walks = [plan_walk(depth_first(found, of), 1, of) for of in ladder.values()]
    assert list(ladder.values())[-1] == Blocks(512)
    assert {walk.tokens(POP) for walk in walks} == {found.tokens}
    pushed = [walk.tokens(PUSH) for walk in walks]
    assert pushed[0] == found.tokens > pushed[1]
    calls = [len(walk.kinds) for walk in walks]
    computed = [int((np.where(walk.kinds == POP, 3, 1) * walk.buckets).sum()) for walk in walks]
    for figures in (pushed, calls, computed):
        assert figures == sorted(figures, reverse=True) and figures[0] > figures[-1]
