from __future__ import annotations

import dataclasses
import shutil
import sqlite3
import subprocess
import sys
import textwrap
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace

import pytest

from areal_jax.control import events as e
from areal_jax.control.events import RunStarted
from areal_jax.file_errors import DiskFullError
from areal_jax.trajectories import sqlite
from areal_jax.trajectories.journal import FORMAT, Entry, JournalError, Row
from areal_jax.trajectories.sqlite import SqliteQueue
from areal_jax.types import SampleId
from tests.hangs import HANG_S
from tests.trajectories.journals import finished, group

ROOT = Path(__file__).parents[2]


@pytest.fixture
def queue(tmp_path: Path):
    with SqliteQueue.create(tmp_path / "run" / "journal.sqlite", {"jaxlib": "1.2", "cores": 2}) as queue:
        yield queue


def test_a_transaction_that_fails_half_way_leaves_nothing(queue: SqliteQueue):
    """The events are in when the payload's key is found too large for SQLite."""
    one = finished(SampleId(0, 0))
    assert one.trajectory is not None
    large = dataclasses.replace(one.trajectory, sample=SampleId(2**63, 0))
    with pytest.raises(OverflowError):
        queue.append([one, Entry(one.event, (), large)])
    assert (queue.last_seq, list(queue.rows())) == (0, [])
    with pytest.raises(JournalError, match="no trajectory"):
        queue.trajectory(SampleId(0, 0))


def test_a_full_disk_is_named_with_the_space_left_and_the_remedy(queue: SqliteQueue):
    queue._db.execute("PRAGMA max_page_count = 30")
    with pytest.raises(
        DiskFullError, match=r"journal\.sqlite could not be written .* MB are free in .*Free some"
    ):
        for ordinal in range(1000):
            queue.append([finished(SampleId(ordinal, 0))])
    last = queue.last_seq
    queue._db.execute("PRAGMA max_page_count = 3000")
    queue.append([finished(SampleId(last, 0))])
    assert queue.last_seq == last + 1 > 1  # what was there is, and space makes it go on


def test_an_error_of_the_disk_is_that_of_a_full_one_only_where_it_is_full(
    queue: SqliteQueue, monkeypatch: pytest.MonkeyPatch
):
    for free, kind in ((0, DiskFullError), (2_000_000, JournalError)):
        monkeypatch.setattr(shutil, "disk_usage", lambda path, free=free: SimpleNamespace(free=free))
        with pytest.raises(kind), sqlite._explained(queue.path):
            raise sqlite3.OperationalError("disk I/O error")


# --- bad input ---------------------------------------------------------------------------


def test_a_missing_an_existing_and_a_foreign_file_are_named(tmp_path: Path, queue: SqliteQueue):
    with pytest.raises(JournalError, match="there is no journal"):
        SqliteQueue.open(tmp_path / "nothing.sqlite")
    with pytest.raises(JournalError, match=r"exists; resume that run"):
        SqliteQueue.create(queue.path, {})

    text, other, empty = tmp_path / "a.txt", tmp_path / "b.sqlite", tmp_path / "c.sqlite"
    text.write_text("no database at all " * 100)
    empty.touch()
    with sqlite3.connect(other) as db:
        db.execute("CREATE TABLE events (seq)")
    for foreign in (text, other, empty):
        for readonly in (False, True):
            with pytest.raises(JournalError, match=r"journal\.sqlite of a run"):
                SqliteQueue.open(foreign, readonly=readonly)


def test_another_format_is_refused_with_both_numbers(queue: SqliteQueue):
    queue.close()
    with sqlite3.connect(queue.path) as db:
        db.execute(f"PRAGMA user_version = {FORMAT + 1}")
    with pytest.raises(JournalError, match=f"format {FORMAT + 1}, but this areal-jax reads format {FORMAT}"):
        SqliteQueue.open(queue.path)


def test_an_event_of_a_later_version_is_named(queue: SqliteQueue):
    queue.append([Entry(RunStarted("d"))])
    queue.close()
    with sqlite3.connect(queue.path) as db:
        db.execute("UPDATE events SET kind = 'HostPromoted'")
    with SqliteQueue.open(queue.path) as again, pytest.raises(JournalError, match="HostPromoted"):
        list(again.rows())


def test_a_damaged_file_is_an_error_with_a_remedy(queue: SqliteQueue):
    queue.append([finished(SampleId(n, 0)) for n in range(50)])
    queue.close()
    whole = queue.path.read_bytes()
    queue.path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(JournalError, match="restore it from a backup"):
        list(SqliteQueue.open(queue.path).rows())


@pytest.mark.slow
def test_a_creation_killed_at_any_statement_leaves_a_whole_journal_or_none(tmp_path: Path):
    script = textwrap.dedent(
        """
        import os, sqlite3, sys
        from areal_jax.trajectories.sqlite import SqliteQueue

        class Dying(sqlite3.Connection):
            left = int(sys.argv[2])
            def execute(self, *words):
                Dying.left -= 1
                if Dying.left < 0:
                    os._exit(9)
                return super().execute(*words)

        connect = sqlite3.connect
        sqlite3.connect = lambda *args, **options: connect(*args, factory=Dying, **options)
        SqliteQueue.create(sys.argv[1], {"cores": 2})
        """
    )
    path = tmp_path / "journal.sqlite"
    outcomes = []
    for statements in (1, 4, 8, 10, 11, 12, 13, 100):
        words = [sys.executable, "-c", script, str(path), str(statements)]
        done = subprocess.run(words, cwd=ROOT, timeout=HANG_S)
        outcomes.append((done.returncode, path.exists()))
        if path.exists():
            with SqliteQueue.open(path) as queue:
                assert queue.header == {"cores": 2}
            path.unlink()
    assert (9, False) in outcomes and outcomes[-1] == (0, True)
    assert not list(tmp_path.glob("*.new*"))


def test_readers_undo_the_half_transaction_of_a_killed_writer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Without a write-ahead log half a transaction may be in the file; the next reader takes it out."""
    monkeypatch.setattr(sqlite, "is_local", lambda folder: False)
    path = tmp_path / "journal.sqlite"
    with SqliteQueue.create(path, {"cores": 2}, "token") as queue:
        queue.append([finished(SampleId(0, 0))])
    waiting = SqliteQueue.open(path, readonly=True)
    script = textwrap.dedent(
        """
        import os, sys
        from areal_jax.trajectories import sqlite

        sqlite.is_local = lambda folder: False
        queue = sqlite.SqliteQueue.open(sys.argv[1], owner="next")
        with queue._transaction(durable=True) as db:
            db.execute("DELETE FROM events")
            for ordinal in range(100):
                db.execute("INSERT INTO trajectories VALUES (?, 0, 0, ?)", (ordinal + 1, bytes(1 << 17)))
            os._exit(9)
        """
    )
    for journal in (None, waiting):
        done = subprocess.run([sys.executable, "-c", script, str(path)], cwd=ROOT, timeout=HANG_S)
        assert done.returncode == 9
        assert path.stat().st_size > 1 << 20, "the half was written"
        reader = journal or SqliteQueue.open(path, readonly=True)
        assert [row.seq for row in reader.rows()] == [1]
        with pytest.raises(JournalError, match="no trajectory"):
            reader.trajectory(SampleId(1, 0))
        reader.close()


def test_a_controller_that_was_replaced_writes_nothing_more(tmp_path: Path):
    path = tmp_path / "journal.sqlite"
    stuck = SqliteQueue.create(path, {}, "first")
    stuck.append([finished(SampleId(0, 0))])
    with SqliteQueue.open(path, owner="second") as successor:
        for write in (
            lambda: stuck.append([finished(SampleId(0, 1))]),
            lambda: stuck.snapshot(1, {}),
            lambda: stuck.forget([0]),
        ):
            with pytest.raises(JournalError, match="taken over by another controller"):
                write()
        successor.append([finished(SampleId(1, 0))])
        assert [row.event for row in successor.rows()] == [
            finished(sample).event for sample in (SampleId(0, 0), SampleId(1, 0))
        ]
        assert successor.trajectory(SampleId(0, 0)) is not None
    stuck.close()


@pytest.mark.parametrize(("is_local", "mode"), [(True, "wal"), (False, "truncate")])
def test_the_mode_follows_the_file_system_also_of_a_copy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_local: bool, mode: str
):
    path = tmp_path / "journal.sqlite"
    monkeypatch.setattr(sqlite, "is_local", lambda folder: not is_local)
    SqliteQueue.create(path, {}).close()
    monkeypatch.setattr(sqlite, "is_local", lambda folder: is_local)
    with SqliteQueue.open(path) as queue:
        assert queue._one("PRAGMA journal_mode")[0] == mode
        assert queue._one("PRAGMA locking_mode")[0] == "normal"


@pytest.mark.parametrize(("owner", "levels"), [(None, [1, 2, 1]), ("token", [2, 2, 2])])
def test_each_turn_of_a_cluster_is_flushed_and_of_one_process_the_durable_ones(
    queue: SqliteQueue, owner: str | None, levels: list[int]
):
    path = queue.path.with_name("other.sqlite")
    with SqliteQueue.create(path, {}, owner) as one:
        found = []
        for durable in (False, True, False):
            one.append([finished(SampleId(0, len(found)))], durable=durable)
            found.append(one._one("PRAGMA synchronous")[0])
        assert found == levels


# --- the index ----------------------------------------------------------------------------------------------


def long_journal(path: Path) -> SqliteQueue:
    """Four groups of two samples, trained in two batches; group 2 is dropped, and group 4 is in flight."""
    journal = SqliteQueue.create(path, {})
    ordinals = ((0, 1), (3, 5))

    def dispatch(ordinal: int, attempt: int = 0) -> e.Dispatch:
        return e.Dispatch(tuple(SampleId(ordinal, member, attempt) for member in range(2)), "host-0", 0)

    journal.append([Entry(e.RunStarted("d0", 2), [dispatch(0), dispatch(1), dispatch(2)])])
    for step, own in enumerate(ordinals):
        entries = [one for ordinal in own for one in group(ordinal)]
        entries[-1] = Entry(entries[-1].event, [e.Train(step, own, (0, 0))])
        dropped = [e.Drop(2, "no_signal"), *map(dispatch, (3, 4, 5))]
        entries.append(Entry(e.BatchTrained(step, own, f"d{step + 1}", {}), [] if step else dropped))
        entries.append(Entry(e.VersionCommitted(step + 1, f"w{step + 1}")))
        journal.append(entries)
    return journal


def without_index(path: Path) -> None:
    """Turns a journal into one of the format before, which had no index."""
    with closing(sqlite3.connect(path)) as db:
        for table in ("marks", "groups"):
            db.execute(f"DROP TABLE {table}")
        db.execute(f"PRAGMA user_version = {FORMAT - 1}")
        db.commit()


def looked_up(journal: SqliteQueue) -> dict[str, object]:
    """What readers ask a journal for, by the index or, without one, by reading all events."""
    kinds = ("RunStarted", "BatchTrained", "VersionCommitted", "Train", "HostLost")
    return {
        "last": {kind: journal.last(kind) for kind in kinds},
        "of step 0": {kind: journal.last(kind, 0) for kind in kinds},
        "until 9": {kind: journal.last(kind, until=9) for kind in kinds},
        "after 9": [event.step for event in journal.events("BatchTrained", 9)],
        "versions": list(journal.events("VersionCommitted")),
        "dropped": [
            row.seq
            for row in journal.rows_of(2)
            if any(isinstance(one, e.Drop) and one.ordinal == 2 for one in row.actions)
        ],
        "ends": [(o, m) for o in range(6) for m in range(2) if journal.finished(SampleId(o, m))],
    }


def test_the_index_finds_what_reading_all_events_finds(tmp_path: Path):
    path = tmp_path / "journal.sqlite"
    with long_journal(path) as journal:
        assert looked_up(journal) == {
            "last": {"RunStarted": 1, "BatchTrained": 16, "VersionCommitted": 17, "Train": 15, "HostLost": 0},
            "of step 0": {
                "RunStarted": 1, "BatchTrained": 8, "VersionCommitted": 0, "Train": 7, "HostLost": 0,
            },
            "until 9": {"RunStarted": 1, "BatchTrained": 8, "VersionCommitted": 9, "Train": 7, "HostLost": 0},
            "after 9": [1],
            "versions": [e.VersionCommitted(1, "w1"), e.VersionCommitted(2, "w2")],
            "dropped": [8],
            "ends": [(ordinal, member) for ordinal in (0, 1, 3, 5) for member in range(2)],
        }  # fmt: skip
        # Group 0 was over before group 3 began.
        assert [[row.seq for row in journal.rows_of(ordinal)] for ordinal in (0, 3)] == [
            list(range(1, 9)), list(range(8, 17)),
        ]  # fmt: skip
        # Group 4 is in flight since event 8, so that no event before it can be of a group in flight.
        assert [event.sample.ordinal for event in journal.live_events("SampleFinished")] == [3, 3, 5, 5]
        found, rows = looked_up(journal), list(journal.rows())
    without_index(path)
    with SqliteQueue.open(path, readonly=True) as old:
        assert looked_up(old) == found
        assert len(list(old.live_events("SampleFinished"))) == 8
    with SqliteQueue.open(path) as old:
        assert looked_up(old) == found
        assert list(old.rows()) == rows
        assert len(list(old.live_events("SampleFinished"))) == 4
        assert not old.broken_link()
    with closing(sqlite3.connect(path)) as db:
        assert db.execute("PRAGMA user_version").fetchone() == (FORMAT,)


def test_a_process_killed_while_it_makes_the_index_leaves_the_old_journal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    path = tmp_path / "journal.sqlite"
    long_journal(path).close()
    without_index(path)
    before = sqlite._index

    def cut(db: sqlite3.Connection, row: Row) -> None:
        if row.seq == 12:
            raise KeyboardInterrupt
        before(db, row)

    monkeypatch.setattr(sqlite, "_index", cut)
    with pytest.raises(KeyboardInterrupt):
        SqliteQueue.open(path)
    monkeypatch.undo()
    with closing(sqlite3.connect(path)) as db:
        assert db.execute("PRAGMA user_version").fetchone() == (FORMAT - 1,)
        assert not db.execute("SELECT 1 FROM sqlite_master WHERE name = 'marks'").fetchall()
    with SqliteQueue.open(path) as journal:
        assert journal.last("BatchTrained") == 16


def test_a_copy_up_to_an_event_has_an_index_of_its_own(tmp_path: Path):
    with long_journal(tmp_path / "journal.sqlite") as journal:
        journal.copy_until(10, tmp_path / "copy.sqlite", {})
    with SqliteQueue.open(tmp_path / "copy.sqlite", readonly=True) as copy:
        assert (copy.last_seq, copy.last("BatchTrained"), copy.last("VersionCommitted")) == (10, 8, 9)
        assert [row.seq for row in copy.rows_of(3)] == [8, 9, 10]
        assert not copy.broken_link()
