"""The records of a run's journal and the encoding of values; `sqlite.SqliteQueue` is the journal itself."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, cast

import msgpack

from areal_jax.control.events import Action, Event, RewardScored
from areal_jax.types import ArealError, Trajectory

FORMAT = 4
"""Version of the journal's format; raised by every change that older programs cannot read."""


class JournalError(ArealError):
    """A journal cannot be created, opened, read or written; the message says what to do."""


@dataclass(frozen=True)
class Entry:
    """An event to append to the journal, with the control plane's actions in answer to the event.

    `trajectory`: that of the finished sample if the event is a SampleFinished or EpisodeEnded, the sample's
    up to the turn's end if it is a TurnFinished, else None.
    """

    event: Event
    actions: Sequence[Action] = ()
    trajectory: Trajectory | None = None


class Row(NamedTuple):
    """One event read from the journal, with the control plane's actions in answer to the event.

    `seq`: the event's number in the journal. `wall_s`: when the event was written, in seconds since 1970.
    """

    seq: int
    wall_s: float
    event: Event
    actions: tuple[Action, ...]


def with_rewards(members: Sequence[Trajectory], scored: RewardScored) -> tuple[Trajectory, ...]:
    """Returns a group's trajectories `members` with their rewards, reward parts and notes from `scored`."""
    return tuple(
        replace(
            one,
            reward=scored.rewards[one.sample.member],
            reward_parts=dict(scored.parts[one.sample.member]) if scored.parts else {},
            reward_note=scored.notes[one.sample.member] if scored.notes else "",
        )
        for one in members
    )


@contextmanager
def reading_all() -> Iterator[None]:
    """In the block, the garbage collector seldom looks for cycles, and not among objects made before.

    With its usual settings it takes half of the time of reading a long journal, of which rows make no cycles.
    """
    usual = gc.get_threshold()
    gc.freeze()
    gc.set_threshold(100_000, 20, 100)
    try:
        yield
    finally:
        gc.set_threshold(*usual)
        gc.unfreeze()


def pack(value: Any) -> bytes:
    """Returns plain values (numbers, text, lists, dicts) as msgpack bytes; numpy scalars become numbers.

    Raises TypeError for values of other types.
    """
    return cast(bytes, msgpack.packb(value, default=_plain))


def unpack(blob: bytes, *, has_tuples: bool = False) -> Any:
    """Returns the values that `pack` turned into `blob`; raises JournalError for other bytes.

    `has_tuples`: whether lists become tuples, which an event's or action's fields are.
    """
    try:
        return msgpack.unpackb(blob, strict_map_key=False, use_list=not has_tuples)
    except (ValueError, TypeError, msgpack.UnpackException) as error:
        raise JournalError(
            f"the journal has {len(blob)} bytes that are no values ({error}); it was damaged or changed, so "
            "restore it from a backup"
        ) from error


def _plain(value: Any) -> Any:
    if hasattr(value, "item") and getattr(value, "ndim", None) == 0:
        return value.item()
    raise TypeError(f"a {type(value).__name__} cannot be stored; use plain numbers, text, lists and dicts")
