from __future__ import annotations

import dataclasses
import os
import signal
import sqlite3
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from areal_jax.control.events import (
    BatchTrained,
    Dispatch,
    Drop,
    HostJoined,
    RewardScored,
    RunStarted,
    SampleFinished,
    Score,
    Train,
)
from areal_jax.trajectories.sqlite import FORMAT, Entry, JournalError, SqliteQueue
from areal_jax.types import SampleId
from tests.trajectories.samples import assert_same, trajectory

ROOT = Path(__file__).parents[2]


@pytest.fixture
def queue(tmp_path: Path):
    with SqliteQueue.create(tmp_path / "run" / "journal.sqlite", {"jaxlib": "1.2", "cores": 2}) as queue:
        yield queue


def finished(sample: SampleId, **options) -> Entry:
    one = trajectory(sample, **options)
    event = SampleFinished(sample, "host-0", one.spans, one.stop_reason, 1)
    return Entry(event, (Score(sample.ordinal, sample.attempt),), one)


def test_rows_give_back_events_and_actions_in_order_across_a_reopening(queue: SqliteQueue):
    dispatch = Dispatch((SampleId(0, 0), SampleId(0, 1)), "host-0", 0)
    trained = BatchTrained(0, (0, 1), "abc", {"loss": 0.5, "histogram": [1, 2], "by_age": {3: 4}})
    before = time.time()
    first = [Entry(RunStarted("abc")), Entry(HostJoined("host-0", 4), [dispatch])]
    assert queue.append(first) == 2
    assert queue.append([Entry(trained, [Drop(7, "end"), Train(1, (2, 3), (0, 1))])], durable=True) == 3
    queue.close()

    with SqliteQueue.open(queue.path) as again:
        rows = list(again.rows())
        assert again.header == {"jaxlib": "1.2", "cores": 2}
        assert again.last_seq == 3
        assert [row.seq for row in again.rows(after_seq=1)] == [2, 3]
        assert again.append([Entry(HostJoined("host-1", 2))]) == 4
    assert [row.event for row in rows] == [RunStarted("abc"), HostJoined("host-0", 4), trained]
    assert [row.actions for row in rows] == [(), (dispatch,), (Drop(7, "end"), Train(1, (2, 3), (0, 1)))]
    assert all(before <= row.wall_s <= time.time() for row in rows)


def test_rows_are_read_in_pieces_while_others_are_written(queue: SqliteQueue):
    queue.append([Entry(HostJoined(f"host-{i}", i)) for i in range(1500)])
    seen = 0
    for row in queue.rows():
        seen += 1
        assert row.event == HostJoined(f"host-{seen - 1}", seen - 1)
        if seen == 3:
            queue.append([Entry(HostJoined("host-1500", 1500))])
    assert seen == 1501


def test_numpy_numbers_in_metrics_become_plain_ones(queue: SqliteQueue):
    queue.append([Entry(BatchTrained(0, (np.int64(3),), "d", {"loss": np.float32(0.5)}))])
    (row,) = queue.rows()
    assert row.event == BatchTrained(0, (3,), "d", {"loss": 0.5})


def test_an_event_and_its_payload_are_written_together_or_not_at_all(queue: SqliteQueue):
    bad = Entry(BatchTrained(0, (0,), "d", {"array": np.zeros(3)}))
    with pytest.raises(TypeError, match="ndarray"):
        queue.append([finished(SampleId(0, 0)), bad])
    assert (queue.last_seq, list(queue.rows())) == (0, [])
    # This one fails within the transaction: the events are in, the payload's key is too large for SQLite.
    one = finished(SampleId(0, 0))
    large = dataclasses.replace(one.trajectory, sample=SampleId(2**63, 0))
    with pytest.raises(OverflowError):
        queue.append([one, Entry(one.event, (), large)])
    assert (queue.last_seq, list(queue.rows())) == (0, [])
    with pytest.raises(JournalError, match="no trajectory"):
        queue.trajectory(SampleId(0, 0))


def test_a_group_is_complete_or_an_error_and_gets_its_rewards_once_scored(queue: SqliteQueue):
    entries = [finished(SampleId(5, member, 1), reward=None) for member in (1, 0)]
    queue.append(entries[:1])
    with pytest.raises(JournalError, match=r"members \[1\] of group 5 \(attempt 1\), not 2"):
        queue.group(5, 1, 2)
    queue.append(entries[1:])
    unscored = queue.group(5, 1, 2)
    assert_same(unscored[0], entries[1].trajectory)
    assert_same(unscored[1], entries[0].trajectory)

    queue.append([Entry(RewardScored(5, 1, (0.25, 1.0), ((("format", 0.0),), ())))])
    one, two = queue.group(5, 1, 2)
    assert (one.reward, one.reward_parts, two.reward, two.reward_parts) == (0.25, {"format": 0.0}, 1.0, {})
    assert queue.trajectory(SampleId(5, 1, 1)).reward == 1.0
    with pytest.raises(JournalError, match=r"members \[\]"):
        queue.group(5, 0, 2)


def test_the_first_finish_of_a_sample_counts(queue: SqliteQueue):
    queue.append([finished(SampleId(0, 0), length=6)])
    queue.append([finished(SampleId(0, 0), length=9)])
    assert len(queue.trajectory(SampleId(0, 0)).tokens) == 6
    assert queue.last_seq == 2


def test_forgetting_deletes_payloads_and_keeps_events(queue: SqliteQueue):
    queue.append([finished(SampleId(n, 0, attempt)) for n in range(3) for attempt in range(2)])
    queue.forget([0, 2])
    assert queue.last_seq == len(list(queue.rows())) == 6
    assert queue.trajectory(SampleId(1, 0)).sample == SampleId(1, 0)
    for gone in (SampleId(0, 0), SampleId(2, 0, 1)):
        with pytest.raises(JournalError, match="keep_groups"):
            queue.trajectory(gone)


def test_the_newest_snapshot_is_found_also_before_a_given_event(queue: SqliteQueue):
    assert queue.latest_snapshot() is None
    queue.snapshot(3, {"version": 1, "groups": {7: [1, 2]}})
    queue.snapshot(9, {"version": 2})
    assert queue.latest_snapshot() == (9, {"version": 2})
    assert queue.latest_snapshot(before_seq=8) == (3, {"version": 1, "groups": {7: [1, 2]}})
    assert queue.latest_snapshot(before_seq=2) is None


def test_threads_may_append_and_read_at_once(queue: SqliteQueue):
    def work(ordinal: int) -> None:
        for member in range(20):
            queue.append([finished(SampleId(ordinal, member))])
            queue.trajectory(SampleId(ordinal, member))

    threads = [threading.Thread(target=work, args=(ordinal,)) for ordinal in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=30)
    assert [row.seq for row in queue.rows()] == list(range(1, 81))
    assert [len(queue.group(ordinal, 0, 20)) for ordinal in range(4)] == [20] * 4


def test_a_reader_beside_the_writer_sees_what_is_committed(queue: SqliteQueue):
    queue.append([finished(SampleId(0, 0))])
    with SqliteQueue.open(queue.path, readonly=True) as reader:
        assert reader.last_seq == 1
        queue.append([finished(SampleId(0, 1))])
        assert reader.last_seq == 2
        assert len(reader.group(0, 0, 2)) == 2
        with pytest.raises(JournalError, match="open for reading"):
            reader.append([finished(SampleId(1, 0))])


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
    with pytest.raises(JournalError, match=f"format {FORMAT + 1}, and this areal-jax reads format {FORMAT}"):
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


# --- one writer, and kill -9 --------------------------------------------------------------

WRITER = """
    import sys
    from areal_jax.control.events import HostJoined
    from areal_jax.trajectories.sqlite import Entry, SqliteQueue
    from areal_jax.types import SampleId
    from tests.trajectories.test_sqlite import finished

    queue = SqliteQueue.create(sys.argv[1], {})
    for ordinal in range(10**9):
        last = queue.append([finished(SampleId(ordinal, member)) for member in range(3)])
        print(last, flush=True)
"""


def test_a_second_writer_is_refused_and_a_killed_one_loses_nothing(tmp_path: Path):
    path = tmp_path / "journal.sqlite"
    writer = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(WRITER), str(path)],
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
    )
    try:
        told = [int(writer.stdout.readline()) for _ in range(20)][-1]
        with pytest.raises(JournalError, match=f"is being written by process {writer.pid} "):
            SqliteQueue.open(path)
        with SqliteQueue.open(path, readonly=True) as reader:
            assert reader.last_seq >= told
    finally:
        os.kill(writer.pid, signal.SIGKILL)
        rest = writer.communicate(timeout=30)[0].split()
    told = int(rest[-1]) if rest else told

    with SqliteQueue.open(path) as again:
        assert again.last_seq >= told
        assert again.last_seq % 3 == 0, "a transaction was torn"
        assert [row.seq for row in again.rows()] == list(range(1, again.last_seq + 1))
        for ordinal in range(again.last_seq // 3):
            assert len(again.group(ordinal, 0, 3)) == 3


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
        done = subprocess.run(words, cwd=ROOT, timeout=60)
        outcomes.append((done.returncode, path.exists()))
        if path.exists():
            with SqliteQueue.open(path) as queue:
                assert queue.header == {"cores": 2}
            path.unlink()
    assert (9, False) in outcomes and outcomes[-1] == (0, True)
    assert not list(tmp_path.glob("*.new*"))


def test_closing_lets_the_next_writer_in_within_one_process(queue: SqliteQueue):
    with pytest.raises(JournalError, match=f"process {os.getpid()} "):
        SqliteQueue.open(queue.path)
    queue.close()
    SqliteQueue.open(queue.path).close()
