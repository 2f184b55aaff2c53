"""A real run with a filter says at its end what the filter selects."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from scipy import stats
from typer.testing import CliRunner

from areal_jax.assembly.run_folder import open_journal
from areal_jax.cli.main import app
from areal_jax.control.events import Drop, RewardScored
from areal_jax.replay.folder_audit import audit_run
from tests.small_run import RECIPE, WORDS

pytestmark = pytest.mark.all_optimizations  # the programs of other files' small runs


@pytest.mark.slow
def test_a_run_with_a_filter_warns_at_its_end_and_inspect_names_the_filter(tmp_path: Path):
    """Hardly any answer of the new model earns a reward, so groups with equal rewards are hard ones."""
    folder = tmp_path / "run"
    words = ["run.steps=4", f"run.dir={folder}", "algorithm.group_filter=signal"]
    ran = CliRunner().invoke(app, ["run", str(RECIPE), *WORDS, *words])
    assert ran.exit_code == 0, ran.output
    found = json.loads(CliRunner().invoke(app, ["inspect", str(folder), "--selection", "--json"]).stdout)
    with open_journal(folder) as journal:
        rows = list(journal.rows())
    dropped = {action.ordinal for row in rows for action in row.actions if isinstance(action, Drop)}
    scored = {row.event.ordinal: row.event for row in rows if isinstance(row.event, RewardScored)}
    hard = {n: 1 - np.mean(event.rewards) for n, event in scored.items()}
    trained, discarded = ([hard[n] for n in hard if (n in dropped) == is_dropped] for is_dropped in (0, 1))
    audited = audit_run(folder)
    assert found["fates"][0]["finished"] == audited.trained == len(trained) == 16
    assert {
        each["fate"]: each["finished"] + each["unfinished"] for each in found["fates"][1:]
    } == audited.dropped
    difficulty = found["gaps"][2]
    assert difficulty["quantity"] == "difficulty" and difficulty["cause"] == "no_signal"
    assert difficulty["trained_mean"] == pytest.approx(np.mean(trained))
    assert difficulty["generated_mean"] == pytest.approx(np.mean([*trained, *discarded]))
    apart = stats.ks_2samp(trained, discarded).statistic * len(discarded) / len(hard)
    assert difficulty["distribution"] == pytest.approx(apart)
    warnings = [line for line in ran.stdout.splitlines() if line.startswith("warning: ")]
    assert warnings == [f"warning: {alarm}" for alarm in found["alarms"]]
    assert "most of it by no_signal" in warnings[-1] and "difficulty" in warnings[-1]
