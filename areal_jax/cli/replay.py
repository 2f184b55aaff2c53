"""The commands `replay` and `bundle`: execute steps of a run again and compare all bits; a branch goes on."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from areal_jax.cli.shell import AsJson, RunFolder, progress, show, stop_on_sigterm
from areal_jax.types import ArealError

if TYPE_CHECKING:
    from areal_jax.replay.replay import Replayed


def replay(
    folder: RunFolder,
    words: Annotated[
        list[str] | None, typer.Argument(help="With --branch: section.key=value for the new run.")
    ] = None,
    until: Annotated[int | None, typer.Option(help="Number of steps to replay; if omitted, all.")] = None,
    branch: Annotated[
        str | None,
        typer.Option(help="Go on from there as a new run with this name, beside the run's folder."),
    ] = None,
    sample: Annotated[
        str | None, typer.Option(help="Instead of all: ORDINAL/MEMBER, and what generating it again needs.")
    ] = None,
    json: AsJson = False,
) -> None:
    """Generate every sample and train every batch of a run again, and compare all bits with its journal.

    Ends with status 1 if a value differs, and names the first one. On another kind of machine than the run's,
    it says which bits may differ and compares within bounds.
    """
    if until is not None and until < 1:
        raise ArealError(f"--until={until} is no number of steps; give at least 1, or leave it out for all")
    if sample and (until or branch):
        raise ArealError(
            f"given: --sample={sample} and {'--until' if until else '--branch'}; a sample decides how far "
            "the run is replayed, so give --sample alone"
        )
    if words and not branch:
        raise ArealError(
            f"{words[0]}: a replay repeats the run with its own settings; to go on with other ones, give "
            "--branch NAME"
        )
    if branch:
        _branch(folder, until, branch, words or [], json)
        return
    from areal_jax.replay.one_sample import replay_sample
    from areal_jax.replay.replay import replay as run

    found = replay_sample(folder, sample, progress) if sample else run(folder, until, progress)
    _show(found, json)


def _branch(folder: Path, until: int | None, name: str, words: list[str], json: bool) -> None:
    stop_on_sigterm()
    from areal_jax.cli.train import finish
    from areal_jax.jobs import local as jobs
    from areal_jax.replay.branch import make_branch
    from areal_jax.replay.reopened import reopened

    with reopened(folder) as run:
        made, found = make_branch(run, until, name, words, progress)
        is_of_processes = run.journal.is_of_processes
    if is_of_processes:
        show(vars(found) | {"branch": str(made)}, json, [*_lines(found), f"branch: {made}"])
        progress(f"its processes start with `areal-jax launch local {made}`, or with another launcher")
        return
    for line in [*_lines(found), f"branch: {made}"]:
        typer.echo(line, err=json)
    finish(lambda stream: jobs.resume(made, stream=stream), made, json)


def _show(found: Replayed, json: bool) -> None:
    show(vars(found), json, _lines(found))
    if found.difference:
        raise typer.Exit(1)


def _lines(found: Replayed) -> list[str]:
    from areal_jax.replay.reopened import differences_text

    lines = [
        f"replayed {found.steps} steps and {found.samples} samples; {found.unfinished} had not finished",
        f"tokens: {found.by_digest:,} of {found.tokens:,} by digest, {found.by_value:,} by value",
    ]
    if found.uncompared:
        lines.append(f"samples without a record to compare with: {found.uncompared}")
    if found.open_at is not None:
        lines.append(
            f"the run has not ended: it was replayed up to event {found.open_at}, the newest one at the start"
        )
    if found.header:
        lines.append(f"this machine may give other bits than the run's: {differences_text(found.header)}")
    if found.reissued:
        lines.append(f"versions that the run itself trained again with other bits: {found.reissued}")
    if found.bounded_from is not None:
        gaps = ", ".join(f"{name} {gap:.2g}" for name, gap in found.largest.items()) or "none"
        lines += [
            f"from step {found.bounded_from} on, log-probs and metrics may therefore have other bits, and "
            f"were compared within bounds; largest differences: {gaps}",
            f"samples compared only up to a token that was drawn otherwise: {found.cut}",
        ]
    if found.difference:
        return [*lines, f"first difference: {found.difference}"]
    return [*lines, "every bit is equal" if found.bounded_from is None else "every value is within its bound"]


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
    made = make_bundle(folder, step, target, redact, progress)
    figures = {"file": str(target), "bytes": made.bytes, "digest": made.about["digest_after"]}
    figures |= {"step": step, "redacted": redact}
    without = "; its prompts were left out, so verifying it needs the run's data" if redact else ""
    lines = [f"{target}: step {step}, digest {made.about['digest_after']} after it{without}"]
    show(figures, json, [*lines, f"`areal-jax bundle verify {target}` trains it again, on any CPU"])


def _verify(file: Path, json: bool) -> None:
    from areal_jax.replay.bundle import verify_bundle
    from areal_jax.replay.reopened import differences_text

    found = verify_bundle(file, progress)
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
