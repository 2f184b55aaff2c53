"""Commands that read a run's folder: audit, inspect, report."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from areal_jax.cli.shell import AsJson, print_json, show
from areal_jax.observe.sharing import Sharing
from areal_jax.types import ArealError

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
    sample: Annotated[str | None, typer.Argument(help="ORDINAL/MEMBER, such as 12/3.")] = None,
    tree: Annotated[
        bool,
        typer.Option("--tree", help="Instead of a sample: how many tokens of the samples were repeated."),
    ] = False,
    json: AsJson = False,
) -> None:
    """Show one sample: prompt, completion coloured by version and by log-prob, reward and its explanation.

    With --tree, show how many tokens of the samples repeat a prefix of another sample in their batch.
    """
    from areal_jax.observe.sample import print_sample
    from areal_jax.runtime.reading import prefix_sharing, view_sample

    if (sample is not None) == tree:
        raise ArealError(
            f"given: {sample or 'no sample'} and {'' if tree else 'no '}--tree; give either a sample, as in "
            "`areal-jax inspect RUN 12/3`, or --tree, as in `areal-jax inspect RUN --tree`"
        )
    if tree:
        whole, parts = prefix_sharing(folder)
        lines = ["steps          tokens of samples   distinct prefixes   compression   repeated"]
        lines += map(_sharing_line, [*parts, whole] if len(parts) > 1 else [whole])
        show(whole.to_json() | {"parts": [part.to_json() for part in parts]}, json, lines)
        return
    assert sample is not None
    view = view_sample(folder, sample)
    if json:
        print_json(view.to_json())
    else:
        print_sample(view, sys.stdout)


def _sharing_line(part: Sharing) -> str:
    steps = f"{part.first_step} to {part.last_step}"
    return (
        f"{steps:<15}{part.sequence_tokens:>17,}{part.tree_tokens:>20,}{part.compression:>14.2f}"
        f"{part.repeated_share:>11.1%}"
    )


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
