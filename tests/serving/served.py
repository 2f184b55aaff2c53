"""A tiny model as a server has it: bytes for ids, penalties, and parameters that differ by version."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from areal_jax.generation.commands import Start
from areal_jax.generation.engine import Engine
from areal_jax.generation.slots import Penalties
from areal_jax.models.config import model_config
from areal_jax.models.model import Model
from areal_jax.serving.requests import Ask
from areal_jax.tasks.tokenizers import ByteTokenizer
from areal_jax.types import SampleId, Sampling, VersionedParams
from areal_jax.weights.digest import digest
from areal_jax.weights.memory import MemoryStore
from tests.generation.decoding import Heard, make_host, start
from tests.hangs import HANG_S
from tests.optimizations import cached

LENGTH, SLOTS, STEPS = 64, 4, 2
PROMPT = (5, 90, 41, 7)
SIZES = dict(width=32, heads=4, kv_heads=2, head_dim=8, mlp_width=64, is_tied=False)


@cached
def tiny_engine() -> Engine:
    model = Model(model_config("tiny", 258, **SIZES), ByteTokenizer())
    sizes = dict(slots=SLOTS, length=LENGTH, decode_steps=STEPS, page_tokens=16, prefill_chunk=16)
    return Engine(model, has_penalties=True, **sizes)  # type: ignore[arg-type]


@cached
def tiny_params(version: int) -> VersionedParams:
    engine = tiny_engine()
    params = jax.tree.map(lambda leaf: leaf if leaf.ndim < 3 else 2 * leaf, engine.model.init(40 + version))
    params = jax.device_put(params, engine.param_shardings)
    return VersionedParams(version, params, digest(params))


@cached
def alone(
    prompt: tuple[int, ...],
    version: int = 0,
    sampling: Sampling | None = None,
    member: int = 0,
    seed: int = 0,
) -> tuple[tuple[int, ...], tuple[float, ...]]:
    """Tokens and log-probs of this sample on a host that has nothing else to do; greedy unless said."""
    engine, heard = tiny_engine(), Heard()
    store = MemoryStore(engine.canary)
    store.publish(tiny_params(version))
    sampling = sampling or Sampling(temperature=0.0, max_tokens=20)
    host = make_host(engine, store, heard, stops=(engine.tokenizer.eos_id,), sampling=sampling, seed=seed)
    host.inbox.put(start(0, 1, prompt, first=member))
    host.take_commands()
    while host.has_work:
        host.step()
    found = heard.done[SampleId(0, member)]
    own = found.loss_mask
    return tuple(found.tokens[own].tolist()), tuple(np.asarray(found.behavior_logp[own]).tolist())


def asked(
    prompt: tuple[int, ...],
    sampling: Sampling,
    penalties: Penalties | None = None,
    *,
    n: int = 1,
    request_id: str = "",
    min_version: int = 0,
    seed: int | None = None,
    **command: Any,
) -> Ask:
    drawn_as = None if seed is None else 0
    given = dict(sampling=sampling, penalties=penalties, seed=seed, drawn_as=drawn_as, **command)
    return Ask(Start((), prompt, min_version, is_request=True, **given), n, request_id)


def wait_until(holds: Callable[[], bool], what: str, deadline_s: float = HANG_S) -> None:
    end_s = time.monotonic() + deadline_s
    while not holds():
        assert time.monotonic() < end_s, f"not within {deadline_s:g} s: {what}"
        time.sleep(0.005)
