"""Schedules of simulated runs: how long the machines' work takes, and which faults occur."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from areal_jax.config.loading import make_config
from areal_jax.config.refusals import FIXED_STALENESS, ON_UPDATE
from areal_jax.config.tree import Config
from areal_jax.control.orchestrator import PLACED_EVERY_S


@dataclass(frozen=True)
class Fault:
    """A fault that occurs once the journal has row `at_row`.

    A crash of the driver occurs before that row's actions are carried out, any other fault after them. A
    driver_crash ends all processes, a controller_crash only that of the driver. A pause stops a process,
    which the driver finds lost after Schedule.lost_s and which later goes on where it was. `down_s`: virtual
    seconds until the process is back.
    """

    kind: str
    """host_death | host_pause | kv_short | driver_crash | driver_pause | controller_crash | trainer_crash |
    trainer_pause | reward_pause"""
    at_row: int
    host: int = 0
    """Index of the host that dies, is paused or is short of KV, among the hosts of the run at that time."""
    down_s: float = 1.0


PAUSES = ("host_pause", "driver_pause", "trainer_pause", "reward_pause")
CRASHES = ("host_death", "driver_crash", "controller_crash", "trainer_crash", "kv_short")
PAUSES_S = (5.0, 20.0, 60.0, 300.0)
"""Seconds of the pauses that are drawn; a process is lost in all but the first."""


@dataclass(frozen=True)
class Schedule:
    """Times (virtual seconds), lengths (tokens) and failures of one simulated run.

    Each time is multiplied by a random lognormal factor; its logarithm has the standard deviation `jitter`.
    """

    seed: int = 0
    median_tokens: float = 12.0
    """Median length of a completion; lengths are lognormal, clipped at generation.max_tokens."""
    sigma_tokens: float = 0.8
    token_s: float = 0.01
    """Seconds of one decode step (a token per live slot) if few slots are live, all under one version."""
    crowd_slots: float = 16.0
    """Number of live slots, all under one version, at which a decode step takes twice `token_s`."""
    prefill_s: float = 0.02
    swap_s: float = 0.05
    """Seconds that a host needs to adopt a version, without recomputing KV."""
    recompute_token_s: float = 1e-4
    """Seconds to recompute the KV of one token under the adopted version; only with on_update=recompute."""
    move_s: float = 0.05
    """Seconds to move the KV of a group's half-decoded samples to another host."""
    placed_every_s: float = PLACED_EVERY_S
    """Seconds between two PlacementDue."""
    train_s: float = 1.0
    publish_s: float = 0.1
    reward_s: float = 0.05
    jitter: float = 0.2
    equal_rewards: float = 0.0
    """Fraction of groups in which every reward is 0, so that the group filter may drop the group."""
    failed_rewards: float = 0.0
    failed_samples: float = 0.0
    failed_prompts: float = 0.0
    """Fraction of prompts that cannot be used: half of them at their dispatch, half once they are scored."""
    delayed: float = 0.0
    """Fraction of ended samples that are reported late, by up to `delay_s` seconds."""
    duplicated: float = 0.0
    """Fraction of ended samples that are reported twice."""
    delay_s: float = 2.0
    turns: float = 0.0
    """Mean number of turns of an episode, at least 1; 0: samples have no workflow."""
    tool_calls: float = 0.0
    """Fraction of turns before which the workflow calls a tool."""
    workflow_s: float = 0.1
    """Seconds that a workflow takes between two turns, and that a tool call takes, on the average."""
    rejected: float = 0.0
    """Fraction of samples that their workflow rejects."""
    lost_s: float = 15.0
    """Seconds after which a process that is paused counts as lost."""
    faults: tuple[Fault, ...] = ()
    max_virtual_s: float = 1e6
    max_rows: int = 1_000_000


def random_schedule(
    seed: int, strategy: str | None = None, over_age: str | None = None
) -> tuple[Config, Schedule]:
    """Return the config and schedule, drawn from `seed`, of a small run for finding bugs.

    `strategy`, `over_age`: value of the setting in control; None: drawn too. With `over_age`, every run has
    a bound on the age of tokens; else six of seven.

    The run has 2 to 4 hosts and 6 to 10 faults, and trains at least 50 groups in at least 7 batches.
    """
    rng = np.random.default_rng([seed, 1])
    size = int(rng.integers(4, 9))
    hosts = int(rng.integers(2, 5))
    pairs = [
        (name, on_update)
        for name, allowed in ON_UPDATE.items()
        if strategy in (None, name)
        for on_update in allowed
    ]
    strategy, on_update = pairs[int(rng.integers(len(pairs)))]
    staleness = FIXED_STALENESS.get(strategy, int(rng.choice([0, 1, 1, 2, 4, 8])))
    drawn = str(rng.choice(["restart", "restart", "hold", "hold", "mask", "mask", "none"]))
    age = drawn if over_age is None else over_age
    tree = {
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
            "max_token_age": None if age == "none" else staleness + int(rng.random() < 0.3),
            "over_age": "restart" if age == "none" else age,
            "max_concurrent": int(rng.integers(2, 20)) if rng.random() < 0.5 else None,
        },
        "runtime": {"hosts": hosts},
    }
    placed_every_s = float(rng.uniform(0.1, 2.0))
    tree["trainer"] = {"batch_size": size, "checkpoint_every": int(rng.integers(1, 5))}
    config = make_config(tree)
    schedule = replace(_schedule(seed, hosts, rng), placed_every_s=placed_every_s)
    if rng.random() < 0.5:
        config = _with_gate(config)
    return config, schedule


def _schedule(seed: int, hosts: int, rng: np.random.Generator) -> Schedule:
    rows = rng.choice(np.arange(1, 200), size=int(rng.integers(6, 11)), replace=False)
    # Most kinds occur in most schedules, and some twice.
    kinds = [*rng.permutation([*CRASHES, *PAUSES])[: len(rows) - 2], *rng.choice([*CRASHES, *PAUSES], size=2)]
    faults = [
        _fault(rng, str(kind), int(row), int(rng.integers(hosts)))
        for kind, row in zip(kinds, rows, strict=True)
    ]
    return Schedule(
        seed=seed,
        token_s=float(10 ** rng.uniform(-2.0, -0.5)),
        train_s=float(rng.uniform(0.02, 1.0)),
        publish_s=float(rng.uniform(0.01, 1.0)),
        move_s=float(rng.uniform(0.001, 0.5)),
        reward_s=float(rng.uniform(0.01, 1.0)),
        sigma_tokens=float(rng.uniform(0.0, 1.5)),
        equal_rewards=float(rng.choice([0.0, 0.5])),
        failed_rewards=float(rng.choice([0.0, 0.1])),
        failed_samples=float(rng.choice([0.0, 0.03])),
        # Drawn apart, so that the other draws of each seed stay what they were.
        failed_prompts=float(np.random.default_rng([seed, 8]).choice([0.0, 0.05])),
        delayed=float(rng.choice([0.0, 0.2])),
        duplicated=float(rng.choice([0.0, 0.2])),
        faults=tuple(sorted(faults, key=lambda fault: fault.at_row)),
    )


def _fault(rng: np.random.Generator, kind: str, row: int, host: int) -> Fault:
    down_s = rng.choice(PAUSES_S) if kind in PAUSES else rng.uniform(0.1, 5.0)
    return Fault(kind, row, host, float(down_s))


def with_episodes(seed: int, schedule: Schedule) -> Schedule:
    """Return the schedule with episodes of random sizes, drawn from `seed`, instead of plain samples."""
    rng = np.random.default_rng([seed, 7])
    return replace(
        schedule,
        turns=float(rng.uniform(1.0, 4.0)),
        tool_calls=float(rng.choice([0.0, 0.5])),
        workflow_s=float(rng.uniform(0.01, 1.0)),
        rejected=float(rng.choice([0.0, 0.03])),
        median_tokens=schedule.median_tokens / 2,
    )


def _with_gate(config: Config) -> Config:
    gate = config.algorithm.gate.model_copy(update={"part": "intermediate"})
    return config.model_copy(update={"algorithm": config.algorithm.model_copy(update={"gate": gate})})
