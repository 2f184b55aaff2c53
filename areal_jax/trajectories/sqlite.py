"""The journal of a run, with its trajectories and rewards, in one SQLite file.

An event, the actions that answered it and the trajectory that came with it are written in one transaction, so
a crash keeps all of them or none. One process writes; any number of others read at the same time.

In a run of one process an OS lock keeps a second writer out. On a cluster the controller is the only writer;
it may hang and be replaced while it holds that lock. Therefore controllers share the lock, and a cluster's
file also names its owner, the controller that started last: every transaction first checks that its writer is
the owner.
"""

from __future__ import annotations

import shutil
import sqlite3
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from hashlib import blake2b
from itertools import islice
from pathlib import Path
from typing import Any

from areal_jax.control.events import (
    ACTIONS,
    EVENTS,
    WITH_DICTS,
    Action,
    BatchTrained,
    CheckpointCommitted,
    Dispatch,
    Drop,
    EpisodeEnded,
    Event,
    HostJoined,
    HostLost,
    RewardScored,
    RunResumed,
    RunStarted,
    SampleFinished,
    Train,
    TurnFinished,
    VersionCommitted,
    VersionReissued,
    from_wire,
    to_wire,
)
from areal_jax.file_errors import disk_full
from areal_jax.trajectories.codec import decode, encode
from areal_jax.trajectories.file_systems import is_local
from areal_jax.trajectories.journal import FORMAT, Entry, JournalError, Row, pack, unpack, with_rewards
from areal_jax.trajectories.lock import WriterLock
from areal_jax.types import SampleId, Trajectory

APPLICATION = 0x41524A31
"""'ARJ1': SQLite's application_id of a journal."""

MARKED = {
    kind.__name__
    for kind in (
        RunStarted, RunResumed, HostJoined, HostLost, BatchTrained, VersionCommitted, VersionReissued,
        CheckpointCommitted, Train,
    )
}  # fmt: skip
"""Kinds of events and actions in the table `marks`: so rare that a run has at most some in each step."""

EPISODE = (TurnFinished, EpisodeEnded)
"""The events with which the trajectory of a sample with a workflow comes again, longer than before."""

_BUSY_S = 30.0
_FULL_BYTES = 1_000_000
"""Free space below which an I/O error is that of a full disk."""
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
_CHAIN = "CREATE TABLE chain (seq INTEGER PRIMARY KEY, digest BLOB NOT NULL)"
"""One row for each transaction: the number of its last event, and a digest of its events and of the row
before; the first one is of event 0 and the header. Older versions of areal-jax made no such table.
"""
_INDEX = (
    # An event, or an action in answer to it, that is rare, and its step or version, else 0.
    "CREATE TABLE marks (kind TEXT, seq INTEGER, number INTEGER NOT NULL, PRIMARY KEY (kind, seq)) "
    "WITHOUT ROWID",
    # The events with a group's first Dispatch and with its end: it was trained or dropped.
    "CREATE TABLE groups (ordinal INTEGER PRIMARY KEY, first INTEGER NOT NULL, last INTEGER)",
)
"""Tables that find events without reading all of them. A journal of an older version of areal-jax gets them
when a run goes on in it; until then its events are read from the start.
"""
_OWNER = "CREATE TABLE IF NOT EXISTS owner (token TEXT NOT NULL)"
_LINKED = "SELECT seq, wall_s, kind, event, actions FROM events WHERE seq > ? AND seq <= ? ORDER BY seq"


class SqliteQueue:
    """The journal of one run: one writer, any number of readers. Threads of a process may share it.

    Every operation raises JournalError if SQLite fails.
    """

    def __init__(
        self, path: Path, db: sqlite3.Connection, lock: WriterLock, readonly: bool, owner: str | None
    ) -> None:
        """Not to be called directly: use `create` or `open`."""
        self.path = path
        self._db = db
        self._lock, self._is_readonly, self._owner = lock, readonly, owner
        self._guard = threading.RLock()
        self.header: dict[str, Any] = unpack(self._one("SELECT value FROM header")[0])
        """Values on which the bits of the run's results depend, stored when the journal was created."""
        self.is_chained = bool(self._all("SELECT 1 FROM sqlite_master WHERE name = 'chain'"))
        """Whether digests of all events are stored beside them; not by older versions of areal-jax."""
        self._is_indexed = bool(self._all("SELECT 1 FROM sqlite_master WHERE name = 'marks'"))

    @classmethod
    def create(cls, path: str | Path, header: dict[str, Any], owner: str | None = None) -> SqliteQueue:
        """Creates a journal and opens it for writing. Raises JournalError if the file exists.

        `header`: values on which the bits of the run's results depend, such as device and jaxlib version.
        `owner`: as in `open`.
        """
        path = Path(path)
        if path.exists():
            raise JournalError(f"{path} exists; resume that run, or choose another run.dir")
        path.parent.mkdir(parents=True, exist_ok=True)
        lock = _take(path, owner)
        try:
            with _explained(path):
                _make(path, header)
        finally:
            lock.release()
        return cls.open(path, owner=owner)

    @classmethod
    def open(cls, path: str | Path, readonly: bool = False, owner: str | None = None) -> SqliteQueue:
        """Opens an existing journal to continue the run, or with `readonly` to read it during the run.

        `owner`: on a cluster, a random string that names this start of the controller. This controller
        becomes the only writer: from then on transactions of an earlier controller are refused, and each
        transaction of this one is flushed to the disk. None: a run of one process. Raises JournalError if the
        file is missing or has another format, or if another process writes the file and this call has neither
        `readonly` nor `owner`.
        """
        path = Path(path)
        if not path.is_file():
            raise JournalError(f"there is no journal {path}; give the folder that `areal-jax run` made")
        lock = WriterLock(path) if readonly else _take(path, owner)
        with ExitStack() as undo, _explained(path):
            undo.callback(lock.release)
            db = undo.enter_context(closing(_connect(path, "ro" if readonly else "rw")))
            _check_format(path, db)
            if not readonly:
                _set_mode(path, db)
            if owner is not None:
                _own(db, owner)
            journal = cls(path, db, lock, readonly, owner)
            if not readonly:
                journal._complete_index()
            undo.pop_all()
            return journal

    # --- writing --------------------------------------------------------------------------------------------

    def append(self, entries: Sequence[Entry], durable: bool = False) -> int:
        """Writes all entries in one transaction; returns the sequence number of the last one.

        `durable`: the entries survive a power loss, not only the end of this process. A sample's second
        trajectory and a group's second rewards, such as from a host that was declared lost, are not stored;
        but each turn of an episode replaces the sample's trajectory by a longer one.
        Raises TypeError for a value that is not made of numbers, text, lists and dicts.
        """
        with self._guard, self._transaction(durable) as db:
            wall_s, last, linked = time.time(), self.last_seq, []
            for seq, entry in enumerate(entries, last + 1):
                event, payload = entry.event, entry.trajectory
                kind, values = to_wire(event)
                actions = pack([to_wire(action) for action in entry.actions])
                linked.append((seq, wall_s, kind, pack(values), actions))
                db.execute("INSERT INTO events VALUES (?, ?, ?, ?, ?)", linked[-1])
                _index(db, Row(seq, wall_s, event, tuple(entry.actions)))
                if payload is not None:
                    ordinal, member, attempt = payload.sample
                    row = (ordinal, attempt, member, encode(payload))
                    kind = "REPLACE" if isinstance(event, EPISODE) else "IGNORE"
                    db.execute(f"INSERT OR {kind} INTO trajectories VALUES (?, ?, ?, ?)", row)
                if isinstance(event, RewardScored):
                    row = (event.ordinal, event.attempt, pack([event.rewards, event.parts, event.notes]))
                    db.execute("INSERT OR IGNORE INTO rewards VALUES (?, ?, ?)", row)
            if self.is_chained and linked:
                _link(db, linked)
            return last + len(entries)

    def snapshot(self, seq: int, state: dict[str, Any]) -> None:
        """Stores the control plane's state after the event with sequence number `seq`.

        `state` contains only numbers, text, lists and dicts; tuples are read back as lists.
        """
        with self._guard, self._transaction(durable=True) as db:
            db.execute("INSERT OR REPLACE INTO snapshots VALUES (?, ?)", (seq, pack(state)))

    def forget(self, ordinals: Sequence[int]) -> None:
        """Deletes all trajectories of these groups, reissued ones included; keeps events and rewards."""
        with self._guard, self._transaction() as db:
            db.executemany(
                "DELETE FROM trajectories WHERE ordinal = ?", [(int(ordinal),) for ordinal in ordinals]
            )

    def require_owner(self) -> None:
        """Raises JournalError if a newer controller of the cluster's run has taken over the journal."""
        if self._owner is None:
            return
        if self._one("SELECT token FROM owner")[0] != self._owner:
            raise JournalError(
                f"{self.path} was taken over by another controller, because this one was paused and did not "
                "renew its lease in time. The other controller continues the run; this one ends and writes "
                "nothing more. Check why this one's process or machine was paused"
            )

    # --- reading --------------------------------------------------------------------------------------------

    @property
    def is_of_processes(self) -> bool:
        """Whether a controller wrote the journal, so that each role of the run was a process of its own."""
        return bool(self._all("SELECT 1 FROM sqlite_master WHERE name = 'owner'"))

    @property
    def last_seq(self) -> int:
        """Sequence number of the newest event; 0 for an empty journal. Events are numbered 1, 2, 3, ..."""
        return self._one("SELECT coalesce(max(seq), 0) FROM events")[0]

    def rows(self, after_seq: int = 0) -> Iterator[Row]:
        """Yields every event after `after_seq`, in order, including events written during the iteration.

        Raises JournalError for an event or action of an unknown kind.
        """
        statement = "SELECT * FROM events WHERE seq > ? ORDER BY seq LIMIT ?"
        while chunk := self._all(statement, (after_seq, _CHUNK_ROWS)):
            for seq, wall_s, kind, event, actions in chunk:
                answers = tuple(
                    self._known(name, values, ACTIONS) for name, values in unpack(actions, has_tuples=True)
                )
                yield Row(seq, wall_s, self._event(kind, event), answers)
            after_seq = chunk[-1][0]

    def events(self, kind: str, after_seq: int = 0) -> Iterator[Any]:
        """Yields the events of class `kind` after `after_seq`, in order, without reading other events."""
        from_table = "SELECT seq, event FROM events WHERE seq > ? AND kind = ? ORDER BY seq LIMIT ?"
        if self._is_indexed and kind in MARKED:
            from_table = (
                "SELECT seq, event FROM marks JOIN events USING (seq) WHERE seq > ? AND marks.kind = ? "
                "ORDER BY seq LIMIT ?"
            )
        while chunk := self._all(from_table, (after_seq, kind, _CHUNK_ROWS)):
            for _, event in chunk:
                yield self._event(kind, event)
            after_seq = chunk[-1][0]

    def live_events(self, kind: str) -> Iterator[Any]:
        """Yields the events of class `kind` that may be of groups in flight, and maybe of others."""
        first = 1
        if self._is_indexed:
            (found,) = self._one("SELECT min(first) FROM groups WHERE last IS NULL")
            first = self.last_seq + 1 if found is None else found
        return self.events(kind, first - 1)

    def last(self, kind: str, number: int | None = None, until: int | None = None) -> int:
        """Returns the number of the newest event with a record of class `kind` (MARKED); 0 if there is none.

        `number`: of this step or version alone. `until`: up to this event. A Train counts with the event that
        it answers.
        """
        until = self.last_seq if until is None else until
        if self._is_indexed:
            statement = "SELECT coalesce(max(seq), 0) FROM marks WHERE kind = ? AND seq <= ?"
            of_number = () if number is None else (number,)
            return self._all(statement + " AND number = ?" * len(of_number), (kind, until, *of_number))[0][0]
        marks = (mark for row in self.rows() if row.seq <= until for mark in _marks(*row))
        return max((seq for name, seq, own in marks if name == kind and number in (None, own)), default=0)

    def row(self, seq: int) -> Row:
        """Returns event number `seq`; raises JournalError if there is none."""
        found = next(self.rows(seq - 1), None)
        if found is None or found.seq != seq:
            raise JournalError(f"{self.path} has no event {seq}; its newest one is {self.last_seq}")
        return found

    def rows_of(self, ordinal: int) -> Iterator[Row]:
        """Yields the events from a group's first Dispatch to its end, those of other groups between them too.

        Late events of the group, which change nothing, may come after its end.
        """
        first, last = 0, None
        if self._is_indexed:
            found = self._all("SELECT first, last FROM groups WHERE ordinal = ?", (ordinal,))
            if not found:
                return
            ((first, last),) = found
        for row in self.rows(max(0, first - 1)):
            if last is not None and row.seq > last:
                return
            yield row

    def finished(self, sample: SampleId) -> SampleFinished | None:
        """Returns the event of a sample's end; None if it has not ended."""
        events = (row.event for row in self.rows_of(sample.ordinal))
        return next((one for one in events if isinstance(one, SampleFinished) and one.sample == sample), None)

    def trajectory(self, sample: SampleId) -> Trajectory:
        """Returns a sample's trajectory, with its reward if the group was scored.

        Raises JournalError if the journal never had the trajectory, or if it was deleted.
        """
        payload = self.payload(sample)
        if payload is None:
            raise JournalError(
                f"{self.path} has no trajectory of {sample}: it never finished, or was deleted after its "
                "group was trained (raise observe.keep_groups to keep more)"
            )
        return self._rewarded(sample.ordinal, sample.attempt, [decode(payload)])[0]

    def group(self, ordinal: int, attempt: int, size: int) -> tuple[Trajectory, ...]:
        """Returns a group's trajectories in member order, with their rewards if the group was scored.

        `attempt`: how often the group was reissued before. `size`: samples of the group. Raises JournalError
        if a trajectory is missing.
        """
        statement = (
            "SELECT member, payload FROM trajectories WHERE ordinal = ? AND attempt = ? ORDER BY member"
        )
        found = dict(self._all(statement, (ordinal, attempt)))
        if list(found) != list(range(size)):
            raise JournalError(
                f"{self.path} holds members {list(found)} of group {ordinal} (attempt {attempt}), but the "
                f"group has {size} members: the others never finished, or were deleted after training (raise "
                "observe.keep_groups to keep more)"
            )
        return self._rewarded(ordinal, attempt, [decode(payload) for payload in found.values()])

    def scored(self, ordinal: int, attempt: int) -> RewardScored | None:
        """Returns the rewards with which the group's trajectories are read; None if it was not scored."""
        found = self._all("SELECT scored FROM rewards WHERE ordinal = ? AND attempt = ?", (ordinal, attempt))
        if not found:
            return None
        return from_wire("RewardScored", [ordinal, attempt, *unpack(found[0][0])], EVENTS)

    def rewarded(self) -> Iterator[tuple[int, int]]:
        """Yields (ordinal, attempt) of every group with stored rewards."""
        after = (-1, -1)
        statement = "SELECT ordinal, attempt FROM rewards WHERE (ordinal, attempt) > (?, ?) LIMIT ?"
        while chunk := self._all(statement, (*after, _CHUNK_ROWS)):
            yield from chunk
            after = chunk[-1]

    def stored_samples(self) -> list[SampleId]:
        """Returns the samples with a stored trajectory."""
        return [
            SampleId(*sample) for sample in self._all("SELECT ordinal, member, attempt FROM trajectories")
        ]

    def stored_bytes(self) -> dict[int, int]:
        """Returns ordinal -> bytes of the stored trajectories of its samples."""
        return dict(self._all("SELECT ordinal, sum(length(payload)) FROM trajectories GROUP BY ordinal"))

    def payload(self, sample: SampleId) -> bytes | None:
        """Returns the encoded trajectory of a sample; None if it is not stored."""
        statement = "SELECT payload FROM trajectories WHERE ordinal = ? AND member = ? AND attempt = ?"
        found = self._all(statement, sample)
        return found[0][0] if found else None

    def snapshot_seqs(self) -> list[int]:
        """Returns for each stored snapshot the number of its last event, ascending."""
        return [seq for (seq,) in self._all("SELECT seq FROM snapshots ORDER BY seq")]

    def snapshot_at(self, seq: int) -> dict[str, Any] | None:
        """Returns the state that was stored after event `seq`; None if none was."""
        found = self._all("SELECT state FROM snapshots WHERE seq = ?", (seq,))
        return unpack(found[0][0]) if found else None

    def broken_link(self) -> str:
        """Returns where the stored digests first contradict header or events; "" if nowhere, or without."""
        if not self.is_chained:
            return ""
        ends = "SELECT (SELECT max(seq) FROM events), (SELECT max(seq) FROM chain)"
        ((last, linked),) = self._all(ends)
        ((header,),) = self._all("SELECT value FROM header")
        links = self._links(linked)
        before = 0, _digest_of(b"", [(0, header)])
        if next(links, None) != before:
            return "the journal's header was changed after it was written: its digest differs"
        while some := list(islice(links, _CHUNK_ROWS)):
            rows = deque(self._all(_LINKED, (before[0], some[-1][0])))
            for seq, own in some:
                first, digest = before
                written = []
                while rows and rows[0][0] <= seq:
                    written.append(rows.popleft())
                if own != _digest_of(digest, written):
                    return (
                        f"events {first + 1} to {seq} were changed after they were written: their digest "
                        "differs"
                    )
                before = seq, own
        if (last or 0) != linked:
            return f"the journal ends with event {last or 0}, but digests were written up to event {linked}"
        return ""

    def _links(self, until: int | None) -> Iterator[tuple[int, bytes]]:
        """Yields (number of the last event, digest) of every transaction, up to event `until`."""
        after = -1
        statement = "SELECT seq, digest FROM chain WHERE seq > ? AND seq <= ? ORDER BY seq LIMIT ?"
        while chunk := self._all(statement, (after, until, _CHUNK_ROWS)):
            yield from chunk
            after = chunk[-1][0]

    def copy_until(self, seq: int, path: Path, header: dict[str, Any]) -> None:
        """Writes to `path` a journal with this header and the events up to number `seq`.

        With them come their samples' trajectories and their groups' rewards. Raises JournalError if `path`
        exists.
        """
        if path.exists():
            raise JournalError(f"{path} exists; choose another folder")
        with _explained(path):
            _make(path, header)
            with closing(_connect(path, "rw")) as db:
                db.execute("ATTACH DATABASE ? AS source", (f"{self.path.absolute().as_uri()}?mode=ro",))
                db.execute("BEGIN IMMEDIATE")
                db.execute("INSERT INTO events SELECT * FROM source.events WHERE seq <= ?", (seq,))
                for first in range(0, seq, _CHUNK_ROWS):
                    _link(db, db.execute(_LINKED, (first, min(first + _CHUNK_ROWS, seq))).fetchall())
                for row in self.rows():
                    if row.seq > seq:
                        break
                    _index(db, row)
                    if isinstance(row.event, SampleFinished | TurnFinished):
                        ordinal, member, attempt = row.event.sample
                        _copy(db, "trajectories", ordinal=ordinal, attempt=attempt, member=member)
                    elif isinstance(row.event, RewardScored):
                        _copy(db, "rewards", ordinal=row.event.ordinal, attempt=row.event.attempt)
                db.execute("COMMIT")

    def latest_snapshot(self) -> tuple[int, dict[str, Any]] | None:
        """Returns the newest snapshot as (number of its last event, state); None if there is no snapshot."""
        found = self._all("SELECT seq, state FROM snapshots ORDER BY seq DESC LIMIT 1")
        return (found[0][0], unpack(found[0][1])) if found else None

    def close(self) -> None:
        """Closes the file and releases the writer's lock. A second call does nothing."""
        with self._guard:
            self._db.close()
            self._lock.release()

    def __enter__(self) -> SqliteQueue:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # --- inside ---------------------------------------------------------------------------------------------

    def _complete_index(self) -> None:
        """Makes the index of a journal that an older version of areal-jax has written."""
        if self._is_indexed:
            return
        with self._transaction(durable=True) as db:
            for statement in _INDEX:
                db.execute(statement)
            for row in self.rows():
                _index(db, row)
            db.execute(f"PRAGMA user_version = {FORMAT}")
        self._is_indexed = True

    def _rewarded(self, ordinal: int, attempt: int, members: list[Trajectory]) -> tuple[Trajectory, ...]:
        scored = self.scored(ordinal, attempt)
        return tuple(members) if scored is None else with_rewards(members, scored)

    def _event(self, kind: str, blob: bytes) -> Event:
        return self._known(kind, unpack(blob, has_tuples=kind not in WITH_DICTS), EVENTS)

    def _known(self, kind: str, values: Sequence[Any], kinds: dict[str, type]) -> Any:
        try:
            return from_wire(kind, values, kinds)
        except (KeyError, TypeError) as error:
            raise JournalError(
                f"{self.path} contains a {kind} that this areal-jax does not know ({error}); use the "
                "version that wrote it"
            ) from error

    @contextmanager
    def _transaction(self, durable: bool = False) -> Iterator[sqlite3.Connection]:
        if self._is_readonly:
            raise JournalError(f"{self.path} is open for reading; open it with readonly=False to write")
        # NORMAL keeps what was committed if this process dies, FULL also if the machine loses power.
        is_flushed = durable or self._owner is not None
        # The connection's own `with` block commits; after an error it rolls back.
        with _explained(self.path), self._db:
            self._db.execute(f"PRAGMA synchronous = {'FULL' if is_flushed else 'NORMAL'}")
            self._db.execute("BEGIN IMMEDIATE")
            # Inside the transaction: a controller that is stopped between check and write holds SQLite's
            # own lock, so no successor can take the file in between.
            self.require_owner()
            yield self._db

    def _all(self, statement: str, values: tuple[Any, ...] = ()) -> list[Any]:
        with _explained(self.path), self._guard:
            return _fetch(self.path, self._db, statement, values)

    def _one(self, statement: str) -> Any:
        return self._all(statement)[0]


def _make(path: Path, header: dict[str, Any]) -> None:
    """Creates an empty journal with this header, under another name until it is complete.

    So a process that is killed meanwhile leaves no partial journal at `path`.
    """
    unfinished = path.with_name(path.name + ".new")
    for left in (unfinished, path.with_name(unfinished.name + "-journal")):
        left.unlink(missing_ok=True)
    with closing(_connect(unfinished, "rwc")) as db:
        db.execute("BEGIN IMMEDIATE")
        for statement in _TABLES:
            db.execute(statement)
        db.execute("INSERT INTO header VALUES (?)", (pack(header),))
        for statement in (_CHAIN, *_INDEX):
            db.execute(statement)
        db.execute("INSERT INTO chain VALUES (0, ?)", (_digest_of(b"", [(0, pack(header))]),))
        db.execute(f"PRAGMA application_id = {APPLICATION}")
        db.execute(f"PRAGMA user_version = {FORMAT}")
        db.execute("COMMIT")
    unfinished.rename(path)


def _marks(seq: int, _: float, event: Event, actions: Sequence[Action]) -> Iterator[tuple[str, int, int]]:
    """Yields the rows of `marks` of a journal's row."""
    for record in (event, *actions):
        kind = type(record).__name__
        if kind in MARKED:
            yield kind, seq, getattr(record, "step", getattr(record, "version", 0))


def _index(db: sqlite3.Connection, row: Row) -> None:
    """Writes what the index has of a row."""
    seq, _, event, actions = row
    db.executemany("INSERT OR IGNORE INTO marks VALUES (?, ?, ?)", _marks(*row))
    ended = [(seq, ordinal) for ordinal in (event.ordinals if isinstance(event, BatchTrained) else ())]
    for action in actions:
        if isinstance(action, Dispatch):
            db.execute("INSERT OR IGNORE INTO groups VALUES (?, ?, NULL)", (action.samples[0].ordinal, seq))
        elif isinstance(action, Drop):
            ended.append((seq, action.ordinal))
    db.executemany("UPDATE groups SET last = ? WHERE ordinal = ? AND last IS NULL", ended)


def _link(db: sqlite3.Connection, rows: Sequence[tuple[Any, ...]]) -> None:
    """Stores the digest of the rows of `events` that a transaction has written."""
    ((before,),) = db.execute("SELECT digest FROM chain ORDER BY seq DESC LIMIT 1")
    db.execute("INSERT INTO chain VALUES (?, ?)", (rows[-1][0], _digest_of(before, rows)))


def _copy(db: sqlite3.Connection, table: str, **key: int) -> None:
    """Copies the row with this key from the attached journal, if it is there."""
    where = " AND ".join(f"{column} = ?" for column in key)
    db.execute(
        f"INSERT OR IGNORE INTO {table} SELECT * FROM source.{table} WHERE {where}", tuple(key.values())
    )


def _digest_of(before: bytes, rows: Sequence[tuple[Any, ...]]) -> bytes:
    return blake2b(before + pack(rows), digest_size=16).digest()


def _connect(path: Path, mode: str) -> sqlite3.Connection:
    return sqlite3.connect(
        f"{path.absolute().as_uri()}?mode={mode}",
        uri=True,
        timeout=_BUSY_S,
        isolation_level=None,
        check_same_thread=False,
    )


def _set_mode(path: Path, db: sqlite3.Connection) -> None:
    """Sets SQLite's journal mode: WAL on a local disk, else TRUNCATE, since WAL works on one machine only."""
    mode = "wal" if is_local(path.parent) else "truncate"
    if db.execute("PRAGMA journal_mode").fetchone()[0] != mode:
        db.execute(f"PRAGMA journal_mode = {mode}")


def _own(db: sqlite3.Connection, owner: str) -> None:
    """Makes the controller with the token `owner` the file's owner, the only controller that may write."""
    db.execute("PRAGMA synchronous = FULL")
    db.execute("BEGIN IMMEDIATE")
    for statement in (_OWNER, "DELETE FROM owner"):
        db.execute(statement)
    db.execute("INSERT INTO owner VALUES (?)", (owner,))
    db.execute("COMMIT")


def _check_format(path: Path, db: sqlite3.Connection) -> None:
    ((application,),) = _fetch(path, db, "PRAGMA application_id")
    ((version,),) = _fetch(path, db, "PRAGMA user_version")
    if application != APPLICATION:
        raise JournalError(f"{path} is not an areal-jax journal; give the journal.sqlite of a run's folder")
    if version not in (FORMAT - 1, FORMAT):  # the one before has no index
        raise JournalError(
            f"{path} has journal format {version}, but this areal-jax reads format {FORMAT}; use the version "
            "that wrote it, or start a new run"
        )


def _fetch(path: Path, db: sqlite3.Connection, statement: str, values: tuple[Any, ...] = ()) -> list[Any]:
    try:
        return db.execute(statement, values).fetchall()
    except sqlite3.OperationalError as error:
        if error.sqlite_errorcode != sqlite3.SQLITE_READONLY_ROLLBACK:
            raise
    # The writer was killed in the middle of a transaction. Only a connection that may write can undo it.
    with closing(_connect(path, "rw")) as mender:
        mender.execute("SELECT count(*) FROM header").fetchall()
    return db.execute(statement, values).fetchall()


@contextmanager
def _explained(path: Path) -> Iterator[None]:
    """Turns an error of SQLite in the `with` block into a JournalError that says what to do with the file."""
    remedies = {
        "not a database": "give the journal.sqlite of a run's folder",
        "malformed": "the file is damaged: restore it from a backup, or start a new run",
        "locked": "another program has locked the file: end that program first",
        "unable to open": "check the folder and its permissions",
        "readonly": "check the permissions of the file and its folder",
    }
    try:
        yield
    except sqlite3.Error as error:
        # SQLite has another error for a full disk where it maps a file into memory.
        is_full = "disk I/O error" in str(error) and shutil.disk_usage(path.parent).free < _FULL_BYTES
        if is_full or "disk is full" in str(error):
            raise disk_full(path, str(error)) from error
        known = (remedy for word, remedy in remedies.items() if word in str(error))
        hint = next(known, "check the file and its disk")
        raise JournalError(f"{path}: {error}; {hint}") from error


def _take(path: Path, owner: str | None) -> WriterLock:
    """Returns the writer's lock, held by this process. Raises JournalError if another process holds it.

    Controllers share it, because a former one may hang and hold it: the token `owner` in the journal keeps
    that one from writing. A run of one process holds it alone.
    """
    lock = WriterLock(path)
    holder = lock.acquire(is_shared=owner is not None)
    if holder is not None:
        raise JournalError(
            f"{path} is being written by {holder}; wait for that run or stop it. To only read the journal, "
            "use `areal-jax audit`, `inspect` or `report`"
        )
    return lock
