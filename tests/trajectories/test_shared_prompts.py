"""A group's prompt lies once in each row: nothing is lost, and every token knows what comes before it."""

from __future__ import annotations

import dataclasses

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from areal_jax.trajectories.allocation import allocate
from areal_jax.trajectories.packing import pack
from areal_jax.trajectories.shared_prefixes import longest_first, shareable_tree
from areal_jax.types import Group, Prompt, SampleId
from tests.trajectories.samples import trajectory
from tests.trajectories.unpacking import places, unpack

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
def test_a_trajectory_is_its_own_segment_behind_its_prompts(groups: list[Group]):
    batch = pack(groups, 1, LENGTH)
    ids = batch.segment_ids.reshape(-1)
    for number, where in enumerate(places(batch), 1):
        own = np.flatnonzero(ids == number)
        np.testing.assert_array_equal(where[-len(own) :], own)
        shared = ids[where[: -len(own)]]
        assert (shared > len(batch.reward)).all() and len(set(shared.tolist())) <= 1


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
    np.testing.assert_array_equal(batch.subtree_ends[0], [9, 9, 9, 7, 7, 7, 7, 9, 9, 0, 0, 0])
    np.testing.assert_array_equal(batch.positions[0], [0, 1, 2, 3, 4, 5, 6, 3, 4, 0, 0, 0])
    np.testing.assert_array_equal(batch.previous[0], [-1, 0, 1, 2, 3, 4, 5, 2, 7, -1, -1, -1])
    repeated = pack([group], 1, 12, layout="repeated")
    assert repeated.subtree_ends is None
    np.testing.assert_array_equal(repeated.segment_ids[0], [1] * 7 + [2] * 5)


def test_a_group_that_fits_no_row_repeats_its_prompt_only_there():
    """Prompt 4, seven completions of 5, rows of 24: four in a row, so two copies of the prompt."""
    groups = [asked(0, 4, [5] * 7)]
    batch = pack(groups, 1, 24)
    assert batch.tokens.shape == (2, 24)
    assert sorted(set(batch.segment_ids.ravel().tolist())) == list(range(10))  # padding, 7 members, 2 prompts
    assert pack(groups, 1, 24, layout="repeated").tokens.shape == (4, 24)


def bins_of_prompts(groups: list[list[int]], prompts: list[int], capacity: int) -> list[list[int]]:
    """Groups placed by their longest trajectory, their members the longest first, beside their prompt."""
    lengths = [prompt + own for prompt, sizes in zip(prompts, groups, strict=True) for own in sizes]
    owner = [number for number, sizes in enumerate(groups) for _ in sizes]
    is_shared = [prompts[g] > 0 and len(groups[g]) > 1 for g in owner]
    longest = [max(n for n, g in zip(lengths, owner, strict=True) if g == mine) for mine in owner]
    rank = [
        (-longest[i], True, owner[i], -lengths[i], i) if is_shared[i] else (-lengths[i], False, -1, 0, i)
        for i in range(len(lengths))
    ]
    bins: list[list[int]] = []
    homes: dict[int, list[list[int]]] = {}

    def used(members: list[int]) -> int:
        held = {owner[i] for i in members if is_shared[i]}
        own = sum(lengths[i] - prompts[owner[i]] * is_shared[i] for i in members)
        return own + sum(prompts[g] for g in held)

    for index in sorted(range(len(lengths)), key=rank.__getitem__):
        own = homes.setdefault(owner[index], []) if is_shared[index] else []
        found = next((b for b in own if used([*b, index]) <= capacity), None)
        if found is None:
            with_room = [b for b in bins if used(b) + lengths[index] <= capacity]
            found = min(with_room, key=len) if with_room else []
            own.append(found)
            bins += [found] if not found else []
        found.append(index)
    return bins


@given(GROUPS)
def test_bins_are_those_of_groups_that_share_their_prompt(groups: list[Group]):
    flat = [one for group in groups for one in group.trajectories]
    owner = np.repeat(np.arange(len(groups)), [len(group.trajectories) for group in groups])
    bins = allocate(longest_first(shareable_tree(flat, owner)), LENGTH)
    prompts = [int((~group.trajectories[0].loss_mask).sum()) for group in groups]
    sizes = [[one.completion_tokens for one in group.trajectories] for group in groups]
    assert [[index for index, _ in members] for members in bins] == bins_of_prompts(sizes, prompts, LENGTH)
