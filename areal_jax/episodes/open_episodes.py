"""The conversations of a run that are under way, and the interface to the workflows that conduct them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any, Protocol

from areal_jax.control import events as e
from areal_jax.control.events import Event
from areal_jax.episodes.conversation import Conversation, TurnRequest
from areal_jax.trajectories.codec import digest_of
from areal_jax.trajectories.paths import spans_of
from areal_jax.types import Completion, Prompt, Reward, SampleId, Sampling, Trajectory

EPISODE = (e.TurnAdded, e.TurnFinished, e.ToolStarted, e.ToolReturned, e.EpisodeEnded)
"""Events of a sample with a workflow, which `Conversations` records."""


class Workflows(Protocol):
    """Interface to the workflows of a run. No call waits: what a workflow does arrives later as an event."""

    def begin(self, sample: SampleId, prompt: Prompt, conversation: Conversation) -> None:
        """Start the workflow of a sample, or do nothing if it runs already.

        After a crash it runs again from its start, and `conversation` answers what it did before.
        """
        ...

    def answer(self, sample: SampleId, turn: int, conversation: Conversation) -> None:
        """Give the workflow the turn that it waits for, which is the last one of `conversation`."""
        ...

    def call(self, sample: SampleId, call: int) -> None:
        """Let the workflow begin the tool call with this number."""
        ...

    def end(self, ordinal: int) -> None:
        """Stop the workflows of a group, because the group was dropped or starts again."""
        ...


class EpisodeLog(Protocol):
    """The journal's methods that `Conversations` uses; `trajectories.sqlite.SqliteQueue` documents them."""

    def live_events(self, kind: str) -> Iterable[Any]: ...

    def trajectory(self, sample: SampleId) -> Trajectory: ...


class Conversations:
    """The conversations of all open samples that have a workflow, built from their events."""

    def __init__(
        self, journal: EpisodeLog | None, prompt_tokens: Callable[[int], tuple[int, ...]], sampling: Sampling
    ) -> None:
        """`journal`: where `restore` reads; None without a run.

        `prompt_tokens(ordinal)`: the tokens of a prompt; `sampling`: the run's sampler settings.
        """
        self._journal, self._prompt_tokens, self._sampling = journal, prompt_tokens, sampling
        self._open: dict[SampleId, Conversation] = {}

    def of(self, sample: SampleId) -> Conversation:
        if sample not in self._open:
            self._open[sample] = Conversation(self._prompt_tokens(sample.ordinal))
        return self._open[sample]

    def request(self, sample: SampleId, turn: int) -> TurnRequest:
        return self._open[sample].request(turn, self._sampling)

    def record(self, event: Event, payload: Trajectory | None) -> tuple[Event, Trajectory | None]:
        """Records an event that is not stale; returns the event and trajectory to journal.

        A TurnFinished gets its digest, of the path up to its end, and the sample's trajectory so far.
        """
        match event:
            case e.TurnAdded(sample):
                self.of(sample).add(event)
            case e.TurnFinished(sample, _, turn):
                assert payload is not None
                path = self.of(sample).joined(turn, payload)
                event = replace(event, digest=digest_of(path))
                self.of(sample).finish(event, path)
                payload = self.of(sample).so_far
            case e.ToolStarted(sample, call):
                self.of(sample).calls.setdefault(call, (event, None))
            case e.ToolReturned(sample, call):
                self.of(sample).calls[call] = self.of(sample).calls[call][0], event
            case e.EpisodeEnded(sample, reward):
                self.of(sample).ended = event
                payload = None if reward is None else self.of(sample).whole(event.stop_reason)
        return event, payload

    def finished(self, event: e.EpisodeEnded) -> tuple[e.SampleFinished, Trajectory]:
        """Returns the end of an ended episode's sample, without its digest, and the trajectory."""
        conversation = self.of(event.sample)
        whole = conversation.whole(event.stop_reason)
        turns = [end for _, end in conversation.turns if end is not None and end.turn in conversation.paths]
        finished = e.SampleFinished(
            sample=event.sample,
            host=turns[-1].host,
            spans=spans_of(whole),
            stop_reason=event.stop_reason,
            interruptions=whole.interruptions,
            rebuilds=tuple(place for turn in turns for place in turn.rebuilds),
        )
        return finished, whole

    def rewarded(self, sample: SampleId, completion: Completion) -> Completion:
        """Returns the completion with the reward that the sample's workflow returned, if it has one."""
        ended = self._open[sample].ended if sample in self._open else None
        if ended is None or ended.reward is None:
            return completion
        return replace(completion, reward=Reward(ended.reward, dict(ended.parts), ended.note))

    def forget(self, ordinal: int) -> None:
        """Drops the conversations of a group, which was trained, dropped or restarted."""
        self._open = {one: kept for one, kept in self._open.items() if one.ordinal != ordinal}

    def restore(self, is_live: Callable[[SampleId], bool]) -> None:
        """Reads from the journal what the samples did for which `is_live(sample)`, after a restart."""
        self._open.clear()
        assert self._journal is not None
        # A TurnFinished that came too late, such as from a lost host, has no digest.
        finished: Mapping[tuple[SampleId, int], e.TurnFinished] = {
            (one.sample, one.turn): one for one in self._journal.live_events("TurnFinished") if one.digest
        }
        for asked in self._journal.live_events("TurnAdded"):
            if is_live(asked.sample) and asked.turn == len(self.of(asked.sample).turns):
                end = finished.get((asked.sample, asked.turn))
                self.of(asked.sample).turns.append((asked, end))
        returned = {(one.sample, one.call): one for one in self._journal.live_events("ToolReturned")}
        for begun in self._journal.live_events("ToolStarted"):
            if is_live(begun.sample):
                self.of(begun.sample).calls[begun.call] = begun, returned.get((begun.sample, begun.call))
        for ended in self._journal.live_events("EpisodeEnded"):
            if is_live(ended.sample) and self.of(ended.sample).ended is None:
                self.of(ended.sample).ended = ended
        for sample, one in self._open.items():
            if any(end is not None for _, end in one.turns):
                one.restore(self._journal.trajectory(sample))
