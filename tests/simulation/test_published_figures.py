"""AReaL's throughput figures in kind: the real control plane in the simulator, with cost models of the paper.

A decode step takes 1 + n / N0 times as long with n live slots; lengths are lognormal with sigma 1, cut at 15
times the median, so few samples are far longer than the others (arXiv:2505.24298).
"""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest

from areal_jax.config.loading import make_config
from areal_jax.simulation.schedule import Schedule
from areal_jax.simulation.world import simulate

MEDIAN, CUT = 12, 180
"""Tokens of the median completion, and of the longest."""
COSTS = Schedule(
    median_tokens=MEDIAN,
    sigma_tokens=1.0,
    token_s=0.01,
    crowd_slots=32,
    prefill_s=0.0,
    swap_s=0.01,
    recompute_token_s=1e-5,
    train_s=0.5,
    publish_s=0.02,
    reward_s=0.01,
    jitter=0.0,
)


def tokens_per_s(
    eta: int, costs: Schedule = COSTS, *, hosts: int = 2, groups: int = 8, most: int = CUT
) -> float:
    """Trained tokens a second: synchronous for eta = 0, else interruptible; groups of 4 samples."""
    strategy, on_update = ("interruptible", "recompute") if eta else ("sync", "drain")
    config = make_config(
        {
            "run": {"steps": 20},
            "algorithm": {"group_size": 4},
            "generation": {
                "slots": 32,
                "length": most + 8,
                "max_tokens": most,
                "decode_steps": 6,
                "on_update": on_update,
            },
            "control": {"strategy": strategy, "max_staleness": eta},
            "trainer": {"batch_size": groups, "checkpoint_every": 1000},
            "runtime": {"hosts": hosts},
        }
    )
    result = simulate(config, costs)
    assert result.audit.ok
    return sum(result.token_ages.values()) / result.virtual_s


@pytest.mark.parametrize("seed", range(3))
def test_throughput_grows_with_the_allowed_staleness_up_to_a_plateau(seed: int):
    """A7, with slots for two batches: eta = 4 is at least twice as fast as 0, and nearly the fastest."""
    found = [tokens_per_s(eta, replace(COSTS, seed=seed)) for eta in (0, 1, 2, 4, 8, 16)]
    assert all(later >= 0.98 * earlier for earlier, later in pairwise(found))
    assert found[3] >= 2.0 * found[0]
    assert found[3] >= 0.9 * max(found)


@pytest.mark.parametrize("seed", range(3))
def test_three_quarters_of_the_devices_generate_twice_as_fast_as_all_of_them_in_turn(seed: int):
    """A10: eight devices. Synchronously all generate, then all train; or six generate while two train."""
    device_seconds = 1.5
    costs = replace(COSTS, seed=seed)
    in_turn = tokens_per_s(0, replace(costs, train_s=device_seconds / 8), hosts=8, groups=32)
    apart = tokens_per_s(4, replace(costs, train_s=device_seconds / 2), hosts=6, groups=32)
    assert apart >= 2.0 * in_turn


def efficiency(eta: int, most: int) -> float:
    """Speed with 8 hosts over 8 times that with one; the trainer grows with the hosts."""
    one, eight = (
        tokens_per_s(eta, replace(COSTS, train_s=4 / hosts), hosts=hosts, groups=16, most=most)
        for hosts in (1, 8)
    )
    return eight / one / 8


def test_asynchronous_runs_scale_to_eight_times_the_machines_and_synchronous_ones_do_not():
    """A11: the longest completion does not get shorter with more hosts. Short ones cost less."""
    long, short = ({eta: efficiency(eta, most) for eta in (0, 4)} for most in (CUT, 2 * MEDIAN))
    assert long[4] >= 0.6 > 0.5 > long[0]
    assert long[4] - long[0] > short[4] - short[0] > 0
