"""Episodes under the virtual clock: faults in their middle, tools called once, slots that never wait."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from areal_jax.config.loading import make_config
from areal_jax.config.refusals import ON_UPDATE
from areal_jax.control import events as e
from areal_jax.control.audit import BOUNDED, audit
from areal_jax.lab.simulation.schedule import CRASHES, PAUSES, Fault, Schedule, random_schedule, with_episodes
from areal_jax.lab.simulation.world import simulate
from areal_jax.types import SampleId


@pytest.mark.slow
@pytest.mark.parametrize("schedules", [6, pytest.param(25, marks=pytest.mark.soak)])
@pytest.mark.parametrize("strategy", [*ON_UPDATE])
def test_random_schedules_with_episodes_are_clean_and_no_tool_is_called_twice(strategy, schedules):
    found: Counter[str] = Counter()
    for seed in range(schedules):
        config, schedule = random_schedule(seed, strategy)
        result = simulate(config, with_episodes(seed, schedule))
        assert result.audit.violations == [], f"seed {seed}"
        assert set(result.tool_calls.values()) <= {1}, f"seed {seed}"
        assert config.on_update in ON_UPDATE[strategy]
        if strategy in BOUNDED:
            assert max(result.token_ages) <= (config.max_staleness or 0), f"seed {seed}"
            assert max(result.held) <= config.parameter_sets, f"seed {seed}"
        found.update(type(event).__name__ for _, event, _ in result.rows)
        found.update(result.faults + Counter(result.audit.dropped))
        found.update(a.reason for _, _, actions in result.rows for a in actions if isinstance(a, e.Reissue))
        found["branches"] += require_each_token_once([event for _, event, _ in result.rows])
    for kind in (
        "tool_in_doubt",
        "failed_episode",
        "rejected",
        "failed_sample",
        "failed_prompt",
        "branches",
        *CRASHES,
        *PAUSES,
    ):
        assert found[kind] > 0, kind
    assert found["TurnFinished"] > 2 * found["EpisodeEnded"]


def require_each_token_once(events: list[e.Event]) -> int:
    """An ended sample has the tokens of all its turns, once each; returns the number of turns on branches."""
    turns: Counter[SampleId] = Counter()
    for event in events:
        if isinstance(event, e.TurnFinished) and event.digest:  # a late one has none
            turns[event.sample] += sum(end - start for _, start, end in event.spans)
    ended = [event for event in events if isinstance(event, e.SampleFinished)]
    for event in ended:
        assert sum(end - start for _, start, end in event.spans) == turns[event.sample] > 0
        versions = [span.version for span in event.spans]
        assert versions == sorted(versions)
    whole = {event.sample for event in ended}
    return sum(
        isinstance(event, e.TurnAdded) and event.segment > 0 and event.sample in whole for event in events
    )


def crowd(turns: float, **schedule: Any):
    config = make_config(
        {
            "run": {"steps": 4},
            "algorithm": {"group_size": 4},
            "generation": {"slots": 8, "length": 200, "max_tokens": 64, "decode_steps": 1},
            "control": {"max_staleness": 4},
            "trainer": {"batch_size": 16},
        }
    )
    return simulate(config, Schedule(turns=turns, crowd_slots=1e9, prefill_s=0.0, train_s=0.1, **schedule))


def test_a_sample_that_waits_for_its_environment_gives_up_its_slot():
    """256 episodes of 4 turns on 8 slots: tools that take much longer than a turn delay the run little."""
    quick, slow = crowd(4.0, workflow_s=0.001), crowd(4.0, workflow_s=1.0)
    assert quick.audit.trained == slow.audit.trained == 64
    blocked_s = 256 * 4 * 1.0 / 8  # what the tools would add if each kept a slot busy
    assert slow.virtual_s - quick.virtual_s < 0.25 * blocked_s
    assert slow.host_busy_s / slow.virtual_s > 0.75


@pytest.mark.parametrize(("down_s", "is_in_doubt"), [(5.0, False), (20.0, True)])
def test_a_call_in_a_pause_counts_unless_its_process_was_given_up(down_s, is_in_doubt):
    fault = Fault("reward_pause", 40, down_s=down_s)
    result = crowd(2.0, tool_calls=1.0, workflow_s=2.0, faults=(fault,))
    assert result.audit.violations == [] and set(result.tool_calls.values()) == {1}
    failed = {event.reason for _, event, _ in result.rows if isinstance(event, e.EpisodeFailed)}
    assert failed == ({"tool_in_doubt"} if is_in_doubt else set())


@pytest.mark.parametrize("kind", ["controller_crash", "driver_crash", "trainer_crash", "reward_pause"])
def test_a_fault_due_with_a_crash_of_the_driver_strikes_after_the_resume(kind):
    for row in (40, 80, 120):
        faults = Fault("driver_crash", row, down_s=4.0), Fault(kind, row, down_s=1.0)
        result = crowd(3.0, workflow_s=1.0, faults=faults)
        resumed = next(seq for seq, event, _ in result.rows if isinstance(event, e.RunResumed))
        assert result.audit.violations == [] and result.faults == Counter(fault.kind for fault in faults)
        crashes = ("driver_crash", "controller_crash")
        assert sum(isinstance(event, e.RunResumed) for _, event, _ in result.rows[resumed - 1 :]) == sum(
            fault.kind in crashes for fault in faults
        )


def test_the_audit_finds_a_call_that_began_twice():
    config, schedule = random_schedule(4, "interruptible")
    schedule = replace(with_episodes(4, schedule), tool_calls=1.0, faults=())
    rows = simulate(config, schedule).rows
    place = next(n for n, row in enumerate(rows) if any(isinstance(action, e.Call) for action in row[2]))
    seq, event, actions = rows[place]
    changed = [*rows[:place], (seq, event, (*actions, *actions)), *rows[place + 1 :]]
    violations = audit(config, changed).violations
    assert f"row {seq}: " in violations[0] and "began already" in violations[0]
