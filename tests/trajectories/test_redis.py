"""What only the journal in Redis promises: servers that die, writers that were given up."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from contextlib import suppress
from pathlib import Path

import pytest

from areal_jax.control.events import HostJoined
from areal_jax.runtime.redis_server import RedisServer
from areal_jax.trajectories import redis_part
from areal_jax.trajectories.journal import Entry, JournalError
from areal_jax.trajectories.redis import RedisQueue
from areal_jax.trajectories.sqlite import SqliteQueue
from areal_jax.types import SampleId
from tests.redis_servers import Killable, Wire, client, keys_of, require_redis
from tests.trajectories.journals import Store, assert_whole, group, make_store
from tests.trajectories.samples import assert_same
from tests.trajectories.test_journal import writing

pytestmark = pytest.mark.cluster


def give_up(store: Store, server: RedisServer) -> None:
    """As if the writer had been silent for longer than its lease."""
    with client(server) as asked:
        assert asked.delete(f"areal:{{{store.run}}}:lease") == 1


# --- the server dies --------------------------------------------------------------------------------------


def test_what_was_acknowledged_is_there_after_every_kill_of_the_server(killable: Killable, tmp_path: Path):
    store = make_store(tmp_path / "run", killable.server)
    with store.create({}) as queue:
        for ordinal in range(10):
            queue.append(group(ordinal))
            if ordinal % 4 == 3:
                queue.snapshot(queue.last_seq - 1, {})
            killable.kill()
            killable.start()
            with store.open(readonly=True) as reader:
                assert_whole(reader, ordinal + 1)
        assert_whole(queue, 10)
    with SqliteQueue.open(store.folder / "journal.sqlite", readonly=True) as archive:
        assert_whole(archive, 10)


def test_a_server_that_is_away_for_a_while_is_waited_for_and_nothing_is_written_twice(
    killable: Killable, tmp_path: Path
):
    queue = make_store(tmp_path / "run", killable.server).create({})
    written = []

    def write() -> None:
        for ordinal in range(200):
            queue.append(group(ordinal))
            written.append(ordinal)
            time.sleep(0.005)

    thread = threading.Thread(target=write)
    thread.start()
    for away_s in (1.2, 0.1, 0.3):
        seen = len(written)
        while len(written) < seen + 20:
            time.sleep(0.01)
        killable.kill()
        time.sleep(away_s)
        killable.start()
    thread.join(timeout=60)
    assert len(written) == 200
    assert_whole(queue, 200)
    queue.close()


@pytest.mark.slow
@pytest.mark.parametrize("fsync", ["always", "everysec"])
def test_rounds_of_killing_server_and_writer_at_any_moment(tmp_path: Path, fsync: str, monkeypatch):
    """The writer appends as fast as it can meanwhile; what it said was acknowledged is there."""
    monkeypatch.setattr(redis_part, "LEASE_S", 1.0)
    require_redis()
    chance = random.Random(1)
    for number in range(5):
        with Killable(tmp_path / f"redis-{number}", fsync) as killable:
            store = make_store(tmp_path / f"run-{number}", killable.server)
            writer, told = writing(store, 1.0), []
            listener = threading.Thread(target=lambda: told.extend(map(int, writer.stdout)))  # noqa: B023
            listener.start()
            while not told:
                time.sleep(0.01)
            for _ in range(2):
                time.sleep(chance.uniform(0, 0.5))
                killable.kill()
                time.sleep(chance.uniform(0, 0.3))
                killable.start()
            time.sleep(chance.uniform(0, 1))
            writer.kill()
            listener.join(timeout=30)
            assert writer.communicate()[1].count("Traceback") == 0
            with store.open() as again:
                assert again.last_seq >= told[-1]
                assert again.last_seq % 3 == 0
                assert [row.seq for row in again.rows()] == list(range(1, again.last_seq + 1))
                for ordinal in range(again.last_seq // 3):
                    assert len(again.group(ordinal, 0, 3)) == 3


@pytest.mark.parametrize("times", [1, 3])
def test_an_append_whose_answer_is_lost_is_applied_once(redis_at: RedisServer, tmp_path: Path, times: int):
    with Wire(redis_at.port) as wire:
        store = make_store(tmp_path / "run", redis_at, f"redis://127.0.0.1:{wire.port}/0")
        with store.create({}) as queue:
            queue.append(group(0))
            wire.lose_next(b"RewardScored", times)
            queue.append(group(1))
            assert wire.lost == times
            queue.append(group(2))
            assert_whole(queue, 3)


def test_whatever_answer_is_lost_in_a_journals_life_it_reads_the_same(
    redis_at: RedisServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Each request is lost in turn, from the making to the last close."""
    monkeypatch.setattr(redis_part, "LEASE_S", 600.0)  # who waits for a lease has failed
    with Wire(redis_at.port) as wire:
        for request in range(-1, 1000):  # in the first life none, so that the server knows all scripts
            folder = tmp_path / str(request)
            store = make_store(folder, redis_at, f"redis://127.0.0.1:{wire.port}/0")
            lost, started_s = wire.lost, time.monotonic()
            wire.lose_next(b"EVALSHA", times=int(request >= 0), after=request)
            with store.create({}) as queue:
                queue.append(group(0))
                queue.snapshot(2, {"at": 2})
                queue.append(group(1))
                queue._part.release()
                queue._last_seq = None  # ends without moving the rest
            with store.open() as again:
                again.append(group(2))
                assert_whole(again, 3)
                again.forget([7])
            assert keys_of(redis_at, store.run) == set()
            with SqliteQueue.open(folder / "journal.sqlite") as archive:
                assert_whole(archive, 3)
            assert time.monotonic() - started_s < 30
            if request >= 0 and wire.lost == lost:
                break
    assert 20 < request < 60


def test_one_that_does_not_come_back_is_an_error_by_the_deadline(
    killable: Killable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(redis_part, "LEASE_S", 1.0)
    store = make_store(tmp_path / "run", killable.server)
    store.create({}).close()
    queue = store.open(deadline_s=1.5)
    killable.kill()
    started_s = time.monotonic()
    with (
        pytest.raises(JournalError, match=r"no Redis answers at redis://127.0.0.1:\d+/0 within 1.5 s"),
        queue,
    ):
        queue.append(group(0))
    assert 1.5 < time.monotonic() - started_s < 3.6, "it waits once, and not again to close"
    killable.start()
    with store.open() as again:  # its events were never acknowledged, its lease expires
        assert again.append(group(0)) == 3


def test_a_server_that_lost_its_last_second_is_noticed(
    queue: RedisQueue, store: Store, redis_at: RedisServer
):
    queue.append(group(0) + group(1))
    with client(redis_at) as asked:
        assert asked.xdel(f"areal:{{{store.run}}}:events", "6-0") == 1
        asked.hset(f"areal:{{{store.run}}}:state", "last", 5)
    with pytest.raises(JournalError, match="Redis ends at event 5, before the last that it acknowledged"):
        queue.append(group(2))
    with suppress(JournalError):
        queue.close()
    with store.open() as again:
        assert again.last_seq == 5
        assert again.append([Entry(HostJoined("host-1", 2))]) == 6


def test_many_samples_are_read_at_once_from_both_parts(queue: RedisQueue):
    queue.append(group(0))
    queue.snapshot(queue.last_seq, {})
    queue.append(group(1))
    wanted = [entry.trajectory.sample for number in (1, 0) for entry in group(number) if entry.trajectory]
    found = queue.trajectories(wanted[::-1])
    assert sorted(found) == sorted(wanted) and len({sample.ordinal for sample in found}) == 2
    for sample, one in found.items():
        assert_same(one, queue.trajectory(sample))
        assert one.sample == sample
    with pytest.raises(JournalError, match="no trajectory"):
        queue.trajectories([*wanted, SampleId(7, 0)])


def test_a_server_that_lost_what_the_archive_has_loses_nothing(
    queue: RedisQueue, store: Store, redis_at: RedisServer
):
    queue.append(group(0))
    queue.append(group(1))
    queue.snapshot(6, {})
    queue._release()
    with client(redis_at) as asked:  # back to where it was before the move
        asked.delete(f"areal:{{{store.run}}}:events")
        for seq in (4, 5):
            asked.xadd(
                f"areal:{{{store.run}}}:events",
                {"wall_s": 0, "kind": "", "event": "", "actions": ""},
                f"{seq}-0",
            )
        asked.hset(f"areal:{{{store.run}}}:state", "last", 5)
    with store.open() as again:
        assert again.last_seq == 6
        assert again.append(group(2)) == 9
        assert_whole(again, 3)
        with store.open(readonly=True) as reader:
            assert_whole(reader, 3)
    with SqliteQueue.open(again.path) as archive:
        assert_whole(archive, 3)


# --- one writer -------------------------------------------------------------------------------------------


def test_a_writer_that_was_given_up_writes_nothing_more(
    queue: RedisQueue, store: Store, redis_at: RedisServer
):
    queue.append(group(0))
    give_up(store, redis_at)
    with store.open() as successor:
        successor.append(group(1))
        for deed in (
            lambda: queue.append(group(1)),
            lambda: queue.snapshot(3, {"stale": True}),
            lambda: queue.forget([0]),
            queue.close,
        ):
            with pytest.raises(JournalError, match=f"process {os.getpid()} on .* took over"):
                deed()
        assert successor.latest_snapshot() is None
        assert_whole(successor, 2)


def test_a_stopped_process_that_wakes_up_again_is_out(store: Store, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(redis_part, "LEASE_S", 0.6)
    writer = writing(store, 0.6)
    try:
        for _ in range(5):
            writer.stdout.readline()
        os.kill(writer.pid, signal.SIGSTOP)
        with store.open() as successor:
            seq = successor.append([Entry(HostJoined("host-9", 1))])
            os.kill(writer.pid, signal.SIGCONT)
            said = writer.communicate(timeout=30)[1]
            assert writer.returncode == 1
            assert "took over and writes it now" in said
            assert successor.append([Entry(HostJoined("host-9", 2))]) == seq + 1
            assert [row.seq for row in successor.rows()] == list(range(1, seq + 2))
    finally:
        writer.kill()


def test_an_idle_writer_keeps_its_lease(
    redis_at: RedisServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(redis_part, "LEASE_S", 0.3)
    store = make_store(tmp_path / "run", redis_at)
    with store.create({}) as queue:
        time.sleep(0.8)
        with pytest.raises(JournalError, match="is being written by"):
            store.open()
        assert queue.append(group(0)) == 3
