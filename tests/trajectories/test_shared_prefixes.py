"""What trajectories share lies once in a row, as a tree, against brute force over all prefixes."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from areal_jax.trajectories.leaf_order import Blocks, depth_first
from areal_jax.trajectories.packing import pack, plan_batch
from areal_jax.trajectories.prefix_tree import Sampled, tree_of
from areal_jax.trajectories.shared_prefixes import LEAST_ACROSS_GROUPS, shareable_tree
from areal_jax.trajectories.walk import POP, plan_walk
from areal_jax.types import Batch, Group, Prompt, SampleId, Trajectory
from tests.trajectories.samples import trajectory
from tests.trajectories.unpacking import places

LENGTH = 48


def sample(ordinal: int, member: int, tokens: list[int], trained_from: int, mask: int = -1) -> Trajectory:
    """`mask`: the bits of the loss mask from `trained_from` on."""
    place = np.arange(len(tokens)) - trained_from
    is_trained = (place >= 0) & (mask >> np.maximum(place, 0) & 1 > 0)
    return dataclasses.replace(
        trajectory(SampleId(ordinal, member), len(tokens)),
        tokens=np.array(tokens, np.int32),
        loss_mask=is_trained,
        behavior_logp=np.where(is_trained, -1 - member, 0).astype(np.float32),
        versions=np.where(is_trained, 0, -1).astype(np.int32),
        turn_ids=np.where(is_trained, 0, -1).astype(np.int32),
    )


@st.composite
def tries(draw: st.DrawFn) -> list[Group]:
    """Groups whose samples may begin with one of two long texts, and go on with few different tokens."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    rules = rng.integers(0, 2, (2, LEAST_ACROSS_GROUPS))
    groups = []
    for ordinal in range(draw(st.integers(1, 4))):
        members = []
        for member in range(draw(st.integers(1, 5))):
            head = [*rules.tolist(), []][rng.integers(3)]
            tail = rng.integers(0, 2, rng.integers(1, 12)).tolist()
            first = rng.integers(0, len(head + tail) + 1) if rng.random() < 0.3 else len(head + tail) - 1
            members.append(sample(ordinal, member, head + tail, int(first), int(rng.integers(0, 2**30))))
        groups.append(Group(ordinal, Prompt("?"), tuple(members)))
    return groups


def visible(batch: Batch) -> np.ndarray:
    """(B, T, T): whether each query (axis 1) sees each key (axis 2)."""
    columns = np.arange(batch.tokens.shape[1])
    return (columns[:, None] >= columns) & (columns[:, None] < batch.subtree_ends[:, None, :])


def shareable(one: Trajectory) -> int:
    return next((i for i, is_trained in enumerate(one.loss_mask[:-1]) if is_trained), len(one.tokens) - 1)


def families(groups: list[Group]) -> list[int]:
    """Of each trajectory the first group that shares with its group, by closure over pairs of groups."""
    begins = [
        {tuple(t.tokens[:LEAST_ACROSS_GROUPS]) for t in g.trajectories if shareable(t) >= LEAST_ACROSS_GROUPS}
        for g in groups
    ]
    linked = np.array([[one is other or bool(one & other) for other in begins] for one in begins])
    for _ in groups:
        linked = linked.astype(int) @ linked > 0
    return [int(linked[n].argmax()) for n, g in enumerate(groups) for _ in g.trajectories]


@settings(deadline=None)
@given(tries())
def test_a_row_is_the_tree_of_its_trajectories(groups: list[Group]):
    flat = [one for group in groups for one in group.trajectories]
    batch, family = pack(groups, 1, LENGTH), families(groups)
    paths = places(batch)
    ids, tokens, mask = (x.reshape(-1) for x in (batch.segment_ids, batch.tokens, batch.loss_mask))
    sees = np.zeros((len(batch.tokens), LENGTH, LENGTH), bool)
    nodes: dict[int, set] = {row: set() for row in range(len(batch.tokens))}
    readers = np.zeros(ids.shape, int)
    for number, (one, where) in enumerate(zip(flat, paths, strict=True), 1):
        np.testing.assert_array_equal(tokens[where], one.tokens)
        np.testing.assert_array_equal(mask[where], one.loss_mask)
        np.testing.assert_array_equal(batch.positions.reshape(-1)[where], np.arange(len(where)))
        assert (ids[where[shareable(one) :]] == number).all()
        row, columns = int(where[0]) // LENGTH, where % LENGTH
        for place, column in enumerate(columns):
            sees[row, column, columns[: place + 1]] = True
            owner = family[number - 1] if place < shareable(one) else number
            nodes[row].add((place < shareable(one), owner, tuple(one.tokens[: place + 1])))
        readers[where] += 1
    is_token = batch.segment_ids > 0
    np.testing.assert_array_equal(visible(batch)[is_token], sees[is_token])
    assert not visible(batch)[~is_token].any()
    assert (readers.reshape(is_token.shape) > 0).tolist() == is_token.tolist()
    assert (readers[mask] == 1).all() and mask.sum() == sum(one.completion_tokens for one in flat)
    assert ((readers > 1) <= (ids > len(flat))).all() and ((ids > len(flat)) <= (readers > 1)).all()
    assert is_token.sum(1).tolist() == [len(nodes[row]) for row in nodes], "each prefix once per row"


@pytest.mark.parametrize("short", [0, 1])
def test_groups_share_only_long_beginnings(short: int):
    """Fewer than 16 equal tokens across groups count as none; within a group, any number counts."""
    size = LEAST_ACROSS_GROUPS - short
    groups = [
        Group(n, Prompt("?"), tuple(sample(n, m, [7] * size + [n, m, 9], size + 1) for m in range(2)))
        for n in range(2)
    ]
    batch = pack(groups, 1, 64)
    stored = (batch.segment_ids > 0).sum()
    assert stored == (2 * (size + 1 + 2 * 2) if short else size + 2 * (1 + 2 * 2))


def conversations() -> list[Group]:
    """Two groups of three samples: rules for all, a task per group, a turn that two samples share."""
    rules, groups = list(range(100, 116)), []
    for n in range(2):
        task = [*rules, 20 + n, 30]
        turn = [*task, 40, 41, 42]
        samples = [[*turn, 1, 2], [*turn, 3], [*task, 4]]
        starts = [len(turn), len(turn), len(task)]
        members = tuple(sample(n, m, *of) for m, of in enumerate(zip(samples, starts, strict=True)))
        groups.append(Group(n, Prompt("?"), members))
    return groups


def test_a_worked_example():
    """16 tokens of rules, then per group a task of 2, a turn of 3 for samples of 2 and 1, a sample of 1."""
    batch = pack(conversations(), 1, 40)
    assert batch.tokens.shape == (1, 40)
    ids = [7] * 16 + [8] * 2 + [9] * 3 + [1, 1, 2, 3] + [10] * 2 + [11] * 3 + [4, 4, 5, 6] + [0] * 6
    ends = [34] * 16 + [25] * 2 + [24] * 3 + [23, 23, 24, 25] + [34] * 2 + [33] * 3 + [32, 32, 33, 34]
    assert batch.segment_ids[0].tolist() == ids
    assert batch.subtree_ends[0].tolist() == ends + [0] * 6
    previous = np.arange(-1, 33)
    previous[[23, 24, 25, 32, 33]] = 20, 17, 15, 29, 26
    assert batch.previous[0, :34].tolist() == previous.tolist()
    assert batch.positions[0, [15, 18, 21, 23, 24, 25, 27, 33]].tolist() == [15, 18, 21, 21, 18, 16, 18, 18]


def test_a_row_that_shares_most_is_preferred_and_only_what_it_lacks_needs_room():
    """Rules, task, turn and 3 own tokens are 24: in rows of 24 the third samples share another row."""
    plan = plan_batch(conversations(), 1, 26)
    own = plan.pieces.where(plan.pieces.segment <= 6)
    assert own.row.tolist() == [0, 0, 0, 1, 1, 1]
    assert own.size.tolist() == [2, 1, 1, 2, 1, 1]
    own = (tight := plan_batch(conversations(), 1, 24)).pieces.where(tight.pieces.segment <= 6)
    assert own.row.tolist() == [0, 0, 1, 2, 2, 1]
    assert (pack(conversations(), 1, 24).segment_ids > 0).sum(1).tolist() == [24, 18 + 1 + 2 + 1, 24, 0]


@pytest.mark.parametrize(("length", "rows"), [(40, 1), (26, 2)])
def test_rows_repeat_what_a_walk_computes_once(length: int, rows: int):
    """Where the tree does not fit one row, each of its rows has the rules; a walk pops each prefix once."""
    groups = conversations()
    flat = [one for group in groups for one in group.trajectories]
    batch, tree = pack(groups, 1, length), tree_of(list(map(Sampled.of, flat)))
    assert tree.tokens == 34 == shareable_tree(flat, np.repeat([0, 1], 3)).tokens
    assert len(batch.tokens) == rows
    assert (batch.segment_ids > 0).sum() == tree.tokens + 16 * (rows - 1)
    for blocks in (Blocks(8, 2, call_tokens=0), Blocks(40, 40, call_tokens=0)):
        assert plan_walk(depth_first(tree, blocks), 1, blocks).tokens(POP) == tree.tokens
