"""Boxes of messages over a real Redis: at least once, in order, bounded; and who lives."""

from __future__ import annotations

import threading
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from areal_jax.runtime.broker import Broker, BrokerError
from areal_jax.runtime.redis_server import RedisServer
from tests.redis_servers import Killable, Wire, client, keys_of, require_redis

cluster = pytest.mark.cluster


@pytest.fixture
def run() -> str:
    return f"run-{uuid.uuid4().hex[:8]}"


@pytest.fixture
def broker(redis_at: RedisServer, run: str) -> Iterator[Broker]:
    with Broker(redis_at.url, run, deadline_s=10, secret=redis_at.secret) as broker:
        yield broker


def again(redis_at: RedisServer, run: str, **options: Any) -> Broker:
    """The same process' successor: nothing is remembered but what Redis holds."""
    return Broker(redis_at.url, run, **{"deadline_s": 10, "secret": redis_at.secret} | options)


def bodies(messages: list[Any]) -> list[Any]:
    return [message.body for message in messages]


# --- messages -----------------------------------------------------------------------------

LEAF = st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats(allow_nan=False) | st.text()
PLAIN = st.recursive(
    LEAF | st.binary(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text() | st.integers(0, 9), inner),
    max_leaves=8,
)


@cluster
def test_every_plain_value_arrives_as_it_was_sent_and_in_order(broker: Broker):
    @settings(max_examples=30)
    @given(st.lists(PLAIN, min_size=1, max_size=5))
    def holds(sent: list[Any]) -> None:
        for body in sent:
            broker.post("controller", body)
        taken = broker.take("controller", "me", 1.0)
        assert bodies(taken) == sent
        broker.done("controller", taken)

    holds()
    assert broker.take("controller", "me", 0) == []


@cluster
def test_what_was_taken_and_not_done_comes_again_after_a_restart_before_what_is_new(
    broker: Broker, redis_at: RedisServer, run: str
):
    for number in range(6):
        broker.post("host-0", number)
    first = broker.take("host-0", "host-0", 1, most=4)
    assert bodies(first) == [0, 1, 2, 3]
    broker.done("host-0", first[1:2])
    assert bodies(broker.take("host-0", "host-0", 1)) == [4, 5], "within one life each comes once"
    assert broker.take("host-0", "host-0", 0.05) == []

    with again(redis_at, run) as successor:
        successor.post("host-0", 6)
        assert bodies(successor.take("host-0", "host-0", 1, most=2)) == [0, 2]
        assert bodies(successor.take("host-0", "host-0", 1, most=2)) == [3, 4]
        assert bodies(successor.take("host-0", "host-0", 1, most=2)) == [5]
        rest = successor.take("host-0", "host-0", 1, most=2)
        assert bodies(rest) == [6]
        successor.done("host-0", rest)
    with again(redis_at, run) as third:
        left = third.take("host-0", "host-0", 1)
        assert bodies(left) == [0, 2, 3, 4, 5]
        third.done("host-0", left)
        third.done("host-0", left)
    with again(redis_at, run) as fourth:
        assert fourth.take("host-0", "host-0", 0.05) == []


@cluster
def test_a_shared_box_gives_each_message_to_one_reader_and_a_dead_ones_to_another(
    broker: Broker, redis_at: RedisServer, run: str
):
    for number in range(5):
        broker.post("reward", number)
    dying, living = again(redis_at, run), again(redis_at, run)
    assert bodies(dying.take("reward", "worker-0", 1, most=2)) == [0, 1]
    mine = living.take("reward", "worker-1", 1, most=2, claim_idle_s=0.5)
    assert bodies(mine) == [2, 3]
    living.done("reward", mine[:1])
    dying.close()
    started_s, found = time.monotonic(), []
    while len(found) < 3:
        found += living.take("reward", "worker-1", 5, claim_idle_s=0.5)
    assert bodies(found) == [4, 0, 1], "3 is in its own hands, 2 is done"
    assert 0.3 < time.monotonic() - started_s < 3
    living.done("reward", [*found, *mine])
    with again(redis_at, run) as back:
        assert back.take("reward", "worker-0", 0.05, claim_idle_s=0) == []
    with client(redis_at) as asked:
        assert asked.xlen(f"areal:{{{run}}}:box:reward") == 0
    living.close()


DEEDS = st.lists(
    st.one_of(
        st.tuples(st.just("post"), st.integers(1, 4)),
        st.tuples(st.just("take"), st.integers(0, 1), st.integers(1, 3)),
        st.tuples(st.just("done"), st.integers(0, 1), st.integers(0, 3)),
        st.tuples(st.just("restart"), st.integers(0, 1)),
    ),
    max_size=20,
)


@cluster
def test_two_readers_of_a_box_that_come_and_go_lose_nothing_and_repeat_only_what_they_forgot(
    redis_at: RedisServer,
):
    """The oracle: what is in the box, what each reader took, and what it has in hand in this life."""

    @settings(max_examples=30)
    @given(DEEDS)
    def holds(deeds: list[tuple[Any, ...]]) -> None:
        run, posted = uuid.uuid4().hex, 0
        lives = [again(redis_at, run) for _ in range(2)]
        new: list[int] = []
        taken: list[list[int]] = [[], []]
        hands: list[list[Any]] = [[], []]
        for deed, *value in deeds:
            if deed == "post":
                for _ in range(value[0]):
                    lives[0].post("reward", posted)
                    new.append(posted)
                    posted += 1
                continue
            reader = value[0]
            if deed == "take":
                left = [body for body in taken[reader] if body not in bodies(hands[reader])]
                expected = (left or new)[: value[1]]
                found = lives[reader].take("reward", f"worker-{reader}", 0, most=value[1])
                assert bodies(found) == expected
                if not left:
                    del new[: len(expected)]
                    taken[reader] += expected
                hands[reader] += found
            elif deed == "done":
                finished, hands[reader] = hands[reader][: value[1]], hands[reader][value[1] :]
                lives[reader].done("reward", finished)
                taken[reader] = [body for body in taken[reader] if body not in bodies(finished)]
            else:
                lives[reader].close()
                lives[reader], hands[reader] = again(redis_at, run), []
        with client(redis_at) as asked:
            assert asked.xlen(f"areal:{{{run}}}:box:reward") == len(new) + len(taken[0]) + len(taken[1])
        for life in lives:
            life.remove()
            life.close()

    holds()


@cluster
def test_taking_waits_for_the_first_message_and_no_longer(broker: Broker, redis_at: RedisServer, run: str):
    started_s = time.monotonic()
    assert broker.take("controller", "me", 0.3) == []
    assert 0.25 < time.monotonic() - started_s < 1.5
    with again(redis_at, run) as poster:
        threading.Timer(0.2, poster.post, ("controller", "late")).start()
        started_s = time.monotonic()
        assert bodies(broker.take("controller", "me", 20)) == ["late"]
        assert time.monotonic() - started_s < 5


@cluster
def test_a_full_box_holds_back_who_posts_and_then_names_itself(
    broker: Broker, redis_at: RedisServer, run: str
):
    with again(redis_at, run, deadline_s=0.4, length=3) as poster:
        for number in range(3):
            poster.post("host-1", number)
        with pytest.raises(BrokerError, match=r"the box 'host-1' of run .* held 3 messages for 0.4 s"):
            poster.post("host-1", 3)
        taken = broker.take("host-1", "host-1", 1)
        assert bodies(taken) == [0, 1, 2]
        with pytest.raises(BrokerError, match="host-1"):
            poster.post("host-1", 3)  # taken is not done
        threading.Timer(0.15, broker.done, ("host-1", taken)).start()
        poster.post("host-1", 3)
        assert bodies(broker.take("host-1", "host-1", 1)) == [3]


@cluster
def test_messages_posted_together_come_in_order_though_they_do_not_all_fit_at_once(
    broker: Broker, redis_at: RedisServer, run: str
):
    with again(redis_at, run, length=3) as poster:
        sender = threading.Thread(target=poster.post, args=("host-1", *range(8)), daemon=True)
        sender.start()
        found: list[Any] = []
        while len(found) < 8:
            taken = broker.take("host-1", "host-1", 5, most=2)
            assert taken
            found += bodies(taken)
            broker.done("host-1", taken)
        sender.join(5)
        assert found == list(range(8)) and not sender.is_alive()
        with pytest.raises(BrokerError, match="cannot be sent"):
            poster.post("host-1", 8, object())
        assert broker.take("host-1", "host-1", 0) == [], "none is sent where one cannot be"
        poster.post("host-1")
        with pytest.raises(BrokerError, match=r"held 3 messages for 0.4 s"):
            again(redis_at, run, deadline_s=0.4, length=3).post("host-1", *range(4))
        assert bodies(broker.take("host-1", "host-1", 0)) == [0, 1, 2]


@cluster
def test_clearing_drops_all_also_under_a_waiting_reader(broker: Broker, redis_at: RedisServer, run: str):
    broker.post("trainer", "old")
    assert bodies(broker.take("trainer", "t", 1)) == ["old"]
    broker.post("trainer", "older")
    with again(redis_at, run) as other:

        def clear_and_post() -> None:
            time.sleep(0.3)
            other.clear("trainer")
            other.post("trainer", "new")

        broker.done("trainer", broker.take("trainer", "t", 1))
        threading.Thread(target=clear_and_post).start()
        assert bodies(broker.take("trainer", "t", 10)) == ["new"]
        assert bodies(other.take("trainer", "t", 1)) == ["new"], "the successor has only what was not cleared"
    broker.clear("trainer")
    assert keys_of(redis_at, run) == set()


@cluster
def test_removing_leaves_nothing_of_this_run_and_everything_of_others(redis_at: RedisServer, run: str):
    names = (f"{run}[ab]*?", f"{run}a", f"{run}[ab]*?2")
    brokers = [again(redis_at, name) for name in names]
    for broker in brokers:
        for box in ("controller", "host-0"):
            broker.post(box, 1)
        broker.beat("host-0", 1, 60)
    with client(redis_at) as asked:
        asked.set(f"areal:{{{names[0]}}}:state", "the journal's")
        brokers[0].remove()
        left = {key.split("{")[1] for key in asked.scan_iter("areal:*") if run in key}
    others = {f"{name}}}:{key}" for name in names[1:] for key in ("box:controller", "box:host-0", "beats")}
    assert left == others | {f"{names[0]}}}:state"}
    for broker in brokers:
        broker.close()


# --- the wire breaks ----------------------------------------------------------------------


@cluster
def test_an_answer_that_is_lost_loses_no_message(redis_at: RedisServer, run: str):
    """Redis counts the messages as this reader's, who never saw them."""
    with (
        Wire(redis_at.port) as wire,
        again(redis_at, run) as poster,
        Broker(f"redis://127.0.0.1:{wire.port}", run, deadline_s=10, secret=redis_at.secret) as reader,
    ):
        poster.post("controller", 0)
        held = reader.take("controller", "me", 1)
        for number in range(1, 4):
            poster.post("controller", number)
        wire.lose_next(b"XREADGROUP")
        threading.Timer(0.3, poster.post, ("controller", 4)).start()  # while the reader asks again
        found = []
        while len(found) < 4:
            found += reader.take("controller", "me", 1)
        assert bodies(found) == [1, 2, 3, 4], "0 is in hand already"
        wire.lose_next(b"box:controller")
        reader.done("controller", held + found)
        assert wire.lost == 2
        wire.lose_next(b"controller")
        reader.post("controller", "once or twice")
        taken = reader.take("controller", "me", 1)
        assert set(bodies(taken)) == {"once or twice"}
        assert len(taken) in (1, 2)


@cluster
def test_a_server_that_is_killed_and_comes_back_keeps_every_message_and_beat(tmp_path: Path, run: str):
    require_redis()
    with Killable(tmp_path / "redis") as killable:
        poster, reader = again(killable.server, run), again(killable.server, run)
        sent, got = list(range(120)), []

        def post() -> None:
            for number in sent:
                poster.post("controller", number)
                time.sleep(0.005)

        def read() -> None:
            while len(set(got)) < len(sent):
                messages = reader.take("controller", "me", 0.5, most=8)
                got.extend(bodies(messages))
                reader.done("controller", messages)

        threads = [threading.Thread(target=body) for body in (post, read)]
        for thread in threads:
            thread.start()
        poster.beat("host-0", {"slots": 4}, 60)
        for away_s in (0.3, 1.0):
            seen = len(got)
            while len(got) < seen + 15:
                time.sleep(0.01)
            killable.kill()
            time.sleep(away_s)
            killable.start()
        for thread in threads:
            thread.join(timeout=60)
        assert sorted(set(got)) == sent
        assert len(got) <= len(sent) + 2, "twice only where the answer was lost"
        assert reader.beats() == {"host-0": {"slots": 4}}
        poster.close()
        reader.close()


@cluster
def test_closing_lets_a_waiting_thread_end_and_nobody_begin(redis_at: RedisServer, run: str):
    broker, ends = again(redis_at, run), []

    def wait() -> None:
        try:
            ends.append(broker.take("controller", "me", 0.8))
        except BrokerError as error:
            ends.append(str(error))

    thread = threading.Thread(target=wait)
    thread.start()
    time.sleep(0.3)
    broker.close()
    thread.join(timeout=10)
    assert ends == [[]]
    with pytest.raises(BrokerError, match=r"the connection to redis://.* is closed; open a new one"):
        broker.post("controller", 1)


# --- signs of life ------------------------------------------------------------------------


@cluster
def test_a_beat_is_heard_until_it_expires_or_another_follows(broker: Broker, redis_at: RedisServer, run: str):
    assert broker.beats() == {}
    broker.beat("host-0", {"live": 3, "of": [1, 2]}, 0.25)
    broker.beat("host one:1 {x}", None, 30)
    broker.beat("host-2", b"\x00 bytes \xff", 30)
    assert broker.beats() == {
        "host-0": {"live": 3, "of": [1, 2]},
        "host one:1 {x}": None,
        "host-2": b"\x00 bytes \xff",
    }
    broker.beat("host-2", "again", 30)
    time.sleep(0.3)
    with again(redis_at, run) as other:
        assert other.beats() == {"host one:1 {x}": None, "host-2": "again"}
    with client(redis_at) as asked:
        assert set(asked.hkeys(f"areal:{{{run}}}:beats")) == {"host one:1 {x}", "host-2"}


# --- bad input ----------------------------------------------------------------------------


@cluster
def test_what_has_no_plain_form_is_named_with_its_box(broker: Broker):
    for body in (object(), np.zeros(3), {"a": {1, 2}}, 2**70):
        with pytest.raises(BrokerError, match="a message for the box 'controller' cannot be sent"):
            broker.post("controller", body)
    broker.post("controller", {"loss": np.float32(0.5)})
    assert bodies(broker.take("controller", "me", 1)) == [{"loss": 0.5}]


@cluster
def test_a_message_of_another_program_is_named(broker: Broker, redis_at: RedisServer, run: str):
    for fields in ({"body": b"\xc1"}, {"text": "hello"}):
        broker.clear("controller")
        with client(redis_at) as asked:
            asked.xadd(f"areal:{{{run}}}:box:controller", fields)
        with pytest.raises(BrokerError, match=r"message \d+-0 of the box 'controller' is none of ours"):
            broker.take("controller", "me", 1)


def test_the_password_comes_from_the_environment_and_is_in_no_message(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("AREAL_JAX_SECRET", "open-sesame-open")
    broker = Broker("redis://127.0.0.1:9/0", "r", deadline_s=0.1)
    with pytest.raises(
        BrokerError, match=r"no Redis answers at redis://127.0.0.1:9/0 within 0.1 s"
    ) as caught:
        broker.post("controller", 1)
    assert "sesame" not in f"{caught.value}{caught.value.__cause__}{broker!r}"
    monkeypatch.delenv("AREAL_JAX_SECRET")
    with pytest.raises(BrokerError, match="there is no password for it"):
        Broker("redis://trainer:6379/0", "r")
