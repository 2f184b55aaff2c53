"""Assigns sequences to rows by AReaL's dynamic batching, and stores a prefix that they share once per row."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from areal_jax.trajectories.prefix_tree import PrefixTree


class Placed(NamedTuple):
    """A sequence in a bin (row)."""

    sequence: int
    shared: int
    """Number of tokens that it shares with the sequence before it in the bin: the most with any of the bin's
    earlier ones.
    """


def allocate(tree: PrefixTree, capacity: int) -> list[list[Placed]]:
    """Returns bins (rows); each sequence of the tree, all of them leaves, is in exactly one bin.

    `capacity`: number of tokens that a bin can hold; no sequence is longer. A bin stores each token that its
    sequences share once. Sequences are placed in the order of the tree's leaves. A sequence goes into a bin
    with which it shares tokens and that has enough space for the others; of several, into the one with which
    it shares most, the first of these. If there is none, it goes into the bin with the fewest sequences among
    the bins with enough space for all its tokens (the first of several), or into a new bin. Fu et al., AReaL:
    A Large-Scale Asynchronous RL System for Language Reasoning, Algorithm 1 with k_min = 1, if nothing is
    shared and the longest sequence is first (`longest_first`).
    """
    count = len(tree.leaves)
    bins: list[list[Placed]] = []
    room = np.zeros(count, np.int64)  # tokens left, by bin
    rank = np.full(count, np.iinfo(np.int64).max)  # by number of sequences, then by index
    path = _Path()
    for index, before, after in zip(
        tree.leaves.tolist(), tree.common[:-1].tolist(), tree.common[1:].tolist(), strict=True
    ):
        path.move(before, after)
        size = int(tree.lengths[index])
        best, shared = path.home(size, room)
        if best < 0:
            fitting = np.flatnonzero(room[: len(bins)] >= size)
            best = int(fitting[rank[fitting].argmin()]) if fitting.size else len(bins)
        if best == len(bins):
            bins.append([])
            room[best], rank[best] = capacity, best
        path.add(best, shared)
        bins[best].append(Placed(index, shared))
        room[best] -= size - shared
        rank[best] += count
    return bins


class _Path:
    """The nodes with several children above a leaf, and the bins that hold their tokens."""

    def __init__(self) -> None:
        self._nodes: list[tuple[int, list[int]]] = []  # tokens of the path to the node; bins, the first first

    def move(self, before: int, after: int) -> None:
        """Go to the next leaf, which shares `before` tokens with the last one and `after` with the next."""
        nodes = self._nodes
        while nodes and nodes[-1][0] > before:
            _, bins = nodes.pop()
            if before > (nodes[-1][0] if nodes else 0):
                nodes.append((before, bins))  # a node of which the last one was the first child
        if after > before:
            nodes.append((after, []))

    def home(self, size: int, room: np.ndarray) -> tuple[int, int]:
        """Returns the bin for the leaf's `size` tokens, and how many of them it has already; -1, 0 for none.

        `room`: tokens left, by bin.
        """
        for depth, bins in reversed(self._nodes):
            best = next((each for each in bins if room[each] >= size - depth), -1)
            if best >= 0:
                return best, depth
        return -1, 0

    def add(self, home: int, shared: int) -> None:
        """Note that the leaf is in the bin `home`, which already had `shared` of its tokens."""
        for depth, bins in reversed(self._nodes):
            if depth <= shared:
                break
            bins.append(home)
