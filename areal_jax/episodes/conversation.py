"""The tokens of one sample with a workflow: the prompt, the sampled turns, and what the workflow added."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np

from areal_jax.control.events import (
    EVENTS,
    EpisodeEnded,
    ToolReturned,
    ToolStarted,
    TurnAdded,
    TurnFinished,
    from_wire,
)
from areal_jax.control.events import to_wire as wire
from areal_jax.trajectories.codec import decode, encode
from areal_jax.types import Sampling, Trajectory


class TurnRequest(NamedTuple):
    """What a host needs to decode a turn."""

    tokens: tuple[int, ...]
    """The prompt, all turns so far, and what was added to them."""
    sampling: Sampling


@dataclass
class Conversation:
    """One sample's episode, as its events tell it.

    Turns form a tree: each continues the turn before it, unless its TurnAdded names another one. The sample
    is trained on the path that leads to its last turn.
    """

    prompt: tuple[int, ...]
    turns: list[tuple[TurnAdded, TurnFinished | None]] = field(default_factory=list)
    """For each turn, what the workflow asked for, and how the turn ended."""
    calls: dict[int, tuple[ToolStarted, ToolReturned | None]] = field(default_factory=dict)
    """Number of a tool call -> how it began and ended."""
    paths: dict[int, Trajectory] = field(default_factory=dict)
    """Number of a turn -> the trajectory of the path up to its end."""
    ended: EpisodeEnded | None = None

    @property
    def last(self) -> Trajectory | None:
        """The trajectory up to the end of the turn that ended last; None before the first one has ended."""
        return self.paths[max(self.paths)] if self.paths else None

    def to_wire(self) -> list[Any]:
        """Returns the conversation as plain values for msgpack, without `ended` and with its last path."""
        pairs = [
            [[wire(one), end and wire(end)] for one, end in pairs]
            for pairs in (self.turns, self.calls.values())
        ]
        return [self.prompt, *pairs, None if self.last is None else encode(self.last)]

    @classmethod
    def from_wire(cls, plain: Sequence[Any]) -> Conversation:
        """Returns the conversation that `to_wire` turned into `plain`."""
        prompt, turns, calls, last = plain
        record = lambda one: one and from_wire(*one, kinds=EVENTS)  # noqa: E731
        begun = [(record(one), record(end)) for one, end in calls]
        own = [(record(one), record(end)) for one, end in turns]
        talk = cls(tuple(prompt), own, {one.call: (one, end) for one, end in begun})
        if last is not None:
            talk.restore(decode(last))
        return talk

    def add(self, event: TurnAdded) -> None:
        self.turns.append((event, None))

    def request(self, turn: int, base: Sampling) -> TurnRequest:
        """Returns turn number `turn`, which has not ended; `base`: the run's sampler settings."""
        asked, before = self.turns[turn][0], self._before(turn)
        past = () if asked.after == -1 else self.prompt
        past = past if before is None else tuple(before.tokens.tolist())
        sampling = replace(base, max_tokens=asked.max_tokens, stop=asked.stop)
        return TurnRequest(past + asked.tokens, sampling)

    def joined(self, turn: int, sampled: Trajectory) -> Trajectory:
        """Returns the path's trajectory up to the end of turn number `turn`, of which a host made `sampled`.

        To the host, all tokens before the turn were a prompt.
        """
        before = self._before(turn)
        turn_ids = np.where(sampled.loss_mask, turn, -1).astype(np.int32)
        if before is None:
            return replace(sampled, turn_ids=turn_ids)
        n = len(before.tokens)
        own = {
            name: np.concatenate([getattr(before, name), after[n:]])
            for name, after in {
                "loss_mask": sampled.loss_mask,
                "behavior_logp": sampled.behavior_logp,
                "versions": sampled.versions,
                "turn_ids": turn_ids,
                "support": sampled.support,
            }.items()
            if after is not None
        }
        return replace(sampled, **own, interruptions=before.interruptions + sampled.interruptions)

    def finish(self, event: TurnFinished, path: Trajectory) -> None:
        """Records the end of a turn, with the trajectory of its path up to there."""
        self.turns[event.turn] = self.turns[event.turn][0], event
        self.paths[event.turn] = path

    def restore(self, last: Trajectory) -> None:
        """Records the turns of a stored path, `last`, which have ended; other paths are not stored.

        The path may go on after them, in a journal of which a branch has the beginning.
        """
        on_path = set(last.turn_ids.tolist())
        for turn, (_, event) in enumerate(self.turns):
            if event is not None and turn in on_path:
                self.paths[turn] = up_to(last, turn, event.stop_reason)

    def whole(self, stop_reason: str) -> Trajectory:
        """Returns the trajectory of an episode that ended by `stop_reason` after its last turn."""
        assert self.last is not None
        return replace(self.last, stop_reason=stop_reason)

    def _before(self, turn: int) -> Trajectory | None:
        """The path that turn number `turn` continues; None if it follows the prompt, or nothing."""
        after = self.turns[turn][0].after
        after = turn - 1 if after is None else after
        return self.paths[after] if after >= 0 else None


def up_to(trajectory: Trajectory, turn: int, stop_reason: str) -> Trajectory:
    """Returns the part of a trajectory that ends with turn number `turn`, which ended by `stop_reason`."""
    end = int(np.flatnonzero(trajectory.turn_ids == turn)[-1]) + 1
    cut: dict[str, np.ndarray] = {
        name: values[:end]
        for name in ("tokens", "loss_mask", "behavior_logp", "versions", "turn_ids", "support")
        if (values := getattr(trajectory, name)) is not None
    }
    return replace(trajectory, **cut, stop_reason=stop_reason)
