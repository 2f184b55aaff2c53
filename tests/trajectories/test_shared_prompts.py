"""A group's prompt lies once in each row: nothing is lost, and every token knows what comes before it."""

from __future__ import annotations

import dataclasses

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from areal_jax.trajectories.allocation import allocate
from areal_jax.trajectories.packing import pack
from areal_jax.types import Group, Prompt, SampleId
from tests.trajectories.samples import trajectory
from tests.trajectories.unpacking import unpack

LENGTH = 24


def asked(ordinal: int, prompt: int, completions: list[int]) -> Group:
    """Members that begin with the same `prompt` tokens and sample everything behind them."""
    members = []
    for member, size in enumerate(completions):
        one = trajectory(SampleId(ordinal, member), prompt + size, reward=float(member))
        sampled = np.arange(prompt + size) >= prompt
        tokens = np.where(sampled, one.tokens, ordinal * 100 + np.arange(prompt + size)).astype(np.int32)
        members.append(
            dataclasses.replace(
                one,
                tokens=tokens,
                loss_mask=sampled,
                behavior_logp=np.where(sampled, -0.5 - member, 0).astype(np.float32),
                versions=np.where(sampled, 3, -1).astype(np.int32),
                turn_ids=np.where(sampled, 0, -1).astype(np.int32),
            )
        )
    return Group(ordinal, Prompt("?"), tuple(members))


GROUPS = st.lists(
    st.tuples(st.integers(1, 12), st.lists(st.integers(1, 12), min_size=1, max_size=6)),
    min_size=1,
    max_size=6,
).map(lambda sizes: [asked(ordinal, *size) for ordinal, size in enumerate(sizes)])


@given(GROUPS, st.integers(1, 3))
def test_unpacking_gives_whole_trajectories_back(groups: list[Group], rows: int):
    segments = unpack(pack(groups, rows, LENGTH))
    wanted = [one for group in groups for one in group.trajectories]
    assert len(segments) == len(wanted)
    for segment, one in zip(segments, wanted, strict=True):
        for name in ("tokens", "loss_mask", "behavior_logp", "versions", "turn_ids"):
            np.testing.assert_array_equal(segment[name], getattr(one, name))
        np.testing.assert_array_equal(segment["positions"], np.arange(len(one.tokens)))


@given(GROUPS)
def test_following_previous_and_context_gives_every_trajectory(groups: list[Group]):
    """From a trajectory's last token back to its first, column by column of one row."""
    batch = pack(groups, 1, LENGTH)
    wanted = [one for group in groups for one in group.trajectories]
    for number, one in enumerate(wanted, 1):
        (row,) = set(np.argwhere(batch.segment_ids == number)[:, 0].tolist())
        column = int(np.argwhere(batch.segment_ids[row] == number).max())
        read, seen = [], set()
        while column >= 0:
            read.append(int(batch.tokens[row, column]))
            seen.add(int(batch.segment_ids[row, column]))
            column = int(batch.previous[row, column])
        np.testing.assert_array_equal(read[::-1], one.tokens)
        at = batch.segment_ids[row] == number
        context = 0 if batch.context_ids is None else int(batch.context_ids[row][at][0])
        assert seen == ({number, context} if context else {number})
        if context:
            assert np.argwhere(batch.segment_ids[row] == context).max() < np.argwhere(at).min()


@given(GROUPS)
def test_a_prompt_lies_once_in_a_row_and_is_never_trained(groups: list[Group]):
    batch = pack(groups, 1, LENGTH)
    count = len(batch.reward)
    is_prompt = batch.segment_ids > count
    assert not batch.loss_mask[is_prompt].any()
    for ids, tokens in zip(batch.segment_ids, batch.tokens, strict=True):
        prompts = [tuple(tokens[ids == segment]) for segment in set(ids[ids > count].tolist())]
        assert len(set(prompts)) == len(prompts)
    assert batch.loss_mask.sum() == sum(t.loss_mask.sum() for g in groups for t in g.trajectories)


def test_a_worked_example():
    """Prompt of 3; completions of 4 and 2: one row of 9 tokens, where repeated prompts take 12."""
    group = asked(5, 3, [4, 2])
    batch = pack([group], 1, 12)
    np.testing.assert_array_equal(batch.segment_ids[0], [3, 3, 3, 1, 1, 1, 1, 2, 2, 0, 0, 0])
    np.testing.assert_array_equal(batch.context_ids[0], [0, 0, 0, 3, 3, 3, 3, 3, 3, 0, 0, 0])
    np.testing.assert_array_equal(batch.positions[0], [0, 1, 2, 3, 4, 5, 6, 3, 4, 0, 0, 0])
    np.testing.assert_array_equal(batch.previous[0], [-1, 0, 1, 2, 3, 4, 5, 2, 7, -1, -1, -1])
    repeated = pack([group], 1, 12, layout="repeated")
    assert repeated.context_ids is None
    np.testing.assert_array_equal(repeated.segment_ids[0], [1] * 7 + [2] * 5)


def test_a_group_that_fits_no_row_repeats_its_prompt_only_there():
    """Prompt 4, seven completions of 5, rows of 24: four in a row, so two copies of the prompt."""
    groups = [asked(0, 4, [5] * 7)]
    batch = pack(groups, 1, 24)
    assert batch.tokens.shape == (2, 24)
    assert sorted(set(batch.segment_ids.ravel().tolist())) == list(range(10))  # padding, 7 members, 2 prompts
    assert pack(groups, 1, 24, layout="repeated").tokens.shape == (4, 24)


@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(1, 6)), min_size=1, max_size=40),
    st.lists(st.integers(0, 10), min_size=4, max_size=4),
)
def test_bins_with_shared_prompts_hold_no_more_than_fits(members: list[tuple[int, int]], prompts: list[int]):
    owners = [owner for owner, _ in members]
    lengths = [prompts[owner] + own for owner, own in members]
    bins = allocate(np.array(lengths), 16, np.array(owners), np.array(prompts))
    assert sorted(index for members in bins for index in members) == list(range(len(lengths)))
    for inside in bins:
        tokens = sum(prompts[owner] for owner in {owners[i] for i in inside})
        assert tokens + sum(lengths[i] - prompts[owners[i]] for i in inside) <= 16
