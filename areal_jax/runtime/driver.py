"""Decide, write down, act: the loop that turns events into actions, whoever they come from.

The control plane answers the events; events, payloads and answers go into the journal in one transaction;
only then do the answers reach trainer, hosts and reward pool. Threads of one process and processes of a
cluster differ in how events come and in where actions go, and in nothing else.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Protocol

from areal_jax.control import events as e
from areal_jax.control.events import Action, Event
from areal_jax.control.machine import ControlPlane
from areal_jax.generation.rollout import completion_of, with_rewards
from areal_jax.observe.live import View
from areal_jax.observe.metrics import MetricsWriter
from areal_jax.observe.waits import Timeline
from areal_jax.runtime.assembly import Inputs
from areal_jax.runtime.rows import RowMaker
from areal_jax.trainer.checkpoint import committed, prune
from areal_jax.trajectories.journal import Entry, Journal
from areal_jax.types import ArealError, Completion, Group, Prompt, Trajectory

MOST_DROPS = 50
"""Batches' worth of groups that may be dropped between two trained batches before the run gives up."""

DURABLE = (e.CheckpointCommitted, e.VersionCommitted)
"""Events that also have to outlive a power cut."""

Told = tuple[Event, Trajectory | None]
"""An event, and the payload it announces."""


class Endpoints(Protocol):
    """Where actions go. No call waits for what it asks."""

    def dispatch(self, action: e.Dispatch, prompt: tuple[int, ...]) -> None: ...

    def cancel(self, action: e.Cancel) -> None: ...

    def score(self, action: e.Score, prompt: Prompt, completions: Sequence[Completion]) -> None: ...

    def train(self, action: e.Train, groups: tuple[Group, ...]) -> None: ...


class Driver:
    """One thread owns it. Whatever it raises, the journal holds every event that had an effect."""

    def __init__(
        self,
        inputs: Inputs,
        control: ControlPlane,
        journal: Journal,
        folder: Path,
        view: View,
        metrics: MetricsWriter,
        timeline: Timeline,
        rows: RowMaker,
        endpoints: Endpoints,
        trained: Iterable[tuple[int, tuple[int, ...]]] = (),
    ) -> None:
        """`trained`: (version, ordinals) of the batches before this process."""
        self._inputs, self._config = inputs, inputs.config
        self.control, self._journal, self._checkpoints = control, journal, folder / "checkpoints"
        self._view, self._metrics, self._timeline, self._rows = view, metrics, timeline, rows
        self._endpoints = endpoints
        self._members: dict[tuple[int, int], dict[int, Trajectory]] = {}
        self._groups: dict[int, Group] = {}
        self._trained = deque(trained)
        self._drops = 0

    def handle(self, told: Sequence[Told]) -> None:
        """Decide, write down, act: in this order."""
        for action in self.record(told):
            self._act(action)
        self._require_progress()

    def ask_again(self) -> None:
        """For the batch under way, of a trainer that came back without it."""
        if self.control.training is not None:
            self._act(self.control.training)

    def record(self, told: Sequence[Told]) -> list[Action]:
        """Let the control plane answer, and write down what it was told with its answers.

        Where it refuses an event, those before it are still written: its state and the journal stay one.
        """
        entries: list[Entry] = []
        try:
            for event, trajectory in told:
                if not self._is_known(event):
                    entries.append(self._decide(event, trajectory))
        finally:
            if entries:
                is_durable = any(isinstance(entry.event, DURABLE) for entry in entries)
                self._journal.append(entries, durable=is_durable)
        for entry in entries:
            self._note(entry.event)
        return [action for entry in entries for action in entry.actions]

    def _is_known(self, event: Event) -> bool:
        """Told twice: by a trainer whose word was journaled, but not acknowledged before its hearer ended."""
        return isinstance(event, e.BatchTrained) and event.step < self.control.trained_version

    def _decide(self, event: Event, trajectory: Trajectory | None) -> Entry:
        if isinstance(event, e.SampleFinished) and not self.control.awaits(event.sample, event.host):
            trajectory = None  # too late: its payload must not stand in for the one that counts
        if trajectory is not None:
            sample = trajectory.sample
            members = self._members.setdefault((sample.ordinal, sample.attempt), {})
            members.setdefault(sample.member, trajectory)
        if isinstance(event, e.RewardScored) and self.control.awaits_reward(event.ordinal, event.attempt):
            self._reward(event)
        if isinstance(event, e.BatchTrained):
            event = self._with_row(event)
        actions = self.control.handle(event)
        self._rows.see(event, actions)
        self._drops += sum(isinstance(action, e.Drop) for action in actions)
        return Entry(event, actions, trajectory)

    def _with_row(self, event: e.BatchTrained) -> e.BatchTrained:
        """Its groups are in memory, but where another controller asked for the batch."""
        asked = self.control.training
        attempts = dict(zip(asked.ordinals, asked.attempts, strict=True)) if asked is not None else {}
        groups = [self._group(ordinal, attempts[ordinal]) for ordinal in event.ordinals]
        return replace(event, metrics=self._rows.make(event.step, groups, event.metrics, event.digest))

    def _note(self, event: Event) -> None:
        """What follows once an event is written: rows, snapshots, payloads that may go."""
        if isinstance(event, e.BatchTrained):
            self._metrics.write(event.metrics)
            self._view.show(event.metrics)
            self._timeline.flush()
            for ordinal in event.ordinals:
                del self._groups[ordinal]
            self._trained.append((event.step + 1, event.ordinals))
            self._drops = 0
        elif isinstance(event, e.CheckpointCommitted):
            self._journal.snapshot(self._journal.last_seq, self.control.snapshot())
            prune(self._checkpoints, event.version, self._config.trainer.keep_checkpoints)
            self._forget_trained()
        elif isinstance(event, e.SampleFailed):
            self._view.note(f"sample {event.sample.ordinal}/{event.sample.member} failed: {event.reason}")
        elif isinstance(event, e.RewardFailed):
            self._view.note(
                f"group {event.ordinal}: reward {event.outcome.replace('_', ' ')}: {event.message}"
            )

    def _forget_trained(self) -> None:
        """Payloads stay from the oldest checkpoint on, and those of the newest observe.keep_groups groups."""
        kept = committed(self._checkpoints)
        is_needed_from = kept[0] if len(kept) >= self._config.trainer.keep_checkpoints else 0
        count = sum(len(ordinals) for _, ordinals in self._trained)
        while self._trained and self._trained[0][0] <= is_needed_from:
            ordinals = self._trained[0][1]
            if count - len(ordinals) < self._config.observe.keep_groups:
                break
            self._journal.forget(ordinals)
            self._trained.popleft()
            count -= len(ordinals)

    def _require_progress(self) -> None:
        """Replacements of dropped groups are admitted for ever: a run that only drops has to stop."""
        if self._drops > MOST_DROPS * self._config.trainer.batch_size:
            reasons = ", ".join(f"{n} {reason}" for reason, n in self.control.dropped.items())
            raise ArealError(
                f"{self._drops} groups were dropped since the last trained batch ({reasons} in all): "
                "nothing is left to "
                "learn from. Look at the rewards in logs/ and with `areal-jax inspect`; no_signal: use an "
                "easier task or algorithm.group_filter=none; failed_reward: mend the task's score"
            )

    # --- groups ---------------------------------------------------------------------------------------------

    def _trajectories(self, ordinal: int, attempt: int) -> tuple[Trajectory, ...]:
        """A group's members, from memory or, after a resume, from the journal."""
        size = self._config.algorithm.group_size
        members = self._members.get((ordinal, attempt), {})
        if len(members) == size:
            return tuple(members[i] for i in range(size))
        return self._journal.group(ordinal, attempt, size)

    def _reward(self, event: e.RewardScored) -> None:
        members = self._trajectories(event.ordinal, event.attempt)
        self._members.pop((event.ordinal, event.attempt), None)
        prompt = self._inputs.prompts.prompt(event.ordinal)
        self._groups[event.ordinal] = Group(event.ordinal, prompt, with_rewards(members, event))

    def _group(self, ordinal: int, attempt: int) -> Group:
        if ordinal not in self._groups:
            prompt = self._inputs.prompts.prompt(ordinal)
            self._groups[ordinal] = Group(ordinal, prompt, self._trajectories(ordinal, attempt))
        return self._groups[ordinal]

    # --- actions --------------------------------------------------------------------------------------------

    def _act(self, action: Action) -> None:
        match action:
            case e.Dispatch(samples):
                self._endpoints.dispatch(action, self._inputs.prompt_tokens(samples[0].ordinal))
            case e.Cancel():
                self._endpoints.cancel(action)
            case e.Score(ordinal, attempt):
                tokenizer = self._inputs.model.tokenizer
                completions = [completion_of(t, tokenizer) for t in self._trajectories(ordinal, attempt)]
                self._endpoints.score(action, self._inputs.prompts.prompt(ordinal), completions)
            case e.Train(_, ordinals, attempts):
                groups = [self._group(o, a) for o, a in zip(ordinals, attempts, strict=True)]
                self._endpoints.train(action, tuple(groups))
            case e.Drop(ordinal) | e.Reissue(ordinal):
                self._groups.pop(ordinal, None)
                for key in [key for key in self._members if key[0] == ordinal]:
                    del self._members[key]
            case e.Finish():
                pass
