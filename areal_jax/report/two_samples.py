"""Smirnov's test of whether two samples come from one distribution, exact also if values are tied."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

EXACT_WORK = 10_000_000
"""The p-value is exact while the product of the two sizes is at most this; beyond, it is the limit's."""


class Smirnov(NamedTuple):
    """Result of the test: the statistic D, and the probability p of one at least as large by chance."""

    statistic: float
    p: float


def smirnov(one: Sequence[float] | np.ndarray, other: Sequence[float] | np.ndarray) -> Smirnov:
    """Returns the two-sample Kolmogorov-Smirnov test of two samples, two-sided.

    D is the largest difference of the two empirical distribution functions. p is the share of all ways to
    divide the joined values into two samples of these sizes that give D or more: exact for equal values too,
    such as mean rewards of few samples. For large samples p is Smirnov's limit, which is too large, never too
    small, if many values are equal. D is 0 and p is 1 if a sample is empty. N. Smirnov, Ann. Math. Statist.
    19 (1948) 279.
    """
    x, y = np.asarray(one, np.float64), np.asarray(other, np.float64)
    n, m = len(x), len(y)
    if not n or not m:
        return Smirnov(0.0, 1.0)
    values, is_other = np.concatenate([x, y]), np.arange(n + m) >= n
    order = np.argsort(values, kind="stable")
    values, others = values[order], np.cumsum(is_other[order])
    # Distribution functions are compared after the last of equal values.
    is_last = np.append(values[1:] != values[:-1], True)
    ranks = np.arange(1, n + m + 1)
    distance = int(np.abs(others * n - (ranks - others) * m)[is_last].max())
    statistic = distance / (n * m)
    if n * m <= EXACT_WORK:
        return Smirnov(statistic, _exact(n, m, distance, is_last))
    from scipy.special import kolmogorov  # loads in 0.1 s, and few commands need it

    return Smirnov(statistic, float(kolmogorov(math.sqrt(n * m / (n + m)) * statistic)))


def _exact(n: int, m: int, distance: int, is_last: np.ndarray) -> float:
    """Returns the probability that random samples of sizes n and m are `distance` / (n m) apart, or more.

    Values are drawn in ascending order, each from either sample with equal probability for every value left.
    `is_last`: Bool[n + m], whether the next value is greater.
    """
    # Entry j: probability that j of the values drawn are of the second sample, never `distance` apart so far.
    inside, apart = np.zeros(m + 1), 0.0
    inside[0] = 1.0
    seconds = np.arange(m + 1)
    for drawn in range(1, n + m + 1):
        left = n + m - drawn + 1
        following = inside * ((n - (drawn - 1 - seconds)) / left)
        following[1:] += inside[:-1] * ((m - seconds[:-1]) / left)
        inside = following
        if is_last[drawn - 1]:
            is_apart = np.abs(seconds * n - (drawn - seconds) * m) >= distance
            apart += float(inside[is_apart].sum())
            inside[is_apart] = 0.0
    return min(1.0, apart)
