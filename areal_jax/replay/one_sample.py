"""Generates one sample of a run again, with the versions of the weights that sampled it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from areal_jax.assembly.parts import assemble
from areal_jax.assembly.run_folder import sample_id
from areal_jax.control.events import BatchTrained, SampleFinished, TurnAdded
from areal_jax.generation.admission import KeptTurns
from areal_jax.generation.regenerate import Finished
from areal_jax.replay.past_versions import OutOfReach, past_versions
from areal_jax.replay.reopened import Reopened, reopened
from areal_jax.replay.replay import Replayed, compare_sample, make_regenerator, replay_run
from areal_jax.runtime.differences import Comparison, Difference, name_of
from areal_jax.runtime.recovery import Note
from areal_jax.types import ArealError, SampleId
from areal_jax.weights.store import wire_copy

Unlike = Mapping[str, tuple[Any, Any]]
"""What `Reopened.unlike` returns."""


def replay_sample(folder: Path, name: str, note: Note = lambda _: None) -> Replayed:
    """Generates the sample named ORDINAL/MEMBER[/ATTEMPT] again; returns what was compared.

    The versions that sampled it are trained again from the nearest checkpoint; if the journal has deleted
    trajectories that this needs, the run is replayed up to the sample. `note(text)` reports what is done.
    Raises ArealError if the sample has not finished, or was not sampled by a policy.
    """
    sample = sample_id(name)
    with reopened(folder) as run:
        event = _finished(run, sample)
        rows = run.journal.rows_of(sample.ordinal)
        if any(isinstance(row.event, TurnAdded) and row.event.sample == sample for row in rows):
            note("replaying the run up to the sample, because it is an episode of several turns")
            return _whole(run, event, note)
        try:
            return _alone(run, event, note)
        except OutOfReach as reason:
            note(f"replaying the run up to the sample, because of this: {reason}")
            return _whole(run, event, note)


def _alone(
    run: Reopened,
    event: SampleFinished,
    note: Note,
    unlike: Unlike = MappingProxyType({}),
) -> Replayed:
    """Generates only this sample again, and the versions of the weights that sampled it.

    `unlike`: the reasons for which bits differ here, found by the first try. Raises OutOfReach as
    `past_versions` does.
    """
    found = Replayed(header=dict(unlike))
    try:
        _compare(run, event, note, found)
    except Difference as difference:
        if not found.header and (reason := run.unlike(0, event.spans[-1].version)):
            note("comparing again, within bounds, because this machine may give other bits than the run's")
            return _alone(run, event, note, reason)
        found.difference = str(difference)
    return found


def _finished(run: Reopened, sample: SampleId) -> SampleFinished:
    event = run.journal.finished(sample)
    if event is None:
        raise ArealError(
            f"{run.folder} has no finished sample {name_of(sample)}; `areal-jax audit {run.folder}` counts "
            "the groups that are still in flight"
        )
    if not event.spans:
        raise ArealError(
            f"sample {name_of(sample)} is a reference answer, which no policy sampled; give a sampled one"
        )
    return event


def _compare(run: Reopened, event: SampleFinished, note: Note, found: Replayed) -> None:
    """Trains the sample's versions again, generates it, and compares it.

    Raises Difference, or OutOfReach as `past_versions` does.
    """
    stretch = run.stretch_of(event.spans[-1].version)
    compared = Comparison(stretch.config.wire_dtype)
    wanted = {span.version for span in event.spans}
    first, last = min(wanted), max(wanted)
    if first < stretch.first_step:
        raise OutOfReach(f"the sample began before step {stretch.first_step}, with which the branch begins")
    found.header |= stretch.differences(stretch.header)
    if found.header:
        compared.loosen()
        found.bounded_from = first
    parts, held = assemble(stretch.config), {}
    engine = parts.engine(0)
    for past in past_versions(run, parts, first, last, compared, note):
        found.steps = past.trained
        if past.value.version in wanted:
            wire = wire_copy(past.value, parts.config.wire_dtype)
            held[wire.version] = engine.load_params(wire)
    prompt = parts.prompt_tokens(event.sample.ordinal)
    made = make_regenerator(parts.config, engine, KeptTurns()).run(
        [Finished(event.sample, prompt, event.spans, event.rebuilds)], held
    )
    compare_sample(found, compared, run.journal, event, made[event.sample])
    found.largest, found.cut = compared.largest, compared.cut


def _whole(run: Reopened, event: SampleFinished, note: Note) -> Replayed:
    """Replays the run up to the step that trained the sample's group, or to its end if none did."""
    last = None
    for row in run.journal.rows_of(event.sample.ordinal):
        if isinstance(row.event, BatchTrained) and event.sample.ordinal in row.event.ordinals:
            last = row.event.step
    return replay_run(run, None if last is None else last + 1, note)
