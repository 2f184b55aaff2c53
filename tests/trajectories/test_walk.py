"""Planned walks over random prefix trees, followed step by step; and how much they compute."""

from __future__ import annotations

import dataclasses
from itertools import pairwise, product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal_jax.trajectories.leaf_order import Blocks, depth_first
from areal_jax.trajectories.prefix_tree import PrefixTree, prefix_tree
from areal_jax.trajectories.walk import POP, PUSH, Walk, plan_walk

KEYS = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=14), min_size=1, max_size=9)
MOST = st.sampled_from([1, 3, 7, 100])


def tree(sequences: list[list[int]]) -> PrefixTree:
    return prefix_tree([np.array(each, np.int32) for each in sequences])


def common(one: list[int], other: list[int]) -> int:
    pairs = zip(one, other, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))


@given(KEYS, MOST)
def test_the_order_keeps_the_tree(sequences, most):
    found, ordered = tree(sequences), depth_first(tree(sequences), Blocks(most, 1, call_tokens=0))
    assert sorted(ordered.leaves.tolist()) == sorted(found.leaves.tolist())
    assert ordered.tokens == found.tokens
    paths = [sequences[leaf] for leaf in ordered.leaves.tolist()]
    assert ordered.common[1:-1].tolist() == [common(one, other) for one, other in pairwise(paths)]
    for sequence, leaf in zip(sequences, ordered.leaf_of.tolist(), strict=True):
        assert paths[leaf][: len(sequence)] == sequence


def computed(walk: Walk, sequences: list[list[int]], walks: int) -> dict[int, list[tuple[int, ...]]]:
    """Returns the prefixes whose last token a PUSH or POP computed; asserts what every step may read."""
    paths: list[list[int]] = [[] for _ in range(walks)]
    found: dict[int, list[tuple[int, ...]]] = {PUSH: [], POP: []}
    ended: list[int] = []
    for kind, rows, columns in zip(walk.kinds.tolist(), walk.rows.tolist(), walk.columns, strict=True):
        for number, (start, tokens, first, count) in enumerate(rows):
            sequence, position, previous, ends = (x[number].tolist() for x in columns)
            assert min(ends[:tokens], default=1) > 0 and not any(ends[tokens:])
            if not tokens:
                assert count == 0
                continue
            path = paths[number]
            texts = []
            for column in range(tokens):
                seen = [other for other in range(column + 1) if ends[other] > column]
                text = path[:start] + [sequences[sequence[other]][position[other]] for other in seen]
                assert text == sequences[sequence[column]][: position[column] + 1]
                assert previous[column] == (seen[-2] if len(seen) > 1 else -1)
                texts.append(text)
            found[kind] += map(tuple, texts)
            for row, column in walk.endings[first : first + count].tolist():
                # The loss reads the path's statistics, and those of the tokens that this column sees.
                assert sequences[row] == texts[column][: len(sequences[row])]
                ended.append(row)
            if kind == PUSH:  # the columns whose tokens continue each other lie behind the path
                size = next((n for n in range(1, tokens) if previous[n] != n - 1), tokens)
                path[start:] = texts[size - 1][start:]
    assert sorted(ended) == list(range(len(sequences)))
    return found


WALKS, CALL_TOKENS = st.sampled_from([1, 2, 4, 11]), st.sampled_from([0, 1, 3])


@given(KEYS, MOST, st.booleans(), st.booleans(), st.booleans(), WALKS, CALL_TOKENS)
def test_a_walk_reads_only_what_is_on_its_path_and_pops_every_token_once(
    sequences, most, cuts_tail, joins, in_order, walks, call_tokens
):
    found, blocks = tree(sequences), Blocks(most, 1, cuts_tail, joins, call_tokens)
    if in_order:
        found = depth_first(found, blocks)
    walk = plan_walk(found, walks, blocks)
    assert set(walk.buckets.tolist()) <= set(blocks.buckets)
    popped = computed(walk, sequences, walks)[POP]
    distinct = {tuple(each[: end + 1]) for each in sequences for end in range(len(each))}
    assert set(popped) == distinct
    if walks == 1:  # several walks repeat the tokens that their ranges share
        assert len(popped) == walk.tokens(POP) == found.tokens
        if not cuts_tail:
            assert walk.tokens(PUSH) == found.tokens


@given(KEYS, MOST, st.booleans())
def test_a_forward_walk_pushes_every_token_once(sequences, most, joins):
    blocks = Blocks(most, 1, joins_subtrees=joins)
    found = depth_first(tree(sequences), blocks)
    walk = plan_walk(found, 1, blocks, with_gradients=False)
    assert len(computed(walk, sequences, 1)[PUSH]) == walk.tokens(PUSH) == found.tokens
    assert walk.tokens(POP) == 0


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
    assert walk.tokens(PUSH) == predicted
    ratio = (walk.tokens(PUSH) + 3 * walk.tokens(POP)) / (3 * found.sequence_tokens)
    assert ratio == (predicted + 3 * found.tokens) / (3 * found.sequence_tokens) <= 0.15


def test_the_answers_of_a_group_are_computed_together():
    """Sixteen answers of 100 tokens in blocks of 512: five to a call, the last one with the prompt."""
    rng = np.random.default_rng(0)
    prompt = rng.integers(0, 10**6, 60).tolist()
    found = tree([prompt + rng.integers(0, 10**6, 100).tolist() for _ in range(16)])
    blocks = Blocks(512, call_tokens=128)
    walk = plan_walk(depth_first(found, blocks), 1, blocks)
    assert walk.kinds.tolist() == [PUSH, POP, POP, POP, POP]
    assert walk.rows[:, 0, 1].tolist() == [60, 500, 500, 500, 160]
    forward = plan_walk(depth_first(found, blocks), 1, blocks, with_gradients=False)
    assert forward.rows[:, 0, 1].tolist() == [160, 500, 500, 500]


def test_a_subtree_that_fits_a_block_is_one_call():
    """Three groups of four answers, each 150 tokens: two whole groups to a call, and nothing is pushed."""
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, 10**6, 30).tolist() for _ in range(3)]
    found = tree([prompt + rng.integers(0, 10**6, 30).tolist() for prompt in prompts for _ in range(4)])
    for with_gradients, kind in ((True, POP), (False, PUSH)):
        blocks = Blocks(320)
        walk = plan_walk(depth_first(found, blocks), 1, blocks, with_gradients=with_gradients)
        assert walk.kinds.tolist() == [kind, kind]
        assert sorted(walk.rows[:, 0, 1].tolist()) == [150, 300]


def test_cut_tail_lowers_what_is_pushed_and_joined_subtrees_and_order_what_is_computed():
    """Over ten trees, each with the same tokens to pop."""
    joined = Blocks(128, call_tokens=0)
    alone = dataclasses.replace(joined, joins_subtrees=False)
    computed = dict.fromkeys(("plain", "cut tail", "joined", "ordered"), 0)
    for seed in range(10):
        rng = np.random.default_rng(seed)
        sequences: list[list[int]] = []
        for _ in range(40):
            base = sequences[rng.integers(len(sequences))] if sequences else []
            cut = int(rng.integers(0, len(base) + 1))
            sequences.append(base[:cut] + rng.integers(0, 9, int(rng.integers(10, 200))).tolist())
        found = tree(sequences)
        walks = {
            "plain": plan_walk(found, 1, dataclasses.replace(alone, cuts_tail=False)),
            "cut tail": plan_walk(found, 1, alone),
            "joined": plan_walk(found, 1, joined),
            "ordered": plan_walk(depth_first(found, joined), 1, joined),
        }
        assert walks["cut tail"].tokens(PUSH) < walks["plain"].tokens(PUSH) == found.tokens
        assert {walk.tokens(POP) for walk in walks.values()} == {found.tokens}
        for name, walk in walks.items():
            computed[name] += int((np.where(walk.kinds == POP, 3, 1) * walk.buckets).sum())
    assert computed["ordered"] < computed["joined"] < computed["cut tail"] < computed["plain"]


@pytest.mark.parametrize(
    ("most", "buckets"), [(512, (32, 64, 128, 256, 384, 512)), (2048, (128, 256, 512, 1024, 1536, 2048))]
)
def test_there_are_at_most_six_buckets(most, buckets):
    assert Blocks(most).buckets == buckets
