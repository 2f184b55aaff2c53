"""Programs of the packaged recipes at their real sizes, each compiled once per process."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from areal_jax.config.loading import load_config
from areal_jax.plan.bounds import products
from areal_jax.plan.costs import Costs, costs_of
from areal_jax.plan.hlo import Module, parse
from areal_jax.plan.planning import absent_devices
from areal_jax.plan.recipe import Recipe, open_recipe
from areal_jax.plan.targets import GIB, parse_target

CONFIGS = Path(__file__).parents[2] / "configs"
COMMITTED: dict[str, dict[str, list[float]]] = json.loads(
    (Path(__file__).parent / "committed_costs.json").read_text()
)
"""Label of a `Setting` -> program -> GiB that it needs on one device, arguments included, and GB moved.

After a change that is meant to move one, take the new figure from the failed test's message.
"""
TOLERANCE = 0.03
"""Largest accepted difference from a committed peak, and growth of committed traffic, as shares of them."""


class Setting(NamedTuple):
    """A packaged recipe with changes, on a target."""

    label: str
    target: str
    recipe: str
    words: tuple[str, ...] = ()


class Compiled(NamedTuple):
    module: Module
    costs: Costs
    products: dict[str, int]
    """Operands' dtypes -> number of products in the lowered program."""
    gib: float
    """GiB that the program needs on one device, arguments included."""
    text: str


@cache
def opened(of: Setting) -> Recipe:
    return open_recipe(load_config(CONFIGS / of.recipe, *of.words), absent_devices(parse_target(of.target)))


@cache
def compiled(of: Setting, name: str) -> Compiled:
    """Compiles the program `name` of the recipe."""
    programs = {one.name: one for side in opened(of).sides for one in side.programs}
    one = programs[name]
    lowered = one.lower()
    result = lowered.compile()
    memory: Any = result.memory_analysis()
    peak = memory.argument_size_in_bytes + memory.output_size_in_bytes - memory.alias_size_in_bytes
    module = parse(result.as_text())
    return Compiled(
        module, costs_of(module, one.assumed), dict(products(lowered.as_text())),
        (peak + memory.temp_size_in_bytes) / GIB, result.as_text(),
    )  # fmt: skip


def moved(costs: Costs, kind: str, dtype: str) -> float:
    """Returns the bytes of the arrays that collectives of this kind and dtype move in a call."""
    return sum(
        which.bytes * times
        for which, times in costs.collectives.items()
        if (which.kind, which.dtype) == (kind, dtype)
    )


def off_the_committed_costs(of: Setting, name: str) -> str:
    """Returns "" if the program needs what committed_costs.json says and moves no more; else a message."""
    gib, gb = compiled(of, name).gib, compiled(of, name).costs.bytes / 1e9
    peak, moves = COMMITTED.get(of.label, {}).get(name, (0.0, 0.0))
    if abs(gib - peak) <= TOLERANCE * peak and gb <= (1 + TOLERANCE) * moves:
        return ""
    return (
        f"{of.label}: {name} needs {gib:.3f} GiB a device and moves {gb:.2f} GB; committed_costs.json says "
        f"{peak:.3f} and {moves:.2f}"
    )
