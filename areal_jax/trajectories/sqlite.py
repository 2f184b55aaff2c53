"""The journal and the payloads of a run in one SQLite file.

An event, the actions that answered it and the trajectory it announces are written in one transaction, so that
no crash parts them. One process writes (an OS lock that dies with it); any number reads beside it.

The file is also the archive of a journal whose newest events are in Redis: `rest` then says where.
"""

from __future__ import annotations

import sqlite3
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from areal_jax.trajectories.journal import (
    FORMAT,
    Entry,
    EventRecord,
    JournalError,
    Records,
    Row,
    all_of,
    one_of,
    pack,
    to_records,
    to_row,
    unpack,
)
from areal_jax.trajectories.lock import WriterLock
from areal_jax.types import SampleId, Trajectory

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
_REST = "CREATE TABLE rest (url TEXT, run TEXT, identity TEXT, is_live INTEGER)"
_EVENT = "INSERT INTO events VALUES (?, ?, ?, ?, ?)"
_EVENT_ONCE = "INSERT OR IGNORE INTO events VALUES (?, ?, ?, ?, ?)"
_TRAJECTORY = "INSERT OR IGNORE INTO trajectories VALUES (?, ?, ?, ?)"
_REWARD = "INSERT OR IGNORE INTO rewards VALUES (?, ?, ?)"


class Rest(NamedTuple):
    """Where a journal is written of which this file is the archive."""

    url: str
    """Without its password."""
    run: str
    identity: str
    """Made up with the journal, so that another run of the same name is never taken for this one."""
    is_live: bool
    """Events may be there that the archive does not have."""


class SqliteQueue:
    """The journal of one run. Safe to share between the threads of a process."""

    def __init__(self, path: Path, db: sqlite3.Connection, lock: WriterLock | None) -> None:
        """Use `create` or `open`."""
        self.path = path
        self._db = db
        self._writer = lock
        self._guard = threading.RLock()
        self.header: dict[str, Any] = unpack(self._one("SELECT value FROM header")[0])
        self._last_seq: int = self._one("SELECT coalesce(max(seq), 0) FROM events")[0]

    @classmethod
    def create(cls, path: str | Path, header: dict[str, Any], rest: Rest | None = None) -> SqliteQueue:
        """A new journal; `header` holds what the run's bits depend on. Raises JournalError if it exists.

        `rest` makes it the archive of a journal elsewhere.
        """
        path = Path(path)
        if path.exists():
            raise JournalError(f"{path} exists; resume that run, or choose another run.dir")
        path.parent.mkdir(parents=True, exist_ok=True)
        lock = _take(path)
        try:
            _make(path, header, rest)
            return cls(path, _connect(path, "rw"), lock)
        except sqlite3.Error as error:
            lock.release()
            _refuse(path, error)

    @classmethod
    def open(cls, path: str | Path, readonly: bool = False, is_archive: bool = False) -> SqliteQueue:
        """An existing journal, read-only beside a live run or to go on writing. Raises JournalError.

        One with live events elsewhere is written only by whoever says `is_archive`, and so moves them here.
        """
        path = Path(path)
        if not path.is_file():
            raise JournalError(f"there is no journal {path}; name the folder that `areal-jax run` made")
        lock = None if readonly else _take(path)
        try:
            db = _connect(path, "ro" if readonly else "rw")
            _check_format(path, db)
            queue = cls(path, db, lock)
            rest = None if readonly or is_archive else queue.rest
            if rest is not None and rest.is_live:
                queue.close()
                raise JournalError(
                    f"the newest events of {path} are in Redis, under run {rest.run!r} at {rest.url}; set "
                    f"runtime.redis={rest.url} to go on with it"
                )
            return queue
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
            records = to_records(entries, self._last_seq + 1, wall_s)
            self._write(_EVENT, records, durable)
            self._last_seq += len(records.events)
            return self._last_seq

    def absorb(self, records: Records) -> None:
        """Write what was journaled elsewhere, durably, in one transaction; what is here already stays."""
        with self._guard:
            self._write(_EVENT_ONCE, records, durable=True)
            self._last_seq = max([self._last_seq, *(event.seq for event in records.events)])

    def set_rest(self, rest: Rest) -> None:
        """Say where the journal is written whose archive this is."""
        with self._guard, self._transaction(durable=True) as db:
            db.execute("DELETE FROM rest")
            db.execute("INSERT INTO rest VALUES (?, ?, ?, ?)", rest)

    def snapshot(self, seq: int, state: dict[str, Any]) -> None:
        """Keep control's state after event `seq`. Plain values only; tuples come back as lists."""
        with self._guard, self._transaction(durable=True) as db:
            db.execute("INSERT OR REPLACE INTO snapshots VALUES (?, ?)", (seq, pack(state)))

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

    @property
    def rest(self) -> Rest | None:
        """Where the journal is written if this is but its archive, else None."""
        if not self._all("SELECT 1 FROM sqlite_master WHERE name = 'rest'"):
            return None
        url, run, identity, is_live = self._one("SELECT * FROM rest")
        return Rest(url, run, identity, bool(is_live))

    def rows(self, after_seq: int = 0) -> Iterator[Row]:
        """Every event after `after_seq`, in order. Raises JournalError for an event of a later version."""
        while chunk := self.records(after_seq):
            for record in chunk:
                yield to_row(record, self.path)
            after_seq = chunk[-1].seq

    def records(self, after_seq: int) -> list[EventRecord]:
        """The next events after `after_seq`, as many as are read at once; none at the end."""
        statement = "SELECT * FROM events WHERE seq > ? ORDER BY seq LIMIT ?"
        return [EventRecord(*found) for found in self._all(statement, (after_seq, _CHUNK_ROWS))]

    def payloads(self, ordinal: int, attempt: int, member: int | None = None) -> dict[int, bytes]:
        """The payloads of a group, or of one of its members, by member."""
        statement = "SELECT member, payload FROM trajectories WHERE ordinal = ? AND attempt = ?"
        if member is None:
            return dict(self._all(statement, (ordinal, attempt)))
        return dict(self._all(f"{statement} AND member = ?", (ordinal, attempt, member)))

    def scored(self, ordinal: int, attempt: int) -> bytes | None:
        """The rewards of a group as they were written, None before it was scored."""
        statement = "SELECT scored FROM rewards WHERE ordinal = ? AND attempt = ?"
        found = self._all(statement, (ordinal, attempt))
        return found[0][0] if found else None

    def trajectory(self, sample: SampleId) -> Trajectory:
        """One sample's trajectory, with its reward once scored. Raises JournalError if it is not kept."""
        found = self.payloads(sample.ordinal, sample.attempt, sample.member)
        return one_of(found, self.scored(sample.ordinal, sample.attempt), sample, self.path)

    def group(self, ordinal: int, attempt: int, size: int) -> tuple[Trajectory, ...]:
        """A group's trajectories by member, rewarded once scored. Raises JournalError if one is missing."""
        found = self.payloads(ordinal, attempt), self.scored(ordinal, attempt)
        return all_of(*found, ordinal, attempt, size, self.path)

    def latest_snapshot(self, before_seq: int | None = None) -> tuple[int, dict[str, Any]] | None:
        """The newest (seq, state), or the newest whose seq is at most `before_seq`; None if there is none."""
        limit = 2**62 if before_seq is None else before_seq
        found = self._all(
            "SELECT seq, state FROM snapshots WHERE seq <= ? ORDER BY seq DESC LIMIT 1", (limit,)
        )
        return (found[0][0], unpack(found[0][1])) if found else None

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

    def _write(self, event: str, records: Records, durable: bool) -> None:
        with self._transaction(durable) as db:
            db.executemany(event, records.events)
            db.executemany(_TRAJECTORY, records.payloads)
            db.executemany(_REWARD, records.rewards)

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
                return _fetch(self.path, self._db, statement, values)
        except sqlite3.Error as error:
            _refuse(self.path, error)

    def _one(self, statement: str) -> Any:
        return self._all(statement)[0]


def _make(path: Path, header: dict[str, Any], rest: Rest | None) -> None:
    """An empty journal that appears under its name whole: a killed creation leaves none behind."""
    unfinished = path.with_name(path.name + ".new")
    for left in (unfinished, path.with_name(unfinished.name + "-journal")):
        left.unlink(missing_ok=True)
    db = _connect(unfinished, "rwc")
    try:
        db.execute("BEGIN IMMEDIATE")
        for statement in _TABLES:
            db.execute(statement)
        db.execute("INSERT INTO header VALUES (?)", (pack(header),))
        if rest is not None:
            db.execute(_REST)
            db.execute("INSERT INTO rest VALUES (?, ?, ?, ?)", rest)
        db.execute(f"PRAGMA application_id = {APPLICATION}")
        db.execute(f"PRAGMA user_version = {FORMAT}")
        db.execute("COMMIT")
        if rest is None:  # an archive may be on a file system of several hosts, where WAL does not work
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
    if mode != "ro":
        db.execute("PRAGMA synchronous = NORMAL")
    return db


def _check_format(path: Path, db: sqlite3.Connection) -> None:
    ((application,),) = _fetch(path, db, "PRAGMA application_id")
    ((version,),) = _fetch(path, db, "PRAGMA user_version")
    if application != APPLICATION:
        raise JournalError(f"{path} is no areal-jax journal; name the journal.sqlite of a run's folder")
    if version != FORMAT:
        raise JournalError(
            f"{path} has journal format {version}, and this areal-jax reads format {FORMAT}; use the version "
            "that wrote it, or start a new run"
        )


def _fetch(path: Path, db: sqlite3.Connection, statement: str, values: tuple[Any, ...] = ()) -> list[Any]:
    try:
        return db.execute(statement, values).fetchall()
    except sqlite3.OperationalError as error:
        if error.sqlite_errorcode != sqlite3.SQLITE_READONLY_ROLLBACK:
            raise
    # The writer was killed in the middle of a transaction: that is undone by who may write, so not by `db`.
    with closing(_connect(path, "rw")) as mender:
        mender.execute("SELECT count(*) FROM header").fetchall()
    return db.execute(statement, values).fetchall()


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
