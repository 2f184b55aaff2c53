"""Payloads of samples in Redis: none that the journal counts on is lost."""

from __future__ import annotations

import pytest

from areal_jax.cluster.broker import Broker
from areal_jax.cluster.owner import RunOwner
from areal_jax.cluster.payloads import Held, Payloads, Posted
from areal_jax.cluster.redis_server import RedisServer
from areal_jax.types import SampleId

pytestmark = pytest.mark.slow


def test_an_accepted_payload_outlives_its_host(redis_at: RedisServer):
    """The host's last sample and its end may reach the controller in one turn."""
    accepted, unannounced = (Posted(SampleId(ordinal, 0, 0), "host-0.a", ordinal) for ordinal in range(2))
    elsewhere = Posted(SampleId(2, 0, 0), "host-1.b", 0)
    url = redis_at.url.replace("//", f"//:{redis_at.secret}@")
    with Broker(url, "outlives", deadline_s=2.0) as broker:
        owner = RunOwner(broker)
        owner.claim()
        held, hosts = Held(broker, owner.token), Payloads(broker)
        held.read()
        hosts.post({accepted: b"accepted", unannounced: b"unannounced", elsewhere: b"elsewhere"})
        held.accept(accepted)
        held.delete_posted("host-0.a")
        announced = [unannounced, elsewhere]
        assert held.posted(announced) == {elsewhere: b"elsewhere"}
        held.settle([0, 1, 2])
        assert hosts.wait_for([accepted.sample]) == {accepted.sample: b"accepted"}
        held.read()  # as a controller that starts: nothing that was only posted counts
        assert held.posted(announced) == {}
        broker.remove()


def test_a_refused_payload_goes_without_the_one_that_its_host_has_posted_since(redis_at: RedisServer):
    """After Redis lost its data, a host decodes a sample again before its first event is refused."""
    first, again = (Posted(SampleId(0, 0, 0), "host-0.a", number) for number in (3, 7))
    url = redis_at.url.replace("//", f"//:{redis_at.secret}@")
    with Broker(url, "refused", deadline_s=2.0) as broker:
        owner = RunOwner(broker)
        owner.claim()
        held, hosts = Held(broker, owner.token), Payloads(broker)
        hosts.post({first: b"first"})
        held.refuse(first)
        hosts.post({again: b"again"})
        held.settle([0])
        assert held.posted([first, again]) == {again: b"again"}
        broker.remove()
