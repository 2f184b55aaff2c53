"""What a journal is, wherever it is kept: its entries, what it promises, and the form it is written in.

Two stores keep these promises: `sqlite.SqliteQueue`, one file, and `redis.RedisQueue`, for many machines.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol, Self, cast

import msgpack

from areal_jax.control.events import ACTIONS, EVENTS, Action, Event, RewardScored, from_wire, to_wire
from areal_jax.trajectories.codec import decode, encode
from areal_jax.types import ArealError, SampleId, Trajectory

FORMAT = 3
"""Raised whenever an older program could not read what is written."""


class JournalError(ArealError):
    """A journal that cannot be made, opened, read or written; the message says what to do."""


@dataclass(frozen=True)
class Entry:
    """One event, what control answered, and the payload it announces."""

    event: Event
    actions: Sequence[Action] = ()
    trajectory: Trajectory | None = None


class Row(NamedTuple):
    """One event as the journal holds it."""

    seq: int
    wall_s: float
    event: Event
    actions: tuple[Action, ...]


class Journal(Protocol):
    """The journal of one run: one writer, any number of readers. Safe to share between threads.

    Whatever cannot be done raises JournalError.
    """

    header: dict[str, Any]
    """What the run's bits depend on, as it was when the journal was made."""

    @property
    def last_seq(self) -> int:
        """Seq of the newest event; 0 for an empty journal. Seqs are 1, 2, 3, ..."""
        ...

    def append(self, entries: Sequence[Entry], durable: bool = False) -> int:
        """Write all entries in one transaction; the seq of the last. `durable`: also against power loss."""
        ...

    def snapshot(self, seq: int, state: dict[str, Any]) -> None:
        """Keep control's state after event `seq`. Plain values only; tuples come back as lists."""
        ...

    def forget(self, ordinals: Sequence[int]) -> None:
        """Delete the trajectories of these groups, all attempts; their events and rewards stay."""
        ...

    def rows(self, after_seq: int = 0) -> Iterator[Row]:
        """Every event after `after_seq`, in order; also those that are written meanwhile."""
        ...

    def trajectory(self, sample: SampleId) -> Trajectory:
        """One sample's trajectory, with its reward once scored."""
        ...

    def group(self, ordinal: int, attempt: int, size: int) -> tuple[Trajectory, ...]:
        """A group's trajectories by member, rewarded once scored; an error if one is missing."""
        ...

    def latest_snapshot(self, before_seq: int | None = None) -> tuple[int, dict[str, Any]] | None:
        """The newest (seq, state), or the newest whose seq is at most `before_seq`; None if there is none."""
        ...

    def close(self) -> None:
        """Write what is buffered and let the next writer in. Closing twice does nothing."""
        ...

    def __enter__(self) -> Self: ...

    def __exit__(self, *error: object) -> None: ...


# --- the written form ---------------------------------------------------------------------------------------


class EventRecord(NamedTuple):
    """A row as it is written; event and actions are msgpack."""

    seq: int
    wall_s: float
    kind: str
    event: bytes
    actions: bytes


class PayloadRecord(NamedTuple):
    """A trajectory as it is written."""

    ordinal: int
    attempt: int
    member: int
    payload: bytes


class RewardRecord(NamedTuple):
    """A group's rewards as they are written: msgpack of rewards, parts, notes."""

    ordinal: int
    attempt: int
    scored: bytes


class Records(NamedTuple):
    """What one transaction writes. The first payload of a sample, and reward of a group, is the one that
    counts; a late one, of a host given up for lost, is void.
    """

    events: list[EventRecord]
    payloads: list[PayloadRecord]
    rewards: list[RewardRecord]


def to_records(entries: Sequence[Entry], first_seq: int, wall_s: float) -> Records:
    """The entries as they are written. Raises TypeError for a value that has no plain form."""
    records = Records([], [], [])
    for seq, entry in enumerate(entries, first_seq):
        kind, values = to_wire(entry.event)
        actions = pack([to_wire(action) for action in entry.actions]) if entry.actions else b"\x90"
        records.events.append(EventRecord(seq, wall_s, kind, pack(values), actions))
        if entry.trajectory is not None:
            sample = entry.trajectory.sample
            blob = encode(entry.trajectory)
            records.payloads.append(PayloadRecord(sample.ordinal, sample.attempt, sample.member, blob))
        if isinstance(entry.event, RewardScored):
            scored = entry.event
            packed = pack([scored.rewards, scored.parts, scored.notes])
            records.rewards.append(RewardRecord(scored.ordinal, scored.attempt, packed))
    return records


def to_row(record: EventRecord, where: object) -> Row:
    """The row of a record in the journal at `where`. Raises JournalError for one of a later version."""
    actions = tuple(_known(kind, values, ACTIONS, where) for kind, values in unpack(record.actions))
    event = _known(record.kind, unpack(record.event), EVENTS, where)
    return Row(record.seq, record.wall_s, event, actions)


def one_of(
    payloads: Mapping[int, bytes], scored: bytes | None, sample: SampleId, where: object
) -> Trajectory:
    """The sample's trajectory among its group's payloads by member. Raises JournalError if it is not kept."""
    if sample.member not in payloads:
        raise JournalError(
            f"{where} holds no trajectory of {sample}: it never finished, or its group was trained "
            "long ago (raise observe.keep_groups to keep more)"
        )
    return _rewarded(payloads, scored, [sample.member])[0]


def all_of(
    payloads: Mapping[int, bytes], scored: bytes | None, ordinal: int, attempt: int, size: int, where: object
) -> tuple[Trajectory, ...]:
    """The group's trajectories among its payloads by member. Raises JournalError if one is missing."""
    members = sorted(payloads)
    if members != list(range(size)):
        raise JournalError(
            f"{where} holds members {members} of group {ordinal} (attempt {attempt}), not {size}: "
            "the others never finished, or the group's trajectories were deleted after training"
        )
    return _rewarded(payloads, scored, members)


def pack(value: Any) -> bytes:
    """Plain values as msgpack, numpy scalars as the numbers that they are. Raises TypeError for others."""
    return cast(bytes, msgpack.packb(value, default=_plain))


def unpack(blob: bytes) -> Any:
    return msgpack.unpackb(blob, strict_map_key=False)


def _plain(value: Any) -> Any:
    if hasattr(value, "item") and getattr(value, "ndim", None) == 0:
        return value.item()
    raise TypeError(f"a {type(value).__name__} has no plain form; use plain numbers, text, lists and dicts")


def _known(kind: str, values: list[Any], kinds: dict[str, type], where: object) -> Any:
    try:
        return from_wire(kind, values, kinds)
    except (KeyError, TypeError) as error:
        raise JournalError(
            f"{where} holds a {kind} that this areal-jax does not know ({error}); use the version "
            "that wrote it"
        ) from error


def _rewarded(
    payloads: Mapping[int, bytes], scored: bytes | None, members: Sequence[int]
) -> tuple[Trajectory, ...]:
    trajectories = [(member, decode(payloads[member])) for member in members]
    if scored is None:
        return tuple(trajectory for _, trajectory in trajectories)
    rewards, parts, notes = unpack(scored)
    return tuple(
        replace(
            trajectory,
            reward=rewards[member],
            reward_parts=dict(parts[member]) if parts else {},
            reward_note=notes[member] if notes else "",
        )
        for member, trajectory in trajectories
    )
