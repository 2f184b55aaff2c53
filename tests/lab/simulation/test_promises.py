"""Every strategy keeps its promise under the virtual clock, with fewer slots than a batch has samples."""

from __future__ import annotations

import pytest

from areal_jax.config.loading import load_config
from areal_jax.config.refusals import ON_UPDATE
from areal_jax.config.tree import Config
from areal_jax.control.strategies import STRATEGIES
from areal_jax.lab.simulation.schedule import Schedule
from areal_jax.lab.simulation.world import SimResult, simulate
from tests.promises import GROUPS, PAIRS, STEPS, VERSIONS, check, each_promise, scarce

TRAIN_S = {"fast trainer": 0.05, "slow trainer": 3.0}
"""A trainer that waits for the hosts, and one that the hosts wait for."""


def simulated(
    strategy: str, on_update: str, seed: int = 0, hosts: int = 2, train_s: float = 0.05
) -> tuple[Config, SimResult]:
    schedule = Schedule(seed=seed, median_tokens=24, sigma_tokens=1.0, train_s=train_s)
    config = load_config(
        "generation.length=400", "generation.max_tokens=360", *scarce(strategy, on_update, hosts)
    )
    return config, simulate(config, schedule)


def test_every_strategy_has_its_promise_in_the_table():
    assert set(VERSIONS) == set(STRATEGIES) == set(ON_UPDATE)


@each_promise
@pytest.mark.parametrize("hosts", [1, 2])
@pytest.mark.parametrize("train_s", TRAIN_S.values(), ids=TRAIN_S)
@pytest.mark.parametrize("seed", range(4))
def test_a_strategy_keeps_its_promise_with_scarce_slots(strategy, on_update, seed, train_s, hosts):
    config, result = simulated(strategy, on_update, seed, hosts, train_s)
    check(config, (event for _, event, _ in result.rows))
    assert (result.audit.violations, result.audit.trained) == ([], STEPS * GROUPS)
    assert (result.interruptions > 0) == (on_update in ("recompute", "keep") and strategy != "sync")


@each_promise
@pytest.mark.parametrize("seed", range(2))
def test_a_strategy_keeps_its_promise_with_episodes(strategy, on_update, seed):
    """Workflows ask for their first turns late, and some episodes of a group end before others begin."""
    schedule = Schedule(seed=seed, median_tokens=6, train_s=0.05, turns=2.0, workflow_s=1.0)
    config = load_config(*scarce(strategy, on_update, hosts=2))
    result = simulate(config, schedule)
    check(config, (event for _, event, _ in result.rows))
    assert (result.audit.violations, result.audit.trained) == ([], STEPS * GROUPS)


@pytest.mark.parametrize(("strategy", "on_update"), [pair for pair in PAIRS if "drain" in pair])
def test_the_table_tells_a_drained_run_from_an_interrupted_one(strategy, on_update):
    """Rows of an interruptible run break the promise of every strategy whose hosts drain."""
    config, _ = simulated(strategy, on_update)
    _, result = simulated("interruptible", "recompute")
    with pytest.raises(AssertionError):
        check(config, (event for _, event, _ in result.rows))
