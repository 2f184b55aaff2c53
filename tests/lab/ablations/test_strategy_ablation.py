"""The ablation of strategies: simulated by hand-made cost models, asleep in real time, and its table."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from areal_jax.cli.main import app
from areal_jax.config.loading import load_config
from areal_jax.config.tree import Config
from areal_jax.lab.ablations import ablation as ablation_module
from areal_jax.lab.ablations.ablation import Runner, RunRecord, ablate
from areal_jax.lab.ablations.strategy_ablation import (
    FOR_BATCH,
    FOR_SAMPLES,
    STRATEGIES,
    compared,
    under_a_cost_model,
    words_of,
)
from areal_jax.lab.published import published
from areal_jax.lab.published.modelled import simulated, slept
from areal_jax.lab.published.sleeping import SleepingEngine
from areal_jax.lab.simulation.machines import drawn_work
from areal_jax.lab.simulation.schedule import Schedule
from areal_jax.observe.waits import Interval
from areal_jax.parallel.mesh import make_mesh
from areal_jax.report.lanes import shares
from areal_jax.types import ArealError, SampleId, Sampling, VersionedParams

EQUAL = Schedule(
    median_tokens=12,
    sigma_tokens=0.0,
    token_s=0.01,
    crowd_slots=16,
    prefill_s=0.002,
    swap_s=0.05,
    recompute_token_s=1e-4,
    train_s=0.5,
    publish_s=0.1,
    reward_s=0.03,
    jitter=0.0,
)
"""All completions have 12 tokens: 3 calls of 4."""


def config_of(strategy: str, *words: str) -> Config:
    own = (f"control.strategy={strategy}", *words_of(strategy))
    return load_config(STRATEGIES.recipe, "generation.slots=16", "runtime.hosts=1", *own, *words)


# --- simulated ----------------------------------------------------------------------------------------------


def test_a_synchronous_steps_times_add_up():
    """16 samples in 16 slots: a prefill each, 3 calls of 4 steps at twice token_s, then what follows."""
    found = simulated(config_of("sync", "run.steps=4"), EQUAL)
    generate_s = 16 * 0.002 + 3 * 4 * 0.01 * 2
    step_s = generate_s + 0.03 + 0.5 + 0.1 + 0.05
    ends = [row["wall_s"] for row in found.rows]
    assert np.diff(ends) == pytest.approx(step_s)
    assert [row["trained_tokens"] for row in found.rows] == [16 * 12] * 4
    assert found.token_ages == {0: 4 * 16 * 12}
    own = shares(found.intervals)  # three steps and the first update
    assert own["trainer"][FOR_BATCH] == pytest.approx(1 - 4 * 0.5 / (3 * step_s + 0.5))
    assert own["hosts"]["decode"] == pytest.approx(3 * generate_s / (3 * step_s + 0.5))
    assert own["hosts"]["swap"] == pytest.approx(3 * 0.05 / (3 * step_s + 0.5))
    assert own["hosts"][FOR_SAMPLES] == pytest.approx(1 - own["hosts"]["decode"] - own["hosts"]["swap"])


@pytest.mark.parametrize("strategy", STRATEGIES.values)
def test_rows_and_ages_count_the_same_tokens(strategy: str):
    skewed = replace(EQUAL, sigma_tokens=1.0)
    found = simulated(config_of(strategy, "run.steps=10", "runtime.hosts=2"), skewed)
    assert sum(row["trained_tokens"] for row in found.rows) == sum(found.token_ages.values())
    assert found.rows[-1]["generated_tokens"] >= 0
    ages = {"sync": {0}, "one_step": {0, 1}}.get(strategy)
    assert ages is None or set(found.token_ages) == ages
    assert {each.component for each in found.intervals} == {"trainer", "host0", "host1"}
    assert all(sum(own.values()) == pytest.approx(1.0) for own in shares(found.intervals).values())


def test_shares_count_only_the_time_from_the_first_update_to_the_last():
    intervals = [
        Interval("trainer", FOR_BATCH, 0, 5),
        Interval("trainer", "update", 5, 6),
        Interval("trainer", FOR_BATCH, 6, 8),
        Interval("trainer", "update", 8, 9),
        Interval("host-0", "decode", 0, 7),
        Interval("host-0", FOR_SAMPLES, 7, 20),
        Interval("control", "decide", 0, 20),
    ]
    assert shares(intervals) == {
        "trainer": {"update": 0.5, FOR_BATCH: 0.5},
        "hosts": {"decode": 0.5, FOR_SAMPLES: 0.5},
    }
    assert shares(intervals[:1]) == {}


# --- asleep -------------------------------------------------------------------------------------------------


def test_a_sleeping_engine_takes_the_modelled_time_and_ends_samples_at_their_drawn_lengths():
    import time

    import jax

    from areal_jax.lab.bench.measure import random_model

    costs = replace(EQUAL, sigma_tokens=1.0, seed=3, token_s=0.02, prefill_s=0.03)
    engine = SleepingEngine(
        random_model("tiny", "float32"),
        costs,
        slots=3,
        length=40,
        max_tokens=30,
        decode_steps=4,
        mesh=make_mesh({"tensor": 1}, jax.devices()[:1], "a host"),
    )
    state, value = engine.init_decode_state(), VersionedParams(0, {}, "")
    samples = SampleId(5, 0), SampleId(5, 1)
    for slot, sample in enumerate(samples):
        [prefix] = engine.prefixes(engine.begin_prefill([np.zeros(7, np.int32)]))
        request = engine.request(sample, 0, Sampling(max_tokens=30), 7)
        state = engine.insert(prefix, state, slot, request=request)
    lengths = [drawn_work(costs, sample, 30).length for sample in samples]
    sampled, calls_s = np.zeros(3, int), []
    while state.is_live.any():
        live, started_s = state.is_live.sum(), time.perf_counter()
        state, results = engine.generate(value, state)
        calls_s.append((time.perf_counter() - started_s, 0.02 * 4 * (1 + live / 16)))
        sampled += results.rows["valid"].sum(1)
    assert sampled.tolist() == [*lengths, 0]
    assert len(calls_s) == -(-max(lengths) // 4)
    assert calls_s[0][0] >= calls_s[0][1] + 2 * 0.03
    assert all(took >= wanted for took, wanted in calls_s[1:])


@pytest.mark.soak
@pytest.mark.alone
@pytest.mark.parametrize("strategy", STRATEGIES.values)
def test_a_run_that_sleeps_is_as_fast_as_its_simulation_says(strategy: str):
    """Threads, driver, journal and reward workers are real; decode calls of 0.06 s hide what they cost."""
    costs = replace(EQUAL, sigma_tokens=1.0, median_tokens=24, token_s=0.015, train_s=0.3)
    words = ["seeds=1", f"values=[{strategy}]", "run.steps=5", "generation.slots=16"]
    ablation = under_a_cost_model(STRATEGIES)
    tables = [
        ablate(
            "strategies", ablation, words, lambda said: None, None, Runner(name, partial(run, costs=costs))
        )
        for name, run in (("simulated", simulated), ("sleeping", slept))
    ]
    (line,) = compared(*tables)
    assert 0.9 <= line["ratio"] <= 1.1


# --- the table ----------------------------------------------------------------------------------------------


def by_strategy(config: Config) -> RunRecord:
    speed = {"sync": 100.0, "one_step": 90.0}.get(config.control.strategy, 150.0) + config.run.seed
    rows = [
        {
            "wall_s": float(step),
            "trained_tokens": speed,
            "generated_tokens": speed,
            "token_age_mean": 0.5,
            "params_digest": "",
        }
        for step in range(10)
    ]
    return RunRecord(rows, token_ages={0: 3, 1: 1})


def test_each_strategy_runs_once_a_seed_with_its_own_bound_and_claims_compare_seed_by_seed():
    found = ablate(
        "strategies",
        under_a_cost_model(STRATEGIES),
        ["seeds=2"],
        lambda said: None,
        None,
        Runner("x", by_strategy),
    )
    assert [(run["seed"], run["value"]) for run in found["runs"]] == [
        (seed, strategy) for seed in (0, 1) for strategy in STRATEGIES.values
    ]
    assert {row["value"]: row["trained_tokens_per_s"] for row in found["table"]}["keep"] == 150.5
    assert found["runs"][0]["token_ages"] == {"0": 3, "1": 1}
    assert list(found["claims"].values()) == [False, True, True, True]


def test_the_first_word_may_be_a_config_and_other_ablations_take_none(tmp_path: Path):
    own = tmp_path / "own.yaml"
    own.write_text(Path(STRATEGIES.recipe).read_text().replace("batch_size: 4", "batch_size: 2"))
    seen: list[Config] = []

    def run(config: Config) -> RunRecord:
        seen.append(config)
        return by_strategy(config)

    words = [str(own), "values=[sync,pinned]", "seeds=1"]
    found = ablate(
        "strategies", under_a_cost_model(STRATEGIES), words, lambda said: None, None, Runner("x", run)
    )
    assert found["recipe"] == str(own)
    assert [(c.control.strategy, c.control.max_staleness, c.trainer.batch_size) for c in seen] == [
        ("sync", 0, 2),
        ("pinned", 2, 2),
    ]


def test_the_time_left_is_said_before_the_first_run_and_after_each(tmp_path: Path, monkeypatch):
    now_s = [0.0]
    monkeypatch.setattr(ablation_module.time, "perf_counter", lambda: now_s[0])

    def run(config: Config) -> RunRecord:
        now_s[0] += {"sync": 100.0, "pinned": 40.0, "keep": 10.0, "one_step": 1.0}[config.control.strategy]
        return by_strategy(config)

    def said(*values: str) -> list[str]:
        lines: list[str] = []
        words, kept = [f"values=[{','.join(values)}]", "seeds=1"], tmp_path / "runs.jsonl"
        own = under_a_cost_model(STRATEGIES), words, lines.append, kept, Runner("x", run)
        ablate("strategies", *own)
        return [line.rpartition("; ")[2] for line in lines]

    unknown, first, second, last = said("sync", "pinned", "keep")
    assert unknown == "the first one will show how long the others take"
    assert first == "at most 3:20 left, since this one also compiled"  # 2 of 100 s
    assert second == "about 0:40 left"  # as long as the second one
    assert "left" not in last
    before, *_ = said("sync", "pinned", "keep", "one_step")
    assert before == "about 0:50 left"  # one run, at the mean of the three that the file has


def test_the_time_of_runs_that_sleep_is_known_before_the_first_one():
    lines: list[str] = []
    words = ["values=[sync]", "seeds=3"]
    runner = Runner("x", by_strategy, run_s=40.0)
    ablate("strategies", under_a_cost_model(STRATEGIES), words, lines.append, None, runner)
    assert lines[0].startswith("3 of 3 runs to do") and lines[0].endswith("; about 2:00 left")


def test_speeds_are_compared_strategy_by_strategy():
    predicted = {"table": [{"value": "sync", "trained_tokens_per_s": 100.0}]}
    found = {"table": [{"value": "sync", "trained_tokens_per_s": 95.0}]}
    assert compared(predicted, found) == [{"value": "sync", "predicted": 100.0, "found": 95.0, "ratio": 0.95}]


# --- the command --------------------------------------------------------------------------------------------

FILE = {
    "decode_call_s": {"1": 0.05, "8": 0.06}, "decode_steps": 4, "prefill_s": 0.0, "swap_s": 0.01,
    "recompute_token_s": 1e-5, "move_s": 0.01, "train_s": 0.3, "publish_s": 0.02, "reward_s": 0.01,
    "median_tokens": 12, "sigma_tokens": 1.0,
}  # fmt: skip


def test_the_command_simulates_prints_the_published_figures_and_writes_a_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    lines = [published.Line("AReaL: a ratio", "2.77", 3.0, 2.0)]
    monkeypatch.setattr(published, "published_table", lambda: lines)
    costs, page = tmp_path / "costs.json", tmp_path / "page.html"
    costs.write_text(json.dumps(FILE))
    words = ["ablate", "strategies", "--simulated", "--costs", str(costs), "--page", str(page), "--json"]
    done = CliRunner().invoke(app, [*words, "seeds=1", "run.steps=5"])
    assert done.exit_code == 0, done.stderr
    found = json.loads(done.stdout)
    assert [row["value"] for row in found["table"]] == list(STRATEGIES.values)
    assert found["published"] == [
        {"name": "AReaL: a ratio", "published": "2.77", "simulated": 3.0, "holds": True}
    ]
    shown = page.read_text()
    for text in ("Published figures", "Idle time by cause", "Token age", "interruptible", "2.77"):
        assert text in shown
    assert "<figcaption>Reward" not in shown  # nothing was sampled, so nothing was right


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["staleness", "--simulated"], "leave --simulated and --sleeping to strategies"),
        (["strategies", "--costs", "x.json"], "is for --simulated and --sleeping"),
        (["strategies", "--simulated", "--costs", "x.json"], "x.json cannot be read"),
    ],
)
def test_options_that_do_not_fit_are_refused(words: list[str], says: str):
    done = CliRunner().invoke(app, ["ablate", *words])
    assert (done.exit_code, says in done.stderr) == (1, True), done.stderr


def test_a_cost_model_without_a_figure_is_refused(tmp_path: Path):
    costs = tmp_path / "costs.json"
    costs.write_text(json.dumps({name: value for name, value in FILE.items() if name != "train_s"}))
    done = CliRunner().invoke(app, ["ablate", "strategies", "--simulated", "--costs", str(costs)])
    assert done.exit_code == 1
    assert "error: the cost model lacks train_s (seconds of a training step)" in done.stderr


def test_lengths_are_not_guessed():
    from areal_jax.lab.bench.registry import bench

    with pytest.raises(ArealError, match="give median_tokens=N and sigma_tokens=X"):
        bench("costs", {"config": "configs/staleness.yaml", "words": ["tasks={arithmetic: {}}"]})
