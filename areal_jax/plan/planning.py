"""Compiles every program of a recipe for a target, and gathers what `areal-jax plan` prints."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import jax
from jax.experimental import topologies

from areal_jax.assembly.device_memory_remedies import REMEDIES, Need
from areal_jax.assembly.devices import usable_cores
from areal_jax.assembly.gpus import PRECISION, gpu_environment
from areal_jax.assembly.memory_table import memory_table
from areal_jax.config.tree import Config
from areal_jax.parallel.private_jax import cudnn_attention, pallas_gpus
from areal_jax.plan.bounds import PlannedProgram, lines_of_today, plan_program
from areal_jax.plan.costs import Collective
from areal_jax.plan.recipe import (
    CONVERTED,
    HOST,
    POOL,
    STATE,
    TRAINER,
    Recipe,
    RecipeProgram,
    Side,
    open_recipe,
    recipe_source,
)
from areal_jax.plan.targets import GIB, Machine, Target
from areal_jax.types import ArealError

MOST_THREADS = 4
"""Programs compiled at once: each takes up to 2 GB of the host's memory."""


def plan(config: Config, machine: Machine, note: Callable[[str], None]) -> dict[str, Any]:
    """Returns the plan of a run of `config` on `machine`, as plain values for JSON.

    The process needs the environment of `targets.environment` and the compiler for the target. `note` gets a
    line for each program that was compiled. Raises ArealError if the recipe does not match the number of
    devices, or a program does not compile.
    """
    recipe = open_recipe(config, absent_devices(machine))
    # `accumulate` contains `begin`, and a TPU's compiler takes minutes for either.
    wanted = [
        one
        for side in recipe.sides
        for one in side.programs
        if one.name != "begin" or one.calls or machine.target.is_gpu
    ]
    with ThreadPoolExecutor(min(MOST_THREADS, usable_cores())) as pool:
        programs = list(pool.map(lambda one: _compiled(one, config, machine, note), wanted))
    judged = verdicts(recipe, programs, machine)
    return {
        "target": machine.target.name,
        "devices": machine.count,
        "device": machine.target.device,
        "note": "bounds from the compiled programs; no kernel was timed",
        "placement": recipe.devices.placement,
        "parameters": recipe.model.parameter_count,
        "meshes": {side.role: dict(side.mesh.shape) for side in recipe.sides},
        "attention": {side.role: side.attention for side in recipe.sides},
        "products": {side.role: side.products for side in recipe.sides if recipe.model.config.experts},
        "programs": [_plain(one) for one in programs],
        "roles": [dataclasses.asdict(one) | {"fits": one.fits, "text": one.text} for one in judged],
        "fits": all(one.fits for one in judged),
        "speed": dataclasses.asdict(speed(recipe, programs, machine.target)),
        "version": dataclasses.asdict(version_cost(recipe, programs, machine.target)),
    }


def _compiled(
    one: RecipeProgram, config: Config, machine: Machine, note: Callable[[str], None]
) -> PlannedProgram:
    precision = gpu_environment(config).get(PRECISION) if machine.target.is_gpu else None
    with jax.default_matmul_precision(precision):  # as in a run
        found = plan_program(one, machine.target)
    note(f"{found.role} {found.name}: compiled in {found.compile_s:.1f} s")
    return found


NAMED_SHARE = 0.9
"""`largest_traffic` names what moves this share of a program's bytes."""


def largest_traffic(
    config: Config, machine: Machine, program: str, note: Callable[[str], None]
) -> dict[str, Any]:
    """Returns what moves most bytes in one call of a program on one device, as plain values for JSON.

    `program`: a role and a program's name, as "trainer.accumulate"; a space in it may be written "_". Equal
    kernels are one entry; entries end where they move NAMED_SHARE of all bytes. Raises ArealError if the
    recipe has no such program, and as `plan` does.
    """
    recipe = open_recipe(config, absent_devices(machine))
    programs = {f"{one.role}.{one.name}": one for side in recipe.sides for one in side.programs}
    wanted = next((name for name in programs if name.replace(" ", "_") == program.replace(" ", "_")), None)
    if wanted is None:
        raise ArealError(
            f"--bytes {program} is no program of the recipe; its programs: {', '.join(programs)}"
        )
    with lines_of_today():
        costs = _compiled(programs[wanted], config, machine, note).costs
    largest = costs.largest_traffic(NAMED_SHARE)
    entries = [
        dataclasses.asdict(one)
        | {name: [moved._asdict() for moved in getattr(one, name)] for name in ("reads", "writes")}
        | {"bytes": one.bytes * times, "times": times}
        for one, times in largest
    ]
    return {
        "target": machine.target.name,
        "devices": machine.count,
        "program": wanted,
        "bytes": costs.bytes,
        "named_bytes": sum(one.bytes * times for one, times in largest),
        "traffic": entries,
    }


def _plain(one: PlannedProgram) -> dict[str, Any]:
    """Returns a program's figures; bytes and FLOPs are those of one call on one device."""
    costs = one.costs
    figures = dataclasses.asdict(dataclasses.replace(one, costs=None))  # pyright: ignore[reportArgumentType]
    return figures | {
        "costs": {
            "flops": dict(costs.flops),
            "bytes": costs.bytes,
            "host_bytes": costs.host_bytes,
            "sent_bytes": costs.sent,
            "collectives": [_collective(which, times) for which, times in costs.collectives.items()],
            "kernels": dict(costs.kernels),
            "dynamic_loops": costs.dynamic_loops,
            "conditionals": costs.conditionals,
        },
        "products": dict(one.products),
        "bound": one.bound,
        "at_least_s": one.at_least_s,
    }


def _collective(which: Collective, times: float) -> dict[str, Any]:
    return dataclasses.asdict(which) | {"times": times, "sent_bytes": which.sent * times}


def memory_only(config: Config, machine: Machine) -> dict[str, Any]:
    """Returns what stays in memory during a run, without temporaries; compiles nothing."""
    r = config.runtime
    needed = config.trainer_devices + (r.hosts + bool(config.observe.evaluate)) * r.host_tensor
    placement = r.placement
    if placement == "auto":
        placement = "split" if machine.count >= needed else "shared"
    source, teacher = recipe_source(config)
    table = memory_table(config, source.model, placement, teacher and teacher.model)
    return {
        "placement": placement,
        "parameters": source.model.parameter_count,
        "memory": [{"owner": owner, "content": what, "bytes": size} for owner, what, size in table],
    }


# --- whether it fits, and bounds on speed ------------------------------------------------------------------


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
class SpeedBounds:
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


def speed(recipe: Recipe, programs: Sequence[PlannedProgram], target: Target) -> SpeedBounds:
    c = recipe.config

    def total_s(role: str) -> float:
        return sum(one.calls * one.at_least_s for one in programs if one.role == role)

    trainer_s, hosts_s = total_s(TRAINER), total_s(HOST)
    samples = c.trainer.batch_size * c.algorithm.group_size
    trained = samples * c.generation.length
    takes_turns = recipe.is_shared or c.control.strategy == "sync"
    peak = target.flops["bf16"] * c.trainer.mesh.devices
    return SpeedBounds(
        trainer_s=trainer_s,
        hosts_s=hosts_s,
        step_s=trainer_s + hosts_s if takes_turns else max(trainer_s, hosts_s),
        trained_tokens_per_s=trained / trainer_s,
        sampled_tokens_per_s=samples * c.generation.max_tokens / hosts_s,
        mfu=6 * recipe.model.active_parameter_count * trained / trainer_s / peak,
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
    senders, receivers = c.trainer.mesh.devices // c.trainer.mesh.data, c.runtime.host_tensor
    size = recipe.wire_bytes
    sent = max(c.runtime.hosts * size / senders, size / receivers)
    return VersionCost(
        bytes=size,
        cast_s=sum(one.at_least_s for one in programs if one.name in ("wire copy", "digest")),
        links_s=0.0 if recipe.is_shared else sent / target.link,
        host_link_s=size / senders / target.host_link + size / receivers / target.host_link,
    )


# --- devices that are not there ----------------------------------------------------------------------------


def absent_devices(machine: Machine) -> list[Any]:
    """Returns compile-only devices of `machine`; the process needs the variables of `targets.environment`.

    Raises ArealError if XLA cannot describe them.
    """
    target = machine.target
    try:
        if not target.is_gpu:
            alone = {"chips_per_host_bounds": (1, 1, 1)} if machine.count == 1 else {}
            return list(topologies.get_topology_desc(machine.topology, platform="tpu", **alone).devices)
        _compile_cudnn_for(target.capability)
        _compile_pallas_for(target.capability)
        described: dict[str, Any] = {"target_config": target.config_text, "topology": machine.topology}
        return list(topologies.get_topology_desc(platform="cuda", **described).devices)
    except Exception as error:
        raise ArealError(f"XLA cannot compile for {machine.name}: {error}; use another --target") from error


def _compile_cudnn_for(capability: tuple[int, int]) -> None:
    """Make jax's cuDNN attention ask for the target's compute capability, not for that of a local GPU.

    The checks are private functions of jax, which look at the first local device. Where jax has none, cuDNN's
    packed layout would be refused for every target.
    """
    fused = cudnn_attention()

    def number(text: str) -> tuple[int, ...]:
        return tuple(int(part) for part in text.split("."))

    fused.check_compute_capability = lambda text: capability >= number(text)
    fused.is_cuda_compute_capability_equal = lambda text: capability == number(text)


def _compile_pallas_for(capability: tuple[int, int]) -> None:
    """Describe the target to Pallas, which otherwise asks the default device, and refuses a CPU."""
    gpus = pallas_gpus()
    if gpus is not None:
        major, minor = capability
        known = {"arch_name": f"{major}.{minor}", "compute_capability": 10 * major + minor}
        found = gpus.GpuInfo(gpu_version=None, **known)
        gpus.registry[jax.devices()[0].device_kind] = lambda: found
