"""The prefix tree against brute force: distinct prefixes, common prefixes, and who shares what."""

from __future__ import annotations

import dataclasses
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from areal_jax.trajectories.prefix_tree import PrefixTree, Sampled, prefix_tree, tree_of
from areal_jax.types import SampleId, Sampling, Trajectory
from tests.trajectories.samples import trajectory

KEYS = st.lists(st.lists(st.integers(0, 2), max_size=6), max_size=8)


def tree(sequences: list[list[int]]) -> PrefixTree:
    return prefix_tree([np.array(each, np.int32) for each in sequences])


def prefixes(sequences: list[list[int]]) -> set[tuple[int, ...]]:
    return {tuple(each[: end + 1]) for each in sequences for end in range(len(each))}


def common(one: list[int], other: list[int]) -> int:
    return next(
        (i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other))
    )


@given(KEYS)
@example([])
@example([[]])
@example([[1, 2]] * 3)
@example([[1], [1, 2], [1, 2, 0], [2]])
@example([[0], [1], [2]])
def test_the_tree_has_one_node_per_distinct_prefix_and_owns_each_sequence_once(sequences):
    found = tree(sequences)
    assert found.tokens == len(prefixes(sequences))
    assert found.sequence_tokens == sum(map(len, sequences))
    assert found.lengths.tolist() == [len(each) for each in sequences]
    assert len(found.common) == len(found.leaves) + 1
    assert found.common[0] == found.common[-1] == 0
    for sequence, leaf in zip(sequences, found.leaf_of.tolist(), strict=True):
        path = sequences[found.leaves[leaf]]
        assert path[: len(sequence)] == sequence


@given(KEYS)
def test_no_leaf_begins_another_and_neighbours_share_their_common_prefix(sequences):
    found = tree(sequences)
    paths = [sequences[leaf] for leaf in found.leaves.tolist()]
    assert paths == sorted(paths)
    shared = [common(one, other) for one, other in pairwise(paths)]
    assert found.common[1:-1].tolist() == shared
    lengths = [min(len(one), len(other)) for one, other in pairwise(paths)]
    assert all(size < most for size, most in zip(shared, lengths, strict=True))


def sampled(tokens: list[int], mask: list[bool], temperature: float = 1.0, support=None) -> Trajectory:
    base = trajectory(SampleId(0, 0), len(tokens))
    return dataclasses.replace(
        base,
        tokens=np.array(tokens, np.int32),
        loss_mask=np.array(mask),
        sampling=Sampling(temperature=temperature),
        support=support,
    )


def test_loss_masks_and_rewards_may_differ_on_shared_tokens():
    one = sampled([1, 2, 3, 4], [False, True, True, True])
    other = dataclasses.replace(sampled([1, 2, 3, 5], [False, False, False, True]), reward=2.0)
    assert tree_of([Sampled.of(one), Sampled.of(other)]).tokens == 5


@pytest.mark.parametrize("first_trained", [0, 1, 2])
def test_trained_tokens_are_not_shared_across_temperatures(first_trained):
    mask = [place >= first_trained for place in range(4)]
    samples = [sampled([1, 2, 3, 4], mask, temperature) for temperature in (1.0, 1.0, 0.5)]
    found = tree_of(list(map(Sampled.of, samples)))
    assert found.tokens == 4 + 4 - first_trained
    assert found.leaf_of[0] == found.leaf_of[1] != found.leaf_of[2]


def test_tokens_are_not_shared_across_supports():
    same, other = (
        np.array([[-1, -1], [2, 7], [3, 8]], np.int32),
        np.array([[-1, -1], [2, 7], [3, 9]], np.int32),
    )
    mask = [False, True, True]
    samples = [sampled([1, 2, 3], mask, support=support) for support in (same, same.copy(), other)]
    assert tree_of(list(map(Sampled.of, samples))).tokens == 4


def test_an_empty_list_has_an_empty_tree():
    found = tree_of([])
    assert (found.tokens, found.sequence_tokens, found.common.tolist()) == (0, 0, [0])
