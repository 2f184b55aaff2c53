"""Which row a sequence goes into: AReaL's dynamic batching (Algorithm 1), with prompts that groups share."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from areal_jax.types import ArealError


class PackingError(ArealError):
    """Trajectories that fit no row or make no batch; the message names the sample and the setting."""


def allocate(
    lengths: Sequence[int],
    capacity: int,
    k_min: int = 1,
    groups: Sequence[int] | None = None,
    prompts: Sequence[int] | None = None,
) -> list[list[int]]:
    """Indices of `lengths` in bins of at most `capacity`: at least `k_min` bins, each sequence in one.

    Longest first; a sequence opens a bin while there are fewer than `k_min` or where nothing fits, and else
    joins the fitting bin of fewest sequences, the lowest of equals. Fewer sequences than `k_min` get a bin
    each. Raises PackingError for a sequence longer than `capacity`.
    Fu et al., AReaL: A Large-Scale Asynchronous RL System for Language Reasoning, Algorithm 1.

    With `groups`, sequence i of group g begins with the `prompts[g]` tokens that all of its group begin with;
    they lie once in a bin for all of the group's sequences there, so these go in one after the other, and
    first of all to where their prompt lies already.
    """
    sizes = np.asarray(lengths, np.int64)
    if sizes.size and sizes.max() > capacity:
        longest = int(sizes.argmax())
        raise PackingError(
            f"sequence {longest} has {sizes[longest]} tokens, more than the capacity {capacity}"
        )
    owner = np.arange(len(sizes)) if groups is None else np.asarray(groups)
    shared = np.zeros(len(sizes), np.int64) if prompts is None else np.asarray(prompts)[owner]
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
        elif len(bins) >= k_min:
            fitting = np.flatnonzero(room[: len(bins)] >= size)
            best = int(fitting[rank[fitting].argmin()]) if fitting.size else -1
        if best < 0:
            best = len(bins)
            bins.append([])
            room[best], rank[best] = capacity, best
        if size == sizes[index]:
            own.append(best)
        bins[best].append(index)
        room[best] -= size
        rank[best] += len(sizes)
    return bins


def _order(sizes: np.ndarray, owner: np.ndarray, shared: np.ndarray) -> np.ndarray:
    """Longest first; sequences that share a prompt stay together, at the place of their longest."""
    longest = sizes.copy()
    if shared.any():
        of_group = np.zeros(owner.max() + 1, np.int64)
        np.maximum.at(of_group, owner, sizes)
        longest = np.where(shared > 0, of_group[owner], sizes)
    together = np.where(shared > 0, owner, -1)
    return np.lexsort((np.arange(len(sizes)), -sizes, together, -longest))
