"""Dynamic batching: every sequence once, nothing over capacity, and less padding than a row each."""

from __future__ import annotations

import dataclasses
import random
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal_jax.trajectories.allocation import allocate
from areal_jax.trajectories.packing import pack
from areal_jax.trajectories.plan import PackingError
from areal_jax.trajectories.shared_prefixes import longest_first, unshared_tree
from areal_jax.types import Group, Prompt, SampleId
from tests.trajectories.samples import group, trajectory
from tests.trajectories.unpacking import unpack

CAPACITY = 16
LENGTHS = st.lists(st.integers(1, CAPACITY), max_size=60)


def alone(lengths: list[int], capacity: int) -> list[list[int]]:
    """The bins of sequences that share no prefix."""
    tree = longest_first(unshared_tree(np.array(lengths, np.int64)))
    return [[index for index, _ in members] for members in allocate(tree, capacity)]


def reference_bins(lengths: list[int], capacity: int) -> list[list[int]]:
    """Algorithm 1, word by word."""
    bins: list[list[int]] = []
    for index in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        fits = [b for b in bins if sum(lengths[i] for i in b) + lengths[index] <= capacity]
        if not fits:
            bins.append([index])
        else:
            min(fits, key=len).append(index)
    return bins


@given(LENGTHS)
def test_bins_are_those_of_algorithm_1(lengths: list[int]):
    assert alone(lengths, CAPACITY) == reference_bins(lengths, CAPACITY)


@given(LENGTHS)
def test_every_sequence_once_within_capacity(lengths: list[int]):
    bins = alone(lengths, CAPACITY)
    assert sorted(index for members in bins for index in members) == list(range(len(lengths)))
    assert all(sum(lengths[index] for index in members) <= CAPACITY for members in bins)
    assert bins == alone(lengths, CAPACITY)


def test_a_worked_example():
    """8 does not fit beside 9 and opens a bin; 5 joins 9, which leaves 4 and 1 to 8."""
    assert alone([4, 9, 5, 8, 1], 14) == [[1, 2], [3, 0, 4]]


def test_of_two_fitting_bins_the_one_with_fewer_sequences_is_taken():
    """After 6+3 | 7, the 2 fits both: bin 1 has one sequence, bin 0 two."""
    assert alone([6, 7, 3, 2], 10) == [[1, 2], [0, 3]]


def long_tail(count: int, cap: int, median: float, sigma: float) -> list[int]:
    lengths = np.random.default_rng(0).lognormal(np.log(median), sigma, count)
    return np.clip(np.round(lengths), 1, cap).astype(int).tolist()


def test_long_tailed_lengths_fill_the_rows():
    """At most 0.8 of the slots that a row each takes, and the rows are at least 95 % full."""
    lengths = long_tail(512, cap=256, median=64, sigma=0.8)
    slots = 256 * len(alone(lengths, 256))
    assert slots <= 0.8 * 256 * len(lengths)
    assert sum(lengths) / slots >= 0.95


# --- pack --------------------------------------------------------------------------------------------

GROUPS = st.lists(st.lists(st.integers(1, CAPACITY), min_size=1, max_size=5), min_size=1, max_size=8)


@given(GROUPS, st.integers(1, 4), st.randoms(use_true_random=False))
def test_unpacking_gives_every_trajectory_back_in_order(
    sizes: list[list[int]], rows: int, chance: random.Random
):
    groups = [group(ordinal, lengths) for ordinal, lengths in enumerate(sizes)]
    shuffled = chance.sample(groups, len(groups))
    segments = unpack(pack(shuffled, rows, CAPACITY))
    wanted = [(number, one) for number, g in enumerate(groups) for one in g.trajectories]
    assert len(segments) == len(wanted)
    for segment, (number, one) in zip(segments, wanted, strict=True):
        for name in ("tokens", "loss_mask", "behavior_logp", "versions", "turn_ids"):
            array = getattr(one, name)
            assert segment[name].dtype == array.dtype
            np.testing.assert_array_equal(segment[name], array)
        np.testing.assert_array_equal(segment["positions"], np.arange(len(one.tokens)))
        assert segment["reward"] == np.float32(one.reward)
        assert (segment["group_id"], segment["temperature"]) == (number, one.sampling.temperature)
        assert segment["truncated"] == one.truncated


@given(GROUPS, st.integers(1, 4), st.integers(1, 4))
def test_a_minibatch_owns_its_rows_and_all_have_equally_many(
    sizes: list[list[int]], rows: int, minibatches: int
):
    groups = [group(ordinal, lengths) for ordinal, lengths in enumerate(sizes * minibatches)]
    batch = pack(groups, rows, CAPACITY, minibatches)
    flat = [length for lengths in sizes for length in lengths]
    needed = -(-len(alone(flat, CAPACITY)) // rows)
    micro_batches = next(2**n for n in range(10) if 2**n >= needed)
    assert batch.tokens.shape == (minibatches * micro_batches * rows, CAPACITY)
    own_rows = micro_batches * rows
    for number in range(minibatches):
        ids = batch.segment_ids[number * own_rows : (number + 1) * own_rows]
        owned = np.unique(batch.group_ids[ids[ids > 0] - 1])
        np.testing.assert_array_equal(owned, np.arange(len(sizes)) + number * len(sizes))


def test_padding_holds_the_values_that_mean_nothing():
    batch = pack([group(0, [3, 5])], rows=4, length=8)
    assert batch.tokens.shape == (4, 8)
    np.testing.assert_array_equal(batch.segment_ids[0], [2, 2, 2, 2, 2, 1, 1, 1])
    np.testing.assert_array_equal(batch.positions[0], [0, 1, 2, 3, 4, 0, 1, 2])
    empty = batch.segment_ids == 0
    assert empty.sum() == 24
    for name, value in {"tokens": 0, "positions": 0, "loss_mask": 0, "versions": -1, "turn_ids": -1}.items():
        assert np.all(getattr(batch, name)[empty] == value), name
    assert {name: getattr(batch, name).dtype.name for name in batch._fields[:12]} == {
        "tokens": "int32",
        "positions": "int32",
        "segment_ids": "int32",
        "loss_mask": "bool",
        "behavior_logp": "float32",
        "versions": "int32",
        "turn_ids": "int32",
        "previous": "int32",
        "reward": "float32",
        "group_ids": "int32",
        "temperature": "float32",
        "truncated": "bool",
    }
    assert batch.support is None


def test_the_number_of_micro_batches_is_the_next_power_of_two():
    """5 rows of 2 a micro-batch are 3 micro-batches, so 4."""
    assert pack([group(0, [8] * 5)], rows=2, length=8).tokens.shape == (8, 8)
    assert pack([group(0, [8] * 4)], rows=2, length=8).tokens.shape == (4, 8)


def test_supports_travel_or_are_refused_where_they_differ():
    def with_support(widths: list[int | None]) -> Group:
        made = [trajectory(SampleId(0, m), 4, support=width) for m, width in enumerate(widths)]
        return Group(0, Prompt("?"), tuple(made))

    made = with_support([3, 3])
    segments = unpack(pack([made], rows=2, length=6))
    for segment, one in zip(segments, made.trajectories, strict=True):
        np.testing.assert_array_equal(segment["support"], one.support)
    assert np.all(pack([made], rows=2, length=6).support[:, 4:] == -1)
    for differing in ([3, None], [None, 3], [3, 2]):
        with pytest.raises(PackingError, match=r"SampleId\(ordinal=0, member=1.*support_size"):
            pack([with_support(differing)], rows=2, length=6)


def test_experts_travel_or_are_refused_where_they_differ():
    def with_experts(widths: list[int | None]) -> Group:
        made = [trajectory(SampleId(0, m), 4, experts=width) for m, width in enumerate(widths)]
        return Group(0, Prompt("?"), tuple(made))

    made = with_experts([6, 6])
    batch = pack([made], rows=2, length=6)
    for segment, one in enumerate(made.trajectories, 1):
        np.testing.assert_array_equal(batch.experts[batch.segment_ids == segment], one.experts)
    assert batch.experts.dtype == np.uint8 and np.all(batch.experts[:, 4:] == 255)
    assert pack([with_experts([None])], rows=2, length=6).experts is None
    for differing in ([6, None], [None, 6], [6, 4]):
        with pytest.raises(PackingError, match=r"SampleId\(ordinal=0, member=1.*experts per token"):
            pack([with_experts(differing)], rows=2, length=6)


def test_what_cannot_be_packed_is_named_with_its_remedy():
    good = group(0, [3, 3])
    unscored = dataclasses.replace(good.trajectories[1], reward=None)
    with pytest.raises(PackingError, match=r"SampleId\(ordinal=0, member=1, attempt=0\) has no reward"):
        pack([Group(0, Prompt("?"), (good.trajectories[0], unscored))], 1, 8)
    with pytest.raises(PackingError, match=r"member=0, attempt=0\) has 9 tokens.*raise trainer\.length"):
        pack([group(0, [9])], 1, 8)
    with pytest.raises(PackingError, match="has 0 tokens"):
        pack([group(0, [0])], 1, 8)
    with pytest.raises(PackingError, match="3 groups cannot be split into 2 equal minibatches"):
        pack([group(n, [2]) for n in range(3)], 1, 8, minibatches=2)
    with pytest.raises(PackingError, match="0 groups"):
        pack([], 1, 8)


def test_packing_costs_a_sequence_the_same_however_many_there_are():
    """In Python calls, which no busy machine changes."""

    def calls(count: int) -> int:
        groups = [group(n, long_tail(8, cap=18, median=6, sigma=0.8)) for n in range(count)]
        pack(groups, 8, 32)
        made = 0

        def see(_frame: object, event: str, _arg: object) -> None:
            nonlocal made
            made += event in ("call", "c_call")

        sys.setprofile(see)
        try:
            pack(groups, 8, 32)
        finally:
            sys.setprofile(None)
        return made

    few, many = calls(16), calls(64)
    assert few < 128 * 80, "for each of 128 sequences"
    assert many < 4.1 * few
