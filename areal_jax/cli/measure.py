"""Verbs that measure: bench, ablate, simtest."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from typing import Annotated, Any

import typer

from areal_jax.cli.shell import plain_errors, print_json
from areal_jax.cli.train import AsJson

HUGE_PAGES = "glibc.malloc.hugetlb=1"


def register(app: typer.Typer) -> None:
    app.command()(bench)
    app.command()(ablate)
    app.command()(simtest)


@plain_errors
def bench(
    name: Annotated[str, typer.Argument(help="decode, serve, update, ...; a wrong name lists them.")],
    words: Annotated[list[str] | None, typer.Argument(help="setting=value, such as shape=5m.")] = None,
    json: AsJson = False,
) -> None:
    """Measure this machine beside its own limits."""
    _with_huge_pages()
    import yaml

    from areal_jax.runtime.bench import bench as measure
    from areal_jax.runtime.jobs import use_compilation_cache

    use_compilation_cache()
    settings = {key: yaml.safe_load(value) for key, _, value in (word.partition("=") for word in words or [])}
    figures = measure(name, settings)
    if json:
        print_json(figures)
        return
    for key, value in figures.items():
        typer.echo(f"{key}: {value:.4g}" if isinstance(value, float) else f"{key}: {value}")


COLUMN = 13
"""Characters of a column of an ablation's table, also where the terminal is narrower."""


@plain_errors
def ablate(
    name: Annotated[str, typer.Argument(help="Which ablation; a list of them without one.")] = "",
    words: Annotated[
        list[str] | None,
        typer.Argument(help="values=[...], arms=[...], seeds=N, speed=X, or section.key=value for all."),
    ] = None,
    json: AsJson = False,
) -> None:
    """A named ablation: its table, with seeds."""
    from areal_jax.runtime.ablations import ABLATIONS, find

    if not name:
        listed = {name: ablation.doc for name, ablation in ABLATIONS.items()}
        if json:
            print_json(listed)
        for each, doc in ({} if json else listed).items():
            typer.echo(f"{each}: {doc}")
        return
    from areal_jax.runtime.ablation import ablate as run_all
    from areal_jax.runtime.jobs import use_compilation_cache

    ablation = find(name)
    use_compilation_cache()
    figures = run_all(name, ablation, words or [], lambda said: typer.echo(said, err=True))
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
    Console(width=COLUMN * len(table.columns)).print(table)
    for claim, holds in figures["claims"].items():
        typer.echo(f"{ {True: 'met', False: 'not met', None: 'not asked'}[holds] }: {claim}")


@plain_errors
def simtest(
    schedules: Annotated[int, typer.Option(help="Seeded schedules with faults.")] = 200,
    seed: Annotated[int, typer.Option(help="The first schedule's seed.")] = 0,
    json: AsJson = False,
) -> None:
    """The control plane under simulated schedules and faults."""
    from areal_jax.runtime.simtest import simtest as simulate_all

    figures = simulate_all(schedules, seed)
    if json:
        print_json(figures)
    else:
        for key, value in figures.items():
            typer.echo(f"{key}: {value}")
    if figures["failed"]:
        raise typer.Exit(1)


def _with_huge_pages() -> None:
    """glibc reads its tunables when a process starts: start again with large pages for large buffers."""
    if sys.platform == "linux" and "GLIBC_TUNABLES" not in os.environ:
        os.execve(
            sys.executable, [sys.executable, *sys.orig_argv[1:]], {**os.environ, "GLIBC_TUNABLES": HUGE_PAGES}
        )
