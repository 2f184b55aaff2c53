"""Slurm itself, with the run's real processes: launchers/ is submitted, cancelled and submitted again."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from areal_jax.observe.metrics import read_rows
from areal_jax.replay.folder_audit import audit_run
from areal_jax.weights.manifest import committed
from tests.cluster.agents import QUIET, pids_of, wait_until
from tests.cluster.slurm import DEADLINE_S, Clusters, Slurm
from tests.ports import reserved_ports

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
ATTEMPTS = 3
OVER = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL")
PATH = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
GROUPS = 16


@pytest.fixture(scope="module")
def clusters(tmp_path_factory):
    clusters = Clusters(lambda: tmp_path_factory.mktemp("slurm"))
    yield clusters
    clusters.close()


def on_a_cluster(test: Callable[[Slurm, Path, int], None]) -> Callable[..., None]:
    """The test, given a cluster, a run's folder and a port; again on a new cluster where a daemon crashed."""

    def attempts(clusters: Clusters, tmp_path: Path) -> None:
        for number in range(ATTEMPTS):
            slurm = clusters.sound()
            with reserved_ports(2) as ports:
                try:
                    return test(slurm, tmp_path / str(number) / "run", ports[0])
                except Exception:
                    if not slurm.crashed() or number == ATTEMPTS - 1:
                        raise

    attempts.__name__, attempts.__doc__ = test.__name__, test.__doc__
    return attempts


def words_of(folder: Path, port: int, steps: int, *words: str) -> list[str]:
    """A run of which trainer and host do not fit on one node; it checkpoints only when it ends."""
    small = [f"run.steps={steps}", "trainer.checkpoint_every=1000", f"launch.port={port}", *QUIET]
    return ["configs/quickstart.yaml", f"run.dir={folder}", "launch.machine_devices=1", *small, *words]


def sbatch(slurm: Slurm, folder: Path, *words: str) -> str:
    """Submit by hand, as launchers/README.md says; the job's number."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    env = {**slurm.env, "PATH": PATH}
    asked = ["sbatch", "--parsable", f"--output={folder}.out", *words]
    done = subprocess.run(
        asked, cwd=ROOT, env=env, capture_output=True, text=True, timeout=DEADLINE_S, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip().partition(";")[0]


def launch(slurm: Slurm, words: list[str], *options: str) -> str:
    """Submit by `areal-jax launch slurm`; the job's number."""
    program = [sys.executable, "-m", "areal_jax.cli.main", "launch", "slurm", *words, "--", *options]
    env = {**slurm.env, "PATH": PATH}
    done = subprocess.run(
        program, cwd=ROOT, env=env, capture_output=True, text=True, timeout=DEADLINE_S, check=False
    )
    assert done.returncode == 0, done.stderr
    return re.findall(r"\d+", done.stdout.splitlines()[0])[0]


def await_rows(slurm: Slurm, job: str, folder: Path, count: int) -> None:
    def are_there() -> bool:
        assert slurm.state(job) not in OVER, log(folder)
        return len(read_rows(folder)) >= count

    wait_until(are_there, [], folder)


def log(folder: Path) -> str:
    """What the job printed, and the agents in it."""
    logs = [Path(f"{folder}.out"), *(folder / "logs").glob("slurm-*.log")]
    return "\n".join(path.read_text()[-20000:] for path in logs if path.exists())


def check_complete(folder: Path, steps: int) -> None:
    audit = audit_run(folder)
    assert audit.ok and audit.trained == steps * GROUPS and audit.in_flight == 0
    assert [row["step"] for row in read_rows(folder)] == list(range(steps))
    assert committed(folder / "checkpoints")[-1] == steps
    assert pids_of(folder) == {}


@on_a_cluster
def test_a_script_submitted_by_hand_is_cancelled_and_goes_on_when_it_is_submitted_again(
    slurm: Slurm, folder: Path, port: int
):
    """On two nodes. scancel's SIGTERM reaches the trainer, and its checkpoint commits within KillWait."""
    steps = 16
    again = ["--nodes=2", "launchers/slurm.sbatch", *words_of(folder, port, steps)]
    job = sbatch(slurm, folder, *again)
    await_rows(slurm, job, folder, 4)
    secret = folder / "launch" / "secret"
    assert secret.stat().st_mode & 0o777 == 0o600
    slurm.call("scancel", job)
    assert slurm.wait_for(job, *OVER) == "CANCELLED"
    wait_until(lambda: pids_of(folder) == {}, [], folder)
    rows = len(read_rows(folder))
    assert rows < steps and committed(folder / "checkpoints")[-1] >= rows, log(folder)
    said = f"job {job} was cancelled; submit the same command again to continue the run"
    wait_until(lambda: said in log(folder), [], folder)
    assert "scancel: error" not in log(folder)
    job = sbatch(slurm, folder, *again)
    assert slurm.wait_for(job, *OVER) == "COMPLETED", log(folder)
    check_complete(folder, steps)
    assert not any(secret.read_text() in path.read_text() for path in (folder / "logs").glob("*.log"))


@pytest.mark.soak
@on_a_cluster
def test_a_launched_job_of_two_components_survives_a_killed_trainer_and_finishes(
    slurm: Slurm, folder: Path, port: int
):
    """Two trainer processes on two nodes, and a host on a third, which pulls weights from the trainer."""
    steps = 10
    two = [
        "trainer.mesh.fsdp=2",
        "runtime.trainer_processes=2",
        "weights.backend=transfer",
    ]
    one = "--cpus-per-task=2"
    job = launch(slurm, words_of(folder, port, steps, *two), one, "--comment=a", ":", one, "--comment=b")
    await_rows(slurm, job, folder, 3)
    os.kill(pids_of(folder)["trainer-1"], signal.SIGKILL)
    assert slurm.wait_for(job, *OVER) == "COMPLETED", log(folder)
    check_complete(folder, steps)
    printed = log(folder)
    assert "trainer-1 was killed by SIGKILL; trainer-1 starts again" in printed
    # Trainer-0 starts again too: its agent hears of the failure, or trainer-0 loses its connection first.
    assert re.search(r"(on another machine failed|trainer-0 [^;\n]+); trainer-0 starts again", printed)
    for name in ("trainer-0", "trainer-1"):
        assert printed.count(f"; {name} starts again") == 1, printed


@pytest.mark.soak
@on_a_cluster
def test_a_job_whose_time_is_nearly_over_is_requeued_and_goes_on(slurm: Slurm, folder: Path, port: int):
    """Slurm's warning is the signal that #SBATCH --signal names."""
    steps = 20
    job = sbatch(slurm, folder, "--nodes=2", "launchers/slurm.sbatch", *words_of(folder, port, steps))
    await_rows(slurm, job, folder, 4)
    slurm.call("scancel", "--batch", "--signal=USR1", job)
    assert slurm.wait_for(job, "PENDING", *OVER) == "PENDING", log(folder)
    assert committed(folder / "checkpoints")[-1] >= len(read_rows(folder)) < steps
    finish_again(slurm, job, folder, steps)


@pytest.mark.soak
@on_a_cluster
def test_a_job_that_loses_a_node_is_requeued_and_goes_on(slurm: Slurm, folder: Path, port: int):
    """The node of the generation host; Slurm itself ends the job and requeues it."""
    steps = 20
    job = sbatch(slurm, folder, "--nodes=2", "launchers/slurm.sbatch", *words_of(folder, port, steps))
    await_rows(slurm, job, folder, 4)
    slurm.call("scontrol", "update", "NodeName=n2", "State=DOWN", "Reason=lost")
    assert slurm.wait_for(job, "PENDING", *OVER) == "PENDING", log(folder)
    finish_again(slurm, job, folder, steps)


def finish_again(slurm: Slurm, job: str, folder: Path, steps: int) -> None:
    """Start a requeued job without Slurm's two minutes of waiting, and see it finish the run.

    A few seconds later: a node refuses the credential of a job that starts in the second of its requeue.
    """
    assert "Restarts=1" in slurm.call("scontrol", "show", "job", job) and len(read_rows(folder)) < steps
    wait_until(lambda: pids_of(folder) == {}, [], folder)
    # A node that Slurm still clears is completing; one that was lost is down.
    wait_until(lambda: set(slurm.node_states()) <= {"idle", "down", "down*"}, [], folder)
    slurm.call("scontrol", "update", f"JobId={job}", "StartTime=now+3")
    assert slurm.wait_for(job, *OVER) == "COMPLETED", log(folder)
    check_complete(folder, steps)
