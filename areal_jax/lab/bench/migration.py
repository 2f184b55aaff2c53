"""Measures the move of a half-decoded sample with its KV between two processes, beside a prefill of it."""

from __future__ import annotations

import statistics
import tempfile
import time
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np

from areal_jax.assembly.devices import machine
from areal_jax.generation.engine import Engine
from areal_jax.generation.moving.forecast import is_move_cheaper
from areal_jax.generation.moving.page_runs import used_bytes
from areal_jax.generation.moving.receiver import Receiver
from areal_jax.generation.slots import Prefix
from areal_jax.lab.bench.measure import in_turn, random_params, timed_s
from areal_jax.lab.bench.migration_source import SAMPLE, Source, bench_engine_of, source
from areal_jax.lab.bench.spawned import DEADLINE_S
from areal_jax.lab.bench.sync import TMPFS
from areal_jax.types import Sampling, VersionedParams

Times = dict[str, float]
"""Part of a move -> seconds: `offer`, `fetch`, `insert`, and `whole` with all that lies in between."""


def migration(
    *,
    shape: str = "smollm2-135m",
    dtype: str = "bfloat16",
    tokens: int = 1000,
    page_tokens: int = 64,
    kv_dtype: str = "auto",
    prefill_chunk: int = 256,
    folder: str | None = None,
    repeats: int = 5,
) -> dict[str, Any]:
    """Measures the move of one sample of `tokens` tokens with its KV from one process's slot to another's.

    A prefill of as many tokens and its insertion are measured in turn with it. The KV goes from device to
    device (`direct`), through files below `folder` (`staged`; None: the system's temporary folder), and
    through files in tmpfs if there is one. In the result, `seconds` is the whole move from device to device,
    `limit` the time in which numpy copies the KV once, `over_prefill` each way's time over that of the
    prefill, and `is_move_cheaper` the forecast for this sample at the rates measured here.
    """
    sizes = {"page_tokens": page_tokens, "kv_dtype": kv_dtype, "prefill_chunk": prefill_chunk}
    own = shape, dtype, tokens, sizes
    engine = bench_engine_of(*own)
    value = engine.load_params(VersionedParams(0, random_params(engine.model, dtype), ""))
    with ExitStack() as open_now:
        disks = {"staged": folder} | ({"staged_tmpfs": TMPFS} if Path(TMPFS).is_dir() else {})
        folders = {
            way: Path(open_now.enter_context(tempfile.TemporaryDirectory(dir=disk)))
            for way, disk in disks.items()
        }
        there = open_now.enter_context(source(folders, *own))
        receivers = {way: Receiver(engine, place, deadline_s=DEADLINE_S) for way, place in folders.items()}
        receivers["direct"] = Receiver(engine, Path(), deadline_s=DEADLINE_S)
        arms = {way: partial(_move, engine, there, receiver, way) for way, receiver in receivers.items()}
        rounds = in_turn(arms | {"prefill": partial(_prefill, engine, value, tokens)}, repeats)
    size = used_bytes(engine.begin_prefill(np.zeros(tokens, np.int32), tokens).prefix)
    rates = receivers["direct"].bytes_per_s, tokens / _median(rounds["prefill"], "whole")
    return (
        machine(shape, dtype, [one["whole"] for one in rounds["direct"]])
        | {"tokens": tokens, "bytes": size}
        | _compared(rounds, size)
        | {
            "bytes_per_s": rates[0],
            "prefill_tokens_per_s": rates[1],
            "is_move_cheaper": is_move_cheaper(
                size, tokens, bytes_per_s=rates[0], prefill_tokens_per_s=rates[1]
            ),
        }
    )


def _move(engine: Engine, there: Source, receiver: Receiver, way: str) -> Times:
    started_s = time.perf_counter()
    ticket, offer_s = there.offer(way)
    offered_s = time.perf_counter()
    (work,) = receiver.fetch(ticket)
    fetched_s = time.perf_counter()
    assert work.so_far is not None
    jax.block_until_ready(_inserted(engine, work.so_far.kv))
    ended_s = time.perf_counter()
    there.release()
    parts = {"offer": offer_s, "fetch": fetched_s - offered_s, "insert": ended_s - fetched_s}
    return parts | {"whole": ended_s - started_s}


def _prefill(engine: Engine, value: VersionedParams, tokens: int) -> Times:
    prompt = np.arange(tokens) % 200

    def run() -> Any:
        return _inserted(engine, engine.prefill(params=value, padded_tokens=prompt, true_length=tokens))

    return {"whole": timed_s(run)}


def _inserted(engine: Engine, prefix: Prefix) -> Any:
    request = engine.request(SAMPLE, 0, Sampling(max_tokens=engine.length), 1)
    return engine.insert(prefix, engine.init_decode_state(), 0, request=request)


def _median(each: list[Times], part: str) -> float:
    return statistics.median(one[part] for one in each)


def _compared(rounds: dict[str, list[Times]], size: int) -> dict[str, Any]:
    """Returns the medians, beside a prefill and one copy of `size` bytes by numpy."""
    medians = {arm: {part: _median(each, part) for part in each[0]} for arm, each in rounds.items()}
    whole = {arm: parts["whole"] for arm, parts in medians.items()}
    plain, target = np.ones(size, np.uint8), np.ones(size, np.uint8)
    limit = statistics.median(timed_s(lambda: np.copyto(target, plain)) for _ in range(5))
    return {
        "limit": limit,
        "fraction_of_limit": limit / whole["direct"],
        "medians_s": medians,
        "over_prefill": {arm: whole[arm] / whole["prefill"] for arm in whole if arm != "prefill"},
    }
