"""Compares what is computed again with a journal: bit for bit or, on another machine, within bounds."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from areal_jax.trajectories.codec import OPTIONAL, PRODUCED
from areal_jax.trajectories.paths import paths_of
from areal_jax.types import ArealError, SampleId, Trajectory

MACHINE = "machine"
"""Name of the metric that says on which kind of machine a batch was trained (`devices.training_machine`)."""

LOGP_BOUND = {"float32": 1e-3, "bfloat16": 0.25}
"""Largest accepted difference of a token's log-prob, in nats, by the dtype of published weights."""

METRIC_BOUND = {"float32": 0.01, "bfloat16": 0.2}
"""Largest accepted difference of a metric in BOUNDED, relative to the journal's value, by the same dtype."""

BOUNDED = ("loss", "grad_norm", "entropy", "reward_mean", "mismatch_kl")
"""The metrics that are compared within METRIC_BOUND. The other ones count tokens beyond a limit, or are the
largest or a quantile of something, so one token that changes sides may change them by any amount."""

SMALLEST = 0.01
"""Metrics closer to 0 than this are compared as if they were this large."""


class Difference(ArealError):
    """A value computed again differs from the journaled one; the message names the place and the field."""


class Comparison:
    """Compares bit for bit or, after `loosen`, within bounds, as rounding differs between machines."""

    def __init__(self, dtype: str) -> None:
        """`dtype`: the one in which weights are published, which decides the bounds."""
        self.is_bounded = False
        self.largest: dict[str, float] = {}
        """Within bounds: name of a field -> its largest difference so far (log-probs: absolute; metrics:
        relative)."""
        self.cut = 0
        """Within bounds: number of samples with a token that differs; they are compared up to it."""
        self._logp, self._metric = LOGP_BOUND[dtype], METRIC_BOUND[dtype]

    def loosen(self) -> None:
        """From now on compares within bounds."""
        self.is_bounded = True

    def digest(self, place: str, name: str, journaled: str, again: str) -> None:
        """Raises Difference unless two hashes are equal; within bounds no hash is compared."""
        if not self.is_bounded:
            same(place, name, journaled, again)

    def metrics(self, place: str, journaled: Mapping[str, Any], again: Mapping[str, Any]) -> None:
        """Raises Difference for the first metric that differs; those that only one side has are left out."""
        for name in sorted(journaled.keys() & again.keys()):
            if not self.is_bounded:
                same(place, name, journaled[name], again[name])
            elif name in BOUNDED:
                scale = max(abs(journaled[name]), SMALLEST)
                self._within(place, name, journaled[name], again[name], self._metric, scale)

    def sample(self, place: str, stored: Trajectory, again: Trajectory) -> bool:
        """Returns whether all tokens are equal; raises Difference for the first token that differs too much.

        The paths of an episode that branched are compared one after the other.
        Bit for bit, that is any difference. Within bounds, a token may differ, since rounding decides close
        draws; what comes after it has another context and is not compared.
        """
        if stored.branches or again.branches:
            same(place, "number of paths", len(paths_of(stored)), len(paths_of(again)))
            pairs = zip(paths_of(stored), paths_of(again), strict=True)
            equal = [self._path(f"{place}, path {n}", *pair) for n, pair in enumerate(pairs)]
            return all(equal)
        return self._path(place, stored, again)

    def _path(self, place: str, stored: Trajectory, again: Trajectory) -> bool:
        if not self.is_bounded:
            same_arrays(place, stored, again)
            return True
        unequal = _first_unequal("tokens", stored.tokens, again.tokens)
        end = len(stored.tokens) if unequal is None else unequal.at
        for at in np.flatnonzero(stored.loss_mask[:end]):
            journaled, other = float(stored.behavior_logp[at]), float(again.behavior_logp[at])
            self._within(f"{place}, token {at}", "behavior_logp", journaled, other, self._logp)
        self.cut += unequal is not None
        return unequal is None

    def _within(
        self, place: str, name: str, journaled: float, again: float, bound: float, scale: float = 1.0
    ) -> None:
        gap = 0.0 if journaled == again else abs(journaled - again) / scale
        if not gap <= bound:  # also if one of them is NaN
            if math.isnan(journaled) and math.isnan(again):
                return
            raise Difference(
                f"{place}, {name}: the journal has {journaled!r}, the replay {again!r}, further away "
                f"than the bound of {bound * scale:g}"
            )
        self.largest[name] = max(self.largest.get(name, 0.0), gap)


def name_of(sample: SampleId) -> str:
    """Returns a sample's name, as `areal-jax inspect` takes it."""
    again = f"/{sample.attempt}" if sample.attempt else ""
    return f"{sample.ordinal}/{sample.member}{again}"


def same(place: str, name: str, journaled: Any, again: Any) -> None:
    """Raises Difference unless the values are equal; two NaN are."""
    are_nan = [isinstance(value, float) and math.isnan(value) for value in (journaled, again)]
    if journaled != again and not all(are_nan):
        raise Difference(f"{place}, {name}: the journal has {journaled!r}, the replay {again!r}")


def same_arrays(place: str, stored: Trajectory, again: Trajectory) -> None:
    """Raises Difference for the first token of which a value has other bits."""
    pairs = {name: (getattr(stored, name), getattr(again, name)) for name in (*PRODUCED, *OPTIONAL)}
    found = [
        unequal
        for name, (journaled, other) in pairs.items()
        if not (journaled is None and other is None)
        and (unequal := _first_unequal(name, journaled, other)) is not None
    ]
    if found:
        at, name, journaled, other = min(found, key=lambda one: one.at)
        raise Difference(f"{place}, token {at}, {name}: the journal has {journaled!r}, the replay {other!r}")


class _Unequal(NamedTuple):
    """Two arrays differ at this index; a value is None beyond an array's end."""

    at: int
    name: str
    journaled: Any
    again: Any


def _first_unequal(name: str, journaled: Any, again: Any) -> _Unequal | None:
    """Returns where two arrays first have other bits. None counts as an empty array."""
    one, other = (np.zeros(0, np.int32) if array is None else array for array in (journaled, again))
    count = min(len(one), len(other))
    bits = [np.ascontiguousarray(array[:count]).view(np.uint8).reshape(count, -1) for array in (one, other)]
    unequal = np.flatnonzero((bits[0] != bits[1]).any(axis=1)) if count else np.zeros(0, int)
    if not unequal.size and len(one) == len(other):
        return None
    at = int(unequal[0]) if unequal.size else count
    one_value, other_value = (array[at] if at < len(array) else None for array in (one, other))
    return _Unequal(at, name, one_value, other_value)
