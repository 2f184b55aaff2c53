"""Fits the times of a simulated run to figures that `areal-jax bench costs` measured on some machine."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from areal_jax.lab.simulation.schedule import Schedule
from areal_jax.types import ArealError

FIGURES: Mapping[str, str] = {
    "decode_call_s": "seconds of a decode call by number of live slots, for at least two numbers",
    "decode_steps": "tokens that a decode call samples in each slot",
    "prefill_s": "seconds until a sample that gets a slot can be decoded, in the mean over a group",
    "swap_s": "seconds in which a host adopts a version, without recomputing KV",
    "recompute_token_s": "seconds to recompute the KV of a token",
    "move_s": "seconds to move the KV of a group's half-decoded samples to another host",
    "train_s": "seconds of a training step",
    "publish_s": "seconds from the end of a step until hosts can load the new version",
    "reward_s": "seconds to score a group",
    "median_tokens": "tokens of the median completion",
    "sigma_tokens": "standard deviation of the logarithm of completion lengths",
}
"""The figures of a cost model, with their meaning. Measured figures may contain others besides."""

LEAST_SHARE = 0.01
"""Least share of a decode call's time that does not depend on the number of live slots."""


def fitted(figures: Mapping[str, Any]) -> Schedule:
    """Returns the schedule, without jitter and faults, with times that come closest to the figures.

    A decode call of n live slots takes decode_steps * token_s * (1 + n / crowd_slots); both parameters are
    fitted by least squares of relative errors. Raises ArealError if a figure is missing or not a number.
    """
    missing = [f"{name} ({FIGURES[name]})" for name in FIGURES if figures.get(name) is None]
    if missing:
        raise ArealError(
            f"the cost model lacks {'; '.join(missing)}: measure with `areal-jax bench costs`, or add the "
            "figure to the file"
        )
    token_s, crowd_slots = _decode(figures["decode_call_s"], figures["decode_steps"])

    def number(name: str) -> float:
        return _number(name, figures[name])

    return Schedule(
        median_tokens=number("median_tokens"),
        sigma_tokens=number("sigma_tokens"),
        token_s=token_s,
        crowd_slots=crowd_slots,
        prefill_s=number("prefill_s"),
        swap_s=number("swap_s"),
        recompute_token_s=number("recompute_token_s"),
        move_s=number("move_s"),
        train_s=number("train_s"),
        publish_s=number("publish_s"),
        reward_s=number("reward_s"),
        jitter=0.0,
    )


def _decode(by_live: Mapping[Any, Any], steps: Any) -> tuple[float, float]:
    """Returns token_s and crowd_slots."""
    if not isinstance(by_live, Mapping) or len(by_live) < 2:
        raise ArealError(
            f"decode_call_s={by_live!r}: a fit needs the seconds of calls with at least two numbers of live "
            "slots; give {live slots: seconds}"
        )
    live = np.array([_number("decode_call_s", one) for one in by_live])
    seconds = np.array([_number("decode_call_s", one) for one in by_live.values()])
    # Dividing by the seconds makes the errors relative.
    columns = np.stack([np.ones_like(live), live], 1) / seconds[:, None]
    (flat, slope), *_ = np.linalg.lstsq(columns, np.ones_like(seconds), rcond=None)
    if slope <= 0:  # noise: more live slots do not make a call shorter
        return float(seconds.mean()) / _number("decode_steps", steps), math.inf
    flat = max(float(flat), LEAST_SHARE * float(seconds.min()))
    return flat / _number("decode_steps", steps), flat / float(slope)


def _number(name: str, value: Any) -> float:
    try:
        number = float(value)
    except (TypeError, ValueError):
        number = math.nan
    if not (math.isfinite(number) and number >= 0):
        raise ArealError(
            f"{name}={value!r} is not a number of at least 0; correct the figure ({FIGURES[name]})"
        )
    return number
