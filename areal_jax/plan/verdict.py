"""Whether each role of a recipe fits its devices and which setting to change, and bounds on speed.

Remedies are estimates: temporaries are taken as proportional to the tokens that a program computes at once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import jax

from areal_jax.config.tree import Config
from areal_jax.plan.bounds import PlannedProgram
from areal_jax.plan.recipe import CONVERTED, HOST, TRAINER, Recipe, Side
from areal_jax.plan.targets import GIB, Machine, Target

MOST_REMEDIES = 3


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """The memory that one device of a role needs: what stays there, and the program that needs most."""

    role: str
    resident: dict[str, int]
    largest: str
    """Name of the program that needs the most memory."""
    peak: int
    usable: int
    remedies: tuple[str, ...]
    """Settings to change, each with the memory that a device would then need; empty if the role fits."""

    @property
    def fits(self) -> bool:
        return self.peak <= self.usable

    @property
    def text(self) -> str:
        used = f"{self.peak / GIB:.1f} of {self.usable / GIB:.1f} GiB a device, most in {self.largest}"
        if self.fits:
            return f"{self.role}: fits ({used})"
        return f"{self.role}: does not fit ({used}); set {', or '.join(self.remedies)}"


def verdicts(recipe: Recipe, programs: Sequence[PlannedProgram], machine: Machine) -> list[Verdict]:
    """Returns the verdict on each role; roles that share a device hold each other's arrays too."""
    return [_verdict(recipe, side, programs, machine) for side in recipe.sides]


def _verdict(recipe: Recipe, side: Side, programs: Sequence[PlannedProgram], machine: Machine) -> Verdict:
    usable, resident = machine.usable, dict(side.resident)
    if recipe.is_shared:
        other = next(one for one in recipe.sides if one is not side)
        resident |= {f"{other.role}: {what}": size for what, size in other.resident.items()}
    own = [one for one in programs if one.role == side.role]
    largest = max(own, key=lambda one: one.beyond_bytes)
    base = sum(resident.values())
    peak = base + largest.beyond_bytes
    options = _for_trainer if side.role == TRAINER else _for_host
    remedies: tuple[str, ...] = ()
    if peak > usable:
        tried = [(text, peak - saved) for text, saved in options(recipe, side, largest, peak - usable)]
        enough = [f"{text} (about {size / GIB:.1f} GiB)" for text, size in tried if size <= usable]
        remedies = tuple(enough[:MOST_REMEDIES]) or (_together(tried),)
    return Verdict(
        role=side.role, resident=resident, largest=largest.name, peak=peak, usable=usable, remedies=remedies
    )


def _together(tried: list[tuple[str, int]]) -> str:
    best = sorted(tried, key=lambda one: one[1])[:2]
    several = " and ".join(f"{text} (about {size / GIB:.1f} GiB alone)" for text, size in best)
    return several or "a --target with more memory"


def _for_trainer(
    recipe: Recipe, side: Side, largest: PlannedProgram, excess: int
) -> Iterator[tuple[str, int]]:
    """Yields settings and the bytes that each saves, about; the cheapest in speed come first."""
    t, g = recipe.config.trainer, recipe.config.generation
    temporary, state = largest.temporary_bytes, side.resident["train state"]
    shards = t.mesh.data * t.mesh.fsdp
    if t.remat != "layer":
        yield "trainer.remat=layer", temporary // 2
    rows = shards * int(t.rows / shards * max(0.0, 1 - excess / max(1, temporary)))
    if shards <= rows < t.rows:
        yield f"trainer.rows={rows}", int(temporary * (1 - rows / t.rows))
    elif t.rows > shards:
        yield f"trainer.rows={shards}", int(temporary * (1 - shards / t.rows))
    if t.logp_chunk > 256:
        vocabulary = recipe.model.config.vocab_size // t.mesh.tensor
        saved = 2 * 4 * vocabulary * (t.logp_chunk - 256) // shards  # logits and their gradient
        yield "trainer.logp_chunk=256", min(saved, temporary)
    length = recipe.config.row_length
    shorter = max(g.length, 1024 * int(length * max(0.0, 1 - excess / max(1, temporary)) / 1024))
    if shorter < length:
        yield f"trainer.length={shorter}", int(temporary * (1 - shorter / length))
    if t.optimizer_memory == "device":
        yield "trainer.optimizer_memory=host", 2 * state // 3  # the moments are 8 of 12 bytes
    if t.mesh.tensor == 1:
        yield f"trainer.mesh.fsdp={2 * t.mesh.fsdp}", (state + temporary) // 2
        yield "trainer.mesh.tensor=2", (state + temporary) // 2


def _for_host(recipe: Recipe, side: Side, largest: PlannedProgram, excess: int) -> Iterator[tuple[str, int]]:
    c, g = recipe.config, recipe.config.generation
    pool = side.resident["KV pages and slots"]
    weights = sum(side.resident.values()) - pool
    converted = side.resident.get(CONVERTED, 0)
    capacity = g.kv_tokens or g.slots * g.length
    if c.wire_dtype == "float32" and c.model.dtype == "bfloat16":
        yield "weights.wire_dtype=bfloat16", weights // 2
    if largest.name in ("prefill", "recompute") and g.prefill_chunk > 32:
        chunk = max(32, g.prefill_chunk // 2)
        yield (
            f"generation.prefill_chunk={chunk}",
            int(largest.temporary_bytes * (1 - chunk / g.prefill_chunk)),
        )
    tokens = int(capacity * (1 - excess / pool)) // g.tokens_per_page * g.tokens_per_page
    if tokens >= g.length * (1 + g.reserved_slots):
        yield f"generation.kv_tokens={tokens}", int(pool * (1 - tokens / capacity))
    by_slot = pool + largest.temporary_bytes if largest.name in ("decode", "recompute") else pool
    slots = int(g.slots * (1 - excess / by_slot))
    if slots > g.reserved_slots and g.kv_tokens is None:
        yield f"generation.slots={slots}", int(by_slot * (1 - slots / g.slots))
    if c.on_update == "pinned" and (c.max_staleness or 0) > 1:
        yield "control.max_staleness=1", (weights - converted) * (c.parameter_sets - 2) // c.parameter_sets
    if converted:
        blocks = sum(leaf.size for leaf in jax.tree.leaves(recipe.model.abstract_params["blocks"]))
        stacked = converted * blocks // recipe.model.parameter_count  # by prefill and recompute, once more
        is_again = largest.name in ("prefill", "recompute")
        yield "generation.weight_layout=stacked", converted + is_again * stacked
    if recipe.model.config.kv_heads % (2 * c.runtime.host_tensor) == 0:
        wider = 2 * c.runtime.host_tensor
        yield f"runtime.host_tensor={wider}", (weights + pool + largest.temporary_bytes) // 2


# --- speed --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Speed:
    """Bounds for one batch of samples of full length; no kernel was timed."""

    trainer_s: float
    """At least so many seconds to train a batch."""
    hosts_s: float
    """At least so many seconds for all hosts to sample a batch."""
    step_s: float
    trained_tokens_per_s: float
    """At most; prompt and completion tokens."""
    sampled_tokens_per_s: float
    mfu: float
    """At most this share of the trainer's peak, at 6 FLOPs per parameter and token."""


def speed(recipe: Recipe, programs: Sequence[PlannedProgram], target: Target) -> Speed:
    c = recipe.config

    def total_s(role: str) -> float:
        return sum(one.calls * one.at_least_s for one in programs if one.role == role)

    trainer_s, hosts_s = total_s(TRAINER), total_s(HOST)
    samples = c.trainer.batch_size * c.algorithm.group_size
    trained = samples * c.generation.length
    takes_turns = recipe.is_shared or c.control.strategy == "sync"
    peak = target.flops["bf16"] * c.trainer.mesh.devices
    return Speed(
        trainer_s=trainer_s,
        hosts_s=hosts_s,
        step_s=trainer_s + hosts_s if takes_turns else max(trainer_s, hosts_s),
        trained_tokens_per_s=trained / trainer_s,
        sampled_tokens_per_s=samples * c.generation.max_tokens / hosts_s,
        mfu=6 * recipe.model.parameter_count * trained / trainer_s / peak,
    )


@dataclass(frozen=True, kw_only=True)
class VersionCost:
    """What publishing a version costs, at least."""

    bytes: int
    """Bytes of one copy."""
    cast_s: float
    """Seconds on the trainer's devices: cast, copy and checksums."""
    links_s: float
    """Seconds from device to device: all hosts load it over the links."""
    host_link_s: float
    """Seconds over the host's memory, out of the trainer's devices and into a host's; files come on top."""


def version_cost(recipe: Recipe, programs: Sequence[PlannedProgram], target: Target) -> VersionCost:
    c: Config = recipe.config
    senders, receivers = c.trainer.mesh.fsdp * c.trainer.mesh.tensor, c.runtime.host_tensor
    size = recipe.wire_bytes
    sent = max(c.runtime.hosts * size / senders, size / receivers)
    return VersionCost(
        bytes=size,
        cast_s=sum(one.at_least_s for one in programs if one.name in ("wire copy", "digest")),
        links_s=0.0 if recipe.is_shared else sent / target.link,
        host_link_s=size / senders / target.host_link + size / receivers / target.host_link,
    )
