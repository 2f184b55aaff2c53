"""The quickstart as a newcomer starts it: a process of its own in an empty folder."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest


@pytest.mark.soak
@pytest.mark.alone
def test_the_quickstart_learns_asynchronously_and_ends_with_a_report(tmp_path):
    env = {key: value for key, value in os.environ.items() if key != "JAX_NUM_CPU_DEVICES"}
    done = subprocess.run(
        [sys.executable, "-m", "areal_jax.cli.main", "quickstart"],
        cwd=tmp_path,
        env=env,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "report: runs/quickstart/report.html"
    run = tmp_path / "runs" / "quickstart"
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    rewards = [row["reward_mean"] for row in rows]
    tenth, quarter = rewards[: len(rewards) // 10], rewards[-(len(rewards) // 4) :]
    # The promise of docs/figures.md: at most 0.3 in the first tenth, at least 0.9 in the last quarter.
    assert sum(tenth) / len(tenth) <= 0.3
    assert sum(quarter) / len(quarter) >= 0.9
    assert sum(row["interruptions"] for row in rows) >= 20
    assert {0, 1} <= {row["token_age_min"] for row in rows} | {row["token_age_max"] for row in rows}
    assert len({row["params_digest"] for row in rows}) == len(rows) == 200
    assert "<svg" in (run / "report.html").read_text()
    assert (run / "tensorboard").is_dir() and (run / "checkpoints" / "200").is_dir()
