"""The command `replay`: executes a run's journal again and compares all bits."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from areal_jax.cli.shell import AsJson, show
from areal_jax.types import ArealError

if TYPE_CHECKING:
    from areal_jax.runtime.replay import Replayed


def replay(
    folder: Annotated[Path, typer.Argument(help="The run's folder.")],
    until: Annotated[int | None, typer.Option(help="Number of steps to replay; if omitted, all.")] = None,
    json: AsJson = False,
) -> None:
    """Generate every sample and train every batch of a run again, and compare all bits with its journal.

    Ends with status 1 if a value differs, and names the first one.
    """
    from areal_jax.runtime.replay import replay as run

    if until is not None and until < 1:
        raise ArealError(f"--until={until} is no number of steps; give at least 1, or leave it out for all")
    found = run(folder, until, lambda said: typer.echo(said, err=True))
    show(vars(found), json, _lines(found))
    if found.difference:
        raise typer.Exit(1)


def _lines(found: Replayed) -> list[str]:
    lines = [
        f"replayed {found.steps} steps and {found.samples} samples; {found.unfinished} had not finished",
        f"tokens: {found.by_digest:,} of {found.tokens:,} by digest, {found.by_value:,} by value",
    ]
    if found.uncompared:
        lines.append(f"samples without a record to compare with: {found.uncompared}")
    lines += [
        f"this machine differs from the run's: {name} was {then!r}, now {now!r}; bits may differ"
        for name, (then, now) in found.header.items()
    ]
    if found.reissued:
        lines.append(f"versions that the run itself trained again with other bits: {found.reissued}")
    return [*lines, f"first difference: {found.difference}" if found.difference else "every bit is equal"]
