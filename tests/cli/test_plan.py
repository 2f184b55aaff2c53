"""`areal-jax plan` without a compiler for the target, and its messages."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from areal_jax.cli.main import app
from areal_jax.plan import targets

CONFIGS = Path(__file__).parents[2] / "configs"


@pytest.fixture
def without_compilers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(targets, "find_spec", lambda name: None)
    monkeypatch.setattr(targets, "environment", lambda flags: {})  # this process has imported jax already


@pytest.mark.parametrize(("target", "extra"), [("h100x8", "cuda12"), ("v5e-8", "tpu")])
def test_without_the_compiler_it_names_the_extra_and_what_stays_in_memory(
    target: str, extra: str, without_compilers: None
):
    """The master weights of 1.5 billion parameters on four devices; the recipe's data set is not read."""
    words = ["plan", str(CONFIGS / "qwen2.5_1.5b_gsm8k_8gpu.yaml"), "--target", target]
    done = CliRunner().invoke(app, [*words, "--json"])
    assert done.exit_code == 0, done.output
    figures = json.loads(done.stdout)
    assert f"needs the extra [{extra}]" in figures["missing"]
    assert figures["placement"] == "split"
    assert figures["memory"][0] == {
        "owner": "trainer", "content": "master weights, float32", "bytes": 1_543_714_304
    }  # fmt: skip
    printed = CliRunner().invoke(app, words).stdout
    assert printed.startswith("compiling for ") and "master weights, float32" in printed


def test_an_unknown_target_is_one_message():
    done = CliRunner().invoke(app, ["plan", str(CONFIGS / "quickstart.yaml"), "--target", "h10"])
    assert done.exit_code == 1
    assert "error: --target h10 is unknown; did you mean h100?" in done.output


def test_bytes_of_a_program_need_the_compiler_and_a_program_of_that_name(without_compilers: None):
    words = ["plan", str(CONFIGS / "quickstart.yaml"), "--target", "h100"]
    done = CliRunner().invoke(app, [*words, "--bytes", "trainer.accumulate"])
    assert done.exit_code == 1
    assert "error: --bytes: compiling for " in done.output and "needs the extra [cuda12]" in done.output
