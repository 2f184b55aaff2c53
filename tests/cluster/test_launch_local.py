"""`launch local`: every process of a run on this machine, ended by Ctrl-C and launched again."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from areal_jax.observe.evals import read_evals
from areal_jax.observe.metrics import read_rows
from areal_jax.runtime.reading import audit_run
from tests.programs import require

pytestmark = [pytest.mark.cluster, pytest.mark.slow]

ROOT = Path(__file__).parents[2]
GROUPS = 16
WORDS = ["runtime.hosts=2", "trainer.checkpoint_every=8", "runtime.deadline_s=120"]
QUIET = ["launch.accelerator=cpu", "observe.tensorboard=false", "observe.report=false"]
PROGRAM = ["env", "--default-signal=INT", sys.executable, "-m", "areal_jax.cli.main", "launch", "local"]


def launch(folder: Path, *words: str) -> subprocess.Popen:
    env = {key: value for key, value in os.environ.items() if key != "JAX_NUM_CPU_DEVICES"}
    out = folder.with_suffix(".out").open("a")
    return subprocess.Popen([*PROGRAM, *words], cwd=ROOT, env=env, stdout=out, stderr=out)


def fresh(folder: Path, steps: int) -> list[str]:
    return ["configs/quickstart.yaml", f"run.dir={folder}", f"run.steps={steps}", *WORDS, *QUIET]


def pids_of(folder: Path) -> dict[str, int]:
    """Name -> process id of the run's processes."""
    found = {}
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = path.read_text().split("\0")
        except OSError:
            continue  # it has just ended
        if f"--run={folder}" in words and "role" in words and "setpriv" not in words[0]:
            name = next(word for word in words if word.startswith("--name="))
            found[name.removeprefix("--name=")] = int(path.parent.name)
    return found


def wait_until(holds, run: subprocess.Popen, folder: Path, timeout_s: float = 180) -> None:
    end_s = time.monotonic() + timeout_s
    while not holds():
        said = folder.with_suffix(".out").read_text()[-4000:]
        assert run.poll() is None, f"it ended with {run.returncode}\n{said}"
        assert time.monotonic() < end_s, said
        time.sleep(0.1)


def check_whole(folder: Path, steps: int) -> None:
    audit = audit_run(folder)
    assert audit.ok and audit.trained == steps * GROUPS and audit.in_flight == 0
    assert [row["step"] for row in read_rows(folder)] == list(range(steps))


def test_ctrl_c_ends_every_process_and_the_run_goes_on_when_it_is_launched_again(tmp_path):
    require("redis-server")
    folder = tmp_path / "run"
    run = launch(folder, *fresh(folder, 8), "observe.evaluate=4", "observe.exports=1")
    try:
        wait_until(lambda: len(read_rows(folder)) >= 3, run, folder)
        names = {"controller", "evaluate-0", "generate-0", "generate-1", "reward-0", "trainer-0"}
        assert set(pids_of(folder)) == names
        run.send_signal(signal.SIGINT)
        assert run.wait(60) == 130
        assert pids_of(folder) == {}
        run = launch(folder, str(folder), "run.steps=10")
        assert run.wait(240) == 0, folder.with_suffix(".out").read_text()[-4000:]
    finally:
        run.kill()
        run.wait()
    check_whole(folder, 10)
    assert read_evals(folder)[-1]["version"] == 10
    assert [path.name for path in (folder / "exports").iterdir()] == ["10"]
