"""Samples with a workflow in the control plane: where they count, what a lost host and a resume ask again."""

from __future__ import annotations

import pytest

from areal_jax.config.loading import make_config
from areal_jax.control import events as e
from areal_jax.control.errors import ControlError
from areal_jax.control.machine import ControlPlane
from areal_jax.control.state import from_plain
from areal_jax.types import SampleId, VersionSpan

CONFIG = make_config(
    {
        "run": {"steps": 2},
        "algorithm": {"group_size": 2},
        "trainer": {"batch_size": 1},
        "control": {"max_staleness": 0},
        "generation": {"slots": 2, "length": 64, "max_tokens": 16},
    }
)
ONE, TWO = SampleId(0, 0), SampleId(0, 1)


def plane(*events: e.Event) -> ControlPlane:
    started = ControlPlane(CONFIG)
    for event in (e.RunStarted("d0"), e.HostJoined("a", 2), *events):
        started.handle(event)
    return started


def asked(sample: SampleId, turn: int) -> e.TurnAdded:
    return e.TurnAdded(sample, 0, turn, (7,), 4)


def over(sample: SampleId, turn: int, host: str = "a", version: int = 0) -> e.TurnFinished:
    return e.TurnFinished(sample, 0, turn, host, (VersionSpan(version, 3 * turn, 3 * turn + 2),), "stop")


def outstanding(control: ControlPlane) -> dict[str, int]:
    return {name: host.outstanding for name, host in control.state.hosts.items()}


def test_a_sample_counts_on_its_host_except_between_two_turns():
    control = plane()
    assert outstanding(control) == {"a": 2}
    assert control.handle(asked(ONE, 0)) == (e.Continue(ONE, 0, 0, "a", 0),)
    assert outstanding(control) == {"a": 2}
    assert control.handle(over(ONE, 0)) == (e.Answer(ONE, 0, 0),)
    assert outstanding(control) == {"a": 1}
    assert control.handle(asked(ONE, 1)) == (e.Continue(ONE, 0, 1, "a", 0),)
    assert outstanding(control) == {"a": 2}


def test_an_episode_ends_with_its_sample_and_the_last_one_asks_for_the_rewards():
    control = plane(asked(ONE, 0), asked(TWO, 0), over(ONE, 0), over(TWO, 0))
    assert control.handle(e.EpisodeEnded(ONE, 1.0)) == ()
    forgotten = e.Cancel((ONE,), "a")
    assert control.handle(e.SampleFinished(ONE, "a", over(ONE, 0).spans, "stop")) == (forgotten,)
    control.handle(e.EpisodeEnded(TWO, 0.0))
    actions = control.handle(e.SampleFinished(TWO, "a", over(TWO, 0).spans, "stop"))
    assert actions == (e.Cancel((TWO,), "a"), e.Score(0, 0))
    assert outstanding(control) == {"a": 0} and control.state.groups[0].stage == "scoring"


def test_late_events_and_second_ones_change_nothing():
    control = plane(asked(ONE, 0), over(ONE, 0))
    before = control.snapshot() | {"stale_events": 0}
    for event in (
        asked(ONE, 0),
        asked(ONE, 2),
        over(ONE, 0),
        over(ONE, 1),
        over(ONE, 0, host="b"),
        e.EpisodeEnded(TWO, 1.0),  # it has had no turn
        e.SampleFailed(ONE, "a", "late"),  # its turn is over
        e.ToolStarted(ONE, 1, "tool", ""),  # its first call is number 0
        e.EpisodeFailed(SampleId(0, 0, attempt=1), "failed_episode", ""),
    ):
        assert control.state.is_stale(event) and control.handle(event) == ()
    assert control.snapshot() | {"stale_events": 0} == before
    control.handle(asked(ONE, 1))
    assert control.state.is_stale(asked(ONE, 2)), "it is being decoded"


def test_after_a_lost_host_begun_turns_are_decoded_again_and_waiting_samples_wait_on():
    control = plane(asked(ONE, 0), over(ONE, 0), asked(ONE, 1))
    control.handle(e.HostLost("a", "gone"))
    assert control.handle(e.HostJoined("b", 2)) == (
        e.Dispatch((TWO,), "b", 0),
        e.Continue(ONE, 0, 1, "b", 0),
    )
    control.handle(over(ONE, 1, "b"))
    control.handle(e.HostLost("b", "gone"))
    assert control.handle(asked(ONE, 2)) == ()  # it is decoded once its group has a host
    assert e.Continue(ONE, 0, 2, "c", 0) in control.handle(e.HostJoined("c", 2))
    assert outstanding(control) == {"c": 2}


def test_an_episode_may_end_while_its_group_has_no_host():
    control = plane(asked(ONE, 0), asked(TWO, 0), over(ONE, 0), over(TWO, 0), e.HostLost("a", "gone"))
    assert control.state.waiting == [0]
    for sample in (ONE, TWO):
        control.handle(e.EpisodeEnded(sample, 1.0))
        actions = control.handle(e.SampleFinished(sample, "a", over(sample, 0).spans, "stop"))
    assert actions == (e.Score(0, 0),) and control.state.waiting == []


def test_a_resume_runs_the_workflows_again_that_had_begun():
    control = plane(asked(ONE, 0), over(ONE, 0), e.ToolStarted(TWO, 0, "tool", ""))
    assert control.handle(e.RunResumed()) == (e.Rerun(ONE), e.Rerun(TWO))
    again = ControlPlane(CONFIG)
    again.state = from_plain(control.snapshot())
    assert again.state == control.state


def test_a_rejected_sample_drops_its_group_and_a_failed_one_restarts_it_once():
    control = plane(asked(ONE, 0), over(ONE, 0))
    actions = control.handle(e.EpisodeEnded(ONE, None))
    assert actions[:2] == (e.Drop(0, "rejected"), e.Cancel((ONE, TWO), "a"))
    assert outstanding(control) == {"a": 2}  # the group in its place
    control = plane(e.ToolStarted(ONE, 0, "tool", ""))
    first = control.handle(e.EpisodeFailed(ONE, "tool_in_doubt", ""))
    assert first[0] == e.Reissue(0, 1, "tool_in_doubt")
    again = SampleId(0, 0, attempt=1)
    assert control.handle(e.ToolStarted(again, 0, "tool", "")) == (e.Call(again, 0),)
    second = control.handle(e.EpisodeFailed(again, "failed_episode", ""))
    assert second[0] == e.Drop(0, "failed_episode")


def test_a_turn_under_a_version_that_was_not_committed_is_refused():
    control = plane(asked(ONE, 0))
    with pytest.raises(
        ControlError, match=r"have weights versions \[3\]; these must ascend, from at least 0"
    ):
        control.handle(over(ONE, 0, version=3))


def test_a_group_that_begins_a_turn_stays_where_it_is():
    """Its host has nothing to hand over before the first turn, and then keeps the KV of its turns."""
    config = make_config(
        {
            "run": {"steps": 4},
            "algorithm": {"group_size": 2},
            "trainer": {"batch_size": 1},
            "control": {"strategy": "pinned", "max_staleness": 2},
            "generation": {"slots": 2, "length": 64, "max_tokens": 16},
        }
    )
    control = ControlPlane(config)
    for event in (e.RunStarted("d0"), e.HostJoined("a", 2), e.HostJoined("b", 2)):
        control.handle(event)
    group = control.state.groups[0]
    move = control.state.move(group, "b")
    assert (move.host, move.target) == (group.host, "b") == ("a", "b")
    actions = control.handle(asked(ONE, 0))
    assert actions[:2] == (e.TakeBack((ONE, TWO), "a"), e.Continue(ONE, 0, 0, "a", 0))
    now = control.state.groups[0]
    assert (now.host, now.target, now.may_move) == ("a", "", False)
    assert sum(outstanding(control).values()) == 2 * len(control.state.groups)
