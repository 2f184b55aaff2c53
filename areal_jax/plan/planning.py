"""Compiles every program of a recipe for a target, and gathers what `areal-jax plan` prints."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax

from areal_jax.assembly.devices import usable_cores
from areal_jax.assembly.gpus import PRECISION, gpu_environment
from areal_jax.assembly.memory_table import memory_table
from areal_jax.config.tree import Config
from areal_jax.plan.absent import absent_devices
from areal_jax.plan.bounds import PlannedProgram, plan_program
from areal_jax.plan.costs import Collective
from areal_jax.plan.recipe import RecipeProgram, open_recipe, recipe_source
from areal_jax.plan.targets import Machine
from areal_jax.plan.verdict import speed, verdicts, version_cost

MOST_THREADS = 4
"""Programs compiled at once: each takes up to 2 GB of the host's memory."""


def plan(config: Config, machine: Machine, note: Callable[[str], None]) -> dict[str, Any]:
    """Returns the plan of a run of `config` on `machine`, as plain values for JSON.

    The process needs the environment of `targets.environment` and the compiler for the target. `note` gets a
    line for each program that was compiled. Raises ArealError if the recipe does not match the number of
    devices, or a program does not compile.
    """
    recipe = open_recipe(config, absent_devices(machine))

    precision = gpu_environment(config).get(PRECISION) if machine.target.is_gpu else None

    def compiled(one: RecipeProgram) -> PlannedProgram:
        with jax.default_matmul_precision(precision):  # as in a run
            found = plan_program(one, machine.target)
        note(f"{found.role} {found.name}: compiled in {found.compile_s:.1f} s")
        return found

    # `accumulate` contains `begin`, and a TPU's compiler takes minutes for either.
    wanted = [
        one
        for side in recipe.sides
        for one in side.programs
        if one.name != "begin" or one.calls or machine.target.is_gpu
    ]
    with ThreadPoolExecutor(min(MOST_THREADS, usable_cores())) as pool:
        programs = list(pool.map(compiled, wanted))
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
        "programs": [_plain(one) for one in programs],
        "roles": [dataclasses.asdict(one) | {"fits": one.fits, "text": one.text} for one in judged],
        "fits": all(one.fits for one in judged),
        "speed": dataclasses.asdict(speed(recipe, programs, machine.target)),
        "version": dataclasses.asdict(version_cost(recipe, programs, machine.target)),
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
