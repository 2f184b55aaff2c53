"""The control plane of a run: takes one event at a time and returns the actions that follow from it.

The control plane has no clock, thread, socket or randomness, so equal events give equal actions. Therefore a
journal's events, applied again, rebuild the state. Runs in one process, runs on a cluster, the simulator and
the audit all use this class. Read `handle` first, then `_advance`.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from itertools import chain
from typing import Any

from areal_jax.config.tree import Config
from areal_jax.control import drops, episode_turns
from areal_jax.control import events as e
from areal_jax.control.errors import ControlError
from areal_jax.control.events import Action, Event
from areal_jax.control.orchestrator import Orchestrator
from areal_jax.control.over_age import is_to_hold, to_restart
from areal_jax.control.reward_gate import accuracy_of, gates_of, group_correct, have_signal, ungated
from areal_jax.control.state import GroupState, HostState, State, from_plain, to_plain, waits
from areal_jax.control.strategies import STRATEGIES

MAX_FAILURES = 2
"""Number of failures, of a sample or of the scoring, at which a group is dropped and not restarted."""


class ControlPlane:
    """Decides which groups start and where, which batches are trained, and when the run ends.

    `handle` takes one event at a time. Any code may read `state`; only `handle` changes it.
    """

    def __init__(self, config: Config) -> None:
        self._config = config
        strategy = STRATEGIES[config.control.strategy]
        self._strategy = strategy(config.trainer.batch_size, config.max_staleness)
        self.state = State(steps=config.run.steps)
        self.orchestrator = Orchestrator(config, self.state)

    @classmethod
    def fold(
        cls, config: Config, events: Iterable[Event], snapshot: Mapping[str, Any] | None = None
    ) -> ControlPlane:
        """Returns a control plane that has handled `events`.

        `snapshot`: the state before the first event, as `snapshot()` returned it; None: the state of a run
        that has not started.
        """
        plane = cls(config)
        if snapshot is not None:
            plane.state = from_plain(snapshot)
            plane.orchestrator = Orchestrator(config, plane.state)
        for event in events:
            plane.handle(event)
        return plane

    def snapshot(self) -> dict[str, Any]:
        """Returns the complete state as plain values (msgpack, JSON); equal states give equal snapshots."""
        return to_plain(self.state)

    def waits(self) -> tuple[str, ...]:
        """Returns a sentence for each thing that the run waits for; shown when the run makes no progress."""
        return waits(self.state, self._config.trainer.batch_size, self._strategy.is_next_begun_first)

    # --- events ---------------------------------------------------------------------------------------------

    def handle(self, event: Event) -> tuple[Action, ...]:
        """Applies an event, unless it is late or a duplicate; returns the actions to carry out now.

        Raises ControlError if the event contradicts the state.
        """
        if (self.state.version < 0) != isinstance(event, e.RunStarted):
            raise ControlError(f"{event}: the first event, and no other, must be RunStarted; start a new run")
        if self.state.is_stale(event):
            self.state.stale_events += 1
            return tuple(self._advance())
        return tuple(chain(_TAKERS[type(event)](self, event) or (), self._advance()))

    def _run_started(self, event: e.RunStarted) -> None:
        s = self.state
        s.version, s.digests[0], s.steps = 0, event.digest, event.steps or self._config.run.steps

    def _run_resumed(self, event: e.RunResumed) -> Iterator[Action]:
        s = self.state
        s.steps, s.is_finished = event.steps or self._config.run.steps, False
        s.is_held, s.dropped_in_a_row, s.failed_prompts = False, {}, []
        for name in sorted(s.hosts):
            yield from self._lose(name)
        yield from episode_turns.rerun(s)
        # Messages to the reward pool and the trainer died with the driver, so they are sent again.
        for ordinal in sorted(s.groups):
            if s.groups[ordinal].stage == "scoring":
                yield e.Score(ordinal, s.groups[ordinal].attempt)
        if s.training is not None and s.training.step < s.steps:
            yield s.training

    def _host_joined(self, event: e.HostJoined) -> Iterator[Action]:
        if event.slots < 1:
            raise ControlError(
                f"host {event.host} joined with {event.slots} slots for rollouts, but needs at least 1; "
                "raise generation.slots"
            )
        # A host that joins again holds nothing of what was dispatched to it, except what it names.
        if event.host in self.state.hosts:
            yield from self._lose(event.host)
        self.state.hosts[event.host] = HostState(event.slots)
        yield from self._go_on_there(event)
        yield from self.orchestrator.join(event.host)

    def _go_on_there(self, event: e.HostJoined) -> Iterator[Action]:
        """Gives groups of which a host still has samples back to it, unless another host has them by now."""
        s = self.state
        held = [sample for sample in event.samples if s.waits_half_decoded(sample)]
        if gone := tuple(sample for sample in event.samples if sample not in held):
            yield e.Cancel(gone, event.host)
        for ordinal in sorted({sample.ordinal for sample in held}):
            group = s.groups[ordinal]
            s.unlist(ordinal)
            # Its samples may be of several versions from here on, so no host serves the version of them all.
            s.place(replace(group, may_move=False), event.host)
            if missing := tuple(sample for sample in group.unfinished if sample not in held):
                yield e.Dispatch(missing, event.host, s.version)

    def _host_lost(self, event: e.HostLost) -> Iterator[Action]:
        yield from self._lose(event.host)
        yield from self.orchestrator.place()

    def _lose(self, host: str) -> Iterator[Action]:
        """Removes a host; its episodes start again if other hosts may lack the version that they need."""
        begun = episode_turns.bound_to(self.state, host) if self._config.is_one_version else []
        yield from self.orchestrator.lose(host)
        for ordinal in begun:
            yield from self._reissue(self.state.groups[ordinal], "lost_version")

    def _host_adopted(self, event: e.HostAdopted) -> None:
        host = self.state.hosts[event.host]
        if event.version < host.version:
            raise ControlError(
                f"host {event.host} went back from version {host.version} to {event.version}; restart that "
                "host"
            )
        self.state.require_digest(event.version, event.digest, f"host {event.host} adopted")
        serves = max(host.serves, event.version)
        self.state.hosts[event.host] = replace(host, version=event.version, serves=serves)

    def _sample_finished(self, event: e.SampleFinished) -> Iterator[Action]:
        versions = episode_turns.require_versions(self.state, event)
        yield from episode_turns.forgotten(self.state, event.sample)
        group = self.state.finish(event.sample, versions[0])
        if group.is_finished:
            yield e.Score(group.ordinal, group.attempt)

    def _reward_scored(self, event: e.RewardScored) -> Iterator[Action]:
        s, size = self.state, self._config.algorithm.group_size
        if len(event.rewards) != size:
            raise ControlError(
                f"group {event.ordinal} has {size} samples, but got {len(event.rewards)} rewards; "
                "start the reward process again with the run's config"
            )
        gate = self._config.algorithm.gate
        correct = group_correct(event, gate)
        # Whether a gated part will be paid is not known yet, so it cannot keep a group.
        if self._config.algorithm.group_filter == "signal" and not have_signal(ungated(event, gate)):
            yield from self._drop(event.ordinal, "no_signal")
        else:
            s.groups[event.ordinal] = replace(s.groups[event.ordinal], stage="complete", correct=correct)
            insort(s.complete, event.ordinal)
            s.dropped_in_a_row = {}

    def _prompt_failed(self, event: e.PromptFailed) -> Iterator[Action]:
        yield from self._drop(event.ordinal, "failed_prompt")
        yield from drops.count_prompt(self.state, event.ordinal, self._config.control.max_failed_prompts)

    def _batch_trained(self, event: e.BatchTrained) -> None:
        s = self.state
        if s.training is None or (event.step, event.ordinals) != (s.training.step, s.training.ordinals):
            raise ControlError(
                f"batch {event.step} of groups {event.ordinals} was trained, but the trainer was asked for "
                f"{s.training or 'no batch'}; end any second trainer of this run, then resume the run"
            )
        s.accuracy = accuracy_of([s.groups.pop(ordinal).correct for ordinal in event.ordinals])
        s.trained_version, s.training = event.step + 1, None

    def _version_committed(self, event: e.VersionCommitted) -> Iterator[Action]:
        s = self.state
        if event.version <= s.version:  # published again after a resume
            self.state.require_digest(event.version, event.digest, "the trainer committed again")
        elif event.version > s.trained_version:
            raise ControlError(
                f"version {event.version} was committed, but the newest trained version is "
                f"{s.trained_version}; end any second trainer of this run, then resume the run"
            )
        else:
            s.version = event.version
            s.digests[event.version] = event.digest
            yield from self.orchestrator.place()

    def _version_reissued(self, event: e.VersionReissued) -> None:
        self.state.replace_digest(event.version, event.old, event.new)

    def _checkpoint_committed(self, event: e.CheckpointCommitted) -> None:
        self.state.add_checkpoint(event.version, self._config.trainer.keep_checkpoints)

    # --- what follows from any event ------------------------------------------------------------------------

    def _advance(self) -> Iterator[Action]:
        """Yields the actions that the state now allows: Reissue, Hold, Train and Dispatch.

        Once the last batch is trained, yields a Drop for every remaining group, then Finish.
        """
        s = self.state
        if s.trained_version >= s.steps:
            yield from self._finish()
            return
        if s.training is None:
            for ordinal in to_restart(s, self._config):
                yield from self._reissue(s.groups[ordinal], "over_age")
            yield from self._form_batch()
        yield from self.orchestrator.reuse()
        yield from self._dispatch()

    def _finish(self) -> Iterator[Action]:
        s = self.state
        s.training = None
        for ordinal in sorted(s.groups):
            yield from self._drop(ordinal, "end")
        if not s.is_finished:
            s.is_finished = True
            yield e.Finish()

    def _form_batch(self) -> Iterator[Action]:
        """Issues Train for the scored groups with the lowest ordinals, if a batch of them may be trained."""
        s, size = self.state, self._config.trainer.batch_size
        ordinals = tuple(s.complete[:size])
        if len(ordinals) < size or not self._strategy.trains(s, ordinals):
            return
        if is_to_hold(s, self._config, ordinals):
            if not s.is_held:
                s.is_held = True
                yield e.Hold(s.trained_version)
            return
        if self._strategy.is_next_begun_first:
            yield from self._dispatch(is_room_needed=False)
            if not s.has_begun(s.trained_version + 2, size):
                return
        del s.complete[:size]
        s.is_held = False
        gates = gates_of([s.groups[n].correct for n in ordinals], s.accuracy, self._config.algorithm.gate)
        s.training = e.Train(s.trained_version, ordinals, tuple(s.groups[n].attempt for n in ordinals), gates)
        for ordinal in ordinals:
            s.groups[ordinal] = replace(s.groups[ordinal], stage="training")
        yield s.training

    def _dispatch(self, is_room_needed: bool = True) -> Iterator[Action]:
        """Dispatches waiting groups, then groups of further prompts, while a host has capacity.

        `is_room_needed`: True: a host gets no more groups once one group's samples wait there for a slot.
        False: any number of samples may wait on a host.
        """
        s, room = self.state, self._config.algorithm.group_size if is_room_needed else None
        serving = s.version if self._config.places_versions else -1
        while (host := s.roomiest_host(room, serving)) is not None:
            if s.waiting:
                group = s.groups[s.waiting.pop(0)]
            elif self._may_admit():
                group = GroupState(s.admitted, (None,) * self._config.algorithm.group_size)
                s.admitted += 1
            else:
                return
            # All unfinished samples go to one host, which computes their prompt once.
            s.place(group, host)
            yield from episode_turns.commands(group, host, s.version)

    def _may_admit(self) -> bool:
        places = self.state.open_places(self._config.trainer.batch_size, self._config.control.max_concurrent)
        return places > 0 and self._strategy.admits(self.state)

    # --- failures, drops and restarts -----------------------------------------------------------------------

    def _fail(self, ordinal: int, reason: str) -> Iterable[Action]:
        group = self.state.groups[ordinal]
        group = replace(group, failures=group.failures + 1)
        is_last = group.failures >= MAX_FAILURES
        return self._drop(ordinal, reason) if is_last else self._reissue(group, reason)

    def _reissue(self, group: GroupState, reason: str) -> Iterator[Action]:
        """Restarts the group from its prompt, with other random keys than before.

        Unlike a drop, a restart does not permit a further group to start in the group's place.
        """
        attempt, unfinished = group.attempt + 1, (None,) * self._config.algorithm.group_size
        yield e.Reissue(group.ordinal, attempt, reason)
        yield from self._withdraw(group)
        self.state.wait(GroupState(group.ordinal, unfinished, attempt=attempt, failures=group.failures))

    def _drop(self, ordinal: int, reason: str) -> Iterator[Action]:
        yield e.Drop(ordinal, reason)
        yield from self._withdraw(self.state.groups.pop(ordinal))
        # `dropped` grows here alone, so that every drop refunds its admission exactly once.
        yield from drops.count(self.state, reason, self._config.trainer.batch_size)

    def _withdraw(self, group: GroupState) -> Iterator[Action]:
        self.state.unlist(group.ordinal)
        if group.host:
            self.state.unload(group.counted_on, group.counted)
            yield e.Cancel(group.unfinished, group.host)
        if group.target:
            yield e.Cancel(group.unfinished, group.target)


_TAKERS: dict[type, Callable[[ControlPlane, Any], Iterable[Action] | None]] = {
    e.RunStarted: ControlPlane._run_started,
    e.RunResumed: ControlPlane._run_resumed,
    e.HostJoined: ControlPlane._host_joined,
    e.HostLost: ControlPlane._host_lost,
    e.HostAdopted: ControlPlane._host_adopted,
    e.SampleFinished: ControlPlane._sample_finished,
    e.SampleFailed: lambda plane, event: plane._fail(event.sample.ordinal, "failed_sample"),
    e.RewardScored: ControlPlane._reward_scored,
    e.RewardFailed: lambda plane, event: plane._fail(event.ordinal, "failed_reward"),
    e.PromptFailed: ControlPlane._prompt_failed,
    e.BatchTrained: ControlPlane._batch_trained,
    e.VersionCommitted: ControlPlane._version_committed,
    e.VersionReissued: ControlPlane._version_reissued,
    e.CheckpointCommitted: ControlPlane._checkpoint_committed,
    e.SamplesOffered: lambda plane, event: plane.orchestrator.offered(event),
    e.SamplesMoved: lambda plane, event: plane.orchestrator.moved(event),
    e.MoveFailed: lambda plane, event: plane.orchestrator.failed(event),
    e.KVShort: lambda plane, event: plane.orchestrator.relieve(event.host),
    e.PlacementDue: lambda plane, event: plane.orchestrator.place(),
    e.TurnAdded: lambda plane, event: episode_turns.turn_added(plane.state, event, plane._config),
    e.TurnFinished: lambda plane, event: episode_turns.turn_finished(plane.state, event),
    e.ToolStarted: lambda plane, event: episode_turns.tool_started(plane.state, event),
    e.ToolReturned: lambda plane, event: None,
    e.EpisodeEnded: lambda plane, event: (
        plane._drop(event.sample.ordinal, "rejected") if event.reward is None else None
    ),
    e.EpisodeFailed: lambda plane, event: plane._fail(event.sample.ordinal, event.reason),
}
"""Kind of event -> the method that applies it; a test compares the keys with `events.EVENTS`."""
