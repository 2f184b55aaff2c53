"""The page on conversations, run as a reader would, with fewer steps: its files in an empty folder."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from areal_jax.replay.folder_audit import audit_run
from tests.test_docs import DOCS, blocks, rows_of, run_as_printed

pytestmark = pytest.mark.soak

QUICK = "observe.live=false trainer.lr_schedule=constant"
PAGE, RECIPE = DOCS / "conversations.md", DOCS.parent / "configs" / "guess.yaml"


def command(name: str) -> str:
    """The page's command with this word in it, on one line."""
    commands = [block.replace("\\\n", " ").strip() for block in blocks(PAGE, "sh")]
    (found,) = [each for each in commands if name in shlex.split(each)]
    return re.sub(r"GUESS|configs/guess.yaml", str(RECIPE), found)


def means(folder: Path) -> tuple[float, float]:
    """Mean rewards over the first and the last sixth of the steps."""
    rewards = [row["reward_mean"] for row in rows_of(folder)]
    count = len(rewards) // 6
    return sum(rewards[:count]) / count, sum(rewards[-count:]) / count


def test_the_policy_learns_to_guess_in_several_turns(tmp_path: Path):
    run_as_printed(f"{command('configs/guess.yaml')} run.steps=30 {QUICK}", tmp_path)
    folder = tmp_path / "runs" / "guess"
    first, last = means(folder)
    assert last - first > 0.2, (first, last)  # three seeds: 0.30 to 0.34
    turns = [row["turns_mean"] for row in rows_of(folder)]
    assert audit_run(folder).ok and max(turns[-10:]) > 1.5
    shown = run_as_printed("areal-jax inspect runs/guess 300/0", tmp_path)
    assert "sample 300/0 of guess" in shown


def test_an_agent_that_imports_nothing_of_ours_is_trained_by_its_base_url(tmp_path: Path):
    for block in blocks(PAGE, "python"):
        if named := re.match(r"# (\w+\.py)\n", block):
            (tmp_path / named[1]).write_text(block)
    assert "areal" not in (tmp_path / "guesser.py").read_text()
    run_as_printed(f"{command('run.name=agent')} run.steps=24 {QUICK}", tmp_path)
    folder = tmp_path / "runs" / "agent"
    first, last = means(folder)
    assert last - first > 0.1, (first, last)  # three seeds: 0.18 to 0.21
    assert audit_run(folder).ok
