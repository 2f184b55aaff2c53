"""Every strategy keeps its promise between processes: two hosts, fewer slots than a batch has samples."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from areal_jax.config.loading import load_config
from areal_jax.runtime.reading import audit_run, open_journal
from tests.programs import require
from tests.promises import GROUPS, STEPS, check, each_promise, scarce
from tests.small_run import RECIPE, WORDS

pytestmark = [pytest.mark.cluster, pytest.mark.slow]

LAUNCH = (sys.executable, "-m", "areal_jax.cli.main", "launch", "local", str(RECIPE))
DEADLINE_S = 240


@each_promise
def test_a_strategy_keeps_its_promise_with_scarce_slots(tmp_path, strategy, on_update):
    require("redis-server")
    folder = tmp_path / "run"
    words = [*WORDS, *scarce(strategy, on_update, hosts=2), "launch.accelerator=cpu", f"run.dir={folder}"]
    env = {name: value for name, value in os.environ.items() if name != "JAX_NUM_CPU_DEVICES"}
    with folder.with_suffix(".out").open("w") as out:
        run = subprocess.Popen([*LAUNCH, *words], env=env, stdout=out, stderr=out)
        try:
            code = run.wait(DEADLINE_S)
        finally:
            run.terminate()
            run.wait(60)
    assert code == 0, folder.with_suffix(".out").read_text()[-4000:]
    with open_journal(folder) as journal:
        check(load_config(folder / "config.yaml"), (row.event for row in journal.rows()))
    audit = audit_run(folder)
    assert (audit.violations, audit.trained, audit.dropped) == ([], STEPS * GROUPS, {})
