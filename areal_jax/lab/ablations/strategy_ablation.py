"""The ablation of all control strategies on the same work: `areal-jax ablate strategies`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from statistics import median
from typing import Any

from areal_jax.config.refusals import FIXED_STALENESS, ON_UPDATE
from areal_jax.lab.ablations.ablation import Ablation, RunRecord, Table
from areal_jax.lab.ablations.run_figures import last_mean, per_s, warm_mean, warm_step_s
from areal_jax.report.lanes import shares

ARM = "default"
"""The name of the only arm: each strategy runs with its default for generation.on_update."""

FOR_BATCH = "wait: a batch from the control plane"
FOR_SAMPLES = "wait: samples from the control plane"
FOR_VERSION = "wait: a version from the trainer"
"""The causes of idle time, by the names that the clocks of a run give them."""

SPEED = "trained_tokens_per_s"


def _share(role: str, activity: str) -> Callable[[RunRecord], float]:
    return lambda run: shares(run.intervals).get(role, {}).get(activity, 0.0)


def words_of(strategy: str) -> tuple[str, ...]:
    """Returns the config overrides that a strategy needs besides control.strategy."""
    fixed = FIXED_STALENESS.get(strategy)
    bound = () if fixed is None else (f"control.max_staleness={fixed}",)
    return (f"generation.on_update={ON_UPDATE[strategy][0]}", *bound)


def ratio(table: Table, strategy: str, baseline: str = "sync") -> float:
    """Returns the median over seeds of the trained tokens/s of `strategy` divided by those of `baseline`."""
    pairs = (table[name, ARM][SPEED] for name in (strategy, baseline))
    return median(one / other for one, other in zip(*pairs, strict=True))


def _faster(strategy: str) -> Callable[[Table], bool]:
    return lambda table: ratio(table, strategy) > 1.0


STRATEGIES = Ablation(
    doc="the same work under each control.strategy: speed, idle time by cause, age of the trained tokens, "
    "reward; of a user's config, or of a small recipe with skewed answers; --simulated and --sleeping run "
    "it under a cost model",
    recipe="configs/strategies.yaml",
    key="control.strategy",
    values=tuple(ON_UPDATE),
    arms={ARM: ()},
    seeds=3,
    speed=None,
    figures={
        SPEED: per_s("trained_tokens"),
        "generated_tokens_per_s": per_s("generated_tokens"),
        "step_s": warm_step_s,
        "token_age": warm_mean("token_age_mean"),
        "reward": last_mean("reward_mean"),
        # Idle time by cause, as shares of the time of the trainer and of all hosts.
        "trainer_waits_for_batch": _share("trainer", FOR_BATCH),
        "hosts_wait_for_samples": _share("hosts", FOR_SAMPLES),
        "hosts_wait_for_version": _share("hosts", FOR_VERSION),
        "hosts_swap": _share("hosts", "swap"),
    },
    of_value={strategy: words_of(strategy) for strategy in ON_UPDATE},
    takes_config=True,
    claims={
        f"{strategy} trains more tokens a second than sync": _faster(strategy)
        for strategy in ON_UPDATE
        if strategy != "sync"
    },
    smoke=("values=[sync,interruptible]", "seeds=1", "run.steps=6"),
)


def under_a_cost_model(ablation: Ablation) -> Ablation:
    """Returns the ablation without the figures that need a model: no answer is sampled, so none is right."""
    figures = {name: figure for name, figure in ablation.figures.items() if name != "reward"}
    return replace(ablation, figures=figures, curves=())


def compared(predicted: Mapping[str, Any], found: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Returns, for each strategy of two tables of this ablation, both speeds and their ratio.

    `predicted`, `found`: what `ablate` returned for the simulation and for the run that it predicts.
    """
    speeds = {row["value"]: row[SPEED] for row in predicted["table"]}
    return [
        {
            "value": row["value"],
            "predicted": speeds[row["value"]],
            "found": row[SPEED],
            "ratio": row[SPEED] / speeds[row["value"]],
        }
        for row in found["table"]
    ]
