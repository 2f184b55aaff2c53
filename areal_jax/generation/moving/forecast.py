"""Whether it is faster to move a half-decoded sample's KV to another process or to compute it there."""

from __future__ import annotations

import time

import jax
import numpy as np

from areal_jax.generation.engine import Engine
from areal_jax.types import VersionedParams

TIMED_TOKENS = 256
"""Length of the prompt with which prefills are timed."""


def prefill_tokens_per_s(engine: Engine, params: VersionedParams) -> float:
    """Measures how many tokens per second the engine prefills, with a prompt of up to TIMED_TOKENS tokens.

    `params`: in the engine's layout; their values do not matter.
    """
    prompt = np.zeros(min(engine.length - 1, TIMED_TOKENS), np.int32)

    def once() -> float:
        started_s = time.perf_counter()
        prefix = engine.prefill(params=params, padded_tokens=prompt, true_length=len(prompt))
        jax.block_until_ready(prefix.cache)
        return time.perf_counter() - started_s

    once()  # compiles
    return len(prompt) / once()


def is_move_cheaper(
    kv_bytes: int, tokens: int, *, bytes_per_s: float | None, prefill_tokens_per_s: float
) -> bool:
    """Whether moving `kv_bytes` of KV takes at most as long as a prefill of the sample's `tokens` tokens.

    `kv_bytes` is known from the sample (`page_runs.used_bytes`). `bytes_per_s`: `Receiver.bytes_per_s`, which
    the target measures over its last fetches, connecting included; None: not measured yet. Then the answer is
    True, because the first move measures it. `prefill_tokens_per_s`: measured on the target at its start.
    """
    if bytes_per_s is None:
        return True
    return kv_bytes / bytes_per_s <= tokens / prefill_tokens_per_s
