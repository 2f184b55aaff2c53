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
from areal_jax.trajectories.codec import ARRAYS, decode, encode
from areal_jax.trajectories.paths import paths_of
from areal_jax.types import NOT_SAMPLED, Sampling, Trajectory


class TurnRequest(NamedTuple):
    """What a host needs to decode a turn."""

    tokens: tuple[int, ...]
    """The prompt, all turns so far, and what was added to them."""
    sampling: Sampling


@dataclass
class Conversation:
    """One sample's episode, as its events tell it.

    Turns form a tree: each continues the turn before it, unless its TurnAdded names another one. The sample
    is trained on all paths to turns that no other one continues.
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
    def so_far(self) -> Trajectory | None:
        """The path to the turn that ended last, with the other paths as branches; None before the first turn.

        A branch has a loss for the turns that are on no earlier path. `interruptions` are those of all turns.
        """
        if not self.paths:
            return None
        main = self.paths[max(self.paths)]
        continued = {self._after(turn) for turn in self.paths}
        leaves = [turn for turn in sorted(self.paths)[:-1] if turn not in continued]
        if not leaves:
            return main
        owned, branches = set(main.turn_ids.tolist()), []
        for path in map(self.paths.__getitem__, leaves):
            branches.append(_without_loss(path, np.isin(path.turn_ids, list(owned))))
            owned |= set(path.turn_ids.tolist())
        ends = [end for turn, (_, end) in enumerate(self.turns) if end is not None and turn in self.paths]
        interruptions = sum(end.interruptions for end in ends)
        return replace(main, branches=tuple(branches), interruptions=interruptions)

    def to_wire(self) -> list[Any]:
        """Returns the conversation as plain values for msgpack, without `ended` and with its paths."""
        pairs = [
            [[wire(one), end and wire(end)] for one, end in pairs]
            for pairs in (self.turns, self.calls.values())
        ]
        return [self.prompt, *pairs, None if self.so_far is None else encode(self.so_far)]

    @classmethod
    def from_wire(cls, plain: Sequence[Any]) -> Conversation:
        """Returns the conversation that `to_wire` turned into `plain`."""
        prompt, turns, calls, so_far = plain
        record = lambda one: one and from_wire(*one, kinds=EVENTS)  # noqa: E731
        begun = [(record(one), record(end)) for one, end in calls]
        own = [(record(one), record(end)) for one, end in turns]
        talk = cls(tuple(prompt), own, {one.call: (one, end) for one, end in begun})
        if so_far is not None:
            talk.restore(decode(so_far))
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

    def restore(self, stored: Trajectory) -> None:
        """Records the paths of a sample's stored trajectory, as `so_far` or `whole` returned it."""
        self.paths = self.stored_paths(stored)

    def stored_paths(self, stored: Trajectory) -> dict[int, Trajectory]:
        """Returns number of a turn that has ended -> path up to its end, from a sample's stored trajectory.

        The stored paths may go on after these turns, in a journal of which a branch has the beginning. Turns
        that are on none of them are left out: older versions stored only the path to the last turn.
        """
        found: dict[int, Trajectory] = {}
        for turn, (_, event) in enumerate(self.turns):
            after, owner = self._after(turn), _owner(stored, turn)
            if event is None or owner is None or (after >= 0 and after not in found):
                continue
            before = found.get(after)
            start = 0 if before is None else len(before.tokens)
            end = int(np.flatnonzero(owner.turn_ids == turn)[-1]) + 1
            arrays = {name: x[start:end] for name in ARRAYS if (x := getattr(owner, name)) is not None}
            interruptions = event.interruptions
            if before is not None:
                arrays = {name: np.concatenate([getattr(before, name), x]) for name, x in arrays.items()}
                interruptions += before.interruptions
            rest: dict[str, Any] = dict(interruptions=interruptions, stop_reason=event.stop_reason)
            found[turn] = replace(stored, **arrays, **rest, branches=())
        return found

    def whole(self, stop_reason: str) -> Trajectory:
        """Returns the trajectory of an episode that ended by `stop_reason` after its last turn."""
        so_far = self.so_far
        assert so_far is not None
        branches = tuple(replace(branch, stop_reason=stop_reason) for branch in so_far.branches)
        return replace(so_far, stop_reason=stop_reason, branches=branches)

    def _after(self, turn: int) -> int:
        """The number of the turn that this one continues; -1 if it follows the prompt, or nothing."""
        after = self.turns[turn][0].after
        return turn - 1 if after is None else after

    def _before(self, turn: int) -> Trajectory | None:
        """The path that turn number `turn` continues; None if it follows the prompt, or nothing."""
        after = self._after(turn)
        return self.paths[after] if after >= 0 else None


def _owner(stored: Trajectory, turn: int) -> Trajectory | None:
    """Returns the path on which the turn has its loss; None if it is on none of the stored ones."""
    return next((path for path in paths_of(stored) if (path.turn_ids == turn).any()), None)


def _without_loss(path: Trajectory, is_elsewhere: np.ndarray) -> Trajectory:
    """Returns the path with the tokens `is_elsewhere`, (n,) bool, as if they were not sampled."""
    blank = {"loss_mask": False, "behavior_logp": 0, "versions": NOT_SAMPLED, "turn_ids": -1}
    changed = {name: getattr(path, name).copy() for name in blank}
    for name, value in blank.items():
        changed[name][is_elsewhere] = value
    return replace(path, **changed)
