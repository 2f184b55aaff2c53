"""Urls of Redis, and servers that do not answer."""

from __future__ import annotations

import socket
import time
from pathlib import Path

import pytest

from areal_jax.cluster.broker import Broker
from areal_jax.cluster.owner import RunOwner, look
from areal_jax.cluster.payloads import Held, Payloads, Posted
from areal_jax.cluster.redis_link import Link
from areal_jax.cluster.redis_server import RedisServer
from areal_jax.types import ArealError, SampleId
from tests.hangs import ends
from tests.redis_servers import Killable, client, require_redis


class Refused(ArealError):
    """The error that the link raises."""


def link(url: str, secret: str | None = None, deadline_s: float = 5.0) -> Link:
    return Link(url, secret, deadline_s, Refused)


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("redis://localhost:6379/0", "redis://localhost:6379/0"),
        ("redis://127.0.0.1", "redis://127.0.0.1"),
        ("redis://user:open-sesame@trainer:6379/2", "redis://user@trainer:6379/2"),
        ("rediss://:open-sesame@[fd00::1]:7000/", "rediss://[fd00::1]:7000/"),
        ("rediss://r/0?ssl_ca_certs=ca.pem&ssl_password=open-sesame", "rediss://r/0?ssl_ca_certs=ca.pem"),
        ("unix:///run/redis.sock?password=open-sesame", "unix:///run/redis.sock"),
        ("redis://[::1]:6379", "redis://[::1]:6379"),
    ],
)
def test_a_url_is_shown_without_its_password(url: str, shown: str):
    one = link(url)
    assert one.shown == shown
    assert "open-sesame" not in repr(one)


@pytest.mark.parametrize(
    ("url", "match"),
    [
        ("http://localhost:6379", "write redis://HOST:PORT/DATABASE"),
        ("localhost:6379", "not a valid url of a Redis server"),
        ("redis://", "not a valid url of a Redis server"),
        ("redis://localhost:66666", "not a valid url of a Redis server"),
        ("redis://localhost:port/0", "not a valid url of a Redis server"),
        ("redis://localhost/journal", "not a valid url of a Redis server"),
        ("unix://", "not a valid url of a Redis server"),
        ("redis://localhost?lost=accept", "correct the options after the .* in runtime.redis"),
        ("redis://localhost?tiemout=3", "correct the options after the .* in runtime.redis"),
        ("redis://localhost?socket_timeout=soon", "correct the options after the .* in runtime.redis"),
    ],
)
def test_a_malformed_url_is_named_with_the_remedy(url: str, match: str):
    with pytest.raises(Refused, match=match):
        link(url)


def test_a_server_that_other_machines_reach_needs_a_password_or_tls():
    with pytest.raises(
        Refused, match=r"trainer:6379 can be reached from other machines.*Set requirepass.*AREAL_JAX_SECRET"
    ):
        link("redis://trainer:6379")
    for url, secret in [
        ("redis://trainer", "open-sesame"),
        ("redis://:open-sesame@trainer", None),
        ("rediss://trainer", None),
        ("redis://127.0.0.9", None),
    ]:
        link(url, secret)


def test_an_absent_server_is_an_error_by_the_deadline(port: int):
    one = link(f"redis://127.0.0.1:{port}", "open-sesame", 0.3)
    started_s = time.monotonic()
    with pytest.raises(
        Refused, match=rf"no Redis answers at redis://127.0.0.1:{port} within 0.3 s \(.*refused"
    ):
        ends(lambda: one.run(lambda client: client.ping()))
    assert time.monotonic() - started_s >= 0.3


def test_a_server_that_does_not_answer_is_an_error_by_the_deadline():
    with socket.create_server(("127.0.0.1", 0)) as silent:
        one = link(f"redis://127.0.0.1:{silent.getsockname()[1]}", "open-sesame", 0.4)
        started_s = time.monotonic()
        with pytest.raises(Refused, match="no Redis answers"):
            ends(lambda: one.run(lambda client: client.ping()))
        assert time.monotonic() - started_s >= 0.4


@pytest.mark.slow
def test_a_server_that_deletes_keys_is_refused(tmp_path: Path):
    require_redis()
    with Killable(tmp_path / "redis") as killable, client(killable.server) as asked:
        one = link(killable.server.url, killable.server.secret)
        one.require_supported()
        asked.config_set("maxmemory-policy", "allkeys-lru")
        with pytest.raises(Refused, match=r"deletes keys .*allkeys-lru.*noeviction"):
            one.require_supported()
        asked.config_set("maxmemory-policy", "noeviction")
        asked.config_set("maxmemory", 1)
        with pytest.raises(Refused, match=r"raise maxmemory in its redis\.conf"):
            one.run(lambda client: client.set("a", "b"))


@pytest.mark.slow
def test_a_password_that_is_wrong_or_missing_is_named_but_never_shown(redis_at: RedisServer):
    def ask(url: str, secret: str | None) -> str:
        with pytest.raises(Refused) as caught:
            link(url, secret).run(lambda client: client.ping())
        return f"{caught.value}{caught.value.__cause__}{caught.value.__context__}"

    assert "none was given" in ask(redis_at.url, None)
    wrong = ask(redis_at.url, "not-the-password")
    assert "password is wrong" in wrong and "not-the-password" not in wrong
    wrong = ask(redis_at.url.replace("//", "//:sesame-open@"), redis_at.secret)
    assert "password is wrong" in wrong and "sesame-open" not in wrong
    assert link(redis_at.url.replace("//", f"//:{redis_at.secret}@")).run(lambda client: client.ping())


@pytest.mark.slow
def test_a_user_with_few_rights_is_enough(redis_at: RedisServer):
    """The rights that the message about missing ones names suffice for everything that a run does."""
    sample = SampleId(0, 0, 0)
    with client(redis_at) as asked:
        asked.acl_setuser("narrow", enabled=True, passwords=["+narrow-pass"], keys=["areal:*"])
        url = redis_at.url.replace("//", "//narrow:narrow-pass@")
        with Broker(url, "narrow") as broker:
            with pytest.raises(
                ArealError, match=r"give this Redis user the rights ~areal:\* \+@all -@dangerous \+info"
            ):
                broker.post("control", 1)
            asked.acl_setuser(
                "narrow", enabled=True, passwords=["+narrow-pass"], keys=["areal:*"],
                categories=["+@all", "-@dangerous"], commands=["+info"],
            )  # fmt: skip
            broker.link.require_supported()
            owner = RunOwner(broker)
            owner.claim()
            held = Held(broker, owner.token)
            held.read()
            posted = Posted(sample, "host-0.a", 0)
            Payloads(broker).post({posted: b"payload"})
            assert held.posted([posted]) == {posted: b"payload"}
            held.accept(posted)
            held.settle([0])
            assert Payloads(broker).wait_for([sample]) == {sample: b"payload"}
            broker.post("control", 1)
            broker.done("control", broker.take("control", 1))
            broker.heartbeat("host-0", {}, 5)
            assert look(broker) and broker.heartbeats(["host-0"]) == {"host-0": {}}
            broker.remove()
        asked.acl_deluser("narrow")
