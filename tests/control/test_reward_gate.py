"""The gate of a reward part: decided where a batch is formed, by the accuracy of the batch trained before."""

from __future__ import annotations

import json
from dataclasses import replace
from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from areal_jax.config.sections import GateConfig
from areal_jax.control import events as e
from areal_jax.control.audit import audit
from areal_jax.control.errors import ControlError
from areal_jax.control.machine import ControlPlane
from areal_jax.control.reward_gate import gates_of, is_open, paid, rewards_of
from areal_jax.control.state import from_plain, to_plain
from areal_jax.types import Group, Prompt, SampleId, Sampling, Trajectory, VersionSpan
from tests.control.play import Player, changed, config_of

GATE = GateConfig(part="intermediate")
CONFIG = config_of(steps=4, batch_size=2, group_size=2, max_staleness=1, gate=GATE)


class Run:
    """A control plane; its groups finish and are scored when the test says so."""

    def __init__(self, config=CONFIG, slots: int = 40) -> None:
        self.plane, self.rows = ControlPlane(config), []
        self.tell(e.RunStarted("d0"))
        self.tell(e.HostJoined("a", slots))

    def tell(self, event: e.Event) -> tuple[e.Action, ...]:
        actions = self.plane.handle(event)
        self.rows.append((len(self.rows), event, actions))
        return actions

    def score(
        self, ordinal: int, *right: float, reward: float = 0.0, attempt: int = 0
    ) -> tuple[e.Action, ...]:
        for member in range(2):
            span = VersionSpan(self.plane.state.groups[ordinal].min_version, 0, 1)
            sample = SampleId(ordinal, member, attempt)
            self.tell(e.SampleFinished(sample, self.plane.state.groups[ordinal].host, (span,), "stop"))
        parts = tuple((("correct", one), ("intermediate", 0.5 * one)) for one in right)
        rewards = tuple(reward + 3 * one for one in right)
        return self.tell(e.RewardScored(ordinal, attempt, rewards, parts))

    def train(self) -> tuple[e.Action, ...]:
        batch = self.plane.state.training
        assert batch is not None
        self.tell(e.BatchTrained(batch.step, batch.ordinals, f"d{batch.step + 1}", {}))
        return self.tell(e.VersionCommitted(batch.step + 1, f"d{batch.step + 1}"))


def gates(actions: tuple[e.Action, ...]) -> list[dict[str, bool]]:
    return [dict(action.gates) for action in actions if isinstance(action, e.Train)]


def test_a_gate_compares_with_the_batch_trained_before():
    run = Run()
    run.score(0, 1, 0)
    assert gates(run.score(1, 1, 0)) == [{"intermediate": True}]  # the first batch, accuracy 0.5
    run.score(3, 0, 0), run.score(2, 1, 0)  # accuracy 0.25 < 0.5 - 0.05
    batch = run.plane.state.training
    assert batch is not None and batch.step == 0 and run.plane.state.accuracy is None
    assert gates(run.train()) == []  # the next Train came with BatchTrained, before the commit
    assert run.plane.state.training == e.Train(1, (2, 3), (0, 0), (("intermediate", False),))
    assert run.plane.state.accuracy == 0.5
    run.score(4, 1, 0), run.score(5, 0, 0)
    run.train()
    # 0.25 after 0.25: not above it, but above it minus the tolerance.
    assert run.plane.state.training == e.Train(2, (4, 5), (0, 0), (("intermediate", True),))


@pytest.mark.parametrize(
    ("accuracy", "previous", "is_paid"),
    [
        (0.5, 0.5, True), (0.46, 0.5, True), (0.45, 0.5, False), (0.4, 0.5, False), (0.0, None, True),
        (0.1, 0.15, False),  # 0.15 - 0.05 is a little below 0.1 in floating point
    ],
)  # fmt: skip
def test_the_gate_is_open_above_the_previous_accuracy_minus_the_tolerance(accuracy, previous, is_paid):
    assert is_open(accuracy, previous, GATE) is is_paid


def test_the_first_batch_and_the_tolerance_are_settings():
    assert not is_open(1.0, None, GateConfig(part="x", first="closed"))
    assert is_open(0.3, 0.5, GateConfig(part="x", tolerance=0.25))
    assert not is_open(0.5, 0.5, GateConfig(part="x", tolerance=0))
    assert gates_of([0.5], 0.5, GateConfig()) == ()


def test_rewards_are_scored_with_the_part_and_paid_without_it_behind_a_closed_gate():
    scored, parts = (3.5, -0.5), ({"correct": 1.0, "intermediate": 0.5}, {"correct": 0.0})
    assert rewards_of(scored, parts, ()) == scored
    assert rewards_of(scored, parts, (("intermediate", True),)) == scored
    assert rewards_of(scored, parts, (("intermediate", False),)) == (3.0, -0.5)


def test_rewards_that_are_equal_without_the_part_stay_equal():
    """(0.3 + 0.1) - 0.1 is not 0.3, and the signal filter compares the members of a group."""
    parts = ({"correct": 1.0, "intermediate": 0.1}, {"correct": 1.0, "intermediate": 0.0})
    scored = (0.3 + 0.1, 0.3)
    assert scored[0] - 0.1 != scored[1]
    assert rewards_of(scored, parts, (("intermediate", False),)) == (0.3, 0.3)


def test_groups_are_paid_by_the_gates_and_keep_their_parts():
    arrays = [np.zeros(1, np.int32), np.ones(1, bool), np.zeros(1, np.float32), np.zeros(1, np.int32)]
    one = Trajectory(SampleId(0, 0), *arrays, np.zeros(1, np.int32), Sampling(), "stop")
    one = replace(one, reward=3.25, reward_parts={"correct": 1.0, "intermediate": 0.25})
    group = Group(0, Prompt("x"), (one,))
    (closed,) = paid([group], (("intermediate", False),))
    assert closed.trajectories[0].reward == 3.0
    assert closed.trajectories[0].reward_parts == one.reward_parts
    assert paid([group], (("intermediate", True),)) == (group,)


def test_the_state_of_the_gate_survives_a_snapshot():
    run = Run()
    run.score(0, 1, 0), run.score(1, 1, 1)
    run.train()
    run.score(2, 1, 0), run.score(3, 0, 0)
    restored = from_plain(json.loads(json.dumps(to_plain(run.plane.state))))
    assert restored == run.plane.state
    assert restored.accuracy == 0.75 and restored.training is not None
    assert restored.training.gates == (("intermediate", False),)


def test_a_resume_asks_for_the_batch_with_the_journaled_gates():
    run = Run()
    run.score(0, 1, 0), run.score(1, 1, 1)
    run.train()
    run.score(2, 0, 0), run.score(3, 0, 0)
    again = ControlPlane.fold(CONFIG, [event for _, event, _ in run.rows])
    assert [a for a in again.handle(e.RunResumed()) if isinstance(a, e.Train)] == [run.plane.state.training]


def test_a_snapshot_from_before_gates_can_be_read():
    plain = json.loads(json.dumps(to_plain(Run(config_of(steps=4, batch_size=2, group_size=2)).plane.state)))
    del plain["accuracy"]
    plain["groups"] = [group[:-1] for group in plain["groups"]]
    plain["training"] = [0, [0, 1], [0, 0]]
    state = from_plain(plain)
    assert state.accuracy is None and state.training == e.Train(0, (0, 1), (0, 0))


def test_the_signal_filter_leaves_the_gated_part_out():
    run = Run(changed(CONFIG, group_filter="signal"))
    for member in range(2):
        run.tell(e.SampleFinished(SampleId(0, member), "a", (VersionSpan(0, 0, 1),), "stop"))
    parts = tuple((("correct", 1.0), ("intermediate", part)) for part in (0.5, 0.25))
    drops = run.tell(e.RewardScored(0, 0, (3.5, 3.25), parts))
    assert e.Drop(0, "no_signal") in drops


@pytest.mark.parametrize("parts", [(), ((("correct", 1.0),),) * 2, ((("intermediate", 0.5),),) * 2])
def test_a_reward_without_the_parts_of_the_gate_is_refused_and_changes_nothing(parts):
    run = Run()
    for member in range(2):
        run.tell(e.SampleFinished(SampleId(0, member), "a", (VersionSpan(0, 0, 1),), "stop"))
    before = to_plain(run.plane.state)
    with pytest.raises(ControlError, match=r"algorithm\.gate\.part=intermediate needs the reward parts"):
        run.plane.handle(e.RewardScored(0, 0, (1.0, 0.0), parts))
    assert to_plain(run.plane.state) == before


@given(seed=st.integers(0, 2**16), eta=st.sampled_from([0, 1, 4]), tolerance=st.sampled_from([0.0, 0.05]))
@settings(deadline=None, max_examples=60)
def test_under_any_interleaving_every_gate_follows_from_the_trained_batches_in_order(seed, eta, tolerance):
    gate = GateConfig(part="intermediate", tolerance=tolerance, first="closed")
    config = config_of(
        steps=8, batch_size=3, group_size=2, max_staleness=eta, group_filter="signal", gate=gate
    )
    player = Player(config, Random(seed), equal_rewards=0.2, failed_rewards=0.1, failed_samples=0.1).start()
    player.play()
    assert player.plane.state.is_finished and audit(config, player.rows).ok
    # By hand, from the events alone: the last score of each group, and the batches in the order trained.
    right = {
        (event.ordinal, event.attempt): sum(dict(own)["correct"] for own in event.parts)
        for event in player.events
        if isinstance(event, e.RewardScored)
    }
    trains = [action for _, _, actions in player.rows for action in actions if isinstance(action, e.Train)]
    counts = [sum(right[key] for key in zip(t.ordinals, t.attempts, strict=True)) for t in trains]
    assert [t.step for t in trains] == list(range(8))
    assert trains[0].gates == (("intermediate", False),)
    for train, count, before in zip(trains[1:], counts[1:], counts, strict=False):
        assert train.gates == (("intermediate", count > before - 6 * tolerance),), (count, before)


def test_the_audit_rounds_as_the_gate_does():
    run = Run(config_of(steps=2, batch_size=1, group_size=2, max_staleness=1, gate=GATE))
    run.score(0, 0.6, 0.6), run.score(1, 0.55, 0.55)
    run.train()
    batch = run.plane.state.training
    # Not above 0.6 - 0.05, which is 0.5499999999999999 in floating point.
    assert batch is not None and batch.gates == (("intermediate", False),)
    assert audit(run.plane._config, run.rows).violations == []


def test_the_audit_decides_every_gate_again():
    config = config_of(steps=6, batch_size=2, group_size=2, max_staleness=1, gate=GATE)
    rows = Player(config, Random(3)).start().play().rows
    assert audit(config, rows).ok
    place = next(i for i, _, actions in rows if any(isinstance(a, e.Train) and a.step == 2 for a in actions))
    _, event, actions = rows[place]
    turned = tuple(
        replace(a, gates=(("intermediate", not a.gates[0][1]),)) if isinstance(a, e.Train) else a
        for a in actions
    )
    rows[place] = (place, event, turned)
    found = audit(config, rows)
    assert not found.ok
    assert any("batch 2 was trained with the gates" in violation for violation in found.violations)
