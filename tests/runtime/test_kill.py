"""A killed run goes on: nothing is lost, nothing happens twice. Every run here is its own process."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from functools import cache
from itertools import accumulate
from pathlib import Path

import pytest

from areal_jax.assembly.run_folder import open_journal
from areal_jax.control.events import BatchTrained, RunResumed
from areal_jax.observe.metrics import read_rows
from areal_jax.replay.folder_audit import audit_run
from tests.hangs import HANG_S
from tests.small_run import RECIPE, WORDS

pytestmark = pytest.mark.slow

CRITIC = [
    "algorithm.preset=ppo",
    "algorithm.minibatches=2",
    "algorithm.group_size=4",
    "algorithm.reference=ema",
    "algorithm.kl={coef: 0.05, place: reward, estimator: k1, target: 0.002, horizon: 500}",
]
"""A critic, a moving reference and an adaptive coefficient: all that a state may hold."""

LORA = ["model.lora.rank=2", "model.quantize=nf4", "weights.backend=orbax", "algorithm.kl.coef=0.05"]
"""Codes, adapters alone trained, and a reference that shares the codes."""

CLI = ["env", "--default-signal=INT", sys.executable, "-m", "areal_jax.cli.main"]
"""Ctrl-C reaches a child also where this process was started with interrupts ignored."""


def begin(folder: Path, *words: str) -> subprocess.Popen:
    words = (*WORDS, f"run.dir={folder}", "observe.live=false", *words)
    return subprocess.Popen([*CLI, "run", str(RECIPE), *words], stdout=subprocess.DEVNULL, env=env())


def begin_again(folder: Path) -> subprocess.Popen:
    return subprocess.Popen([*CLI, "resume", str(folder)], stdout=subprocess.DEVNULL, env=env())


def env() -> dict[str, str]:
    return {key: value for key, value in os.environ.items() if key != "JAX_NUM_CPU_DEVICES"}


def wait_until(holds, process: subprocess.Popen, deadline_s: float = 3 * HANG_S) -> None:
    end = time.monotonic() + deadline_s
    while not holds():
        assert process.poll() is None, "the run ended before it could be killed"
        assert time.monotonic() < end, "the run did not come that far"
        time.sleep(0.02)


def call(*args: str) -> subprocess.CompletedProcess:
    return subprocess.run([*CLI, *args], capture_output=True, text=True, env=env(), timeout=3 * HANG_S)


def check_whole(folder: Path, steps: int) -> None:
    done = call("audit", str(folder), "--json")
    figures = json.loads(done.stdout)
    assert done.returncode == 0 and figures["ok"] and figures["violations"] == []
    assert figures["trained"] == steps * 4 and figures["in_flight"] == 0
    assert [row["step"] for row in read_rows(folder)] == list(range(steps))


MOMENTS = {"before the first batch": 0, "before the first checkpoint": 3, "in the middle": 16, "late": 45}
"""Moment -> number of trained steps at which the run is killed; 0: as soon as it has a journal."""


def test_kill_9_at_any_moment_then_resume(tmp_path):
    """One run, killed at each moment in turn: each process but the first resumes what was killed before."""
    folder = tmp_path / "run"
    process = begin(folder, "run.steps=60", "trainer.checkpoint_every=13")
    wait_until((folder / "journal.sqlite").exists, process)
    killed = []
    for moment, count in MOMENTS.items():
        if count:
            process = begin_again(folder)
            at_least = max(count, len(killed[-1]) + 1)  # this process has trained, too
            wait_until(lambda at_least=at_least: len(read_rows(folder)) >= at_least, process)
        process.kill()
        process.wait()
        assert audit_run(folder).ok, moment
        killed.append(read_rows(folder))
    resumed = call("resume", str(folder), "--json")
    assert resumed.returncode == 0, resumed.stderr
    assert json.loads(resumed.stdout)["steps"] == 60
    for before in killed:
        kept = max(len(before) - 1, 0)
        assert read_rows(folder)[:kept] == before[:kept]
    check_whole(folder, 60)
    # The first kill may come before the journal's first event: then the next process records no RunResumed.
    assert sum(trained > 0 for trained in trained_at_resumptions(folder)) == len(MOMENTS) - 1


def trained_at_resumptions(folder: Path) -> list[int]:
    """Number of batches that were trained before each RunResumed of the journal."""
    with open_journal(folder) as journal:
        events = [row.event for row in journal.rows()]
    trained = list(accumulate(isinstance(event, BatchTrained) for event in events))
    return [count for event, count in zip(events, trained, strict=True) if isinstance(event, RunResumed)]


ETA_0_STEPS = 22
ETA_0 = (f"run.steps={ETA_0_STEPS}", "control.max_staleness=0", "trainer.checkpoint_every=6")


@pytest.fixture(scope="module")
def untouched(tmp_path_factory):
    """Settings -> rows of a run at eta 0 that nothing kills; equal settings share one run."""

    @cache
    def rows(*words: str) -> list[dict]:
        folder = tmp_path_factory.mktemp("untouched") / "run"
        assert begin(folder, *ETA_0, *words).wait(3 * HANG_S) == 0
        return read_rows(folder)

    return rows


@pytest.mark.parametrize(
    "extra",
    [
        ["weights.backend=memory"],
        pytest.param(["weights.backend=orbax"], marks=pytest.mark.soak),
        pytest.param(CRITIC, marks=pytest.mark.soak),
        pytest.param(LORA, marks=pytest.mark.soak),
    ],
)
def test_at_eta_0_a_killed_run_ends_with_the_same_bits_as_an_untouched_one(tmp_path, untouched, extra):
    """The backend is no part of what a run computes: both share one untouched run, of the default backend."""
    folder, of_backend = tmp_path / "killed", extra[0].startswith("weights.backend=")
    process = begin(folder, *ETA_0, *extra)
    wait_until(lambda: len(read_rows(folder)) >= 8, process)
    process.kill()
    process.wait()
    assert call("resume", str(folder)).returncode == 0
    rows = (untouched(*(() if of_backend else extra)), read_rows(folder))
    of_critic = ("kl_coef", "value_loss", "critic_grad_norm") if extra is CRITIC else ()
    for name in ("params_digest", *of_critic):
        whole, killed = ([row[name] for row in each] for each in rows)
        assert whole == killed and len(whole) == ETA_0_STEPS


def test_a_second_process_cannot_resume_a_run_in_progress(tmp_path):
    folder = tmp_path / "run"
    process = begin(folder, "run.steps=100000")
    try:
        wait_until(lambda: len(read_rows(folder)) >= 2, process)
        second = call("resume", str(folder))
        assert second.returncode == 1 and str(process.pid) in second.stderr
        process.send_signal(signal.SIGINT)
        assert process.wait(3 * HANG_S) == 130
    finally:
        process.kill()
    assert audit_run(folder).ok
    steps = len(read_rows(folder))
    assert 2 <= steps < 100_000
    with open_journal(folder) as journal:
        trained = [row.event.step for row in journal.rows() if isinstance(row.event, BatchTrained)]
    assert trained == list(range(steps))  # Ctrl-C leaves a checkpoint of the newest: nothing to train again
    assert (folder / "checkpoints" / str(steps) / "manifest.json").exists()


def flip_one_byte(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def test_a_damaged_checkpoint_is_refused_by_name_and_the_one_before_gives_the_same_bits(tmp_path):
    folder = tmp_path / "run"
    process = begin(folder, "run.steps=9", "trainer.checkpoint_every=3", "trainer.keep_checkpoints=3")
    assert process.wait(3 * HANG_S) == 0
    last = [row["params_digest"] for row in read_rows(folder)]
    flip_one_byte(folder / "checkpoints" / "9" / "state" / "params.embedding" / "0.0")
    resumed = call("resume", str(folder), "run.steps=10")
    assert resumed.returncode == 0, resumed.stderr
    assert "refused: checkpoint" in resumed.stdout and "checkpoints/9" in resumed.stdout
    assert "training steps 6 to 8 again" in resumed.stdout and "again with digest" not in resumed.stdout
    assert [row["params_digest"] for row in read_rows(folder)][:9] == last
    check_whole(folder, 10)
