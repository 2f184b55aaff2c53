"""The figures of hosts, from their heartbeats."""

from __future__ import annotations

from areal_jax.cluster.remote import COUNTS, RemoteHosts
from areal_jax.observe.waits import Timeline, idle_share


def sign(generated: int, at_s: float, **totals: float) -> dict:
    counts = dict.fromkeys(COUNTS, 0) | {"generated_tokens": generated}
    return {"at_s": at_s, "gaps_s": [0.1], "statistics": counts, "totals": totals}


def test_between_signs_of_life_shares_are_those_before():
    """A sign comes every two seconds, and a row perhaps ten times as often."""
    hosts = RemoteHosts(Timeline(None))
    hosts.take_in({"trainer-0.a": {"totals": {"update": 6.0, "wait: a batch": 2.0}}})
    assert idle_share(hosts.take_totals()["trainer"]) == 0.25
    assert idle_share(hosts.take_totals()["trainer"]) == 0.25
    hosts.take_in({"trainer-0.a": {"totals": {"update": 7.0, "wait: a batch": 5.0}}})
    assert hosts.take_totals()["trainer"] == {"update": 1.0, "wait: a batch": 3.0}


def test_counts_go_on_where_a_host_starts_anew_and_no_sign_counts_twice():
    hosts = RemoteHosts(Timeline(None))
    hosts.join("host-0")
    (host,) = hosts.hosts
    for incarnation, at_s, generated in (("a", 2.0, 10), ("a", 2.0, 10), ("a", 4.0, 30), ("b", 2.0, 5)):
        hosts.take_in({f"host-0.{incarnation}": sign(generated, at_s, decode=1.0)})
    assert host.generated_tokens == 35
    assert len(host.gaps_s) == 3


def test_a_rate_is_that_between_the_last_two_signs_of_one_process():
    """Whenever they are heard: several rows may lie between two signs."""
    hosts = RemoteHosts(Timeline(None))
    hosts.join("host-0")
    (host,) = hosts.hosts
    rates = []
    for incarnation, generated, at_s in (
        ("a", 100, 50.0),
        ("a", 140, 52.0),
        ("a", 140, 52.0),
        ("a", 230, 55.0),
        ("b", 7, 1.0),
        ("b", 17, 3.0),
    ):
        hosts.take_in({f"host-0.{incarnation}": sign(generated, at_s)})
        rates.append(host.tokens_per_s)
    assert rates == [0.0, 20.0, 20.0, 30.0, 30.0, 5.0]
    hosts.take_in({"host-1.a": sign(3, 0.0)})
    assert host.tokens_per_s == 0.0, "it lives no more"
