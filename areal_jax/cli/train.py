"""Commands that train: quickstart, run, resume."""

from __future__ import annotations

import sys
from collections.abc import Callable
from itertools import count
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Annotated, Any

import typer

from areal_jax.cli.shell import POINTER, AsJson, print_json, print_memory, show, stop_on_sigterm

if TYPE_CHECKING:
    from areal_jax.report.run_result import RunResult

ConfigWords = Annotated[
    list[str] | None, typer.Argument(help="YAML files and section.key=value, composed left to right.")
]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Print config, meshes and memory; start nothing.")]


def quickstart(words: ConfigWords = None, json: AsJson = False, dry_run: DryRun = False) -> None:
    """Train a small model on a procedural task, in about a minute."""
    from importlib.resources import as_file, files

    with as_file(files("areal_jax") / "configs" / "quickstart.yaml") as recipe:
        _run([str(recipe), *_fresh_folder(words or [])], json, dry_run)


def run(words: ConfigWords = None, json: AsJson = False, dry_run: DryRun = False) -> None:
    """Train: CONFIG [CONFIG ...] [section.key=value ...]."""
    if not words:
        raise typer.BadParameter(
            "no config file given; name one, such as configs/quickstart.yaml, or use `areal-jax quickstart`"
        )
    _run(words, json, dry_run)


def resume(folder: Path, words: ConfigWords = None, json: AsJson = False) -> None:
    """Continue a run that ended for any reason: RUN [section.key=value ...]."""
    stop_on_sigterm()
    from areal_jax.jobs import local as jobs

    finish(lambda stream: jobs.resume(folder, words or [], stream=stream), folder, json)


def _run(words: list[str], json: bool, is_dry: bool) -> None:
    stop_on_sigterm()
    from areal_jax.config.loading import load_config
    from areal_jax.jobs import local as jobs

    config = load_config(*words)
    if is_dry:
        figures = jobs.dry_run(config)
        show(figures, json, lambda: _print_plan(figures))
        return
    finish(lambda stream: jobs.run(config, stream=stream), config.run.folder, json)


def finish(job: Callable[[Any], RunResult], folder: Path, json: bool) -> None:
    """Trains the run in `folder` by `job(stream)`, and prints its result; progress goes to the stream."""
    try:
        result = job(sys.stderr if json else sys.stdout)
    except KeyboardInterrupt:
        typer.echo(f"stopped; `areal-jax resume {folder}` continues the run", err=True)
        raise
    rows = result.metrics
    figures = {"run": str(result.folder), "report": str(result.report or ""), "steps": len(rows)}
    if json:
        print_json(figures | {"warnings": list(result.warnings)} | (rows[-1] if rows else {}))
        return
    if rows:
        tenth, quarter = rows[: max(1, len(rows) // 10)], rows[-max(1, len(rows) // 4) :]
        typer.echo(
            f"{len(rows)} steps: mean reward {fmean(row['reward_mean'] for row in tenth):.3f} in the first "
            f"tenth, {fmean(row['reward_mean'] for row in quarter):.3f} in the last quarter"
        )
    for warning in result.warnings:
        typer.echo(f"warning: {warning}")
    if result.report:
        typer.echo(f"report: {result.report}")


def _fresh_folder(words: list[str]) -> list[str]:
    """Returns the settings `words`, plus an unused run.name unless `words` sets run.name or run.dir.

    An unused name gives every quickstart a folder of its own.
    """
    if any(word.startswith(("run.dir=", "run.name=")) for word in words):
        return words
    names = ("quickstart" if number == 1 else f"quickstart-{number}" for number in count(1))
    unused = next(name for name in names if not (Path("runs") / name).exists())
    return [*words, f"run.name={unused}"]


def _print_plan(plan: dict[str, Any]) -> None:
    import yaml

    typer.echo(yaml.safe_dump(plan["config"], sort_keys=False))
    typer.echo(f"placement: {plan['placement']}; {plan['parameters']:,} parameters")
    for owner, shape in plan["meshes"].items():
        axes = " x ".join(f"{axis}={size}" for axis, size in shape.items())
        typer.echo(f"mesh of {owner}: {axes}")
    for name, value in plan["gpu_environment"].items():
        typer.echo(f"on GPUs: {name}={value}")
    print_memory(plan["memory"])
    typer.echo(f"Without temporaries. {POINTER}")
