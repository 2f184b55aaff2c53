"""Verbs that read a run's folder: audit, inspect, report."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from areal_jax.cli.shell import plain_errors, print_json
from areal_jax.cli.train import AsJson

Folder = Annotated[Path, typer.Argument(help="The run's folder.")]


def register(app: typer.Typer) -> None:
    app.command()(audit)
    app.command()(inspect)
    app.command()(report)


@plain_errors
def audit(folder: Folder, json: AsJson = False) -> None:
    """Every prompt ordinal: trained once, dropped (why), or in flight; and the invariants."""
    from areal_jax.runtime.reading import audit_run

    result = audit_run(folder)
    if json:
        print_json(result.to_json())
    else:
        dropped = ", ".join(f"{n} {reason}" for reason, n in result.dropped.items()) or "none"
        typer.echo(f"trained {result.trained}, dropped {dropped}, in flight {result.in_flight}")
        for violation in result.violations:
            typer.echo(f"violation: {violation}")
        typer.echo("ok" if result.ok else "NOT ok")
    if not result.ok:
        raise typer.Exit(1)


@plain_errors
def inspect(
    folder: Folder,
    sample: Annotated[str, typer.Argument(help="ORDINAL/MEMBER, such as 12/3.")],
    json: AsJson = False,
) -> None:
    """One sample: prompt, completion by version and by log-prob, reward and how it was judged."""
    from areal_jax.observe.sample import print_sample
    from areal_jax.runtime.reading import view_sample

    view = view_sample(folder, sample)
    if json:
        print_json(view.to_json())
    else:
        print_sample(view, sys.stdout)


@plain_errors
def report(folder: Folder) -> None:
    """Write report.html again, also of a run in progress."""
    from areal_jax.config import load_config
    from areal_jax.runtime.reading import write_report

    typer.echo(f"report: {write_report(folder, load_config(folder / 'config.yaml'))}")
