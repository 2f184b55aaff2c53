"""The trainer's side of `bench sync`: a child process that changes and publishes weights on request."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection

import jax

from areal_jax.generation.engine import Engine
from areal_jax.lab.bench.measure import random_model
from areal_jax.lab.bench.spawned import DEADLINE_S, received, spawned
from areal_jax.models.config import Lora
from areal_jax.models.lora import adapters_of, base_of, with_adapters
from areal_jax.models.model import Model
from areal_jax.types import VersionedParams
from areal_jax.weights.digest import digest
from areal_jax.weights.publishing import PublisherSettings
from areal_jax.weights.transfer.publisher import TransferStore

LORA = Lora(rank=8, alpha=16.0)


def adapted_model(shape: str) -> Model:
    """Returns a model of the built-in size `shape`, with LoRA adapters beside every projection matrix."""
    plain = random_model(shape, "float32")
    return Model(dataclasses.replace(plain.config, lora=LORA), plain.tokenizer)


Publish = Callable[[int, str], tuple[float, float]]
"""`publish(version, what)` makes the child process change its parameters (`what`: all or adapters), and then
publish them as `version`. Returns the time when publishing began (time.time()), and for how many seconds
publishing blocked the child.
"""


@contextmanager
def publisher(shape: str, dtype: str) -> Iterator[tuple[str, Publish]]:
    """Context manager: starts a child process; yields its address and the function that makes it publish.

    The function has the type Publish. Weights go from device to device. At the end of the block the process
    is killed.
    """
    with spawned(_publish, shape, dtype) as pipe:

        def publish(version: int, what: str) -> tuple[float, float]:
            pipe.send((version, what))
            return received(pipe)

        yield received(pipe), publish


def _publish(pipe: Connection, shape: str, dtype: str) -> None:
    model = adapted_model(shape)
    params = jax.block_until_ready(model.init(0))
    probe = Engine(model, slots=1, length=32).canary
    store = TransferStore(PublisherSettings(probe, dtype, DEADLINE_S))
    scale = jax.jit(lambda tree: jax.tree.map(lambda leaf: leaf * 1.001 + 1e-3, tree), donate_argnums=0)
    pipe.send(store.address)
    while True:
        version, what = pipe.recv()
        if what == "all":
            params = scale(params)
        else:
            params = with_adapters(base_of(params), scale(adapters_of(params)))
        value = VersionedParams(version, params, digest(params))
        began = time.time()
        store.publish(value)
        pipe.send((began, time.time() - began))
        store.wait(DEADLINE_S)
