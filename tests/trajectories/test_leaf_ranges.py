"""Cuts of a prefix tree's leaves over devices, against all cuts there are and against bins of sequences."""

from __future__ import annotations

from itertools import combinations_with_replacement, pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal_jax.trajectories.leaf_order import Blocks, depth_first
from areal_jax.trajectories.leaf_ranges import TOKENS, LeafCosts, ranges
from areal_jax.trajectories.prefix_tree import PrefixTree, prefix_tree
from areal_jax.trajectories.walk import plan_walk

KEYS = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=14), min_size=0, max_size=7)
WEIGHT = st.sampled_from([0.0, 0.1, 1.0, 7.0])
COSTS = st.builds(LeafCosts, WEIGHT, WEIGHT, WEIGHT)


def tree(sequences: list[list[int]]) -> PrefixTree:
    return prefix_tree([np.array(each, np.int32) for each in sequences])


def dearest(found: PrefixTree, sequences: list[list[int]], bounds: list[int], costs: LeafCosts) -> float:
    """The cost of the dearest range, from the distinct prefixes of its leaves: of n tokens, n pairs each."""
    paths = [sequences[leaf] for leaf in found.leaves.tolist()]
    each = []
    for first, last in pairwise(bounds):
        prefixes = {tuple(path[:end]) for path in paths[first:last] for end in range(1, len(path) + 1)}
        pairs = sum(map(len, prefixes))
        each.append(costs.call * (last - first) + costs.token * len(prefixes) + costs.pair * pairs)
    return max(each)


@given(KEYS, st.integers(1, 5), COSTS)
def test_the_dearest_range_is_the_cheapest_possible(sequences, count, costs):
    found = tree(sequences)
    leaves = len(found.leaves)
    bounds = ranges(found, count, costs).tolist()
    assert len(bounds) == count + 1
    assert bounds[0] == 0 and bounds[-1] == leaves and sorted(bounds) == bounds
    cuts = combinations_with_replacement(range(leaves + 1), count - 1)
    best = min(dearest(found, sequences, [0, *cut, leaves], costs) for cut in cuts)
    assert dearest(found, sequences, bounds, costs) <= 1.05 * best + 1e-9
    if costs == TOKENS:
        assert dearest(found, sequences, bounds, costs) == best


def test_no_sequences_and_more_ranges_than_leaves():
    assert ranges(tree([]), 3).tolist() == [0, 0, 0, 0]
    assert ranges(tree([[1, 2], [1, 3]]), 4).tolist() == [0, 1, 2, 2, 2]


def test_long_leaves_weigh_more_by_their_pairs():
    """Four leaves of 10 tokens and one of 40: equal tokens, but 820 pairs against 220."""
    sequences = [[number, *range(9)] for number in range(4)] + [[9, *range(39)]]
    assert ranges(tree(sequences), 2).tolist() == [0, 4, 5]
    sequences = [[number, *range(9)] for number in range(5)] + [[9, *range(29)]]
    assert ranges(tree(sequences), 2).tolist() == [0, 4, 6]
    assert ranges(tree(sequences), 2, LeafCosts(0, 0, 1)).tolist() == [0, 5, 6]


def test_each_leaf_costs_a_call():
    sequences = [[number] for number in range(5)] + [[9, *range(29)]]
    assert ranges(tree(sequences), 2, LeafCosts(1, 0, 0)).tolist() == [0, 3, 6]


@pytest.mark.parametrize("count", [2, 4, 8])
def test_a_cut_needs_no_more_tokens_than_bins_of_sequences(count):
    """AReaL-DTA's baseline: first-fit-decreasing by the tokens of sequences, which parts those that share."""
    for seed in range(5):
        rng = np.random.default_rng(seed)
        text = lambda size: rng.integers(0, 1000, size).tolist()  # noqa: B023, E731
        rules = text(60)
        prompts = [rules + text(20) for _ in range(8)]
        sequences = [prompt + text(rng.integers(5, 60)) for prompt in prompts for _ in range(8)]
        found = depth_first(tree(sequences), Blocks(128))
        bounds = ranges(found, count).tolist()
        binned = [tree([sequences[i] for i in part]).tokens for part in first_fit(sequences, count)]
        assert dearest(found, sequences, bounds, TOKENS) <= max(binned)


def first_fit(sequences: list[list[int]], count: int) -> list[list[int]]:
    """The sequences in `count` bins of the least room for which first-fit-decreasing needs no more bins."""
    order = sorted(range(len(sequences)), key=lambda i: -len(sequences[i]))
    for room in range(max(map(len, sequences)), sum(map(len, sequences)) + 1):
        parts: list[list[int]] = [[] for _ in range(count)]
        filled = [0] * count
        for i in order:
            fits = [place for place in range(count) if filled[place] + len(sequences[i]) <= room]
            if not fits:
                break
            parts[fits[0]].append(i)
            filled[fits[0]] += len(sequences[i])
        else:
            return parts
    raise AssertionError("one bin has room for all")


def test_a_walk_is_cut_by_the_costs():
    sequences = [[number, *range(9)] for number in range(5)] + [[9, *range(29)]]
    found, blocks = tree(sequences), Blocks(64, 4, call_tokens=0)
    by_tokens = plan_walk(found, 2, blocks)
    by_pairs = plan_walk(found, 2, blocks, LeafCosts(0, 0, 1))
    assert by_tokens.rows[:, :, 1].sum(axis=0).tolist() == [40, 40]
    assert by_pairs.rows[:, :, 1].sum(axis=0).tolist() == [50, 30]
