"""What only the config of a run in `model.source` names is not executed; for other files: test_bundle.py."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
from typer.main import get_command
from typer.testing import CliRunner

from areal_jax.cli.main import app
from areal_jax.cluster import node_agent, roles
from areal_jax.plugin import require_code_allowed
from tests.small_run import RECIPE

WITHOUT = {"bench", "simtest", "config", "algorithms", "tasks", "doctor", "role"}
"""The commands that read no run's folder and no bundle."""


@pytest.fixture
def evil(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file that the module `evil` makes when it is imported; the config of the run `theirs` names it."""
    mark = tmp_path / "mark"
    (tmp_path / "evil.py").write_text(f"open({str(mark)!r}, 'w')\ndef code(**settings): raise ValueError\n")
    (tmp_path / "theirs").mkdir()
    (tmp_path / "theirs" / "config.yaml").write_text("tasks: {evil:code: {}}\nmodel: {shape: tiny}\n")
    (tmp_path / "between").mkdir()
    (tmp_path / "between" / "config.yaml").write_text("tasks: countdown\nmodel: {source: theirs}\n")
    (tmp_path / "mine.yaml").write_text("tasks: {evil:code: {}}\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    yield mark
    sys.modules.pop("evil", None)


def tried(*words: str) -> str:
    done = CliRunner().invoke(app, ["run", str(RECIPE), "run.dir=run", *words, "--dry-run"])
    assert done.exit_code == 1, done.output
    return done.output


@pytest.mark.parametrize(
    "word",
    ["model.source=theirs", "model.source=between", "algorithm.teacher=theirs algorithm.preset=distillation"],
)
def test_a_run_does_not_execute_what_only_the_run_of_its_model_names(evil, word):
    assert "theirs/config.yaml: task 'evil:code' is code that" in (said := tried(*word.split()))
    assert "--allow-code" in said and not evil.exists()
    tried(*word.split(), "--allow-code")
    assert evil.exists()
    assert not os.environ.get("AREAL_JAX_ALLOW_CODE")


@pytest.mark.parametrize("words", ["tasks=evil:code", "tasks.evil:code.n=1", "mine.yaml"])
def test_what_the_users_own_words_and_files_name_is_executed(evil, words):
    assert "--allow-code" not in tried(words) and evil.exists()


def test_every_command_that_reads_files_of_others_takes_the_option():
    commands = get_command(app).commands
    takes = lambda command: "allow_code" in {one.name for one in command.params}  # noqa: E731
    assert {name for name, command in commands.items() if not takes(command)} == WITHOUT
    assert all(map(takes, commands["role"].commands.values()))


def test_a_launched_runs_processes_have_the_permission_of_its_launch(evil, monkeypatch):
    seen = []
    monkeypatch.setattr(
        node_agent, "run_node", lambda *_: seen.append(os.environ.get("AREAL_JAX_ALLOW_CODE"))
    )
    monkeypatch.setattr(roles, "generate", lambda *_: require_code_allowed("evil:code", "task"))
    for allowed in ([], ["--allow-code"]):
        done = CliRunner().invoke(app, ["launch", "local", str(RECIPE), "run.dir=run", *allowed])
        assert done.exit_code == 0, done.output
    assert [one == "1" for one in seen] == [False, True]
    role = ["role", "generate", "--config", str(RECIPE), "--run", "run"]
    assert "--allow-code" in CliRunner().invoke(app, role).output
    monkeypatch.setenv("AREAL_JAX_ALLOW_CODE", "1")
    assert CliRunner().invoke(app, role).exit_code == 0
    monkeypatch.delenv("AREAL_JAX_ALLOW_CODE")
    role[3] = "mine.yaml"
    assert CliRunner().invoke(app, role).exit_code == 0
