"""The settings to change if a role needs more memory than its devices have, before a run and in one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import jax

from areal_jax.config.tree import Config
from areal_jax.generation.engine import ACCELERATOR_CHUNK, PREFILL_ROW
from areal_jax.models.config import ModelConfig
from areal_jax.parallel.program_errors import OUT_OF_MEMORY, program_of
from areal_jax.types import ArealError

TRAINER, HOST = "trainer", "host"
MOST_REMEDIES = 4


class OutOfMemoryError(ArealError):
    """A program of a role needed more memory than its device has; the message names settings to change."""


@dataclass(frozen=True, kw_only=True)
class Need:
    """The memory of one device of a role, in bytes."""

    program: str | None
    """Name of the program that needs the most, if it is known."""
    temporary: int
    """Bytes of that program's temporaries."""
    excess: int
    """Bytes that the device lacks."""
    state: int = 0
    """Bytes of the trainer's state."""
    weights: int = 0
    """Bytes of the versions that a host serves."""
    converted: int = 0
    """Bytes, of `weights`, of a version as published, which a host holds while it converts the version."""
    pool: int = 0
    """Bytes of a host's KV pages and slots."""


Remedies = Callable[[Config, ModelConfig, Need], Iterator[tuple[str, int]]]
"""Yields settings and the bytes that each saves, about; the cheapest in speed come first.

Temporaries are taken as proportional to the tokens that a program computes at once.
"""


def for_trainer(config: Config, model: ModelConfig, need: Need) -> Iterator[tuple[str, int]]:
    t, g = config.trainer, config.generation
    temporary, excess, shards = need.temporary, need.excess, t.mesh.row_parts
    if t.remat != "layer":
        yield "trainer.remat=layer", temporary // 2
    if t.compute != "packed" and config.tree_block > 256:
        yield f"trainer.tree_block={config.tree_block // 2}", temporary // 2
    rows = shards * int(t.rows / shards * max(0.0, 1 - excess / max(1, temporary)))
    if shards <= rows < t.rows:
        yield f"trainer.rows={rows}", int(temporary * (1 - rows / t.rows))
    elif t.rows > shards:
        yield f"trainer.rows={shards}", int(temporary * (1 - shards / t.rows))
    if config.logp_chunk > 256 * shards:
        vocabulary = model.vocab_size // t.mesh.tensor
        saved = 2 * 4 * vocabulary * (config.logp_chunk // shards - 256)  # logits and their gradient
        yield f"trainer.logp_chunk={256 * shards}", min(saved, temporary)
    length = config.row_length
    shorter = max(g.length, 1024 * int(length * max(0.0, 1 - excess / max(1, temporary)) / 1024))
    if shorter < length:
        yield f"trainer.length={shorter}", int(temporary * (1 - shorter / length))
    if t.optimizer_memory == "device":
        yield "trainer.optimizer_memory=host", 2 * need.state // 3  # the moments are 8 of 12 bytes
    if t.mesh.tensor == 1:
        yield f"trainer.mesh.fsdp={2 * t.mesh.fsdp}", (need.state + temporary) // 2
        yield "trainer.mesh.tensor=2", (need.state + temporary) // 2


def for_host(config: Config, model: ModelConfig, need: Need) -> Iterator[tuple[str, int]]:
    c, g = config, config.generation
    pool, weights, excess = need.pool, need.weights, need.excess
    capacity = g.kv_tokens or g.slots * g.length
    if c.wire_dtype == "float32" and c.model.dtype == "bfloat16":
        yield "weights.wire_dtype=bfloat16", weights // 2
    now = g.prefill_chunk or ACCELERATOR_CHUNK
    now = {"prefill": now, "recompute": min(now, PREFILL_ROW)}.get(need.program or "", 0)
    if now > 32:
        chunk = max(32, now // 2)
        yield f"generation.prefill_chunk={chunk}", int(need.temporary * (1 - chunk / now))
    tokens = int(capacity * (1 - excess / pool)) // g.tokens_per_page * g.tokens_per_page
    if tokens >= g.length * (1 + g.reserved_slots):
        yield f"generation.kv_tokens={tokens}", int(pool * (1 - tokens / capacity))
    by_slot = pool + need.temporary if need.program in ("decode", "recompute") else pool
    slots = int(g.slots * (1 - excess / by_slot))
    if slots > g.reserved_slots and g.kv_tokens is None:
        yield f"generation.slots={slots}", int(by_slot * (1 - slots / g.slots))
    if c.on_update == "pinned" and (c.max_staleness or 0) > 1:
        versions = weights - need.converted
        yield "control.max_staleness=1", versions * (c.parameter_sets - 2) // c.parameter_sets
    if need.converted and g.weight_layout != "stacked":
        yield "generation.weight_layout=stacked", need.converted
    if model.kv_heads % (2 * c.runtime.host_tensor) == 0:
        yield f"runtime.host_tensor={2 * c.runtime.host_tensor}", (weights + pool + need.temporary) // 2


REMEDIES: dict[str, Remedies] = {TRAINER: for_trainer, HOST: for_host}


@contextmanager
def explained(role: str, config: Config, model: ModelConfig) -> Iterator[None]:
    """Raises OutOfMemoryError in place of a device's out-of-memory error from the `with` block.

    The message names the role, the program if it is known, and settings, whose values halve what they bound:
    how much is missing is not known here.
    """
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        if OUT_OF_MEMORY not in str(error):
            raise
        program = program_of(error)
        half = Need(program=program, temporary=2, excess=1, state=2, weights=2, converted=1, pool=2)
        settings = [text for text, _ in REMEDIES[role](config, model, half)][:MOST_REMEDIES]
        raise OutOfMemoryError(
            f"the {role}'s device ran out of memory in "
            f"{f'the program {program}' if program else 'a program that was started before'}; set "
            f"{', or '.join(settings) or 'fewer or shorter samples'}, or use devices with more memory. "
            "`areal-jax plan` says what each program needs. The device's error: "
            f"{str(error).splitlines()[0][:200]}"
        ) from error
