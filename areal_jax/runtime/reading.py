"""Readings of a run's folder: its report, one sample, its audit. Nothing here writes to the journal."""

from __future__ import annotations

import os
import re
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from areal_jax.config import Config, load_config
from areal_jax.control.audit import AuditResult, audit
from areal_jax.control.events import BatchTrained, RewardFailed, RewardScored, SampleFinished
from areal_jax.generation.serving_secret import VARIABLE
from areal_jax.observe.evals import read_evals
from areal_jax.observe.metrics import read_rows
from areal_jax.observe.report import FailedReward, ReportData, render
from areal_jax.observe.sample import SampleView
from areal_jax.observe.waits import read_timelines
from areal_jax.runtime.launch.plan import SECRET_FILE
from areal_jax.runtime.viewer import Late, Viewer
from areal_jax.tasks.task import Task
from areal_jax.trajectories.journal import Journal
from areal_jax.trajectories.sqlite import SqliteQueue
from areal_jax.types import ArealError, SampleId

LATE = 256
"""Trained samples, newest last, among which the report looks for those worth showing."""

REDIS_S = 10.0
"""How long reading waits for a Redis that does not answer."""

LISTED = 200
"""Failed rewards, the newest, of which the report says what they said."""


@dataclass
class Found:
    """What the report takes from the journal's events; ages in versions -> how many tokens, samples."""

    token_ages: Counter[int] = field(default_factory=Counter)
    head_ages: Counter[int] = field(default_factory=Counter)
    lengths: list[int] = field(default_factory=list)
    late: deque[Late] = field(default_factory=lambda: deque(maxlen=LATE))
    failures: deque[RewardFailed] = field(default_factory=lambda: deque(maxlen=LISTED))


def open_journal(folder: Path) -> Journal:
    """To read; while a run's newest events are in Redis, with those.

    Its password is AREAL_JAX_SECRET, or the run's own secret, where whoever launched the run reads it.
    """
    journal = SqliteQueue.open(folder / "journal.sqlite", readonly=True)
    rest = journal.rest
    if rest is None or not rest.is_live:
        return journal
    journal.close()
    from areal_jax.trajectories.redis import RedisQueue

    launched = folder / SECRET_FILE
    secret = os.environ.get(VARIABLE) or (launched.read_text().strip() if launched.exists() else None)
    return RedisQueue.open(rest.url, rest.run, folder, readonly=True, secret=secret, deadline_s=REDIS_S)


def audit_run(folder: Path) -> AuditResult:
    """Every ordinal trained once, dropped or in flight, and the invariants, from the journal alone."""
    with open_journal(folder) as journal:
        rows = ((row.seq, row.event, row.actions) for row in journal.rows())
        return audit(load_config(folder / "config.yaml"), rows)


def find(journal: Journal) -> Found:
    """One pass over the journal; ages count from the version at the start of the update."""
    finished: dict[int, dict[SampleId, SampleFinished]] = defaultdict(dict)
    scored: dict[int, RewardScored] = {}
    found = Found()
    for row in journal.rows():
        match row.event:
            case SampleFinished(sample):
                finished[sample.ordinal][sample] = row.event
            case RewardScored(ordinal):
                scored[ordinal] = row.event
            case RewardFailed():
                found.failures.append(row.event)
            case BatchTrained(step, ordinals):
                for ordinal in ordinals:
                    members, rewards = finished.pop(ordinal, {}), scored.pop(ordinal, None)
                    newest = max((sample.attempt for sample in members), default=0)
                    for sample, event in members.items():
                        if sample.attempt == newest:
                            _count(found, step, event, rewards)
    return found


def _count(found: Found, trained_version: int, event: SampleFinished, scored: RewardScored | None) -> None:
    if scored is not None:
        reward = scored.rewards[event.sample.member]
        found.late.append(Late(event.sample, reward, event.interruptions))
    if not event.spans:  # a reference answer: no policy sampled it
        return
    found.head_ages[trained_version - event.spans[0].version] += 1
    for span in event.spans:
        found.token_ages[trained_version - span.version] += span.end - span.start
    found.lengths.append(sum(span.end - span.start for span in event.spans))


def write_report(folder: Path, config: Config, tasks: Sequence[Task] = ()) -> Path:
    """report.html in the run's folder."""
    with open_journal(folder) as journal:
        found = find(journal)
        samples, missing, task_of = _samples(journal, config, tasks, found)
    data = ReportData(
        title=config.run.name,
        command=f"areal-jax run {folder}/config.yaml run.dir={folder}-again",
        config_yaml=(folder / "config.yaml").read_text(),
        rows=read_rows(folder),
        intervals=read_timelines(folder),
        token_ages=found.token_ages,
        head_ages=found.head_ages,
        lengths=found.lengths,
        samples=samples,
        samples_missing=missing,
        evals=read_evals(folder),
        failures=[
            FailedReward(event.ordinal, task_of(event.ordinal), event.outcome, event.message)
            for event in reversed(found.failures)
        ],
    )
    path = folder / "report.html"
    path.write_text(render(data), encoding="utf-8")
    return path


def _samples(
    journal: Journal, config: Config, tasks: Sequence[Task], found: Found
) -> tuple[list[tuple[str, list[SampleView]]], str, Callable[[int], str]]:
    """The samples to show, why there are none, and whose prompt stands at an ordinal."""
    try:
        viewer = Viewer(journal, config, tasks)
    except ArealError as error:  # the report goes without them, and says so
        return [], str(error), lambda _: ""
    failed = {event.ordinal: viewer.task_of(event.ordinal) for event in found.failures}
    return viewer.chosen(list(found.late)), "", failed.__getitem__


def view_sample(folder: Path, name: str, tasks: Sequence[Task] = ()) -> SampleView:
    """The sample called ORDINAL/MEMBER or ORDINAL/MEMBER/ATTEMPT. Raises ArealError for no such one."""
    match = re.fullmatch(r"(\d+)[/.](\d+)(?:[/.](\d+))?", name)
    if not match:
        raise ArealError(f"{name!r} is not a sample; write ORDINAL/MEMBER, such as 12/3")
    sample = SampleId(*(int(part or 0) for part in match.groups()))
    config = load_config(folder / "config.yaml")
    with open_journal(folder) as journal:
        return Viewer(journal, config, tasks).view(sample)
