"""Makes report, timeline, audit and single samples from a run's folder. It never writes to the journal."""

from __future__ import annotations

from array import array
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from areal_jax.assembly.run_folder import open_journal, run_config, sample_id
from areal_jax.config.tree import Config
from areal_jax.control.events import (
    BatchTrained,
    Drop,
    EpisodeFailed,
    PromptFailed,
    RewardFailed,
    RewardScored,
    SampleFailed,
    SampleFinished,
)
from areal_jax.control.reward_gate import Gates, rewards_of
from areal_jax.file_errors import writing
from areal_jax.observe.evals import read_evals
from areal_jax.observe.metrics import read_rows
from areal_jax.observe.waits import read_timelines
from areal_jax.report.attempts import Attempts
from areal_jax.report.lanes import ZOOM_S, timeline
from areal_jax.report.report import FailedReward, ReportData, page_css, render
from areal_jax.report.sample import SampleView
from areal_jax.report.selection import Selection, study_selection
from areal_jax.report.sharing import Sharing, sharing, sharing_by_part
from areal_jax.report.staleness import FEWEST_SAMPLES, Staleness, Trained, study
from areal_jax.report.svg import Figure, standalone
from areal_jax.report.viewer import Late, Viewer, gates_in
from areal_jax.tasks.source import WeightedTask
from areal_jax.trajectories.journal import reading_all
from areal_jax.trajectories.sqlite import JournalError, SqliteQueue
from areal_jax.types import ArealError, SampleId

LATE = 256
"""Number of newest trained samples from which the report selects the samples that it shows."""

LISTED = 200
"""Number of messages that the report lists, of the newest failed rewards and prompts."""


@dataclass
class Found:
    """Figures for the report, counted from the journal's events; ages are in versions."""

    token_ages: Counter[int] = field(default_factory=Counter)
    head_ages: Counter[int] = field(default_factory=Counter)
    lengths: array[int] = field(default_factory=lambda: array("q"))
    """Completion tokens of each trained sample that a policy sampled."""
    values: array[float] = field(default_factory=lambda: array("d"))
    """The fields of `Trained` of each of these samples that was scored, one sample after another."""
    late: deque[Late] = field(default_factory=lambda: deque(maxlen=LATE))
    attempts: Attempts = field(default_factory=Attempts)
    failures: deque[RewardFailed | PromptFailed] = field(default_factory=lambda: deque(maxlen=LISTED))

    @property
    def trained(self) -> np.ndarray:
        """The scored samples, Float[S, 4]: the fields of `Trained`."""
        return np.frombuffer(self.values).reshape(-1, len(Trained._fields))


@reading_all()
def find(journal: SqliteQueue) -> Found:
    """Count from a run's journal the figures that the report shows.

    A token's age is the version with which the update that trained it started, minus the token's own version.
    """
    finished: dict[int, dict[SampleId, SampleFinished]] = defaultdict(dict)
    scored: dict[int, RewardScored] = {}
    found = Found()
    for row in journal.rows():
        found.attempts.see(row)
        match row.event:
            case SampleFinished(sample):
                finished[sample.ordinal][sample] = row.event
            case RewardScored(ordinal):
                scored[ordinal] = row.event
            case RewardFailed() | PromptFailed():
                found.failures.append(row.event)
            case BatchTrained(step, ordinals, _, metrics):
                gates = gates_in(metrics)
                for ordinal in ordinals:
                    _count(found, step, finished.pop(ordinal, {}), scored.pop(ordinal, None), gates)
    return found


def _count(
    found: Found,
    step: int,
    members: Mapping[SampleId, SampleFinished],
    scored: RewardScored | None,
    gates: Gates,
) -> None:
    """Counts the samples of a group that was trained in batch `step`."""
    newest = max((sample.attempt for sample in members), default=0)
    paid: Sequence[float] = ()
    if scored is not None:
        paid = rewards_of(scored.rewards, [dict(parts) for parts in scored.parts], gates)
    for sample, event in members.items():
        if sample.attempt != newest:
            continue
        if paid:
            found.late.append(Late(sample, paid[sample.member], event.interruptions))
        if not event.spans:  # a reference answer: no policy sampled it
            continue
        tokens, age = 0, step - event.spans[0].version
        for version, start, end in event.spans:
            found.token_ages[step - version] += end - start
            tokens += end - start
        found.head_ages[age] += 1
        found.lengths.append(tokens)
        if paid:
            found.values.extend((sample.ordinal, paid[sample.member], age, tokens))


def write_timeline(folder: Path, target: Path, draw: Callable[..., Figure | None] = timeline) -> None:
    """Write the run's timeline to `target` as SVG.

    `draw`: `lanes.timeline`, the whole run, or `lanes.timeline_zoom`, its last seconds. Raises ArealError if
    logs/ has no recorded timeline, or if the run is too short for its last seconds.
    """
    figure = draw(read_timelines(folder))
    if figure is None:
        raise ArealError(
            f"{folder} has no timeline in logs/, because the run ended before it recorded one or, for the "
            f"last seconds, within {2 * ZOOM_S:g} s; continue the run with `areal-jax resume {folder} "
            "run.steps=STEPS`"
        )
    with writing(target):
        target.write_text(standalone(figure, page_css()), encoding="utf-8")


def write_report(folder: Path, config: Config, tasks: Mapping[str, WeightedTask] | None = None) -> Path:
    """Write report.html into the run's folder and return its path.

    `tasks`: the run's tasks by name; None: the config's tasks.
    """
    with open_journal(folder) as journal:
        found = find(journal)
        samples, missing, task_of = _samples(journal, config, tasks, found)
        environment = journal.header.get("gpu_environment", {})
    data = ReportData(
        title=config.run.name,
        command=f"areal-jax run {folder}/config.yaml run.dir={folder}-again",
        config_yaml=(folder / "config.yaml").read_text(),
        environment=environment,
        rows=read_rows(folder),
        intervals=read_timelines(folder),
        token_ages=found.token_ages,
        head_ages=found.head_ages,
        lengths=found.lengths,
        staleness=study(found.trained),
        selection=study_selection(found.attempts.all()),
        samples=samples,
        samples_missing=missing,
        evals=read_evals(folder),
        failures=[
            FailedReward(event.ordinal, task_of(event.ordinal), _outcome(event), event.message)
            for event in reversed(found.failures)
        ],
    )
    path = folder / "report.html"
    with writing(path):
        path.write_text(render(data), encoding="utf-8")
    return path


def _outcome(event: RewardFailed | PromptFailed) -> str:
    return event.outcome if isinstance(event, RewardFailed) else "failed_prompt"


def _samples(
    journal: SqliteQueue, config: Config, tasks: Mapping[str, WeightedTask] | None, found: Found
) -> tuple[list[tuple[str, list[SampleView]]], str, Callable[[int], str]]:
    """Return the samples to show by title, why none can be shown, and a function that names a group's task.

    The reason is "" if samples can be shown. The function takes an ordinal, and only the ordinal of a group
    that could not be scored.
    """
    try:
        viewer = Viewer(journal, config, tasks)
    except ArealError as error:  # the report goes without them, and says so
        return [], str(error), lambda _: ""
    failed = {event.ordinal: viewer.task_of(event.ordinal) for event in found.failures}
    return viewer.chosen(list(found.late)), "", failed.__getitem__


def view_sample(folder: Path, name: str) -> SampleView:
    """Return the sample named ORDINAL/MEMBER[/ATTEMPT] as text; ATTEMPT is 0 by default.

    Raises ArealError if the journal does not have the sample; the message says if its group was dropped, and
    why.
    """
    sample, config = sample_id(name), run_config(folder)
    with open_journal(folder) as journal:
        try:
            return Viewer(journal, config).view(sample)
        except JournalError as error:
            if why := _why_dropped(journal, sample.ordinal):
                raise ArealError(f"group {sample.ordinal} was dropped ({why}); {error}") from error
            raise


def _why_dropped(journal: SqliteQueue, ordinal: int) -> str:
    """Return the reason for which a group was dropped, with the last failure before it; "" if it was not."""
    message = ""
    for row in journal.rows_of(ordinal):
        match row.event:
            case PromptFailed(failed) | RewardFailed(failed) if failed == ordinal:
                message = f": {row.event.message}"
            case SampleFailed(sample, _, text) | EpisodeFailed(sample, _, text) if sample.ordinal == ordinal:
                message = f": {text}"
        for action in row.actions:
            if isinstance(action, Drop) and action.ordinal == ordinal:
                return action.reason + message
    return ""


def rewards_by_age(folder: Path) -> Staleness:
    """Return the rewards of a run's trained samples by age.

    Raises ArealError if the run has nothing to compare.
    """
    with open_journal(folder) as journal:
        trained = find(journal).trained
    found = study(trained)
    if found is None:
        raise ArealError(
            f"{folder}: rewards by age cannot be compared for the {len(trained):,} trained samples: it needs "
            f"groups of several samples, and two ages with at least {FEWEST_SAMPLES} samples each; use a run "
            "with algorithm.group_size > 1 and control.max_staleness > 0, and train more steps"
        )
    return found


def groups_trained(folder: Path) -> Selection:
    """Return which of a run's generated groups were trained.

    Raises ArealError if none was.
    """
    found = read_selection(folder)
    if found is None:
        raise ArealError(
            f"{folder}: no group was trained yet, so trained and generated groups cannot be compared; wait "
            f"for the first step, or continue the run with `areal-jax resume {folder}`"
        )
    return found


def read_selection(folder: Path) -> Selection | None:
    """Return which of a run's generated groups were trained; None if none was."""
    with open_journal(folder) as journal:
        return study_selection(Attempts.of(journal.rows()))


def prefix_sharing(folder: Path) -> tuple[Sharing, list[Sharing]]:
    """Return how many tokens of a run's samples repeat a prefix: of the whole run, and of its parts in order.

    Raises ArealError if no row of metrics.jsonl has these figures.
    """
    rows = read_rows(folder)
    whole = sharing(rows)
    if whole is None:
        raise ArealError(
            f"{folder}/metrics.jsonl has no step with sequence_tokens and tree_tokens: the run has not "
            "trained a step, or an older version of areal-jax recorded it; continue it with "
            f"`areal-jax resume {folder}`"
        )
    return whole, sharing_by_part(rows)
