"""Every strategy keeps its promise in one process, with fewer slots than a batch has samples."""

from __future__ import annotations

import io

import pytest

from areal_jax.assembly.run_folder import open_journal
from areal_jax.jobs.local import run
from areal_jax.replay.folder_audit import audit_run
from tests.promises import GROUPS, PAIRS, STEPS, check, scarce
from tests.small_run import small

pytestmark = pytest.mark.all_optimizations  # the programs of other files' small runs

FAST = {("interruptible", "recompute"), ("pinned", "pinned")}


@pytest.mark.parametrize(
    ("strategy", "on_update"),
    [
        pytest.param(*pair, id="-".join(pair), marks=[] if pair in FAST else [pytest.mark.slow])
        for pair in PAIRS
    ],
)
def test_a_strategy_keeps_its_promise_with_scarce_slots(tmp_path, strategy, on_update):
    config = small(tmp_path / "run", *scarce(strategy, on_update))
    run(config, stream=io.StringIO())
    with open_journal(tmp_path / "run") as journal:
        check(config, (row.event for row in journal.rows()))
    audit = audit_run(tmp_path / "run")
    assert (audit.violations, audit.trained, audit.dropped) == ([], STEPS * GROUPS, {})
