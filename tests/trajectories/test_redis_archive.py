"""From Redis to the archive: memory that stays bounded, moves that are killed, readers beside them."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest

from areal_jax.control.events import HostJoined
from areal_jax.runtime.redis_server import RedisServer
from areal_jax.trajectories import redis_part
from areal_jax.trajectories.journal import Entry, JournalError
from areal_jax.trajectories.redis import RedisQueue
from areal_jax.trajectories.redis_part import RedisPart
from areal_jax.trajectories.sqlite import SqliteQueue
from tests.redis_servers import Killable, client, keys_of
from tests.trajectories.journals import Store, assert_whole, group, make_store

pytestmark = pytest.mark.cluster


def test_redis_holds_what_came_after_the_last_checkpoint_however_long_the_run(
    queue: RedisQueue, store: Store, redis_at: RedisServer
):
    prefix, bytes_held = f"areal:{{{store.run}}}:", []
    with client(redis_at) as asked:
        for checkpoint in range(12):
            for ordinal in range(4 * checkpoint, 4 * checkpoint + 4):
                queue.append(group(ordinal))
            queue.snapshot(queue.last_seq, {"checkpoint": checkpoint})
            queue.append([Entry(HostJoined("host-0", checkpoint))])
            queue.forget(range(4 * checkpoint - 8, 4 * checkpoint - 4))
            assert keys_of(redis_at, store.run) == {"state", "events", "lease"}
            assert asked.xlen(prefix + "events") == 1
            bytes_held.append(sum(asked.memory_usage(prefix + key) for key in ("state", "events")))
    assert max(bytes_held[1:]) <= 1.2 * bytes_held[1]
    with SqliteQueue.open(queue.path, readonly=True) as archive:
        assert archive.last_seq == 12 * 13 - 1
        assert [len(archive.payloads(ordinal, 0)) for ordinal in range(38, 48)] == [0, 0] + [2] * 8
    assert len(list(queue.rows())) == queue.last_seq == 12 * 13


def test_a_finished_run_leaves_redis_and_is_read_without_it(killable: Killable, tmp_path: Path):
    store = make_store(tmp_path / "run", killable.server)
    with store.create({"cores": 2}) as queue:
        queue.append(group(0))
        queue.snapshot(2, {"half": 1})
        queue.append(group(1))
    assert keys_of(killable.server, store.run) == set()
    killable.stop()
    with store.open(readonly=True) as reader, SqliteQueue.open(reader.path) as plain:
        for journal in (reader, plain):
            assert_whole(journal, 2)
            assert (journal.last_seq, journal.header, journal.latest_snapshot()) == (
                6,
                {"cores": 2},
                (2, {"half": 1}),
            )
    killable.start()
    with store.open() as again:
        assert again.append(group(2)) == 9
        assert_whole(again, 3)
        with pytest.raises(
            JournalError, match=r"newest events of .* are in Redis.*set runtime.redis=redis://127"
        ):
            SqliteQueue.open(again.path)


class Killed(BaseException):
    """Stands for kill -9: nothing of ours catches it."""


STEPS = [
    (SqliteQueue, "absorb"),
    (RedisPart, "trim"),
    (SqliteQueue, "snapshot"),
    (SqliteQueue, "set_rest"),
    (RedisPart, "remove"),
]


@pytest.mark.parametrize("is_before", [True, False])
@pytest.mark.parametrize(("owner", "step"), STEPS, ids=[step for _, step in STEPS])
def test_a_crash_on_the_way_to_the_archive_loses_and_doubles_nothing(
    store: Store, redis_at: RedisServer, monkeypatch, owner: type, step: str, is_before: bool
):
    """Killed before or after each step of a move of several pieces; the next writer goes on from there."""
    monkeypatch.setattr(redis_part, "CHUNK_ROWS", 4)
    queue = store.create({})
    for ordinal in range(4):
        queue.append(group(ordinal))
    does, left = getattr(owner, step), [2 if step in ("absorb", "trim") else 1]

    def dies(*words) -> None:
        left[0] -= 1
        if left[0] == 0 and is_before:
            raise Killed
        does(*words)
        if left[0] == 0:
            raise Killed

    monkeypatch.setattr(owner, step, dies)
    with pytest.raises(Killed):  # the end of a run passes all steps but the snapshot's
        queue.snapshot(10, {"at": 10}) if step == "snapshot" else queue._move_all(12)
    monkeypatch.undo()
    queue._part._ended.set()  # dead men renew no lease
    with client(redis_at) as asked:
        asked.delete(f"areal:{{{store.run}}}:lease")

    with store.open(readonly=True) as reader:
        assert_whole(reader, 4)
    with store.open() as again:
        assert_whole(again, 4)
        assert (again.latest_snapshot() is None) == (step != "snapshot" or is_before)
        assert again.append(group(4)) == 15
        again.snapshot(15, {"at": 15})
        assert_whole(again, 5)
    with SqliteQueue.open(again.path) as archive:
        assert_whole(archive, 5)
    assert keys_of(redis_at, store.run) == set()


def test_a_reader_beside_the_writer_never_sees_a_gap(queue: RedisQueue, store: Store):
    ended, seen, failures = threading.Event(), [], []

    def read() -> None:
        try:
            with store.open(readonly=True) as reader:
                while not ended.is_set():
                    seqs = [row.seq for row in reader.rows()]
                    assert seqs == list(range(1, len(seqs) + 1))
                    assert not seen or len(seqs) >= seen[-1]
                    for ordinal in range(len(seqs) // 3):
                        assert [t.reward for t in reader.group(ordinal, 0, 2)] == [ordinal / 10, 1.0]
                    seen.append(len(seqs))
        except (AssertionError, JournalError) as error:
            failures.append(error)

    thread = threading.Thread(target=read)
    thread.start()
    for ordinal in range(40):
        queue.append(group(ordinal))
        if ordinal % 3 == 2:
            queue.snapshot(queue.last_seq - 2, {})
    while not failures and (not seen or seen[-1] < 120):
        time.sleep(0.01)
    ended.set()
    thread.join(timeout=30)
    assert failures == []
    assert seen[-1] == 120


def test_what_moves_between_two_looks_of_a_reader_is_not_skipped(
    queue: RedisQueue, store: Store, monkeypatch
):
    """It looks into the archive, finds nothing; all moves; it looks into Redis, finds nothing."""
    queue.append(group(0))
    with store.open(readonly=True) as reader:
        look, is_moved = reader._archive.records, []

        def moving(after_seq: int):
            found = look(after_seq)
            if not is_moved:
                is_moved.append(True)
                queue.snapshot(3, {})
            return found

        monkeypatch.setattr(reader._archive, "records", moving)
        assert_whole(reader, 1)
        is_moved.clear()
        queue.append(group(1))
        assert_whole(reader, 2)
