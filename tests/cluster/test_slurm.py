"""Slurm itself: what `launch slurm` submits is queued, runs, is watched, cancelled, and goes on."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from areal_jax.runtime.reading import audit_run
from tests.cluster.slurm import Clusters, Slurm, free_ports

pytestmark = pytest.mark.cluster

ROOT = Path(__file__).parents[2]
ATTEMPTS = 3
OVER = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL")
STAND_IN = f"launch.setup=export PATH={Path(__file__).parent}:$PATH"
"""Finds the stand-in for areal-jax that lies here: these tests are of the scripts."""


@pytest.fixture(scope="module")
def clusters(tmp_path_factory):
    clusters = Clusters(lambda: tmp_path_factory.mktemp("slurm"))
    yield clusters
    clusters.close()


def on_a_cluster(test: Callable[[Slurm, Path], None]) -> Callable[..., None]:
    """The test, told a cluster and its run's folder; again on a new one where a daemon of Slurm's crashed."""

    def attempts(clusters: Clusters, tmp_path: Path) -> None:
        for number in range(ATTEMPTS):
            slurm = clusters.sound()
            try:
                return test(slurm, tmp_path / str(number) / "run")
            except Exception:
                if not slurm.crashed() or number == ATTEMPTS - 1:
                    raise

    attempts.__name__, attempts.__doc__ = test.__name__, test.__doc__
    return attempts


def launch(slurm: Slurm, *words: str) -> list[str]:
    """Submit; the jobs' numbers."""
    program = [sys.executable, "-m", "areal_jax.cli.main", "launch", "slurm", *words]
    program += ["launch.accelerator=cpu", "launch.cpus=2", f"launch.port={free_ports(2)[0]}"]
    done = subprocess.run(
        program, cwd=ROOT, env=dict(slurm.env), capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    return re.findall(r"\d+", done.stdout.splitlines()[0])


def fresh(folder: Path, *words: str) -> list[str]:
    """Of a run whose trainer and hosts do not fit on one node."""
    return ["configs/quickstart.yaml", f"run.dir={folder}", "launch.machine_devices=1", *words]


def begin(slurm: Slurm, folder: Path, *words: str, failures: Mapping[str, int] | None = None) -> list[str]:
    """Submit stand-ins; each named process dies so many times."""
    jobs = launch(slurm, *words, STAND_IN)
    for name, count in (failures or {}).items():
        (folder / f"{name}.fails").write_text(str(count))
    (folder / "begin").touch()
    return jobs


def log(folder: Path, name: str) -> str:
    path = folder / "logs" / f"{name}.log"
    return path.read_text() if path.exists() else ""


def wait_for_text(folder: Path, name: str, text: str, timeout_s: float = 60) -> None:
    end_s = time.monotonic() + timeout_s
    while text not in log(folder, name):
        assert time.monotonic() < end_s, f"{name} says no {text!r}: {log(folder, name)[-2000:]}"
        time.sleep(0.2)


def told(folder: Path, name: str) -> list[tuple[str, str]]:
    """(node, arguments) of each time that a process started."""
    return re.findall(r"^(n\d) (role .*)$", log(folder, name), re.MULTILINE)


@on_a_cluster
def test_a_heterogeneous_job_starts_every_process_where_it_belongs_and_ends_with_the_controller(
    slurm: Slurm, folder: Path
):
    two = ["trainer.mesh.fsdp=2", "runtime.trainer_processes=2", "runtime.hosts=1", "run.name=two-trainers"]
    (job,) = begin(slurm, folder, *fresh(folder, *two))
    slurm.wait_for(job, "RUNNING")
    wait_for_text(folder, "generate-0", "role generate")
    (folder / "enough").touch()
    assert slurm.wait_for(job, *OVER) == "COMPLETED"
    nodes = {name: told(folder, name)[0][0] for name in ("controller", "reward-0", "generate-0")}
    assert nodes["controller"] == nodes["reward-0"] != nodes["generate-0"]
    trainers = told(folder, "trainer")
    assert len({node for node, _ in trainers} | {nodes["generate-0"]}) == 3
    first = next(words for node, words in trainers if node == nodes["controller"])
    assert "--name=trainer-0 --index=0" in first and "--processes=2" in first
    assert {re.search(r"--index=(\d)", words)[1] for _, words in trainers} == {"0", "1"}
    assert len({re.search(r"--coordinator=(\S+)", words)[1] for _, words in trainers}) == 1
    assert "ready to exit" in log(folder, "redis")  # it was asked, not killed
    secret = (folder / "launch" / "secret").read_text()
    assert not any(secret in path.read_text() for path in (folder / "logs").iterdir())


@on_a_cluster
def test_what_dies_starts_again_and_the_trainers_processes_do_so_together(slurm: Slurm, folder: Path):
    two = ["trainer.mesh.fsdp=2", "runtime.trainer_processes=2"]
    words = fresh(folder, *two)
    begin(slurm, folder, *words, failures={"trainer-1": 1, "generate-0": 2})
    wait_for_text(folder, "generate-0", "role generate")
    end_s = time.monotonic() + 60
    while len(told(folder, "generate-0")) < 3 or len(told(folder, "trainer")) < 4:
        assert time.monotonic() < end_s, log(folder, "trainer")
        time.sleep(0.2)
    (folder / "enough").touch()
    job = next((folder / "logs").glob("slurm-*.log")).stem.removeprefix("slurm-")
    assert slurm.wait_for(job, *OVER) == "COMPLETED"
    assert len(told(folder, "controller")) == 1
    assert log(folder, "trainer").count("is done") == 2
    assert "trainer ended with" in log(folder, f"slurm-{job}") and "(failure 1)" in log(
        folder, f"slurm-{job}"
    )


@on_a_cluster
def test_a_job_fails_with_a_trainer_that_cannot_be_kept_and_leaves_nobody(slurm: Slurm, folder: Path):
    (job,) = begin(slurm, folder, *fresh(folder, "launch.restarts=1"), failures={"trainer-0": 9})
    assert slurm.wait_for(job, *OVER) == "FAILED"
    assert "trainer-0 ended with 137 (failure 2)" in log(folder, f"slurm-{job}")
    assert "generate-0 was asked to end" in log(folder, "generate-0")
    assert slurm.call("squeue", "--noheader", "--steps").strip() == ""


@on_a_cluster
def test_scancel_asks_every_process_to_end_and_the_run_goes_on_in_another_job(slurm: Slurm, folder: Path):
    (job,) = begin(slurm, folder, *fresh(folder))
    slurm.wait_for(job, "RUNNING")
    for name in ("controller", "trainer-0", "generate-0", "reward-0"):
        wait_for_text(folder, name, f"--name={name}")
    time.sleep(1)  # past their first words to Redis
    slurm.call("scancel", job)
    assert slurm.wait_for(job, *OVER) == "CANCELLED"
    for name in ("controller", "trainer-0", "generate-0", "reward-0"):
        wait_for_text(folder, name, f"{name} was asked to end")
    secret = (folder / "launch" / "secret").read_text()
    (again,) = begin(slurm, folder, str(folder), "run.steps=9")
    (folder / "enough").touch()
    assert slurm.wait_for(again, *OVER) == "COMPLETED"
    assert (folder / "launch" / "secret").read_text() == secret
    assert told(folder, "controller")[-1][1].endswith("run.steps=9")


@on_a_cluster
def test_two_plain_jobs_find_each_other_and_end_together(slurm: Slurm, folder: Path):
    trainer, hosts = begin(slurm, folder, *fresh(folder, "launch.plain=true", "runtime.hosts=2"))
    wait_for_text(folder, "generate-1", "role generate")
    (folder / "enough").touch()
    assert slurm.wait_for(trainer, *OVER) == "COMPLETED"
    assert slurm.wait_for(hosts, *OVER) == "COMPLETED"
    assert {told(folder, f"generate-{i}")[0][0] for i in (0, 1)}.isdisjoint(
        {told(folder, "controller")[0][0]}
    )


@on_a_cluster
def test_the_hosts_job_does_not_outlive_a_trainers_job_that_failed(slurm: Slurm, folder: Path):
    words = fresh(folder, "launch.plain=true", "launch.restarts=0")
    trainer, hosts = begin(slurm, folder, *words, failures={"trainer-0": 9})
    assert slurm.wait_for(trainer, *OVER) == "FAILED"
    assert slurm.wait_for(hosts, *OVER) in ("CANCELLED", "FAILED")


@on_a_cluster
def test_a_run_trains_is_cancelled_in_the_middle_and_goes_on_to_its_end(slurm: Slurm, folder: Path):
    """The real processes, on two nodes."""
    steps = 12
    small = ["observe.tensorboard=false", "observe.report=false", "trainer.checkpoint_every=4"]
    program = f"launch.setup=export PATH={Path(sys.executable).parent}:$PATH"
    (job,) = launch(slurm, *fresh(folder, f"run.steps={steps}", *small, program))
    wait_for_text(folder, "controller", "step 6/", timeout_s=240)
    slurm.call("scancel", job)
    assert slurm.wait_for(job, *OVER) == "CANCELLED"
    assert len((folder / "metrics.jsonl").read_text().splitlines()) < steps
    (again,) = launch(slurm, str(folder))
    assert slurm.wait_for(again, *OVER, timeout_s=240) == "COMPLETED", slurm.logs()
    audit = audit_run(folder)
    assert audit.ok and audit.trained == steps * 16 and audit.in_flight == 0
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == list(range(steps))
