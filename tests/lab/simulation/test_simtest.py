"""`areal-jax simtest`: what its runs draw, and that no failure of one ends the others."""

from __future__ import annotations

from collections import Counter

import pytest

from areal_jax.config.refusals import ON_UPDATE
from areal_jax.control.errors import ControlError
from areal_jax.lab.simulation import simtest
from areal_jax.lab.simulation.schedule import CRASHES, PAUSES, PAUSES_S, random_schedule
from areal_jax.types import SampleId


def test_every_second_run_has_episodes_and_all_are_counted():
    figures = simtest.simtest(2, 100, "one_step")
    assert (figures["schedules"], figures["failed"], figures["episodes"]) == (2, {}, 1)
    assert figures["strategies"] == {"one_step": 2} and figures["trained"] >= 2 * 50
    assert sum(figures["faults"].values()) >= 2 * 3 and set(figures["faults"]) <= {*CRASHES, *PAUSES}


def test_a_run_that_fails_is_named_by_its_seed_and_the_others_go_on(monkeypatch: pytest.MonkeyPatch):
    simulate, seeds = simtest.simulate, []

    def faulty(config, schedule):
        seeds.append(schedule.seed)
        if schedule.seed == 1:
            raise ControlError("the state is wrong")
        if schedule.seed == 2:
            raise KeyError("host0")
        result = simulate(config, schedule)
        if schedule.seed == 3:
            result.tool_calls = Counter({(SampleId(4, 1), 0): 2})
        return result

    monkeypatch.setattr(simtest, "simulate", faulty)
    figures = simtest.simtest(4, 0, "sync")
    assert seeds == [0, 1, 2, 3]
    assert figures["failed"] == {
        "1": "ControlError: the state is wrong",
        "2": "KeyError: 'host0'",
        "3": f"tool call 0 of {SampleId(4, 1)} was made 2 times",
    }


@pytest.mark.parametrize("strategy", ON_UPDATE)
def test_pauses_of_every_process_and_length_are_drawn(strategy):
    drawn = Counter(
        (fault.kind, fault.down_s)
        for seed in range(60)
        for fault in random_schedule(seed, strategy)[1].faults
        if fault.kind in PAUSES
    )
    assert {*drawn} == {(kind, seconds) for kind in PAUSES for seconds in PAUSES_S}
