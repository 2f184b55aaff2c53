"""The control plane under a virtual clock: staleness accounting, faults, and hangs that name themselves."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from functools import cache

import pytest

from areal_jax.config.loading import make_config
from areal_jax.config.refusals import ON_UPDATE
from areal_jax.config.tree import Config
from areal_jax.control import events as e
from areal_jax.control.audit import BOUNDED, audit
from areal_jax.lab.simulation.processes import BACK_S
from areal_jax.lab.simulation.schedule import CRASHES, PAUSES, PAUSES_S, Fault, Schedule, random_schedule
from areal_jax.lab.simulation.world import SimulationError, simulate
from areal_jax.types import ArealError

LONG_TAIL = Schedule(seed=5, median_tokens=24, sigma_tokens=1.0, train_s=0.8, publish_s=0.05)
"""Lognormal lengths of sigma 1, cut at 15 times the median; hosts just about keep up with the trainer."""


def long_tail(eta: int, steps: int = 60, **control: object) -> Config:
    return make_config(
        {
            "run": {"steps": steps},
            "algorithm": {"group_size": 4},
            "generation": {"slots": 16, "length": 400, "max_tokens": 360, "decode_steps": 8},
            "control": {"max_staleness": eta, **control},
            "trainer": {"batch_size": 8},
            "runtime": {"hosts": 3},
        }
    )


def mean(histogram: dict[int, int]) -> float:
    return sum(age * count for age, count in histogram.items()) / sum(histogram.values())


@pytest.mark.parametrize("eta", [0, 1, 2, 4])
def test_the_gate_bounds_the_mean_head_age(eta):
    """A2: the histograms count every trained sample and token; no token is older than its head."""
    result = simulate(long_tail(eta), LONG_TAIL)
    assert result.audit.violations == []
    assert mean(result.head_ages) <= eta + 0.05
    assert max(result.token_ages) <= max(result.head_ages)
    assert sum(result.head_ages.values()) == 60 * 8 * 4
    assert 0 < sum(result.token_ages.values()) <= result.tokens
    assert eta > 0 or result.head_ages == {0: 60 * 8 * 4}


def test_the_gate_alone_does_not_bound_the_maximum_but_max_token_age_does():
    free = simulate(long_tail(1), LONG_TAIL)
    assert max(free.token_ages) > 1
    bound = simulate(long_tail(1, max_token_age=1), LONG_TAIL)
    assert max(bound.head_ages) == max(bound.token_ages) == 1
    reissued = Counter(a.reason for _, _, actions in bound.rows for a in actions if isinstance(a, e.Reissue))
    assert reissued["over_age"] > 0
    assert (bound.audit.violations, bound.audit.dropped, bound.audit.trained) == ([], {}, 480)


@pytest.mark.slow
@pytest.mark.parametrize("eta", [0, 1, 2])
def test_hold_and_mask_keep_the_bound_without_a_restart(eta):
    """Hold takes time, and mask takes tokens; restart takes both, but keeps every trained sample whole."""
    config = {over: long_tail(eta, max_token_age=eta, over_age=over) for over in ("restart", "hold", "mask")}
    found = {over: simulate(each, LONG_TAIL) for over, each in config.items()}
    for over, result in found.items():
        assert result.audit.violations == [] and result.audit.trained == 480, over
        assert max(result.token_ages) == eta, over
        restarts = [a for _, _, actions in result.rows for a in actions if isinstance(a, e.Reissue)]
        assert (len(restarts) > 0) == (over == "restart" and eta > 0), over
    hold, mask = found["hold"], found["mask"]
    assert (hold.holds > 0, hold.masked_tokens) == (eta > 0, 0)
    assert (mask.holds, mask.masked_tokens > 0) == (0, eta > 0)
    assert sum(hold.token_ages.values()) == sum(mask.token_ages.values()) + mask.masked_tokens
    assert hold.virtual_s >= mask.virtual_s
    if eta > 0:
        assert hold.virtual_s > 1.02 * mask.virtual_s
        assert max(mask.head_ages) > eta  # of samples with a masked head


@pytest.mark.parametrize("schedules", [8, pytest.param(40, marks=pytest.mark.soak)])
@pytest.mark.parametrize("over_age", ["hold", "mask"])
@pytest.mark.parametrize("strategy", ON_UPDATE)
def test_random_schedules_with_hold_or_mask_keep_the_bound(strategy, over_age, schedules):
    cost: Counter[str] = Counter()
    for seed in range(schedules):
        config, schedule = random_schedule(seed, strategy, over_age)
        result = simulate(config, schedule)
        assert config.control.over_age == over_age and config.control.max_token_age is not None
        assert result.audit.violations == [], f"seed {seed}"
        assert max(result.token_ages) <= config.control.max_token_age, f"seed {seed}"
        cost.update({"holds": result.holds, "masked": result.masked_tokens})
        cost["restarts"] += sum(
            isinstance(a, e.Reissue) and a.reason == "over_age"
            for _, _, actions in result.rows
            for a in actions
        )
    is_free = strategy in ("interruptible", "keep")  # the others have no token that is so old
    assert (cost["holds"] > schedules / 8) == (is_free and over_age == "hold")
    assert (cost["masked"] > 2.5 * schedules) == (is_free and over_age == "mask")
    assert cost["restarts"] == 0


def test_the_audit_counts_the_tokens_that_a_mask_leaves():
    """Invariant 5 with over_age=mask: a trainer that trained one older token, or one less, is found."""
    config = long_tail(1, steps=30, max_token_age=1, over_age="mask")
    rows = simulate(config, LONG_TAIL).rows
    place, trained = next(
        (n, event) for n, (_, event, _) in enumerate(rows) if isinstance(event, e.BatchTrained)
    )
    count = trained.metrics["trained_tokens"]
    for other in (count + 1, count - 1):
        event = replace(trained, metrics={"trained_tokens": other})
        changed = [*rows[:place], (rows[place][0], event, rows[place][2]), *rows[place + 1 :]]
        (violation,) = audit(config, changed).violations
        assert f"batch {trained.step} trained {other:.0f} tokens, but {count:.0f} of its" in violation


def test_a_run_that_drops_every_group_ends_with_what_to_change():
    config = long_tail(1)
    algorithm = config.algorithm.model_copy(update={"group_filter": "signal"})
    config = config.model_copy(update={"algorithm": algorithm})
    with pytest.raises(ArealError, match=r"501 groups in a row were dropped .*algorithm\.group_filter=none"):
        simulate(config, Schedule(seed=9, equal_rewards=1.0))
    with pytest.raises(ArealError, match=r"\(501 failed_reward\).*correct the score"):
        simulate(config, Schedule(seed=9, failed_rewards=1.0))
    with pytest.raises(ArealError, match=r"26 of the newest \d+ prompts cannot .*simulated: prompt \d+ is"):
        simulate(config, Schedule(seed=9, failed_prompts=2.0))


def test_interruptible_mixes_versions_in_a_sample_and_sync_does_not():
    mixed = simulate(long_tail(2), LONG_TAIL)
    spans = [len(event.spans) for _, event, _ in mixed.rows if isinstance(event, e.SampleFinished)]
    assert max(spans) >= 3
    assert mixed.interruptions > 100
    sync = simulate(long_tail(0, strategy="sync"), LONG_TAIL)
    assert sync.interruptions == 0
    assert sync.virtual_s > 1.3 * mixed.virtual_s


def test_equal_schedules_give_equal_rows():
    config, schedule = random_schedule(11)
    assert simulate(config, schedule).rows == simulate(config, schedule).rows


def test_a_slow_reward_does_not_stop_generation():
    """A12: with rewards of 1 s each and decoding of about as much, both go on at once."""
    config = long_tail(4, steps=20)
    quick = simulate(config, Schedule(seed=1, median_tokens=24, train_s=0.1, reward_s=0.001))
    slow = simulate(config, Schedule(seed=1, median_tokens=24, train_s=0.1, reward_s=1.0))
    assert slow.virtual_s < quick.virtual_s + 5.0  # 160 rewards in sequence would be 160 s


@pytest.mark.parametrize("kind", ["host_death", "driver_crash", "controller_crash", "trainer_crash"])
def test_a_fault_at_any_row_is_survived(kind):
    config = make_config(
        {
            "run": {"steps": 5},
            "algorithm": {"group_size": 2, "group_filter": "signal"},
            "control": {"max_staleness": 1},
            "trainer": {"batch_size": 3, "checkpoint_every": 2},
            "runtime": {"hosts": 2},
        }
    )
    for row in range(0, 60, 2):
        schedule = Schedule(seed=row, equal_rewards=0.3, train_s=0.2, faults=(Fault(kind, row),))
        result = simulate(config, schedule)
        assert result.audit.violations == [], schedule
        assert (result.faults, result.audit.trained, result.audit.in_flight) == ({kind: 1}, 15, 0), schedule


@cache
def calm(hosts: int, seed: int) -> tuple[Config, Schedule, float]:
    """A run without a fault, and how long it takes."""
    config = make_config(
        {
            "run": {"steps": 6},
            "algorithm": {"group_size": 4},
            "generation": {"slots": 4, "length": 200, "max_tokens": 150, "decode_steps": 1},
            "control": {"max_staleness": 2},
            "trainer": {"batch_size": 4},
            "runtime": {"hosts": hosts},
        }
    )
    schedule = Schedule(seed=seed, median_tokens=60, train_s=0.3, jitter=0.0)
    return config, schedule, simulate(config, schedule).virtual_s


@pytest.mark.parametrize("down_s", PAUSES_S)
@pytest.mark.parametrize("kind", PAUSES)
@pytest.mark.parametrize("hosts", [1, 3])
def test_a_process_that_was_paused_comes_back(kind: str, down_s: float, hosts: int):
    """The run takes at most the pause longer, and the time to work again what was under way."""
    for row in (5, 20, 50):
        config, schedule, calm_s = calm(hosts, row)
        result = simulate(config, replace(schedule, faults=(Fault(kind, row, down_s=down_s),)))
        assert result.audit.violations == [] and result.faults == {kind: 1}
        assert (result.audit.trained, result.audit.in_flight, result.audit.dropped) == (24, 0, {})
        assert result.virtual_s <= 1.5 * calm_s + down_s + BACK_S
        back = [event for _, event, _ in result.rows if isinstance(event, e.HostJoined)][hosts:]
        assert len(back) == (kind == "host_pause" and down_s > 15)


def test_a_host_that_was_paused_goes_on_with_its_samples_or_cancels_them():
    """Alone, it goes on with what it had; beside another one, which has been given them, it cancels all."""
    base = {
        "run": {"steps": 3},
        "algorithm": {"group_size": 4},
        "generation": {"slots": 8, "length": 200, "max_tokens": 150, "decode_steps": 1},
        "trainer": {"batch_size": 4},
    }
    # Paused before the first end: all that it held is held at its return, but what ends before that.
    faults = (Fault("host_pause", 3, down_s=60.0),)
    schedule = Schedule(median_tokens=60, sigma_tokens=0.5, token_s=0.2, faults=faults)
    for hosts in (1, 2):
        result = simulate(make_config({**base, "runtime": {"hosts": hosts}}), schedule)
        assert result.audit.violations == []
        ((place, back),) = [
            (place, event) for place, event, _ in result.rows if isinstance(event, e.HostJoined)
        ][hosts:]
        actions = result.rows[place][2]
        cancelled = [action for action in actions if isinstance(action, e.Cancel)]
        assert len(back.samples) >= 4
        again = {a.samples[0].ordinal for _, _, many in result.rows[place:] for a in many
                 if isinstance(a, e.Dispatch)}  # fmt: skip
        if hosts == 1:
            assert cancelled == []
            finished = {event.sample for _, event, _ in result.rows if isinstance(event, e.SampleFinished)}
            assert set(back.samples) <= finished
        else:
            assert cancelled == [e.Cancel(back.samples, back.host)]
            assert not again & {sample.ordinal for sample in back.samples}


@pytest.mark.parametrize("schedules", [20, pytest.param(200, marks=pytest.mark.soak)])
@pytest.mark.parametrize("strategy", ON_UPDATE)
def test_random_schedules_of_each_strategy_are_clean(strategy, schedules):
    faults, dropped, reissued, repeated, moved = Counter(), Counter(), Counter(), 0, Counter()
    seen: Counter[str] = Counter()
    over: Counter[str] = Counter()
    kept: Counter[str] = Counter()
    for seed in range(schedules):
        config, schedule = random_schedule(seed, strategy)
        result = simulate(config, schedule)
        assert result.audit.violations == [], f"seed {seed}"
        assert config.control.strategy == strategy and config.runtime.hosts >= 2, f"seed {seed}"
        assert result.audit.trained >= 50 and result.audit.in_flight == 0, f"seed {seed}"
        assert result.versions >= 5, f"seed {seed}"
        assert sum(result.faults.values()) >= 3, f"seed {seed}: {result.faults} of {schedule.faults}"
        seen[config.on_update] += 1
        over[config.control.over_age] += config.control.max_token_age is not None
        if config.control.max_token_age is not None:
            assert max(result.token_ages) <= config.control.max_token_age, f"seed {seed}"
        if strategy in BOUNDED:
            assert max(result.token_ages) <= (config.max_staleness or 0), f"seed {seed}"
            assert max(result.held) <= config.parameter_sets, f"seed {seed}"
        faults.update(result.faults)
        dropped.update(result.audit.dropped)
        for _, event, actions in result.rows:
            reissued.update(a.reason for a in actions if isinstance(a, e.Reissue))
            repeated += isinstance(event, e.RunResumed)
            if isinstance(event, e.HostJoined) and event.samples:
                gone = sum(len(a.samples) for a in actions if isinstance(a, e.Cancel))
                kept.update({"kept": len(event.samples) - gone, "cancelled": gone})
            moved[type(event)] += isinstance(event, (e.SamplesMoved, e.MoveFailed))
    assert min(over[name] for name in ("restart", "hold", "mask")) > schedules / 10
    assert min(faults.values()) > schedules / 2 and set(faults) == {*CRASHES, *PAUSES}
    assert min(kept["kept"], kept["cancelled"]) > schedules / 2
    reasons = ("no_signal", "failed_reward", "failed_sample", "failed_prompt")
    assert min(dropped[reason] for reason in reasons) > schedules / 40
    assert min(reissued[reason] for reason in ("failed_reward", "failed_sample")) > schedules / 10
    assert reissued["over_age"] > schedules / 10 or strategy in BOUNDED  # there no token is so old
    assert repeated == faults["driver_crash"] + faults["controller_crash"]
    assert set(seen) == set(ON_UPDATE[strategy]) and min(seen.values()) > schedules / 20
    assert (moved[e.SamplesMoved] > schedules) == (strategy == "pinned")


def test_a_hang_names_who_waits_for_whom_and_the_seed():
    config = make_config({"run": {"steps": 2}, "algorithm": {"group_filter": "signal"}})
    with pytest.raises(
        SimulationError,
        match=r"seed 9, journal row \d+: the run did not finish within .*trainer waits for 16 more",
    ):
        simulate(config, Schedule(seed=9, equal_rewards=1.0, max_rows=2000))
