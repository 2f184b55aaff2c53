"""Verbs that measure: bench, simtest."""

from __future__ import annotations

import os
import sys
from typing import Annotated

import typer

from areal_jax.cli.shell import plain_errors, print_json
from areal_jax.cli.train import AsJson

HUGE_PAGES = "glibc.malloc.hugetlb=1"


def register(app: typer.Typer) -> None:
    app.command()(bench)
    app.command()(simtest)


@plain_errors
def bench(
    name: Annotated[str, typer.Argument(help="decode, logprob, update, loop or sync.")],
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
