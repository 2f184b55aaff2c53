"""Commands that measure: bench, simtest."""

from __future__ import annotations

import os
import sys
from typing import Annotated

import typer

from areal_jax.cli.shell import AsJson, show
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
    from areal_jax.assembly.devices import use_compilation_cache
    from areal_jax.config.loading import parsed
    from areal_jax.lab.bench.gpu.table import lines as table
    from areal_jax.lab.bench.registry import bench as measure

    use_compilation_cache()
    settings = {key: parsed(value) for key, _, value in (word.partition("=") for word in words or [])}
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


def simtest(
    schedules: Annotated[int, typer.Option(help="Number of seeded fault schedules to run.")] = 200,
    seed: Annotated[int, typer.Option(help="Seed of the first schedule.")] = 0,
    strategy: Annotated[str, typer.Option(help="control.strategy of all runs; empty: drawn at random.")] = "",
    json: AsJson = False,
) -> None:
    """Test the control plane in simulated runs with random delays, crashes and restarts, without a model."""
    from areal_jax.config.refusals import ON_UPDATE
    from areal_jax.lab.simulation.simtest import simtest as simulate_all

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
