"""The layouts that `bench packed` compares."""

from __future__ import annotations

import numpy as np

from areal_jax.lab.bench.packed import skewed_groups, split
from areal_jax.trajectories.packing import pack


def test_micro_batches_of_equally_many_sequences_hold_each_once_and_are_as_few_as_fit():
    """Twelve micro-batches of 5 or 6 sequences; with eleven, one would need a fifth row."""
    rows, length = 4, 64
    groups = skewed_groups(64, length, 20.0, 0.8, 4, 250)
    sizes = [len(one.tokens) for group in groups for one in group.trajectories]
    batch = split(groups, rows, length)
    micro = batch.segment_ids.reshape(-1, rows * length)
    held = [set(row[row > 0].tolist()) for row in micro]
    assert sorted(number for each in held for number in each) == list(range(1, 65))
    counts = [len(each) for each in held]
    assert max(counts) - min(counts) <= 1
    assert np.bincount(batch.segment_ids.ravel())[1:].tolist() == sizes
    flat = [one for group in groups for one in group.trajectories]
    for number, one in enumerate(flat, start=1):
        assert batch.tokens[batch.segment_ids == number].tolist() == one.tokens.tolist()
    # With one micro-batch less, some part would need more rows than a micro-batch has.
    fewer = np.array_split(np.array(sizes), len(micro) - 1)
    assert max(rows_needed(part.tolist(), length) for part in fewer) > rows
    assert len(micro) > len(pack(groups, rows, length).tokens) / rows


def rows_needed(sizes: list[int], length: int) -> int:
    """A lower bound by tokens, and the count of sequences of which no two fit a row."""
    return max(-(-sum(sizes) // length), sum(size > length // 2 for size in sizes))
