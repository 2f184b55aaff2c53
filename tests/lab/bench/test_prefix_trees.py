"""The workloads of `bench tree` share what they say."""

from __future__ import annotations

import pytest

from areal_jax.lab.bench.prefix_trees import _groups
from areal_jax.trajectories.prefix_tree import PrefixTree, Sampled, tree_of
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
