"""The benchmarks of `areal-jax bench`: medians, most beside a limit of this machine measured in the same run.

Models have random weights and, in most benchmarks, the size of SmolLM2-135M by default. `decode` uses 16
slots and bfloat16 weights; `update` uses a float32 batch of 8 rows of 256 tokens.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from areal_jax.assembly.devices import machine
from areal_jax.lab.bench.cost_figures import costs
from areal_jax.lab.bench.decode import decode, prefill, sample
from areal_jax.lab.bench.gpu.timed_stages import gpu
from areal_jax.lab.bench.hosting import serve, swap
from areal_jax.lab.bench.long_run import journal
from areal_jax.lab.bench.loop import loop
from areal_jax.lab.bench.measure import bench_learner, compile_s, full_batch, matrix_peak, timed_s, updates
from areal_jax.lab.bench.mixture import experts
from areal_jax.lab.bench.prefix_trees import tree
from areal_jax.lab.bench.sync import sync
from areal_jax.models.transformer import Remat
from areal_jax.plugin import check_settings
from areal_jax.runtime.device_memory import reset_peak, resident_bytes
from areal_jax.types import ArealError


def bench(name: str, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Runs the benchmark `name` with the keyword arguments `settings`; returns its figures.

    Raises ArealError for an unknown name or setting.
    """
    if name not in BENCHES:
        raise ArealError(f"unknown benchmark {name}; choose one of: {', '.join(BENCHES)}")
    check_settings(BENCHES[name], settings, f"bench {name}")
    return BENCHES[name](**settings)


def update(
    *,
    shape: str = "smollm2-135m",
    rows: int = 8,
    length: int = 256,
    dtype: str = "float32",
    repeats: int = 5,
    remat: Remat = "none",
) -> dict[str, Any]:
    """Measures tokens per second of one update of a micro-batch of full rows, AdamW included.

    In the result, `limit` is the throughput if a token costs 6 FLOPs per parameter, at the FLOP/s measured
    for a large matrix product; what the backward pass recomputes (`remat`, as trainer.remat) is not counted.
    `memory_forecast_bytes` is the device memory that an update is forecast to need, state and batch included;
    `memory_grown_bytes` is how far the process's host memory grew in one update, up to its peak.
    """
    learner, state = bench_learner(shape, rows, length, dtype, remat)
    batch = learner.prepare(state, full_batch(learner))
    forecast = learner.forecast(state, batch)
    once, before = partial(updates(learner, state), batch), resident_bytes("VmRSS")
    reset_peak()
    timed_s(once)
    grown = resident_bytes() - before
    compiling = compile_s(once)
    runs = [timed_s(once) for _ in range(repeats)]
    seconds, tokens, peak = statistics.median(runs), batch.tokens.size, matrix_peak(dtype)
    flops = 6 * learner.model.active_parameter_count * tokens
    return machine(shape, dtype, runs) | {
        "tokens_per_s": tokens / seconds,
        "batch": list(batch.tokens.shape),
        "limit": tokens * peak / flops,
        "fraction_of_peak": flops / seconds / peak,
        **compiling,
        "memory_forecast_bytes": forecast.peak,
        "memory_forecast_beyond_resident_bytes": forecast.peak - forecast.resident,
        "memory_grown_bytes": grown,
    }


MEASUREMENTS = (decode, prefill, sample, update, experts, tree, loop, sync, serve, swap, journal, costs, gpu)

BENCHES: Mapping[str, Callable[..., dict[str, Any]]] = {each.__name__: each for each in MEASUREMENTS}
