"""Estimates over prompts: exact where there is an exact answer, covering where it is a probability."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal_jax.observe.estimates import (
    NOTHING,
    Z,
    mean_estimate,
    paired_estimate,
    pass_at_k,
    powers_of_two,
    share_estimate,
    wilson,
)


def exact_pass_at_k(n: int, c: int, k: int) -> Fraction:
    """1 - C(n - c, k) / C(n, k), in whole numbers."""
    return 1 - Fraction(math.comb(n - c, k), math.comb(n, k))


@given(st.data())
def test_pass_at_k_is_the_exact_binomial_quotient(data):
    n = data.draw(st.integers(1, 2000))
    c, k = data.draw(st.integers(0, n)), data.draw(st.integers(1, n))
    assert pass_at_k(n, c, k) == pytest.approx(float(exact_pass_at_k(n, c, k)), rel=1e-12, abs=1e-13)


def test_pass_at_k_of_known_cases():
    assert pass_at_k(4, 1, 1) == 0.25 and pass_at_k(4, 1, 2) == 0.5 and pass_at_k(4, 1, 4) == 1.0
    assert pass_at_k(5, 0, 5) == 0.0 and pass_at_k(5, 3, 3) == 1.0
    assert pass_at_k(10**9, 1, 10**9 - 1) == pytest.approx(1 - 1e-9, abs=1e-15)


@pytest.mark.parametrize(("n", "c", "k"), [(4, 5, 1), (4, -1, 1), (4, 2, 5), (4, 2, 0)])
def test_pass_at_k_beyond_its_samples_is_an_error(n, c, k):
    with pytest.raises(ValueError, match=f"pass@{k} of {c} right among {n}"):
        pass_at_k(n, c, k)


def test_the_unbiased_estimator_is_unbiased():
    """Its mean over every outcome of n draws of a coin is 1 - (1 - p)^k."""
    n, p = 7, Fraction(2, 5)
    for k in (1, 2, 4, 7):
        mean = sum(
            math.comb(n, c) * float(p) ** c * float(1 - p) ** (n - c) * pass_at_k(n, c, k)
            for c in range(n + 1)
        )
        assert mean == pytest.approx(float(1 - (1 - p) ** k), rel=1e-12)


@pytest.mark.parametrize(
    ("right", "count", "low", "high"),
    [(81, 263, 0.2553, 0.3662), (15, 148, 0.0624, 0.1605), (0, 20, 0.0, 0.1611), (1, 29, 0.0061, 0.1718)],
)
def test_wilson_against_published_intervals(right, count, low, high):
    """R. G. Newcombe, Statistics in Medicine 17 (1998) 857, table I, method 3."""
    assert wilson(right / count, count) == pytest.approx((low, high), abs=5e-5)


@given(st.integers(1, 500), st.data())
def test_wilsons_ends_are_where_the_score_test_turns(count, data):
    """At an end p of the interval |share - p| = z sqrt(p (1 - p) / n)."""
    share = data.draw(st.integers(0, count)) / count
    low, high = wilson(share, count)
    assert 0 <= low <= share <= high <= 1
    for end in (low, high):
        assert abs(share - end) == pytest.approx(Z * math.sqrt(end * (1 - end) / count), abs=1e-9)


@given(st.lists(st.sampled_from([0.0, 1.0]), min_size=1, max_size=60))
def test_of_rights_and_wrongs_the_interval_is_wilsons(values):
    found = share_estimate(values)
    assert found == pytest.approx((np.mean(values), *wilson(float(np.mean(values)), len(values))))


def test_several_samples_a_prompt_narrow_the_interval():
    values = np.array([0.25, 0.5, 0.5, 0.75, 0.25, 0.75, 0.5, 0.5])
    variance = (8 * np.float64(4 * 0.25**2 / 8) + Z**2 * 0.25) / (8 + Z**2)
    mean, effective = 0.5, 8 * 0.25 / variance
    centre = (mean + Z**2 / (2 * effective)) / (1 + Z**2 / effective)
    half = Z / (1 + Z**2 / effective) * np.sqrt(mean * (1 - mean) / effective + Z**2 / (4 * effective**2))
    assert 16 < effective < 24  # of 8 prompts
    assert share_estimate(values) == pytest.approx((0.5, centre - half, centre + half), rel=1e-12)


def test_prompts_that_agree_are_no_certainty():
    """Four prompts with two of four right each: the interval is narrower than Wilson's, and is one."""
    found, coin = share_estimate([0.5] * 4), wilson(0.5, 4)
    assert found.low is not None and found.high is not None
    assert coin[0] < found.low < 0.4 and 0.6 < found.high < coin[1]


def test_all_or_none_right_is_no_certainty():
    assert share_estimate([0.0] * 20) == pytest.approx((0.0, 0.0, 0.1611), abs=5e-5)
    assert share_estimate([1.0] * 20) == pytest.approx((1.0, 0.8389, 1.0), abs=5e-5)


def test_the_normal_interval_of_a_mean():
    x = [1.0, 2.0, 4.0, 9.0]
    half = 1.959963984540054 * math.sqrt(sum((v - 4) ** 2 for v in x) / 3) / 2
    assert mean_estimate(x) == pytest.approx((4.0, 4 - half, 4 + half), rel=1e-12)


def test_what_the_values_do_not_say_is_none():
    assert share_estimate([]) == mean_estimate([]) == NOTHING
    assert mean_estimate([0.5]) == mean_estimate([0.5, 0.5]) == (0.5, None, None)


@pytest.mark.parametrize(("a", "b", "samples", "k", "prompts"), [
    (1.0, 1.0, 1, 1, 40), (0.5, 2.0, 4, 1, 64), (0.5, 2.0, 4, 4, 64), (3.0, 0.3, 8, 2, 64),
    (5.0, 5.0, 4, 2, 64), (0.3, 3.0, 16, 1, 16),
])  # fmt: skip
def test_intervals_cover_the_truth_nineteen_times_in_twenty(a, b, samples, k, prompts):
    """Prompts whose chance is Beta(a, b): pass@k is 1 - Π (b + j) / (a + b + j), the mean its case k = 1."""
    rng = np.random.default_rng(7)
    truth = 1 - math.prod((b + j) / (a + b + j) for j in range(k))
    value = np.array([pass_at_k(samples, c, k) for c in range(samples + 1)])
    hits = rng.binomial(samples, rng.beta(a, b, (800, prompts)))
    shares = [share_estimate(value[one]) for one in hits]
    means = [mean_estimate(one / samples) for one in hits]
    for found, true, least in ((shares, truth, 0.925), (means, a / (a + b), 0.86)):
        covered = np.mean([one.low <= true <= one.high for one in found])
        assert least <= covered <= 0.985  # two standard errors of 800 trials are 0.015
    assert np.mean([one.value for one in shares]) == pytest.approx(truth, abs=0.01)


@pytest.mark.parametrize(("most", "ks"), [(1, [1]), (4, [1, 2, 4]), (6, [1, 2, 4]), (8, [1, 2, 4, 8])])
def test_powers_of_two(most, ks):
    assert powers_of_two(most) == ks


def test_paired_differences_have_an_interval_of_students_t():
    """Three pairs: s = 0.1, t(2) = 4.302653, so 0.1 * 4.302653 / sqrt(3) on either side."""
    half = 0.1 * 4.302652729911275 / math.sqrt(3)
    assert paired_estimate([0.1, 0.2, 0.3]) == pytest.approx((0.2, 0.2 - half, 0.2 + half), rel=1e-9)
    assert paired_estimate([0.5]) == (0.5, None, None)
    assert paired_estimate([]) == NOTHING
    assert paired_estimate([0.25, 0.25]) == (0.25, 0.25, 0.25)
