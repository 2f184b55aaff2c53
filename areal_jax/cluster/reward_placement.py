"""Which reward process scores a group, and which one conducts the workflow of a sample.

A lost reward process loses nothing that counts: another one scores its groups, and runs its workflows again.
What a workflow did is answered from its conversation, which the controller has.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from areal_jax.control import events as e
from areal_jax.episodes.conversation import Conversation
from areal_jax.trajectories.codec import encode
from areal_jax.types import Completion, Reward, SampleId

SendCommand = Callable[[str, "e.Score | e.WorkflowCommand | e.Drop", Any], None]
"""Queues a command with its payload for the reward process with this mailbox."""

WORKFLOW_EVENTS = (e.TurnAdded, e.ToolStarted, e.ToolReturned, e.EpisodeEnded, e.EpisodeFailed)
"""The events that workflows emit."""


class PlacedGroups:
    """The groups that are being scored, or wait for a reward process."""

    def __init__(self, post: SendCommand, most: int) -> None:
        """`most`: number of groups that a reward process gets at once; others wait."""
        self._post, self._most = post, most
        self._placed: dict[tuple[int, int], tuple[str, e.Score, Any]] = {}
        """(ordinal, attempt) -> mailbox of its reward process or "", the command and its payload."""

    def score(self, action: e.Score, completions: Sequence[Completion]) -> None:
        payload = [
            (one.text, one.tokens, one.stop_reason, one.pieces, one.reward and _plain(one.reward))
            for one in completions
        ]
        self._placed[action.ordinal, action.attempt] = "", action, payload

    def scored(self, ordinal: int, attempt: int) -> None:
        self._placed.pop((ordinal, attempt), None)

    def lose(self, mailbox: str) -> None:
        """Takes the groups of a lost process from it."""
        lost = {group: rest for group, (placed, *rest) in self._placed.items() if placed == mailbox}
        self._placed |= {group: ("", action, payload) for group, (action, payload) in lost.items()}

    def clear(self) -> None:
        self._placed.clear()

    def assign(self, ready: Sequence[str]) -> None:
        """Gives each group without a live reward process to the one with the fewest groups, if it has room.

        `ready`: the mailboxes of the live ones.
        """
        load = dict.fromkeys(ready, 0)
        for mailbox, _, _ in self._placed.values():
            if mailbox in load:
                load[mailbox] += 1
        for group, (mailbox, action, payload) in self._placed.items():
            if mailbox in load:
                continue
            free = min(load, key=lambda each: load[each], default=None)
            if free is None or load[free] >= self._most:
                return
            load[free] += 1
            self._placed[group] = free, action, payload
            self._post(free, action, payload)


def _plain(reward: Reward) -> list[Any]:
    return [reward.value, dict(reward.parts), reward.note]


class PlacedWorkflows:
    """The workflows of all open samples, which reward processes conduct."""

    def __init__(self, post: SendCommand) -> None:
        self._post = post
        self._placed: dict[SampleId, str] = {}
        """Sample -> mailbox of its reward process; "" while there is none."""
        self._talks: dict[SampleId, Conversation] = {}

    def begin(self, sample: SampleId, conversation: Conversation) -> None:
        self._placed.setdefault(sample, "")
        self._talks[sample] = conversation

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

    def forget(self, sample: SampleId) -> None:
        """Drops a workflow that has ended."""
        self._placed.pop(sample, None)
        self._talks.pop(sample, None)

    def clear(self) -> None:
        """Drops all workflows: in a new epoch, those of open samples begin again."""
        self._placed.clear()
        self._talks.clear()

    def lose(self, mailbox: str) -> None:
        """Takes the workflows of a lost process from it."""
        self._placed |= {sample: "" for sample, placed in self._placed.items() if placed == mailbox}

    def conducts(self, mailbox: str, sample: SampleId) -> bool:
        return self._placed.get(sample) == mailbox

    def assign(self, ready: Sequence[str]) -> None:
        """Gives each workflow without a live reward process to the one with the fewest workflows.

        `ready`: the mailboxes of the live ones.
        """
        load = Counter(dict.fromkeys(ready, 0))
        load.update(mailbox for mailbox in self._placed.values() if mailbox in load)
        for sample, mailbox in self._placed.items():
            if mailbox in load or not load:
                continue
            # After a lost process, the conversation answers what the workflow did there.
            self._placed[sample] = fewest = min(load, key=lambda each: load[each])
            load[fewest] += 1
            self._post(fewest, e.Rerun(sample), self._talks[sample].to_wire())
