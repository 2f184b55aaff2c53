"""What every measurement shares: a model of random weights, and what a figure says of the machine."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable
from importlib.metadata import version
from typing import Any

import jax

from areal_jax.models.config import model_config
from areal_jax.models.model import Model
from areal_jax.tasks.tokenizers import ByteTokenizer


def random_model(shape: str, dtype: str) -> Model:
    """The named shape; its whole vocabulary is sampled and normalised over."""
    tokenizer = ByteTokenizer()
    config = model_config(shape, tokenizer.vocab_size, dtype)
    tokenizer.vocab_size = config.vocab_size
    return Model(config, tokenizer)


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


def timed_s(call: Callable[[], Any]) -> float:
    """Seconds of one call, its arrays computed."""
    started = time.perf_counter()
    jax.block_until_ready(call())
    return time.perf_counter() - started


def median_s(call: Callable[[], Any], repeats: int = 5) -> float:
    """Median of `repeats` calls after a first one that compiles."""
    timed_s(call)
    return statistics.median(timed_s(call) for _ in range(repeats))
