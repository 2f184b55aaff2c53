"""Which of the generated groups were trained: whether their lengths and difficulties are those of all.

A filter that drops what is long, or a bound that long samples meet more often, changes what a policy learns
from. So the groups that finished are compared: those that were trained with those that were not. The unit is
an attempt of a group, since samples of one prompt are not independent.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from areal_jax.report.two_samples import smirnov

TRAINED = "trained"
"""Fate of an attempt that was in a batch."""

PENDING = "pending"
"""Fate of an attempt that was neither trained nor discarded when the journal was read."""

LARGEST_P = 0.001
"""An alarm needs a p-value below this."""

MEAN_BOUND, DISTRIBUTION_BOUND = 0.02, 0.05
"""A gap is negligible up to these: the mean of tokens by this share of the generated mean, and the
distribution function by this share of the groups.
"""

REMEDIES = {
    "no_signal": "algorithm.group_filter=signal drops groups with equal rewards on purpose; "
    "algorithm.group_filter=none trains them too",
    "over_age": "control.over_age=restart starts groups with tokens older than control.max_token_age again; "
    "use hold or mask instead, raise the bound, or lower control.max_staleness",
    "failed_reward": "these groups could not be scored; raise runtime.reward_timeout_s, or correct the "
    "task's score",
    "failed_prompt": "the prompts of these groups could not be used; correct the task or its data, or raise "
    "generation.length",
    "failed_sample": "hosts could not finish a sample of these groups; the run's output has their reasons",
    "end": "these groups were left over after the last batch; raise run.steps, or lower "
    "control.max_staleness or control.max_concurrent",
}
"""Reason -> what causes it, and which setting changes that."""

ROUNDING = 9
"""Means are compared after rounding to this many decimals, so that rounding errors do not part equal ones."""


class Attempt(NamedTuple):
    """One attempt of a group: its samples, dispatched and perhaps trained together."""

    fate: str
    """TRAINED, PENDING, or the reason for which it was dropped or started again."""
    is_finished: bool
    """Whether all samples ended. If not, lengths are known only of those that did."""
    lengths: tuple[int, ...]
    """Completion tokens of each sample that ended."""
    reward: float | None = None
    """Mean reward of the samples, as scored; None if it was not scored."""


class Fate(NamedTuple):
    """The attempts of one fate; means are over finished attempts, None if there is none."""

    fate: str
    finished: int
    unfinished: int
    """Number of attempts that were withdrawn while samples were under way: their lengths are not known."""
    known_tokens: int
    """Completion tokens of the samples of unfinished attempts that had ended."""
    completion_tokens: float | None
    longest: float | None
    difficulty: float | None


class Gap(NamedTuple):
    """How the trained groups differ from the generated ones in one quantity.

    Generated are the trained and the discarded attempts that finished; `trained` and `discarded` are their
    numbers.
    """

    quantity: str
    trained: int
    discarded: int
    trained_mean: float
    generated_mean: float
    relative: float | None
    """(trained mean - generated mean) / generated mean; None for difficulties, which have no scale."""
    distribution: float
    """Largest difference of the distribution functions of trained and generated groups."""
    p: float
    """Of Smirnov's test between trained and discarded groups."""
    cause: str
    """If there is an alarm: the reason that caused most of it; else empty."""

    @property
    def difference(self) -> float:
        """Trained mean - generated mean."""
        return self.trained_mean - self.generated_mean


class Selection(NamedTuple):
    """What of the generated groups was trained."""

    fates: tuple[Fate, ...]
    """The first is TRAINED; the others have attempts."""
    gaps: tuple[Gap, ...]
    """Of each of QUANTITIES that is known; empty if no finished attempt was discarded."""
    values: Mapping[str, tuple[np.ndarray, np.ndarray]]
    """Quantity -> (values of the trained, of the generated groups), for figures."""

    @property
    def alarms(self) -> tuple[str, ...]:
        """A sentence for each gap with an alarm, with the cause and what to change."""
        return tuple(alarm_text(gap) for gap in self.gaps if gap.cause)

    def to_json(self) -> dict[str, Any]:
        """Returns fates, gaps and alarms as plain values."""
        gaps = [each._asdict() | {"difference": each.difference} for each in self.gaps]
        fates = [each._asdict() for each in self.fates]
        return {"fates": fates, "gaps": gaps, "alarms": list(self.alarms)}


QUANTITIES: Mapping[str, Callable[[Attempt], float | None]] = {
    "completion_tokens": lambda attempt: (
        sum(attempt.lengths) / len(attempt.lengths) if attempt.lengths else None
    ),
    "longest": lambda attempt: float(max(attempt.lengths)) if attempt.lengths else None,
    "difficulty": lambda attempt: None if attempt.reward is None else 1.0 - attempt.reward,
}
"""What is compared of a group: its mean and its longest completion in tokens, and 1 - its mean reward."""

NAMES = {
    "completion_tokens": "completion tokens, mean of a group",
    "longest": "completion tokens, longest of a group",
    "difficulty": "difficulty, 1 - mean reward of a group",
}


def study_selection(attempts: Sequence[Attempt]) -> Selection | None:
    """Returns how the trained attempts differ from all that finished; None if none was trained."""
    by_fate: dict[str, list[Attempt]] = defaultdict(list)
    for attempt in attempts:
        by_fate[attempt.fate].append(attempt)
    if not by_fate[TRAINED]:
        return None
    fates = sorted(by_fate, key=lambda fate: (fate != TRAINED, fate == PENDING, fate))
    known = {
        quantity: {fate: _values(own, quantity) for fate, own in by_fate.items()} for quantity in QUANTITIES
    }
    gaps, values = [], {}
    for quantity, of_fates in known.items():
        found = {fate: own for fate, own in of_fates.items() if fate != PENDING and len(own)}
        if len(found) > 1 and TRAINED in found:
            gaps.append(_gap(quantity, found))
            values[quantity] = (found[TRAINED], np.concatenate(list(found.values())))
    figures = (
        _fate(fate, by_fate[fate], {quantity: known[quantity][fate] for quantity in known}) for fate in fates
    )
    return Selection(tuple(figures), tuple(gaps), values)


def _values(attempts: Sequence[Attempt], quantity: str) -> np.ndarray:
    """Returns the quantity of each finished attempt of which it is known."""
    of = QUANTITIES[quantity]
    found = [of(attempt) for attempt in attempts if attempt.is_finished]
    return np.round(np.array([value for value in found if value is not None]), ROUNDING)


def _fate(fate: str, attempts: Sequence[Attempt], values: Mapping[str, np.ndarray]) -> Fate:
    unfinished = [attempt for attempt in attempts if not attempt.is_finished]
    means = {quantity: float(own.mean()) if len(own) else None for quantity, own in values.items()}
    known = sum(sum(attempt.lengths) for attempt in unfinished)
    return Fate(fate, len(attempts) - len(unfinished), len(unfinished), known, **means)


def _gap(quantity: str, found: Mapping[str, np.ndarray]) -> Gap:
    """Returns the gap of one quantity, and its cause if it raises an alarm; `found`: fate -> values."""
    trained, discarded = found[TRAINED], _joined(found, [fate for fate in found if fate != TRAINED])
    generated = np.concatenate([trained, discarded])
    distance, p = _distance(quantity, trained, generated), smirnov(trained, discarded).p
    cause = _cause(quantity, found, generated) if p < LARGEST_P and distance.severity > 1 else ""
    return Gap(
        quantity=quantity,
        trained=len(trained),
        discarded=len(discarded),
        trained_mean=float(trained.mean()),
        generated_mean=float(generated.mean()),
        relative=distance.relative,
        distribution=distance.distribution,
        p=p,
        cause=cause,
    )


def _cause(quantity: str, found: Mapping[str, np.ndarray], generated: np.ndarray) -> str:
    """Returns the reason without which the gap would be smallest: with its groups among the trained ones.

    Reasons with groups that differ from the trained ones by chance alone do not count, if others do not.
    """
    reasons = sorted(fate for fate in found if fate != TRAINED)
    own = [each for each in reasons if smirnov(found[TRAINED], found[each]).p < LARGEST_P] or reasons
    left = [_distance(quantity, _joined(found, [TRAINED, each]), generated).severity for each in own]
    return own[int(np.argmin(left))]


def _joined(found: Mapping[str, np.ndarray], fates: Sequence[str]) -> np.ndarray:
    return np.concatenate([found[fate] for fate in fates])


class _Distance(NamedTuple):
    """How far trained groups are from the generated ones in one quantity; the fields are those of Gap."""

    relative: float | None
    distribution: float

    @property
    def severity(self) -> float:
        """The larger of both as a multiple of what is negligible."""
        return max(abs(self.relative or 0.0) / MEAN_BOUND, self.distribution / DISTRIBUTION_BOUND)


def _distance(quantity: str, trained: np.ndarray, generated: np.ndarray) -> _Distance:
    mean, at = float(generated.mean()), np.unique(generated)
    own, all_ = (np.searchsorted(np.sort(x), at, side="right") / len(x) for x in (trained, generated))
    has_scale = quantity != "difficulty" and mean > 0
    relative = float(trained.mean()) / mean - 1 if has_scale else None
    return _Distance(relative, float(np.abs(own - all_).max()))


def alarm_text(gap: Gap) -> str:
    """Returns a sentence that says by how much trained and generated groups differ, why, and what to do."""
    relative = "" if gap.relative is None else f", {gap.relative:+.1%}"
    remedy = REMEDIES.get(gap.cause, "see the groups with this reason in the journal")
    return (
        f"trained groups are not the generated ones in {NAMES[gap.quantity]}: mean "
        f"{gap.trained_mean:,.4g} instead of {gap.generated_mean:,.4g} ({gap.difference:+,.3g}{relative}), "
        f"distribution {gap.distribution:.1%} apart, {p_text(gap.p)}; most of it by {gap.cause}: {remedy}"
    )


def p_text(p: float) -> str:
    """Returns a p-value as text; very small ones as a bound."""
    return "p < 1e-12" if p < 1e-12 else f"p = {p:.2g}"
