"""Assigns sequences to rows by AReaL's dynamic batching, extended: a row stores a group's prompt once."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from areal_jax.types import ArealError


class PackingError(ArealError):
    """Trajectories cannot be packed into a batch; the message names the sample and the setting to change."""


def allocate(
    lengths: Sequence[int] | np.ndarray,
    capacity: int,
    groups: Sequence[int] | np.ndarray,
    prompts: Sequence[int] | np.ndarray,
) -> list[list[int]]:
    """Returns bins, each a list of indices into `lengths`; every index is in exactly one bin.

    `lengths`: tokens of each sequence; `capacity`: most tokens of a bin. Sequences are placed longest first.
    Each joins, of the bins with enough space left, the one with the fewest sequences (the first of several),
    or opens a new bin if there is none. Raises PackingError if a sequence is longer than `capacity`. Fu et
    al., AReaL: A Large-Scale Asynchronous RL System for Language Reasoning, Algorithm 1 with k_min = 1.

    Sequence i is in group g = `groups[i]`; all sequences of the group begin with the same `prompts[g]`
    tokens. A bin stores these tokens once for all its sequences of the group, so the sequences of a group are
    placed one after the other, preferably in a bin that already has their prompt.
    """
    sizes = np.asarray(lengths, np.int64)
    if sizes.size and sizes.max() > capacity:
        longest = int(sizes.argmax())
        raise PackingError(
            f"sequence {longest} has {sizes[longest]} tokens, more than the {capacity} tokens of a row; "
            "raise trainer.length"
        )
    owner = np.asarray(groups, np.int64)
    shared = np.asarray(prompts, np.int64)[owner]
    bins: list[list[int]] = []
    room = np.zeros(len(sizes), np.int64)  # tokens left, by bin
    rank = np.full(len(sizes), np.iinfo(np.int64).max)  # by number of sequences, then by index
    homes: dict[int, list[int]] = {}  # bins with a group's prompt
    for index in _order(sizes, owner, shared).tolist():
        size, prompt = int(sizes[index]), int(shared[index])
        own = homes.setdefault(int(owner[index]), []) if prompt else []
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
        if size == sizes[index]:
            own.append(best)
        bins[best].append(index)
        room[best] -= size
        rank[best] += len(sizes)
    return bins


def _order(sizes: np.ndarray, owner: np.ndarray, shared: np.ndarray) -> np.ndarray:
    """Returns the indices of the sequences in the order of their placement.

    Longest first, but sequences of a group with a shared prompt follow each other, at the place of their
    longest. `sizes`: tokens of each sequence; `owner`: its group; `shared`: prompt tokens that it shares, or
    0.
    """
    longest = sizes.copy()
    if shared.any():
        of_group = np.zeros(owner.max() + 1, np.int64)
        np.maximum.at(of_group, owner, sizes)
        longest = np.where(shared > 0, of_group[owner], sizes)
    together = np.where(shared > 0, owner, -1)
    return np.lexsort((np.arange(len(sizes)), -sizes, together, -longest))
