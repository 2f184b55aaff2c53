"""What hosts do when a version commits, under the virtual clock: DORA's D2 to D4, and one_step."""

from __future__ import annotations

from dataclasses import replace
from math import inf

import pytest

from areal_jax.config.loading import make_config
from areal_jax.config.tree import Config
from areal_jax.control import events as e
from areal_jax.control.audit import audit
from areal_jax.lab.simulation.decoders import DrawnDecoder, DrawnSample, StepResult
from areal_jax.lab.simulation.schedule import Schedule
from areal_jax.lab.simulation.world import SimResult, simulate
from areal_jax.types import SampleId, VersionSpan

LONG_TAIL = Schedule(median_tokens=24, sigma_tokens=1.0, train_s=0.5, publish_s=0.05)
"""Lognormal lengths of sigma 1, cut at 15 times the median."""


def config_of(strategy: str, on_update: str, staleness: int, slots: int = 16, **sections: object) -> Config:
    return make_config(
        {
            "run": {"steps": 30},
            "algorithm": {"group_size": 4},
            "generation": {"slots": slots, "length": 400, "max_tokens": 360, "on_update": on_update},
            "control": {"strategy": strategy, "max_staleness": staleness},
            "trainer": {"batch_size": 8},
            "runtime": {"hosts": 2},
        }
        | sections
    )


def endings(result: SimResult) -> list[e.SampleFinished]:
    return [event for _, event, _ in result.rows if isinstance(event, e.SampleFinished)]


# --- one host -----------------------------------------------------------------------------------------------


class Stepped:
    """A host of two slots and four tokens a call; samples 0 and 1 are live, 2 waits, all for version 0."""

    def __init__(self, on_update: str, first: int = 10, second: int = 6) -> None:
        strategy = {"recompute": "interruptible", "drain": "interruptible"}.get(on_update, on_update)
        self.version = 0
        lengths = {0: first, 1: second, 2: 3, 3: 4}
        self.host = DrawnDecoder(
            "a",
            config_of(strategy, on_update, 2, slots=2, algorithm={"group_size": 2}),
            lambda sample, turn: DrawnSample(sample, lengths[sample.ordinal]),
            lambda: (self.version, f"d{self.version}"),
        )
        self.host.serve(0)
        self.ask(0, 1, 2)
        call = self.host.step()
        assert (call.adopted, call.prefills, call.tokens) == (e.HostAdopted("a", 0, "d0"), 2, 8)
        self.version = 1
        self.host.serve(1)
        self.ask(3)

    def ask(self, *ordinals: int) -> None:
        for ordinal in ordinals:
            self.host.take(e.Dispatch((SampleId(ordinal, 0),), "a", self.version), ())

    def step(self) -> StepResult:
        return self.host.step()

    def spans(self, calls: int) -> dict[int, tuple[VersionSpan, ...]]:
        """By sample, those of all that end in so many calls."""
        ended = [event for _ in range(calls) for event, _ in self.step().ended]
        return {event.sample.ordinal: event.spans for event in ended if isinstance(event, e.SampleFinished)}


def figures(call: StepResult) -> tuple[int, ...]:
    interrupted = -1 if call.adopted is None else call.adopted.interrupted
    return interrupted, call.prefills, call.live, call.tokens, call.recomputed, call.passes, call.held


@pytest.mark.parametrize(
    ("on_update", "expected"),
    [  # interrupted (-1: nothing adopted), prefills, live, tokens, recomputed tokens, passes, versions held
        ("recompute", (2, 0, 2, 6, 8, 1, 1)),
        ("keep", (2, 0, 2, 6, 0, 1, 1)),
        ("pinned", (0, 0, 2, 6, 0, 1, 2)),  # nobody decodes under version 1 yet, and it is there
        ("drain", (-1, 0, 2, 6, 0, 1, 1)),
    ],
)
def test_a_host_adopts_a_version_as_it_is_told_to(on_update, expected):
    assert figures(Stepped(on_update).step()) == expected


def test_recompute_and_keep_go_on_under_the_newest_version():
    for on_update in ("recompute", "keep"):
        assert Stepped(on_update).spans(4) == {
            0: (VersionSpan(0, 0, 4), VersionSpan(1, 4, 10)),
            1: (VersionSpan(0, 0, 4), VersionSpan(1, 4, 6)),
            2: (VersionSpan(1, 0, 3),),
            3: (VersionSpan(1, 0, 4),),
        }


def test_pinned_ends_each_sample_under_its_own_version_and_frees_the_parameters_with_the_last():
    host = Stepped("pinned")
    host.step()  # sample 1 ends
    second = host.step()  # sample 2 starts, under version 1, beside sample 0
    assert (second.prefills, second.passes, second.held) == (1, 2, 2)
    third = host.step()  # samples 0 and 2 have ended: version 0 is free
    assert (third.prefills, third.passes, third.held) == (1, 1, 1)
    assert Stepped("pinned").spans(4) == {
        0: (VersionSpan(0, 0, 10),),
        1: (VersionSpan(0, 0, 6),),
        2: (VersionSpan(1, 0, 3),),
        3: (VersionSpan(1, 0, 4),),
    }


def test_drain_ends_what_was_dispatched_for_the_version_held_before_it_adopts_the_next():
    host = Stepped("drain")
    calls = [host.step() for _ in range(3)]
    assert [figures(call)[:4] for call in calls] == [(-1, 0, 2, 6), (-1, 1, 2, 5), (0, 1, 1, 4)]
    assert Stepped("drain").spans(3) == {
        0: (VersionSpan(0, 0, 10),),
        1: (VersionSpan(0, 0, 6),),
        2: (VersionSpan(0, 0, 3),),
        3: (VersionSpan(1, 0, 4),),
    }


def test_drain_starts_who_waits_for_the_version_held_also_where_nobody_is_live():
    host = Stepped("drain", first=4, second=4)  # both ended in the first call
    calls = [host.step() for _ in range(2)]
    assert [figures(call)[:4] for call in calls] == [(-1, 1, 1, 3), (0, 1, 1, 4)]


def test_drain_waits_for_first_turns_that_are_still_to_come():
    host = Stepped("drain")
    episodes = SampleId(4, 0), SampleId(4, 1)
    host.host.take(e.Dispatch(episodes, "a", 0), None)
    calls = [host.step() for _ in range(4)]
    assert [call.adopted for call in calls] == [None] * 4 and calls[-1].live == 0
    host.host.cancel(episodes)
    adopted = host.step().adopted
    assert adopted is not None and adopted.version == 1


def test_a_hosts_time_is_that_of_its_calls_its_swaps_and_every_recomputed_token():
    config = config_of("interruptible", "recompute", 1)
    schedule = replace(LONG_TAIL, jitter=0.0, prefill_s=0.0, crowd_slots=inf, swap_s=0.25)
    result = simulate(config, replace(schedule, recompute_token_s=0.001))
    calls, firsts = sum(result.held.values()), config.runtime.hosts
    expected = 0.25 * (result.swaps + firsts) + 0.001 * result.recomputed_tokens + 0.01 * 4 * calls
    assert result.recomputed_tokens > 1000 and result.swaps > 30
    assert result.host_busy_s == pytest.approx(expected)


def test_every_version_that_is_decoded_under_is_a_pass_of_its_own():
    """Under pinned a call costs as many reads of the parameters as its live slots have versions."""
    schedule = replace(LONG_TAIL, jitter=0.0, prefill_s=0.0, crowd_slots=inf, swap_s=0.0)
    result = simulate(config_of("pinned", "pinned", 3), schedule)
    calls = sum(result.held.values())
    passes = result.host_busy_s / (0.01 * 4)
    assert 1.2 * calls < passes < sum(held * count for held, count in result.held.items())


# --- DORA ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bound", [1, 2, 3, 5])
def test_several_versions_live_at_once_and_none_is_trained_beyond_k(bound):
    """D2 to D4: K versions and, during a swap, one more; every group trained whole; ages up to K."""
    config = config_of("pinned", "pinned", bound)
    result = simulate(config, LONG_TAIL)
    assert result.audit.violations == []
    assert 2 <= max(result.held) <= bound + 1 == max(2, config.parameter_sets)
    assert max(result.held) >= min(bound, 4)
    assert max(result.token_ages) == max(result.head_ages) == min(bound, 5)
    assert (result.audit.trained, result.audit.dropped, result.audit.in_flight) == (240, {}, 0)
    assert sum(result.head_ages.values()) == 240 * 4
    assert {len(event.spans) for event in endings(result)} == {1}


def test_the_trainer_waits_for_stragglers_only_where_it_is_bounded():
    """The same lengths under the gate alone: its oldest token is far beyond K."""
    bounded = simulate(config_of("pinned", "drain", 1), LONG_TAIL)
    free = simulate(config_of("interruptible", "drain", 1), LONG_TAIL)
    assert max(bounded.token_ages) == 1 < max(free.token_ages)
    assert max(bounded.held) == max(free.held) == 1
    assert bounded.virtual_s > free.virtual_s


def test_the_audit_finds_a_group_of_two_versions_on_hosts_that_drain():
    config = config_of("interruptible", "drain", 1)
    rows = simulate(config, LONG_TAIL).rows
    committed = next(seq for seq, event, _ in rows if e.VersionCommitted(1, "digest-1") == event)
    place, event = next(
        (place, event)
        for place, (seq, event, _) in enumerate(rows)
        if seq > committed and isinstance(event, e.SampleFinished) and event.spans[0].version == 0
    )
    newer = replace(event, spans=(event.spans[0]._replace(version=1),))
    changed = [*rows[:place], (place, newer, rows[place][2]), *rows[place + 1 :]]
    (violation,) = audit(config, changed).violations
    assert f"ordinal {event.sample.ordinal} has tokens of versions [0, 1]" in violation


def test_one_step_generates_a_batch_while_the_one_before_is_trained():
    result = simulate(config_of("one_step", "drain", 1), LONG_TAIL)
    sync = simulate(config_of("sync", "drain", 0), LONG_TAIL)
    assert result.audit.violations == sync.audit.violations == []
    assert result.virtual_s < 0.8 * sync.virtual_s
    assert result.token_ages.keys() == {0, 1} and sync.token_ages.keys() == {0}
    first = {event.sample: event.spans[0].version for event in endings(result)}
    assert {len(event.spans) for event in endings(result)} == {1}
    for batch in (a for _, _, actions in result.rows for a in actions if isinstance(a, e.Train)):
        versions = {first[SampleId(ordinal, member)] for ordinal in batch.ordinals for member in range(4)}
        assert versions == {max(0, batch.step - 1)}


def test_keep_admits_as_interruptible_does_and_recomputes_nothing():
    kept = simulate(config_of("keep", "keep", 2), LONG_TAIL)
    assert (kept.audit.violations, kept.recomputed_tokens) == ([], 0)
    assert kept.interruptions > 100
    free = replace(LONG_TAIL, recompute_token_s=0.0)
    rebuilt = simulate(config_of("interruptible", "recompute", 2), free)
    assert [(event, actions) for _, event, actions in kept.rows] == [
        (event, actions) for _, event, actions in rebuilt.rows
    ]
    assert rebuilt.recomputed_tokens > 1000
