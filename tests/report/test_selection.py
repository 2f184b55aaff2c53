"""Trained against generated groups: no alarm by chance, and the filter that is biased by its name."""

from __future__ import annotations

import json
from collections.abc import Sequence

import numpy as np
import pytest
from scipy import stats

from areal_jax.report.report import ReportData, render
from areal_jax.report.selection import PENDING, TRAINED, Attempt, Selection, study_selection

SIZE = 4


def drawn(rng: np.random.Generator, count: int) -> list[Attempt]:
    """Groups of SIZE samples: a prompt is hard and long, or not; lengths and rewards vary within it."""
    scale, hard = rng.lognormal(5, 0.5, count), rng.random(count)
    lengths = np.maximum(1, rng.lognormal(0, 0.4, (count, SIZE)) * scale[:, None] * (0.5 + hard[:, None]))
    rewards = (rng.random((count, SIZE)) > hard[:, None]).mean(1)
    return [
        Attempt(TRAINED, True, tuple(own), float(reward))
        for own, reward in zip(lengths.astype(int).tolist(), rewards, strict=True)
    ]


def mean(attempt: Attempt) -> float:
    return float(np.mean(attempt.lengths))


def discarded(attempts: Sequence[Attempt], is_dropped: np.ndarray, reason: str) -> list[Attempt]:
    return [
        each._replace(fate=reason) if drop and each.fate == TRAINED else each
        for each, drop in zip(attempts, is_dropped, strict=True)
    ]


def studied(attempts: Sequence[Attempt]) -> Selection:
    found = study_selection(attempts)
    assert found is not None
    return found


def causes(found: Selection) -> dict[str, str]:
    return {gap.quantity: gap.cause for gap in found.gaps}


def test_figures_by_hand():
    """Three trained groups, one dropped, one withdrawn, one under way; tokens 2, 4, 6 and 20."""
    attempts = [
        Attempt(TRAINED, True, (1, 3), 1.0),
        Attempt(TRAINED, True, (4, 4), 0.5),
        Attempt(TRAINED, True, (4, 8), 0.25),
        Attempt("over_age", True, (10, 30), 0.0),
        Attempt("over_age", False, (7,), None),
        Attempt(PENDING, True, (5, 5), 1.0),
    ]
    found = studied(attempts)
    trained, over_age, pending = found.fates
    assert trained == (TRAINED, 3, 0, 0, 4.0, 5.0, pytest.approx(1 - 1.75 / 3))
    assert over_age == ("over_age", 1, 1, 7, 20.0, 30.0, 1.0)
    assert pending == (PENDING, 1, 0, 0, 5.0, 5.0, 0.0)
    tokens, longest, difficulty = found.gaps
    assert (tokens.trained, tokens.discarded, tokens.trained_mean, tokens.generated_mean) == (3, 1, 4, 8)
    assert (tokens.difference, tokens.relative, tokens.distribution) == (-4, -0.5, 0.25)
    assert tokens.p == pytest.approx(2 / 4)  # the one discarded is the largest or the smallest
    assert (longest.trained_mean, longest.generated_mean) == (5, 45 / 4)
    assert difficulty.relative is None
    assert difficulty.difference == pytest.approx(1.25 / 3 - 2.25 / 4)
    assert found.alarms == ()  # one group is chance, however long


def test_nothing_discarded_or_nothing_trained():
    attempts = drawn(np.random.default_rng(0), 5)
    found = studied(attempts)
    assert (len(found.fates), found.gaps, found.alarms) == (1, (), ())
    assert "No finished group was discarded: 5 were trained." in render(report(found))
    assert study_selection([]) is None
    assert study_selection([each._replace(fate="end") for each in attempts]) is None


@pytest.mark.slow
def test_runs_without_bias_raise_no_alarm():
    """1,000 runs of 30 to 150 groups, of which chance alone discards 2 to 60 % for up to three reasons."""
    rng, alarms = np.random.default_rng(1), 0
    for _ in range(1000):
        count = int(rng.integers(30, 150))
        attempts = drawn(rng, count)
        for reason in ("no_signal", "over_age", "failed_reward")[: rng.integers(1, 4)]:
            attempts = discarded(attempts, rng.random(count) < rng.uniform(0.02, 0.3), reason)
        alarms += bool(studied(attempts).alarms)
    assert alarms <= 5


@pytest.mark.parametrize("seed", range(5))
def test_a_filter_of_long_groups_is_named(seed: int):
    """The longest tenth of 300 groups: with scipy's own test, and the means of what is left."""
    attempts = drawn(np.random.default_rng(seed), 300)
    tokens = np.array([mean(each) for each in attempts])
    is_long = tokens > np.quantile(tokens, 0.9)
    found = studied(discarded(attempts, is_long, "over_age"))
    gap = found.gaps[0]
    assert gap.cause == "over_age"
    assert gap.p == pytest.approx(stats.ks_2samp(tokens[~is_long], tokens[is_long]).pvalue, rel=1e-6)
    assert gap.relative == pytest.approx(tokens[~is_long].mean() / tokens.mean() - 1, rel=1e-9)
    assert gap.relative < -0.1 and gap.distribution == pytest.approx(0.1)
    assert "completion tokens, mean of a group" in found.alarms[0]
    assert "most of it by over_age: control.over_age=restart starts groups" in found.alarms[0]


@pytest.mark.parametrize("seed", range(5))
def test_few_long_groups_are_found_by_the_mean(seed: int):
    """The longest half per cent of 3,000 groups hardly move the distribution, but the mean."""
    attempts = drawn(np.random.default_rng(seed), 3000)
    attempts = [
        each._replace(fate="over_age", lengths=tuple(9 * n for n in each.lengths)) if i % 200 == 0 else each
        for i, each in enumerate(attempts)
    ]
    gap = studied(attempts).gaps[0]
    assert gap.distribution < 0.01
    assert gap.relative is not None and gap.relative < -0.02
    assert gap.cause == "over_age"


@pytest.mark.parametrize("seed", range(5))
def test_a_filter_of_equal_rewards_is_named(seed: int):
    """All right and all wrong groups: the mean may stay, but the distribution does not."""
    attempts = drawn(np.random.default_rng(seed), 400)
    is_equal = np.array([each.reward in (0, 1) for each in attempts])
    found = studied(discarded(attempts, is_equal, "no_signal"))
    difficulty = found.gaps[2]
    assert difficulty.cause == "no_signal" and abs(difficulty.difference) < 0.1
    assert difficulty.distribution > 0.1
    assert "algorithm.group_filter=none" in found.alarms[-1]


@pytest.mark.parametrize("seed", range(10))
def test_of_two_filters_the_biased_one_is_named(seed: int):
    """A third of the groups is discarded by chance; of the others the longest 8 %."""
    rng = np.random.default_rng(seed)
    attempts = discarded(drawn(rng, 600), rng.random(600) < 0.33, "failed_reward")
    tokens = np.array([mean(each) for each in attempts])
    found = studied(discarded(attempts, tokens > np.quantile(tokens, 0.92), "over_age"))
    assert causes(found)["completion_tokens"] == causes(found)["longest"] == "over_age"
    assert "failed_reward" not in causes(found).values()


@pytest.mark.parametrize("names", [("over_age", "failed_reward"), ("failed_reward", "over_age")])
def test_of_two_biased_filters_the_one_with_the_larger_gap_is_named(names: tuple[str, str]):
    """The longest 15 % and the shortest 4 %: each differs from the trained ones beyond chance."""
    attempts = drawn(np.random.default_rng(0), 600)
    tokens = np.array([mean(each) for each in attempts])
    long, short = tokens > np.quantile(tokens, 0.85), tokens < np.quantile(tokens, 0.04)
    assert stats.ks_2samp(tokens[short], tokens[~long & ~short]).pvalue < 1e-6
    found = studied(discarded(discarded(attempts, long, names[0]), short, names[1]))
    assert causes(found)["completion_tokens"] == names[0]


def test_attempts_without_all_their_samples_are_counted_and_not_compared():
    rng = np.random.default_rng(3)
    attempts = drawn(rng, 200)
    withdrawn = [Attempt("failed_sample", False, (9000, 9500), None) for _ in range(100)]
    found = studied([*attempts, *withdrawn])
    assert found.gaps == ()
    assert found.fates[1] == ("failed_sample", 0, 100, 1_850_000, None, None, None)
    assert "100 attempts were withdrawn" in render(report(found))
    assert "1,850,000 tokens" in render(report(found))


def report(found: Selection | None) -> ReportData:
    return ReportData("t", "c", "y", selection=found)


def test_the_report_shows_distributions_and_alarms():
    attempts = drawn(np.random.default_rng(0), 300)
    is_long = [mean(each) > 300 for each in attempts]
    found = studied(discarded(attempts, np.array(is_long), "<over>"))
    page = render(report(found))
    assert "<h2>Selection</h2>" in page and "<strong>Alarm:</strong>" in page
    assert "&lt;over&gt;" in page and "<over>" not in page
    assert "selection" in page and page.count("longest of a group") >= 3
    plain = json.loads(json.dumps(found.to_json()))
    assert [gap["quantity"] for gap in plain["gaps"]] == ["completion_tokens", "longest", "difficulty"]
    assert plain["alarms"] == list(found.alarms) and plain["gaps"][0]["difference"] < 0
    assert "<h2>Selection</h2>" not in render(report(None))
