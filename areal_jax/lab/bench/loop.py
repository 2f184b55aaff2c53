"""Measures whole runs in one process: asynchronous beside synchronous ones, and one on a shared device."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from areal_jax.assembly.devices import machine
from areal_jax.config.loading import load_config
from areal_jax.config.tree import Config
from areal_jax.lab.ablations.ablation import LocalBench
from areal_jax.lab.ablations.run_figures import last_mean, per_s


def loop(
    *,
    shape: str = "tiny",
    dtype: str = "float32",
    steps: int = 150,
    repeats: int = 3,
    median: float = 6.0,
    seed: int = 0,
    words: Sequence[str] = (),
) -> dict[str, Any]:
    """Compares asynchronous with synchronous training in trained tokens per second, in alternating runs.

    There are `repeats` runs of each kind, with `steps` training steps each; both have the same engine and
    seeds. They train on the task of configs/quickstart.yaml, with a median answer length of `median` letters,
    so that decoding takes longer than training. `words`: further settings of both, section.key=value.
    """
    model = [f"model.shape={shape}", f"model.dtype={dtype}", *words]
    arms = {
        "async": [*model, "control.strategy=interruptible"],
        "sync": [*model, "control.strategy=sync", "control.max_staleness=0"],
    }
    speeds: dict[str, list[float]] = {arm: [] for arm in arms}
    rewards: dict[str, list[float]] = {arm: [] for arm in arms}
    local = LocalBench()
    for repeat in range(repeats):
        for arm, words in arms.items():
            run = local.run(_decode_heavy(steps, median, seed + repeat, words))
            speeds[arm].append(per_s("trained_tokens")(run))
            rewards[arm].append(last_mean("reward_mean")(run))
    ratios = [a / s for a, s in zip(speeds["async"], speeds["sync"], strict=True)]
    return machine(shape, dtype, [1 / speed for speed in speeds["async"]]) | {
        "tokens_per_s": statistics.median(speeds["async"]),
        "sync_tokens_per_s": statistics.median(speeds["sync"]),
        "async_over_sync": statistics.median(ratios),
        "async_over_sync_runs": ratios,
        "final_reward_async": rewards["async"],
        "final_reward_sync": rewards["sync"],
        "steps": steps,
        "slots": 8,
    }


def whole_run(*, steps: int, words: Sequence[str] = ()) -> dict[str, Any]:
    """Returns figures of a run of configs/quickstart.yaml with trainer and host on one device.

    `words`: further settings, section.key=value.
    """
    run = LocalBench().run(_quiet("runtime.placement=shared", f"run.steps={steps}", *words))
    rows = run.rows
    late = rows[len(rows) // 2 :]
    names = "trainer_wait_share", "generator_idle_share", "decode_gap_p99_s"
    return {
        "reward_first": rows[0]["reward_mean"],
        "reward_last": statistics.mean(row["reward_mean"] for row in rows[-5:]),
        "run_s": rows[-1]["wall_s"],
        "trained_tokens_per_s": per_s("trained_tokens")(run),
        **{name: statistics.median(row[name] for row in late) for name in names},
    }


def _decode_heavy(steps: int, median: float, seed: int, words: list[str]) -> Config:
    return _quiet(f"run.steps={steps}", f"run.seed={seed}", f"tasks.countdown.median={median}", *words)


def _quiet(*words: str) -> Config:
    """Returns the quickstart's config with `words`, without the files that only people read."""
    quiet = "trainer.checkpoint_every=1000", "observe.tensorboard=false", "observe.report=false"
    return load_config("configs/quickstart.yaml", *quiet, *words)
