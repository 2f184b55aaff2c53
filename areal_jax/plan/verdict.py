"""Whether each role of a recipe fits its devices and which setting to change, and bounds on speed.

Remedies are estimates (`assembly.device_memory_remedies`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from areal_jax.assembly.device_memory_remedies import REMEDIES, Need
from areal_jax.config.tree import Config
from areal_jax.plan.bounds import PlannedProgram
from areal_jax.plan.recipe import CONVERTED, HOST, POOL, STATE, TRAINER, Recipe, Side
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
    remedies: tuple[str, ...] = ()
    if peak > usable:
        need = Need(
            program=largest.name, temporary=largest.temporary_bytes, excess=peak - usable,
            state=side.resident.get(STATE, 0), pool=side.resident.get(POOL, 0),
            weights=sum(side.resident.values()) - side.resident.get(POOL, 0),
            converted=side.resident.get(CONVERTED, 0),
        )  # fmt: skip
        settings = REMEDIES[side.role](recipe.config, recipe.model.config, need)
        tried = [(text, peak - saved) for text, saved in settings]
        enough = [f"{text} (about {size / GIB:.1f} GiB)" for text, size in tried if size <= usable]
        remedies = tuple(enough[:MOST_REMEDIES]) or (_together(tried),)
    return Verdict(
        role=side.role, resident=resident, largest=largest.name, peak=peak, usable=usable, remedies=remedies
    )


def _together(tried: list[tuple[str, int]]) -> str:
    best = sorted(tried, key=lambda one: one[1])[:2]
    several = " and ".join(f"{text} (about {size / GIB:.1f} GiB alone)" for text, size in best)
    return several or "a --target with more memory"


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
