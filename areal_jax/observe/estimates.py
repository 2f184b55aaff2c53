"""Estimates over prompts with their 95 % intervals: shares, means, pass@k. Pure functions of numpy arrays."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import NormalDist
from typing import NamedTuple

import numpy as np

CONFIDENCE = 0.95
Z = NormalDist().inv_cdf((1 + CONFIDENCE) / 2)
"""A normal value is within this many standard deviations of the mean with probability CONFIDENCE: 1.96."""


class Estimate(NamedTuple):
    """A value with the ends of its 95 % interval.

    `value`, `low` and `high` are None if there are no data. Only `low` and `high` are None for a mean of
    equal values, which has no interval.
    """

    value: float | None
    low: float | None
    high: float | None


NOTHING = Estimate(None, None, None)


def wilson(share: float, count: float) -> tuple[float, float]:
    """Returns the 95 % Wilson score interval (low, high) of the fraction `share` of `count` trials.

    `count` must be positive, but need not be an integer. For p = `share`, n = `count` and z = 1.96:

    (p + z²/2n ± z sqrt(p(1-p)/n + z²/4n²)) / (1 + z²/n). E. B. Wilson, J. Am. Stat. Assoc. 22 (1927) 209.
    """
    spread = Z * Z / count
    centre = share + spread / 2
    half = math.sqrt(spread * (share * (1 - share) + spread / 4))
    low, high = (centre - half) / (1 + spread), (centre + half) / (1 + spread)
    return max(0.0, min(low, share)), min(1.0, max(high, share))  # rounding at shares of 0 and 1


def share_estimate(values: Sequence[float] | np.ndarray) -> Estimate:
    """Returns the mean m of `values`, one in [0, 1] per prompt, with a 95 % Wilson interval.

    A value may be the mean of several samples of its prompt, which varies less than a single 0 or 1. The
    interval's number of trials is therefore not n, the number of prompts, but n m(1 - m) / s²: C. Franco et
    al., J. Survey Stat. and Methodology 7 (2019) 334. s² is the variance of the values, computed as if z²
    more prompts (z = 1.96) had the largest possible variance, m(1 - m), because the variance of few values is
    often too small. If all values are 0 or 1, the result is the plain Wilson interval.
    """
    x = np.asarray(values, np.float64)
    if not x.size:
        return NOTHING
    mean, count = float(x.mean()), x.size
    most = mean * (1 - mean)
    if not 0 < mean < 1:
        return Estimate(mean, *wilson(mean, count))
    variance = (count * float(x.var()) + Z * Z * most) / (count + Z * Z)
    return Estimate(mean, *wilson(mean, count * most / variance))


def mean_estimate(values: Sequence[float] | np.ndarray) -> Estimate:
    """Returns the mean m of `values`, one per prompt, with the 95 % interval m ± z s / √n.

    s² is the variance of the n values with the divisor n - 1, and z = 1.96. `low` and `high` are None if all
    values are equal. The interval uses the central limit theorem over prompts: E. Miller, Adding Error Bars
    to Evals, arXiv:2411.00640, eq. 1. Samples of a prompt are not independent: pass their mean as one value.
    """
    x = np.asarray(values, np.float64)
    if not x.size:
        return NOTHING
    mean = float(x.mean())
    if x.min() == x.max():  # one value, or an unknown range: no interval rather than one of width 0
        return Estimate(mean, None, None)
    half = Z * float(x.std(ddof=1)) / math.sqrt(x.size)
    return Estimate(mean, mean - half, mean + half)


def paired_estimate(differences: Sequence[float]) -> Estimate:
    """Returns the mean of paired differences, one per pair, with a 95 % interval of Student's t.

    m ± t s / √n, with s² the variance with divisor n - 1, and t the 97.5 % quantile for n - 1 degrees of
    freedom: 4.30 for 3 pairs. `low` and `high` are None for a single pair.
    """
    x = np.asarray(differences, np.float64)
    if not x.size:
        return NOTHING
    mean = float(x.mean())
    if x.size == 1:
        return Estimate(mean, None, None)
    from scipy.special import stdtrit  # loads in 0.1 s, and few commands need it

    half = float(stdtrit(x.size - 1, (1 + CONFIDENCE) / 2)) * float(x.std(ddof=1)) / math.sqrt(x.size)
    return Estimate(mean, mean - half, mean + half)


def pass_at_k(samples: int, right: int, k: int) -> float:
    """Returns the unbiased estimate of pass@k: the probability that at least one of k samples is right.

    With n = `samples` samples, of which c = `right` were right, the estimate is 1 - C(n - c, k) / C(n, k). It
    is computed as 1 - Π_{i = n-c+1..n} (1 - k/i), which neither overflows nor cancels. M. Chen et al.,
    Evaluating Large Language Models Trained on Code, arXiv:2107.03374, eq. 1. Raises ValueError unless
    0 <= right <= samples and 1 <= k <= samples.
    """
    if not 0 <= right <= samples or not 1 <= k <= samples:
        raise ValueError(
            f"pass@{k} of {right} right among {samples} samples is undefined: k must be in 1..{samples}, "
            f"and right in 0..{samples}"
        )
    if samples - right < k:
        return 1.0
    return 1.0 - math.prod(1.0 - k / i for i in range(samples - right + 1, samples + 1))


def powers_of_two(most: int) -> list[int]:
    """Returns all powers of two that are at most `most`, from 1 on."""
    return [1 << i for i in range(most.bit_length())]
