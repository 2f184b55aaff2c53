"""Assigns sequences to rows by AReaL's dynamic batching, and stores a group's prompt once per row."""

from __future__ import annotations

import numpy as np


def allocate(lengths: np.ndarray, capacity: int, groups: np.ndarray, prompts: np.ndarray) -> list[list[int]]:
    """Returns bins (rows), each a list of indices into `lengths`; every index is in exactly one bin.

    `lengths`: tokens of each sequence, at most `capacity`, the number of tokens that a bin can hold.
    Sequences are placed longest first. A sequence goes into the bin with the fewest sequences among the bins
    with enough space (the first of several), or into a new bin if no bin has enough. Fu et al., AReaL: A
    Large-Scale Asynchronous RL System for Language Reasoning, Algorithm 1 with k_min = 1.

    Sequence i is in group g = `groups[i]`; all sequences of the group begin with the same `prompts[g]`
    tokens. A bin stores these tokens once for all its sequences of the group, so the sequences of a group are
    placed one after the other, preferably in a bin that already has the group's prompt.
    """
    shared = prompts[groups]
    bins: list[list[int]] = []
    room = np.zeros(len(lengths), np.int64)  # tokens left, by bin
    rank = np.full(len(lengths), np.iinfo(np.int64).max)  # by number of sequences, then by index
    homes: dict[int, list[int]] = {}  # bins with a group's prompt
    for index in _order(lengths, groups, shared).tolist():
        size, prompt = int(lengths[index]), int(shared[index])
        own = homes.setdefault(int(groups[index]), []) if prompt else []
        best = next((home for home in own if room[home] >= size - prompt), -1)
        if best >= 0:
            size -= prompt
        else:
            fitting = np.flatnonzero(room[: len(bins)] >= size)
            best = int(fitting[rank[fitting].argmin()]) if fitting.size else -1
        if best < 0:
            best = len(bins)
            bins.append([])
            room[best], rank[best] = capacity, best
        # Its prompt is in this bin now: later members of its group share it there.
        if size == lengths[index]:
            own.append(best)
        bins[best].append(index)
        room[best] -= size
        rank[best] += len(lengths)
    return bins


def _order(lengths: np.ndarray, groups: np.ndarray, shared: np.ndarray) -> np.ndarray:
    """Returns the indices of the sequences in the order of their placement.

    Longest first, but sequences of a group with a shared prompt follow each other, at the place of the
    group's longest sequence. For each sequence, `lengths` is the number of tokens, `groups` the group, and
    `shared` the number of prompt tokens shared with the group (0: none).
    """
    of_group = np.zeros(groups.max(initial=0) + 1, np.int64)
    np.maximum.at(of_group, groups, lengths)
    longest = np.where(shared > 0, of_group[groups], lengths)
    together = np.where(shared > 0, groups, -1)
    return np.lexsort((np.arange(len(lengths)), -lengths, together, -longest))
