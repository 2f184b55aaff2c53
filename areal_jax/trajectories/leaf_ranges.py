"""Cuts the leaves of a prefix tree into contiguous ranges of nearly equal cost, one for each walk."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from areal_jax.trajectories.prefix_tree import PrefixTree

TOLERANCE = 1e-4
"""The largest range may cost more than necessary by this share of the cost of all leaves."""


class LeafCosts(NamedTuple):
    """What the leaves of a range cost, in any unit."""

    call: float
    """Of each leaf, beside its tokens."""
    token: float
    """Of each distinct token on the paths to the range's leaves."""
    pair: float
    """Of each such token and token before it on its path, and of the token and itself."""


TOKENS = LeafCosts(call=0.0, token=1.0, pair=0.0)
"""A range costs the number of its distinct tokens."""


def ranges(tree: PrefixTree, count: int, costs: LeafCosts = TOKENS) -> np.ndarray:
    """Returns `count` + 1 ascending bounds that cut the leaves into ranges of nearly equal cost.

    The tokens of a range are those of its own tree: its first leaf shares nothing, so it pays for its whole
    path. Ranges may be empty. The cost of the largest range is the smallest possible to TOLERANCE, found by
    bisection.
    """
    ends, common = tree.lengths[tree.leaves], tree.common[:-1]

    def path(tokens: np.ndarray) -> np.ndarray:
        return costs.token * tokens + costs.pair * tokens * (tokens + 1) / 2

    shared = path(common)
    own = np.concatenate([[0.0], np.cumsum(path(ends) - shared + costs.call)])

    def cut(limit: float) -> list[int]:
        bounds = [0]
        while bounds[-1] < len(ends) and len(bounds) <= count:
            start = bounds[-1]
            room = limit - shared[start] + own[start]
            bounds.append(max(start + 1, int(np.searchsorted(own, room, side="right")) - 1))
        return bounds

    # A range costs at most what its leaves would cost one by one, and at least what its dearest leaf costs.
    alone = path(ends) + costs.call
    low, high = float(alone.max(initial=0.0)), float(alone.sum())
    wanted = TOLERANCE * float(own[-1])
    if cut(low)[-1] == len(ends):
        high = low
    while high - low > wanted:
        middle = (low + high) / 2
        low, high = (low, middle) if cut(middle)[-1] == len(ends) else (middle, high)
    bounds = cut(high)
    return np.array(bounds + [len(ends)] * (count + 1 - len(bounds)), np.int64)
