"""The promises of a journal: of one process, on a cluster, and with either mode of SQLite."""

from __future__ import annotations

import dataclasses
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from areal_jax.control.events import (
    BatchTrained,
    Dispatch,
    Drop,
    HostJoined,
    RewardScored,
    RunStarted,
    Train,
)
from areal_jax.trajectories import sqlite
from areal_jax.trajectories.journal import Entry, JournalError
from areal_jax.trajectories.sqlite import SqliteQueue
from areal_jax.types import SampleId
from tests.hangs import HANG_S
from tests.trajectories.journals import finished
from tests.trajectories.samples import assert_same

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Store:
    """Where a journal is, and the token with which a cluster's controller opens it."""

    path: Path
    owner: str | None

    def create(self, header: dict[str, Any]) -> SqliteQueue:
        return SqliteQueue.create(self.path, header, self.owner)

    def open(self, readonly: bool = False) -> SqliteQueue:
        return SqliteQueue.open(self.path, readonly, None if readonly else self.owner)


@pytest.fixture(params=["alone", "on a cluster", "on a shared file system"])
def store(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Store:
    if request.param == "on a shared file system":
        monkeypatch.setattr(sqlite, "is_local", lambda folder: False)
    return Store(tmp_path / "run" / "journal.sqlite", None if request.param == "alone" else "token")


@pytest.fixture
def queue(store: Store):
    with store.create({"jaxlib": "1.2", "cores": 2}) as queue:
        yield queue


def test_rows_give_back_events_and_actions_in_order_across_a_reopening(store: Store, queue: SqliteQueue):
    dispatch = Dispatch((SampleId(0, 0), SampleId(0, 1)), "host-0", 0)
    trained = BatchTrained(0, (0, 1), "abc", {"loss": 0.5, "histogram": [1, 2], "by_age": {3: 4}})
    before = time.time()
    first = [Entry(RunStarted("abc")), Entry(HostJoined("host-0", 4), [dispatch])]
    assert queue.append(first) == 2
    assert queue.append([Entry(trained, [Drop(7, "end"), Train(1, (2, 3), (0, 1))])], durable=True) == 3
    queue.close()

    with store.open() as again:
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
    with pytest.raises(JournalError, match="no trajectory"):
        queue.trajectory(SampleId(0, 0))


def test_a_group_is_complete_or_an_error_and_gets_its_rewards_once_scored(queue: SqliteQueue):
    entries = [finished(SampleId(5, member, 1), reward=None) for member in (1, 0)]
    queue.append(entries[:1])
    with pytest.raises(JournalError, match=r"members \[1\] of group 5 \(attempt 1\), but the group has 2"):
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


def test_the_newest_snapshot_is_found(queue: SqliteQueue):
    assert queue.latest_snapshot() is None
    queue.snapshot(3, {"version": 1, "groups": {7: [1, 2]}})
    assert queue.latest_snapshot() == (3, {"version": 1, "groups": {7: [1, 2]}})
    queue.snapshot(9, {"version": 2})
    assert queue.latest_snapshot() == (9, {"version": 2})


def test_threads_may_append_and_read_at_once(queue: SqliteQueue):
    def work(ordinal: int) -> None:
        for member in range(20):
            queue.append([finished(SampleId(ordinal, member))])
            queue.trajectory(SampleId(ordinal, member))

    threads = [threading.Thread(target=work, args=(ordinal,)) for ordinal in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=HANG_S)
    assert [row.seq for row in queue.rows()] == list(range(1, 81))
    assert [len(queue.group(ordinal, 0, 20)) for ordinal in range(4)] == [20] * 4


def test_a_reader_beside_the_writer_sees_what_is_committed(store: Store, queue: SqliteQueue):
    queue.append([finished(SampleId(0, 0))])
    with store.open(readonly=True) as reader:
        assert reader.last_seq == 1
        queue.append([finished(SampleId(0, 1))])
        assert reader.last_seq == 2
        assert len(reader.group(0, 0, 2)) == 2
        with pytest.raises(JournalError, match="open for reading"):
            reader.append([finished(SampleId(1, 0))])


WRITER = """
    import sys
    from areal_jax.trajectories.sqlite import SqliteQueue
    from areal_jax.types import SampleId
    from tests.trajectories.journals import finished

    path, owner = sys.argv[1:]
    queue = SqliteQueue.create(path, {}, owner or None)
    for ordinal in range(10**9):
        last = queue.append([finished(SampleId(ordinal, member)) for member in range(3)])
        if ordinal % 8 == 7:
            queue.snapshot(last - 1, {"ordinal": ordinal})
        print(last, flush=True)
"""


def writing(store: Store) -> subprocess.Popen[str]:
    """Another process that writes until it is killed, and prints the seqs that were acknowledged."""
    words = [str(store.path), store.owner or ""]
    return subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(WRITER), *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
    )


def test_a_second_writer_is_refused_and_a_killed_one_loses_nothing(store: Store):
    writer = writing(store)
    try:
        assert writer.stdout is not None
        seen = [int(writer.stdout.readline()) for _ in range(20)][-1]
        with pytest.raises(JournalError, match=f"is being written by process {writer.pid} "):
            SqliteQueue.open(store.path)
        with store.open(readonly=True) as reader:
            assert reader.last_seq >= seen
    finally:
        os.kill(writer.pid, signal.SIGKILL)
        rest = writer.communicate(timeout=HANG_S)[0].split()
    seen = int(rest[-1]) if rest else seen

    with store.open() as again:
        assert again.last_seq >= seen
        assert again.last_seq % 3 == 0, "a transaction was torn"
        assert [row.seq for row in again.rows()] == list(range(1, again.last_seq + 1))
        for ordinal in range(again.last_seq // 3):
            assert len(again.group(ordinal, 0, 3)) == 3
        found = again.latest_snapshot()
        assert found is not None and found[0] == 3 * found[1]["ordinal"] + 2


def test_a_reader_waits_for_no_writer_and_a_writer_for_no_reader(store: Store):
    """`audit` of a live run: rows are read in pieces while another process writes."""
    writer = writing(store)
    try:
        assert writer.stdout is not None
        for _ in range(300):
            before = int(writer.stdout.readline())
        with store.open(readonly=True) as reader:
            seqs = [row.seq for row, _ in zip(reader.rows(), range(before), strict=False)]
            assert seqs == list(range(1, before + 1))
        assert int(writer.stdout.readline()) > 0 and writer.poll() is None
    finally:
        os.kill(writer.pid, signal.SIGKILL)
        writer.communicate(timeout=HANG_S)


def test_closing_lets_the_next_writer_in_within_one_process(store: Store, queue: SqliteQueue):
    with pytest.raises(JournalError, match=f"process {os.getpid()} "):
        SqliteQueue.open(store.path)
    queue.close()
    queue.close()
    store.open().close()


def test_a_controller_takes_over_from_another_and_not_from_a_run_of_one_process(tmp_path: Path):
    """A run of one process checks no token, so both would write."""
    path = tmp_path / "journal.sqlite"
    held = pytest.raises(JournalError, match=f"is being written by process {os.getpid()} ")
    with SqliteQueue.create(path, {}), held:
        SqliteQueue.open(path, owner="a controller")
    with SqliteQueue.open(path, owner="a controller") as former:
        with SqliteQueue.open(path, owner="the next one") as now:
            with pytest.raises(JournalError, match="was taken over by another controller"):
                former.append([finished(SampleId(0, 0))])
            assert now.append([finished(SampleId(0, 0))]) == 1
        with pytest.raises(JournalError, match="is being written"):
            SqliteQueue.open(path)
    held = pytest.raises(JournalError, match="is being written")
    with SqliteQueue.open(path), held:  # after a launched run, one of one process
        SqliteQueue.open(path, owner="a third one")


# --- whatever happens in whatever order -------------------------------------------------------------------

SAMPLE = st.builds(SampleId, st.integers(0, 2), st.integers(0, 1), st.integers(0, 1))
DEEDS = st.lists(
    st.one_of(
        st.tuples(st.just("finish"), st.lists(SAMPLE, min_size=1, max_size=3)),
        st.tuples(st.just("score"), st.tuples(st.integers(0, 2), st.integers(0, 1), st.floats(0, 1))),
        st.tuples(st.just("snapshot"), st.integers(0, 20)),
        st.tuples(st.just("forget"), st.lists(st.integers(0, 2), max_size=2)),
        st.tuples(st.just("reopen"), st.none()),
    ),
    max_size=12,
)


def test_it_reads_as_a_journal_of_plain_lists_would(store: Store):
    """The oracle holds rows and payloads in Python's own containers: first come, first kept."""

    @settings(max_examples=25)
    @given(DEEDS)
    def holds(deeds: list[tuple[str, Any]]) -> None:
        place = dataclasses.replace(store, path=store.path.with_name(uuid.uuid4().hex))
        queue, events, payloads, rewards, snapshots = place.create({}), [], {}, {}, {}
        for number, (deed, value) in enumerate(deeds):
            if deed == "finish":
                queue.append([finished(sample, length=6 + number) for sample in value])
                events += [finished(sample, length=6 + number).event for sample in value]
                for sample in value:
                    payloads.setdefault(sample, 6 + number)
            elif deed == "score":
                event = RewardScored(value[0], value[1], (value[2], 1.0))
                queue.append([Entry(event)])
                events.append(event)
                rewards.setdefault(value[:2], value[2])
            elif deed == "snapshot":
                seq = min(value, len(events))
                queue.snapshot(seq, {"number": number})
                snapshots[seq] = {"number": number}
            elif deed == "forget":
                queue.forget(value)
                payloads = {sample: kept for sample, kept in payloads.items() if sample.ordinal not in value}
            else:
                queue.close()
                queue = place.open()
        for journal in (queue, place.open(readonly=True)):
            assert [row.event for row in journal.rows()] == events
            assert journal.last_seq == len(events)
            assert journal.latest_snapshot() == (max(snapshots.items()) if snapshots else None)
            for sample, length in payloads.items():
                held = journal.trajectory(sample)
                reward = rewards.get((sample.ordinal, sample.attempt), 0.5) if sample.member == 0 else None
                assert len(held.tokens) == length
                assert reward is None or held.reward == reward
            for sample in {SampleId(o, m, a) for o in range(3) for m in range(2) for a in range(2)} - set(
                payloads
            ):
                with pytest.raises(JournalError, match="no trajectory"):
                    journal.trajectory(sample)
            journal.close()

    holds()
