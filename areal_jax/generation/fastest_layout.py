"""Measures in which layout a model's weights decode fastest on this machine's CPU.

Which products XLA computes fastest depends on the CPU's vector units and caches, and cannot be told from its
name. The layout changes log-probs by rounding, so a run measures once, at its start, and keeps the result.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import os
import time
from pathlib import Path
from typing import Literal

import jax
import jax.numpy as jnp

from areal_jax.file_errors import writing
from areal_jax.models.attention import PackedAttention
from areal_jax.models.device_layout import WeightLayout, laid_out
from areal_jax.models.model import Model
from areal_jax.plugin import version_of
from areal_jax.weights.store import bytes_in, dtypes_in

CANDIDATES: tuple[WeightLayout, WeightLayout] = ("feature_major", "split")
"""The default and its rival. Stacked weights are copied at every step and are no candidate on a CPU."""
CLEARLY = 0.9
"""The rival must take less than this share of the default's time: load by other programs decides nothing."""
MEASURED_BYTES = 64_000_000
"""Bytes of the layers that are measured, more than most CPUs' caches hold."""
REPEATS = 7


def fastest_layout(model: Model, slots: int, cores: int) -> WeightLayout | Literal["auto"]:
    """Returns the layout in which `model` decodes fastest with `slots` slots on this machine's CPU.

    A model whose layers have less than MEASURED_BYTES is not measured: the result is auto. `cores`: number of
    cores that this process may use. The result of a measurement is stored in jax's compilation cache folder,
    if there is one, for this CPU, `cores`, jaxlib, XLA's flags, the model's sizes and `slots`; the next call
    reads it there.
    """
    if _layer_bytes(model) * model.config.layers < MEASURED_BYTES:
        return "auto"
    folder = jax.config.jax_compilation_cache_dir  # type: ignore[attr-defined]
    kept = Path(folder) / f"weight-layout-{_key(model, slots, cores)}.json" if folder else None
    if kept is not None and kept.exists():
        return json.loads(kept.read_text())["layout"]
    seconds = measured_s(model, slots)
    default, rival = CANDIDATES
    layout = rival if seconds[rival] < CLEARLY * seconds[default] else default
    if kept is not None:
        with writing(kept):
            kept.parent.mkdir(parents=True, exist_ok=True)
            new = kept.with_suffix(f".{os.getpid()}")
            new.write_text(json.dumps({"layout": layout, "seconds": seconds}))
            new.replace(kept)
    return layout


def measured_s(model: Model, slots: int) -> dict[WeightLayout, float]:
    """Returns candidate -> seconds of one token per slot through some layers, attention to that token alone.

    The candidates run in turn, REPEATS times after a first call that compiles; the shortest time counts,
    because other programs can only lengthen it.
    """
    config = model.config
    few = Model(
        dataclasses.replace(config, layers=math.ceil(MEASURED_BYTES / _layer_bytes(model))), model.tokenizer
    )
    params = jax.tree.map(  # not zeros: pages that were never written share one page of memory
        lambda like, kind: jnp.ones(like.shape, kind),
        few.abstract_params,
        dtypes_in(few.abstract_params, config.params_dtype),
    )
    tokens = jnp.zeros((slots, 1), jnp.int32)
    step = jax.jit(lambda params: few.hidden(params, tokens, tokens, PackedAttention(tokens + 1))[0])
    served = {layout: laid_out(few, params, layout, "cpu") for layout in CANDIDATES}
    took: dict[WeightLayout, list[float]] = {layout: [] for layout in CANDIDATES}
    for _ in range(1 + REPEATS):
        for layout in CANDIDATES:
            started = time.perf_counter()
            jax.block_until_ready(step(served[layout]))
            took[layout].append(time.perf_counter() - started)
    return {layout: min(took[layout][1:]) for layout in CANDIDATES}


def _layer_bytes(model: Model) -> int:
    """Returns the bytes of one layer's parameters as published."""
    return bytes_in(model.abstract_params["blocks"], model.config.params_dtype) // model.config.layers


def _key(model: Model, slots: int, cores: int) -> str:
    of = (_cpu(), cores, version_of("jaxlib"), os.environ.get("XLA_FLAGS", ""), model.config, slots)
    return hashlib.sha256(repr(of).encode()).hexdigest()[:16]


def _cpu() -> list[str]:
    """Returns the lines of /proc/cpuinfo that tell one CPU from another; none where there is no such file."""
    found, names = Path("/proc/cpuinfo"), ("vendor_id", "cpu family", "model", "stepping", "flags")
    if not found.exists():
        return []
    first = found.read_text().split("\n\n")[0]
    return [line for line in first.splitlines() if line.startswith(names)]
