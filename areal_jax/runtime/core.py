"""The core of every driver (the loop around the control plane): decide on events, record, send actions.

The core itself uses no file, thread, clock or device. The control plane answers each event with actions.
Events, actions and finished trajectories go into the journal in one transaction; only then are the actions
sent to trainer, hosts and reward pool. The local run, the controller of a cluster and the simulator share
this code; they differ in where events come from and where actions go.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

from areal_jax.config.tree import Config
from areal_jax.control import events as e
from areal_jax.control.events import Action, Event
from areal_jax.control.machine import ControlPlane
from areal_jax.control.reward_gate import Gates, paid
from areal_jax.episodes.open_episodes import EPISODE, Conversations, EpisodeLog, Workflows
from areal_jax.tasks.errors import PromptError
from areal_jax.tasks.scoring import MESSAGE_CHARS
from areal_jax.trajectories.codec import digest_of
from areal_jax.trajectories.journal import Entry, with_rewards
from areal_jax.types import ArealError, Completion, Group, Prompt, SampleId, Trajectory

REMEDIES = {
    "no_signal": "no_signal: all samples of such a group have the same reward; use easier or harder tasks, "
    "more samples in a group (algorithm.group_size), or algorithm.group_filter=none",
    "failed_reward": "failed_reward: the task's score raised an error, returned no number or exceeded "
    "runtime.reward_timeout_s; the run's log and report.html have the messages; correct the score",
    "rejected": "rejected: a workflow returned None for one of the group's samples",
    "failed_episode": "failed_episode: a workflow raised an error or exceeded its time; the run's log has "
    "the messages; correct the workflow",
    "tool_in_doubt": "tool_in_doubt: a process died during tool calls that may have had an effect; declare "
    "calls that may be repeated with is_idempotent=True",
    "workflow_diverged": "workflow_diverged: a workflow that ran again after a crash did not do the same "
    "again; let it use episode.random and episode.tool for whatever may differ",
    "agent_lost": "agent_lost: the process of an agent died; see that process's log",
    "failed_prompt": "failed_prompt: the task or the chat template raised an error for these prompts, or "
    "they are empty or too long; the run's log and report.html have the messages; correct the task or its "
    "data, or raise generation.length",
    "failed_sample": "failed_sample: hosts could not finish samples; the run's log has the reasons",
}
"""Reason for which groups are dropped -> what it means, and what to change."""

DURABLE = (e.CheckpointCommitted, e.VersionCommitted)
"""Events that the journal syncs to disk, so that they survive a power failure."""

Offer = Any
"""What a driver needs to move half-decoded samples: in one process the samples, else how to fetch them."""

Incoming = tuple[Event, Trajectory | Offer | None]
"""An event and its payload: a trajectory for a SampleFinished, an Offer for a SamplesOffered, else None."""


class Endpoints(Workflows, Protocol):
    """Interface that sends actions to hosts, reward pool, trainer and workflows.

    No call waits: the result arrives later as an event.
    """

    def command(self, action: e.HostCommand, payload: Any = None) -> None:
        """Send `action` to its host.

        `payload`: the prompt's tokens for a Dispatch, or None if the samples have a workflow; a TurnRequest
        for a Continue; an Offer for a Fetch.
        """
        ...

    def score(self, action: e.Score, prompt: Prompt, completions: Sequence[Completion]) -> None: ...

    def train(self, action: e.Train, groups: tuple[Group, ...]) -> None:
        """`groups`: with the rewards to train on, without the parts that a closed gate withholds."""
        ...

    def hold(self, action: e.Hold) -> None:
        """Tell the trainer what it waits for until its next batch."""
        ...


class Prompts(Protocol):
    """Looks up prompts by ordinal (place in the run's order); makes the completions that tasks score.

    Each method raises PromptError if the task's or the tokenizer's code fails for that prompt.
    """

    def prompt(self, ordinal: int) -> Prompt: ...

    def prompt_tokens(self, ordinal: int) -> tuple[int, ...]: ...

    def completion(self, trajectory: Trajectory) -> Completion: ...

    def has_workflow(self, ordinal: int) -> bool:
        """Return whether the prompt's samples are episodes, which a workflow conducts."""
        ...


class StepRows(Protocol):
    """Makes the metrics row of each step from the events since the last row."""

    def see(self, event: Event, actions: Iterable[Action]) -> None:
        """Count an event and the actions that the control plane returned for it, for the next row."""
        ...

    def make(
        self, step: int, groups: Sequence[Group], trained: dict[str, float], digest: str, gates: Gates = ()
    ) -> Mapping[str, Any]:
        """Return the metrics row of step `step`, in which `groups` were trained.

        `trained`: the metrics that the trainer reported; `digest`: a hash of the new parameters; `gates`: the
        gates of the batch, by which the rewards of `groups` were paid.
        """
        ...


class EventLog(EpisodeLog, Protocol):
    """The journal's methods that `DriverCore` uses; `trajectories.sqlite.SqliteQueue` documents them."""

    def append(self, entries: Sequence[Entry], durable: bool = False) -> int: ...

    def group(self, ordinal: int, attempt: int, size: int) -> tuple[Trajectory, ...]: ...


class DriverCore:
    """Lets the control plane decide on events, records the decisions, and sends the actions.

    Only one thread may use it. Even after an error, the journal contains every event that changed the control
    plane.
    """

    def __init__(
        self,
        config: Config,
        control: ControlPlane,
        journal: EventLog,
        prompts: Prompts,
        rows: StepRows,
        endpoints: Endpoints,
    ) -> None:
        self._config, self.control, self._journal = config, control, journal
        self._prompts, self._rows, self._endpoints = prompts, rows, endpoints
        # Payloads in flight: ordinal -> member -> trajectory of the group's newest attempt, with its reward
        # once scored. This is a cache: the journal has what is missing here after a restart.
        self._members: dict[int, dict[int, Trajectory]] = {}
        self._offers: dict[tuple[SampleId, ...], Offer] = {}
        """Samples -> their offer, until their Fetch is sent."""
        self._problem = ""
        """Message of the newest PromptFailed."""
        self._conversations = Conversations(journal, prompts.prompt_tokens, config.generation.sampling)

    def record(self, incoming: Iterable[Incoming]) -> list[Entry]:
        """Let the control plane decide on each event; write events and actions into the journal.

        `incoming`: each event with its payload. Returns the journaled entries. Raises ControlError
        for an event that the control plane refuses; earlier events are written all the same, so that state
        and journal always agree.
        """
        entries: list[Entry] = []
        try:
            for event, payload in incoming:
                is_stale = self.control.state.is_stale(event)
                # The trainer delivers a BatchTrained again if the controller died after journaling it and
                # before acknowledging it. Its groups are gone from the state, so no row can be made.
                if not (isinstance(event, e.BatchTrained) and is_stale):
                    entries += self._decided(event, payload, is_stale)
        finally:
            if entries:
                is_durable = any(isinstance(entry.event, DURABLE) for entry in entries)
                self._journal.append(entries, durable=is_durable)
        return entries

    def act(self, actions: Iterable[Action]) -> list[Incoming]:
        """Send the actions to the endpoints; return the events that follow, to be recorded next.

        These are a PromptFailed for each group that has an unusable prompt. Raises ArealError for an Abort:
        the control plane ends the run.
        """
        failed: list[Incoming] = []
        for action in actions:
            try:
                self._send(action)
            except PromptError as error:
                # A group that is trained is complete without its prompt, and cannot be dropped any more.
                if isinstance(action, e.Train):
                    raise
                self._problem = str(error)[:MESSAGE_CHARS]
                failed.append((e.PromptFailed(*_group_of(action), self._problem), None))
        return failed

    def _send(self, action: Action) -> None:
        match action:
            case e.Dispatch(samples) if self._prompts.has_workflow(samples[0].ordinal):
                self._endpoints.command(action)
                for sample in samples:
                    self._begin(sample)
            case e.Dispatch(samples):
                self._endpoints.command(action, self._prompts.prompt_tokens(samples[0].ordinal))
            case e.Continue(sample, _, turn):
                self._endpoints.command(action, self._conversations.request(sample, turn))
            case e.Answer(sample, _, turn):
                self._endpoints.answer(sample, turn, self._conversations.of(sample))
            case e.Call(sample, call):
                self._endpoints.call(sample, call)
            case e.Rerun(sample):
                self._begin(sample)
            case e.Fetch(samples):
                self._endpoints.command(action, self._offers.pop(samples))
            case e.Cancel() | e.Serve() | e.Move() | e.TakeBack():
                self._endpoints.command(action)
            case e.Score(ordinal, attempt):
                completions = [self._completion(t) for t in self._trajectories(ordinal, attempt)]
                self._endpoints.score(action, self._prompts.prompt(ordinal), completions)
            case e.Train():
                self._endpoints.train(action, self._groups(action))
            case e.Hold():
                self._endpoints.hold(action)
            case e.Drop(ordinal) | e.Reissue(ordinal):
                self._members.pop(ordinal, None)
                self._conversations.forget(ordinal)
                self._endpoints.end(ordinal)
            case e.Abort():
                raise ArealError(_aborted(action, self.control.state.dropped, self._problem))

    def _decided(self, event: Event, payload: Any, is_stale: bool) -> Iterator[Entry]:
        """Yields the entry of `event`, and that of its sample's end if the event ends an episode.

        `is_stale`: whether the event is late or a duplicate (`State.is_stale`).
        """
        yield self._decide(event, payload, is_stale)
        if isinstance(event, e.EpisodeEnded) and event.reward is not None and not is_stale:
            finished, whole = self._conversations.finished(event)
            yield self._decide(finished, whole, self.control.state.is_stale(finished))

    def _decide(self, event: Event, payload: Any, is_stale: bool) -> Entry:
        is_sampled = isinstance(event, e.SampleFinished | e.TurnFinished)
        trajectory: Trajectory | None = payload if is_sampled else None
        groups, gates = (), ()
        if is_stale:
            trajectory = None  # too late: it must not replace the payload that counts
        elif isinstance(event, EPISODE):
            event, trajectory = self._conversations.record(event, trajectory)
        elif trajectory is not None:
            sample = trajectory.sample
            event = replace(event, digest=digest_of(trajectory))  # pyright: ignore[reportCallIssue]
            self._members.setdefault(sample.ordinal, {})[sample.member] = trajectory
        elif isinstance(event, e.RewardScored):
            members = self._trajectories(event.ordinal, event.attempt)
            self._members[event.ordinal] = dict(enumerate(with_rewards(members, event)))
        elif isinstance(event, e.BatchTrained) and (batch := self.control.state.training) is not None:
            groups, gates = self._groups(batch), batch.gates
        actions = self.control.handle(event)
        if isinstance(event, e.RunResumed):
            self._conversations.restore(self._is_live)
        if isinstance(event, e.BatchTrained):
            row = self._rows.make(event.step, groups, event.metrics, event.digest, gates)
            event = replace(event, metrics=row)
            for ordinal in event.ordinals:
                del self._members[ordinal]
                self._conversations.forget(ordinal)
        self._rows.see(event, actions)
        self._offers |= {action.samples: payload for action in actions if isinstance(action, e.Fetch)}
        return Entry(event, actions, trajectory)

    def _begin(self, sample: SampleId) -> None:
        prompt = self._prompts.prompt(sample.ordinal)
        self._endpoints.begin(sample, prompt, self._conversations.of(sample))

    def _is_live(self, sample: SampleId) -> bool:
        """Whether the sample's group is neither trained nor dropped, and was not restarted since."""
        group = self.control.state.groups.get(sample.ordinal)
        return group is not None and group.attempt == sample.attempt

    def _completion(self, trajectory: Trajectory) -> Completion:
        return self._conversations.rewarded(trajectory.sample, self._prompts.completion(trajectory))

    def _groups(self, batch: e.Train) -> tuple[Group, ...]:
        """Returns the batch's groups with the rewards that are trained on."""
        groups = [
            Group(ordinal, self._prompts.prompt(ordinal), self._trajectories(ordinal, attempt))
            for ordinal, attempt in zip(batch.ordinals, batch.attempts, strict=True)
        ]
        return paid(groups, batch.gates)

    def _trajectories(self, ordinal: int, attempt: int) -> tuple[Trajectory, ...]:
        """Returns the trajectories of a group, from memory or, after a restart, from the journal."""
        size = self._config.algorithm.group_size
        if len(self._members.get(ordinal, {})) < size:
            self._members[ordinal] = dict(enumerate(self._journal.group(ordinal, attempt, size)))
        return tuple(self._members[ordinal][member] for member in range(size))


def _group_of(action: Any) -> tuple[int, int]:
    """Returns (ordinal, attempt) of the group of a command to score it or to begin its samples."""
    if isinstance(action, e.Score):
        return action.ordinal, action.attempt
    sample = action.samples[0] if isinstance(action, e.Dispatch) else action.sample
    return sample.ordinal, sample.attempt


def _aborted(abort: e.Abort, dropped: Mapping[str, int], problem: str) -> str:
    """Returns the message of a run that drops too many groups, or too many in a row.

    `dropped`: reason -> number of dropped groups of the whole run; `problem`: of the newest unusable prompt.
    """
    row = dict(abort.dropped)
    named = lambda counts: ", ".join(f"{count} {reason}" for reason, count in counts.items())  # noqa: E731
    remedies = ". ".join(REMEDIES[reason] for reason in row if reason in REMEDIES)
    count = sum(row.values())
    cause = f"{count} groups in a row were dropped ({named(row)}), so that no batch can be formed"
    if abort.prompts:
        cause = (
            f"{count} of the newest {abort.prompts} prompts cannot be used, more than "
            f"control.max_failed_prompts allows. The last one: {problem}"
        )
    return (
        f"the run ends, because {cause}; drops of the whole run: {named(dropped)}. {remedies}. `areal-jax "
        "inspect RUN_FOLDER ORDINAL/MEMBER` shows a sample. Change tasks or settings in a new run; or "
        "correct the cause, and `areal-jax resume RUN_FOLDER` continues this run"
    )
