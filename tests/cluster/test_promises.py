"""Every strategy keeps its promise between processes: two hosts, fewer slots than a batch has samples."""

from __future__ import annotations

import pytest

from areal_jax.assembly.run_folder import open_journal
from areal_jax.config.loading import load_config
from areal_jax.replay.folder_audit import audit_run
from tests.launched import launched
from tests.promises import GROUPS, STEPS, check, each_promise, scarce

pytestmark = pytest.mark.soak  # `.ci/run` checks those of the runs of test_replayed_runs.py


@each_promise
def test_a_strategy_keeps_its_promise_with_scarce_slots(tmp_path, strategy, on_update):
    folder = launched(tmp_path / "run", *scarce(strategy, on_update, hosts=2))
    with open_journal(folder) as journal:
        check(load_config(folder / "config.yaml"), (row.event for row in journal.rows()))
    audit = audit_run(folder)
    assert (audit.violations, audit.trained, audit.dropped) == ([], STEPS * GROUPS, {})
