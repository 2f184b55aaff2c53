"""What only the journal in Redis promises: servers that die, writers that were given up, memory, moving."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from areal_jax.control.events import HostJoined, RewardScored
from areal_jax.runtime.redis_server import RedisServer
from areal_jax.trajectories import redis_part
from areal_jax.trajectories.journal import Entry, JournalError
from areal_jax.trajectories.redis import RedisQueue
from areal_jax.trajectories.redis_part import RedisPart
from areal_jax.trajectories.sqlite import SqliteQueue
from areal_jax.types import SampleId
from tests.redis_servers import Killable, Wire, client, keys_of, require_redis
from tests.trajectories.journals import Store, finished, make_store
from tests.trajectories.test_journal import writing

pytestmark = pytest.mark.cluster


@pytest.fixture
def store(redis_at: RedisServer, tmp_path: Path) -> Store:
    return make_store(tmp_path / "run", redis_at)


@pytest.fixture
def queue(store: Store) -> Iterator[RedisQueue]:
    with store.create({}) as queue:
        assert isinstance(queue, RedisQueue)
        yield queue


@pytest.fixture
def killable(tmp_path: Path) -> Iterator[Killable]:
    require_redis()
    with Killable(tmp_path / "redis") as killable:
        yield killable


def group(ordinal: int) -> list[Entry]:
    """Two samples and their rewards: three events."""
    scored = RewardScored(ordinal, 0, (ordinal / 10, 1.0))
    return [finished(SampleId(ordinal, 0)), finished(SampleId(ordinal, 1)), Entry(scored)]


def assert_whole(journal: RedisQueue | SqliteQueue, groups: int) -> None:
    """Events 1 to 3 * groups, each once, with every payload and reward."""
    rows = list(journal.rows())
    assert [row.seq for row in rows] == list(range(1, 3 * groups + 1))
    assert [row.event for row in rows] == [entry.event for o in range(groups) for entry in group(o)]
    for ordinal in range(groups):
        assert [t.reward for t in journal.group(ordinal, 0, 2)] == [ordinal / 10, 1.0]


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
        for request in range(1000):
            folder = tmp_path / str(request)
            store = make_store(folder, redis_at, f"redis://127.0.0.1:{wire.port}/0")
            lost, started_s = wire.lost, time.monotonic()
            wire.lose_next(b"EVALSHA", after=request)
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
            if wire.lost == lost:
                break
    assert 20 < request < 60


def test_one_that_does_not_come_back_is_an_error_by_the_deadline(
    killable: Killable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(redis_part, "LEASE_S", 1.0)
    store = make_store(tmp_path / "run", killable.server)
    store.create({}).close()
    queue = store.open(deadline_s=0.5)
    killable.kill()
    started_s = time.monotonic()
    with pytest.raises(JournalError, match=r"no Redis answers at redis://127.0.0.1:\d+/0 within 0.5 s"):
        queue.append(group(0))
    assert time.monotonic() - started_s < 2
    with pytest.raises(JournalError, match="no Redis answers"):
        queue.close()
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


# --- memory, and the way to the archive -------------------------------------------------------------------


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


# --- what cannot work -------------------------------------------------------------------------------------


def test_a_server_without_its_file_is_refused_unless_the_url_says_so(
    killable: Killable, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    store = make_store(tmp_path / "run", killable.server)
    with client(killable.server) as asked:
        asked.config_set("appendonly", "no")
        with pytest.raises(
            JournalError, match=r"keeps no append-only file.*appendonly yes.*\?durability=none"
        ):
            store.create({})
        assert not store.folder.exists()
        store = make_store(tmp_path / "run", killable.server, f"{killable.server.url}?durability=none")
        with store.create({}) as queue:
            assert queue.append(group(0)) == 3
        assert "keeps no append-only file" in caplog.text
        asked.config_set("appendonly", "yes")
        asked.config_set("maxmemory-policy", "allkeys-lru")
        with pytest.raises(JournalError, match=r"throws away keys .*allkeys-lru.*set noeviction"):
            make_store(tmp_path / "other", killable.server).create({})


def test_a_password_that_is_wrong_or_missing_is_named_but_never_shown(redis_at: RedisServer, tmp_path: Path):
    for secret, match in [("not-the-password", "password is wrong"), (None, "none was given")]:
        with pytest.raises(JournalError, match=match) as caught:
            RedisQueue.create(redis_at.url, "r", {}, tmp_path, secret=secret)
        assert "not-the-password" not in f"{caught.value}{caught.value.__cause__}{caught.value.__context__}"
    url = redis_at.url.replace("//", "//:sesame-open@")
    with pytest.raises(JournalError, match="password is wrong") as caught:
        RedisQueue.create(url, "r", {}, tmp_path, secret=redis_at.secret)
    assert "sesame-open" not in str(caught.value)
    with RedisQueue.create(
        redis_at.url.replace("//", f"//:{redis_at.secret}@"), "in-the-url", {}, tmp_path / "run"
    ) as queue:
        queue.append(group(0))
        assert redis_at.secret not in repr(vars(queue)) + queue._where + repr(queue._part._link)
    assert redis_at.secret.encode() not in (tmp_path / "run" / "journal.sqlite").read_bytes()


def test_another_run_of_the_name_another_format_and_lost_data_are_told_apart(
    store: Store, redis_at: RedisServer, tmp_path: Path
):
    queue = store.create({})
    queue.append(group(0))
    queue.snapshot(2, {"at": 2})
    state = f"areal:{{{store.run}}}:state"
    twin = Store(tmp_path / "twin", store.url, store.secret, store.run)
    with pytest.raises(
        JournalError, match=r"holds 3 events of another run .*choose another run.name.*redis-cli del"
    ):
        twin.create({})
    assert not (twin.folder / "journal.sqlite").exists()
    with pytest.raises(JournalError, match="exists; resume that run"):
        store.create({})
    queue._release()
    with client(redis_at) as asked:
        held = asked.hgetall(state)
        for field, value, match in [
            ("format", "99", "journal format 99, and this areal-jax reads format 3"),
            ("identity", "other", "another run under the name"),
        ]:
            asked.hset(state, field, value)
            for readonly in (True, False):
                with pytest.raises(JournalError, match=match):
                    store.open(readonly)
            asked.hset(state, mapping=held)
        for key in asked.scan_iter(f"areal:{{{store.run}}}:*"):
            asked.delete(key)
    for readonly in (True, False):
        with pytest.raises(
            JournalError, match=r"has nothing of this run, whose events after 2 .*\?lost=accept"
        ):
            store.open(readonly)
    url = f"{store.url}?lost=accept"
    with RedisQueue.open(url, store.run, store.folder, secret=store.secret) as again:
        assert (again.last_seq, again.latest_snapshot()) == (2, (2, {"at": 2}))
        assert again.append([Entry(HostJoined("host-0", 2))]) == 3


def test_an_older_copy_of_the_archive_is_refused(queue: RedisQueue, store: Store):
    queue.append(group(0))
    queue.snapshot(1, {})
    older = queue.path.read_bytes()
    queue.snapshot(3, {})
    queue.append(group(1))
    newer = queue.path.read_bytes()
    queue._release()
    queue.path.write_bytes(older)
    with pytest.raises(JournalError, match="is an older copy; bring back the newer one"):
        store.open()
    with store.open(readonly=True) as reader, pytest.raises(JournalError, match="event 2 is in neither"):
        list(reader.rows())
    queue.path.write_bytes(newer)
    with store.open() as again:
        assert_whole(again, 2)


def test_a_run_without_redis_is_not_taken_for_one_with(store: Store):
    SqliteQueue.create(store.folder / "journal.sqlite", {}).close()
    with pytest.raises(JournalError, match=r"was written without Redis: unset runtime.redis"):
        store.open()


def test_a_full_memory_refuses_an_append_whole_and_says_what_to_do(killable: Killable, tmp_path: Path):
    with make_store(tmp_path / "run", killable.server).create({}) as queue, client(killable.server) as asked:
        queue.append(group(0))
        asked.config_set("maxmemory", 1)
        with pytest.raises(JournalError, match="raise it, or write checkpoints more often"):
            queue.append(group(1))
        asked.config_set("maxmemory", 0)
        queue.append(group(1))
        assert_whole(queue, 2)


def test_a_user_with_few_rights_is_enough(redis_at: RedisServer, tmp_path: Path):
    """The rights that the message about missing ones names."""
    with client(redis_at) as asked:
        asked.acl_setuser("narrow", enabled=True, passwords=["+narrow-pass"], keys=["areal:*"])
        url = redis_at.url.replace("//", "//narrow:narrow-pass@")
        with pytest.raises(
            JournalError, match=r"give this user the rights ~areal:\* \+@all -@dangerous \+info"
        ):
            RedisQueue.create(url, "narrow", {}, tmp_path / "run")
        asked.acl_setuser(
            "narrow", enabled=True, passwords=["+narrow-pass"], keys=["areal:*"],
            categories=["+@all", "-@dangerous"], commands=["+info"],
        )  # fmt: skip
        with RedisQueue.create(url, "narrow", {}, tmp_path / "run") as queue:
            queue.append(group(0))
            queue.snapshot(3, {})
            queue.append(group(1))
            assert_whole(queue, 2)
        asked.acl_deluser("narrow")
