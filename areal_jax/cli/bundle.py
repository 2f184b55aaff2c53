"""The command `bundle`: writes one step of a run to a file with which anybody can train it again."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from areal_jax.cli.shell import AsJson, show
from areal_jax.types import ArealError

VERIFY = "verify"
SHOWN = ("loss", "grad_norm")
"""Metrics that are printed; `--json` prints all."""


def bundle(
    folder: Annotated[
        Path, typer.Argument(metavar="RUN|verify", help="The run's folder, or the word verify.")
    ],
    file: Annotated[Path | None, typer.Argument(help="With verify: the bundle.")] = None,
    step: Annotated[int | None, typer.Option(help="Number of the step, counted from 0.")] = None,
    out: Annotated[
        Path | None, typer.Option(help="File to write; if omitted, RUN-step-N.bundle here.")
    ] = None,
    redact: Annotated[
        bool, typer.Option("--redact", help="Leave out the prompts; verifying it needs the run's data then.")
    ] = False,
    json: AsJson = False,
) -> None:
    """Write one step of a run to a file (RUN --step N), or train a file's step again (verify FILE).

    Verifying ends with status 1 if a value differs, and names the first one.
    """
    if str(folder) == VERIFY:
        if file is None or step is not None:
            raise ArealError("give the bundle to verify, and nothing else: areal-jax bundle verify FILE")
        _verify(file, json)
        return
    if file is not None or step is None:
        raise ArealError(
            f"{file or 'no --step'}: give a run and a step, as in `areal-jax bundle {folder} --step 12`, or "
            "`areal-jax bundle verify FILE`"
        )
    from areal_jax.replay.bundle import make_bundle

    target = out or Path(f"{folder.absolute().name}-step-{step}.bundle")
    made = make_bundle(folder, step, target, redact, _progress)
    figures = {"file": str(target), "bytes": made.bytes, "digest": made.about["digest_after"]}
    figures |= {"step": step, "redacted": redact}
    without = "; its prompts were left out, so verifying it needs the run's data" if redact else ""
    lines = [f"{target}: step {step}, digest {made.about['digest_after']} after it{without}"]
    show(figures, json, [*lines, f"`areal-jax bundle verify {target}` trains it again, on any CPU"])


def _verify(file: Path, json: bool) -> None:
    from areal_jax.replay.bundle import verify_bundle
    from areal_jax.replay.reopened import differences_text

    found = verify_bundle(file, _progress)
    lines = [f"{name}: {found.metrics[name]!r}" for name in SHOWN if name in found.metrics]
    lines.append(f"digest of the parameters after step {found.step}: {found.digest}")
    if found.header:
        said = differences_text(found.header)
        lines.append(f"this machine may give other bits than the one that made the bundle: {said}")
        gaps = ", ".join(f"{name} {gap:.2g}" for name, gap in found.largest.items()) or "none"
        lines.append(f"metrics were therefore compared within bounds, digests not; differences: {gaps}")
    if found.difference:
        lines.append(f"first difference: {found.difference}")
    else:
        lines.append("every value is within its bound" if found.header else "every bit is equal")
    show(vars(found), json, lines)
    if found.difference:
        raise typer.Exit(1)


def _progress(said: str) -> None:
    typer.echo(said, err=True)
