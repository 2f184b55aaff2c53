"""A gated run of answers among thoughts as processes: a killed one changes no gate and no bit."""

from __future__ import annotations

import io
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from areal_jax.jobs.local import run
from areal_jax.observe.metrics import read_rows
from areal_jax.replay.folder_audit import audit_run
from tests.cluster.agents import QUIET, pids_of, said, wait_until
from tests.programs import require
from tests.promises import GROUPS
from tests.runtime.test_interleaved_run import FEW, check_run, gated, is_mixed, taught, words_from
from tests.small_run import RECIPE

pytestmark = pytest.mark.slow

LAUNCH = (sys.executable, "-m", "areal_jax.cli.main", "launch", "local", str(RECIPE))
STEPS, FIRST, DEADLINE_S = 24, 6, 900
RUN = (*FEW, f"run.steps={STEPS}", "control.max_staleness=0", "trainer.checkpoint_every=5")


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return taught(tmp_path_factory.mktemp("taught") / "run")


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory, source: Path) -> list[tuple[str, bool]]:
    """The digest and the gate of each step of a run in one process."""
    folder = tmp_path_factory.mktemp("undisturbed") / "run"
    run(gated(folder, source, *RUN), stream=io.StringIO())
    return steps_of(folder)


def steps_of(folder: Path) -> list[tuple[str, bool]]:
    return [(row["params_digest"], row["gates"]["intermediate"]) for row in read_rows(folder)]


@pytest.mark.soak
@pytest.mark.parametrize("victim", ["controller", "trainer-0"])
def test_after_kill_9_of_a_process_the_gates_and_the_bits_are_those_of_one_process(
    tmp_path, source, undisturbed, victim
):
    require("redis-server")
    folder = tmp_path / "run"
    words = [*words_from(source), *RUN, *QUIET, f"run.dir={folder}"]
    env = {name: value for name, value in os.environ.items() if name != "JAX_NUM_CPU_DEVICES"}
    with folder.with_suffix(".out").open("w") as out:
        launched = subprocess.Popen([*LAUNCH, *words], env=env, stdout=out, stderr=out)
    try:
        wait_until(lambda: len(read_rows(folder)) >= FIRST, [launched], folder)
        killed = pids_of(folder)[victim]
        os.kill(killed, signal.SIGKILL)
        wait_until(lambda: pids_of(folder).get(victim, killed) != killed, [launched], folder)
        assert len(read_rows(folder)) < STEPS, "the process was killed too late to matter"
        assert launched.wait(DEADLINE_S) == 0, said(folder)[-4000:]
    finally:
        launched.terminate()
        launched.wait(DEADLINE_S)
    assert steps_of(folder) == undisturbed
    assert len({is_open for _, is_open in undisturbed}) == 2, "the test needs an open and a closed gate"
    assert is_mixed(check_run(folder))
    audit = audit_run(folder)
    assert (audit.trained, audit.in_flight, audit.dropped) == (STEPS * GROUPS, 0, {})
