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
import jax.numpy as jnp
import numpy as np

from areal_jax.config import Config, load_config
from areal_jax.generation.engine import Engine
from areal_jax.models.model import Model
from areal_jax.models.transformer import Remat
from areal_jax.plugin import check_settings
from areal_jax.runtime.bench_packed import packed
from areal_jax.runtime.bench_serve import room, serve, swap
from areal_jax.runtime.bench_sync import sync
from areal_jax.runtime.measure import (
    bench_learner,
    compile_s,
    machine,
    median_s,
    random_model,
    random_params,
    random_trajectory,
)
from areal_jax.runtime.memory import reset_peak, resident_bytes
from areal_jax.trainer.learner import Learner
from areal_jax.trainer.state import TrainState
from areal_jax.trajectories.packing import pack
from areal_jax.types import ArealError, Batch, Group, Prompt, SampleId, Sampling, VersionedParams

BANDWIDTH_BYTES = 2**30
NOMINAL_BANDWIDTH = {"NVIDIA H100 80GB HBM3": 3.35e12, "NVIDIA H200": 4.8e12}
"""Bytes a second of device memory by its vendor's data sheet."""


def bench(name: str, settings: Mapping[str, Any]) -> dict[str, Any]:
    """The figures of one measurement. Raises ArealError for a name or a setting that does not exist."""
    if name not in BENCHES:
        raise ArealError(f"no bench {name}; there are: {', '.join(BENCHES)}")
    check_settings(BENCHES[name], settings, f"bench {name}")
    return BENCHES[name](**settings)


def decode(
    *,
    shape: str = "smollm2-135m",
    slots: int = 16,
    dtype: str = "bfloat16",
    prompt: int = 64,
    tokens: int = 32,
    decode_steps: int = 8,
    page_tokens: int | None = None,
    kv_dtype: str = "auto",
    repeats: int = 5,
) -> dict[str, Any]:
    """Tokens a second of the whole engine with every slot live, sampling and log-probs included.

    The limit of a step is the larger of reading the weights once and multiplying by them for every slot.
    `fraction_of_bandwidth` counts the live KV too: (weights + KV bytes) / time / bandwidth, measured here,
    and as the vendor names it where the device is a known one.
    """
    model = random_model(shape, dtype)
    length = prompt + tokens + decode_steps
    length += -length % (page_tokens or length)
    engine = Engine(
        model,
        slots=slots,
        length=length,
        decode_steps=decode_steps,
        page_tokens=page_tokens,
        kv_dtype=kv_dtype,
    )
    value = engine.load_params(VersionedParams(0, random_params(model, dtype), ""))
    calls = max(1, tokens // decode_steps)

    def fresh() -> Any:
        state = engine.init_decode_state()
        prefix = engine.prefill(params=value, padded_tokens=np.arange(prompt) % 200, true_length=prompt)
        for slot in range(slots):
            request = engine.request(SampleId(0, slot), 0, Sampling(max_tokens=engine.length), prompt)
            state = engine.insert(prefix, state, slot, request=request)
        return state

    def once() -> float:
        state = fresh()
        jax.block_until_ready(state)
        started = time.perf_counter()
        for _ in range(calls):
            state, results = engine.generate(value, state)
        jax.block_until_ready(results.data)
        return (time.perf_counter() - started) / (calls * decode_steps)

    once()
    step_s = [once() for _ in range(repeats)]
    seconds = statistics.median(step_s)
    weight_bytes = model.parameter_count * jnp.dtype(dtype).itemsize
    flops = 2 * model.parameter_count * slots
    bandwidth = _bandwidth()
    limit_s = max(weight_bytes / bandwidth, flops / _peak(dtype))
    kv = jax.eval_shape(engine.init_decode_state).cache
    token_bytes = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(kv))
    token_bytes /= (engine.pages + 1) * engine.page_tokens
    read_bytes = weight_bytes + slots * (prompt + (calls * decode_steps - 1) / 2) * token_bytes
    nominal = NOMINAL_BANDWIDTH.get(jax.devices()[0].device_kind)
    return _figures(shape, dtype, seconds, step_s, slots / seconds) | {
        "slots": slots,
        "limit": slots / limit_s,
        "fraction_of_limit": limit_s / seconds,
        "attention": engine.attention.path,
        "read_bytes": read_bytes,
        "bandwidth": bandwidth,
        "fraction_of_bandwidth": read_bytes / seconds / bandwidth,
        "fraction_of_nominal_bandwidth": nominal and read_bytes / seconds / nominal,
    }


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
    return _figures(
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
    seconds, tokens, peak = statistics.median(runs), batch.tokens.size, _peak(dtype)
    flops = flops_a_token * model.parameter_count * tokens
    return _figures(shape, dtype, seconds, runs, tokens / seconds) | {
        "batch": list(batch.tokens.shape),
        "limit": tokens * peak / flops,
        "fraction_of_peak": flops / seconds / peak,
        **compiling,
    }


def _figures(
    shape: str, dtype: str, seconds: float, runs: list[float], tokens_per_s: float
) -> dict[str, Any]:
    return {"tokens_per_s": tokens_per_s, **machine(shape, dtype, seconds, runs)}


def _peak(dtype: str) -> float:
    """FLOP/s of a square matrix product read in `dtype`, accumulated in float32."""
    size = 2048 if jax.default_backend() == "cpu" else 8192  # long enough beside the time of a call
    left = jnp.ones((size, size), dtype)
    product = jax.jit(lambda a, b: jnp.dot(a, b, preferred_element_type=jnp.float32))
    return 2 * size**3 / median_s(lambda: product(left, left))


def _bandwidth() -> float:
    """Bytes a second of reading one large array."""
    values = jnp.ones(BANDWIDTH_BYTES // 4, jnp.float32)
    total = jax.jit(jnp.sum)
    return BANDWIDTH_BYTES / median_s(lambda: total(values))
