"""The driver of a real (not simulated) run: `DriverCore`, and the updates of the run's files after events."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Sequence

from areal_jax.assembly.devices import header
from areal_jax.assembly.parts import Inputs
from areal_jax.assembly.run_folder import CHECKPOINTS
from areal_jax.control import events as e
from areal_jax.control.events import Action, Event
from areal_jax.control.orchestrator import PLACED_EVERY_S
from areal_jax.runtime.context import RunContext
from areal_jax.runtime.core import DriverCore, Endpoints, Incoming
from areal_jax.runtime.rows import HostFigures, RowMaker, Totals
from areal_jax.trainer.checkpoint import committed, prune
from areal_jax.trajectories.journal import Entry
from areal_jax.types import PolicyVersion


class Driver:
    """A real run's driver: `DriverCore` decides on events, and this class updates the run's files after them.

    It writes metrics rows, the timeline and snapshots of the control plane's state, shows progress, and
    deletes trajectories that no step needs any more.
    """

    def __init__(
        self,
        inputs: Inputs,
        context: RunContext,
        endpoints: Endpoints,
        hosts: Sequence[HostFigures],
        take_totals: Totals,
    ) -> None:
        """`endpoints`: receive the control plane's actions.

        For the metrics rows, `hosts` give counts and rates, and `take_totals()` returns component -> activity
        -> seconds since its last call.
        """
        self._config, self._journal = context.config, context.journal
        self._checkpoints = context.folder / CHECKPOINTS
        self._view, self._metrics, self._timeline = context.view, context.metrics, context.timeline
        task_of = lambda ordinal: inputs.prompts.place(ordinal)[0]  # noqa: E731
        rows = RowMaker(
            take_totals,
            hosts,
            start_s=context.wall_s,
            tasks=tuple(inputs.tasks),
            task_of=task_of,
            control=context.config.control,
            has_episodes=bool(inputs.workflows),
        )
        for row in context.uncounted:
            rows.see(row.event, row.actions)
        self.control = context.control
        self._watch = context.watch
        self._core = DriverCore(context.config, context.control, context.journal, inputs, rows, endpoints)
        self._placed_s = time.monotonic()
        self._trained = deque(context.trained)
        self._is_full = False
        """Whether a note has said that observe.keep_bytes deletes trajectories."""

    def handle(self, incoming: Sequence[Incoming]) -> None:
        """Decide on the events, record the decisions in the journal, then send out the actions."""
        while incoming:
            with self._watch.piece():
                entries = self.record(incoming)
                incoming = self.act(action for entry in entries for action in entry.actions)

    def start(self, version: PolicyVersion, digest: str) -> None:
        """Record that the run starts or, if its journal has events, resumes.

        `version`, `digest`: those of the weights that are published at this moment.
        """
        steps = self._config.run.steps
        first: list[Event] = [e.RunStarted(digest, steps)]
        if self.control.state.version >= 0:
            first = [e.RunResumed(steps, header(self._config)), e.VersionCommitted(version, digest)]
        self.handle([(event, None) for event in first])

    def placement_due(self) -> list[Incoming]:
        """Returns PlacementDue, if it may matter and the last one was PLACED_EVERY_S ago."""
        if not self.control.orchestrator.is_due():
            self._placed_s = time.monotonic()
            return []
        if time.monotonic() < self._placed_s + PLACED_EVERY_S:
            return []
        self._placed_s = time.monotonic()
        return [(e.PlacementDue(), None)]

    def ask_again(self) -> None:
        """If a batch is in training, send its Train action again: a restarted trainer has lost the batch."""
        if (batch := self.control.state.training) is not None:
            self.act([batch])

    def record(self, incoming: Sequence[Incoming]) -> list[Entry]:
        """Decide on the events, record the decisions and update the run's files, but send out no action.

        Returns the journaled entries.
        """
        entries = self._core.record(incoming)
        for entry in entries:
            self._follow(entry.event)
        return entries

    def act(self, actions: Iterable[Action]) -> list[Incoming]:
        """Sends the actions to the endpoints, as `DriverCore.act` does."""
        return self._core.act(actions)

    def _follow(self, event: Event) -> None:
        """Update the files for a journaled event: metrics rows, snapshots, deletion of old trajectories."""
        if isinstance(event, e.BatchTrained):
            self._metrics.write(event.metrics)
            self._view.show(event.metrics)
            self._timeline.flush()
            self._trained.append((event.step + 1, event.ordinals))
        elif isinstance(event, e.CheckpointCommitted):
            self._journal.snapshot(self._journal.last_seq, self.control.snapshot())
            prune(self._checkpoints, event.version, self._config.trainer.keep_checkpoints)
            self._forget_trained()
        elif isinstance(event, e.SampleFailed):
            self._view.note(
                f"sample {event.sample.member} of group {event.sample.ordinal} failed, so the group "
                f"starts again or, at its second failure, is dropped: {event.reason}"
            )
        elif isinstance(event, e.EpisodeFailed):
            self._view.note(
                f"the episode of sample {event.sample.member} of group {event.sample.ordinal} failed "
                f"({event.reason}), so the group starts again or, at its second failure, is dropped: "
                f"{event.message}"
            )
        elif isinstance(event, e.MoveFailed):
            self._view.note(
                f"group {event.samples[0].ordinal} stays on {event.source}, because {event.host} did not "
                f"take it over: {event.reason}"
            )
        elif isinstance(event, e.PromptFailed):
            self._view.note(f"group {event.ordinal} is dropped (failed_prompt): {event.message}")
        elif isinstance(event, e.RewardFailed):
            self._view.note(
                f"the scoring of group {event.ordinal} {event.outcome.replace('_', ' ')} (cause: "
                f"{event.cause}), so the group starts again or, at its second failure, is dropped: "
                f"{event.message}"
            )

    def _forget_trained(self) -> None:
        """Delete the trajectories of groups that no resume can train again.

        These groups were trained before the oldest kept checkpoint was written. The trajectories of the
        newest observe.keep_groups trained groups are kept for `areal-jax inspect`, unless all take more than
        observe.keep_bytes; the view notes it if so.
        """
        observe = self._config.observe
        kept = committed(self._checkpoints)
        is_needed_from = kept[0] if len(kept) >= self._config.trainer.keep_checkpoints else 0
        count = sum(len(ordinals) for _, ordinals in self._trained)
        sizes = self._journal.stored_bytes()
        taken, before = sum(sizes.values()), count
        while self._trained and self._trained[0][0] <= is_needed_from:
            ordinals = self._trained[0][1]
            if count - len(ordinals) < observe.keep_groups and taken <= observe.keep_bytes:
                break
            self._journal.forget(ordinals)
            self._trained.popleft()
            count -= len(ordinals)
            taken -= sum(sizes.get(ordinal, 0) for ordinal in ordinals)
        if count < min(before, observe.keep_groups) and not self._is_full:
            self._is_full = True
            self._view.note(
                f"the trajectories of {before - count} trained groups are deleted, so that the others take "
                f"no more than {observe.keep_bytes:,} bytes (observe.keep_bytes); those of {count} trained "
                "groups are left, and older ones will be deleted after each checkpoint"
            )
