"""What docs/cli.md and docs/reliability.md say of the commands, where no test of a run shows it."""

from __future__ import annotations

import json
import re
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from areal_jax.cli.main import VERBS, app
from areal_jax.config.loading import load_config
from areal_jax.replay import bundle as bundles
from areal_jax.replay.branch import CHANGEABLE, FIXED
from areal_jax.runtime.differences import Comparison, Difference
from areal_jax.runtime.resuming import RESUMABLE_KEYS
from areal_jax.serving.endpoint import TrainingEndpoint
from areal_jax.types import ArealError, SampleId
from tests.small_run import RECIPE
from tests.trajectories.samples import trajectory

DOCS = Path(__file__).parents[2] / "docs"
PAGE = " ".join((DOCS / "cli.md").read_text().split())


def names(text: str) -> set[str]:
    """The words in backticks that are config keys or sections."""
    return set(re.findall(r"`([a-z_.*]+)`", text))


def between(start: str, end: str) -> str:
    return PAGE.partition(start)[2].partition(end)[0]


def test_the_page_names_the_keys_that_a_resume_and_a_branch_take():
    keys = names(between("`resume` takes only keys", "`run.steps` stays"))
    assert keys == {key.removesuffix(".") for key in RESUMABLE_KEYS}
    taken, _, refused = between("A branch may change", "if the control plane").partition("but not")
    assert names(taken) == {"algorithm", "control", "trainer", "resume"}
    assert {one for one in CHANGEABLE if one not in RESUMABLE_KEYS} == {"algorithm.", "control.", "trainer."}
    assert {name.removesuffix("*") for name in names(refused)} == set(FIXED)


@pytest.mark.parametrize(
    "words",
    ["audit", "run", "replay runs/x --untill 3", "launch moon x.yaml", "bench", "eval tiny --limit x", "x"],
)
def test_a_wrong_option_or_a_missing_argument_ends_with_2(words):
    assert CliRunner().invoke(app, words.split()).exit_code == 2


def test_every_command_that_prints_figures_takes_json():
    without = {name for name in VERBS if "--json" not in CliRunner().invoke(app, [name, "--help"]).output}
    assert without == {"report", "serve"}


def test_a_quickstart_has_a_folder_of_its_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def named(*words: str) -> str:
        done = CliRunner().invoke(app, ["quickstart", *words, "--dry-run", "--json"])
        return json.loads(done.stdout)["config"]["run"]["dir"]

    assert named() == "runs/quickstart"
    for folder in ("quickstart", "quickstart-2"):
        (tmp_path / "runs" / folder).mkdir(parents=True)
    assert named() == "runs/quickstart-3"
    assert named("run.name=mine") == "runs/mine"


@pytest.mark.parametrize(("http", "ports"), [("9200", (9102, 9202)), ("null", (9102, None))])
def test_each_host_of_a_run_answers_at_its_own_ports(http, ports):
    config = load_config(RECIPE, "generation.serve_port=9100", f"generation.serve_http_port={http}")
    engine: Any = SimpleNamespace(tokenizer=None, length=64, reserved_slots=1)
    address = TrainingEndpoint(config, 2, engine, None)._address
    assert (address.port, address.http_port) == ports


def test_a_step_with_a_teacher_has_no_bundle(tmp_path, monkeypatch):
    config = load_config(RECIPE, "algorithm.preset=distillation", "algorithm.teacher=runs/old")

    @contextmanager
    def reopened(folder: Path):
        yield SimpleNamespace(stretch_of=lambda step: SimpleNamespace(config=config))

    monkeypatch.setattr(bundles, "reopened", reopened)
    monkeypatch.setattr(bundles, "_journaled", lambda run, step: None)
    with pytest.raises(ArealError, match=r"teacher=runs/old: .*`areal-jax replay run --until 5` trains the"):
        bundles.make_bundle(Path("run"), 4, tmp_path / "step.bundle")
    assert not (tmp_path / "step.bundle").exists()


@pytest.mark.parametrize(("dtype", "nats", "share"), [("float32", 1e-3, 0.01), ("bfloat16", 0.25, 0.2)])
def test_the_bounds_of_a_replay_on_another_machine(dtype, nats, share):
    stored = trajectory(SampleId(0, 0))

    def compared(by: float, of_metric: float = 0.0) -> Comparison:
        one = Comparison(dtype)
        one.loosen()
        logp = np.where(stored.loss_mask, stored.behavior_logp + by, 0).astype(np.float32)
        assert one.sample("sample 0/0", stored, replace(stored, behavior_logp=logp))
        one.metrics(
            "step 0", {"loss": 2.0, "clip_share": 0.0}, {"loss": 2 * (1 + of_metric), "clip_share": 1.0}
        )
        return one

    assert compared(0.99 * nats, 0.99 * share).largest == {
        "behavior_logp": pytest.approx(0.99 * nats, rel=1e-3),
        "loss": pytest.approx(0.99 * share),
    }
    drawn_otherwise = replace(
        stored,
        tokens=stored.tokens + (np.arange(6) == 3),
        behavior_logp=stored.behavior_logp - (np.arange(6) > 3),
    )
    one = compared(0)
    assert not one.sample("sample 0/1", stored, drawn_otherwise) and one.cut == 1
    with pytest.raises(Difference, match=rf"token 2, behavior_logp: .*than the bound of {nats:g}"):
        compared(1.01 * nats)
    with pytest.raises(Difference, match=rf"loss: .*than the bound of {2 * share:g}"):
        compared(0, 1.01 * share)
