"""The interleaved ablation: its claims, its paired differences, and runs that are kept in a file."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import fmean
from xml.etree import ElementTree

import pytest
from typer.testing import CliRunner

from areal_jax.cli.main import app
from areal_jax.config.loading import load_config
from areal_jax.lab.ablations.ablation import (
    Contrast,
    RunRecord,
    Workbench,
    _places,
    _read,
    _sources,
    ablate,
    paired,
)
from areal_jax.lab.ablations.ablations import ABLATIONS
from areal_jax.lab.ablations.interleaved_ablation import ALGORITHMS, INTERLEAVED

FIGURES = (
    "accuracy_all",
    "accuracy",
    "accuracy_longer",
    "ttft_share",
    "format",
    "gate_open_first",
    "gate_open_last",
)


def as_hoped() -> dict:
    """arm -> figure -> number; every claim holds."""
    return {
        "think_answer": (0.70, 0.90, 0.60, 0.87, 0.98, 1.0, 1.0),
        "interleave": (0.70, 0.90, 0.62, 0.26, 0.96, 1.0, 1.0),
        "interleave_ir": (0.75, 0.92, 0.70, 0.26, 0.97, 0.9, 0.7),
        "interleave_direct": (0.74, 0.91, 0.65, 0.26, 0.97, 1.0, 1.0),
    }


def verdicts(**changes: tuple[str, float]) -> list[bool]:
    """The claims for a table of two seeds; `changes`: arm=(figure, number)."""
    table = {}
    for arm, numbers in as_hoped().items():
        own = dict(zip(FIGURES, numbers, strict=True)) | dict([changes[arm]] if arm in changes else [])
        for value in ALGORITHMS:
            jitter = 0.001 if arm == "interleave" else 0.0
            table[value, arm] = {name: [number - jitter, number + jitter] for name, number in own.items()}
    return [claim(table) for claim in INTERLEAVED.claims.values()]


def test_each_claim_holds_where_the_table_says_so_and_each_can_fail():
    assert verdicts() == [True] * 7
    assert verdicts(interleave=("ttft_share", 0.36)).index(False) == 0
    assert verdicts(interleave=("accuracy", 0.85))[1] is False
    assert verdicts(interleave=("accuracy_all", 0.76))[2] is False
    assert verdicts(interleave_direct=("accuracy_all", 0.76))[3] is False
    assert verdicts(interleave_ir=("gate_open_last", 0.95))[4] is False
    assert verdicts(think_answer=("format", 0.85))[5] is False
    assert verdicts(interleave_ir=("accuracy_longer", 0.61))[6] is False


def test_accuracies_that_differ_from_seed_to_seed_are_not_equal():
    table = {
        (value, arm): {"accuracy": [0.5, 0.9] if arm == "interleave" else [0.7, 0.7]}
        for value in ALGORITHMS
        for arm in ("interleave", "think_answer")
    }
    claim = list(INTERLEAVED.claims.values())[1]
    assert claim(table) is False
    contrast = Contrast("accuracy", "interleave", "think_answer")
    assert paired(table, "ppo", contrast) == pytest.approx([-0.2, 0.2])


class Recorded:
    """Stands in for a workbench: counts the runs."""

    def __init__(self) -> None:
        self.runs = 0

    def run(self, config, evaluations) -> RunRecord:
        self.runs += 1
        right = {"value": 0.1 * config.run.seed + (0.5 if "think" in str(config.tasks) else 0.25)}
        named = ("ttft_share", "first_correct", "sub_correct", "format")
        parts = {name: {"value": 0.5} for name in named}
        row = {
            "reward_mean": 1 / 3,
            "reward_parts": {"correct": 0.5, "ttft_share": 0.5},
            "params_digest": "d",
        }
        row |= {"completion_tokens_mean": 9.0}
        sampled = {"pass@1": right, "parts": parts}
        return RunRecord([row] * config.run.steps, {name: {"sampled": sampled} for name in evaluations})


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> Recorded:
    found = Recorded()
    monkeypatch.setattr("areal_jax.lab.ablations.ablation.Workbench", lambda *_: found)
    return found


WORDS = ["values=[grpo]", "arms=[think_answer,interleave]", "run.steps=3"]


def test_the_smoke_table_is_one_pair_of_arms(recorded):
    figures = ablate("interleaved", INTERLEAVED, INTERLEAVED.smoke, lambda said: None)
    assert [(run["value"], run["arm"], run["seed"]) for run in figures["runs"]] == [
        ("grpo", "think_answer", 0),
        ("grpo", "interleave", 0),
    ]


@pytest.mark.parametrize("name", ABLATIONS)
def test_the_smoke_words_of_every_ablation_make_a_valid_config(name):
    ablation = ABLATIONS[name]
    settings, overrides = _read(name, ablation, ablation.smoke)
    places = _places(settings)
    assert 1 <= len(places) <= 2
    assert all(load_config(*_sources(ablation, overrides, *place)).run.steps <= 8 for place in places)


def test_finished_runs_are_kept_and_not_repeated(recorded, tmp_path: Path):
    kept = tmp_path / "runs.jsonl"
    first = ablate("interleaved", INTERLEAVED, [*WORDS, "seeds=1"], lambda said: None, kept)
    assert (recorded.runs, len(kept.read_text().splitlines())) == (2, 2)
    again = ablate("interleaved", INTERLEAVED, [*WORDS, "seeds=2"], lambda said: None, kept)
    assert recorded.runs == 4  # seed 1 alone
    assert again["runs"][:2] == first["runs"]
    ablate("interleaved", INTERLEAVED, [*WORDS, "seeds=1", "trainer.rows=8"], lambda said: None, kept)
    assert recorded.runs == 6  # another config
    assert json.loads(kept.read_text().splitlines()[0])["curves"]["reward_mean"] == [0.3333] * 3


def test_the_command_keeps_runs_and_draws_curves_and_refuses_a_missing_folder_before_the_first(
    recorded, tmp_path: Path
):
    words = ["ablate", "interleaved", *WORDS, "seeds=1"]
    for option in ("--runs", "--curves"):
        refused = CliRunner().invoke(app, [*words, option, str(tmp_path / "missing" / "file")])
        assert (
            refused.exit_code == 1 and "missing is not a folder, so file cannot be written" in refused.stderr
        )
    assert recorded.runs == 0
    files = ["--runs", str(tmp_path / "runs.jsonl"), "--curves", str(tmp_path / "curves.svg")]
    assert CliRunner().invoke(app, [*words, *files]).exit_code == 0
    assert len((tmp_path / "runs.jsonl").read_text().splitlines()) == recorded.runs == 2
    drawn = (tmp_path / "curves.svg").read_text()
    assert ElementTree.fromstring(drawn).get("role") == "img" and "think_answer" in drawn


ROOT = Path(__file__).parents[3]
LABELS = {"grpo": "GRPO", "reinforce_pp": "REINFORCE++", "ppo": "PPO"}
FIGURES_IN_DOCS = ("accuracy", "accuracy_4", "accuracy_5", "accuracy_6", "accuracy_all", "ttft_share")


def test_the_results_in_the_docs_are_the_means_of_the_kept_runs():
    page = (ROOT / "docs/interleaved.md").read_text(encoding="utf-8")
    runs = [json.loads(line) for line in (ROOT / "docs/runs/interleaved.jsonl").read_text().splitlines()]
    for value, arm in {(run["value"], run["arm"]) for run in runs}:
        own = [run for run in runs if (run["value"], run["arm"]) == (value, arm)]
        assert len(own) == INTERLEAVED.seeds[value]
        means = [f"{fmean(run[name] for run in own):.3f}" for name in FIGURES_IN_DOCS]
        assert f"| {LABELS[value]}, `{arm}` | {' | '.join(means)} |" in page


def test_differences_are_taken_seed_by_seed(recorded):
    figures = ablate("interleaved", INTERLEAVED, [*WORDS, "seeds=3"], lambda said: None)
    found = {(row["value"], row["figure"]): row for row in figures["differences"]}
    row = found["grpo", "accuracy"]
    assert (row["arm"], row["baseline"], row["pairs"]) == ("interleave", "think_answer", 3)
    assert row["difference"] == pytest.approx(-0.25) and row["low"] == pytest.approx(-0.25)
    assert found["all", "accuracy"]["difference"] == pytest.approx(-0.25)


def test_each_algorithm_has_its_own_number_of_seeds(recorded):
    figures = ablate("interleaved", INTERLEAVED, ["arms=[interleave]", "run.steps=1"], lambda said: None)
    seeds = [(run["value"], run["seed"]) for run in figures["runs"]]
    assert [sum(value == name for value, _ in seeds) for name in ("grpo", "reinforce_pp", "ppo")] == [3, 3, 6]


@pytest.mark.soak
def test_the_smoke_table_shows_how_much_earlier_interleaved_answers_come():
    """The format alone does it: these arms learn no arithmetic."""
    half = "trainer.supervised.batch=56"  # enough to learn a format
    done = CliRunner().invoke(app, ["ablate", "interleaved", "--smoke", "--json", half])
    assert done.exit_code == 0, done.output
    rows = {row["arm"]: row for row in json.loads(done.stdout)["table"]}
    assert rows["think_answer"]["format"] > 0.8 and rows["interleave"]["format"] > 0.8
    assert rows["interleave"]["ttft_share"] < 0.5 * rows["think_answer"]["ttft_share"]


@pytest.mark.soak
def test_a_run_is_evaluated_on_longer_problems_and_all_seeds_begin_with_one_start():
    words = ["run.steps=1", "trainer.supervised.steps=3", "trainer.supervised.batch=8"]
    words += ["algorithm.group_size=2", "trainer.batch_size=2"]  # programs of the smoke run, less data
    bench = Workbench(0.6, shares_start=True)
    configs = [load_config(INTERLEAVED.recipe, *words, f"run.seed={seed}") for seed in (0, 1)]
    longer = load_config(INTERLEAVED.recipe, *words, "tasks.chained.steps=4")
    found = bench.run(configs[0], {"4 steps": longer}).evaluations
    assert found["4 steps"]["prompts"] == 128
    assert set(found["4 steps"]["sampled"]["parts"]) >= {"correct", "ttft_share", "format"}
    bench.run(configs[1])
    assert len(bench.shared.params) == 1
