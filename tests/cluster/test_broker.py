"""Mailboxes of messages over a real Redis: at least once, in order, bounded; and who lives."""

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

from areal_jax.cluster.broker import Broker, BrokerError
from areal_jax.cluster.redis_server import RedisServer
from tests.hangs import HANG_S, wait_for
from tests.redis_servers import Killable, Wire, client, keys_of, require_redis, url_of

slow = pytest.mark.slow


@pytest.fixture
def run() -> str:
    return f"run-{uuid.uuid4().hex[:8]}"


@pytest.fixture
def broker(redis_at: RedisServer, run: str) -> Iterator[Broker]:
    with Broker(url_of(redis_at), run, deadline_s=10) as broker:
        yield broker


def again(redis_at: RedisServer, run: str, **options: Any) -> Broker:
    """The same process' successor: nothing is remembered but what Redis holds."""
    return Broker(url_of(redis_at), run, **{"deadline_s": 10} | options)


def bodies(messages: list[Any]) -> list[Any]:
    return [message.body for message in messages]


# --- messages -----------------------------------------------------------------------------

LEAF = st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats(allow_nan=False) | st.text()
PLAIN = st.recursive(
    LEAF | st.binary(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text() | st.integers(0, 9), inner),
    max_leaves=8,
)


@slow
def test_every_plain_value_arrives_as_it_was_sent_and_in_order(broker: Broker):
    @settings(max_examples=30)
    @given(st.lists(PLAIN, min_size=1, max_size=5))
    def holds(sent: list[Any]) -> None:
        for body in sent:
            broker.post("controller", body)
        taken = broker.take("controller", 1.0)
        assert bodies(taken) == sent
        broker.done("controller", taken)

    holds()
    assert broker.take("controller", 0) == []


@slow
def test_messages_taken_and_not_done_come_again_after_a_restart_before_new_ones(
    broker: Broker, redis_at: RedisServer, run: str
):
    for number in range(6):
        broker.post("host-0", number)
    first = broker.take("host-0", 1, most=4)
    assert bodies(first) == [0, 1, 2, 3]
    broker.done("host-0", first[1:2])
    assert bodies(broker.take("host-0", 1)) == [4, 5], "within one life each comes once"
    assert broker.take("host-0", 0.05) == []

    with again(redis_at, run) as successor:
        successor.post("host-0", 6)
        assert bodies(successor.take("host-0", 1, most=2)) == [0, 2]
        assert bodies(successor.take("host-0", 1, most=2)) == [3, 4]
        rest = successor.take("host-0", 1, most=2)
        assert bodies(rest) == [5, 6]
        successor.done("host-0", rest[1:])
    with again(redis_at, run) as third:
        left = third.take("host-0", 1)
        assert bodies(left) == [0, 2, 3, 4, 5]
        third.done("host-0", left)
        third.done("host-0", left)
    with again(redis_at, run) as fourth:
        assert fourth.take("host-0", 0.05) == []


DEEDS = st.lists(
    st.one_of(
        st.tuples(st.just("post"), st.integers(1, 4)),
        st.tuples(st.just("take"), st.integers(1, 3)),
        st.tuples(st.just("done"), st.integers(0, 3)),
        st.tuples(st.just("restart"), st.just(0)),
    ),
    max_size=20,
)


@slow
def test_a_reader_that_restarts_loses_no_message_and_gets_unfinished_ones_again(redis_at: RedisServer):
    """The oracle: what is in the mailbox, and what the reader was handed since its restart."""

    @settings(max_examples=30)
    @given(DEEDS)
    def holds(deeds: list[tuple[str, int]]) -> None:
        run, posted = uuid.uuid4().hex, 0
        poster, reader = again(redis_at, run), again(redis_at, run)
        left: list[int] = []
        hands: list[Any] = []
        for deed, count in deeds:
            if deed == "post":
                numbers = range(posted, posted + count)
                poster.post("host-0", *numbers)
                left += numbers
                posted += count
            elif deed == "take":
                expected = [body for body in left if body not in bodies(hands)][:count]
                found = reader.take("host-0", 0, most=count)
                assert bodies(found) == expected
                hands += found
            elif deed == "done":  # not always the first ones
                finished, hands = hands[-count:] if count else [], hands[:-count] if count else hands
                reader.done("host-0", finished)
                left = [body for body in left if body not in bodies(finished)]
            else:
                reader.close()
                reader, hands = again(redis_at, run), []
        with client(redis_at) as asked:
            assert asked.xlen(f"areal:{{{run}}}:mailbox:host-0") == len(left)
        reader.remove()
        for life in (poster, reader):
            life.close()

    holds()


@slow
def test_taking_waits_for_the_first_message_and_no_longer(broker: Broker, redis_at: RedisServer, run: str):
    with again(redis_at, run) as poster:

        def later(delay_s: float, mailbox: str) -> threading.Timer:
            timer = threading.Timer(delay_s, poster.post, (mailbox, f"after {delay_s} s"))
            timer.start()
            return timer

        beyond, started_s = later(3.0, "host-0"), time.monotonic()
        assert broker.take("host-0", 0.3) == []
        assert time.monotonic() - started_s > 0.25
        first, second = later(0.2, "controller"), later(3.0, "controller")
        assert bodies(broker.take("controller", 20)) == ["after 0.2 s"]
        for timer in (beyond, first, second):
            timer.cancel()
            timer.join()


@slow
def test_a_full_box_holds_back_who_posts_and_then_names_itself(
    broker: Broker, redis_at: RedisServer, run: str
):
    with again(redis_at, run, deadline_s=0.4, length=3) as poster:
        for number in range(3):
            poster.post("host-1", number)
        with pytest.raises(
            BrokerError, match=r"mailbox 'host-1' of run .* was full \(3 messages\) for 0.4 s"
        ):
            poster.post("host-1", 3)
        taken = broker.take("host-1", 1)
        assert bodies(taken) == [0, 1, 2]
        with pytest.raises(BrokerError, match="host-1"):
            poster.post("host-1", 3)  # taken is not done
        threading.Timer(0.15, broker.done, ("host-1", taken)).start()
        with again(redis_at, run, deadline_s=HANG_S, length=3) as patient:
            patient.post("host-1", 3)
        assert bodies(broker.take("host-1", 1)) == [3]


@slow
def test_messages_posted_together_come_in_order_though_they_do_not_all_fit_at_once(
    broker: Broker, redis_at: RedisServer, run: str
):
    with again(redis_at, run, length=3) as poster:
        sender = threading.Thread(target=poster.post, args=("host-1", *range(8)), daemon=True)
        sender.start()
        found: list[Any] = []
        while len(found) < 8:
            taken = broker.take("host-1", 5, most=2)
            assert taken
            found += bodies(taken)
            broker.done("host-1", taken)
        sender.join(HANG_S)
        assert found == list(range(8)) and not sender.is_alive()
        with pytest.raises(BrokerError, match="cannot be encoded"):
            poster.post("host-1", 8, object())
        assert broker.take("host-1", 0) == [], "none is sent where one cannot be"
        poster.post("host-1")
        with pytest.raises(BrokerError, match=r"was full \(3 messages\) for 0.4 s"):
            again(redis_at, run, deadline_s=0.4, length=3).post("host-1", *range(4))
        assert bodies(broker.take("host-1", 0)) == [0, 1, 2]


@slow
def test_clearing_drops_all_also_under_a_waiting_reader(broker: Broker, redis_at: RedisServer, run: str):
    broker.post("trainer", "old")
    assert bodies(broker.take("trainer", 1)) == ["old"]
    broker.post("trainer", "older")
    with again(redis_at, run) as other:

        def clear_and_post() -> None:
            time.sleep(0.3)
            other.clear("trainer")
            other.post("trainer", "new")

        broker.done("trainer", broker.take("trainer", 1))
        threading.Thread(target=clear_and_post).start()
        assert bodies(broker.take("trainer", 10)) == ["new"]
        assert bodies(other.take("trainer", 1)) == ["new"], "the successor has only what was not cleared"
    broker.clear("trainer")
    assert keys_of(redis_at, run) == set()


@slow
def test_removing_leaves_nothing_of_this_run_and_everything_of_others(redis_at: RedisServer, run: str):
    names = (f"{run}[ab]*?", f"{run}a", f"{run}[ab]*?2")
    brokers = [again(redis_at, name) for name in names]
    for broker in brokers:
        for mailbox in ("controller", "host-0"):
            broker.post(mailbox, 1)
        broker.heartbeat("host-0", 1, 60)
    with client(redis_at) as asked:
        asked.set(f"areal:{{{names[0]}}}:state", "x")
        brokers[0].remove()
        left = {key.split("{")[1] for key in asked.scan_iter("areal:*") if run in key}
    others = {
        f"{name}}}:{key}"
        for name in names[1:]
        for key in ("mailbox:controller", "mailbox:host-0", "heartbeat:host-0")
    }
    assert left == others | {f"{names[0]}}}:state"}
    for broker in brokers:
        broker.close()


# --- the wire breaks ----------------------------------------------------------------------


@slow
def test_an_answer_that_is_lost_loses_no_message(redis_at: RedisServer, run: str):
    """Redis counts the messages as this reader's, who never saw them."""
    with (
        Wire(redis_at.port) as wire,
        again(redis_at, run) as poster,
        Broker(f"redis://:{redis_at.secret}@127.0.0.1:{wire.port}", run, deadline_s=10) as reader,
    ):
        poster.post("controller", 0)
        held = reader.take("controller", 1)
        for number in range(1, 4):
            poster.post("controller", number)
        wire.lose_next(b"XREAD")
        threading.Timer(0.3, poster.post, ("controller", 4)).start()  # while the reader asks again
        found = []
        while len(found) < 4:
            found += reader.take("controller", 1)
        assert bodies(found) == [1, 2, 3, 4], "0 is in hand already"
        wire.lose_next(b"mailbox:controller")
        reader.done("controller", held + found)
        assert wire.lost == 2
        wire.lose_next(b"controller")
        reader.post("controller", "once or twice")
        taken = reader.take("controller", 1)
        assert set(bodies(taken)) == {"once or twice"}
        assert len(taken) in (1, 2)


@slow
def test_mailboxes_work_again_after_the_server_lost_its_data(tmp_path: Path, run: str):
    """Messages that were in Redis are gone; those after its return arrive over the same connections."""
    require_redis()
    with Killable(tmp_path / "redis") as killable:
        poster, reader = again(killable.server, run), again(killable.server, run)
        for number in (0, 10):
            poster.post("controller", number, number + 1)
            held = reader.take("controller", 2, most=1)
            assert bodies(held) == [number]
            poster.heartbeat("host-0", {"slots": 4}, 60)
            killable.kill()
            killable.start()
            assert reader.take("controller", 1) == []
            reader.done("controller", held)
            assert reader.heartbeats(["host-0"]) == {}
        poster.post("controller", 20)
        assert bodies(reader.take("controller", 2)) == [20]
        poster.close()
        reader.close()


@slow
def test_closing_lets_a_waiting_thread_end_and_nobody_begin(redis_at: RedisServer, run: str):
    broker, ends = again(redis_at, run), []

    def wait() -> None:
        try:
            ends.append(broker.take("controller", 3.0))
        except BrokerError as error:
            ends.append(str(error))

    thread = threading.Thread(target=wait)
    thread.start()
    with client(redis_at) as asked:
        wait_for(lambda: asked.info("clients")["blocked_clients"] > 0)
    broker.close()
    thread.join(HANG_S)
    assert ends == [[]]
    with pytest.raises(
        BrokerError, match=r"closed its connection to Redis at redis://.*; open a new connection"
    ):
        broker.post("controller", 1)


# --- signs of life ------------------------------------------------------------------------


@slow
def test_a_heartbeat_counts_until_it_expires_or_another_follows(
    broker: Broker, redis_at: RedisServer, run: str
):
    names = ["host-0", "host one:1 {x}", "host-2"]
    assert broker.heartbeats(names) == broker.heartbeats([]) == {}
    started_s = time.monotonic()
    broker.heartbeat("host-0", {"live": 3, "of": [1, 2]}, 2.0)
    broker.heartbeat("host one:1 {x}", None, 30)
    broker.heartbeat("host-2", b"\x00 bytes \xff", 30)
    assert broker.heartbeats(names) == {
        "host-0": {"live": 3, "of": [1, 2]},
        "host one:1 {x}": None,
        "host-2": b"\x00 bytes \xff",
    }
    broker.heartbeat("host-2", "again", 30)
    with again(redis_at, run) as other:
        wait_for(lambda: "host-0" not in other.heartbeats(names))
        assert time.monotonic() - started_s > 1.9
        assert other.heartbeats(names) == {"host one:1 {x}": None, "host-2": "again"}
    with client(redis_at) as asked:
        assert not asked.exists(f"areal:{{{run}}}:heartbeat:host-0"), "Redis deletes what has expired"


# --- bad input ----------------------------------------------------------------------------


@slow
def test_what_has_no_plain_form_is_named_with_its_box(broker: Broker):
    for body in (object(), np.zeros(3), {"a": {1, 2}}, 2**70):
        with pytest.raises(BrokerError, match="a message for the mailbox 'controller' cannot be encoded"):
            broker.post("controller", body)
    broker.post("controller", {"loss": np.float32(0.5)})
    assert bodies(broker.take("controller", 1)) == [{"loss": 0.5}]


@slow
def test_a_message_of_another_program_is_named(broker: Broker, redis_at: RedisServer, run: str):
    for fields in ({"body": b"\xc1"}, {"text": "hello"}):
        broker.clear("controller")
        with client(redis_at) as asked:
            asked.xadd(f"areal:{{{run}}}:mailbox:controller", fields)
        with pytest.raises(
            BrokerError, match=r"message \d+-0 of the mailbox 'controller' was not written by areal-jax"
        ):
            broker.take("controller", 1)


def test_the_password_comes_from_the_environment_and_is_in_no_message(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("AREAL_JAX_SECRET", "open-sesame-open")
    broker = Broker("redis://127.0.0.1:9/0", "r", deadline_s=0.1)
    with pytest.raises(
        BrokerError, match=r"no Redis answers at redis://127.0.0.1:9/0 within 0.1 s"
    ) as caught:
        broker.post("controller", 1)
    assert "sesame" not in f"{caught.value}{caught.value.__cause__}{broker!r}"
    monkeypatch.delenv("AREAL_JAX_SECRET")
    with pytest.raises(BrokerError, match="from other machines, and no password is given"):
        Broker("redis://trainer:6379/0", "r")
