"""What the control plane answers to each event: dispatches, batches, reissues, drops, versions, the end."""

from __future__ import annotations

import re
from dataclasses import replace
from random import Random

import pytest

from areal_jax.config.tree import Config
from areal_jax.control import events as e
from areal_jax.control import machine
from areal_jax.control.machine import ControlError, ControlPlane
from areal_jax.types import SampleId, VersionSpan
from tests.control.play import Player, changed, config_of

CONFIG = config_of(steps=3, batch_size=2, group_size=2, max_staleness=1)


def plane_of(config: Config = CONFIG, **hosts: int) -> tuple[ControlPlane, tuple[e.Action, ...]]:
    """A started plane with these hosts (name=slots), and what the last one's joining brought."""
    plane = ControlPlane(config)
    actions = plane.handle(e.RunStarted("d0"))
    for name, slots in hosts.items():
        actions = plane.handle(e.HostJoined(name, slots))
    return plane, actions


def finished(
    ordinal: int, member: int, host: str = "a", attempt: int = 0, *versions: int
) -> e.SampleFinished:
    spans = tuple(VersionSpan(v, i, i + 1) for i, v in enumerate(versions or (0,)))
    return e.SampleFinished(SampleId(ordinal, member, attempt), host, spans, "stop")


def complete(plane: ControlPlane, ordinal: int, attempt: int = 0, host: str = "a", version: int = 0):
    """Both members end and are scored; what the score brings."""
    for member in range(2):
        plane.handle(finished(ordinal, member, host, attempt, version))
    return plane.handle(e.RewardScored(ordinal, attempt, (0.0, 1.0)))


def train(plane: ControlPlane) -> tuple[e.Action, ...]:
    assert plane.state.training is not None
    step = plane.state.training.step
    return plane.handle(e.BatchTrained(step, plane.state.training.ordinals, f"d{step + 1}", {}))


def ids(ordinal: int, attempt: int = 0) -> tuple[SampleId, ...]:
    return (SampleId(ordinal, 0, attempt), SampleId(ordinal, 1, attempt))


def test_every_event_has_a_taker():
    assert set(machine._TAKERS) == set(e.EVENTS.values())


def test_a_group_goes_whole_to_the_host_with_the_fewest_samples():
    plane, actions = plane_of(
        b=4, a=4
    )  # the gate allows four groups; b takes three: its slots and one beyond
    assert actions == (e.Dispatch(ids(3), "a", 0),)
    assert {name: host.outstanding for name, host in plane.state.hosts.items()} == {"b": 6, "a": 2}
    complete(plane, 0, host="b"), complete(plane, 1, host="b"), train(plane)
    actions = plane.handle(e.VersionCommitted(1, "d1"))
    assert [(a.samples, a.host) for a in actions] == [(ids(4), "a"), (ids(5), "b")]


def test_dispatch_order_and_ties_by_name():
    config = changed(CONFIG, max_staleness=None, max_concurrent=5)
    plane = ControlPlane(config)
    plane.handle(e.RunStarted("d0"))
    assert [a.host for a in plane.handle(e.HostJoined("b", 2))] == ["b", "b"]  # 2 slots and one group beyond
    assert [(a.samples, a.host) for a in plane.handle(e.HostJoined("a", 9))] == [
        (ids(2), "a"),
        (ids(3), "a"),
        (ids(4), "a"),
    ]
    assert sorted(plane.state.groups) == [0, 1, 2, 3, 4]


def test_score_is_asked_for_once_all_members_are_there():
    plane, _ = plane_of(a=8)
    assert plane.handle(finished(0, 1)) == ()
    assert plane.handle(finished(0, 0)) == (e.Score(0, 0),)


@pytest.mark.parametrize(
    "event",
    [
        finished(0, 0),  # a duplicate
        finished(0, 7),  # no such member
        finished(99, 0),  # no such ordinal
        finished(1, 0, "b"),  # not that host's
        finished(1, 0, "a", 3),  # no such attempt
        e.SampleFailed(SampleId(0, 0), "a", "late"),
        e.RewardScored(0, 0, (0.0, 1.0)),  # nobody asked yet
        e.RewardFailed(77, 0, 0, "failed", ""),
        e.HostLost("z", "never seen"),
        e.HostAdopted("z", 0, "d0"),
    ],
    ids=lambda event: f"{type(event).__name__}-{getattr(event, 'sample', '')}",
)
def test_what_comes_twice_or_too_late_changes_nothing(event):
    plane, _ = plane_of(a=8)
    plane.handle(finished(0, 0))
    before = plane.snapshot()
    assert plane.handle(event) == ()
    assert plane.state.stale_events == 1
    assert plane.snapshot() == {**before, "stale_events": 1}


def test_is_stale_says_which_payload_may_be_stored():
    plane, _ = plane_of(a=8)
    assert not plane.state.is_stale(finished(0, 0, "a"))
    assert plane.state.is_stale(finished(0, 0, "b"))
    plane.handle(finished(0, 0))
    assert plane.state.is_stale(finished(0, 0, "a"))


def test_a_batch_is_the_lowest_complete_ordinals_in_order():
    plane, _ = plane_of(a=20)
    assert complete(plane, 3) == ()
    assert complete(plane, 1) == (e.Train(0, (1, 3), (0, 0)),)
    complete(plane, 2), complete(plane, 0)
    assert train(plane) == (e.Train(1, (0, 2), (0, 0)),)  # at once; admission waits for the commit
    assert (plane.state.version, plane.state.trained_version) == (0, 1)
    assert [a.samples for a in plane.handle(e.VersionCommitted(1, "d1"))] == [ids(4), ids(5)]


def test_equal_rewards_drop_and_are_refunded_once():
    plane, _ = plane_of(changed(CONFIG, group_filter="signal", max_staleness=0), a=20)
    for member in range(2):
        plane.handle(finished(0, member))
    actions = plane.handle(e.RewardScored(0, 0, (1.0, 1.0)))
    assert actions == (e.Drop(0, "no_signal"), e.Dispatch(ids(2), "a", 0))
    assert plane.handle(e.RewardScored(0, 0, (1.0, 1.0))) == ()
    assert dict(plane.state.dropped) == {"no_signal": 1}


@pytest.mark.parametrize(
    ("rewards", "is_dropped"),
    [
        ((0.1 + 0.2 + 0.3, 0.1 + (0.2 + 0.3)), True),
        ((0.1 + 0.2 - 0.3, 0.0), True),
        ((-1e6 / 3, -1e6 * (1 / 3)), True),
        ((1e-6, 0.0), False),
        ((1.0, 1.0 + 1e-5), False),
        ((1e6, 1e6 + 2), False),
    ],
)
def test_rewards_that_are_equal_but_for_rounding_drop_their_group(rewards: tuple[float, float], is_dropped):
    plane, _ = plane_of(changed(CONFIG, group_filter="signal", max_staleness=0), a=20)
    for member in range(2):
        plane.handle(finished(0, member))
    plane.handle(e.RewardScored(0, 0, rewards))
    assert dict(plane.state.dropped) == ({"no_signal": 1} if is_dropped else {})


def test_a_group_with_an_unusable_prompt_is_dropped_at_once_and_replaced():
    plane, _ = plane_of(a=4)
    failed = e.PromptFailed(1, 0, "too long")
    assert plane.handle(failed) == (
        e.Drop(1, "failed_prompt"),
        e.Cancel(ids(1), "a"),
        e.Dispatch(ids(3), "a", 0),
    )
    assert (plane.state.dropped, plane.state.failed_prompts) == ({"failed_prompt": 1}, [1])
    assert plane.handle(failed) == ()  # delivered twice
    assert plane.handle(e.PromptFailed(0, 1, "of another attempt")) == ()
    for member in range(2):
        plane.handle(finished(0, member))
    assert plane.handle(e.PromptFailed(0, 0, "while it is scored"))[0] == e.Drop(0, "failed_prompt")
    complete(plane, 2)
    assert plane.handle(e.PromptFailed(2, 0, "after it was scored")) == ()
    assert complete(plane, 3)[0] == e.Train(0, (2, 3), (0, 0))


@pytest.mark.parametrize(
    ("most", "every", "aborts"),
    [(0.0, 50, 1), (0.1, 10, 26), (0.1, 11, None), (0.1, 1, 26), (0.5, 1, 129), (1.0, 1, None)],
)
def test_a_run_ends_with_more_unusable_prompts_than_its_config_allows(most, every, aborts):
    """`every`: one prompt of so many is unusable; `aborts`: how many of them end the run."""
    config = changed(CONFIG, max_failed_prompts=most, max_staleness=None, max_concurrent=1)
    plane, actions = plane_of(config, a=2)
    failed, ended = 0, []
    for ordinal in range(400):
        assert [a.samples for a in actions if isinstance(a, e.Dispatch)] == [ids(ordinal)]
        if (ordinal + 1) % every:
            actions = complete(plane, ordinal)
            if plane.state.training is not None:
                plane.state.steps += 1
                actions = (*actions, *train(plane))
        else:
            failed += 1
            actions = plane.handle(e.PromptFailed(ordinal, 0, "unusable"))
        ended += [(failed, a) for a in actions if isinstance(a, e.Abort)]
    if aborts is None:
        assert not ended
        return
    count, abort = ended[0]
    assert (count, abort.dropped) == (aborts, (("failed_prompt", aborts),))
    assert abort.prompts == min(256, aborts * every)
    plane.handle(e.RunResumed(400))
    assert plane.state.failed_prompts == []  # the run goes on, as far again


def test_a_failed_reward_starts_again_once_then_drops():
    plane, _ = plane_of(a=20)
    for member in range(2):
        plane.handle(finished(0, member))
    failed = e.RewardFailed(0, 0, 1, "timed_out", "30 s")
    assert plane.handle(failed) == (e.Reissue(0, 1, "failed_reward"), e.Dispatch(ids(0, 1), "a", 0))
    for member in range(2):
        plane.handle(finished(0, member, "a", 1))
    actions = plane.handle(replace(failed, attempt=1))
    assert actions == (e.Drop(0, "failed_reward"), e.Dispatch(ids(4), "a", 0))


def test_a_failed_sample_cancels_its_group():
    plane, _ = plane_of(a=20)
    plane.handle(finished(0, 1))
    actions = plane.handle(e.SampleFailed(SampleId(0, 0), "a", "workflow raised"))
    assert actions == (
        e.Reissue(0, 1, "failed_sample"),
        e.Cancel((SampleId(0, 0),), "a"),
        e.Dispatch(ids(0, 1), "a", 0),
    )
    actions = plane.handle(e.SampleFailed(SampleId(0, 1, 1), "a", "again"))
    assert actions[:2] == (e.Drop(0, "failed_sample"), e.Cancel(ids(0, 1), "a"))
    assert plane.state.hosts["a"].outstanding == 8  # groups 1, 2, 3 and the replacement


def test_reissued_groups_go_before_new_ones():
    plane, _ = plane_of(changed(CONFIG, max_staleness=None), a=1)  # room for two groups
    assert sorted(plane.state.groups) == [0, 1]
    for member in range(2):
        plane.handle(finished(0, member))
    assert sorted(plane.state.groups) == [0, 1, 2]
    assert plane.handle(e.RewardFailed(0, 0, 0, "failed", "")) == (e.Reissue(0, 1, "failed_reward"),)
    plane.handle(finished(1, 0))
    assert [a.samples for a in plane.handle(finished(1, 1)) if isinstance(a, e.Dispatch)] == [ids(0, 1)]


def test_a_group_beyond_the_age_bound_starts_again_and_is_no_drop():
    plane, _ = plane_of(changed(CONFIG, max_staleness=1, max_token_age=1, steps=9), a=40)
    for step in range(2):
        complete(plane, 2 * step + 1, version=step), complete(plane, 2 * step + 2, version=step)
        train(plane)
        plane.handle(e.VersionCommitted(step + 1, f"d{step + 1}"))
    assert plane.state.trained_version == 2
    actions = complete(plane, 0)  # all its tokens are of version 0
    assert actions == (e.Reissue(0, 1, "over_age"), e.Dispatch(ids(0, 1), "a", 2))
    assert not plane.state.dropped


def test_a_lost_hosts_samples_keep_their_attempt_and_finished_members_stay():
    plane, _ = plane_of(a=20, b=20)
    plane.handle(finished(0, 0))
    actions = plane.handle(e.HostLost("a", "killed"))
    assert actions[0] == e.Dispatch((SampleId(0, 1),), "b", 0)
    assert [a.samples for a in actions[1:]] == [ids(1), ids(2), ids(3)]
    assert plane.handle(finished(0, 1, "b")) == (e.Score(0, 0),)


def test_a_host_that_joins_again_was_lost():
    plane, first = plane_of(a=20)
    plane.handle(e.HostAdopted("a", 0, "d0"))
    assert plane.handle(e.HostJoined("a", 20)) == first
    assert plane.state.hosts["a"].version == -1


def test_a_host_that_comes_back_goes_on_with_what_no_other_host_has_been_given():
    plane, _ = plane_of(a=20)
    plane.handle(finished(0, 0))
    plane.handle(e.SampleFailed(SampleId(1, 0), "a", "once"))  # its group begins its attempt 1
    plane.handle(e.HostLost("a", "silent"))
    plane.handle(e.HostJoined("b", 2))  # takes three groups of the four
    assert [plane.state.groups[n].host for n in range(4)] == ["b", "b", "b", ""]
    others, own = (SampleId(0, 1), SampleId(1, 1, 0), SampleId(2, 0)), SampleId(3, 1)
    assert plane.handle(e.HostJoined("a", 20, (*others, own))) == (
        e.Cancel(others, "a"),
        e.Dispatch((SampleId(3, 0),), "a", 0),  # it had ended on the host, which was not heard
    )
    assert plane.state.hosts["a"].outstanding == 2
    assert plane.handle(finished(3, 1)) == () == plane.handle(finished(0, 1))
    assert plane.handle(finished(3, 0)) == (e.Score(3, 0),)


def test_a_host_goes_on_with_no_sample_that_the_journal_gave_to_none():
    """After a power failure, the end of the journal may be gone; the group begins under a newer version."""
    plane, _ = plane_of(a=2)
    for member in range(2):
        plane.handle(finished(0, member))
    plane.handle(e.HostLost("a", "silent"))
    plane.handle(e.RewardFailed(0, 0, 0, "failed", "once"))  # its attempt 1 has not begun
    held = SampleId(0, 0, 1), SampleId(7, 0), SampleId(1, 5)
    assert plane.handle(e.HostJoined("a", 2, held))[:2] == (
        e.Cancel(held, "a"),
        e.Dispatch(ids(0, 1), "a", 0),
    )


def test_a_slow_reward_does_not_hold_up_dispatching():
    """A12: with one group in scoring for ever, the others are generated, trained, and new ones admitted."""
    plane, _ = plane_of(changed(CONFIG, steps=20, max_staleness=2), a=40)
    for member in range(2):
        plane.handle(finished(0, member))
    for step in range(2):
        low = 2 * step + 1
        complete(plane, low, version=step), complete(plane, low + 1, version=step)
        train(plane)
        dispatched = plane.handle(e.VersionCommitted(step + 1, f"d{step + 1}"))
        assert len(dispatched) == 2


def test_versions_commit_upwards_and_digests_stay():
    plane, _ = plane_of(a=20)
    with pytest.raises(ControlError, match="version 1 was committed, but the newest trained version is 0"):
        plane.handle(e.VersionCommitted(1, "d1"))
    complete(plane, 0), complete(plane, 1), train(plane)
    plane.handle(e.VersionCommitted(1, "d1"))
    before = plane.snapshot()
    assert plane.handle(e.VersionCommitted(1, "d1")) == ()
    assert plane.snapshot() == before
    with pytest.raises(ControlError, match="digest other, but its committed digest is d1"):
        plane.handle(e.VersionCommitted(1, "other"))
    plane.handle(e.VersionReissued(1, "d1", "other"))
    assert plane.handle(e.VersionCommitted(1, "other")) == ()


def test_digests_are_known_from_the_oldest_kept_checkpoint_on():
    plane, _ = plane_of(changed(CONFIG, keep_checkpoints=1), a=20)
    complete(plane, 0), complete(plane, 1), train(plane)
    plane.handle(e.VersionCommitted(1, "d1"))
    assert plane.state.digests == {0: "d0", 1: "d1"}
    plane.handle(e.CheckpointCommitted(1))
    assert plane.state.digests == {1: "d1"}
    assert plane.handle(e.VersionCommitted(0, "d0")) == ()


def test_hosts_adopt_committed_versions_upwards():
    plane, _ = plane_of(a=20)
    complete(plane, 0), complete(plane, 1), train(plane)
    with pytest.raises(ControlError, match="version 1 with digest d1"):
        plane.handle(e.HostAdopted("a", 1, "d1"))
    plane.handle(e.VersionCommitted(1, "d1"))
    plane.handle(e.HostAdopted("a", 1, "d1", 3))
    assert plane.state.hosts["a"].version == 1
    with pytest.raises(ControlError, match="went back from version 1 to 0"):
        plane.handle(e.HostAdopted("a", 0, "d0"))


@pytest.mark.parametrize(
    ("event", "message"),
    [
        (e.RunStarted("d0"), "no other, must be RunStarted"),
        (finished(0, 0, "a", 0, 1), "have weights versions [1]"),
        (finished(0, 0, "a", 0, 0, 1, 0), "have weights versions [0, 1, 0]"),
        (e.BatchTrained(0, (0, 1), "d1", {}), "the trainer was asked for no batch"),
        (e.HostJoined("b", 0), "joined with 0 slots"),
    ],
)
def test_what_cannot_be_is_refused_and_changes_nothing(event, message):
    plane, _ = plane_of(a=20)
    before = plane.snapshot()
    with pytest.raises(ControlError, match=re.escape(message)):
        plane.handle(event)
    assert plane.snapshot() == before


def test_nothing_comes_before_the_start():
    with pytest.raises(ControlError, match="no other, must be RunStarted"):
        ControlPlane(CONFIG).handle(e.HostJoined("a", 2))


def test_the_end_comes_once_and_again_after_a_resume():
    player = Player(CONFIG, Random(0)).start().play()
    finishes = [row for row in player.rows if e.Finish() in row[2]]
    assert len(finishes) == 1
    assert not player.plane.state.groups
    assert e.Finish() in player.tell(e.RunResumed(3))
    assert player.tell(e.HostJoined("host0", 4)) == ()


def test_fewer_steps_after_a_resume_drop_what_cannot_be_trained():
    player = Player(changed(CONFIG, steps=50, max_staleness=4), Random(0)).start()
    while player.plane.state.trained_version < 3:
        player.step()
    live = sorted(player.plane.state.groups)
    player.plane.handle(e.RunResumed(3))
    assert player.plane.state.is_finished
    assert dict(player.plane.state.dropped) == {"end": len(live)}


def test_waits_names_what_each_group_and_the_trainer_wait_for():
    plane, _ = plane_of()
    assert plane.waits() == (
        "every group waits for a generation host to join",
        "the trainer waits for 2 more complete groups",
    )
    plane.handle(e.HostJoined("a", 20))
    plane.handle(finished(0, 0)), plane.handle(finished(1, 0)), plane.handle(finished(1, 1))
    assert "group 0 waits for 1 samples of host a" in plane.waits()
    assert "group 1 waits for its rewards" in plane.waits()


def test_state_stays_bounded_over_a_long_run():
    player = Player(changed(CONFIG, steps=400), Random(0)).start()
    sizes = []
    while player.step():
        if player.plane.state.trained_version and isinstance(player.events[-1], e.BatchTrained):
            player.tell(e.CheckpointCommitted(player.plane.state.trained_version))
            sizes.append(len(repr(player.plane.snapshot())))
    assert player.plane.state.is_finished
    assert max(sizes) < 1.5 * max(sizes[:20])
