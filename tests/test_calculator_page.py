"""The calculator of the page on conversations: the table has the kept runs, and the command learns."""

from __future__ import annotations

import json
import os
import shlex
from pathlib import Path
from statistics import fmean

import pytest

from areal_jax.models.io.gguf import smollm2_gguf
from areal_jax.replay.folder_audit import audit_run
from areal_jax.types import ArealError
from tests.programs import unavailable
from tests.test_docs import DOCS, blocks, rows_of, run_as_printed

PAGE, RECIPE = DOCS / "conversations.md", DOCS.parent / "configs" / "calculator.yaml"
EACH = 2
"""Number of updates in a row of the page's table."""


def kept_curves() -> list[list[float]]:
    """Mean reward of each update, for each run in the page's table."""
    lines = (DOCS / "runs" / "calculator.jsonl").read_text().splitlines()
    return [run["curves"]["reward_mean"] for run in map(json.loads, lines)]


def test_the_table_has_the_means_of_the_kept_runs():
    curves, page = kept_curves(), PAGE.read_text()
    assert len(curves) == 3 and {len(curve) for curve in curves} == {10}
    for first in range(0, 10, EACH):
        means = [f"{fmean(curve[first : first + EACH]):.3f}" for curve in curves]
        assert f"| {first + 1} to {first + EACH} | {' | '.join(means)} |" in page


UPDATES = int(os.environ.get("AREAL_JAX_CALCULATOR_UPDATES", "2"))
"""From 6 on, the rewards must rise; an update takes about 25 CPU seconds."""


@pytest.mark.soak
def test_the_policy_learns_to_call_the_calculator(tmp_path: Path):
    try:
        smollm2_gguf()
    except ArealError as error:
        unavailable(str(error))
    recipe = "configs/calculator.yaml"
    (command,) = [block.strip() for block in blocks(PAGE, "sh") if recipe in shlex.split(block)]
    command = command.replace(recipe, str(RECIPE))
    run_as_printed(f"{command} run.steps={UPDATES} observe.live=false", tmp_path, timeout_s=900)
    folder = tmp_path / "runs" / "calculator"
    rewards = [row["reward_mean"] for row in rows_of(folder)]
    before, after = fmean(rewards[:2]), fmean(rewards[-2:])
    called = [row["reward_parts"]["called"] for row in rows_of(folder)]
    assert 0.15 < before < 0.65 and called[0] > 0.2 and audit_run(folder).ok, rewards
    if UPDATES >= 6:  # three seeds rose by 0.40 to 0.53
        assert after - before > 0.2 and called[-1] > called[0], rewards
    assert all(row["failed_episodes"] == row["calls_in_doubt"] == 0 for row in rows_of(folder))
    shown = run_as_printed(f"areal-jax inspect runs/calculator {4 * UPDATES - 4}/0", tmp_path)
    assert "Result: " in shown
