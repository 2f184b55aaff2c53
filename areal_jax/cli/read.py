"""Commands that read a run's folder: audit, inspect, report."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from areal_jax.cli.shell import AsJson, print_json, show

Folder = Annotated[Path, typer.Argument(help="The run's folder.")]


def audit(folder: Folder, json: AsJson = False) -> None:
    """Check a run's invariants: each prompt is trained once, dropped for a reason, or still in flight."""
    from areal_jax.runtime.reading import audit_run

    result = audit_run(folder)
    dropped = ", ".join(f"{n} {reason}" for reason, n in result.dropped.items()) or "none"
    lines = [
        f"groups trained {result.trained}, dropped {dropped}, in flight {result.in_flight}",
        *(f"violation: {violation}" for violation in result.violations),
        "ok" if result.ok else "NOT ok",
    ]
    show(vars(result), json, lines)
    if not result.ok:
        raise typer.Exit(1)


def inspect(
    folder: Folder,
    sample: Annotated[str, typer.Argument(help="ORDINAL/MEMBER, such as 12/3.")],
    json: AsJson = False,
) -> None:
    """Show one sample: prompt, completion coloured by version and by log-prob, reward and its explanation."""
    from areal_jax.observe.sample import print_sample
    from areal_jax.runtime.reading import view_sample

    view = view_sample(folder, sample)
    if json:
        print_json(view.to_json())
    else:
        print_sample(view, sys.stdout)


def report(
    folder: Folder,
    timeline: Annotated[
        Path | None, typer.Option(help="Also write the timeline of the whole run to this SVG file.")
    ] = None,
) -> None:
    """Write the run's report.html again; works while the run is in progress, too."""
    from areal_jax.config.loading import load_config
    from areal_jax.runtime.reading import write_report, write_timeline

    if timeline is not None:
        write_timeline(folder, timeline)
    typer.echo(f"report: {write_report(folder, load_config(folder / 'config.yaml'))}")
