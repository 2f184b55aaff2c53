"""Commands that read a run's folder: audit, inspect, report."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from areal_jax.cli.shell import AsJson, RunFolder, progress, show
from areal_jax.report.sharing import Sharing
from areal_jax.types import ArealError

if TYPE_CHECKING:
    from areal_jax.report.selection import Selection
    from areal_jax.report.staleness import Staleness

UNCHAINED = (
    "without digests: the journal has none of its events, as an older version of areal-jax began it, so a "
    "change that contradicts nothing else is not found"
)


def audit(folder: RunFolder, json: AsJson = False) -> None:
    """Check a run's invariants: each prompt is trained once, dropped for a reason, or still in flight.

    Also whether the journal is whole, and whether metrics, checkpoints, exports and evaluations agree.
    """
    from areal_jax.assembly.run_folder import open_journal
    from areal_jax.replay.folder_audit import audit_run

    result = audit_run(folder)
    with open_journal(folder) as journal:
        is_chained = journal.is_chained
    dropped = ", ".join(f"{n} {reason}" for reason, n in result.dropped.items()) or "none"
    lines = [
        f"groups trained {result.trained}, dropped {dropped}, in flight {result.in_flight}",
        *(f"violation: {violation}" for violation in result.violations),
        *([] if is_chained else [UNCHAINED]),
        "ok" if result.ok else "NOT ok",
    ]
    show(vars(result) | {"chained": is_chained}, json, lines)
    if not result.ok:
        raise typer.Exit(1)


def inspect(
    folder: RunFolder,
    sample: Annotated[str | None, typer.Argument(help="ORDINAL/MEMBER, such as 12/3.")] = None,
    *,
    tree: Annotated[
        bool,
        typer.Option("--tree", help="Instead of a sample: how many tokens of the samples were repeated."),
    ] = False,
    staleness: Annotated[
        bool,
        typer.Option(
            "--staleness", help="Instead of a sample: rewards by age, raw and of equally hard prompts."
        ),
    ] = False,
    selection: Annotated[
        bool,
        typer.Option(
            "--selection", help="Instead of a sample: lengths and difficulty of trained and generated groups."
        ),
    ] = False,
    token: Annotated[
        int | None, typer.Option(help="Where token number T of the sample, prompt included, comes from.")
    ] = None,
    verify: Annotated[
        bool, typer.Option("--verify", help="With --token: generate the sample again, and compare all bits.")
    ] = False,
    json: AsJson = False,
) -> None:
    """Show one sample: prompt, completion coloured by version and by log-prob, reward and its explanation.

    With --token, show where one token comes from: weights, random key, sampler settings, log-prob, host.
    With --tree, show how many tokens of the samples repeat a prefix of another sample in their batch.
    With --staleness, show the rewards of the trained samples by age.
    With --selection, show whether lengths and difficulty of the trained groups are those of all generated.
    """
    from areal_jax.report.reading import groups_trained, prefix_sharing, rewards_by_age, view_sample
    from areal_jax.report.sample import print_sample

    if (verify and token is None) or (token is not None and sample is None):
        raise ArealError(
            f"given: {sample or 'no sample'}, {'no --token' if token is None else f'--token {token}'}"
            f"{', --verify' if verify else ''}; give a sample and a token, as in `areal-jax inspect RUN 12/3 "
            "--token 20 --verify`"
        )
    _require_one(sample, {"--tree": tree, "--staleness": staleness, "--selection": selection})
    if staleness:
        found = rewards_by_age(folder)
        show(found.to_json(), json, _staleness_lines(found))
    elif selection:
        found = groups_trained(folder)
        show(found.to_json(), json, _selection_lines(found))
    elif tree:
        whole, parts = prefix_sharing(folder)
        lines = ["steps          tokens of samples   distinct prefixes   compression   repeated"]
        lines += map(_sharing_line, [*parts, whole] if len(parts) > 1 else [whole])
        show(whole.to_json() | {"parts": [part.to_json() for part in parts]}, json, lines)
    elif sample is not None and token is not None:
        _inspect_token(folder, sample, token, verify, json)
    elif sample is not None:
        view = view_sample(folder, sample)
        show(view.to_json(), json, lambda: print_sample(view, sys.stdout))


def _require_one(sample: str | None, options: Mapping[str, bool]) -> None:
    """Raises ArealError unless a sample or one of the options is given, and nothing else."""
    if (sample is not None) + sum(options.values()) == 1:
        return
    given = [sample or "no sample", *(f"{'' if is_on else 'no '}{name}" for name, is_on in options.items())]
    raise ArealError(
        f"given: {', '.join(given)}; give one of them, as in `areal-jax inspect RUN 12/3` or "
        "`areal-jax inspect RUN --tree`"
    )


def _inspect_token(folder: Path, sample: str, token: int, is_verified: bool, json: bool) -> None:
    from areal_jax.replay.provenance import provenance

    one = provenance(folder, sample, token)
    if not is_verified:
        show(one.to_json(), json, one.lines())
        return
    from areal_jax.replay.one_sample import replay_sample

    found = replay_sample(folder, sample, progress)
    equal = f"generated again: {found.tokens} tokens of the sample, every bit is equal"
    if found.bounded_from is not None:
        equal = f"generated again on another kind of machine: {found.tokens} tokens, within bounds"
    verdict = f"first difference: {found.difference}" if found.difference else equal
    show(one.to_json() | {"replayed": vars(found)}, json, [*one.lines(), verdict])
    if found.difference:
        raise typer.Exit(1)


def _staleness_lines(found: Staleness) -> list[str]:
    from areal_jax.report.report_staleness import COLUMNS, cells, explained

    return [*_aligned([COLUMNS, *map(cells, found.ages)]), explained(found)]


def _selection_lines(found: Selection) -> list[str]:
    from areal_jax.report.report_selection import FATES, GAPS, explained, fate_cells, gap_cells

    lines = _aligned([FATES, *map(fate_cells, found.fates)])
    if found.gaps:
        lines += ["", *_aligned([GAPS, *map(gap_cells, found.gaps)])]
    return [*lines, "", explained(found), *(f"alarm: {text}" for text in found.alarms)]


def _aligned(table: Sequence[Sequence[str]]) -> list[str]:
    """Returns the rows of a table as lines, with columns of equal width."""
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    return ["  ".join(f"{cell:>{width}}" for cell, width in zip(row, widths, strict=True)) for row in table]


def _sharing_line(part: Sharing) -> str:
    steps = f"{part.first_step} to {part.last_step}"
    return (
        f"{steps:<15}{part.sequence_tokens:>17,}{part.tree_tokens:>20,}{part.compression:>14.2f}"
        f"{part.repeated_share:>11.1%}"
    )


def report(
    folder: RunFolder,
    timeline: Annotated[
        Path | None, typer.Option(help="Also write the timeline of the whole run to this SVG file.")
    ] = None,
    zoom: Annotated[
        Path | None, typer.Option(help="Also write the timeline of the run's last seconds to this SVG file.")
    ] = None,
) -> None:
    """Write the run's report.html again; works while the run is in progress, too."""
    from areal_jax.assembly.run_folder import run_config
    from areal_jax.report.lanes import timeline_zoom
    from areal_jax.report.reading import write_report, write_timeline

    if timeline is not None:
        write_timeline(folder, timeline)
    if zoom is not None:
        write_timeline(folder, zoom, timeline_zoom)
    typer.echo(f"report: {write_report(folder, run_config(folder))}")
