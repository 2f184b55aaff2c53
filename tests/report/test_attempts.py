"""Attempts of groups, from journals of simulated runs with faults, and of a run made by hand."""

from __future__ import annotations

from collections import Counter

import pytest

from areal_jax.control import events as e
from areal_jax.lab.simulation.schedule import Schedule, random_schedule
from areal_jax.lab.simulation.world import SimResult, simulate
from areal_jax.report.attempts import Attempts
from areal_jax.report.selection import PENDING, TRAINED, Attempt, study_selection
from areal_jax.trajectories.journal import Row
from areal_jax.types import SampleId, VersionSpan
from tests.lab.simulation.test_world import long_tail

TAIL = Schedule(seed=5, median_tokens=24, sigma_tokens=1.0, train_s=0.8, publish_s=0.05)
"""Lengths with a long tail."""


def attempts_of(result: SimResult) -> list[Attempt]:
    return Attempts.of(Row(seq, 0.0, event, tuple(actions)) for seq, event, actions in result.rows)


def discarded(result: SimResult) -> Counter[str]:
    """Reason -> drops and restarts of groups that were dispatched since their last restart."""
    found: Counter[str] = Counter()
    dispatched: set[int] = set()
    for _, _, actions in result.rows:
        for action in actions:
            if isinstance(action, e.Dispatch):
                dispatched |= {sample.ordinal for sample in action.samples}
            elif isinstance(action, e.Drop | e.Reissue):
                found[action.reason] += action.ordinal in dispatched
                dispatched.discard(action.ordinal)
    return +found


@pytest.mark.slow
def test_every_attempt_has_one_fate_under_all_faults():
    """Trained groups and tokens are those that the audit and the ages count; each discard counts."""
    reasons: Counter[str] = Counter()
    over_age = long_tail(1, steps=20, max_token_age=1), TAIL
    for config, schedule in [over_age, *map(random_schedule, range(30))]:
        result = simulate(config, schedule)
        attempts = attempts_of(result)
        fates = Counter(attempt.fate for attempt in attempts)
        assert fates[TRAINED] == result.audit.trained
        assert fates[PENDING] == 0
        lost = fates - Counter({TRAINED: fates[TRAINED]})
        assert lost == discarded(result)
        trained = [attempt for attempt in attempts if attempt.fate == TRAINED]
        tokens = sum(sum(own.lengths) for own in trained)
        assert tokens == sum(result.token_ages.values()) + result.masked_tokens
        size = config.algorithm.group_size
        assert all(len(own.lengths) == size and own.reward is not None for own in trained)
        for own in attempts:
            assert own.is_finished == (len(own.lengths) == size)
        reasons += lost
    assert {"no_signal", "failed_reward", "failed_sample", "over_age"} <= set(reasons)


def test_a_bound_on_ages_trains_shorter_groups_and_is_named():
    """A long group is more often over age: the same schedule with and without control.max_token_age."""
    free = study_selection(attempts_of(simulate(long_tail(1), TAIL)))
    bound = study_selection(attempts_of(simulate(long_tail(1, max_token_age=1), TAIL)))
    assert free is not None and bound is not None
    assert free.alarms == ()
    tokens = bound.gaps[0]
    assert tokens.cause == "over_age" and tokens.p < 1e-3
    assert tokens.relative is not None and tokens.relative < -0.02


def ended(ordinal: int, member: int, tokens: int, attempt: int = 0) -> e.SampleFinished:
    return e.SampleFinished(
        SampleId(ordinal, member, attempt), "host-0", (VersionSpan(0, 3, 3 + tokens),), "stop"
    )


def dispatch(ordinal: int, attempt: int = 0) -> e.Dispatch:
    return e.Dispatch(tuple(SampleId(ordinal, member, attempt) for member in range(2)), "host-0", 0)


def test_late_and_repeated_events_do_not_count():
    """Group 0 starts again with one sample ended, and that attempt's other sample comes late."""
    joined = e.HostJoined("host-0", 4)
    rows: list[tuple[e.Event, tuple[e.Action, ...]]] = [
        (joined, (dispatch(0), dispatch(1))),
        (ended(0, 0, 7), ()),
        (e.SampleFailed(SampleId(0, 1), "host-0", "x"), (e.Reissue(0, 1, "failed_sample"), dispatch(0, 1))),
        (ended(0, 1, 9), ()),
        (ended(1, 0, 4), ()),
        (ended(1, 0, 5), ()),
        (joined, (dispatch(1),)),  # its host was lost
        (ended(0, 0, 1, attempt=1), ()),
        (ended(0, 1, 2, attempt=1), (e.Score(0, 1),)),
        (e.RewardScored(0, 1, (0.0, 0.5)), (e.Train(0, (0,), (1,)),)),
        (e.BatchTrained(0, (0,), "d", {}), ()),
    ]
    found = Attempts.of(Row(seq, 0.0, event, actions) for seq, (event, actions) in enumerate(rows))
    assert found == [
        Attempt("failed_sample", False, (7,), None),
        Attempt(TRAINED, True, (1, 2), 0.25),
        Attempt(PENDING, False, (4,), None),
    ]


@pytest.mark.parametrize("event", [e.RewardFailed(0, 0, 0, "failed", "x")])
def test_a_group_that_could_not_be_scored_has_lengths_and_no_difficulty(event: e.Event):
    rows = [
        (e.HostJoined("host-0", 4), (dispatch(0),)),
        (ended(0, 0, 3), ()),
        (ended(0, 1, 5), (e.Score(0, 0),)),
        (event, (e.Drop(0, "failed_reward"),)),
    ]
    found = Attempts.of(Row(seq, 0.0, event, actions) for seq, (event, actions) in enumerate(rows))
    assert found == [Attempt("failed_reward", True, (3, 5), None)]
