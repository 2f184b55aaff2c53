"""Estimates over prompts with their 95 % intervals: shares, means, pass@k. Pure functions of numpy arrays."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import NormalDist
from typing import NamedTuple

import numpy as np

CONFIDENCE = 0.95
Z = NormalDist().inv_cdf((1 + CONFIDENCE) / 2)
"""Two-sided normal quantile of CONFIDENCE, 1.96."""


class Estimate(NamedTuple):
    """A figure and its 95 % interval; None where the scored prompts do not say."""

    value: float | None
    low: float | None
    high: float | None


NOTHING = Estimate(None, None, None)


def wilson(share: float, count: float) -> tuple[float, float]:
    """The Wilson score interval of a share of `count` trials; count > 0, not necessarily whole.

    (p + z²/2n ± z sqrt(p(1-p)/n + z²/4n²)) / (1 + z²/n). E. B. Wilson, J. Am. Stat. Assoc. 22 (1927) 209.
    """
    spread = Z * Z / count
    centre = share + spread / 2
    half = math.sqrt(spread * (share * (1 - share) + spread / 4))
    low, high = (centre - half) / (1 + spread), (centre + half) / (1 + spread)
    return max(0.0, min(low, share)), min(1.0, max(high, share))  # rounding at shares of 0 and 1


def share_estimate(values: Sequence[float] | np.ndarray) -> Estimate:
    """Mean m of one value in [0, 1] a prompt, with a Wilson interval at the effective number of prompts.

    That number is n m(1 - m) / s²: C. Franco et al., J. Survey Stat. and Methodology 7 (2019) 334. As the
    variance of few values is too small too often, z² prompts of variance m(1 - m), the largest there is, are
    counted with them: s² = (n var + z² m(1 - m)) / (n + z²); as many as Agresti and Coull add to a share. For
    values that are 0 or 1 the interval is Wilson's own; means of several samples vary less, and narrow it.
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
    """Mean of one value a prompt, m ± z s / √n, s² the variance over n - 1; no interval where all are equal.

    The central limit theorem over prompts: E. Miller, Adding Error Bars to Evals, arXiv:2411.00640, eq. 1;
    a prompt's samples are a cluster, of which the mean is one value.
    """
    x = np.asarray(values, np.float64)
    if not x.size:
        return NOTHING
    mean = float(x.mean())
    if x.min() == x.max():  # of one value, or of an unknown range: no interval, rather than a point
        return Estimate(mean, None, None)
    half = Z * float(x.std(ddof=1)) / math.sqrt(x.size)
    return Estimate(mean, mean - half, mean + half)


def pass_at_k(samples: int, right: int, k: int) -> float:
    """Unbiased probability that at least one of k samples is right, from `right` of `samples`; k <= samples.

    1 - C(n - c, k) / C(n, k), as the product 1 - Π_{i = n-c+1..n} (1 - k/i), which neither overflows nor
    cancels. M. Chen et al., Evaluating Large Language Models Trained on Code, arXiv:2107.03374, eq. 1.
    """
    if not 0 <= right <= samples or not 1 <= k <= samples:
        raise ValueError(f"pass@{k} of {right} right among {samples} samples is not defined")
    if samples - right < k:
        return 1.0
    return 1.0 - math.prod(1.0 - k / i for i in range(samples - right + 1, samples + 1))


def powers_of_two(most: int) -> list[int]:
    """1, 2, 4, ... up to `most`."""
    return [1 << i for i in range(most.bit_length())]
