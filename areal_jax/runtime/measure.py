"""What every measurement shares: a model of random weights, and what a figure says of the machine."""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping
from importlib.metadata import version
from typing import Any

import jax
import jax.monitoring
import jax.numpy as jnp
import numpy as np
from jax.experimental.compilation_cache import compilation_cache

from areal_jax.config import load_config
from areal_jax.models.config import model_config
from areal_jax.models.model import Model, Params
from areal_jax.models.transformer import Remat
from areal_jax.runtime.api import preset
from areal_jax.tasks.tokenizers import ByteTokenizer
from areal_jax.trainer.learner import Learner
from areal_jax.trainer.state import TrainState, make_optimizer
from areal_jax.types import SampleId, Sampling, Trajectory

BANDWIDTH_BYTES = 2**30

COMPILE_EVENT = "/jax/core/compile/backend_compile_duration"
"""What jax tells its monitors of each program that it compiles or takes from its persistent cache."""


def random_model(shape: str, dtype: str) -> Model:
    """The named shape; its whole vocabulary is sampled and normalised over."""
    tokenizer = ByteTokenizer()
    config = model_config(shape, tokenizer.vocab_size, dtype)
    tokenizer.vocab_size = config.vocab_size
    return Model(config, tokenizer)


def random_params(model: Model, dtype: str) -> Params:
    """Random parameters in `dtype`, made on the device by one program, which gives no float32 ones back."""
    return jax.jit(lambda: jax.tree.map(lambda leaf: leaf.astype(dtype), model.init(0)))()


def bench_learner(
    shape: str, rows: int, length: int, dtype: str, remat: Remat = "none"
) -> tuple[Learner, TrainState]:
    """GRPO without KL, its log-probs recomputed, and AdamW; and a state of random weights."""
    model = random_model(shape, dtype)
    learner = Learner(
        model,
        preset("grpo", group_size=rows, kl={"coef": 0}, proximal="recompute"),
        make_optimizer(load_config("trainer.learning_rate=1e-5").trainer, 1000),
        rows=rows,
        length=length,
        remat=remat,
    )
    return learner, learner.init(model.init(0))


def random_trajectory(
    sample: SampleId, size: int, numbers: np.random.Generator, vocab_size: int
) -> Trajectory:
    """`size` tokens, a prompt of one before what is sampled; every second member of a group earns 1."""
    is_sampled = np.arange(size) > 0
    return Trajectory(
        sample,
        numbers.integers(0, vocab_size, size).astype(np.int32),
        is_sampled,
        np.where(is_sampled, -10.0, 0.0).astype(np.float32),
        np.where(is_sampled, 0, -1).astype(np.int32),
        np.where(is_sampled, 0, -1).astype(np.int32),
        Sampling(),
        "stop",
        reward=float(sample.member % 2),
    )


def machine(shape: str, dtype: str, seconds: float, runs: list[float]) -> dict[str, Any]:
    """A median with its extremes, and everything that it depends on."""
    return {
        "seconds": seconds,
        "seconds_min": min(runs),
        "seconds_max": max(runs),
        "shape": shape,
        "dtype": dtype,
        "device": jax.devices()[0].device_kind,
        "versions": {package: version(package) for package in ("jax", "jaxlib", "flax", "areal-jax")},
        "load": list(os.getloadavg()),
        "allocator": os.environ.get("GLIBC_TUNABLES", "default"),
    }


def compile_s(call: Callable[[], Any]) -> dict[str, float]:
    """Seconds in XLA's compiler for all programs of `call`: with an empty persistent cache, and a filled one.

    Calls it twice; every program compiled so far is forgotten.
    """
    settings = {
        "jax_compilation_cache_dir": None,
        "jax_persistent_cache_min_compile_time_secs": 0,
        "jax_persistent_cache_min_entry_size_bytes": -1,
    }
    before = {name: getattr(jax.config, name) for name in settings}
    seconds: list[float] = []

    def listen(event: str, duration_secs: float, **_: str | int) -> None:
        if event == COMPILE_EVENT:
            seconds.append(duration_secs)

    jax.monitoring.register_event_duration_secs_listener(listen)
    totals = []
    try:
        with tempfile.TemporaryDirectory() as folder:
            _use_cache(settings | {"jax_compilation_cache_dir": folder})
            for _ in range(2):
                jax.clear_caches()
                seconds.clear()
                jax.block_until_ready(call())
                totals.append(sum(seconds))
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
        _use_cache(before)
    return dict(zip(("compile_s", "compile_cached_s"), totals, strict=True))


def _use_cache(settings: Mapping[str, Any]) -> None:
    for name, value in settings.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()  # it is opened once


def timed_s(call: Callable[[], Any]) -> float:
    """Seconds of one call, its arrays computed."""
    started = time.perf_counter()
    jax.block_until_ready(call())
    return time.perf_counter() - started


def median_s(call: Callable[[], Any], repeats: int = 5) -> float:
    """Median of `repeats` calls after a first one that compiles."""
    timed_s(call)
    return statistics.median(timed_s(call) for _ in range(repeats))


def figures(shape: str, dtype: str, seconds: float, runs: list[float], tokens_per_s: float) -> dict[str, Any]:
    return {"tokens_per_s": tokens_per_s, **machine(shape, dtype, seconds, runs)}


def matrix_peak(dtype: str) -> float:
    """FLOP/s of a square matrix product read in `dtype`, accumulated in float32."""
    size = 2048 if jax.default_backend() == "cpu" else 8192  # long enough beside the time of a call
    left = jnp.ones((size, size), dtype)
    product = jax.jit(lambda a, b: jnp.dot(a, b, preferred_element_type=jnp.float32))
    return 2 * size**3 / median_s(lambda: product(left, left))


def read_bandwidth() -> float:
    """Bytes a second of reading one large array."""
    values = jnp.ones(BANDWIDTH_BYTES // 4, jnp.float32)
    total = jax.jit(jnp.sum)
    return BANDWIDTH_BYTES / median_s(lambda: total(values))
