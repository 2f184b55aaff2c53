"""The source host of `bench migration`: a child process that offers a half-decoded sample on request."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from areal_jax.generation.commands import SoFar, Start, Work
from areal_jax.generation.engine import Engine
from areal_jax.generation.live_slots import LiveSlots, record_dtype
from areal_jax.generation.moving.sender import DirectSender, StagedSender
from areal_jax.lab.bench.measure import random_model
from areal_jax.lab.bench.spawned import received, spawned
from areal_jax.observe.waits import Timeline
from areal_jax.types import SampleId, Sampling

SAMPLE = SampleId(0, 0)


class Source(NamedTuple):
    """The calls by which the benchmark drives the child process."""

    offer: Callable[[str], tuple[bytes, float]]
    """`offer(way)` takes the sample out of its slot and offers it; returns the ticket, and seconds taken."""
    release: Callable[[], None]
    """Releases what was offered last."""


def bench_engine_of(shape: str, dtype: str, tokens: int, sizes: Mapping[str, Any]) -> Engine:
    """Returns the engine of a host for samples of `tokens` tokens and more. `sizes`: arguments of Engine."""
    length = tokens + 1
    length += -length % sizes["page_tokens"]
    return Engine(random_model(shape, dtype), slots=1, length=length, **sizes)


@contextmanager
def source(folders: Mapping[str, Path], *engine: Any) -> Iterator[Source]:
    """Context manager: starts the process, and ends it at the end of the block.

    `folders`: way -> folder of its files. `engine`: arguments of `bench_engine_of`.
    """
    with spawned(_offer, dict(folders), *engine) as pipe:

        def offer(way: str) -> tuple[bytes, float]:
            pipe.send(way)
            return received(pipe)

        def release() -> None:
            pipe.send("release")
            received(pipe)

        received(pipe)
        yield Source(offer, release)


def _offer(pipe: Connection, folders: dict[str, Path], *own: Any) -> None:
    engine, tokens = bench_engine_of(*own), own[2]
    senders: dict[str, Any] = {way: StagedSender("source", folder) for way, folder in folders.items()}
    senders["direct"] = DirectSender("source")
    slots = LiveSlots(engine, Timeline(None).clock("source"))
    work = _half_decoded(engine, tokens)
    while True:
        slots.resume(0, work)
        jax.block_until_ready(slots.state)
        pipe.send("ready")
        way = pipe.recv()
        started_s = time.perf_counter()
        work = slots.take_out(0)
        ticket = senders[way].offer([work])
        pipe.send((ticket, time.perf_counter() - started_s))
        pipe.recv()
        senders[way].release([SAMPLE])


def _half_decoded(engine: Engine, tokens: int) -> Work:
    """Returns a sample of `tokens` tokens, a prompt of one included, with random KV."""
    prefix = engine.begin_prefill(np.arange(tokens) % 200, tokens).prefix
    numbers = np.random.default_rng(0)
    random = lambda leaf: jnp.asarray(numbers.integers(0, 100, leaf.shape), leaf.dtype)  # noqa: E731
    kv = prefix.replace(cache=jax.device_put(jax.tree.map(random, prefix.cache), engine.kv_sharding))
    work = Work(SAMPLE, Start((SAMPLE,), (0,), 0), Sampling(max_tokens=engine.length), 0, ())
    work.so_far = SoFar(np.zeros(tokens, record_dtype(engine.support_size)), kv)
    return work
