"""Mean reward of the trained samples by age: raw, among equally hard prompts, and within groups.

Hard prompts have long answers, and long answers are old when they are trained. So old samples earn less than
young ones even if staleness does no harm: the raw gap contains selection bias. The DORA authors' study of
their trainer stratifies by difficulty and finds that most of the gap is bias.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from areal_jax.observe.estimates import NOTHING, Estimate, Z

STRATA = 10
"""Largest number of strata of prompt difficulty."""

FEWEST_SAMPLES, LEAST_SHARE = 50, 0.02
"""Number and share of the samples that an age needs to be compared alone; other ages join a neighbour."""

FEWEST_IN_CELL = 5
"""Number of samples of every age that a stratum of difficulty needs to be compared."""

FEWEST_GROUPS = 10
"""Number of groups with samples of both ages that a gap within groups needs."""

DECIMALS = 9
"""Difficulties are rounded to this many decimals, so that rounding errors do not separate equal ones."""


class Trained(NamedTuple):
    """A trained sample that a policy sampled."""

    ordinal: int
    """The sample's group."""
    reward: float
    age: int
    """Trained version minus the version of the sample's first token."""
    completion_tokens: int


class AgeFigures(NamedTuple):
    """Figures on the samples with ages from `youngest` to `oldest`. A gap is to the first ages compared."""

    youngest: int
    oldest: int
    samples: int
    completion_tokens_p50: float
    reward: float
    stratified_reward: float
    """Mean reward if these samples had the prompt difficulties of all compared samples."""
    gap: Estimate
    stratified_gap: Estimate
    group_gap: Estimate
    """Gap within groups that have samples of these ages and of the first ages."""
    groups: int
    """Number of such groups."""

    @property
    def name(self) -> str:
        """The ages as text: `1`, or `2 to 5`."""
        return f"{self.youngest}" if self.youngest == self.oldest else f"{self.youngest} to {self.oldest}"


class Staleness(NamedTuple):
    """Rewards by age; `ages` is in ascending order, and has at least two entries."""

    trained: int
    """Number of trained samples that a policy sampled."""
    compared: int
    """Number of these with another one in their group: the samples of `ages`."""
    stratified: int
    """Number of these in strata that have enough samples of every age: the samples of stratified figures."""
    strata: int
    """Number of such strata."""
    reliability: float
    """Of the estimated difficulties of samples of equal ages; see `reliability_of`."""
    ages: tuple[AgeFigures, ...]

    def to_json(self) -> dict[str, Any]:
        """Returns the fields by name; an estimate is `{"value", "low", "high"}`."""
        ages = [
            {
                name: value._asdict() if isinstance(value, Estimate) else value
                for name, value in each._asdict().items()
            }
            for each in self.ages
        ]
        return self._asdict() | {"ages": ages}


class Standardised(NamedTuple):
    """Mean rewards of C classes over the strata that have samples of every class."""

    means: np.ndarray  # Float[C]
    gaps: tuple[Estimate, ...]
    """Mean of each class minus that of class 0, with 95 % intervals; the first is NOTHING."""
    samples: int
    strata: int


def study(trained: np.ndarray | Sequence[Trained]) -> Staleness | None:
    """Returns the rewards of the trained samples by age; `trained`: Float[S, 4], the fields of `Trained`.

    Returns None if there is nothing to compare: groups of one sample, a single age (ages with few samples are
    joined with their neighbours), or no stratum with samples of every age.
    """
    if not len(trained):
        return None
    # Arrays over samples: Float[S].
    ordinals, rewards, ages, tokens = np.asarray(trained, np.float64).T
    groups = np.unique(ordinals, return_inverse=True)[1]
    is_known = np.bincount(groups)[groups] > 1
    rewards, ages, tokens = rewards[is_known], ages[is_known].astype(int), tokens[is_known]
    groups = np.unique(groups[is_known], return_inverse=True)[1]
    starts = first_ages(ages)
    if len(starts) < 2:
        return None
    classes = np.searchsorted(starts, ages, side="right") - 1
    raw = standardise(rewards, classes, np.zeros_like(groups), groups)
    strata = strata_of(difficulties(rewards, groups))
    even = standardise(rewards, classes, strata, groups, FEWEST_IN_CELL)
    if raw is None or even is None:
        return None
    figures = []
    for number, youngest in enumerate(starts):
        is_own = classes == number
        group_gap, mixed = within_groups(rewards, is_own, is_own | (classes == 0), groups)
        figures.append(
            AgeFigures(
                youngest=int(youngest),
                oldest=int(ages[is_own].max()),
                samples=int(is_own.sum()),
                completion_tokens_p50=float(np.median(tokens[is_own])),
                reward=float(raw.means[number]),
                stratified_reward=float(even.means[number]),
                gap=raw.gaps[number],
                stratified_gap=even.gaps[number],
                group_gap=group_gap,
                groups=mixed,
            )
        )
    reliability = reliability_of(rewards - raw.means[classes], groups)
    return Staleness(len(trained), len(rewards), even.samples, even.strata, reliability, tuple(figures))


def first_ages(ages: np.ndarray) -> np.ndarray:
    """Returns, ascending, the youngest age of each set of ages that are compared as one.

    A set has FEWEST_SAMPLES samples and LEAST_SHARE of all. It grows from young to old until it has; what is
    left of the oldest ages joins the last set. `ages`: Int[S]. Empty if all samples are too few for a set.
    """
    least = max(FEWEST_SAMPLES, LEAST_SHARE * len(ages))
    starts, start, count = [], None, 0
    for age, samples in zip(*np.unique(ages, return_counts=True), strict=True):
        start, count = (age if start is None else start), count + samples
        if count >= least:
            starts.append(start)
            start, count = None, 0
    return np.array(starts, int)


def within_groups(
    rewards: np.ndarray, is_old: np.ndarray, is_compared: np.ndarray, groups: np.ndarray
) -> tuple[Estimate, int]:
    """Returns the gap of old samples within groups that also have others, and the number of such groups.

    A group's weight is its number of compared samples. The gap is NOTHING with fewer than FEWEST_GROUPS such
    groups. `rewards`: Float[S]; `is_old`, `is_compared`: Bool[S]; `groups`: Int[S], from 0.
    """
    if is_old[is_compared].all():
        return NOTHING, 0
    own = groups[is_compared]
    found = standardise(rewards[is_compared], is_old[is_compared].astype(int), own, own)
    if found is None:
        return NOTHING, 0
    return found.gaps[1] if found.strata >= FEWEST_GROUPS else NOTHING, found.strata


def difficulties(rewards: np.ndarray, groups: np.ndarray) -> np.ndarray:
    """Returns for each sample the mean reward of the other samples of its group.

    A mean with the sample itself would hide every gap: among samples with an equal mean of their groups, the
    mean reward of any age is that very mean. `rewards`: Float[S]; `groups`: Int[S], each with at least two
    samples. Returns Float[S].
    """
    sums, counts = np.bincount(groups, weights=rewards), np.bincount(groups)
    return np.round((sums[groups] - rewards) / (counts[groups] - 1), DECIMALS)


def reliability_of(rewards: np.ndarray, groups: np.ndarray) -> float:
    """Returns λ = b / (b + w / (n - 1)), the reliability of a mean over the n - 1 other samples of a group.

    w: variance of rewards within groups; b: variance of the groups' expected rewards, estimated as the
    variance of the groups' means minus w / n; n: mean size of a group. If the expected reward of a sample is
    linear in the mean of the others, the gap of two ages of whole groups, with the same λ in both, is in
    strata of equal means 1 - λ times the raw gap, whatever causes it. `rewards`: Float[S], each minus the
    mean of its age; `groups`: Int[S], from 0, of two or more samples each. Returns 0 if b is not positive.
    """
    counts = np.bincount(groups)
    means = np.bincount(groups, weights=rewards) / counts
    within = float(np.square(rewards - means[groups]).sum()) / (len(rewards) - len(counts))
    size = float(counts.mean())
    between = float(means.var(ddof=1)) - within / size if len(means) > 1 else 0.0
    return between / (between + within / (size - 1)) if between > 0 else 0.0


def strata_of(values: np.ndarray) -> np.ndarray:
    """Returns the stratum of each value: its rank as a share of all, in STRATA equal parts.

    Equal values have the mean of their ranks, and so one stratum. `values`: Float[S]; returns Int[S].
    """
    _, place, counts = np.unique(values, return_inverse=True, return_counts=True)
    middle = (np.cumsum(counts) - counts / 2) / len(values)
    return np.floor(middle * STRATA).astype(int)[place]


def standardise(
    rewards: np.ndarray, classes: np.ndarray, strata: np.ndarray, groups: np.ndarray, fewest: int = 1
) -> Standardised | None:
    """Returns the mean reward of each class, standardised to the strata of the samples of all classes.

    m_c = Σ_s w_s m_sc, where m_sc is the mean reward of class c in stratum s and w_s is the share of stratum
    s in the samples of all classes, the same for each class. Only strata with at least `fewest` samples of
    every class count; None if there is none. Intervals come from the sum of squares of each group's influence
    on a gap, because samples of a group are not independent. `rewards`: Float[S]; `classes`: Int[S], from 0,
    each with a sample; `strata`, `groups`: Int[S], from 0.
    """
    many = int(classes.max()) + 1
    cells, size = strata * many + classes, (int(strata.max()) + 1) * many
    counts = np.bincount(cells, minlength=size).reshape(-1, many)
    is_common = np.all(counts >= fewest, axis=1)
    if not is_common.any():
        return None
    sums = np.bincount(cells, weights=rewards, minlength=size).reshape(-1, many)
    counts, cell_means = counts[is_common], sums[is_common] / counts[is_common]
    weights = counts.sum(axis=1) / counts.sum()
    inside = is_common[strata]
    stratum, own = (np.cumsum(is_common) - 1)[strata[inside]], classes[inside]
    group = np.unique(groups[inside], return_inverse=True)[1]
    # A sample moves its cell's mean by its deviation, and a gap by the weight of its stratum.
    moved = (rewards[inside] - cell_means[stratum, own]) * weights[stratum] / counts[stratum, own]
    gaps = [NOTHING]
    for number in range(1, many):
        by_stratum = cell_means[:, number] - cell_means[:, 0]
        gap = float(weights @ by_stratum)
        sign = (own == number).astype(float) - (own == 0)
        influence = sign * moved + (by_stratum[stratum] - gap) / len(own)
        gaps.append(_interval(gap, np.bincount(group, weights=influence)))
    return Standardised(weights @ cell_means, tuple(gaps), len(own), len(weights))


def _interval(value: float, influences: np.ndarray) -> Estimate:
    """Returns the value with its 95 % interval; `influences`: Float[G], of independent groups."""
    number = len(influences)
    spread = float(np.square(influences).sum())
    if number < 2 or spread == 0:
        return Estimate(value, None, None)
    half = Z * float(np.sqrt(spread * number / (number - 1)))
    return Estimate(value, value - half, value + half)
