"""DORA's promises on the control side: nothing is lost (C2), nothing trained is older than K (C3)."""

from __future__ import annotations

import re
from dataclasses import replace
from random import Random

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal_jax.control import events as e
from areal_jax.control.audit import audit
from areal_jax.control.gate import may_train
from areal_jax.control.machine import ControlPlane
from areal_jax.control.state import GroupState, State
from areal_jax.types import SampleId, VersionSpan
from tests.control.play import Decoding, Player, changed, config_of

BOUNDS = [1, 2, 3, 5]
CONFIG = config_of(
    steps=12, batch_size=3, group_size=2, strategy="pinned", on_update="pinned", max_staleness=2
)


class Stragglers(Player):
    """Groups whose ordinal divides by 3 end only when nothing else can: each would be as old as it can be."""

    def step(self) -> bool:
        is_slow = [isinstance(p, Decoding) and p.sample.ordinal % 3 == 0 for p in self.pending]
        quick = [place for place, slow in enumerate(is_slow) if not slow]
        if not quick:
            return super().step()
        self.answer(self.pending.pop(quick[0]))
        return True

    def tell(self, event: e.Event) -> tuple[e.Action, ...]:
        """D3: after every event, what was dispatched is trained, in flight or dropped, each group once."""
        actions = super().tell(event)
        state = self.plane.state
        trained = state.trained_version * self.config.trainer.batch_size
        assert trained + len(state.groups) + state.refunds == state.admitted
        return actions


# --- the rule -----------------------------------------------------------------------------------------------


@given(ages=st.lists(st.integers(0, 6), max_size=24), size=st.integers(1, 5), bound=st.integers(0, 6))
def test_a_batch_may_be_trained_when_those_left_behind_still_come_in_time(ages, size, bound):
    """Train the ones left behind B a step, in order, from step 8 on, and look at each one's age."""
    left = sorted(7 - age for age in ages)
    batches = {step: left[(step - 8) * size : (step - 7) * size] for step in range(8, 8 + len(left))}
    oldest = max((step - version for step, batch in batches.items() for version in batch), default=0)
    assert may_train(7, left, size, bound) == (oldest <= bound)


def test_stragglers_pile_up_where_only_the_oldest_version_is_waited_for():
    """K 3, batches of one: two samples of version 0 at step 2 can no longer both be in time after it."""
    assert may_train(1, [0, 0], 1, 3)  # in steps 2 and 3
    assert not may_train(2, [0, 0], 1, 3)  # in steps 3 and 4: version 0 is not yet step - K, and yet too late
    assert may_train(2, [0, 0], 2, 3)


def test_the_trainer_waits_for_a_straggler_and_says_so():
    config = config_of(
        steps=9, batch_size=1, group_size=1, strategy="pinned", on_update="pinned", max_staleness=1
    )
    plane = ControlPlane(config)
    plane.handle(e.RunStarted("d0"))
    plane.handle(e.HostJoined("a", 9))

    def end(ordinal: int, version: int) -> tuple[e.Action, ...]:
        plane.handle(e.SampleFinished(SampleId(ordinal, 0), "a", (VersionSpan(version, 0, 1),), "stop"))
        return plane.handle(e.RewardScored(ordinal, 0, (1.0,)))

    assert sorted(plane.state.groups) == [0, 1]
    assert end(1, 0) == (e.Train(0, (1,), (0,)),)  # group 0 can still be trained in step 1
    plane.handle(e.BatchTrained(0, (1,), "d1", {}))
    assert plane.handle(e.VersionCommitted(1, "d1")) == (
        e.Serve("a", 1),
        e.Dispatch((SampleId(2, 0),), "a", 1),
    )
    assert end(2, 1) == ()  # complete, and yet step 1 is kept for group 0
    assert plane.state.training is None
    assert "the trainer waits for group 0, which would be too old for a later batch" in plane.waits()
    assert end(0, 0) == (e.Train(1, (0,), (0,)),)


def test_a_group_that_has_not_begun_counts_as_the_newest_version():
    """It takes a place in the order of training all the same."""
    groups = {
        ordinal: GroupState(ordinal, (None,), min_version=v) for ordinal, v in ((3, -1), (5, 2), (6, 4))
    }
    assert State(9, version=4, groups=groups).began(but=(6,)) == [4, 2]


# --- whole runs ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bound", BOUNDS)
@pytest.mark.parametrize("size", [1, 3, 4])
def test_no_age_exceeds_k_with_stragglers_and_nothing_is_dropped(bound, size):
    """D3 and D4; the bound is reached, so the trainer waits no more than it must."""
    config = changed(CONFIG, max_staleness=bound, batch_size=size, steps=20)
    player = Stragglers(config, Random(0), slots=10**6, hosts=1).start().play()
    assert max(player.ages) == bound
    result = audit(config, player.rows)
    assert (result.violations, result.trained, result.dropped) == ([], 20 * size, {})
    finished = [event for event in player.events if isinstance(event, e.SampleFinished)]
    assert all(len(event.spans) == 1 for event in finished)


@pytest.mark.parametrize("bound", BOUNDS)
def test_the_gate_alone_overshoots_k(bound):
    """The same order of endings under a strategy that never lets the trainer wait."""
    config = changed(CONFIG, strategy="interruptible", on_update="drain", max_staleness=bound, steps=20)
    player = Stragglers(config, Random(0), slots=10**6, hosts=1).start().play()
    assert max(player.ages) > bound + 1


@pytest.mark.parametrize("strategy", ["one_step", "pinned"])
@given(
    seed=st.integers(0, 2**32),
    size=st.integers(1, 4),
    bound=st.sampled_from(BOUNDS),
    troubles=st.booleans(),
    crashes=st.lists(st.integers(1, 60), max_size=3),
)
def test_any_order_with_drops_reissues_and_crashes_keeps_k_and_ends(
    strategy, seed, size, bound, troubles, crashes
):
    bound = 1 if strategy == "one_step" else bound
    config = config_of(
        steps=6, batch_size=size, group_size=2, strategy=strategy, on_update="drain",
        max_staleness=bound, group_filter="signal",
    )  # fmt: skip
    share = 0.3 if troubles else 0.0
    player = Player(config, Random(seed), share, share / 2, share / 3, drains=strategy == "one_step").start()
    for steps in crashes:
        for _ in range(steps):
            player.step()
        player.resume()
    player.play()
    assert max(player.ages, default=0) <= bound
    result = audit(config, player.rows)
    assert (result.violations, result.trained, result.in_flight) == ([], 6 * size, 0)


@pytest.mark.parametrize(("slots", "hosts"), [(10**6, 1), (1, 1), (3, 2)])
@pytest.mark.parametrize("limit", [None, 1, 4])
@pytest.mark.parametrize("seed", range(3))
def test_one_step_trains_batches_of_one_version_each_a_step_old(slots, hosts, limit, seed):
    """Also where a batch has more samples than the hosts have slots, or more groups than max_concurrent."""
    config = changed(CONFIG, strategy="one_step", on_update="drain", max_staleness=1, max_concurrent=limit)
    player = Stragglers(config, Random(seed), slots=slots, hosts=hosts, drains=True).start()
    heads: dict[int, set[int]] = {}
    while player.step():
        if (batch := player.plane.state.training) is not None:
            heads[batch.step] = {
                player.spans[SampleId(ordinal, member)][0].version
                for ordinal in batch.ordinals
                for member in range(2)
            }
    assert heads == {step: {max(0, step - 1)} for step in range(12)}
    assert audit(config, player.rows).violations == []


def test_the_audit_finds_a_sample_of_one_step_that_began_under_the_version_of_its_own_batch():
    """Its age is within the bound, and a recount of ages alone passes it."""
    config = changed(CONFIG, strategy="one_step", on_update="drain", max_staleness=1)
    rows = Stragglers(config, Random(0), drains=True).start().play().rows
    batch = next(a for _, _, actions in rows for a in actions if isinstance(a, e.Train) and a.step == 3)
    for place, event, actions in rows:
        if isinstance(event, e.SampleFinished) and event.sample.ordinal == batch.ordinals[0]:
            rows[place] = (place, replace(event, spans=(VersionSpan(3, 0, 3),)), actions)
            break
    said = (
        f"ordinal {batch.ordinals[0]} of batch 3 has tokens of versions [2, 3], but "
        "control.strategy=one_step promises version 2"
    )
    assert any(said in found for found in audit(config, rows).violations)


def test_the_trainer_of_one_step_waits_for_the_next_batch_to_begin_and_says_for_which_host():
    config = config_of(
        steps=9, batch_size=1, group_size=1, strategy="one_step", on_update="drain", max_staleness=1
    )
    plane = ControlPlane(config)
    plane.handle(e.RunStarted("d0"))
    plane.handle(e.HostJoined("a", 1))
    plane.handle(e.HostAdopted("a", 0, "d0"))

    def end(ordinal: int, version: int) -> tuple[e.Action, ...]:
        plane.handle(e.SampleFinished(SampleId(ordinal, 0), "a", (VersionSpan(version, 0, 1),), "stop"))
        return plane.handle(e.RewardScored(ordinal, 0, (1.0,)))

    assert sorted(plane.state.groups) == [0, 1]
    assert end(0, 0) == (e.Train(0, (0,), (0,)),)
    plane.handle(e.BatchTrained(0, (0,), "d1", {}))
    plane.handle(e.VersionCommitted(1, "d1"))
    assert end(1, 0) == ()  # batch 1 is complete; the host has yet to adopt version 1 for group 2
    assert (
        "the trainer waits for a to adopt version 1, because the next batch begins with that version"
        in plane.waits()
    )
    assert plane.handle(e.HostAdopted("a", 1, "d1")) == (e.Train(1, (1,), (0,)),)


def test_a_pinned_sample_of_a_lost_host_starts_again_under_the_newest_version():
    """Same attempt, other version; the member that had ended stays, and the group's age is still its own."""
    plane = ControlPlane(changed(CONFIG, batch_size=1, max_staleness=1))
    plane.handle(e.RunStarted("d0"))
    plane.handle(e.HostJoined("a", 9))
    for ordinal, member in ((1, 0), (1, 1), (0, 1)):
        spans = (VersionSpan(0, 0, 4),)
        plane.handle(e.SampleFinished(SampleId(ordinal, member), "a", spans, "stop"))
    plane.handle(e.RewardScored(1, 0, (0.0, 1.0)))
    plane.handle(e.BatchTrained(0, (1,), "d1", {}))
    plane.handle(e.VersionCommitted(1, "d1"))
    stored = msgpack.unpackb(msgpack.packb(plane.snapshot()))
    again = ControlPlane.fold(plane._config, (), stored)
    for each in (plane, again):
        each.handle(e.HostLost("a", "killed"))
        actions = each.handle(e.HostJoined("b", 9))
        assert actions == (e.Serve("b", 1), e.Dispatch((SampleId(0, 0),), "b", 1), *actions[2:])
        assert each.state.began(but=()) == [0, 1]


def test_the_audit_finds_a_sample_of_two_versions_and_an_age_beyond_k():
    config = changed(CONFIG, max_staleness=2)
    player = Stragglers(changed(config, strategy="interruptible", on_update="recompute"), Random(0))
    violations = audit(config, player.start().play().rows).violations
    assert any(
        re.search(r"has tokens of versions \[0, \d+\]; generation.on_update=pinned allows only one", found)
        for found in violations
    )
    assert any("at token age 3, above the bound 2" in found for found in violations)
