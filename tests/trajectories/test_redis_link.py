"""What can be said of a Redis before anybody asks it."""

from __future__ import annotations

import socket
import time

import pytest

from areal_jax.trajectories.redis_link import Link
from areal_jax.types import ArealError


class Refused(ArealError):
    """What the link is told to raise."""


def link(url: str, secret: str | None = None, deadline_s: float = 5.0) -> Link:
    return Link(url, secret, deadline_s, Refused)


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("redis://localhost:6379/0", "redis://localhost:6379/0"),
        ("redis://127.0.0.1", "redis://127.0.0.1"),
        ("redis://user:open-sesame@trainer:6379/2?durability=none", "redis://user@trainer:6379/2"),
        ("rediss://:open-sesame@[fd00::1]:7000/", "rediss://[fd00::1]:7000/"),
        ("rediss://r/0?ssl_ca_certs=ca.pem&ssl_password=open-sesame", "rediss://r/0?ssl_ca_certs=ca.pem"),
        ("unix:///run/redis.sock?password=open-sesame", "unix:///run/redis.sock"),
        ("redis://[::1]:6379?lost=accept", "redis://[::1]:6379"),
    ],
)
def test_a_url_is_shown_without_its_password(url: str, shown: str):
    one = link(url)
    assert one.shown == shown
    assert "open-sesame" not in repr(one)
    assert one.options["durability"] == ("none" if "none" in url else "aof")
    assert one.options["lost"] == ("accept" if "accept" in url else "refuse")


@pytest.mark.parametrize(
    ("url", "match"),
    [
        ("http://localhost:6379", "write redis://HOST:PORT/DATABASE"),
        ("localhost:6379", "no url of a Redis"),
        ("redis://", "no url of a Redis"),
        ("redis://localhost:66666", "no url of a Redis"),
        ("redis://localhost:port/0", "no url of a Redis"),
        ("redis://localhost/journal", "no url of a Redis"),
        ("unix://", "no url of a Redis"),
        ("redis://localhost?durability=some", r"\?durability= is aof or none, not 'some'"),
        ("redis://localhost?lost=yes", r"\?lost= is refuse or accept, not 'yes'"),
        ("redis://localhost?tiemout=3", "mend the options of runtime.redis"),
        ("redis://localhost?socket_timeout=soon", "mend the options of runtime.redis"),
    ],
)
def test_a_url_that_is_none_is_named_with_the_remedy(url: str, match: str):
    with pytest.raises(Refused, match=match):
        link(url)


def test_a_server_that_others_reach_needs_a_password_or_tls():
    with pytest.raises(
        Refused, match=r"trainer:6379 is reached from other machines.*Set requirepass.*AREAL_JAX_SECRET"
    ):
        link("redis://trainer:6379")
    for url, secret in [
        ("redis://trainer", "open-sesame"),
        ("redis://:open-sesame@trainer", None),
        ("rediss://trainer", None),
        ("redis://127.0.0.9", None),
    ]:
        link(url, secret)


def test_nobody_there_is_an_error_by_the_deadline():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    started_s = time.monotonic()
    with pytest.raises(
        Refused, match=rf"no Redis answers at redis://127.0.0.1:{port} within 0.3 s \(.*refused"
    ):
        link(f"redis://127.0.0.1:{port}", "open-sesame", 0.3).run(lambda client: client.ping())
    assert 0.3 <= time.monotonic() - started_s < 2


def test_somebody_silent_is_an_error_by_the_deadline():
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        started_s = time.monotonic()
        with pytest.raises(Refused, match="no Redis answers"):
            link(f"redis://127.0.0.1:{port}", "open-sesame", 0.4).run(lambda client: client.ping())
        assert 0.4 <= time.monotonic() - started_s < 2
