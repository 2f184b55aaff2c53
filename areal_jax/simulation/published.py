"""Published figures of AReaL, DORA and LlamaRL beside those of the simulator, which the real control plane drives.

The cost models are those of the papers in kind, not of their machines: a decode step takes 1 + n / N0 times as
long with n live slots, and lengths are lognormal, so few samples are far longer than the others. So ratios
compare, not seconds.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

from areal_jax.config.loading import make_config
from areal_jax.config.refusals import FIXED_STALENESS, ON_UPDATE
from areal_jax.observe.lanes import shares
from areal_jax.simulation.llama_split import split_table
from areal_jax.simulation.modelled import simulated
from areal_jax.simulation.schedule import Schedule
from areal_jax.simulation.strategies import FOR_BATCH
from areal_jax.types import ArealError

MEDIAN, CUT = 12, 180
"""Tokens of the median completion, and of the longest: sigma 1, cut at 15 times the median (AReaL)."""

COSTS = Schedule(
    median_tokens=MEDIAN,
    sigma_tokens=1.0,
    token_s=0.01,
    crowd_slots=32,
    prefill_s=0.0,
    swap_s=0.01,
    recompute_token_s=1e-5,
    train_s=0.5,
    publish_s=0.02,
    reward_s=0.01,
    jitter=0.0,
)


@dataclass(frozen=True)
class Design:
    """A simulated design: a strategy, its staleness bound, and the sizes of a run with groups of 4 samples."""

    strategy: str = "interruptible"
    eta: int = 4
    on_update: str | None = None
    hosts: int = 2
    slots: int = 32
    groups: int = 8
    """Groups in a batch."""
    longest: int = CUT
    """Tokens of the longest completion."""
    max_concurrent: int | None = None
    steps: int = 20


@dataclass(frozen=True)
class Speed:
    tokens_per_s: float
    """Trained tokens a second."""
    rollout_only_s: float
    """Seconds of a step in which the trainer waits for samples."""


def speed(design: Design, costs: Schedule) -> Speed:
    """Simulate the design. Raises ArealError if the run breaks an invariant of the control plane."""
    config = make_config(
        {
            "run": {"steps": design.steps, "seed": costs.seed},
            "algorithm": {"group_size": 4},
            "generation": {
                "slots": design.slots,
                "length": design.longest + 8,
                "max_tokens": design.longest,
                "decode_steps": 6,
                "on_update": design.on_update or ON_UPDATE[design.strategy][0],
            },
            "control": {
                "strategy": design.strategy,
                "max_staleness": FIXED_STALENESS.get(design.strategy, design.eta),
                "max_concurrent": design.max_concurrent,
            },
            "trainer": {"batch_size": design.groups, "checkpoint_every": 1000},
            "runtime": {"hosts": design.hosts},
        }
    )
    found = simulated(config, costs)
    whole_s = found.rows[-1]["wall_s"]
    tokens = sum(row["trained_tokens"] for row in found.rows)
    waits = shares(found.intervals).get("trainer", {}).get(FOR_BATCH, 0.0)
    first_s = found.rows[0]["wall_s"] - costs.train_s  # `shares` begins with the first update
    waited_s = first_s + waits * (whole_s - first_s)
    return Speed(tokens / whole_s, waited_s / len(found.rows))


# --- AReaL (arXiv:2505.24298) -------------------------------------------------------------------------------


def by_staleness(seed: int) -> dict[int, float]:
    """Returns eta -> trained tokens/s, with slots for two batches (figure 5c); 0 is synchronous."""
    costs = replace(COSTS, seed=seed)
    return {eta: _of_staleness(eta, costs).tokens_per_s for eta in (0, 1, 2, 4, 8, 16)}


def _of_staleness(eta: int, costs: Schedule, **sizes: Any) -> Speed:
    return speed(Design("interruptible" if eta else "sync", eta, **sizes), costs)


def efficiency(seed: int, eta: int, longest: int) -> float:
    """Returns the speed with 8 hosts over 8 times that with one, where the trainer grows with the hosts."""
    one, eight = (
        _of_staleness(
            eta, replace(COSTS, seed=seed, train_s=4 / hosts), hosts=hosts, groups=16, longest=longest
        )
        for hosts in (1, 8)
    )
    return eight.tokens_per_s / one.tokens_per_s / 8


def of_split(seed: int) -> float:
    """Returns the speed of 6 devices that generate while 2 train, over that of all 8 in turn (75/25)."""
    device_seconds, costs = 1.5, replace(COSTS, seed=seed)
    in_turn = _of_staleness(0, replace(costs, train_s=device_seconds / 8), hosts=8, groups=32)
    apart = _of_staleness(4, replace(costs, train_s=device_seconds / 2), hosts=6, groups=32)
    return apart.tokens_per_s / in_turn.tokens_per_s


def of_interruption(seed: int, sigma: float = 1.0, median_tokens: float = 24) -> float:
    """Returns the speed of hosts that interrupt over that of hosts that drain, where no sample waits."""
    costs = Schedule(
        seed=seed, median_tokens=median_tokens, sigma_tokens=sigma, train_s=0.5, publish_s=0.05, jitter=0.0
    )
    design = Design(eta=2, slots=16, longest=360, max_concurrent=8, steps=30)
    found = [speed(replace(design, on_update=way), costs).tokens_per_s for way in ("recompute", "drain")]
    return found[0] / found[1]


# --- DORA ---------------------------------------------------------------------------------------------------


def paradigms(seed: int, sigma: float, cut: int, bound: int = 3) -> dict[str, Speed]:
    """Returns the speed of each paradigm for lognormal lengths of `sigma`, cut at `cut` times the median.

    Synchronous, 8 devices generate and train in turn, and training takes 35 % of the step, as in DORA's
    table for 64 GPUs. In the others 3 generate while 5 train: there training takes 1.6 times as long.
    partial: interruptible, with the KV of half-decoded samples computed again at each version. dora: pinned,
    at most `bound` versions old.
    """
    costs = replace(COSTS, seed=seed, sigma_tokens=sigma, recompute_token_s=REPREFILL_S)
    in_turn = replace(costs, train_s=DEVICE_S / 8)
    apart = replace(costs, train_s=DEVICE_S / 5)
    sizes: dict[str, Any] = {"groups": 32, "longest": cut * MEDIAN}
    return {
        "sync": speed(Design("sync", hosts=8, **sizes), in_turn),
        "one_step": speed(Design("one_step", hosts=3, **sizes), apart),
        "partial": speed(Design("interruptible", bound, hosts=3, **sizes), apart),
        "dora": speed(Design("pinned", bound, hosts=3, **sizes), apart),
    }


DEVICE_S = 10.0
"""Seconds in which one device would train a batch."""

REPREFILL_S = 5e-4
"""Seconds to recompute the KV of a token: a twentieth of a decode step of one sample."""

HEAVY, MILD = (1.1, 30), (0.5, 4)
"""Sigma and cut of lengths whose 99th percentile is 12.9 and 3.2 times the median."""
