"""Readings of a run's folder: its report, one sample, its audit. Nothing here writes to the journal."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from areal_jax.config import Config, load_config
from areal_jax.control.audit import AuditResult, audit
from areal_jax.control.events import BatchTrained, SampleFinished
from areal_jax.observe.metrics import read_rows
from areal_jax.observe.report import ReportData, render
from areal_jax.observe.sample import Piece, SampleView
from areal_jax.observe.waits import read_intervals
from areal_jax.runtime.sources import open_source
from areal_jax.tasks.source import load_tasks
from areal_jax.tasks.task import Task
from areal_jax.tasks.tokenizers import Tokenizer
from areal_jax.trajectories.sqlite import SqliteQueue
from areal_jax.types import ArealError, SampleId, Trajectory, VersionSpan

SHOWN_SAMPLES = 6


class Ages(NamedTuple):
    token: Counter[int]
    head: Counter[int]
    lengths: list[int]
    trained: list[SampleId]


def open_journal(folder: Path) -> SqliteQueue:
    return SqliteQueue.open(folder / "journal.sqlite", readonly=True)


def audit_run(folder: Path) -> AuditResult:
    """Every ordinal trained once, dropped or in flight, and the invariants, from the journal alone."""
    with open_journal(folder) as journal:
        rows = ((row.seq, row.event, row.actions) for row in journal.rows())
        return audit(load_config(folder / "config.yaml"), rows)


def ages(journal: SqliteQueue) -> Ages:
    """Ages and lengths of everything trained; ages count from the version at the start of the update."""
    spans: dict[int, dict[SampleId, tuple[VersionSpan, ...]]] = defaultdict(dict)
    found = Ages(Counter(), Counter(), [], [])
    for row in journal.rows():
        if isinstance(row.event, SampleFinished):
            spans[row.event.sample.ordinal][row.event.sample] = row.event.spans
        elif isinstance(row.event, BatchTrained):
            for ordinal in row.event.ordinals:
                members = spans.pop(ordinal, {})
                newest = max((sample.attempt for sample in members), default=0)
                for sample, of_sample in members.items():
                    if sample.attempt == newest:
                        _count(found, sample, row.event.step, of_sample)
    return found


def _count(found: Ages, sample: SampleId, trained_version: int, spans: Sequence[VersionSpan]) -> None:
    found.trained.append(sample)
    if not spans:  # a reference answer: no policy sampled it
        return
    found.head[trained_version - spans[0].version] += 1
    for span in spans:
        found.token[trained_version - span.version] += span.end - span.start
    found.lengths.append(sum(span.end - span.start for span in spans))


def write_report(folder: Path, config: Config, tasks: Sequence[Task] = ()) -> Path:
    """report.html in the run's folder."""
    with open_journal(folder) as journal:
        found = ages(journal)
        samples = _views(journal, config, _worth_showing(journal, found), tasks)
    data = ReportData(
        title=config.run.name,
        command=f"areal-jax run {folder}/config.yaml run.dir={folder}-again",
        config_yaml=(folder / "config.yaml").read_text(),
        rows=read_rows(folder),
        intervals=read_intervals(folder / "logs" / "timeline.jsonl"),
        token_ages=found.token,
        head_ages=found.head,
        lengths=found.lengths,
        samples=samples,
    )
    path = folder / "report.html"
    path.write_text(render(data), encoding="utf-8")
    return path


def view_sample(folder: Path, name: str, tasks: Sequence[Task] = ()) -> SampleView:
    """The sample called ORDINAL/MEMBER or ORDINAL/MEMBER/ATTEMPT. Raises ArealError for no such one."""
    match = re.fullmatch(r"(\d+)[/.](\d+)(?:[/.](\d+))?", name)
    if not match:
        raise ArealError(f"{name!r} is not a sample; write ORDINAL/MEMBER, such as 12/3")
    sample = SampleId(*(int(part or 0) for part in match.groups()))
    tokenizer = _tokenizer(load_config(folder / "config.yaml"), tasks)
    with open_journal(folder) as journal:
        return _as_view(journal.trajectory(sample), tokenizer)


def _worth_showing(journal: SqliteQueue, found: Ages) -> list[SampleId]:
    """Late samples, those with several versions first: what asynchrony looks like."""
    late = found.trained[-256:]
    mixed = {
        row.event.sample: len(row.event.spans)
        for row in journal.rows(max(0, journal.last_seq - 4000))
        if isinstance(row.event, SampleFinished)
    }
    return sorted(late, key=lambda sample: -mixed.get(sample, 0))[:SHOWN_SAMPLES]


def _views(
    journal: SqliteQueue, config: Config, samples: Sequence[SampleId], tasks: Sequence[Task]
) -> list[SampleView]:
    """Those that can be shown: not one whose payload was pruned, none where the tasks cannot be made here."""
    views = []
    with suppress(ArealError):
        tokenizer = _tokenizer(config, tasks)
        for sample in samples:
            with suppress(ArealError):
                views.append(_as_view(journal.trajectory(sample), tokenizer))
    return views


def _as_view(t: Trajectory, tokenizer: Tokenizer) -> SampleView:
    prompt = tokenizer.decode(t.tokens[~t.loss_mask].tolist())
    pieces = [
        Piece(_text(tokenizer, int(token)), int(version), float(logp))
        for token, version, logp in zip(
            t.tokens[t.loss_mask], t.versions[t.loss_mask], t.behavior_logp[t.loss_mask], strict=True
        )
    ]
    name = "/".join(map(str, t.sample if t.sample.attempt else t.sample[:2]))
    return SampleView(name, prompt, pieces, t.reward, t.reward_parts, t.stop_reason)


def _text(tokenizer: Tokenizer, token: int) -> str:
    return "⏹" if token == tokenizer.eos_id else tokenizer.decode([token])


def _tokenizer(config: Config, tasks: Sequence[Task]) -> Tokenizer:
    return open_source(
        config, load_tasks(config.tasks, tasks) if config.tasks or tasks else {}
    ).model.tokenizer
