"""Rewards by age: on populations whose figures are known from sums over binomial distributions."""

from __future__ import annotations

import json
import math
import re
from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal_jax.observe.estimates import Estimate, Z
from areal_jax.report.report import ReportData, render
from areal_jax.report.staleness import (
    Staleness,
    Trained,
    difficulties,
    first_ages,
    reliability_of,
    standardise,
    strata_of,
    study,
)

GROUP = 16


class Prompts(NamedTuple):
    """Groups of GROUP samples of one age, each right with probability `p`."""

    p: float
    age: int
    groups: int
    tokens: int = 1000


LENGTH_BIASED = [
    Prompts(p, age, groups, tokens)
    for p, tokens, young in ((0.05, 2000, 446), (0.35, 1500, 482), (0.65, 1000, 518), (0.95, 500, 554))
    for age, groups in ((0, young), (1, 1000 - young))
]
"""Harder prompts have longer answers and are old more often; age itself changes no reward."""

HARMED = [Prompts(p - 0.1 * age, age, 1000) for p in (0.5, 0.7) for age in (0, 1)]
"""Equally hard prompts at both ages; age alone lowers the rewards."""


def binomial(n: int, k: int, p: float) -> float:
    return math.comb(n, k) * p**k * (1 - p) ** (n - k)


def samples(population: Sequence[Prompts]) -> list[Trained]:
    """Every number of right samples as often as the binomial distribution says, to a group."""
    found: list[Trained] = []
    ordinal = 0
    for p, age, groups, tokens in population:
        below, made = 0.0, 0
        for right in range(GROUP + 1):
            below += groups * binomial(GROUP, right, p)
            count, made = round(below) - made, round(below)
            for _ in range(count):
                found += [Trained(ordinal, float(i < right), age, tokens) for i in range(GROUP)]
                ordinal += 1
    return found


def expected_gaps(population: Sequence[Prompts]) -> tuple[float, float]:
    """Gap of age 1 to age 0, raw and in ten strata of the number of right ones among the other samples."""
    others = range(GROUP)
    mass: dict[tuple[int, int], float] = defaultdict(float)
    paid: dict[tuple[int, int], float] = defaultdict(float)
    for p, age, groups, _ in population:
        for k in others:
            mass[age, k] += groups * binomial(GROUP - 1, k, p)
            paid[age, k] += groups * binomial(GROUP - 1, k, p) * p
    total, below = sum(mass.values()), 0.0
    strata: dict[int, list[int]] = defaultdict(list)
    for k in others:
        here = mass[0, k] + mass[1, k]
        strata[int(10 * (below + here / 2) / total)].append(k)
        below += here
    raw = [sum(paid[age, k] for k in others) / sum(mass[age, k] for k in others) for age in (0, 1)]
    even = [0.0, 0.0]
    for ks in strata.values():
        weight = sum(mass[age, k] for age in (0, 1) for k in ks) / total
        for age in (0, 1):
            even[age] += weight * sum(paid[age, k] for k in ks) / sum(mass[age, k] for k in ks)
    return raw[1] - raw[0], even[1] - even[0]


def studied(trained: Sequence[Trained]) -> Staleness:
    found = study(trained)
    assert found is not None
    return found


@pytest.fixture(scope="module")
def biased() -> Staleness:
    return studied(samples(LENGTH_BIASED))


def test_length_bias_is_a_raw_gap_of_points_and_less_than_a_point_among_equally_hard_prompts(biased):
    raw, even = expected_gaps(LENGTH_BIASED)
    assert raw == pytest.approx(-0.12 * 0.1125 / 0.25)  # -5.4 points: slope of age, variance of p
    young, old = biased.ages
    assert old.gap.value == pytest.approx(raw, abs=2e-4)
    assert old.stratified_gap.value == pytest.approx(even, abs=3e-4)
    assert old.gap.value < -0.05 and abs(old.stratified_gap.value) < 0.01
    assert old.gap.value == pytest.approx(old.reward - young.reward)
    assert old.stratified_gap.value == pytest.approx(old.stratified_reward - young.stratified_reward)
    assert (young.completion_tokens_p50, old.completion_tokens_p50) == (1000, 1500)
    assert (young.samples, old.samples) == (2000 * GROUP, 2000 * GROUP)
    assert biased.trained == biased.compared == biased.stratified == 4000 * GROUP


def test_strata_keep_the_share_that_the_reliability_names_whatever_causes_the_gap(biased):
    """So a gap by staleness alone shrinks too, where whole groups have one age: the page says so."""
    variance, within = 0.1125 - 0.027**2, 0.25 - 0.1125  # of p at one age; of rewards of a prompt
    assert biased.reliability == pytest.approx(variance / (variance + within / (GROUP - 1)), abs=1e-3)
    harmed = studied(samples(HARMED))
    raw, even = expected_gaps(HARMED)
    gap = harmed.ages[1].stratified_gap.value
    assert raw == pytest.approx(-0.1) and harmed.ages[1].gap.value == pytest.approx(raw, abs=1e-3)
    assert gap == pytest.approx(even, abs=1e-3)
    assert harmed.reliability == pytest.approx(0.01 / (0.01 + 0.235 / 15), abs=0.005)
    assert gap / raw == pytest.approx(1 - harmed.reliability, abs=0.04)


def test_a_sample_is_no_part_of_its_own_difficulty():
    """With its own reward in the mean, strata of equal means have a gap of 0 whatever staleness does."""
    rewards, groups = np.array([1.0, 0.0, 1.0, 0.0, 0.5]), np.array([0, 0, 0, 1, 1])
    assert difficulties(rewards, groups).tolist() == [0.5, 1.0, 0.5, 0.5, 0.0]
    ordinals, rewards, ages, _ = np.array(samples(HARMED)).T
    groups, classes = ordinals.astype(int), ages.astype(int)
    own_means = (np.bincount(groups, weights=rewards) / GROUP)[groups]
    circular = standardise(rewards, classes, strata_of(own_means), groups)
    assert circular is not None and abs(circular.gaps[1].value) < 0.003
    assert studied(samples(HARMED)).ages[1].stratified_gap.value < -0.05


def test_the_gap_within_groups_finds_harm_that_the_raw_gap_hides():
    """Old samples are of easy prompts here: higher raw, though each prompt pays old samples 0.1 less."""
    rng = np.random.default_rng(1)
    groups = np.repeat(np.arange(400), 8)
    is_easy = groups % 2 == 0
    ages = (np.tile(np.arange(8), 400) < np.where(is_easy, 6, 2)).astype(int)
    rewards = np.where(is_easy, 1.0, 0.4) - 0.1 * ages + rng.normal(0, 0.3, 3200)
    trained = [
        Trained(*each, 10) for each in zip(groups.tolist(), rewards.tolist(), ages.tolist(), strict=True)
    ]
    young, old = studied(trained).ages
    each = [
        rewards[(groups == g) & (ages == 1)].mean() - rewards[(groups == g) & (ages == 0)].mean()
        for g in range(400)
    ]
    assert old.group_gap.value == pytest.approx(np.mean(each))
    assert old.group_gap.low < -0.1 < old.group_gap.high < 0 < 0.15 < old.gap.low
    assert (young.groups, old.groups) == (0, 400)
    first = [one._replace(age=one.age if one.ordinal < 9 else int(one.ordinal % 4 == 0)) for one in trained]
    old = studied(first).ages[1]
    assert old.groups == 9 and old.group_gap == Estimate(None, None, None)  # too few to say
    assert young.gap == young.group_gap == Estimate(None, None, None)


def test_equal_difficulties_are_one_stratum_and_strata_are_equally_large():
    assert strata_of(np.array([0.0] * 6 + [0.5] * 2 + [1.0] * 2)).tolist() == [3] * 6 + [7] * 2 + [9] * 2
    assert np.bincount(strata_of(np.arange(100.0)[::-1])).tolist() == [10] * 10
    assert strata_of(np.full(5, 0.3)).tolist() == [5] * 5


def test_a_stratum_without_one_of_the_classes_does_not_count():
    rewards = np.array([1, 0, 1, 0, 0, 0, 1, 100.0])
    classes = np.array([0, 0, 1, 0, 1, 1, 1, 1])
    strata = np.array([0, 0, 0, 1, 1, 1, 1, 2])
    found = standardise(rewards, classes, strata, np.arange(8))
    assert found is not None and (found.samples, found.strata) == (7, 2)
    assert found.means == pytest.approx([3 / 7 * 1 / 2, 3 / 7 + 4 / 7 * 1 / 3])
    assert found.gaps[1].value == pytest.approx(17 / 42)
    assert standardise(rewards, classes, strata, np.arange(8), fewest=2) is None


def test_intervals_are_those_of_independent_groups():
    rng = np.random.default_rng(0)
    groups = np.repeat(np.arange(60), 5)
    rewards = rng.normal(size=60)[groups] + rng.normal(size=300)
    by_group = rewards.reshape(60, 5).mean(axis=1)
    whole = groups % 3 // 2  # a third of the groups is old
    found = standardise(rewards, whole, np.zeros(300, int), groups)
    assert found is not None
    young, old = by_group[np.arange(60) % 3 < 2], by_group[np.arange(60) % 3 == 2]
    half = Z * math.sqrt(60 / 59 * (young.var() / len(young) + old.var() / len(old)))
    value = old.mean() - young.mean()
    assert found.gaps[1] == pytest.approx((value, value - half, value + half))

    mixed = np.tile([0, 0, 0, 1, 1], 60)
    found = standardise(rewards, mixed, groups, groups)
    assert found is not None
    gaps = rewards.reshape(60, 5)[:, 3:].mean(axis=1) - rewards.reshape(60, 5)[:, :3].mean(axis=1)
    half = Z * gaps.std(ddof=1) / math.sqrt(60)
    assert found.gaps[1] == pytest.approx((gaps.mean(), gaps.mean() - half, gaps.mean() + half))


def test_ages_with_few_samples_are_compared_with_their_neighbours():
    assert first_ages(np.repeat([0, 1, 2, 3], [100, 30, 30, 10])).tolist() == [0, 1]
    assert first_ages(np.repeat([0, 2, 5], [10, 45, 60])).tolist() == [0, 5]
    assert first_ages(np.repeat([0, 1], [10_000, 100])).tolist() == [0]  # 1 % of the samples
    assert first_ages(np.repeat([0], [49])).tolist() == []
    trained = [Trained(i, float(k < 2), min(i // 20, 3), 7) for i in range(70) for k in range(4)]
    found = studied(trained)
    assert [(each.name, each.samples) for each in found.ages] == [("0", 80), ("1", 80), ("2 to 3", 120)]


@pytest.mark.parametrize(
    "trained",
    [
        [],
        [Trained(i, float(i % 2), i % 3, 9) for i in range(300)],  # groups of one sample
        [Trained(i // 4, float(i % 2), 1, 9) for i in range(400)],  # one age
        [Trained(i // 4, float(i % 2), i % 2, 9) for i in range(80)],  # too few
    ],
    ids=["nothing", "groups of one", "one age", "few"],
)
def test_where_nothing_can_be_compared_nothing_is_said(trained):
    assert study(trained) is None
    page = render(ReportData("t", "c", "y", staleness=study(trained)))
    assert "Reward by age" not in page and "Asynchrony" not in page


def test_a_group_without_differences_in_rewards_has_no_reliability():
    assert reliability_of(np.array([1.0, 0.0, 1.0, 0.0]), np.array([0, 0, 1, 1])) == 0.0
    assert reliability_of(np.array([1.0, 1.0, 0.0, 0.0]), np.array([0, 0, 1, 1])) == 1.0


@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(0, 1), st.integers(0, 4)), min_size=4),
    st.integers(0, 9),
)
def test_gaps_are_shares_of_cell_gaps_and_do_not_depend_on_order_or_level(rows, level):
    strata, classes, rewards = np.array([*rows, (0, 0, 0), (0, 1, 1)]).T
    groups = np.arange(len(rewards))
    found = standardise(rewards.astype(float), classes, strata, groups)
    turned = standardise(rewards[::-1].astype(float) + level, classes[::-1], strata[::-1], groups)
    assert found is not None and turned is not None
    cells = {
        stratum: [rewards[(strata == stratum) & (classes == c)].mean() for c in (0, 1)]
        for stratum in range(4)
        if len(set(classes[strata == stratum])) == 2
    }
    gaps = [old - young for young, old in cells.values()]
    assert min(gaps) - 1e-9 <= found.gaps[1].value <= max(gaps) + 1e-9
    assert turned.gaps[1].value == pytest.approx(found.gaps[1].value)
    assert turned.means == pytest.approx(found.means + level)


def test_json_has_every_figure(biased):
    found = json.loads(json.dumps(biased.to_json()))
    assert set(found) == {"trained", "compared", "stratified", "strata", "reliability", "ages"}
    assert [each["youngest"] for each in found["ages"]] == [0, 1]
    assert found["ages"][0]["gap"] == {"value": None, "low": None, "high": None}
    assert found["ages"][1]["gap"]["value"] == pytest.approx(-0.054, abs=2e-4)


def test_the_report_has_a_figure_a_table_and_what_they_can_show(biased):
    page = render(ReportData("t", "c", "y", staleness=biased))
    assert re.findall("<figcaption>(.*?)</figcaption>", page) == ["Reward by age"]
    body = page[page.index("<h3>Reward by age</h3>") :]
    lines = [re.findall("<td>(.*?)</td>", line) for line in re.findall("<tr>(<td>.*?)</tr>", body)]
    assert [line[:3] for line in lines] == [["0", "32,000", "1,000"], ["1", "32,000", "1,500"]]
    assert [float(line[3]) for line in lines] == pytest.approx([0.527, 0.473], abs=2e-4)
    value, low, high = map(float, re.findall(r"[-+]\d\.\d{4}", lines[1][4]))
    assert value == pytest.approx(-0.054, abs=3e-4) and low < value < high < 0 and lines[0][4] == "–"
    assert lines[1][-1] == "–"
    assert "64,000 of 64,000 trained samples have others in their group" in page
    assert "(reliability 0.92)" in page and "about 8% of the raw gap remains" in page
