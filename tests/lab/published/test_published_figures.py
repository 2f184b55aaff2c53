"""Published figures in kind: the real control plane in the simulator, with cost models of the papers."""

from __future__ import annotations

from itertools import pairwise
from statistics import median

import pytest

from areal_jax.lab.published.published import (
    CUT,
    HEAVY,
    MEDIAN,
    MILD,
    Line,
    by_staleness,
    efficiency,
    of_interruption,
    of_split,
    paradigms,
)

each_seed = pytest.mark.parametrize(
    "seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (1, 2))]
)


@each_seed
def test_throughput_grows_with_the_allowed_staleness_up_to_a_plateau(seed: int):
    """A7, with slots for two batches: eta = 4 is at least twice as fast as 0, and nearly the fastest."""
    found = list(by_staleness(seed).values())
    assert all(later >= 0.98 * earlier for earlier, later in pairwise(found))
    assert found[3] >= 2.0 * found[0]
    assert found[3] >= 0.9 * max(found)


@each_seed
def test_three_quarters_of_the_devices_generate_twice_as_fast_as_all_of_them_in_turn(seed: int):
    """A10: eight devices. Synchronously all generate, then all train; or six generate while two train."""
    assert of_split(seed) >= 2.0


@pytest.mark.slow
def test_asynchronous_runs_scale_to_eight_times_the_machines_and_synchronous_ones_do_not():
    """A11: the longest completion does not get shorter with more hosts. Short ones cost less."""
    long, short = ({eta: efficiency(0, eta, most) for eta in (0, 4)} for most in (CUT, 2 * MEDIAN))
    assert long[4] >= 0.6 > 0.5 > long[0]
    assert long[4] - long[0] > short[4] - short[0] > 0


@each_seed
def test_interrupting_gains_a_tenth_on_skewed_lengths_and_nothing_on_constant_ones(seed: int):
    """A8 (the paper: 1.12 and 1.17): without interruption a host waits for its longest sample."""
    assert of_interruption(seed) >= 1.10
    assert of_interruption(seed, 0.0, 40) == pytest.approx(1.0, abs=0.05)


@pytest.mark.slow
def test_doras_paradigms_on_a_heavy_and_on_a_mild_tail():
    """D7: 1.65 times synchronous for 64 GPUs in the paper, and 8.2 times less time with rollouts alone."""
    heavy, mild = ([paradigms(seed, *lengths) for seed in range(2)] for lengths in (HEAVY, MILD))

    def gain(found, one: str, other: str) -> float:
        return median(speeds[one].tokens_per_s / speeds[other].tokens_per_s for speeds in found)

    assert gain(heavy, "dora", "sync") >= 1.5
    assert gain(heavy, "dora", "partial") >= 1.0
    assert median(one["sync"].rollout_only_s / one["dora"].rollout_only_s for one in heavy) >= 3.0
    assert gain(mild, "dora", "sync") < gain(heavy, "dora", "sync")


def test_a_line_holds_between_its_bounds():
    assert Line("ratio", "2.77", 2.0, 2.0).holds
    assert not Line("ratio", "2.77", 1.99, 2.0).holds
    assert not Line("ratio", "about 1", 1.06, 0.95, 1.05).holds
