"""What the machines of a simulated run do: how long things take, and what goes wrong."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from areal_jax.config import Config, make_config
from areal_jax.refusals import FIXED_STALENESS, ON_UPDATE


@dataclass(frozen=True)
class Fault:
    """Strikes after journal row `at_row`: driver_crash before the row's actions take effect, others after."""

    kind: str
    """host_death | driver_crash | trainer_crash"""
    at_row: int
    host: int = 0
    """Which of the hosts that live then."""
    down_s: float = 1.0


@dataclass(frozen=True)
class Schedule:
    """What the machines do. Every latency is multiplied by a lognormal factor of width `jitter`."""

    seed: int = 0
    median_tokens: float = 12.0
    """Of a completion; lognormal, cut at generation.max_tokens."""
    sigma_tokens: float = 0.8
    token_s: float = 0.01
    """One decode step of an almost empty host, under one version: the time to read its parameters."""
    crowd_slots: float = 16.0
    """Live slots that double the time of a decode step."""
    prefill_s: float = 0.02
    swap_s: float = 0.05
    """Adopting a version."""
    recompute_token_s: float = 1e-4
    """Rebuilding the KV of a token under the adopted version, where hosts do."""
    train_s: float = 1.0
    publish_s: float = 0.1
    reward_s: float = 0.05
    jitter: float = 0.2
    equal_rewards: float = 0.0
    """Share of groups without signal."""
    failed_rewards: float = 0.0
    failed_samples: float = 0.0
    delayed: float = 0.0
    """Share of SampleFinished that arrive up to `delay_s` late."""
    duplicated: float = 0.0
    """Share of SampleFinished that arrive a second time."""
    delay_s: float = 2.0
    faults: tuple[Fault, ...] = ()
    max_virtual_s: float = 1e6
    max_rows: int = 1_000_000


def random_schedule(seed: int) -> tuple[Config, Schedule]:
    """A small run for hunting faults: 2 or 3 hosts, 50 groups, 5 versions and 3 faults, or more of each."""
    rng = np.random.default_rng([seed, 1])
    size = int(rng.integers(4, 9))
    hosts = int(rng.integers(2, 4))
    pairs = [(strategy, on_update) for strategy, allowed in ON_UPDATE.items() for on_update in allowed]
    strategy, on_update = pairs[int(rng.integers(len(pairs)))]
    staleness = FIXED_STALENESS.get(strategy, int(rng.choice([0, 1, 2, 4, 8])))
    config = make_config(
        {
            "run": {"seed": seed, "steps": -(-int(rng.integers(50, 65)) // size)},
            "algorithm": {
                "group_size": int(rng.integers(2, 5)),
                "group_filter": str(rng.choice(["none", "signal"])),
            },
            "generation": {
                "slots": int(rng.integers(3, 9)),
                "length": 136,
                "max_tokens": 128,
                "on_update": on_update,
            },
            "control": {
                "strategy": strategy,
                "max_staleness": staleness,
                "max_token_age": staleness + int(rng.integers(0, 2)) if rng.random() < 0.5 else None,
                "max_concurrent": int(rng.integers(2, 20)) if rng.random() < 0.5 else None,
            },
            "trainer": {"batch_size": size, "checkpoint_every": int(rng.integers(1, 5))},
            "runtime": {"hosts": hosts},
        }
    )
    kinds = ["host_death", "driver_crash", "trainer_crash"]
    faults = [
        Fault(str(rng.choice(kinds)), int(row), int(rng.integers(hosts)), float(rng.uniform(0.1, 5.0)))
        for row in rng.choice(np.arange(1, 140), size=int(rng.integers(3, 7)), replace=False)
    ]
    return config, Schedule(
        seed=seed,
        train_s=float(rng.uniform(0.02, 1.0)),
        publish_s=float(rng.uniform(0.01, 1.0)),
        reward_s=float(rng.uniform(0.01, 1.0)),
        sigma_tokens=float(rng.uniform(0.0, 1.5)),
        equal_rewards=float(rng.choice([0.0, 0.5])),
        failed_rewards=float(rng.choice([0.0, 0.1])),
        failed_samples=float(rng.choice([0.0, 0.03])),
        delayed=float(rng.choice([0.0, 0.2])),
        duplicated=float(rng.choice([0.0, 0.2])),
        faults=tuple(sorted(faults, key=lambda fault: fault.at_row)),
    )
