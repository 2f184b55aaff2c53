"""Commands that measure: bench, ablate, simtest."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from areal_jax.cli.shell import AsJson, print_json, show
from areal_jax.types import ArealError

HUGE_PAGES = "glibc.malloc.hugetlb=1"


def bench(
    name: Annotated[
        str,
        typer.Argument(help="Name of the benchmark: decode, serve, update, ...; an unknown name lists all."),
    ],
    words: Annotated[
        list[str] | None, typer.Argument(help="Settings of the benchmark, setting=value, such as shape=5m.")
    ] = None,
    json: AsJson = False,
) -> None:
    """Run a benchmark on this machine, and compare its speed with the machine's limits."""
    _with_huge_pages()
    import yaml

    from areal_jax.assembly.devices import use_compilation_cache
    from areal_jax.bench.gpu.table import lines as table
    from areal_jax.bench.registry import bench as measure

    use_compilation_cache()
    settings = {key: yaml.safe_load(value) for key, _, value in (word.partition("=") for word in words or [])}
    figures = measure(name, settings)
    lines = (
        table(figures)
        if name == "gpu"
        else (
            f"{key}: {value:.4g}" if isinstance(value, float) else f"{key}: {value}"
            for key, value in figures.items()
        )
    )
    show(figures, json, lines)


COLUMN = 13
"""Width of each column in an ablation's table, in characters, even if the terminal is narrower."""


def ablate(
    name: Annotated[str, typer.Argument(help="Name of the ablation; if omitted, all are listed.")] = "",
    words: Annotated[
        list[str] | None,
        typer.Argument(help="values=[...], arms=[...], seeds=N, speed=X, or section.key=value for all."),
    ] = None,
    json: AsJson = False,
    smoke: Annotated[
        bool, typer.Option("--smoke", help="Run a part of the ablation that takes at most two minutes.")
    ] = False,
    runs: Annotated[
        Path | None,
        typer.Option(help="File to which each finished run is appended; runs that it has are not repeated."),
    ] = None,
    curves: Annotated[
        Path | None, typer.Option(help="SVG file for the curves by step, one line for each arm.")
    ] = None,
) -> None:
    """Run an ablation (runs that differ in one key) over several seeds, and show a table of its results."""
    from areal_jax.simulation.ablations import ABLATIONS, find

    if not name:
        show({name: ablation.doc for name, ablation in ABLATIONS.items()}, json)
        return
    from areal_jax.assembly.devices import use_compilation_cache
    from areal_jax.observe.curves import arm_curves
    from areal_jax.observe.report import page_css
    from areal_jax.observe.svg import standalone
    from areal_jax.simulation.ablation import ablate as run_all

    for path in (runs, curves):
        if path is not None and not path.parent.is_dir():
            raise ArealError(f"{path.parent} is not a folder, so {path.name} cannot be written; create it")
    ablation = find(name)
    use_compilation_cache()
    asked = [*(ablation.smoke if smoke else ()), *(words or ())]
    figures = run_all(name, ablation, asked, lambda said: typer.echo(said, err=True), runs)
    if curves is not None:
        figure = arm_curves(figures["runs"], figures["key"])
        curves.write_text(standalone(figure, page_css()), encoding="utf-8")
    if json:
        print_json(figures)
    else:
        _print_table(figures)


def _print_table(figures: Mapping[str, Any]) -> None:
    from rich.box import SIMPLE
    from rich.console import Console
    from rich.table import Table

    names = [name for name in figures["table"][0] if name not in ("value", "arm", "by_seed")]
    headers = (name.replace("_", " ") for name in names[1:])
    table = Table(
        figures["key"], "arm", names[0].replace("_", " "), "by seed", *headers, box=SIMPLE, padding=0
    )
    for row in figures["table"]:
        means = [f"{row[name]:.4g}" for name in names]
        seeds = " ".join(f"{figure:.4g}" for figure in row["by_seed"])
        table.add_row(str(row["value"]), row["arm"], means[0], seeds, *means[1:])
    console = Console(width=COLUMN * len(table.columns))
    console.print(table)
    if figures["differences"]:
        console.print(_difference_table(figures))
    for claim, holds in figures["claims"].items():
        typer.echo(f"{ {True: 'met', False: 'not met', None: 'not in this table'}[holds] }: {claim}")


def _difference_table(figures: Mapping[str, Any]) -> Any:
    """Returns the rich table of an ablation's paired differences."""
    from rich.box import SIMPLE
    from rich.table import Table

    table = Table(
        figures["key"], "figure", "arm", "minus", "difference", "95 % interval", "pairs", box=SIMPLE
    )
    for row in figures["differences"]:
        ends = "–" if row["low"] is None else f"{row['low']:+.3f} to {row['high']:+.3f}"
        names = (str(row["value"]), row["figure"].replace("_", " "), row["arm"], row["baseline"])
        table.add_row(*names, f"{row['difference']:+.3f}", ends, str(row["pairs"]))
    return table


def simtest(
    schedules: Annotated[int, typer.Option(help="Number of seeded fault schedules to run.")] = 200,
    seed: Annotated[int, typer.Option(help="Seed of the first schedule.")] = 0,
    strategy: Annotated[str, typer.Option(help="control.strategy of all runs; empty: drawn at random.")] = "",
    json: AsJson = False,
) -> None:
    """Test the control plane in simulated runs with random delays, crashes and restarts, without a model."""
    from areal_jax.config.refusals import ON_UPDATE
    from areal_jax.simulation.simtest import simtest as simulate_all

    if strategy and strategy not in ON_UPDATE:
        raise ArealError(f"--strategy={strategy} is unknown; use one of {', '.join(ON_UPDATE)}")
    figures = simulate_all(schedules, seed, strategy or None)
    show(figures, json)
    if figures["failed"]:
        raise typer.Exit(1)


def _with_huge_pages() -> None:
    """Restarts this process with huge pages for large buffers, unless GLIBC_TUNABLES is set already.

    A restart is needed because glibc reads GLIBC_TUNABLES only when a process starts.
    """
    if sys.platform == "linux" and "GLIBC_TUNABLES" not in os.environ:
        os.execve(
            sys.executable, [sys.executable, *sys.orig_argv[1:]], {**os.environ, "GLIBC_TUNABLES": HUGE_PAGES}
        )
