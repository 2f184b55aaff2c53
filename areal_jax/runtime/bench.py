"""Measurements of this machine: each beside the limit that the same run measured. Medians, never single
figures.

Without settings: the SmolLM2-135M shape with random weights; decode with 16 slots and bf16 weights, update
and logprob 8 x 256 in float32.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping
from importlib.resources import files
from typing import Any

import jax
import numpy as np

from areal_jax.config import Config, load_config
from areal_jax.models.model import Model
from areal_jax.models.transformer import Remat
from areal_jax.plugin import check_settings
from areal_jax.runtime.bench_decode import decode, prefill, sample
from areal_jax.runtime.bench_packed import packed
from areal_jax.runtime.bench_serve import room, serve, swap
from areal_jax.runtime.bench_sync import sync
from areal_jax.runtime.measure import (
    bench_learner,
    compile_s,
    figures,
    matrix_peak,
    random_trajectory,
)
from areal_jax.runtime.memory import reset_peak, resident_bytes
from areal_jax.trainer.learner import Learner
from areal_jax.trainer.state import TrainState
from areal_jax.trajectories.packing import pack
from areal_jax.types import ArealError, Batch, Group, Prompt, SampleId


def bench(name: str, settings: Mapping[str, Any]) -> dict[str, Any]:
    """The figures of one measurement. Raises ArealError for a name or a setting that does not exist."""
    if name not in BENCHES:
        raise ArealError(f"no bench {name}; there are: {', '.join(BENCHES)}")
    check_settings(BENCHES[name], settings, f"bench {name}")
    return BENCHES[name](**settings)


def logprob(
    *, shape: str = "smollm2-135m", rows: int = 8, length: int = 256, dtype: str = "float32", repeats: int = 5
) -> dict[str, Any]:
    """Tokens a second of the trainer's scoring pass over full packed rows; 2 N FLOPs a token."""
    learner, state, batch = _trainer(shape, rows, length, dtype)

    def once() -> float:
        started = time.perf_counter()
        jax.block_until_ready(learner.prepare(state, batch))
        return time.perf_counter() - started

    return _of_peak(shape, dtype, 2, learner.model, batch, once, repeats)


def update(
    *,
    shape: str = "smollm2-135m",
    rows: int = 8,
    length: int = 256,
    dtype: str = "float32",
    repeats: int = 5,
    remat: Remat = "none",
) -> dict[str, Any]:
    """Tokens a second of one update of a micro-batch of full rows, AdamW included; 6 N FLOPs a token.

    `remat` as trainer.remat; what is computed again is not counted. `memory_forecast_bytes` is what a step is
    going to take, `memory_grown_bytes` by how much the process then grew beyond state and batch.
    """
    learner, state, batch = _trainer(shape, rows, length, dtype, remat)
    batch = learner.prepare(state, batch)
    forecast = learner.forecast(state, batch)
    states, before = [state], resident_bytes("VmRSS")
    reset_peak()

    def once() -> float:
        started = time.perf_counter()
        state, _ = learner.update(states.pop(), batch)
        jax.block_until_ready(state.params)
        states.append(state)
        return time.perf_counter() - started

    once()
    grown = resident_bytes() - before
    return _of_peak(shape, dtype, 6, learner.model, batch, once, repeats) | {
        "memory_forecast_bytes": forecast.peak,
        "memory_forecast_beyond_resident_bytes": forecast.peak - forecast.resident,
        "memory_grown_bytes": grown,
    }


def loop(*, steps: int = 150, repeats: int = 3, median: float = 6.0, seed: int = 0) -> dict[str, Any]:
    """Asynchronous against synchronous: same engine, seeds and steps, in turn; both learn.

    The quickstart with answers of `median` letters, so that decoding outweighs training.
    """
    from areal_jax.runtime.jobs import run

    arms = {
        "async": ["control.strategy=interruptible"],
        "sync": ["control.strategy=sync", "control.max_staleness=0"],
    }
    speeds: dict[str, list[float]] = {arm: [] for arm in arms}
    rewards: dict[str, list[float]] = {arm: [] for arm in arms}
    with tempfile.TemporaryDirectory() as folder:
        for repeat in range(repeats):
            for arm, words in arms.items():
                config = _decode_heavy(steps, median, seed + repeat, f"{folder}/{arm}-{repeat}", words)
                with open(os.devnull, "w") as silent:
                    rows = run(config, stream=silent).metrics
                late = rows[steps // 5 :]  # the first steps compile
                tokens = sum(row["trained_tokens"] for row in late)
                speeds[arm].append(tokens / (late[-1]["wall_s"] - rows[steps // 5 - 1]["wall_s"]))
                rewards[arm].append(statistics.mean(row["reward_mean"] for row in rows[-steps // 4 :]))
    ratios = [a / s for a, s in zip(speeds["async"], speeds["sync"], strict=True)]
    seconds = [1 / speed for speed in speeds["async"]]
    return figures(
        "tiny", "float32", statistics.median(seconds), seconds, statistics.median(speeds["async"])
    ) | {
        "sync_tokens_per_s": statistics.median(speeds["sync"]),
        "async_over_sync": statistics.median(ratios),
        "async_over_sync_runs": ratios,
        "final_reward_async": rewards["async"],
        "final_reward_sync": rewards["sync"],
        "steps": steps,
        "slots": 8,
    }


BENCHES: dict[str, Callable[..., dict[str, Any]]] = {
    "decode": decode,
    "prefill": prefill,
    "sample": sample,
    "logprob": logprob,
    "update": update,
    "packed": packed,
    "loop": loop,
    "sync": sync,
    "serve": serve,
    "room": room,
    "swap": swap,
}

# --- parts --------------------------------------------------------------------------------------------------


def _trainer(
    shape: str, rows: int, length: int, dtype: str, remat: Remat = "none"
) -> tuple[Learner, TrainState, Batch]:
    """A learner, its first state, and one micro-batch of full rows."""
    learner, state = bench_learner(shape, rows, length, dtype, remat)
    numbers, vocab_size = np.random.default_rng(0), learner.model.config.vocab_size
    members = (random_trajectory(SampleId(0, i), length, numbers, vocab_size) for i in range(rows))
    return learner, state, pack([Group(0, Prompt(tokens=[0]), tuple(members))], rows, length)


def _decode_heavy(steps: int, median: float, seed: int, folder: str, words: list[str]) -> Config:
    recipe = str(files("areal_jax") / "configs" / "quickstart.yaml")
    return load_config(
        recipe,
        f"run.dir={folder}",
        f"run.steps={steps}",
        f"run.seed={seed}",
        f"tasks.countdown.median={median}",
        "trainer.checkpoint_every=1000",
        "observe.tensorboard=false",
        "observe.report=false",
        *words,
    )


def _of_peak(
    shape: str,
    dtype: str,
    flops_a_token: int,
    model: Model,
    batch: Batch,
    once: Callable[[], float],
    repeats: int,
) -> dict[str, Any]:
    compiling = compile_s(once)
    runs = [once() for _ in range(repeats)]
    seconds, tokens, peak = statistics.median(runs), batch.tokens.size, matrix_peak(dtype)
    flops = flops_a_token * model.parameter_count * tokens
    return figures(shape, dtype, seconds, runs, tokens / seconds) | {
        "batch": list(batch.tokens.shape),
        "limit": tokens * peak / flops,
        "fraction_of_peak": flops / seconds / peak,
        **compiling,
    }
