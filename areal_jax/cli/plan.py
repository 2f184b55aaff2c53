"""The verb `plan`: compiles a recipe's programs for devices that are not there."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated, Any

import typer

from areal_jax.cli.shell import AsJson, print_memory, print_table, progress, show

GIB = 2**30


def plan(
    words: Annotated[
        list[str], typer.Argument(help="YAML files and section.key=value, composed left to right.")
    ],
    target: Annotated[
        str, typer.Option("--target", help="The devices: h100, h100x8, h200xN, a100-80xN, ..., v5e-8, v5p-8.")
    ],
    program: Annotated[
        str | None,
        typer.Option(
            "--bytes",
            metavar="PROGRAM",
            help="Compile one program only, as trainer.accumulate, and name what moves 90 % of its bytes.",
        ),
    ] = None,
    json: AsJson = False,
) -> None:
    """Compile a recipe for GPUs or TPUs that are not there: memory, bounds on speed, and what to change."""
    from areal_jax.assembly.gpus import FRACTION
    from areal_jax.plan.targets import environment, missing_extra, parse_target

    fraction = os.environ.get(FRACTION)
    machine = replace(parse_target(target), fraction=float(fraction) if fraction else None)
    # jax reads these when it is imported, which the imports below do.
    os.environ.update(environment(os.environ.get("XLA_FLAGS", "")))
    from areal_jax.config.loading import load_config
    from areal_jax.plan import planning
    from areal_jax.types import ArealError

    config = load_config(*words)
    if program is not None:
        if missing := missing_extra(machine.target):
            raise ArealError(f"--bytes: {missing}")
        moved = planning.largest_traffic(config, machine, program, progress)
        show(moved, json, lambda: _print_traffic(moved))
        return
    if missing := missing_extra(machine.target):
        resident = planning.memory_only(config, machine)
        if not json:
            typer.echo(f"{missing}. Without it there is only what stays in memory:")
        show(resident | {"missing": missing}, json, lambda: print_memory(resident["memory"]))
        return
    figures = planning.plan(config, machine, progress)
    show(figures, json, lambda: _print(figures))
    if not figures["fits"]:
        raise typer.Exit(1)


def _print(figures: Mapping[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Column

    meshes = "; ".join(
        f"{role}: {' x '.join(f'{axis}={size}' for axis, size in shape.items() if size > 1) or '1 device'}, "
        f"attention {figures['attention'][role]}"
        for role, shape in figures["meshes"].items()
    )
    typer.echo(
        f"{figures['devices']} x {figures['device']}, {figures['placement']}, "
        f"{figures['parameters']:,} parameters; {meshes}"
    )
    columns = (
        "program", "calls", "compile s", "args", "temp GiB", "TFLOP", "GB", "sent GB", "at least", "by"
    )  # fmt: skip
    first, *numbers, last = columns
    columns = (first, *(Column(name, justify="right") for name in numbers), last)
    rows = [
        (
            f"{one['role']} {one['name']}", f"{one['calls']:,.0f}", f"{one['compile_s']:.1f}",
            f"{one['argument_bytes'] / GIB:.2f}", f"{one['temporary_bytes'] / GIB:.2f}",
            f"{sum(costs['flops'].values()) / 1e12:.2f}", f"{costs['bytes'] / 1e9:.1f}",
            f"{costs['sent_bytes'] / 1e9:.2f}", f"{1000 * one['at_least_s']:.2f} ms", one["bound"],
        )
        for one in figures["programs"]
        for costs in [one["costs"]]
    ]  # fmt: skip
    print_table(columns, rows, max(110, Console().width), padding=(0, 1, 0, 0))
    for line in (*_details(figures), "", *_summary(figures)):
        typer.echo(line)


def _print_traffic(figures: Mapping[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Column

    whole = figures["bytes"]
    unit, size = ("GB", 1e9) if whole >= 1e9 else ("MB", 1e6)
    typer.echo(
        f"a call of {figures['program']} moves {whole / size:.1f} {unit} on each of {figures['devices']} "
        f"devices; what moves {figures['named_bytes'] / whole:.0%} of it (a row leaves out arrays below 1 %):"
    )
    numbers = (Column(name, justify="right") for name in (unit, "%", "times"))
    rows = [
        (
            f"{one['bytes'] / size:.2f}", f"{100 * one['bytes'] / whole:.1f}", f"{one['times']:,.0f}",
            _arrays(one, "reads"), _arrays(one, "writes"), _origin(one),
        )
        for one in figures["traffic"]
    ]  # fmt: skip
    columns = (*numbers, "reads", "writes", Column("operation, line", overflow="fold"))
    print_table(columns, rows, max(150, Console().width), padding=(0, 1, 0, 0))


def _arrays(one: Mapping[str, Any], side: str) -> str:
    least = 0.01 * one["bytes"] / one["times"]
    found = Counter((of["array"], of["bytes"]) for of in one[side] if of["bytes"] >= least)
    return "\n".join(
        f"{f'{count} x ' if count > 1 else ''}{array} {size / 1e6:,.2f} MB"
        for (array, size), count in found.items()
    )


def _origin(one: Mapping[str, Any]) -> str:
    """Returns the named scopes and the operation without jax's own, and the line of the code."""
    own = re.sub(r"\b(jit\([^/]*\)|while|body|closed_call|shard_map)/", "", one["operation"])
    line = one["line"].rpartition("areal_jax/")[2]
    return " ".join(part for part in (own or one["opcode"], line) if part)


def _details(figures: Mapping[str, Any]) -> list[str]:
    """Returns a line per program with its products, collectives and kernels, as far as it has any."""
    lines = []
    for one in figures["programs"]:
        costs, parts = one["costs"], []
        if one["products"]:
            parts.append("products " + ", ".join(f"{n} {kind}" for kind, n in one["products"].items()))
        sums: dict[str, float] = {}
        for which in costs["collectives"]:
            name = f"{which['kind']} {which['dtype']}"
            sums[name] = sums.get(name, 0) + which["bytes"] * which["times"]
        sent = [f"{name} {size / 1e9:.2f} GB" for name, size in sums.items() if size >= 1e7]
        parts += [", ".join(sent)] if sent else []
        parts += [f"{_short(name)} x {times:.0f}" for name, times in costs["kernels"].items()]
        if costs["conditionals"] or costs["dynamic_loops"]:
            parts.append(
                f"conditionals {costs['conditionals']}, loops that depend on data {costs['dynamic_loops']}"
            )
        if parts:
            lines.append(f"{one['role']} {one['name']}: {'; '.join(parts)}")
    return lines


def _short(kernel: str) -> str:
    return re.sub(r"_block_\w*", "", kernel)


def _summary(figures: Mapping[str, Any]) -> list[str]:
    fast, version = figures["speed"], figures["version"]
    return [
        *(role["text"] for role in figures["roles"]),
        f"a batch of samples of full length: at least {fast['step_s']:.2f} s (trainer "
        f"{fast['trainer_s']:.2f} s, hosts {fast['hosts_s']:.2f} s)",
        f"at most {fast['trained_tokens_per_s']:,.0f} trained tokens/s (MFU {fast['mfu']:.0%}) and "
        f"{fast['sampled_tokens_per_s']:,.0f} sampled tokens/s",
        f"a version: {version['bytes'] / GIB:.2f} GiB, cast in at least {1000 * version['cast_s']:.1f} ms; "
        f"to the hosts at least {1000 * version['links_s']:.1f} ms over the links, or "
        f"{1000 * version['host_link_s']:.1f} ms through the hosts' memory",
        f"{figures['note']}; attention kernels were compiled, not tested",
    ]
