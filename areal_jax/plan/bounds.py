"""Bounds on a program's time and memory on a target: no kernel is timed.

A program takes at least as long as its products take at the device's peak, its traffic at the memory's
bandwidth, and its collectives at the link's, whichever is longest. Peaks are per device.
"""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import jax

from areal_jax.plan.costs import Costs, costs_of
from areal_jax.plan.hlo import parse
from areal_jax.plan.recipe import RecipeProgram
from areal_jax.plan.targets import Target
from areal_jax.trainer.compiled import bytes_on_one_device
from areal_jax.types import ArealError

_PRODUCT = re.compile(
    r"stablehlo\.(?:dot_general|convolution)\b[^\n]*: \(tensor<(?:\d+x)*(\w+)>, tensor<(?:\d+x)*(\w+)>\)"
)


@dataclass(frozen=True, kw_only=True)
class PlannedProgram:
    """A program compiled for a target. Sizes and times are those of one device."""

    role: str
    name: str
    compile_s: float
    argument_bytes: int
    temporary_bytes: int
    beyond_bytes: int
    """Bytes that the program needs besides what stays in memory: temporaries, new results, own arguments."""
    costs: Costs
    products: Counter[str]
    """Operands' dtypes, as "bf16 x f32" -> number of products in the program before XLA changes it."""
    seconds: dict[str, float]
    """Resource (compute, memory, links, host link) -> seconds that the program uses it, at least."""
    calls: float
    tokens: int

    @property
    def bound(self) -> str:
        """The resource that sets the program's time."""
        return max(self.seconds, key=lambda resource: self.seconds[resource])

    @property
    def at_least_s(self) -> float:
        return self.seconds[self.bound]


@contextmanager
def lines_of_today() -> Iterator[None]:
    """Within it, no program comes from jax's cache that was compiled when operations stood on other lines.

    The key of the cache then holds the lines, which jax otherwise leaves out. This is so in all threads of
    the process, so only one of them may enter.
    """
    name = "jax_compilation_cache_include_metadata_in_key"
    before = getattr(jax.config, name)
    jax.config.update(name, True)
    try:
        yield
    finally:
        jax.config.update(name, before)


def plan_program(one: RecipeProgram, target: Target) -> PlannedProgram:
    """Compiles the program for the devices of its arguments, and returns what was compiled.

    Raises ArealError if XLA cannot compile it.
    """
    started = time.perf_counter()
    try:
        lowered = one.lower()
        compiled = lowered.compile()
    except Exception as error:
        first = str(error).strip().splitlines()[0] if str(error) else ""
        raise ArealError(
            f"the {one.role}'s program {one.name} does not compile for {target.device}: "
            f"{type(error).__name__}: {first[:300]}; change the setting that the message names, or --target"
        ) from error
    took_s = time.perf_counter() - started
    memory: Any = compiled.memory_analysis()
    costs = costs_of(parse(compiled.as_text() or ""), one.assumed)
    new_results = memory.output_size_in_bytes - memory.alias_size_in_bytes
    return PlannedProgram(
        role=one.role,
        name=one.name,
        compile_s=took_s,
        argument_bytes=memory.argument_size_in_bytes,
        temporary_bytes=memory.temp_size_in_bytes,
        beyond_bytes=memory.temp_size_in_bytes + new_results + bytes_on_one_device(one.beyond),
        costs=costs,
        products=products(lowered.as_text()),
        seconds=seconds(costs, target),
        calls=one.calls,
        tokens=one.tokens,
    )


def products(lowered: str) -> Counter[str]:
    """Returns operands' dtypes -> number of matrix products in a lowered module (StableHLO text)."""
    return Counter(f"{left} x {right}" for left, right in _PRODUCT.findall(lowered))


def seconds(costs: Costs, target: Target) -> dict[str, float]:
    """Returns resource -> seconds that the costs take at the target's peak."""
    return {
        "compute": sum(
            flops / target.flops.get(dtype, target.flops["f32"]) for dtype, flops in costs.flops.items()
        ),
        "memory": costs.bytes / target.bandwidth,
        "links": costs.sent / target.link,
        "host link": costs.host_bytes / target.host_link,
    }
