"""Smirnov's test: against every division of few values, and against scipy where no values are equal."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from scipy import stats

from areal_jax.report import two_samples
from areal_jax.report.two_samples import smirnov


def distance(one: np.ndarray, other: np.ndarray) -> float:
    """Largest difference of the distribution functions, at every value of either."""
    return max(abs(np.mean(one <= at) - np.mean(other <= at)) for at in np.concatenate([one, other]))


def share_of_divisions(one: np.ndarray, other: np.ndarray) -> float:
    """Share of all divisions of the joined values that are as far apart."""
    values, found = np.concatenate([one, other]), distance(one, other)
    divisions = list(itertools.combinations(range(len(values)), len(one)))
    apart = 0
    for chosen in divisions:
        is_one = np.isin(np.arange(len(values)), chosen)
        apart += distance(values[is_one], values[~is_one]) >= found - 1e-12
    return apart / len(divisions)


@pytest.mark.parametrize("levels", [2, 3, 5, None])
@pytest.mark.parametrize(("n", "m"), [(5, 5), (3, 9), (8, 2), (6, 4)])
def test_p_is_the_share_of_divisions_also_with_equal_values(n: int, m: int, levels: int | None):
    rng = np.random.default_rng(7 * n + m)
    for shift in (0, 1):
        draw = rng.normal if levels is None else lambda size, levels=levels: rng.integers(0, levels, size)
        one, other = draw(size=n) + 0.0, draw(size=m) + float(shift)
        found = smirnov(one, other)
        assert found.statistic == pytest.approx(distance(one, other), abs=1e-12)
        assert found.p == pytest.approx(share_of_divisions(one, other), rel=1e-9)


@pytest.mark.parametrize(("n", "m", "shift"), [(20, 30, 0.0), (40, 25, 1.2), (100, 7, 0.8), (300, 200, 0.4)])
def test_p_is_scipys_exact_one_without_equal_values(n: int, m: int, shift: float):
    rng = np.random.default_rng(n)
    one, other = rng.normal(size=n), rng.normal(shift, 1, m)
    wanted = stats.ks_2samp(one, other, method="exact")
    found = smirnov(one, other)
    assert found.statistic == pytest.approx(wanted.statistic, rel=1e-12)
    assert found.p == pytest.approx(wanted.pvalue, rel=1e-9)


def test_large_samples_have_smirnovs_limit(monkeypatch):
    rng = np.random.default_rng(0)
    one, other = rng.normal(size=4000), rng.normal(0.05, 1, 3000)
    root = np.sqrt(4000 * 3000 / 7000)
    wanted = stats.ks_2samp(one, other).statistic
    limit = smirnov(one, other)
    assert two_samples.EXACT_WORK < 4000 * 3000
    assert limit.p == pytest.approx(stats.kstwobign.sf(root * wanted), rel=1e-9)
    monkeypatch.setattr(two_samples, "EXACT_WORK", 10**9)
    assert smirnov(one, other).p == pytest.approx(limit.p, rel=0.05)


def test_what_cannot_differ_does_not():
    assert smirnov([], [1.0]) == smirnov([2.0], []) == (0.0, 1.0)
    assert smirnov([1.0] * 9, [1.0] * 5) == pytest.approx((0, 1))
    assert smirnov([1.0], [2.0]) == pytest.approx((1, 1))
