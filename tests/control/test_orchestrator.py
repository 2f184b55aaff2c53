"""DORA's orchestrator: which version each host serves, which samples move, and what faults do to moves."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from fractions import Fraction
from random import Random

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal_jax.config.loading import make_config
from areal_jax.control import events as e
from areal_jax.control.audit import audit
from areal_jax.control.machine import ControlPlane
from areal_jax.control.orchestrator import partition
from areal_jax.lab.simulation.schedule import Fault, Schedule
from areal_jax.lab.simulation.world import SimResult, simulate
from areal_jax.types import SampleId, VersionSpan
from tests.control.play import Player, changed, config_of

BOUNDS = [1, 2, 3, 5]
CONFIG = config_of(steps=6, batch_size=2, group_size=2, strategy="pinned", on_update="pinned")

# --- the partition (D6) -------------------------------------------------------------------------------------


@given(
    hosts=st.integers(0, 12),
    work=st.dictionaries(st.integers(0, 9), st.integers(0, 50), max_size=8),
)
def test_a_partition_gives_every_host_and_at_least_one_to_each_version_with_work(hosts, work):
    given_hosts = partition(hosts, work)
    versions = {version for version, count in work.items() if count}
    assert all(type(count) is int and count >= 1 for count in given_hosts.values())
    assert sum(given_hosts.values()) == (hosts if versions else 0)
    if len(versions) <= hosts:
        assert set(given_hosts) == versions
    elif hosts:
        others = sorted((work[v] for v in versions - {max(versions)}), reverse=True)[: hosts - 1]
        assert max(versions) in given_hosts and len(given_hosts) == hosts
        assert sorted((work[v] for v in given_hosts if v != max(versions)), reverse=True) == others
    total = sum(work[version] for version in given_hosts)
    quota = {version: Fraction(hosts * work[version], total) for version in given_hosts}
    # The minimum of one is the only reason for a distance of one host or more.
    if all(share >= 1 for share in quota.values()):
        assert all(abs(given_hosts[version] - quota[version]) < 1 for version in quota)
    assert all(count == 1 or count < quota[version] + 1 for version, count in given_hosts.items())


def test_partitions_of_known_work():
    assert partition(8, {0: 10, 1: 30, 2: 40}) == {0: 1, 1: 3, 2: 4}
    assert partition(4, {0: 1, 1: 1, 2: 98}) == {0: 1, 1: 1, 2: 2}  # the minimum costs version 2 two hosts
    assert partition(2, {0: 5, 1: 9, 2: 7}) == {1: 1, 2: 1}  # version 0 has no host of its own
    assert partition(1, {0: 50, 3: 1}) == {3: 1}  # the newest version always has one
    assert partition(3, {4: 5, 5: 5}) == {4: 1, 5: 2}  # ties go to the newer version


# --- a scripted trace ---------------------------------------------------------------------------------------


class Traced:
    """Two hosts of 4 slots, groups of 2, batches of 2, K = 2: groups 0 to 5 begin under version 0, the first
    three on host a, the others on host b. Then groups 0 and 3 are trained, so each host has two groups left.
    """

    def __init__(self) -> None:
        self.plane = ControlPlane(changed(CONFIG, max_staleness=2))
        self.rows: list[tuple[int, e.Event, tuple[e.Action, ...]]] = []
        self.tell(e.RunStarted("d0"))
        for name in "ab":
            self.tell(e.HostJoined(name, 4))
            self.tell(e.HostAdopted(name, 0, "d0"))
        assert self.homes() == dict(enumerate("aaabbb"))
        for ordinal, host in ((0, "a"), (3, "b")):
            self.end(ordinal, host)
        self.tell(e.BatchTrained(0, (0, 3), "d1", {}))

    def tell(self, event: e.Event) -> tuple[e.Action, ...]:
        actions = self.plane.handle(event)
        self.rows.append((len(self.rows), event, actions))
        return actions

    def end(self, ordinal: int, host: str) -> None:
        for member in range(2):
            self.tell(e.SampleFinished(SampleId(ordinal, member), host, (VersionSpan(0, 0, 3),), "stop"))
        self.tell(e.RewardScored(ordinal, 0, (0.0, 1.0)))

    def homes(self) -> dict[int, str]:
        return {n: group.host for n, group in self.plane.state.groups.items() if group.host}

    @property
    def outstanding(self) -> dict[str, int]:
        return {name: host.outstanding for name, host in self.plane.state.hosts.items()}


def ids(ordinal: int, members: tuple[int, ...] = (0, 1)) -> tuple[SampleId, ...]:
    return tuple(SampleId(ordinal, member) for member in members)


def test_a_new_version_takes_a_host_whose_samples_move_to_the_other_host():
    traced = Traced()
    actions = traced.tell(e.VersionCommitted(1, "d1"))
    # 8 samples of version 0, and 4 of version 1 may start: one host each, and a ties with b.
    assert actions[:3] == (e.Move(ids(1), "a", "b"), e.Move(ids(2), "a", "b"), e.Serve("a", 1))
    assert actions[3:] == (e.Dispatch(ids(6), "a", 1), e.Dispatch(ids(7), "a", 1))
    assert traced.outstanding == {"a": 4, "b": 8}
    assert "group 1 waits for its move from host a to b" in traced.plane.waits()

    assert traced.tell(e.SamplesOffered(ids(1), "a", "b")) == (e.Fetch(ids(1), "b", "a"),)
    assert traced.homes()[1] == "a"  # until b has it
    assert traced.tell(e.SamplesMoved(ids(1), "b", "a")) == (e.Cancel(ids(1), "a"),)
    assert traced.homes()[1] == "b" and traced.outstanding == {"a": 4, "b": 8}

    # A member of group 2 ends on a before a lets go of it; the other one moves.
    traced.tell(e.SampleFinished(SampleId(2, 0), "a", (VersionSpan(0, 0, 3),), "stop"))
    assert traced.tell(e.SamplesOffered(ids(2, (1,)), "a", "b")) == (e.Fetch(ids(2, (1,)), "b", "a"),)
    # b refuses: a takes it back, and the group is not moved again.
    refused = e.MoveFailed(ids(2, (1,)), "b", "a", "no such version")
    assert traced.tell(refused) == (e.TakeBack(ids(2, (1,)), "a"),)
    assert traced.outstanding == {"a": 5, "b": 6}
    assert traced.tell(e.PlacementDue()) == () and not traced.plane.state.groups[2].may_move
    traced.end(1, "b")
    assert audit(traced.plane._config, traced.rows).violations == []


def test_a_host_that_awaits_samples_of_its_version_does_not_leave_it():
    """Version 2 leaves version 0 without a host, but two groups of version 0 are on their way to b."""
    traced = Traced()
    traced.tell(e.VersionCommitted(1, "d1"))
    for ordinal in (4, 5):
        traced.end(ordinal, "b")
    traced.tell(e.BatchTrained(1, (4, 5), "d2", {}))
    assert e.Serve("b", 2) not in traced.tell(e.VersionCommitted(2, "d2"))
    assert traced.plane.state.hosts["b"].serves == 0 and traced.outstanding["b"] == 4
    for ordinal in (1, 2):
        traced.tell(e.SamplesOffered(ids(ordinal), "a", "b"))
        traced.tell(e.SamplesMoved(ids(ordinal), "b", "a"))
    assert e.Serve("b", 2) in traced.tell(e.PlacementDue())
    assert audit(traced.plane._config, traced.rows).violations == []


def test_a_period_moves_what_an_event_left_behind():
    """Host b has not adopted version 0 when version 1 comes, so nothing can move there yet."""
    traced = Traced()
    traced.plane.state.hosts["b"] = replace(traced.plane.state.hosts["b"], version=-1)
    actions = traced.tell(e.VersionCommitted(1, "d1"))
    assert not any(isinstance(action, e.Move) for action in actions)
    assert traced.plane.orchestrator.is_due()
    traced.tell(e.HostAdopted("b", 0, "d0"))
    assert traced.tell(e.PlacementDue())[:2] == (e.Move(ids(1), "a", "b"), e.Move(ids(2), "a", "b"))


def test_a_group_of_which_an_end_is_still_under_way_does_not_move():
    """Host a offers one member, and the event of the other one's end is late: a decodes what it offered."""
    traced = Traced()
    traced.tell(e.VersionCommitted(1, "d1"))
    before = traced.outstanding
    assert traced.tell(e.SamplesOffered(ids(1, (1,)), "a", "b"))[0] == e.TakeBack(ids(1, (1,)), "a")
    assert traced.homes()[1] == "a" and traced.outstanding["b"] == before["b"] - 2
    traced.end(1, "a")
    assert audit(traced.plane._config, traced.rows).violations == []


def test_kv_pressure_moves_the_youngest_group_to_a_host_of_its_version_with_fewer_samples():
    traced = Traced()
    assert traced.tell(e.KVShort("a")) == ()  # b has as many
    traced.end(4, "b")
    assert traced.outstanding == {"a": 4, "b": 2}
    assert traced.tell(e.KVShort("a")) == ()  # it would have more than a afterwards
    traced.end(5, "b")
    assert traced.tell(e.KVShort("a"))[0] == e.Move(ids(2), "a", "b")
    assert traced.tell(e.KVShort("c")) == ()
    assert ControlPlane(changed(CONFIG, on_update="drain")).orchestrator.is_due() is False


def test_orphans_of_an_emptied_host_are_consolidated_and_the_host_serves_the_newest_version():
    traced = Traced()
    traced.tell(e.VersionCommitted(1, "d1"))
    for ordinal in (1, 2):
        traced.tell(e.SamplesOffered(ids(ordinal), "a", "b"))
        traced.tell(e.SamplesMoved(ids(ordinal), "b", "a"))
    for ordinal in (1, 2, 4):
        traced.end(ordinal, "b")
    assert traced.plane.state.hosts["b"].serves == 0
    actions = []
    for member in range(2):
        ended = e.SampleFinished(SampleId(5, member), "b", (VersionSpan(0, 0, 3),), "stop")
        actions += traced.tell(ended)
    assert e.Serve("b", 1) in actions
    assert audit(traced.plane._config, traced.rows).violations == []


def test_a_lost_source_restarts_its_samples_and_a_lost_target_returns_them():
    for lost, state, expected in [
        ("a", "asked", (e.Cancel(ids(1), "b"), e.Cancel(ids(2), "b"))),
        ("a", "offered", (e.Cancel(ids(1), "b"), e.Cancel(ids(2), "b"))),
        ("b", "asked", (e.TakeBack(ids(1), "a"), e.TakeBack(ids(2), "a"))),
        ("b", "offered", (e.TakeBack(ids(1), "a"), e.TakeBack(ids(2), "a"))),
    ]:
        traced = Traced()
        traced.tell(e.VersionCommitted(1, "d1"))
        if state == "offered":
            traced.tell(e.SamplesOffered(ids(1), "a", "b"))
        actions = traced.tell(e.HostLost(lost, "killed"))
        assert actions[:2] == expected
        stale = traced.plane.state.stale_events
        # What is said of the move afterwards comes too late and changes nothing.
        assert traced.tell(e.SamplesMoved(ids(1), "b", "a")) == ()
        assert traced.tell(e.SamplesOffered(ids(1), "a", "b")) == ()
        assert traced.plane.state.stale_events == stale + 2
        assert sum(traced.outstanding.values()) == sum(
            len(group.unfinished) for group in traced.plane.state.groups.values() if group.stage == "decoding"
        )
        assert audit(traced.plane._config, traced.rows).violations == []


def test_a_snapshot_in_the_middle_of_a_move_goes_on_like_the_original():
    traced = Traced()
    traced.tell(e.VersionCommitted(1, "d1"))
    traced.tell(e.SamplesOffered(ids(1), "a", "b"))
    stored = msgpack.unpackb(msgpack.packb(traced.plane.snapshot()))
    again = ControlPlane.fold(traced.plane._config, (), stored)
    assert again.snapshot() == traced.plane.snapshot()
    for event in (e.SamplesMoved(ids(1), "b", "a"), e.PlacementDue(), e.HostLost("b", "")):
        assert again.handle(event) == traced.plane.handle(event)


# --- whole runs ---------------------------------------------------------------------------------------------


@given(
    seed=st.integers(0, 2**32),
    size=st.integers(1, 4),
    bound=st.sampled_from(BOUNDS),
    hosts=st.integers(2, 4),
    slots=st.integers(1, 5),
    troubles=st.booleans(),
    faults=st.lists(st.tuples(st.integers(1, 40), st.integers(0, 5)), max_size=4),
)
def test_c1_c2_and_c3_hold_with_moves_in_any_order_and_faults_between_their_steps(
    seed, size, bound, hosts, slots, troubles, faults
):
    """The order of all answers is random, so hosts die before, in and after each step of a move."""
    config = changed(CONFIG, batch_size=size, max_staleness=bound)
    failing = {"failed_samples": 0.05, "failed_moves": 0.3} if troubles else {}
    player = Player(config, Random(seed), hosts=hosts, slots=slots, **failing).start()
    for steps, kind in faults:
        for _ in range(steps):
            player.step()
        if kind < 4:
            player.lose(f"host{kind % hosts}")
        elif kind == 4:
            player.lose("host0").lose("host1")  # both ends of a move
        else:
            player.resume()
        player.tell(e.PlacementDue())
    player.play()
    result = audit(config, player.rows)
    dropped = sum(result.dropped.values())
    assert (result.violations, result.trained, result.in_flight) == ([], 6 * size, 0)
    assert dropped == 0 or troubles  # C2
    assert max(player.ages, default=0) <= bound  # C3
    assert all(len(spans) == 1 for spans in player.spans.values())  # C1
    assert not player.kept and not player.plane.state.groups


def long_tail(bound: int, *faults: Fault) -> SimResult:
    """4 hosts under pinned; lengths of which the 99th percentile is 10 times the median."""
    config = make_config(
        {
            "run": {"steps": 10},
            "algorithm": {"group_size": 4},
            "generation": {"slots": 8, "length": 400, "max_tokens": 360},
            "control": {"strategy": "pinned", "max_staleness": bound},
            "trainer": {"batch_size": 8},
            "runtime": {"hosts": 4},
        }
    )
    schedule = Schedule(
        median_tokens=24, sigma_tokens=1.0, train_s=0.5, publish_s=0.05, placed_every_s=0.5, faults=faults
    )
    return simulate(config, schedule)


def at(result: SimResult, kind: type, which: int) -> tuple[int, str, str]:
    """(journal row, source, target) of the event or action number `which` of this kind."""
    found = [
        (row, one.host, getattr(one, "target", "") or getattr(one, "source", ""))
        for row, event, actions in result.rows
        for one in (event, *actions)
        if isinstance(one, kind)
    ]
    return found[which % len(found)]


@pytest.mark.parametrize("bound", [1, *(pytest.param(bound, marks=pytest.mark.slow) for bound in (2, 3)), 5])
def test_deaths_in_the_middle_of_a_migration_lose_nothing(bound):
    """The source dies, the target dies, both die: once it was asked, offered and moved, in a run that is the
    same up to that row.
    """
    clean = long_tail(bound)
    assert clean.audit.violations == [] and max(clean.token_ages) <= bound
    counts = Counter(type(event) for _, event, _ in clean.rows)
    assert counts[e.SamplesMoved] >= 10 and counts[e.MoveFailed] == 0
    for kind, which in ((e.Move, 3), (e.SamplesOffered, 5), (e.Fetch, 8), (e.SamplesMoved, 2)):
        row, *ends = at(clean, kind, which)
        for names in ([ends[0]], [ends[1]], ends):
            alive = [f"host{index}" for index in range(4)]
            faults = []
            for name in names:
                faults.append(Fault("host_death", row, alive.index(name), down_s=0.7))
                alive.remove(name)
            result = long_tail(bound, *faults)
            assert result.faults == {"host_death": len(names)}
            trained, dropped = result.audit.trained, result.audit.dropped
            assert (result.audit.violations, trained, dropped) == ([], 80, {}), (kind, names)
            assert max(result.token_ages) <= bound


@pytest.mark.parametrize("bound", BOUNDS)
def test_a_moved_sample_has_the_tokens_and_the_version_that_it_would_have_had(bound):
    """Lengths and versions stay those of the sample's id and its dispatch, whatever host ends it."""
    result = long_tail(bound)
    lengths: dict[SampleId, int] = {}
    began: dict[SampleId, int] = {}
    moved: set[SampleId] = set()
    for _, event, actions in result.rows:
        for action in actions:
            if isinstance(action, e.Dispatch):
                began |= dict.fromkeys(action.samples, action.min_version)
        if isinstance(event, e.SamplesMoved):
            moved |= set(event.samples)
        if isinstance(event, e.SampleFinished):
            lengths[event.sample] = event.spans[-1].end
            assert len(event.spans) == 1 and event.spans[0].version >= began[event.sample]
    alone = long_tail(bound, *(Fault("kv_short", row, row) for row in range(5, 300, 40)))
    again = {s.sample: s.spans[-1].end for _, s, _ in alone.rows if isinstance(s, e.SampleFinished)}
    assert moved and all(again[sample] == lengths[sample] for sample in moved & set(again))
