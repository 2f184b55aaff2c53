"""Ablations: the real engine and learner under the virtual clock: their staleness, bits and words."""

from __future__ import annotations

import json
from typing import Any

import pytest
from typer.testing import CliRunner

from areal_jax.assembly.parts import Parts, assemble
from areal_jax.cli.main import app
from areal_jax.config.loading import load_config
from areal_jax.config.tree import Config
from areal_jax.control.events import SampleFinished
from areal_jax.generation.engine import Engine
from areal_jax.generation.rollout import rollout
from areal_jax.lab.ablations.ablation import RunRecord, Table, Workbench, ablate, schedule
from areal_jax.lab.ablations.ablations import ABLATIONS, find
from areal_jax.lab.ablations.real_machines import RealMachines
from areal_jax.lab.simulation.machines import DrawnMachines
from areal_jax.lab.simulation.schedule import Fault, Schedule
from areal_jax.lab.simulation.world import simulate
from areal_jax.trajectories.packing import pack
from areal_jax.types import ArealError
from areal_jax.weights.digest import digest

pytestmark = pytest.mark.few_optimizations

STALENESS = ABLATIONS["staleness"]

SMALL = (
    "run.steps=8",
    "model.overrides={width: 16, heads: 2, kv_heads: 2, head_dim: 8, mlp_width: 32}",
    "algorithm.group_size=4",
    "generation.slots=8",
    "trainer.batch_size=4",
    "trainer.supervised.steps=0",
)


SPEED = 1.5
"""Random parameters answer at full length; this decodes even those faster than they are trained."""


def config_of(value: object, *words: str) -> Config:
    arm = STALENESS.arms["decoupled"]
    return load_config(STALENESS.recipe, *SMALL, *arm, f"control.max_staleness={value}", *words)


@pytest.fixture(scope="module")
def table() -> dict[str, Any]:
    """A tiny ablation, as the command line asks for it."""
    words = [*SMALL, "values=[0, 3]", "seeds=1", f"speed={SPEED}"]
    return ablate("staleness", STALENESS, words, lambda said: None)


@pytest.fixture(scope="module")
def bench() -> Workbench:
    return Workbench(SPEED)


@pytest.mark.soak
def test_a_table_has_a_row_a_value_and_arm_and_tells_the_staleness_that_was_reached(table):
    rows = {(row["value"], row["arm"]): row for row in table["table"]}
    assert list(rows) == [(value, arm) for value in (0, 3) for arm in ("naive", "decoupled")]
    for (value, _), row in rows.items():
        assert row["head_age"] == row["token_age"] == value
        assert row["by_seed"] == [row["reward"]]
    assert rows[3, "naive"]["off_policy_weight"] == 1.0
    assert rows[3, "decoupled"]["off_policy_weight"] != 1.0
    runs = [run for run in table["runs"] if run["value"] == 3]
    assert runs[0]["reward"] == pytest.approx(
        sum(runs[0]["curves"]["reward_mean"][-2:]) / 2, abs=1e-4
    )  # a quarter of eight steps; curves are rounded
    assert runs[0]["digest"] != runs[1]["digest"]
    assert set(table["claims"].values()) == {None}  # two values tell nothing of the other five


@pytest.mark.soak
def test_a_seed_gives_the_same_bits_again_whatever_ran_before_it(table, bench):
    """The last run of the table against the first one of another bench; then that bench's third run."""
    last = table["runs"][-1]
    assert (last["value"], last["arm"]) == (3, "decoupled")
    alone = bench.run(config_of(3))
    assert [round(row["reward_mean"], 4) for row in alone.rows] == last["curves"]["reward_mean"]
    assert alone.rows[-1]["params_digest"] == last["digest"]
    other = bench.run(config_of(3, "run.seed=1")).rows
    assert other[-1]["params_digest"] != last["digest"]
    assert bench.run(config_of(3)) == alone


@pytest.mark.soak
def test_every_named_staleness_is_reached_and_unbounded_grows_with_the_run(bench):
    """Ages by step: the first batches are of version 0, then each is as old as the gate lets it be."""
    for eta in (1, 2):
        ages = [row["head_age_mean"] for row in bench.run(config_of(eta)).rows]
        assert ages == [min(step, eta) for step in range(8)]
    ages = [row["head_age_mean"] for row in bench.run(config_of("unbounded")).rows]
    assert ages[0] == 0 and ages == sorted(ages) and ages[-1] > 2


@pytest.mark.soak
def test_staleness_0_is_the_plain_synchronous_loop_bit_for_bit(bench):
    config = config_of(0, "run.seed=5")
    parts = assemble(config)
    engine, learner, state, oracle = parts.engine(0), parts.learner, parts.first_state(), []
    for step in range(3):
        params, ordinals = learner.publish(state), range(step * 4, step * 4 + 4)
        groups = rollout(engine, params, parts.tasks, ordinals, 4, 5, sampling=config.generation.sampling)
        batch = pack(groups, config.trainer.rows, config.row_length, 4)
        state, _ = learner.update(state, learner.prepare(state, batch))
        oracle.append(digest(state.params))
    assert [row["params_digest"] for row in bench.run(config).rows][:3] == oracle
    assert len(set(oracle)) == 3


def test_speed_is_batches_of_longest_answers_a_training_step():
    config = config_of(0)  # 16 samples in 8 slots: two rounds of 16 tokens
    assert schedule(config, 0.5).token_s * 2 * 16 == pytest.approx(2.0)
    assert schedule(config, 0.5).train_s == 1.0


def test_what_the_real_machines_cannot_do_is_said_before_they_start():
    parts = assemble(load_config(STALENESS.recipe, {"algorithm": {"preset": "sft"}}))
    with pytest.raises(ArealError, match=r"algorithm\.samples=reference: .* use algorithm\.samples=policy"):
        RealMachines(parts, parts.learner.abstract_state(), [])
    config = config_of(0)
    machines = DrawnMachines(config, Schedule())  # any that were made before: faults come with none
    with pytest.raises(ArealError, match=r"leave Schedule\.faults empty"):
        simulate(config, Schedule(faults=(Fault("host_death", 1),)), machines)


# --- claims -------------------------------------------------------------------------------------------------


def table_of(rewards: dict[tuple[object, str], list[float]], clipped: dict[str, float]) -> Table:
    return {
        (value, arm): {"reward": by_seed, "clip_share": [clipped[arm]] * len(by_seed)}
        for (value, arm), by_seed in rewards.items()
    }


def as_hoped() -> dict[tuple[object, str], list[float]]:
    rewards: dict[tuple[object, str], list[float]] = {}
    for value in STALENESS.values:
        is_far = value not in (0, 1, 2)
        rewards[value, "naive"] = [0.5, 0.6] if is_far else [0.88, 0.92]
        rewards[value, "decoupled"] = [0.86, 0.94]
    return rewards


def verdicts(rewards, clipped=None) -> list[bool]:
    table = table_of(rewards, clipped or {"naive": 0.2, "decoupled": 0.1})
    return [claim(table) for claim in STALENESS.claims.values()]


def test_claims_are_met_where_the_table_says_so_and_each_can_fail():
    assert verdicts(as_hoped()) == [True, True, True, True]
    assert verdicts(as_hoped() | {(2, "decoupled"): [0.82, 0.91]}) == [False, True, True, True]
    assert verdicts(as_hoped() | {(8, "naive"): [0.4, 0.87]}) == [True, False, True, True]
    assert verdicts(as_hoped(), {"naive": 0.1, "decoupled": 0.1}) == [True, True, False, True]
    assert verdicts(as_hoped() | {("unbounded", "decoupled"): [0.9, 0.92]}) == [True, True, True, False]


# --- words --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("word", "says"),
    [
        ("seed=3", r"did you mean ablate staleness\."),
        ("seeds=many", "seeds=many is not a count"),
        ("speed=0", "speed=0 is not a finite number above 0"),
        ("arms=[naiv]", "did you mean naive?"),
        ("arms=naive", r"arms=naive is not a list; write arms=\[naive\]"),
        ("values=[-1]", "give a whole number of at least 0, or unbounded"),
        ("run.seed=3", "set their number with seeds=N"),
        ("control.max_staleness=3", r"give values=\[3\]"),
        ("algorithm.proximal=none", r"leave the word out, or choose arms with arms=\[naive,decoupled\]"),
        ("trainer.learning_rat=1", "did you mean trainer.learning_rate?"),
        ("configs/quickstart.yaml", "is not key=value"),
    ],
)
def test_a_word_that_means_nothing_is_refused_before_the_first_run(word, says):
    with pytest.raises(ArealError, match=says):
        ablate("staleness", STALENESS, [word], lambda said: pytest.fail(said))


def test_unknown_names_and_the_list():
    with pytest.raises(ArealError, match=r"did you mean staleness\?"):
        find("stalenes")
    names = ", ".join(ABLATIONS)
    refused = CliRunner().invoke(app, ["ablate", "nothing"])
    assert (
        refused.exit_code == 1
        and refused.stderr == f"error: there is no ablation nothing; choose from: {names}\n"
    )
    listed = CliRunner().invoke(app, ["ablate", "--json"])
    assert json.loads(listed.stdout) == {name: ablation.doc for name, ablation in ABLATIONS.items()}


# --- interruption -------------------------------------------------------------------------------------------

INTERRUPTION = ABLATIONS["interruption"]
QUICK = (
    "run.steps=12", "tasks.countdown.letters=24", "tasks.countdown.median=6", "generation.length=32",
    "generation.max_tokens=28", "trainer.length=64", "trainer.supervised.steps=2",
)  # fmt: skip


def speeds(skewed: tuple[list[float], list[float]], constant: tuple[list[float], list[float]]) -> Table:
    """Trained tokens a second by seed, of recompute and of drain."""
    return {
        (sigma, arm): {"trained_tokens_per_s": by_seed}
        for sigma, arms in ((1.0, skewed), (0.0, constant))
        for arm, by_seed in zip(("recompute", "drain"), arms, strict=True)
    }


def test_the_gain_is_the_median_ratio_of_runs_that_followed_one_another():
    def claims(*arms: tuple[list[float], list[float]]) -> list[bool]:
        return [claim(speeds(*arms)) for claim in INTERRUPTION.claims.values()]

    even = ([100, 200, 300], [100, 200, 300])
    assert claims(([120, 90, 460], [100, 100, 400]), even) == [True, True]  # ratios 1.2, 0.9, 1.15
    assert claims(([120, 90, 400], [100, 100, 400]), ([120, 90, 360], [100, 100, 300])) == [False, False]


def test_rates_leave_the_first_steps_out_and_swaps_cost_what_hosts_say():
    rows = [
        {"wall_s": 9.0 if step == 0 else 9.0 + step, "trained_tokens": 1000 if step == 0 else 30,
         "generated_tokens": 40, "swaps": 2 if step else 9, "swap_s": 0.5 if step else 9.0,
         "recomputed_tokens": 10 if step else 900}
        for step in range(5)
    ]  # fmt: skip
    figures = {
        name: INTERRUPTION.figures[name] for name in ("trained_tokens_per_s", "swap_ms", "recomputed_share")
    }
    assert {name: figure(RunRecord(rows)) for name, figure in figures.items()} == {
        "trained_tokens_per_s": 30.0,
        "swap_ms": 250.0,
        "recomputed_share": 0.25,
    }
    assert figures["swap_ms"](RunRecord([{"swaps": 0, "swap_s": 0.0}] * 5)) == 0.0


@pytest.fixture(scope="module")
def quick() -> Parts:
    return assemble(load_config(INTERRUPTION.recipe, *SMALL, *QUICK))


@pytest.fixture(scope="module")
def engine(quick: Parts) -> Engine:
    return quick.engine(0)


@pytest.mark.soak
@pytest.mark.parametrize("calls_ahead", [0, 1])
@pytest.mark.parametrize("arm", INTERRUPTION.arms)
def test_hosts_do_under_the_virtual_clock_what_the_arm_says(arm, calls_ahead, quick, engine):
    """The real engine, audited: recompute alone rebuilds, pinned alone holds several versions."""
    words = [*INTERRUPTION.arms[arm], f"generation.calls_ahead={calls_ahead}"]
    config = load_config(INTERRUPTION.recipe, *SMALL, *QUICK, *words)
    parts = assemble(config, learner=quick.learner)
    machines = RealMachines(parts, parts.first_state(), [engine])
    result = simulate(config, schedule(config, 0.7), machines)
    assert result.audit.violations == []
    assert (result.recomputed_tokens > 0) == (arm == "recompute")
    assert (result.interruptions > 0) == (arm in ("recompute", "keep"))
    assert (max(result.held) > 1) == (arm == "pinned")
    spans = {len(event.spans) for _, event, _ in result.rows if isinstance(event, SampleFinished)}
    assert (spans == {1}) == (arm in ("pinned", "drain"))


@pytest.mark.soak
def test_the_table_of_a_run_by_the_wall_clock():
    words = [*SMALL, *QUICK, "run.steps=6", "values=[1.0]", "arms=[drain]", "seeds=1"]
    table = ablate("interruption", INTERRUPTION, words, lambda said: None)
    (row,) = table["table"]
    assert (table["speed"], row["value"], row["arm"]) == (None, 1.0, "drain")
    assert row["interruptions"] == row["recomputed_share"] == 0
    assert row["trained_tokens_per_s"] > 0 and row["by_seed"] == [row["trained_tokens_per_s"]]
    assert 0 < row["swap_ms"] < 1e3 * table["total_seconds"]
    assert len(table["runs"][0]["curves"]["reward_mean"]) == 6
    with pytest.raises(
        ArealError, match=r"speed=0\.5: ablation interruption uses the wall clock; leave speed out"
    ):
        ablate("interruption", INTERRUPTION, ["speed=0.5"], lambda said: pytest.fail(said))


# --- lag and quantised hosts --------------------------------------------------------------------------------

LAG, QUANTIZED = ABLATIONS["lag"], ABLATIONS["quantized"]


def test_the_claims_of_lag_and_of_quantised_hosts_can_fail():
    def lag(**changed: float) -> list[bool]:
        rewards = {(k, arm): 0.9 for k in LAG.values for arm in LAG.arms} | {
            (int(name.rpartition("_")[2]), name.rpartition("_")[0]): reward
            for name, reward in changed.items()
        }
        table = {place: {"reward": [reward - 0.01, reward + 0.01]} for place, reward in rewards.items()}
        return [claim(table) for claim in LAG.claims.values()]

    assert lag(uncorrected_8=0.6, ppo_clip_4=0.1) == [True, True]
    assert lag(aipo_4=0.84) == [False, True]
    assert lag(aipo_8=0.89) == [True, False]

    def quantized(reward: float, gap: float) -> list[bool]:
        arms = {
            "none": {"reward": [0.9], "logp_gap": [1e-6]},
            "int8": {"reward": [reward], "logp_gap": [gap]},
        }
        table = {(k, arm): figures for k in QUANTIZED.values for arm, figures in arms.items()}
        return [claim(table) for claim in QUANTIZED.claims.values()]

    assert quantized(0.86, 1e-3) == [True, True]
    assert quantized(0.85, 1e-6) == [False, False]


@pytest.mark.soak
def test_quantised_hosts_have_a_gap_at_every_step_and_the_trainer_stays_in_full_precision():
    """Without lag the gap is the mismatch alone; a run of the virtual clock is audited, digests included."""
    words = [*SMALL, "run.steps=3", "values=[0]", "seeds=1"]
    table = ablate("quantized", QUANTIZED, words, lambda said: None)
    none, int8 = table["table"]
    assert 0 < none["logp_gap"] < 1e-5 and int8["logp_gap"] > 100 * none["logp_gap"]
    assert int8["mismatch_kl"] > 0
