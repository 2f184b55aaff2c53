"""A batch built in parts, each from a plan and the trajectories in it, is the batch built at once."""

from __future__ import annotations

import dataclasses
import random

import msgpack
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal_jax.trajectories.packing import pack, plan_batch
from areal_jax.trajectories.paths import paths_of
from areal_jax.trajectories.plan import BatchPlan, PackingError, fill
from areal_jax.types import Batch, Group, Prompt, SampleId, Trajectory
from tests.trajectories.samples import group, trajectory
from tests.trajectories.test_shared_prompts import GROUPS, LENGTH

PER_SEQUENCE = ("reward", "group_ids", "temperature", "truncated", "sample_ids")


def sent(plan: BatchPlan) -> BatchPlan:
    """The plan as another process gets it."""
    return BatchPlan.from_wire(msgpack.unpackb(msgpack.packb(plan.to_wire())))


def flat(groups: list[Group]) -> list[Trajectory]:
    return [one for group in groups for one in group.trajectories]


def assert_rows_of(whole: Batch, rows: np.ndarray, part: Batch) -> None:
    for name, wanted, found in zip(Batch._fields, whole, part, strict=True):
        if wanted is None:
            assert found is None, name
            continue
        wanted = wanted if name in PER_SEQUENCE else wanted[rows]
        assert found.dtype == wanted.dtype, name
        np.testing.assert_array_equal(found, wanted, err_msg=name)


@given(
    GROUPS,
    st.integers(1, 3),
    st.integers(1, 3),
    st.sampled_from(["shared", "repeated"]),
    st.randoms(use_true_random=False),
)
def test_parts_from_their_own_trajectories_are_the_rows_of_the_whole(
    groups: list[Group], rows: int, processes: int, prompts, chance: random.Random
):
    """Rows dealt out at random; nobody has a trajectory of which nothing lies in its rows."""
    whole = pack(groups, rows, LENGTH, layout=prompts)
    plan = sent(plan_batch(groups, rows, LENGTH, layout=prompts))
    assert plan.rows == len(whole.tokens)
    everybody = flat(groups)
    owner = np.array([chance.randrange(processes) for _ in range(plan.rows)])
    for process in range(processes):
        own = np.flatnonzero(owner == process)
        sources = plan.sources(own)
        assert all(everybody[place].sample == sample for place, sample in sources.items())
        segments = set(whole.segment_ids[own].ravel().tolist()) - {0}
        assert {segment - 1 for segment in segments if segment <= len(everybody)} <= set(sources)
        assert_rows_of(whole, own, fill(plan, own, {place: everybody[place] for place in sources}))


def test_supports_are_filled_and_rows_without_tokens_have_their_shape():
    members = tuple(trajectory(SampleId(0, member), 4, support=3) for member in range(2))
    groups = [Group(0, Prompt("?"), members)]
    whole, plan = pack(groups, 4, 8), plan_batch(groups, 4, 8)
    for row in range(4):
        own = np.array([row])
        sources = plan.sources(own)
        assert_rows_of(whole, own, fill(plan, own, {place: members[place] for place in sources}))
    assert plan.sources(np.array([3])) == {}


def test_a_plan_is_small_beside_its_batch():
    """64 trajectories of 500 tokens: a few hundred bytes each, not a few thousand."""
    groups = [group(ordinal, [500] * 8) for ordinal in range(8)]
    assert len(msgpack.packb(plan_batch(groups, 4, 1024).to_wire())) < 64 * 250


def test_trajectories_that_are_not_the_planned_ones_are_refused_by_name():
    groups = [group(0, [3, 5])]
    plan, (first, second) = plan_batch(groups, 1, 8), flat(groups)
    rows = np.arange(plan.rows)
    named = r"trajectory 1 of the batch plan is SampleId\(ordinal=0, member=1, attempt=0\) of 5 tokens, but "
    longer = dataclasses.replace(second, tokens=np.append(second.tokens, 0))
    for given_, got in [
        ({}, "none"),
        ({1: first}, r"SampleId\(ordinal=0, member=0"),
        ({1: longer}, ".* of 6"),
    ]:
        with pytest.raises(PackingError, match=named + got + ".* was given"):
            fill(plan, rows, {0: first, **given_})
    plain = plan.to_wire()
    for broken in ({**plain, "tokens": [1, 2]}, {**plain, "pieces": plain["pieces"][:3]}, {"rows": 1}):
        with pytest.raises(
            PackingError, match=r"batch plan has an unknown form .*the same areal-jax version"
        ):
            BatchPlan.from_wire(broken)


def branched(ordinal: int, counts: list[int]) -> Group:
    """A group of samples with so many branches; a branch shares the sample's first four tokens."""
    members = []
    for member, count in enumerate(counts):
        one = trajectory(SampleId(ordinal, member), 6)
        others = []
        for place in range(count):
            other = trajectory(SampleId(ordinal, member), 5 + place, reward=None)
            tokens = np.where(np.arange(5 + place) < 4, other.tokens, other.tokens + 100 * (place + 1))
            mask = np.arange(5 + place) >= 4
            others.append(dataclasses.replace(other, tokens=tokens.astype(np.int32), loss_mask=mask))
        members.append(dataclasses.replace(one, branches=tuple(others)))
    return Group(ordinal, Prompt("?"), tuple(members))


@pytest.mark.parametrize("layout", ["shared", "repeated", "apart"])
def test_the_paths_of_samples_are_sequences_of_their_own(layout):
    """Eleven paths of five samples in two minibatches; two processes fill their rows from whole samples."""
    groups = [branched(1, [0, 2, 1]), branched(0, [3, 0])]
    whole, plan = pack(groups, 2, 9, 2, layout), sent(plan_batch(groups, 2, 9, 2, layout))
    assert whole.sample_ids.tolist() == [0, 0, 0, 0, 1, 2, 3, 3, 3, 4, 4, 4, 4, 4, 4, 4]
    assert whole.group_ids.tolist() == [0] * 5 + [1] * 11
    of = [groups[1].trajectories[0]] * 4 + [groups[1].trajectories[1]]
    of += [groups[0].trajectories[member] for member in (0, 1, 1, 1, 2, 2)]
    np.testing.assert_array_equal(whole.reward[:11], [one.reward for one in of])
    for place, one in enumerate(of):
        path = paths_of(one)[place - [sample is one for sample in of].index(True)]
        at = np.nonzero(whole.segment_ids == place + 1)
        own = path.tokens[-len(at[0]) :]
        np.testing.assert_array_equal(whole.tokens[at], own)
        np.testing.assert_array_equal(whole.loss_mask[at], path.loss_mask[-len(own) :])
        assert whole.loss_mask[at].sum() == path.loss_mask.sum()
        assert whole.positions[at][-1] == len(path.tokens) - 1
    # Two siblings share what is before them; nothing is after the 16 sequences but what is shared.
    assert (whole.segment_ids.max() > 16) == (layout == "shared")
    for rows in np.array_split(np.arange(plan.rows), 2):
        sources = plan.sources(rows)
        assert all(of[place].sample == sample for place, sample in sources.items())
        assert_rows_of(whole, rows, fill(plan, rows, {place: of[place] for place in sources}))


def test_a_sample_with_another_number_of_paths_is_refused():
    groups = [branched(0, [1])]
    plan = plan_batch(groups, 2, 9)
    with pytest.raises(PackingError, match=r"trajectory 1 of the batch plan is .* but none"):
        fill(plan, np.arange(plan.rows), dict.fromkeys(range(2), trajectory(SampleId(0, 0), 6)))
