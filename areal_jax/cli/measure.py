"""Commands that measure: bench, simtest, parity, eval."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from typing import Annotated, Any

import typer

from areal_jax.cli.shell import AnyModel, AsJson, print_table, progress, show
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


def parity(
    model: AnyModel,
    prompts: Annotated[int, typer.Option(min=1, help="Number of prompts.")] = 8,
    members: Annotated[int, typer.Option(min=1, help="Number of completions per prompt.")] = 4,
    max_tokens: Annotated[int, typer.Option(min=1, help="Maximum length of a completion, in tokens.")] = 64,
    seed: Annotated[
        int, typer.Option(help="Seed of sampling and, for a built-in model size, of the random parameters.")
    ] = 0,
    json: AsJson = False,
) -> None:
    """Measure how far generator and trainer log-probs differ, in nats and bit by bit."""
    from areal_jax.lab.bench.parity import parity as compare

    figures = compare(
        model,
        prompts=prompts,
        members=members,
        max_tokens=max_tokens,
        seed=seed,
        progress=progress,
    )
    show(figures, json, lambda: _print(figures))


def _print(figures: Mapping[str, Any]) -> None:
    gaps = ("mean", "p999", "max", "mismatch_kl")
    rows = (
        (
            *(row["dtype"], row["numerics"], str(row["tokens"])),
            *(f"{row[name]:.2g}" for name in gaps),
            f"{row['unequal']} ({1 - row['equal_share']:.1%})",
        )
        for row in figures["rows"]
    )
    typer.echo(f"{figures['model']}: |generator - trainer| log-prob of sampled tokens, in nats")
    print_table(("dtype", "numerics", "tokens", *gaps, "unequal bits"), rows, padding=0)


def evaluate(
    model: AnyModel,
    words: Annotated[
        list[str] | None, typer.Argument(help="Settings: tasks=NAME, YAML files and section.key=value.")
    ] = None,
    limit: Annotated[
        int | None,
        typer.Option(help="Evaluate only this many prompts of each task, from the first on; all by default."),
    ] = None,
    samples: Annotated[
        int, typer.Option(help="Completions sampled per prompt for pass@k; 0 evaluates greedily only.")
    ] = 4,
    json: AsJson = False,
) -> None:
    """Measure greedy accuracy and pass@k on a held-out split, with 95 % confidence intervals."""
    from areal_jax.evaluation.command import eval_model_or_run
    from areal_jax.observe.evals import eval_progress, print_eval
    from areal_jax.serving.run_services import make_gateway

    with eval_progress(sys.stderr) as progress:
        own = model, words or [], limit, samples, progress
        figures = eval_model_or_run(*own, make_gateway=make_gateway)
    show(figures, json, lambda: print_eval(figures, sys.stdout))
