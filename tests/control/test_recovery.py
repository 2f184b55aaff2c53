"""State is the fold of the journal: at every prefix, from any snapshot, after any number of crashes."""

from __future__ import annotations

from random import Random

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal_jax.config.tree import Config
from areal_jax.control import events as e
from areal_jax.control.audit import audit
from areal_jax.control.machine import ControlPlane
from areal_jax.types import SampleId
from tests.control.play import Player, changed, config_of

CONFIG = config_of(steps=6, batch_size=3, group_size=2, max_staleness=2, group_filter="signal")


def troubled(config: Config, seed: int) -> Player:
    return Player(config, Random(seed), 0.2, 0.1, 0.05)


def test_folding_any_prefix_gives_the_live_state_and_the_same_actions():
    player = troubled(CONFIG, 3).start()
    live = [player.plane.snapshot()]
    while player.step():
        live.append(player.plane.snapshot())
    started = len(player.rows) - len(live) + 1
    again = ControlPlane(CONFIG)
    for place, event, actions in player.rows:
        assert again.handle(event) == actions
        if place + 1 >= started:
            assert again.snapshot() == live[place + 1 - started]
            assert ControlPlane.fold(CONFIG, player.events[: place + 1]).snapshot() == again.snapshot()


@given(seed=st.integers(0, 2**32), cut=st.floats(0, 1))
def test_a_snapshot_and_the_tail_give_the_same_as_the_whole(seed, cut):
    player = troubled(CONFIG, seed).start().play()
    place = int(cut * len(player.rows))
    stored = msgpack.packb(ControlPlane.fold(CONFIG, player.events[:place]).snapshot())
    resumed = ControlPlane.fold(CONFIG, player.events[place:], snapshot=msgpack.unpackb(stored))
    assert resumed.snapshot() == player.plane.snapshot()


@pytest.mark.parametrize("eta", [0, 1, 4])
@given(seed=st.integers(0, 2**32), crashes=st.lists(st.integers(1, 60), min_size=1, max_size=4))
def test_a_run_killed_anywhere_trains_or_drops_every_ordinal_once(eta, seed, crashes):
    """A12: kill and resume, with whatever was under way lost; the audit recounts all of it."""
    config = changed(CONFIG, max_staleness=eta)
    player = troubled(config, seed).start()
    for steps in crashes:
        for _ in range(steps):
            player.step()
        before = player.plane
        capacity = before.state.admitted - sum(before.state.dropped.values())
        player.resume()
        bound = (player.plane.state.version + eta + 1) * config.trainer.batch_size
        now = player.plane.state.admitted - sum(player.plane.state.dropped.values())
        assert max(capacity, now) <= bound  # no burst of admissions after a resume
        assert player.plane.state.version >= before.state.version
    player.play()
    result = audit(config, player.rows)
    assert (result.violations, result.trained, result.in_flight) == ([], 18, 0)


def test_resume_asks_again_for_scores_and_the_unfinished_batch():
    plane = ControlPlane(CONFIG)
    plane.handle(e.RunStarted("d0"))
    plane.handle(e.HostJoined("a", 40))
    for ordinal in (0, 1, 2, 5):
        for member in range(2):
            plane.handle(e.SampleFinished(SampleId(ordinal, member), "a", (), "stop"))
    for ordinal in (0, 1, 2):
        plane.handle(e.RewardScored(ordinal, 0, (0.0, 1.0)))
    assert plane.state.training == e.Train(0, (0, 1, 2), (0, 0, 0))
    assert plane.handle(e.RunResumed()) == (e.Score(5, 0), e.Train(0, (0, 1, 2), (0, 0, 0)))
    assert not plane.state.hosts
    actions = plane.handle(e.HostJoined("b", 40))
    assert [a.samples[0] for a in actions] == [SampleId(n, 0, 0) for n in (3, 4, 6, 7, 8)]


def test_every_event_delivered_twice_ends_in_the_same_run():
    """Repeats are no-ops or counted as stale; only the start of a run or a host happens again."""
    once = troubled(CONFIG, 5).start().play()
    plane = ControlPlane(CONFIG)
    for event in once.events:
        plane.handle(event)
        if not isinstance(event, e.RunStarted | e.HostJoined):
            assert plane.handle(event) == ()
    first, second = once.plane.snapshot(), plane.snapshot()
    assert first.pop("stale_events") < second.pop("stale_events")
    assert first == second


def test_more_steps_after_a_resume_go_on_and_change_no_past():
    player = troubled(changed(CONFIG, steps=3), 7).start().play()
    length = len(player.rows)
    player.tell(e.VersionCommitted(3, "d3"))
    player.rows[0] = (0, e.RunStarted("d0", 3), player.rows[0][2])
    player.config = changed(CONFIG, steps=6)
    player.resume(steps=6).play()
    result = audit(player.config, player.rows)
    assert (result.violations, result.trained, result.in_flight) == ([], 18, 0)
    assert next(place for place, _, actions in player.rows if e.Finish() in actions) < length
