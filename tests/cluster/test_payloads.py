"""Payloads of samples in Redis: none that the journal counts on is lost."""

from __future__ import annotations

import pytest

from areal_jax.cluster.broker import Broker
from areal_jax.cluster.owner import Owner
from areal_jax.cluster.payloads import Held, Payloads
from areal_jax.cluster.redis_server import RedisServer
from areal_jax.types import SampleId

pytestmark = pytest.mark.cluster


def test_an_accepted_payload_outlives_its_host(redis_at: RedisServer):
    """The host's last sample and its end may reach the controller in one turn."""
    accepted, unannounced, elsewhere = (SampleId(ordinal, 0, 0) for ordinal in range(3))
    url = redis_at.url.replace("//", f"//:{redis_at.secret}@")
    with Broker(url, "outlives", deadline_s=2.0) as broker:
        owner = Owner(broker)
        owner.claim()
        held, hosts = Held(broker, owner.token), Payloads(broker)
        held.read()
        hosts.post("host-0.a", {accepted: b"accepted", unannounced: b"unannounced"})
        hosts.post("host-1.b", {elsewhere: b"elsewhere"})
        held.accept(accepted, "host-0.a")
        held.delete_posted("host-0.a")
        announced = [(unannounced, "host-0.a"), (elsewhere, "host-1.b")]
        assert held.posted(announced) == {(elsewhere, "host-1.b"): b"elsewhere"}
        held.settle([0, 1, 2])
        assert hosts.wait_for([accepted]) == {accepted: b"accepted"}
        held.read()  # as a controller that starts: nothing that was only posted counts
        assert held.posted(announced) == {}
        broker.remove()
