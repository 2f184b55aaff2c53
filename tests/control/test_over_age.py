"""control.over_age: hold and mask keep old tokens out of training, restart nothing, and never deadlock."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from random import Random
from typing import Any

import pytest

from areal_jax.config.tree import Config
from areal_jax.control import drops, machine
from areal_jax.control import events as e
from areal_jax.control import over_age as rule
from areal_jax.control.audit import audit
from areal_jax.control.machine import ControlPlane
from areal_jax.control.state import GroupState, State
from areal_jax.types import SampleId, VersionSpan
from tests.control.play import Decoding, Player, changed, config_of

HOLD = config_of(steps=5, batch_size=1, group_size=1, max_staleness=2, max_token_age=2, over_age="hold")


class One:
    """A control plane with a host of many slots; groups of one sample."""

    def __init__(self, config: Config = HOLD) -> None:
        self.config = config
        self.plane = ControlPlane(config)
        self.plane.handle(e.RunStarted("d0"))
        self.plane.handle(e.HostJoined("a", 40))

    def complete(self, ordinal: int, version: int = 0) -> list[e.Action]:
        spans = (VersionSpan(version, 0, 1),)
        self.plane.handle(e.SampleFinished(SampleId(ordinal, 0), "a", spans, "stop"))
        return self.without_dispatch(e.RewardScored(ordinal, 0, (1.0,)))

    def train(self) -> list[e.Action]:
        batch = self.plane.state.training
        assert batch is not None
        actions = self.without_dispatch(e.BatchTrained(batch.step, batch.ordinals, f"d{batch.step + 1}", {}))
        version = batch.step + 1
        return actions + self.without_dispatch(e.VersionCommitted(version, f"d{version}"))

    def without_dispatch(self, event: e.Event) -> list[e.Action]:
        return [action for action in self.plane.handle(event) if not isinstance(action, e.Dispatch)]


def test_the_trainer_waits_for_a_group_that_the_next_update_would_make_too_old():
    """Ages may reach K = 2: group 0 of version 0 must be in batch 2 at the latest, group 1 then no more."""
    run = One()
    assert run.complete(2) == [e.Train(0, (2,), (0,))]
    assert run.train() == []
    assert run.complete(3, version=1) == [e.Hold(1)]
    assert run.plane.state.is_held
    assert run.complete(4, version=1) == []  # a hold is said once
    assert any("waits for group 0, which would be too old" in text for text in run.plane.waits())
    assert run.complete(1) == [e.Train(1, (1,), (0,))]
    assert not run.plane.state.is_held
    assert run.complete(0) == []
    assert run.train() == [e.Train(2, (0,), (0,))]  # 2 versions old, as it may be


def test_a_held_batch_is_trained_once_the_late_group_is_dropped():
    run = One()
    run.complete(2), run.train()
    assert run.complete(3, version=1) == [e.Hold(1)]
    failed = [run.without_dispatch(e.SampleFailed(SampleId(0, 0, attempt), "a", "")) for attempt in (0, 1)]
    # Restarted, group 0 has time; but being the lower one, it may still take group 1's place in batch 2.
    assert failed[0] == [e.Reissue(0, 1, "failed_sample"), e.Cancel((SampleId(0, 0),), "a")]
    assert failed[1][0] == e.Drop(0, "failed_sample")
    assert failed[1][-1] == e.Train(1, (3,), (0,))


def test_a_resumed_run_says_again_that_it_holds():
    run = One()
    run.complete(2), run.train(), run.complete(3, version=1)
    plane = ControlPlane.fold(run.config, [], run.plane.snapshot())
    assert plane.state == run.plane.state
    assert plane.handle(e.RunResumed(5)) == (e.Hold(1),)


def test_a_longer_bound_than_the_gates_holds_later():
    run = One(changed(HOLD, max_token_age=3))
    run.complete(2), run.train()
    assert run.complete(3, version=1) == [e.Train(1, (3,), (0,))]
    run.train()
    assert run.complete(4, version=2) == [e.Hold(2)]


def test_a_group_starts_again_once_it_is_older_than_the_bound():
    groups = {n: GroupState(n, (n, 3), stage="complete") for n in range(4)}  # of ages 3, 2, 1 and 0
    state = State(9, trained_version=3, groups=groups, complete=[0, 1, 2, 3])
    assert rule.to_restart(state, changed(HOLD, over_age="restart", max_token_age=1)) == [0, 1]


# --- any order of events ------------------------------------------------------------------------------------


@dataclass
class Slow(Player):
    """Host 0 is slow: it ends a sample only when nothing else can happen, or rarely."""

    def step(self) -> bool:
        slow = [p for p in self.pending if isinstance(p, Decoding) and p.host == "host0"]
        if 0 < len(slow) < len(self.pending) and self.random.random() > 0.02:
            self.pending = [p for p in self.pending if p not in slow]
            super().step()
            # What a restart or a drop cancelled meanwhile stays cancelled.
            awaits = self.plane.state.awaits
            self.pending += [p for p in slow if awaits(p.sample, p.host)]
            return True
        return super().step()


def played(seed: int, strategy: str, over_age: str, **control: Any) -> Slow:
    rng = Random(seed)
    eta = {"sync": 0, "one_step": 1}.get(strategy, seed % 3)
    config = config_of(
        steps=8,
        batch_size=rng.randint(1, 4),
        group_size=2,
        group_filter="signal",
        strategy=strategy,
        on_update={"one_step": "drain", "keep": "keep", "pinned": "pinned"}.get(strategy, "recompute"),
        max_staleness=eta,
        max_token_age=eta + rng.randint(0, 1),
        over_age=over_age,
        max_concurrent=rng.choice([None, 3]),
        **control,
    )
    player = Slow(
        config,
        rng,
        equal_rewards=rng.choice([0.0, 0.5]),
        failed_rewards=rng.choice([0.0, 0.2]),
        failed_samples=rng.choice([0.0, 0.1]),
        slots=rng.choice([1, 3, 50]),  # the first two are fewer slots than a batch has samples
        drains=strategy == "one_step",
    ).start()
    if seed % 4 == 0:
        for _ in range(40):
            player.step()
        player = player.lose("host0") if seed % 8 else player.resume()
    return player.play()


def reissues(player: Player) -> Counter[str]:
    return Counter(a.reason for _, _, actions in player.rows for a in actions if isinstance(a, e.Reissue))


def held(player: Player) -> int:
    return sum(isinstance(action, e.Hold) for _, _, actions in player.rows for action in actions)


@pytest.mark.slow
@pytest.mark.parametrize("over_age", ["hold", "mask"])
@pytest.mark.parametrize("strategy", ["sync", "one_step", "interruptible", "keep", "pinned"])
def test_in_any_order_a_run_ends_restarts_no_group_for_age_and_keeps_the_bound(strategy, over_age):
    holds = old = 0
    for seed in range(60):
        player = played(seed, strategy, over_age)
        bound = player.config.control.max_token_age or 0
        assert audit(player.config, player.rows).violations == [], seed
        assert reissues(player)["over_age"] == 0, seed
        assert over_age == "mask" or max(player.ages) <= bound, seed
        holds += held(player)
        old += sum(age > bound for age in player.ages)
    free = strategy in ("interruptible", "keep")
    # The other strategies have no token that is older than their own bound.
    assert (holds > 20) == (free and over_age == "hold")
    assert (old > 20) == (free and over_age == "mask")


def test_without_the_rule_of_hold_trained_tokens_exceed_the_bound(monkeypatch):
    """So the test above would find that the rule is missing."""
    monkeypatch.setattr(machine, "is_to_hold", lambda state, config, ordinals: False)
    runs = [played(seed, "interruptible", "hold") for seed in range(20)]
    assert sum(max(run.ages) > (run.config.control.max_token_age or 0) for run in runs) > 5


def test_to_wait_only_for_what_would_be_too_old_next_would_deadlock(monkeypatch):
    """Why the rule counts places: of groups 0 and 1, both of version 0, only one can be in batch 2."""

    def only_next(step, left, batch_size, bound):
        return all(step + 1 <= version + bound for version in left)

    monkeypatch.setattr(rule, "may_train", only_next)
    run = One()
    run.complete(2), run.train()
    assert run.complete(3, version=1) == [e.Train(1, (3,), (0,))]
    run.train()
    assert run.complete(1) == [e.Hold(2)]
    assert run.complete(0) == []  # all groups of version 0 are complete, and no batch may be trained


# --- runs that drop everything ------------------------------------------------------------------------------


def dropped(run: One, ordinal: int) -> list[e.Action]:
    run.plane.handle(e.SampleFinished(SampleId(ordinal, 0), "a", (VersionSpan(0, 0, 1),), "stop"))
    return run.without_dispatch(e.RewardScored(ordinal, 0, (0.0,)))


def filtered() -> One:
    """Groups of one sample have no signal, so that the filter drops each."""
    return One(config_of(steps=5, batch_size=2, group_size=1, group_filter="signal", max_staleness=0))


def test_groups_dropped_in_a_row_end_the_run_with_their_reasons(monkeypatch):
    monkeypatch.setattr(drops, "MOST", 3)
    monkeypatch.setattr(drops, "MOST_BATCHES", 2)
    run = filtered()
    for ordinal in range(4):
        assert dropped(run, ordinal) == [e.Drop(ordinal, "no_signal")]
    for attempt in (0, 1):
        last = run.without_dispatch(e.SampleFailed(SampleId(4, 0, attempt), "a", ""))
    assert last[-1] == e.Abort((("failed_sample", 1), ("no_signal", 4)))
    assert dropped(run, 5) == [e.Drop(5, "no_signal")]  # it is said once
    assert run.without_dispatch(e.RunResumed(5)) == []
    run.plane.handle(e.HostJoined("a", 40))
    assert [len(dropped(run, ordinal)) for ordinal in range(6, 11)] == [1, 1, 1, 1, 2]


def test_a_group_with_usable_rewards_ends_the_row(monkeypatch):
    monkeypatch.setattr(drops, "MOST", 3)
    monkeypatch.setattr(drops, "MOST_BATCHES", 1)
    run = One(config_of(steps=5, batch_size=2, group_size=1, max_staleness=1))
    for ordinal in (0, 1, 2):
        for attempt in (0, 1):
            run.plane.handle(e.SampleFailed(SampleId(ordinal, 0, attempt), "a", ""))
    assert run.plane.state.dropped_in_a_row == {"failed_sample": 3}
    run.complete(3)
    assert run.plane.state.dropped_in_a_row == {}
    assert run.plane.state.dropped == {"failed_sample": 3}
    assert ControlPlane.fold(run.config, [], run.plane.snapshot()).state == run.plane.state


def test_half_of_all_groups_may_be_dropped_for_ever():
    """With eta = 0 such a run does not stall, and is far from the bound."""
    for seed in range(20):
        player = Player(
            config_of(
                steps=60, batch_size=1 + seed % 3, group_size=2, group_filter="signal", max_staleness=0
            ),
            Random(seed),
            equal_rewards=0.5,
        ).start()
        player.play()
        assert max(sum(player.plane.state.dropped.values()), 0) > 30
        assert not any(isinstance(a, e.Abort) for _, _, actions in player.rows for a in actions)
