"""Replays a run from its journal: generates every sample and trains every batch again, and compares all bits.

Events come from the journal in their order. The same control plane must answer them with the same actions, an
engine decodes each finished sample under the versions that sampled it, and the learner trains each batch.
Rewards and failures are events: no reward function, tool or network is called.

On another machine than the run's, rounding differs: from the first event of a machine with another header on,
or from the first other bit of a batch that another CPU or other packages trained. From there on values are
compared within bounds, and batches are trained on the journal's tokens, so that both trainers see the same
samples.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from areal_jax.assembly.parts import Parts, assemble, with_config, with_steps
from areal_jax.assembly.run_folder import CHECKPOINTS
from areal_jax.config.tree import Config
from areal_jax.control import events as e
from areal_jax.control.audit import MALFORMED
from areal_jax.control.errors import ControlError
from areal_jax.control.machine import ControlPlane
from areal_jax.control.reward_gate import Gates, paid
from areal_jax.episodes.conversation import Conversation
from areal_jax.generation.admission import KeptTurns
from areal_jax.generation.engine import Engine
from areal_jax.generation.regenerate import Finished, Regenerator
from areal_jax.observe.metrics import REQUIRED
from areal_jax.observe.waits import Timeline
from areal_jax.replay.folder_audit import audit_run
from areal_jax.replay.reopened import Reopened, reopened
from areal_jax.runtime.compute_choice import recorded_choice
from areal_jax.runtime.differences import MACHINE, Comparison, Difference, name_of, same
from areal_jax.runtime.recovery import Journaled, Note
from areal_jax.runtime.rows import RowMaker
from areal_jax.runtime.trainer_loop import batch_again, train_batch
from areal_jax.trainer.state import TrainState
from areal_jax.trajectories.codec import digest_of
from areal_jax.trajectories.journal import JournalError, Row, with_rewards
from areal_jax.trajectories.paths import spans_of
from areal_jax.trajectories.sqlite import SqliteQueue
from areal_jax.types import Group, PolicyVersion, SampleId, Trajectory, VersionedParams
from areal_jax.weights.digest import leaf_digests
from areal_jax.weights.errors import StagedError
from areal_jax.weights.manifest import checked_manifest
from areal_jax.weights.store import wire_copy

WithTokens = e.SampleFinished | e.TurnFinished
"""The events that come with tokens, which a replay generates again."""

Compared = TypeVar("Compared")
Before = Callable[[int, TrainState, tuple[Group, ...]], None]


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
    open_at: int | None = None
    """Number of the newest event at the replay's start, if the run had not ended there; None if it had, or if
    the replay was to end earlier."""
    header: dict[str, tuple[Any, Any]] = field(default_factory=dict)
    """Name of a value on which bits depend -> (of the run, of this machine), where they differ. If only
    `Reopened.unlike` names it, it is there only if bits differ, too."""
    bounded_from: int | None = None
    """Number of the batch from which on values were compared within bounds; None: all bit for bit."""
    largest: dict[str, float] = field(default_factory=dict)
    """Field -> its largest difference where values were compared within bounds (`Comparison.largest`)."""
    cut: int = 0
    """Number of samples that were compared only up to a token that differs (`Comparison.cut`)."""
    reissued: int = 0
    """Number of versions that the run itself trained again with other bits, after it was resumed."""
    difference: str = ""
    """The first difference; empty if every value is equal, or within its bound."""


def replay(folder: Path, until: int | None = None, note: Note = lambda _: None) -> Replayed:
    """Replays the run in `folder`; returns what was compared, and the first difference if there is one.

    `until`: the number of batches to train again; None: all. `note(text)` reports each step. Raises
    ArealError if `folder` has no journal, or if the run was given tasks as Python objects.
    """
    with reopened(folder) as run:
        return replay_run(run, until, note)


def replay_run(run: Reopened, until: int | None, note: Note) -> Replayed:
    """Replays an open run; see `replay`."""
    one = Replay(run, note)
    try:
        one.run(until)
    except Difference as difference:
        one.found.difference = str(one.earliest(difference))
    if until is None and not one.found.difference:
        # What nothing is computed from: counts of events, other files of the folder, the journal's end.
        one.found.difference = next(iter(audit_run(run.folder).violations), "")
    return one.found


class Replay:
    """One replay of a run; see `replay`."""

    def __init__(self, run: Reopened, note: Note, before: Before = lambda *_: None) -> None:
        """`before(step, state, groups)` is called with each batch's groups, before they are trained."""
        first, self._before = run.stretches[0], before
        self.found, self.last_seq = Replayed(), 0
        """What was compared, and the number of the last event that was replayed."""
        self.parts = assemble(first.config)
        self.state: TrainState = self.parts.first_state()
        self._run, self._folder, self._journal, self._note = run, run.folder, run.journal, note
        self._newest = run.journal.last_seq
        """Number of the last event to read: the run may go on meanwhile."""
        self._control = ControlPlane(run.config)
        self._compared = Comparison(first.config.wire_dtype)
        self._stretch, self._later = first, list(run.stretches[1:])
        self._clock = Timeline(None).clock("replay")
        self._engine = self.parts.engine(0)
        self._turns = KeptTurns()
        """The KV of open episodes' turns, with which their next turns begin."""
        self._regenerator = make_regenerator(first.config, self._engine, self._turns)
        self._held: dict[PolicyVersion, VersionedParams] = {}
        """The versions that samples still need, as the engine decodes with them."""
        self._published: dict[PolicyVersion, str] = {}
        self._finished: list[WithTokens] = []
        """Finished samples and turns that are not generated again yet, in the order of the journal."""
        self._conversations: dict[SampleId, Conversation] = {}
        """The episodes of open groups, with the trajectories that were generated again."""
        self._members: dict[SampleId, Trajectory] = {}
        self._scored: dict[tuple[int, int], e.RewardScored] = {}
        self._rows = self._make_rows()
        self._is_counted = True
        """Whether the next row of metrics counts all that `_rows` has seen: after a resume an older version
        may have made it (`RowMaker.COUNTED`)."""
        self._has_reissued = any(True for _ in run.journal.events("VersionReissued"))
        """Whether the run itself trained versions to other bits, so that checkpoints may have either."""
        self._last_needed = _last_needed(run.journal)

    def run(self, until: int | None) -> None:
        """Replays the first `until` batches, or all of them; raises Difference for the first difference."""
        self._compare_header(self._stretch.header)
        for row in self._journal.rows():
            if row.seq > self._newest:
                break
            if row.seq != self.last_seq + 1:
                raise Difference(
                    f"event {row.seq} follows event {self.last_seq}; the events between are missing"
                )
            if self._later and row.seq > self._later[0].after:
                self._stretch = self._later.pop(0)
                self._use(with_config(self.parts, self._stretch.config))
                self._rows = self._make_rows()
            is_stale, batch = self._control.state.is_stale(row.event), self._control.state.training
            self._compare_actions(row)
            if not is_stale:
                self._follow(row, batch)
            self._rows.see(row.event, row.actions)
            self.last_seq = row.seq
            if until is not None and self.found.steps >= until:
                break
        self._generate()
        if self.last_seq == self._newest and not self._control.state.is_finished:
            self.found.open_at = self._newest
        self.found.unfinished = sum(len(group.unfinished) for group in self._control.state.groups.values())
        self.found.largest, self.found.cut = self._compared.largest, self._compared.cut

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
                self._use(with_steps(self.parts, steps))
                self._publish(self.parts.learner.versioned(self.state), row.seq)
                self._compare_digest(0, digest)
            case e.RunResumed(steps, stored):
                self._use(with_steps(self.parts, steps))
                self._compare_header(stored)
                self._is_counted = False
            case e.TurnAdded(sample):
                prompt = self.parts.prompt_tokens(sample.ordinal)
                self._conversations.setdefault(sample, Conversation(prompt)).add(row.event)
            case e.SampleFinished() | e.TurnFinished():
                self._finished.append(row.event)
            case e.RewardScored(ordinal, attempt):
                # The trainer read the rewards from a table of their own.
                same(f"group {ordinal}", "rewards", row.event, self._journal.scored(ordinal, attempt))
                self._scored[ordinal, attempt] = row.event
            case e.BatchTrained():
                assert batch is not None
                self._train(row.event, batch, row.seq)
            case e.VersionCommitted(version, digest):
                self._compare_digest(version, digest)
            case e.VersionReissued():
                self.found.reissued += 1

    # --- samples --------------------------------------------------------------------------------------------

    def _generate(self) -> None:
        """Generates the finished samples again, and compares them in the order of the journal.

        A turn needs the tokens of the turn before: each round generates the next turn of every episode.
        """
        rest, self._finished = self._finished, []
        while rest:
            first = {event.sample: event for event in reversed(rest)}
            events = [event for event in rest if first[event.sample] is event]
            rest = [event for event in rest if first[event.sample] is not event]
            made = self._regenerator.run([one for event in events for one in self._wanted(event)], self._held)
            for event in events:
                self._compare(event, made.get(event.sample))

    def _wanted(self, event: WithTokens) -> Iterator[Finished]:
        """Yields what is to be generated: nothing for a reference answer, or for the end of an episode."""
        sample, talk = event.sample, self._conversations.get(event.sample)
        if isinstance(event, e.TurnFinished):
            assert talk is not None
            tokens, sampling = talk.request(event.turn, self.parts.config.generation.sampling)
            own = event.turn, sampling, event.segment
            yield Finished(sample, tokens, event.spans, event.rebuilds, *own, reused=event.reused)
        elif event.spans and talk is None:
            yield Finished(sample, self.parts.prompt_tokens(sample.ordinal), event.spans, event.rebuilds)

    def _compare(self, event: WithTokens, made: Trajectory | None) -> None:
        """Compares a sample or turn with the journal; `made`: the one that was generated again."""
        talk = self._conversations.get(event.sample)
        if isinstance(event, e.TurnFinished):
            assert talk is not None and made is not None
            again = talk.joined(event.turn, made)
            talk.finish(event, again)
        elif talk is not None:
            again = talk.whole(event.stop_reason)
        else:
            again = made or self.parts.reference(event.sample)
        stored = self._alike(
            lambda: compare_sample(self.found, self._compared, self._journal, event, again, talk)
        )
        # Bit for bit they are the same. Within bounds, both trainers must see the journal's samples.
        used = stored if stored and self._compared.is_bounded else again
        if isinstance(event, e.TurnFinished):
            assert talk is not None
            talk.finish(event, used)
        else:
            self._members[event.sample] = used
            self._turns.forget([event.sample])

    # --- steps ----------------------------------------------------------------------------------------------

    def _train(self, event: e.BatchTrained, batch: e.Train, seq: int) -> None:
        self._generate()
        parts = self.parts
        members = zip(batch.ordinals, batch.attempts, strict=True)
        groups = paid([self._group(ordinal, attempt) for ordinal, attempt in members], batch.gates)
        self._before(event.step, self.state, groups)
        choice = recorded_choice(self.parts.config, event.metrics)
        again = batch_again(parts.config, parts.learner, event.step, groups, choice)
        self.state, value, metrics = train_batch(parts.config, parts.learner, self.state, again, self._clock)
        figures = self._figures(event, groups, batch.gates, metrics)
        journaled = Journaled(batch, event.digest, "", event.metrics, 0)
        self._alike(lambda: journaled.compare(self._compared, figures, value.digest))
        self._compare_checkpoint(value.version)
        self._publish(value, seq)
        self._forget()
        self.found.steps += 1
        self._note(f"step {event.step}: {self.found.samples} samples, digest {value.digest}")

    def _compare_checkpoint(self, version: PolicyVersion) -> None:
        """Compares the train state, and not only its parameters, with the checkpoint of this version."""
        path = self._folder / CHECKPOINTS / str(version)
        if self._compared.is_bounded or self._has_reissued or not path.exists():
            return
        try:
            stored = checked_manifest(path).leaves
        except StagedError as error:
            if not path.exists():  # the run, which is in progress, has deleted it meanwhile
                return
            raise Difference(str(error)) from None
        for name, digest in leaf_digests(self.state).items():
            same(f"checkpoint {version}", name, stored.get(name), digest)

    def _make_rows(self) -> RowMaker:
        parts, tasks = self.parts, tuple(self.parts.tasks)
        task_of = lambda ordinal: parts.prompts.place(ordinal)[0]  # noqa: E731
        has_episodes = bool(parts.workflows)
        return RowMaker(dict, (), 0.0, tasks, task_of, parts.config.control, has_episodes=has_episodes)

    def _figures(
        self, event: e.BatchTrained, groups: tuple[Group, ...], gates: Gates, trained: Mapping[str, Any]
    ) -> dict[str, Any]:
        """Returns all figures of a step's row that can be computed again; `trained`: those of the update."""
        own = self._rows.of_journal(event.step, groups, gates)
        is_counted, self._is_counted = self._is_counted, True
        if MACHINE not in event.metrics:  # an older version of areal-jax made the row, maybe in another way
            return dict(trained)
        if missing := [
            name for name in REQUIRED if name in own.keys() | trained if name not in event.metrics
        ]:
            raise Difference(f"step {event.step}, {missing[0]}: the journal has no such metric")
        counted = {name for name in own if not is_counted and name.partition("/")[0] in RowMaker.COUNTED}
        rest = {name: value for name, value in own.items() if name not in counted}
        return {"params_digest": event.digest, **rest, **trained}

    def _group(self, ordinal: int, attempt: int) -> Group:
        size = self.parts.config.algorithm.group_size
        members = [self._members[SampleId(ordinal, member, attempt)] for member in range(size)]
        scored = with_rewards(members, self._scored[ordinal, attempt])
        return Group(ordinal, self.parts.prompts.prompt(ordinal), scored)

    def _forget(self) -> None:
        """Drops what was trained, and what belongs to groups that were dropped or started again."""
        open_now = {(group.ordinal, group.attempt) for group in self._control.state.groups.values()}
        self._members = {
            one: kept for one, kept in self._members.items() if (one.ordinal, one.attempt) in open_now
        }
        self._scored = {one: kept for one, kept in self._scored.items() if one in open_now}
        ended = {one for one in self._conversations if (one.ordinal, one.attempt) not in open_now}
        self._conversations = {one: kept for one, kept in self._conversations.items() if one not in ended}
        self._turns.forget(ended)

    def _publish(self, value: VersionedParams, seq: int) -> None:
        """Holds the version for samples that need it, and drops those that none after event `seq` needs."""
        wire = wire_copy(value, self.parts.config.wire_dtype)
        self._published[wire.version] = wire.digest
        self._held[wire.version] = self._engine.load_params(wire)
        self._held = {
            version: params
            for version, params in self._held.items()
            if self._last_needed.get(version, -1) > seq
        }

    # --- the run's config, which may change -----------------------------------------------------------------

    def _use(self, parts: Parts) -> None:
        """Goes on with another config, after generating the samples that finished under the one before."""
        if parts is not self.parts:
            self._generate()
            self.parts = parts
            self._regenerator = make_regenerator(parts.config, self._engine, self._turns)

    # --- comparing ------------------------------------------------------------------------------------------

    def _compare_actions(self, row: Row) -> None:
        try:
            actions = tuple(self._control.handle(row.event))
        except (ControlError, *MALFORMED) as error:
            raise Difference(
                f"event {row.seq} ({type(row.event).__name__}): the control plane rejects it: {error!r}"
            ) from None
        if actions != row.actions:
            raise Difference(
                f"event {row.seq} ({type(row.event).__name__}): the journal has the actions {row.actions}, "
                f"the control plane answers {actions}"
            )

    def _compare_header(self, stored: Mapping[str, Any]) -> None:
        """Compares within bounds from now on if the run's machine differs from this one."""
        differences = self._stretch.differences(stored)
        if differences and not self._compared.is_bounded:
            self._generate()
        self._loosen(differences)

    def _loosen(self, differences: Mapping[str, tuple[Any, Any]]) -> None:
        """From now on compares within bounds if the run's machine differs from this one by `differences`."""
        self.found.header = {**differences, **self.found.header}
        if differences and not self._compared.is_bounded:
            self._compared.loosen()
            self.found.bounded_from = self.found.steps

    def _compare_digest(self, version: PolicyVersion, digest: str) -> None:
        """Compares a version's digest as published with the journaled one."""
        own = self._published[version]
        self._alike(lambda: self._compared.digest(f"version {version}", "digest as published", digest, own))

    def _alike(self, compare: Callable[[], Compared]) -> Compared:
        """Returns `compare()`; calls it again, within bounds, if bits differ for a reason of the machine."""
        try:
            return compare()
        except Difference:
            step = self.found.steps
            if self._compared.is_bounded or not (reason := self._run.unlike(step, step)):
                raise
            self._loosen(reason)
            return compare()


def compare_sample(
    found: Replayed,
    compared: Comparison,
    journal: SqliteQueue,
    event: WithTokens,
    again: Trajectory,
    talk: Conversation | None = None,
) -> Trajectory | None:
    """Compares a sample that was generated `again` with the journal, and counts it in `found`.

    `talk`: the sample's episode up to there, with `again`, if it is one. The end of a turn counts no sample
    and no token, because the end of the sample counts all of them. Returns the journaled trajectory up to
    there; None if it was deleted after training (observe.keep_groups). Raises Difference for the first value
    that differs.
    """
    turn, is_equal = (event.turn if isinstance(event, e.TurnFinished) else None), True
    place = f"sample {name_of(event.sample)}" + ("" if turn is None else f", turn {turn}")
    count = again.completion_tokens if turn is None else 0
    try:
        stored = journal.trajectory(event.sample)
        if talk is not None and turn is not None:  # None: an older version did not store this branch
            stored = talk.stored_paths(stored).get(turn)
    except JournalError:
        stored = None
    if stored is not None:
        same(place, "spans", event.spans, spans_of(stored)[-len(event.spans) :])
        is_equal = compared.sample(place, stored, again)
    has_digest = bool(event.digest) and not compared.is_bounded
    if has_digest:
        same(place, "digest", event.digest, digest_of(again))
    if is_equal:
        same(place, "stop_reason", event.stop_reason, again.stop_reason)
    found.by_value += count if stored is not None else 0
    found.by_digest += count if has_digest else 0
    if turn is None:
        found.uncompared += stored is None and not has_digest
        found.samples, found.tokens = found.samples + 1, found.tokens + count
    return stored


def make_regenerator(config: Config, engine: Engine, turns: KeptTurns) -> Regenerator:
    """Returns what generates samples of a run with this config again; `turns`: as in Regenerator."""
    own: Any = dict(seed=config.run.seed, sampling=config.generation.sampling, on_update=config.on_update)
    return Regenerator(engine, turns, **own)


def _last_needed(journal: SqliteQueue) -> dict[PolicyVersion, int]:
    """Returns version -> number of the last event that needs its parameters: a sample's end."""
    needed: dict[PolicyVersion, int] = {}
    for row in journal.rows():
        if isinstance(row.event, WithTokens):
            needed |= {span.version: row.seq for span in row.event.spans}
    return needed
