"""Measures two live versions on two hosts and on one, with equally many slots and cores."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Sequence
from contextlib import ExitStack
from multiprocessing.connection import Connection
from typing import Any

import jax
import numpy as np

from areal_jax.assembly.devices import machine, usable_cores
from areal_jax.generation.engine import Engine
from areal_jax.generation.programs import DecodeState
from areal_jax.lab.bench.decode import bench_engine
from areal_jax.lab.bench.measure import in_turn, random_params
from areal_jax.lab.bench.spawned import received, spawned
from areal_jax.types import ArealError, SampleId, Sampling, VersionedParams


def versions(
    *,
    shape: str = "smollm2-135m",
    dtype: str = "bfloat16",
    slots: int = 8,
    prompt: int = 64,
    calls: int = 4,
    decode_steps: int = 8,
    repeats: int = 5,
) -> dict[str, Any]:
    """Measures sampled tokens per second of two weights versions with `slots` live samples each.

    In arm `apart`, each version has a host process with `slots` slots, on half of this process's cores. In
    arm `together`, one host process has 2 `slots` slots, on all of these cores, and each decode call is a
    pass for each version, as on a host that ends samples under the version that they began with. The arms
    take turns. In the result, `seconds` is the time of `calls` decode calls of arm apart, and
    `apart_over_together` the ratio of tokens per second. Raises ArealError if this process may use fewer than
    two cores.
    """
    cores = sorted(os.sched_getaffinity(0))
    if usable_cores() < 2:
        raise ArealError(
            f"bench versions compares two hosts on halves of the cores, but may use {len(cores)} core; give "
            "it at least two"
        )
    half = len(cores) // 2
    own = shape, dtype, prompt, calls, decode_steps
    with ExitStack() as open_now:
        apart = [
            open_now.enter_context(spawned(_decode, part, slots, 1, *own))
            for part in (cores[:half], cores[half : 2 * half])
        ]
        together = [open_now.enter_context(spawned(_decode, cores[: 2 * half], 2 * slots, 2, *own))]
        rounds = in_turn({"apart": lambda: _round(apart), "together": lambda: _round(together)}, repeats)
    tokens = 2 * slots * calls * decode_steps
    rates = {arm: tokens / statistics.median(seconds) for arm, seconds in rounds.items()}
    pairs = zip(rounds["apart"], rounds["together"], strict=True)
    return machine(shape, dtype, rounds["apart"]) | {
        "tokens_per_s": rates,
        "apart_over_together": statistics.median(together / apart for apart, together in pairs),
        "cores": 2 * half,
        "slots": 2 * slots,
    }


def _round(hosts: Sequence[Connection]) -> float:
    """Returns the seconds in which all hosts make their calls, begun together."""
    for host in hosts:
        received(host)
    for host in hosts:
        host.send("go")
    return max(received(host) for host in hosts)


def _decode(pipe: Connection, cores: Sequence[int], slots: int, versions: int, *own: Any) -> None:
    """The host process: times its decode calls at each "go"."""
    # Before jax starts its threads, one for each core that the process may use.
    os.sched_setaffinity(0, cores)
    shape, dtype, prompt, calls, decode_steps = own
    tokens = prompt + (calls + 1) * decode_steps
    engine, first = bench_engine(
        shape, dtype, tokens, slots=slots, decode_steps=decode_steps, weight_layout="feature_major"
    )
    loaded = [VersionedParams(v, random_params(engine.model, dtype), "") for v in range(1, versions)]
    held = [first, *(engine.load_params(one) for one in loaded)]
    masks = [np.arange(slots) % versions == version for version in range(versions)]
    while True:
        state = _full(engine, first, prompt)
        pipe.send("ready")
        pipe.recv()
        started_s = time.perf_counter()
        for _ in range(calls):
            for value, mask in zip(held, masks, strict=True):
                state, sampled = engine.generate(value, state, mask if versions > 1 else None)
            jax.block_until_ready(sampled.data)
        pipe.send(time.perf_counter() - started_s)


def _full(engine: Engine, value: VersionedParams, prompt: int) -> DecodeState:
    """Returns a state with a live sample of `prompt` tokens in each slot."""
    prefix = engine.prefill(params=value, padded_tokens=np.arange(prompt) % 200, true_length=prompt)
    state = engine.init_decode_state()
    for slot in range(engine.slots):
        request = engine.request(SampleId(slot, 0), 0, Sampling(max_tokens=engine.length), prompt)
        state = engine.insert(prefix, state, slot, request=request)
    return jax.block_until_ready(state)
