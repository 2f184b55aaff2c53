"""Planned walks over random prefix trees, followed step by step; and how much they compute."""

from __future__ import annotations

from itertools import pairwise, product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal_jax.trajectories.prefix_tree import PrefixTree, prefix_tree
from areal_jax.trajectories.walk import POP, PUSH, Blocks, depth_first, plan_walk, ranges

KEYS = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=14), min_size=1, max_size=9)
MOST = st.sampled_from([1, 3, 7, 100])


def tree(sequences: list[list[int]]) -> PrefixTree:
    return prefix_tree([np.array(each, np.int32) for each in sequences])


def common(one: list[int], other: list[int]) -> int:
    pairs = zip(one, other, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))


@given(KEYS, MOST)
def test_the_order_keeps_the_tree(sequences, most):
    found, ordered = tree(sequences), depth_first(tree(sequences), Blocks(most, 1))
    assert sorted(ordered.leaves.tolist()) == sorted(found.leaves.tolist())
    assert ordered.tokens == found.tokens
    paths = [sequences[leaf] for leaf in ordered.leaves.tolist()]
    assert ordered.common[1:-1].tolist() == [common(one, other) for one, other in pairwise(paths)]
    for sequence, leaf in zip(sequences, ordered.leaf_of.tolist(), strict=True):
        assert paths[leaf][: len(sequence)] == sequence


@given(KEYS, MOST, st.booleans(), st.booleans(), st.sampled_from([1, 2, 4, 11]))
def test_a_walk_reads_only_what_is_on_its_path_and_pops_every_token_once(
    sequences, most, cuts_tail, in_order, walks
):
    found, blocks = tree(sequences), Blocks(most, 1, cuts_tail)
    if in_order:
        found = depth_first(found, blocks)
    walk = plan_walk(found, walks, blocks)
    paths: list[list[int]] = [[] for _ in range(walks)]
    popped: list[tuple[int, ...]] = []
    ended: list[int] = []
    for kind, bucket, rows in zip(walk.kinds, walk.buckets, walk.rows.tolist(), strict=True):
        for path, (sequence, start, length, first, count) in zip(paths, rows, strict=True):
            assert length <= bucket and bucket in blocks.buckets
            if not length:
                assert count == 0
                continue
            assert path[:start] == sequences[sequence][:start]
            tokens = sequences[sequence][start : start + length]
            if kind == PUSH:
                path[start:] = tokens
            else:
                popped += [tuple(sequences[sequence][: end + 1]) for end in range(start, start + length)]
            # The loss reads the statistics of the whole path.
            ends = walk.order[first : first + count].tolist()
            assert all(sequences[end] == (path[:start] + tokens)[: len(sequences[end])] for end in ends)
            assert kind == POP or not ends
            ended += ends
    assert sorted(ended) == list(range(len(sequences)))
    distinct = {tuple(each[: end + 1]) for each in sequences for end in range(len(each))}
    assert set(popped) == distinct
    if walks == 1:  # several walks repeat the tokens that their ranges share
        assert len(popped) == walk.popped_tokens == found.tokens
        if not cuts_tail:
            assert walk.pushed_tokens == found.tokens


@given(KEYS, MOST)
def test_a_forward_walk_pushes_every_token_once(sequences, most):
    found = depth_first(tree(sequences), Blocks(most, 1))
    walk = plan_walk(found, 1, Blocks(most, 1), with_gradients=False)
    assert (walk.pushed_tokens, walk.popped_tokens) == (found.tokens, 0)
    assert walk.rows[:, :, 4].sum() == len(sequences)


@given(KEYS, st.integers(1, 12))
def test_the_largest_range_is_the_smallest_possible(sequences, count):
    found = tree(sequences)
    bounds = ranges(found, count)
    ends, shared = found.lengths[found.leaves], found.common

    def cost(first: int, last: int) -> int:
        return int(ends[first:last].sum() - shared[first + 1 : last].sum()) if last > first else 0

    assert bounds[0] == 0 and bounds[-1] == len(ends) and (np.diff(bounds) >= 0).all()
    assert len(bounds) == count + 1
    best = {(0, 0): 0}  # (leaves so far, ranges so far) -> least largest cost
    for parts in range(1, count + 1):
        for last in range(len(ends) + 1):
            options = [
                max(best[first, parts - 1], cost(first, last))
                for first in range(last + 1)
                if (first, parts - 1) in best
            ]
            if options:
                best[last, parts] = min(options)
    assert max(cost(one, other) for one, other in pairwise(bounds.tolist())) == best[len(ends), count]


def conversations(rules: int, turns: int, size: int, groups: int, samples: int) -> list[list[int]]:
    """Conversations that share the rules' text; each sample ends after one of a conversation's turns."""
    rng = np.random.default_rng(0)
    text = rng.integers(0, 1000, rules).tolist()
    whole = [text + rng.integers(0, 1000, turns * size).tolist() for _ in range(groups)]
    return [each[: rules + size * (1 + turn)] for each, turn in product(whole, range(turns))][
        : samples * groups
    ]


def test_a_multi_turn_set_needs_the_tokens_that_the_tree_predicts():
    """Compression 9: what is pushed costs a forward pass, each token of the tree a forward and a backward."""
    sequences = conversations(rules=2048, turns=16, size=96, groups=8, samples=16)
    found = depth_first(tree(sequences), Blocks(512))
    assert found.sequence_tokens / found.tokens > 9
    walk = plan_walk(found, 1, Blocks(512))
    # A conversation's last block is cut off what is pushed; only the rules are pushed for all of them.
    predicted = 2048 + 8 * (16 * 96 - 512)
    assert walk.pushed_tokens == predicted
    ratio = (walk.pushed_tokens + 3 * walk.popped_tokens) / (3 * found.sequence_tokens)
    assert ratio == (predicted + 3 * found.tokens) / (3 * found.sequence_tokens) <= 0.15


@pytest.mark.parametrize("seed", range(5))
def test_cut_tail_lowers_what_is_pushed_and_order_the_padding_of_what_is_popped(seed):
    rng = np.random.default_rng(seed)
    sequences: list[list[int]] = []
    for _ in range(40):
        base = sequences[rng.integers(len(sequences))] if sequences else []
        cut = int(rng.integers(0, len(base) + 1))
        sequences.append(base[:cut] + rng.integers(0, 9, int(rng.integers(10, 200))).tolist())
    found = tree(sequences)
    plain, cut_tail = (plan_walk(found, 1, Blocks(128, cuts_tail=is_cut)) for is_cut in (False, True))
    ordered = plan_walk(depth_first(found, Blocks(128)), 1, Blocks(128))
    assert cut_tail.pushed_tokens < plain.pushed_tokens == found.tokens
    assert ordered.pushed_tokens == cut_tail.pushed_tokens
    assert ordered.buckets[ordered.kinds == POP].sum() < cut_tail.buckets[cut_tail.kinds == POP].sum()


@pytest.mark.parametrize(
    ("most", "buckets"), [(512, (32, 64, 128, 256, 512)), (2048, (64, 128, 256, 512, 1024, 2048))]
)
def test_there_are_at_most_six_buckets(most, buckets):
    assert Blocks(most).buckets == buckets
