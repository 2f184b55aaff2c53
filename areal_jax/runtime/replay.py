"""Replays a run from its journal: generates every sample and trains every batch again, and compares all bits.

Events come from the journal in their order. The same control plane must answer them with the same actions, an
engine decodes each finished sample under the versions that sampled it, and the learner trains each batch.
Rewards and failures are events: no reward function, tool or network is called.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from areal_jax.assembly.devices import header, use_compilation_cache
from areal_jax.assembly.gpus import use_gpu_environment
from areal_jax.assembly.parts import assemble, make_learner
from areal_jax.config.loading import load_config
from areal_jax.config.tree import Config
from areal_jax.control import events as e
from areal_jax.control.machine import ControlPlane
from areal_jax.control.reward_gate import paid
from areal_jax.generation.regenerate import Finished, Regenerator
from areal_jax.observe.waits import Timeline
from areal_jax.runtime.compute_choice import plan_groups, recorded_choice
from areal_jax.runtime.reading import open_journal
from areal_jax.runtime.trainer_loop import held_batch, train_batch
from areal_jax.trainer.state import TrainState
from areal_jax.trajectories.codec import PRODUCED, digest_of
from areal_jax.trajectories.journal import JournalError, Row, with_rewards
from areal_jax.trajectories.sqlite import SqliteQueue
from areal_jax.types import ArealError, Group, PolicyVersion, SampleId, Trajectory, VersionedParams
from areal_jax.weights.store import wire_copy

Note = Callable[[str], None]

IN_MEMORY = ("weights.backend=memory",)
"""The setting of each replay, which is one process."""

OF_PROCESSES = (*IN_MEMORY, "runtime.hosts=1", "observe.evaluate=0", "observe.exports=0")
"""Further settings for a run of several processes: the replay has one engine, and evaluates nothing."""

ON_ONE_DEVICE = ("runtime.placement=shared", "generation.calls_ahead=0")
"""Settings for such a run on CPUs, where XLA divides work by a process's number of devices: each role
had only its own in its process, and one more in this process might change bits.
"""


class Difference(ArealError):
    """A replayed value differs from the journaled one; the message names the place and the field."""


@dataclass
class Replayed:
    """What a replay has compared until its end, or until its first difference."""

    steps: int = 0
    """Number of batches that were trained again."""
    samples: int = 0
    tokens: int = 0
    """Number of sampled tokens that were generated again."""
    by_value: int = 0
    """Number of these tokens that were compared by value."""
    by_digest: int = 0
    """Number of these tokens that were compared by their sample's digest, which outlives its values."""
    uncompared: int = 0
    """Number of samples with neither values nor a digest in the journal, which an older version wrote."""
    unfinished: int = 0
    """Number of samples that had not finished where the replay ended."""
    header: dict[str, tuple[Any, Any]] = field(default_factory=dict)
    """Name of a value on which bits depend -> (of the run, of this machine), where they differ."""
    reissued: int = 0
    """Number of versions that the run itself trained again with other bits, after it was resumed."""
    difference: str = ""
    """The first difference; empty if every value is equal."""


def replay(folder: Path, until: int | None = None, note: Note = lambda _: None) -> Replayed:
    """Replays the run in `folder`; returns what was compared, and the first difference if there is one.

    `until`: the number of batches to train again; None: all. `note(text)` reports each step. Raises
    ArealError if `folder` has no journal, or if the run was given tasks as Python objects.
    """
    path = folder / "config.yaml"
    if not path.exists():
        raise ArealError(f"{folder} is not a run's folder: it has no config.yaml; give the folder of a run")
    config = load_config(path)
    use_gpu_environment(config)
    use_compilation_cache()
    with open_journal(folder) as journal:
        own = load_config(path, *_settings(config, journal))
        one = _Replay(config, own, journal, note)
        try:
            one.run(until)
        except Difference as difference:
            one.found.difference = str(one.earliest(difference))
    return one.found


def _settings(config: Config, journal: SqliteQueue) -> tuple[str, ...]:
    """Returns what a replay sets, so that its trainer and its engine compute with the run's programs."""
    if not journal.is_of_processes:
        return IN_MEMORY
    is_apart = config.runtime.reference.is_apart or config.runtime.teacher.is_apart
    is_on_cpus = journal.header.get("device_kind") == "cpu"
    return (*OF_PROCESSES, *(ON_ONE_DEVICE if is_on_cpus and not is_apart else ()))


class _Replay:
    """One replay; see `replay`. `own`: the run's `config` with the settings of the replay."""

    def __init__(self, config: Config, own: Config, journal: SqliteQueue, note: Note) -> None:
        self.found = Replayed()
        self._journal, self._note = journal, note
        self._control = ControlPlane(config)
        self._own, self._parts = own, assemble(own)
        self._clock = Timeline(None).clock("replay")
        self._state: TrainState = self._parts.first_state()
        self._engine = self._parts.engine(0)
        self._regenerator = Regenerator(
            self._engine, seed=own.run.seed, sampling=own.generation.sampling, on_update=own.on_update
        )
        self._held: dict[PolicyVersion, VersionedParams] = {}
        """The versions that samples still need, as the engine decodes with them."""
        self._published: dict[PolicyVersion, str] = {}
        self._finished: list[e.SampleFinished] = []
        """Finished samples that are not generated again yet, in the order of the journal."""
        self._members: dict[SampleId, Trajectory] = {}
        self._scored: dict[tuple[int, int], e.RewardScored] = {}
        self._last_needed = _last_needed(journal)

    def run(self, until: int | None) -> None:
        self._compare_header(self._journal.header)
        for row in self._journal.rows():
            is_stale, batch = self._control.state.is_stale(row.event), self._control.state.training
            self._compare_actions(row)
            if not is_stale:
                self._follow(row, batch)
            if until is not None and self.found.steps >= until:
                break
        self._generate()
        self.found.unfinished = sum(len(group.unfinished) for group in self._control.state.groups.values())

    def earliest(self, difference: Difference) -> Difference:
        """Returns `difference`, or that of an earlier sample; samples are generated later than they ended."""
        try:
            self._generate()
        except Difference as earlier:
            return earlier
        return difference

    def _follow(self, row: Row, batch: e.Train | None) -> None:
        """Does what the event says was done. `batch`: the one that was in training before the event."""
        match row.event:
            case e.RunStarted(digest, steps):
                self._use_steps(steps)
                self._publish(self._parts.learner.versioned(self._state), row.seq)
                _same("version 0", "digest as published", digest, self._published[0])
            case e.RunResumed(steps, stored):
                self._use_steps(steps)
                self._compare_header(stored)
            case e.SampleFinished():
                self._finished.append(row.event)
            case e.RewardScored(ordinal, attempt):
                # The trainer read the rewards from a table of their own.
                _same(f"group {ordinal}", "rewards", row.event, self._journal.scored(ordinal, attempt))
                self._scored[ordinal, attempt] = row.event
            case e.BatchTrained():
                assert batch is not None
                self._train(row.event, batch, row.seq)
            case e.VersionCommitted(version, digest):
                _same(f"version {version}", "digest as published", digest, self._published[version])
            case e.VersionReissued():
                self.found.reissued += 1

    # --- samples --------------------------------------------------------------------------------------------

    def _generate(self) -> None:
        """Generates the finished samples again, and compares them in the order of the journal."""
        events, self._finished = self._finished, []
        wanted = [
            Finished(one.sample, self._parts.prompt_tokens(one.sample.ordinal), one.spans, one.rebuilds)
            for one in events
            if one.spans
        ]
        made = self._regenerator.run(wanted, self._held)
        for event in events:
            again = made[event.sample] if event.spans else self._parts.reference(event.sample)
            self._compare_sample(event, again)
            self._members[event.sample] = again

    def _compare_sample(self, event: e.SampleFinished, again: Trajectory) -> None:
        place, count, found = f"sample {_name(event.sample)}", again.completion_tokens, self.found
        try:
            stored = self._journal.trajectory(event.sample)
        except JournalError:  # deleted after its group was trained (observe.keep_groups)
            stored = None
        if stored is not None:
            _same(place, "spans", event.spans, stored.spans)
            _same_arrays(place, stored, again)
            found.by_value += count
        if event.digest:
            _same(place, "digest", event.digest, digest_of(again))
            found.by_digest += count
        _same(place, "stop_reason", event.stop_reason, again.stop_reason)
        found.uncompared += stored is None and not event.digest
        found.samples, found.tokens = found.samples + 1, found.tokens + count

    # --- steps ----------------------------------------------------------------------------------------------

    def _train(self, event: e.BatchTrained, batch: e.Train, seq: int) -> None:
        self._generate()
        parts, place = self._parts, f"step {event.step}"
        members = zip(batch.ordinals, batch.attempts, strict=True)
        groups = paid([self._group(ordinal, attempt) for ordinal, attempt in members], batch.gates)
        choice = recorded_choice(self._own, event.metrics)
        plan = plan_groups(self._own, groups, parts.learner.takes_shared_prompts, choice)
        held = held_batch(event.step, groups, plan)
        self._state, value, metrics = train_batch(parts, self._state, held, self._clock)
        for name in sorted(metrics.keys() & event.metrics.keys()):
            _same(place, name, event.metrics[name], metrics[name])
        _same(place, "digest of the parameters", event.digest, value.digest)
        self._publish(value, seq)
        self._forget()
        self.found.steps += 1
        self._note(f"step {event.step}: {self.found.samples} samples, digest {value.digest}")

    def _group(self, ordinal: int, attempt: int) -> Group:
        size = self._own.algorithm.group_size
        members = [self._members[SampleId(ordinal, member, attempt)] for member in range(size)]
        scored = with_rewards(members, self._scored[ordinal, attempt])
        return Group(ordinal, self._parts.prompts.prompt(ordinal), scored)

    def _forget(self) -> None:
        """Drops what was trained, and what belongs to groups that were dropped or started again."""
        open_now = {(group.ordinal, group.attempt) for group in self._control.state.groups.values()}
        self._members = {
            one: kept for one, kept in self._members.items() if (one.ordinal, one.attempt) in open_now
        }
        self._scored = {one: kept for one, kept in self._scored.items() if one in open_now}

    def _publish(self, value: VersionedParams, seq: int) -> None:
        """Holds the version for samples that need it, and drops those that none after event `seq` needs."""
        wire = wire_copy(value, self._own.wire_dtype)
        self._published[wire.version] = wire.digest
        self._held[wire.version] = self._engine.load_params(wire)
        self._held = {
            version: params
            for version, params in self._held.items()
            if self._last_needed.get(version, -1) > seq
        }

    def _use_steps(self, steps: int) -> None:
        """Trains by the schedules of a run of so many batches; 0: of the config's."""
        if not steps or steps == self._own.run.steps:
            return
        self._own = self._own.model_copy(update={"run": self._own.run.model_copy(update={"steps": steps})})
        parts = self._parts
        learner = make_learner(self._own, parts.model, parts.devices, parts.teacher)
        self._parts = replace(parts, config=self._own, learner=learner)

    # --- comparing ------------------------------------------------------------------------------------------

    def _compare_actions(self, row: Row) -> None:
        actions = tuple(self._control.handle(row.event))
        if actions != row.actions:
            raise Difference(
                f"event {row.seq} ({type(row.event).__name__}): the journal has the actions {row.actions}, "
                f"the control plane answers {actions}"
            )

    def _compare_header(self, stored: Mapping[str, Any]) -> None:
        own = header(self._own)
        # The header of a run of processes is the controller's, which has no devices.
        unknown = {"devices"} if self._journal.is_of_processes else set()
        for name in (stored.keys() & own.keys()) - unknown:
            if stored[name] != own[name]:
                self.found.header.setdefault(name, (stored[name], own[name]))


def _last_needed(journal: SqliteQueue) -> dict[PolicyVersion, int]:
    """Returns version -> number of the last event that needs its parameters: a sample's end."""
    needed: dict[PolicyVersion, int] = {}
    for row in journal.rows():
        if isinstance(row.event, e.SampleFinished):
            needed |= {span.version: row.seq for span in row.event.spans}
    return needed


def _name(sample: SampleId) -> str:
    again = f"/{sample.attempt}" if sample.attempt else ""
    return f"{sample.ordinal}/{sample.member}{again}"


def _same(place: str, name: str, journaled: Any, replayed: Any) -> None:
    """Raises Difference unless the values are equal; two NaN are."""
    are_nan = [isinstance(value, float) and math.isnan(value) for value in (journaled, replayed)]
    if journaled != replayed and not all(are_nan):
        raise Difference(f"{place}, {name}: the journal has {journaled!r}, the replay {replayed!r}")


class _Unequal(NamedTuple):
    """Two arrays differ at this index; a value is None beyond an array's end."""

    at: int
    name: str
    journaled: Any
    replayed: Any


def _same_arrays(place: str, stored: Trajectory, again: Trajectory) -> None:
    """Raises Difference for the first token of which a value has other bits."""
    pairs = {name: (getattr(stored, name), getattr(again, name)) for name in PRODUCED}
    found = [
        unequal
        for name, (journaled, replayed) in pairs.items()
        if not (journaled is None and replayed is None)
        and (unequal := _first_unequal(name, journaled, replayed)) is not None
    ]
    if found:
        at, name, journaled, replayed = min(found, key=lambda one: one.at)
        raise Difference(
            f"{place}, token {at}, {name}: the journal has {journaled!r}, the replay {replayed!r}"
        )


def _first_unequal(name: str, journaled: Any, replayed: Any) -> _Unequal | None:
    """Returns where two arrays of 4-byte values first have other bits. None counts as an empty array."""
    one, other = (np.zeros(0, np.int32) if array is None else array for array in (journaled, replayed))
    count = min(len(one), len(other))
    bits = [np.ascontiguousarray(array[:count]).view(np.int32).reshape(count, -1) for array in (one, other)]
    unequal = np.flatnonzero((bits[0] != bits[1]).any(axis=1)) if count else np.zeros(0, int)
    if not unequal.size and len(one) == len(other):
        return None
    at = int(unequal[0]) if unequal.size else count
    one_value, other_value = (array[at] if at < len(array) else None for array in (one, other))
    return _Unequal(at, name, one_value, other_value)
