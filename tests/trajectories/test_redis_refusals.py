"""What a journal in Redis cannot work with, and what it says then."""

from __future__ import annotations

from pathlib import Path

import pytest

from areal_jax.control.events import HostJoined
from areal_jax.runtime.redis_server import RedisServer
from areal_jax.trajectories.journal import Entry, JournalError
from areal_jax.trajectories.redis import RedisQueue
from areal_jax.trajectories.sqlite import SqliteQueue
from tests.redis_servers import Killable, client
from tests.trajectories.journals import Store, assert_whole, group, make_store

pytestmark = pytest.mark.cluster


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
