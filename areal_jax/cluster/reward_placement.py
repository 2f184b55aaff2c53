"""Which reward process scores a group, and which one conducts the workflow of a sample.

A lost reward process loses nothing that counts: another one scores its groups, and runs its workflows again.
What a workflow did is answered from its conversation, which the controller has.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

from areal_jax.control import events as e
from areal_jax.episodes.conversation import Conversation
from areal_jax.trajectories.codec import encode
from areal_jax.types import Completion, Reward, SampleId

SendCommand = Callable[[str, "e.Score | e.WorkflowCommand | e.Drop", Any], None]
"""Queues a command with its payload for the reward process with this mailbox."""

WORKFLOW_EVENTS = (e.TurnAdded, e.ToolStarted, e.ToolReturned, e.EpisodeEnded, e.EpisodeFailed)
"""The events that workflows emit."""


K = TypeVar("K")
W = TypeVar("W")


class _Placed(ABC, Generic[K, W]):
    """Pieces of work by key, each with the mailbox of its reward process, or "" while there is none."""

    def __init__(self, post: SendCommand, most: float = math.inf) -> None:
        """`most`: number of pieces that a reward process gets at once; others wait."""
        self._post, self._most = post, most
        self._placed: dict[K, str] = {}
        self._work: dict[K, W] = {}

    def forget(self, key: K) -> None:
        """Drops a piece of work that is done."""
        self._placed.pop(key, None)
        self._work.pop(key, None)

    def lose(self, mailbox: str) -> None:
        """Takes its work from a lost process."""
        self._placed |= {key: "" for key, placed in self._placed.items() if placed == mailbox}

    def clear(self) -> None:
        """Drops all work: in a new epoch, what is not done begins again."""
        self._placed.clear()
        self._work.clear()

    def assign(self, ready: Sequence[str]) -> None:
        """Gives each piece without a live reward process to the one with the fewest, if it has room.

        `ready`: the mailboxes of the live ones.
        """
        load = Counter(dict.fromkeys(ready, 0))
        load.update(mailbox for mailbox in self._placed.values() if mailbox in load)
        for key, mailbox in self._placed.items():
            if mailbox in load:
                continue
            fewest = min(load, key=lambda each: load[each], default=None)
            if fewest is None or load[fewest] >= self._most:
                return
            load[fewest] += 1
            self._placed[key] = fewest
            self._post(fewest, *self._command(key, self._work[key]))

    @abstractmethod
    def _command(self, key: K, work: W) -> tuple[e.Score | e.Rerun, Any]:
        """Returns the command that makes a reward process do the work, and its payload."""


class PlacedGroups(_Placed[tuple[int, int], tuple[e.Score, Any]]):
    """The groups, by (ordinal, attempt), that are being scored or wait for a reward process."""

    def score(self, action: e.Score, completions: Sequence[Completion]) -> None:
        payload = [
            (one.text, one.tokens, one.stop_reason, one.pieces, one.reward and _plain(one.reward))
            for one in completions
        ]
        group = action.ordinal, action.attempt
        self._placed[group], self._work[group] = "", (action, payload)

    def _command(self, key: tuple[int, int], work: tuple[e.Score, Any]) -> tuple[e.Score, Any]:
        return work


def _plain(reward: Reward) -> list[Any]:
    return [reward.value, dict(reward.parts), reward.note]


class PlacedWorkflows(_Placed[SampleId, Conversation]):
    """The workflows of all open samples, which reward processes conduct."""

    def begin(self, sample: SampleId, conversation: Conversation) -> None:
        self._placed.setdefault(sample, "")
        self._work[sample] = conversation

    def answer(self, sample: SampleId, turn: int, conversation: Conversation) -> None:
        # A workflow without a reward process gets the turn with its conversation, once it has one.
        if mailbox := self._placed.get(sample):
            ended = conversation.turns[turn][1]
            assert ended is not None
            payload = [e.to_wire(ended), encode(conversation.paths[turn])]
            self._post(mailbox, e.Answer(sample, 0, turn), payload)

    def call(self, sample: SampleId, call: int) -> None:
        if mailbox := self._placed.get(sample):
            self._post(mailbox, e.Call(sample, call), None)

    def end(self, ordinal: int) -> None:
        gone = [sample for sample in self._placed if sample.ordinal == ordinal]
        for mailbox in {self._placed[sample] for sample in gone} - {""}:
            self._post(mailbox, e.Drop(ordinal, ""), None)
        for sample in gone:
            self.forget(sample)

    def conducts(self, mailbox: str, sample: SampleId) -> bool:
        return self._placed.get(sample) == mailbox

    def _command(self, key: SampleId, work: Conversation) -> tuple[e.Rerun, Any]:
        # After a lost process, the conversation answers what the workflow did there.
        return e.Rerun(key), work.to_wire()
