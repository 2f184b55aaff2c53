"""The journal and the payloads of a run in one SQLite file.

An event, the actions that answered it and the trajectory it announces are written in one transaction, so that
no crash parts them. One process writes (an OS lock that dies with it); any number reads beside it.
"""

from __future__ import annotations

import sqlite3
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple, NoReturn, cast

import msgpack

from areal_jax.control.events import ACTIONS, EVENTS, Action, Event, RewardScored, from_wire, to_wire
from areal_jax.trajectories.codec import decode, encode
from areal_jax.trajectories.lock import WriterLock
from areal_jax.types import ArealError, SampleId, Trajectory

FORMAT = 3
"""Raised whenever an older program could not read what is written; stored as SQLite's user_version."""

APPLICATION = 0x41524A31
"""'ARJ1': SQLite's application_id of a journal."""

_BUSY_S = 30.0
_CHUNK_ROWS = 512

_TABLES = (
    "CREATE TABLE header (value BLOB NOT NULL)",
    "CREATE TABLE events (seq INTEGER PRIMARY KEY, wall_s REAL NOT NULL, kind TEXT NOT NULL, "
    "event BLOB NOT NULL, actions BLOB NOT NULL)",
    "CREATE TABLE trajectories (ordinal INTEGER, attempt INTEGER, member INTEGER, payload BLOB NOT NULL, "
    "PRIMARY KEY (ordinal, attempt, member))",
    "CREATE TABLE rewards (ordinal INTEGER, attempt INTEGER, scored BLOB NOT NULL, "
    "PRIMARY KEY (ordinal, attempt)) WITHOUT ROWID",
    "CREATE TABLE snapshots (seq INTEGER PRIMARY KEY, state BLOB NOT NULL)",
)
_EVENT = "INSERT INTO events VALUES (?, ?, ?, ?, ?)"
# The first finish of a sample is the one that counts; a late one, of a host given up for lost, is void.
_TRAJECTORY = "INSERT OR IGNORE INTO trajectories VALUES (?, ?, ?, ?)"
_REWARD = "INSERT OR IGNORE INTO rewards VALUES (?, ?, ?)"
_FORGET = "DELETE FROM trajectories WHERE ordinal = ?"


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


class SqliteQueue:
    """The journal of one run. Safe to share between the threads of a process."""

    def __init__(self, path: Path, db: sqlite3.Connection, lock: WriterLock | None) -> None:
        """Use `create` or `open`."""
        self.path = path
        self._db = db
        self._writer = lock
        self._guard = threading.RLock()
        self.header: dict[str, Any] = _unpack(self._one("SELECT value FROM header")[0])
        self._last_seq: int = self._one("SELECT coalesce(max(seq), 0) FROM events")[0]

    @classmethod
    def create(cls, path: str | Path, header: dict[str, Any]) -> SqliteQueue:
        """A new journal; `header` holds what the run's bits depend on. Raises JournalError if it exists."""
        path = Path(path)
        if path.exists():
            raise JournalError(f"{path} exists; resume that run, or choose another run.dir")
        path.parent.mkdir(parents=True, exist_ok=True)
        lock = _take(path)
        try:
            _make(path, header)
            return cls(path, _connect(path, "rw"), lock)
        except sqlite3.Error as error:
            lock.release()
            _refuse(path, error)

    @classmethod
    def open(cls, path: str | Path, readonly: bool = False) -> SqliteQueue:
        """An existing journal, read-only beside a live run or to go on writing. Raises JournalError."""
        path = Path(path)
        if not path.is_file():
            raise JournalError(f"there is no journal {path}; name the folder that `areal-jax run` made")
        lock = None if readonly else _take(path)
        try:
            db = _connect(path, "ro" if readonly else "rw")
            _check_format(path, db)
            return cls(path, db, lock)
        except sqlite3.Error as error:
            _release(lock)
            _refuse(path, error)
        except JournalError:
            _release(lock)
            raise

    # --- writing --------------------------------------------------------------------------------------------

    def append(self, entries: Sequence[Entry], durable: bool = False) -> int:
        """Write all entries in one transaction; the seq of the last. `durable`: also against power loss."""
        wall_s = time.time()
        with self._guard:
            events, payloads, rewards = [], [], []
            for seq, entry in enumerate(entries, self._last_seq + 1):
                kind, values = to_wire(entry.event)
                actions = _pack([to_wire(action) for action in entry.actions]) if entry.actions else b"\x90"
                events.append((seq, wall_s, kind, _pack(values), actions))
                if entry.trajectory is not None:
                    sample = entry.trajectory.sample
                    payloads.append((sample.ordinal, sample.attempt, sample.member, encode(entry.trajectory)))
                if isinstance(entry.event, RewardScored):
                    scored = entry.event
                    packed = _pack([scored.rewards, scored.parts, scored.notes])
                    rewards.append((scored.ordinal, scored.attempt, packed))
            with self._transaction(durable) as db:
                db.executemany(_EVENT, events)
                db.executemany(_TRAJECTORY, payloads)
                db.executemany(_REWARD, rewards)
            self._last_seq += len(events)
            return self._last_seq

    def snapshot(self, seq: int, state: dict[str, Any]) -> None:
        """Keep control's state after event `seq`. Plain values only; tuples come back as lists."""
        with self._guard, self._transaction(durable=True) as db:
            db.execute("INSERT OR REPLACE INTO snapshots VALUES (?, ?)", (seq, _pack(state)))

    def forget(self, ordinals: Sequence[int]) -> None:
        """Delete the trajectories of these groups, all attempts; their events and rewards stay."""
        with self._guard, self._transaction() as db:
            db.executemany(
                "DELETE FROM trajectories WHERE ordinal = ?", [(int(ordinal),) for ordinal in ordinals]
            )

    # --- reading --------------------------------------------------------------------------------------------

    @property
    def last_seq(self) -> int:
        """Seq of the newest event; 0 for an empty journal."""
        if self._writer is None:
            return self._one("SELECT coalesce(max(seq), 0) FROM events")[0]
        with self._guard:
            return self._last_seq

    def rows(self, after_seq: int = 0) -> Iterator[Row]:
        """Every event after `after_seq`, in order. Raises JournalError for an event of a later version."""
        while chunk := self._all(
            "SELECT * FROM events WHERE seq > ? ORDER BY seq LIMIT ?", (after_seq, _CHUNK_ROWS)
        ):
            for seq, wall_s, kind, event, actions in chunk:
                yield Row(seq, wall_s, self._restore(kind, event), self._restore_actions(actions))
            after_seq = chunk[-1][0]

    def trajectory(self, sample: SampleId) -> Trajectory:
        """One sample's trajectory, with its reward once scored. Raises JournalError if it is not kept."""
        found = self._all(
            "SELECT member, payload FROM trajectories WHERE ordinal = ? AND attempt = ? AND member = ?",
            (sample.ordinal, sample.attempt, sample.member),
        )
        if not found:
            raise JournalError(
                f"{self.path} holds no trajectory of {sample}: it never finished, or its group was trained "
                "long ago (raise observe.keep_groups to keep more)"
            )
        return self._rewarded(sample.ordinal, sample.attempt, found)[0]

    def group(self, ordinal: int, attempt: int, size: int) -> tuple[Trajectory, ...]:
        """A group's trajectories by member, rewarded once scored. Raises JournalError if one is missing."""
        found = self._all(
            "SELECT member, payload FROM trajectories WHERE ordinal = ? AND attempt = ? ORDER BY member",
            (ordinal, attempt),
        )
        members = [member for member, _ in found]
        if members != list(range(size)):
            raise JournalError(
                f"{self.path} holds members {members} of group {ordinal} (attempt {attempt}), not {size}: "
                "the others never finished, or the group's trajectories were deleted after training"
            )
        return self._rewarded(ordinal, attempt, found)

    def latest_snapshot(self, before_seq: int | None = None) -> tuple[int, dict[str, Any]] | None:
        """The newest (seq, state), or the newest whose seq is at most `before_seq`; None if there is none."""
        limit = 2**62 if before_seq is None else before_seq
        found = self._all(
            "SELECT seq, state FROM snapshots WHERE seq <= ? ORDER BY seq DESC LIMIT 1", (limit,)
        )
        return (found[0][0], _unpack(found[0][1])) if found else None

    def close(self) -> None:
        """Write what is buffered and let the next writer in. Closing twice does nothing."""
        with self._guard:
            self._db.close()
            _release(self._writer)

    def __enter__(self) -> SqliteQueue:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # --- inside ---------------------------------------------------------------------------------------------

    @contextmanager
    def _transaction(self, durable: bool = False) -> Iterator[sqlite3.Connection]:
        if self._writer is None:
            raise JournalError(f"{self.path} is open for reading; open it with readonly=False to write")
        try:
            if durable:
                self._db.execute("PRAGMA synchronous = FULL")
            self._db.execute("BEGIN IMMEDIATE")
            try:
                yield self._db
                self._db.execute("COMMIT")
            finally:
                if self._db.in_transaction:
                    self._db.execute("ROLLBACK")
                if durable:
                    self._db.execute("PRAGMA synchronous = NORMAL")
        except sqlite3.Error as error:
            _refuse(self.path, error)

    def _all(self, statement: str, values: tuple[Any, ...] = ()) -> list[Any]:
        try:
            with self._guard:
                return self._db.execute(statement, values).fetchall()
        except sqlite3.Error as error:
            _refuse(self.path, error)

    def _one(self, statement: str) -> Any:
        return self._all(statement)[0]

    def _restore(self, kind: str, event: bytes) -> Event:
        return self._known(kind, _unpack(event), EVENTS)

    def _restore_actions(self, actions: bytes) -> tuple[Action, ...]:
        return tuple(self._known(kind, values, ACTIONS) for kind, values in _unpack(actions))

    def _known(self, kind: str, values: list[Any], kinds: dict[str, type]) -> Any:
        try:
            return from_wire(kind, values, kinds)
        except (KeyError, TypeError) as error:
            raise JournalError(
                f"{self.path} holds a {kind} that this areal-jax does not know ({error}); use the version "
                "that wrote it"
            ) from error

    def _rewarded(self, ordinal: int, attempt: int, found: list[Any]) -> tuple[Trajectory, ...]:
        trajectories = [(member, decode(payload)) for member, payload in found]
        scored = self._all("SELECT scored FROM rewards WHERE ordinal = ? AND attempt = ?", (ordinal, attempt))
        if not scored:
            return tuple(trajectory for _, trajectory in trajectories)
        rewards, parts, notes = _unpack(scored[0][0])
        return tuple(
            replace(
                trajectory,
                reward=rewards[member],
                reward_parts=dict(parts[member]) if parts else {},
                reward_note=notes[member] if notes else "",
            )
            for member, trajectory in trajectories
        )


def _make(path: Path, header: dict[str, Any]) -> None:
    """An empty journal that appears under its name whole: a killed creation leaves none behind."""
    unfinished = path.with_name(path.name + ".new")
    for left in (unfinished, path.with_name(unfinished.name + "-journal")):
        left.unlink(missing_ok=True)
    db = _connect(unfinished, "rwc")
    try:
        db.execute("BEGIN IMMEDIATE")
        for statement in _TABLES:
            db.execute(statement)
        db.execute("INSERT INTO header VALUES (?)", (_pack(header),))
        db.execute(f"PRAGMA application_id = {APPLICATION}")
        db.execute(f"PRAGMA user_version = {FORMAT}")
        db.execute("COMMIT")
        db.execute("PRAGMA journal_mode = WAL")
    finally:
        db.close()
    unfinished.rename(path)


def _connect(path: Path, mode: str) -> sqlite3.Connection:
    db = sqlite3.connect(
        f"{path.absolute().as_uri()}?mode={mode}",
        uri=True,
        timeout=_BUSY_S,
        isolation_level=None,
        check_same_thread=False,
    )
    db.execute("PRAGMA synchronous = NORMAL")
    return db


def _check_format(path: Path, db: sqlite3.Connection) -> None:
    (application,) = db.execute("PRAGMA application_id").fetchone()
    (version,) = db.execute("PRAGMA user_version").fetchone()
    if application != APPLICATION:
        raise JournalError(f"{path} is no areal-jax journal; name the journal.sqlite of a run's folder")
    if version != FORMAT:
        raise JournalError(
            f"{path} has journal format {version}, and this areal-jax reads format {FORMAT}; use the version "
            "that wrote it, or start a new run"
        )


def _refuse(path: Path, error: sqlite3.Error) -> NoReturn:
    remedies = {
        "not a database": "name the journal.sqlite of a run's folder",
        "malformed": "the file is damaged: restore it from a backup, or start a new run",
        "disk is full": "free some space, then resume the run: what was committed is safe",
        "locked": "another program holds it: end that one first",
        "unable to open": "check the folder and its permissions",
        "readonly": "check the permissions of the file and its folder",
    }
    hint = next(
        (remedy for word, remedy in remedies.items() if word in str(error)), "see the file and its disk"
    )
    raise JournalError(f"{path}: {error}; {hint}") from error


def _take(path: Path) -> WriterLock:
    lock = WriterLock(path)
    holder = lock.acquire()
    if holder is not None:
        raise JournalError(
            f"{path} is being written by {holder}; wait for that run or stop it. Reading beside it is fine: "
            "`areal-jax audit`, `inspect` and `report` do"
        )
    return lock


def _release(lock: WriterLock | None) -> None:
    if lock is not None:
        lock.release()


def _plain(value: Any) -> Any:
    """numpy scalars as the numbers that they are; msgpack refuses the rest."""
    if hasattr(value, "item") and getattr(value, "ndim", None) == 0:
        return value.item()
    raise TypeError(f"a {type(value).__name__} cannot be journaled; use plain numbers, text, lists and dicts")


def _pack(value: Any) -> bytes:
    return cast(bytes, msgpack.packb(value, default=_plain))


def _unpack(blob: bytes) -> Any:
    return msgpack.unpackb(blob, strict_map_key=False)
