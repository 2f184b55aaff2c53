"""A step's row: every required figure, and the right one for a batch made by hand."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from areal_jax.config.sections import ControlConfig
from areal_jax.control import events as e
from areal_jax.generation.commands import Statistics
from areal_jax.observe.metrics import REQUIRED, MetricsWriter
from areal_jax.observe.waits import CONTROL_ALONE, HELD, Timeline
from areal_jax.runtime.rows import RowMaker
from areal_jax.types import Group, Prompt, SampleId, Sampling, Trajectory

TRAINED = {
    "trained_tokens": 20.0, "grad_norm": 0.5, "entropy": 1.5, "logp_gap_mean": 0.0, "logp_gap_max": 0.0,
    "logp_gap_p999": 0.0, "mismatch_kl": 0.0, "support_mass_outside": 0.0, "off_policy_weight_mean": 1.0,
    "off_policy_capped_share": 0.0, "effective_token_share": 1.0, "effective_sequence_share": 1.0,
}  # fmt: skip
"""What an update reports."""


@dataclass
class FakeHost:
    name: str = "host-0"
    generated_tokens: int = 0
    gaps_s: deque[float] = field(default_factory=deque)
    said: Statistics = field(default_factory=Statistics)
    tokens_per_s: float | None = None

    def statistics(self) -> Statistics:
        return self.said


def sample(ordinal: int, member: int, reward: float, versions: list[int], stop: str = "stop") -> Trajectory:
    """A prompt of two tokens, then one token a version."""
    n = 2 + len(versions)
    mask = np.arange(n) >= 2
    return Trajectory(
        sample=SampleId(ordinal, member),
        tokens=np.zeros(n, np.int32),
        loss_mask=mask,
        behavior_logp=np.zeros(n, np.float32),
        versions=np.array([-1, -1, *versions], np.int32),
        turn_ids=np.where(mask, 0, -1),
        sampling=Sampling(),
        stop_reason=stop,
        reward=reward,
    )


BATCH = [
    Group(4, Prompt("a", task="x"), (sample(4, 0, 1.0, [3, 3]), sample(4, 1, 0.0, [4, 5, 5, 5], "length"))),
    Group(6, Prompt("b", task="y"), (sample(6, 0, 0.5, [5]), sample(6, 1, 0.5, [4, 4, 5], "length"))),
]


def make(
    hosts: list[FakeHost] | None = None,
    timeline: Timeline | None = None,
    tasks: str = "xy",
    control: ControlConfig | None = None,
) -> RowMaker:
    """Ordinals from 7 on are task y's."""
    return RowMaker(
        (timeline or Timeline(None)).take_totals,
        hosts or [FakeHost()],  # type: ignore[arg-type]
        tasks=tuple(tasks),
        task_of=lambda ordinal: "y" if ordinal >= 7 else "x",
        control=control,
    )


def test_each_row_of_a_run_with_episodes_has_their_figures():
    """Also after a resume that found its batch complete, so that no turn came since."""
    maker = RowMaker(Timeline(None).take_totals, [FakeHost()], has_episodes=True)  # type: ignore[list-item]
    row = maker.make(5, BATCH, TRAINED, "")
    assert (row["turns_mean"], row["branches_mean"], row["tool_calls"]) == (1.0, 0.0, 0)
    assert "turns_mean" not in make().make(5, BATCH, TRAINED, "")


def test_a_row_has_every_required_figure(tmp_path: Path):
    row = make().make(5, BATCH, TRAINED, "d" * 16)
    assert [name for name in REQUIRED if name not in row] == []
    writer = MetricsWriter(tmp_path, tensorboard=False)
    writer.write(row)
    writer.close()


def test_rewards_ages_and_lengths_are_those_of_the_batch():
    row = make().make(5, BATCH, TRAINED, "d" * 16)
    expected: dict[str, Any] = {
        "step": 5, "version": 6, "params_digest": "d" * 16, "clip_share": 0.0,
        "reward_mean": 0.5, "reward_std": np.std([1, 0, 0.5, 0.5]), "signal_share": 0.5,
        "reward_mean/x": 0.5, "reward_mean/y": 0.5, "signal_share/x": 1.0, "signal_share/y": 0.0,
        "completion_tokens_mean/x": 3.0, "completion_tokens_mean/y": 2.0,
        "truncated_share/x": 0.5, "truncated_share/y": 0.5,
        "failed_rewards/x": 0, "failed_rewards/y": 0,
        # first tokens under 3, 4, 5, 4; all tokens: 3 3 | 4 5 5 5 | 5 | 4 4 5
        "head_age_mean": np.mean([2, 1, 0, 1]), "token_age_mean": np.mean([2, 2, 1, 0, 0, 0, 0, 1, 1, 0]),
        "token_age_min": 0, "token_age_median": 0.5, "token_age_max": 2,
        "completion_tokens_mean": 2.5, "completion_tokens_p50": 2.5,
        "completion_tokens_max": 4, "completion_bubble_share": (4 - 2.5) / 4,
        "completion_tokens_p99": np.quantile([2, 4, 1, 3], 0.99),
        "truncated_share": 0.5, "grad_norm": 0.5,
        # all tokens are equal, so that every sample begins the longest
        "sequence_tokens": 4 + 6 + 3 + 5, "tree_tokens": 6,
    }  # fmt: skip
    for name, value in expected.items():
        assert row[name] == pytest.approx(value), name


def test_masked_tokens_have_no_age_and_a_share_of_their_own():
    """Tokens under 3 3 | 4 5 5 5 | 5 | 4 4 5; completions are as long as they were sampled."""
    for bound, share, ages in ((1, 0.2, [1, 0, 0, 0, 0, 1, 1, 0]), (0, 0.5, [0] * 5)):
        rows = make(control=ControlConfig(max_token_age=bound, over_age="mask"))
        row = rows.make(5, BATCH, TRAINED, "")
        assert row["masked_token_share"] == pytest.approx(share)
        assert row["token_age_mean"] == pytest.approx(np.mean(ages))
        assert (row["token_age_max"], row["token_age_min"]) == (max(ages), 0)
        assert (row["completion_tokens_mean"], row["head_age_mean"]) == (2.5, 1.0)
        assert "hold_share" not in row
    row = make(control=ControlConfig(max_token_age=1, over_age="mask")).make(9, BATCH, TRAINED, "")
    assert (row["masked_token_share"], row["token_age_mean"], row["token_age_max"]) == (1.0, 0.0, 0)
    assert "masked_token_share" not in make().make(5, BATCH, TRAINED, "")


def test_the_time_that_the_trainer_is_held_is_a_part_of_its_wait():
    now = [0]
    timeline = Timeline(None, lambda: now[0], zero_ns=0)
    clock = timeline.clock("trainer", "update")
    for activity, end_s in ((f"wait: {HELD}", 4), ("wait: a batch", 6), ("update", 7)):
        now[0] = end_s * 10**9
        clock.switch(activity)
    now[0] = 10 * 10**9
    control = ControlConfig(max_token_age=1, over_age="hold")
    row = make(timeline=timeline, control=control).make(5, BATCH, TRAINED, "")
    # update 0-4, held 4-6, waiting 6-7, update 7-10
    assert (row["hold_share"], row["trainer_wait_share"]) == pytest.approx((0.2, 0.3))
    assert "masked_token_share" not in row


def test_figures_of_the_update_win_over_defaults():
    row = make().make(5, BATCH, {**TRAINED, "clip_share": 0.25}, "")
    assert row["clip_share"] == 0.25


def test_counts_are_of_the_step():
    rows = make()
    rows.see(e.HostAdopted("host-0", 1, "", interrupted=3), ())
    rows.see(e.HostAdopted("host-0", 2, "", interrupted=2), ())
    rows.see(e.RewardFailed(7, 0, 1, "timed_out", "slow"), (e.Drop(7, "failed"), e.Reissue(8, 1, "over_age")))
    rows.see(e.VersionCommitted(2, ""), (e.Drop(9, "signal"), e.Drop(10, "signal")))
    row = rows.make(5, BATCH, TRAINED, "")
    assert (row["interruptions"], row["failed_rewards"], row["dropped"]) == (5, 1, 3)
    assert (row["failed_rewards/x"], row["failed_rewards/y"]) == (0, 1)
    assert row["dropped_by_reason"] == {"failed": 1, "signal": 2}
    assert row["reissued_by_reason"] == {"over_age": 1}
    after = rows.make(6, BATCH, TRAINED, "")
    assert (after["interruptions"], after["failed_rewards"], after["dropped"]) == (0, 0, 0)
    assert after["failed_rewards/y"] == 0
    assert (after["dropped_by_reason"], after["reissued_by_reason"]) == ({}, {})


def test_tokens_and_gaps_are_of_the_step_and_of_all_hosts(monkeypatch):
    now = iter([100.0, 100.0, 104.0, 106.0])
    monkeypatch.setattr("areal_jax.runtime.rows.time.monotonic", lambda: next(now))
    hosts = [FakeHost("host-0", 300, deque([0.1] * 50)), FakeHost("host-1", 100, deque([0.2] * 50))]
    rows = make(hosts)
    row = rows.make(5, BATCH, TRAINED, "")
    assert (row["generated_tokens"], row["generate_tokens_per_s"]) == (400, 100.0)
    assert row["train_tokens_per_s"] == 5.0
    assert row["wall_s"] == 4.0
    assert row["decode_gap_p99_s"] == pytest.approx(0.2)
    hosts[1].generated_tokens += 50
    after = rows.make(6, BATCH, TRAINED, "")
    assert (after["generated_tokens"], after["generate_tokens_per_s"]) == (50, 25.0)
    assert (after["decode_gap_p99_s"], after["wall_s"]) == (0.0, 6.0)


def test_wall_time_goes_on_after_a_resume():
    row = RowMaker(Timeline(None).take_totals, [FakeHost()], start_s=1000.0).make(5, BATCH, TRAINED, "")  # type: ignore[list-item]
    assert 1000 <= row["wall_s"] < 1001


def test_idle_shares_are_of_waits_only(monkeypatch):
    timeline = Timeline(None)
    shares = {
        "trainer": {"wait: a batch": 3.0, "update": 1.0},
        "host-0": {"decode": 1.0},
        "host-1": {"wait: x": 1.0},
    }
    monkeypatch.setattr(timeline, "take_totals", lambda: shares)
    row = make([FakeHost("host-0"), FakeHost("host-1")], timeline).make(5, BATCH, TRAINED, "")
    assert (row["trainer_wait_share"], row["generator_idle_share"]) == (0.75, 0.5)
    assert "control_busy_share" not in row and "control_alone_share" not in row
    shares["control"] = {"decide": 1.0, "wait: an event": 3.0}
    row = make([FakeHost("host-0"), FakeHost("host-1")], timeline).make(5, BATCH, TRAINED, "")
    assert row["control_busy_share"] == 0.25 and "control_alone_share" not in row
    shares[CONTROL_ALONE] = {"decide": 0.5, "wait": 3.5}
    row = make([FakeHost("host-0"), FakeHost("host-1")], timeline).make(5, BATCH, TRAINED, "")
    assert (row["control_busy_share"], row["control_alone_share"]) == (0.25, 0.125)


def test_a_single_task_has_no_figures_of_its_own():
    one = [replace(group, prompt=Prompt("a", task="x")) for group in BATCH]
    assert not [name for name in make(tasks="x").make(5, one, TRAINED, "") if "/" in name]


def test_a_task_without_a_group_in_the_batch_still_tells_its_failures():
    rows = make()
    rows.see(e.RewardFailed(8, 0, 0, "failed", "boom"), ())
    row = rows.make(5, BATCH[:1], TRAINED, "")
    assert [name for name in row if name.endswith("/y")] == ["failed_rewards/y"]
    assert row["failed_rewards/y"] == 1 and row["reward_mean/x"] == 0.5


def test_hosts_whose_counts_come_now_and_then_say_their_rate_themselves():
    rows = make([FakeHost(tokens_per_s=30.0), FakeHost("host-1", tokens_per_s=12.0)])
    row = rows.make(5, BATCH, TRAINED, "d" * 16)
    assert (row["generated_tokens"], row["generate_tokens_per_s"]) == (0, 42.0)


def test_swaps_and_what_they_cost_are_summed_over_hosts_and_counted_from_row_to_row():
    hosts = [FakeHost(), FakeHost("host-1")]
    rows = make(hosts)
    hosts[0].said = Statistics(swaps=2, swap_s=0.5, recomputed_tokens=70, evictions=1)
    hosts[1].said = Statistics(swaps=1, swap_s=0.25, recomputed_tokens=30)
    row = rows.make(5, BATCH, TRAINED, "d" * 16)
    names = ("swaps", "swap_s", "recomputed_tokens", "evictions")
    assert [row[name] for name in names] == [3, 0.75, 100, 1]
    hosts[1].said = Statistics(swaps=2, swap_s=0.375, recomputed_tokens=30)
    row = rows.make(6, BATCH, TRAINED, "d" * 16)
    assert [row[name] for name in names] == [1, 0.125, 0, 0]


def test_a_row_has_the_means_of_the_parts_and_what_each_gate_paid():
    def scored(ordinal: int, member: int, correct: float, part: float) -> Trajectory:
        parts = {"correct": correct, "intermediate": part}
        return replace(sample(ordinal, member, 1.0 + correct, [3]), reward_parts=parts)

    batch = [Group(0, Prompt("a", task="x"), (scored(0, 0, 1.0, 0.5), scored(0, 1, 0.0, 0.0)))]
    batch.append(Group(1, Prompt("a", task="x"), (scored(1, 0, 1.0, 0.25), scored(1, 1, 1.0, 0.0))))
    closed = make().make(5, batch, TRAINED, "", (("intermediate", False),))
    assert closed["reward_parts"] == {"correct": 0.75, "intermediate": 0.1875}
    assert (closed["reward_mean"], closed["reward_ungated_mean"]) == (1.75, 1.9375)
    assert (closed["gates"], closed["paid_share"]) == ({"intermediate": False}, {"intermediate": 0.0})
    open_ = make().make(5, batch, TRAINED, "", (("intermediate", True),))
    assert (open_["reward_ungated_mean"], open_["paid_share"]) == (1.75, {"intermediate": 0.5})
    assert not {"reward_parts", "gates"} & make().make(5, BATCH, TRAINED, "").keys()


def test_a_part_counts_as_zero_for_a_sample_without_it():
    """Otherwise a bonus that one sample in four earns would have the mean 1, and a paid share of 0.25."""
    bonus = replace(sample(0, 0, 1.0, [3]), reward_parts={"fmt": 1.0})
    others = [replace(sample(0, member, 0.0, [3]), reward_parts={"right": 0.0}) for member in (1, 2, 3)]
    batch = [Group(0, Prompt("a", task="x"), (bonus, *others))]
    row = make().make(5, batch, TRAINED, "", (("fmt", True),))
    assert (row["reward_parts"], row["paid_share"]) == ({"fmt": 0.25, "right": 0.0}, {"fmt": 0.25})


def test_failures_and_the_drops_that_follow_are_counted_by_cause():
    rows, sample_id = make(), SampleId(1, 0)
    rows.see(e.RewardFailed(1, 0, 0, "failed", "²", "policy"), [e.Reissue(1, 1, "failed_reward")])
    rows.see(e.RewardFailed(1, 1, 0, "failed", "²", "policy"), [e.Drop(1, "failed_reward")])
    rows.see(e.RewardFailed(2, 0, -1, "timed_out", "slow"), [e.Drop(2, "failed_reward")])
    rows.see(e.SampleFailed(sample_id, "host-0", "lost"), [])
    rows.see(e.EpisodeFailed(sample_id, "agent_lost", ""), [])
    rows.see(e.EpisodeFailed(sample_id, "failed_episode", ""), [])
    rows.see(e.RewardScored(3, 0, (1.0, 1.0)), [e.Drop(3, "no_signal")])
    row = rows.make(5, BATCH, TRAINED, "")
    assert row["failures_by_cause"] == {"policy": 2, "task": 2, "infrastructure": 2}
    assert row["dropped_by_cause"] == {"policy": 1, "task": 1} and row["dropped"] == 3
    again = rows.make(6, BATCH, TRAINED, "")
    assert again["failures_by_cause"] == again["dropped_by_cause"] == {}


def test_rewards_that_differ_by_rounding_are_no_signal():
    rewards = (0.1 + 0.2) + 0.3, 0.1 + (0.2 + 0.3)
    assert rewards[0] != rewards[1]
    flat = Group(0, Prompt("a", task="x"), tuple(sample(0, m, r, [3]) for m, r in enumerate(rewards)))
    other = Group(1, Prompt("a", task="x"), (sample(1, 0, 0.0, [3]), sample(1, 1, 1e-3, [3])))
    assert make().make(5, [flat, other], TRAINED, "")["signal_share"] == 0.5


def test_a_host_without_any_time_has_no_share_of_moves():
    """A host that has just started again reports each of its activities with 0 seconds."""
    totals = {"host-0": {"decode": 3.0, "move": 1.0}, "host-1": {"decode": 0.0, "wait: samples": 0.0}}
    rows = RowMaker(lambda: totals, [FakeHost(), FakeHost("host-1")])
    assert rows.make(5, BATCH, TRAINED, "d")["move_share"] == 0.25
    totals.clear()
    assert rows.make(6, BATCH, TRAINED, "d")["move_share"] == 0.0
