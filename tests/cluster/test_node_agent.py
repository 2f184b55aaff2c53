"""Agents of several machines: what each starts, how they find each other, restart together and end."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from areal_jax.cluster.launched import Launch, read
from areal_jax.cluster.node_agent import ONLY, plan_of, units_of
from areal_jax.cluster.placement import LaunchError
from areal_jax.cluster.rendezvous import AwayError, Meeting, Place, find, lead, place
from areal_jax.observe.metrics import read_rows
from areal_jax.replay.folder_audit import audit_run
from tests.cluster.agents import QUIET, agents, pids_of, said, wait_until
from tests.ports import reserved_ports
from tests.programs import require
from tests.redis_servers import SECRET

slow = pytest.mark.slow

TWO_TRAINERS = [
    "trainer.mesh.fsdp=2",
    "runtime.trainer_processes=2",
    "runtime.hosts=1",
    "launch.machine_devices=1",
    "launch.accelerator=cpu",
]


def launch_of(folder: Path, *words: str) -> Launch:
    return read(["configs/quickstart.yaml", f"run.dir={folder}", *words])


def test_each_rank_keeps_the_processes_of_its_machine(tmp_path):
    launch = launch_of(tmp_path / "run", *TWO_TRAINERS)
    meeting = Meeting("redis://127.0.0.1:1/0", "x", 0, "token", "127.0.0.1:7601", SECRET)
    kept = {}
    for rank in range(3):
        plan = plan_of(launch.config, Place(rank, 3, ""))
        units = units_of(plan, rank, launch, meeting)
        kept[rank] = [command.name for unit in units for command in unit.commands]
        for unit in units:
            is_controller = unit.name == "controller"
            assert (unit.is_needed, unit.ends_run) == (is_controller or unit.is_group, is_controller)
            assert unit.is_group == unit.name.startswith("trainer")
            assert all(command.env["AREAL_JAX_SECRET"] == SECRET for command in unit.commands)
            assert all(SECRET not in word for command in unit.commands for word in command.words)
    assert kept == {0: ["controller", "reward-0", "trainer-0"], 1: ["trainer-1"], 2: ["generate-0"]}


def test_a_rank_is_as_given_else_as_the_scheduler_says():
    slurm = {"SLURM_PROCID": "3", "SLURM_STEP_NUM_TASKS": "5", "SLURM_LAUNCH_NODE_IPADDR": "127.0.0.1"}
    assert place(None, 0, None, "", slurm) == Place(3, 5, "127.0.0.1")
    assert place(1, 0, 2, "10.0.0.9", slurm) == Place(1, 2, "10.0.0.9")
    pod = {"JOB_COMPLETION_INDEX": "1"}
    assert place(None, 2, None, "10.0.0.9", pod) == Place(3, None, "10.0.0.9")
    assert place(None, 0, None, "", {}) == ONLY
    elsewhere = {**slurm, "SLURM_LAUNCH_NODE_IPADDR": "198.51.100.7"}  # srun ran on a login node
    assert place(None, 0, None, "", elsewhere).address != "198.51.100.7"


def test_a_job_of_another_size_than_the_config_needs_is_refused_with_the_size(tmp_path):
    config = launch_of(tmp_path / "run", *TWO_TRAINERS).config
    with pytest.raises(
        LaunchError, match=r"needs 3 machines of 1 accelerators each .*, but the job has 2.*--nodes=3"
    ):
        plan_of(config, Place(0, 2, ""))
    with pytest.raises(LaunchError, match=r"needs 3 machines"):
        plan_of(config, Place(3, None, ""))


def test_gpus_are_those_that_the_scheduler_gave(tmp_path, monkeypatch):
    words = ["trainer.mesh.fsdp=2", "runtime.hosts=1", "launch.accelerator=gpu"]
    launch = launch_of(tmp_path / "run", *words)
    meeting = Meeting("redis://127.0.0.1:1/0", "x", 0, "token", "127.0.0.1:7601", SECRET)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,7")
    units = units_of(plan_of(launch.config, ONLY), 0, launch, meeting)
    seen = {
        command.name: command.env.get("CUDA_VISIBLE_DEVICES") for unit in units for command in unit.commands
    }
    assert (seen["trainer-0"], seen["generate-0"], seen["controller"]) == ("4,5", "7", None)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5")
    with pytest.raises(
        LaunchError, match=r"machine 0 has 2 GPUs, but its processes need 3.*launch.accelerator=cpu"
    ):
        plan_of(launch.config, ONLY)


@slow
def test_two_failures_of_one_generation_raise_it_once_and_an_emptied_redis_loses_none(tmp_path, redis_at):
    (tmp_path / "launch").mkdir()
    (tmp_path / "launch" / "secret").write_text(redis_at.secret)
    head = lead(tmp_path, redis_at.url, "x", "127.0.0.1:1", redis_at.secret)
    other = find(tmp_path, "x", 1, 5)
    assert other.coordinator == "127.0.0.1:1"
    assert [meeting.next_generation(0) for meeting in (head, other)] == [1, 1]
    assert other.next_generation(1) == 2
    assert head.situation().generation == 2 and head.situation().agents == {1}
    head.close()
    assert other.next_generation(2) == 3
    head.end(1)
    assert other.situation().status == 1


@slow
def test_an_address_of_an_earlier_head_is_not_taken_for_the_present_one(tmp_path, redis_at):
    (tmp_path / "launch").mkdir()
    (tmp_path / "launch" / "secret").write_text(redis_at.secret)
    with pytest.raises(
        LaunchError, match=r"rank 1 found no head .* within 1 s through .*the file is missing"
    ):
        find(tmp_path, "y", 1, 1)
    head = lead(tmp_path, redis_at.url, "y", "127.0.0.1:1", redis_at.secret)
    stale = (tmp_path / "launch" / "head.json").read_text()
    lead(tmp_path, redis_at.url, "y", "127.0.0.1:2", redis_at.secret)
    assert find(tmp_path, "y", 1, 5).coordinator == "127.0.0.1:2"
    (tmp_path / "launch" / "head.json").write_text(stale)
    with pytest.raises(LaunchError, match=r"belongs to another launch"):
        find(tmp_path, "y", 1, 1)
    assert head.situation().token != head.token
    gone = Meeting("redis://127.0.0.1:1/0", "y", 1, "token", "", SECRET)
    with pytest.raises(AwayError):
        gone.situation()


# --- real processes -----------------------------------------------------------------------------------------


def run_words(steps: int, port: int, *words: str) -> list[str]:
    small = [f"run.steps={steps}", "trainer.checkpoint_every=1000", "trainer.supervised.steps=0"]
    small += [f"launch.port={port}", *QUIET]
    return ["--config=configs/quickstart.yaml", *TWO_TRAINERS, *small, *words]


@pytest.mark.soak
@pytest.mark.alone
def test_a_group_whose_member_is_killed_starts_again_on_every_machine_within_a_minute(tmp_path):
    """kill -9 of the second machine's member: the run goes on, and nothing is trained twice."""
    require("redis-server")
    folder, steps = tmp_path / "run", 14
    started_s = time.monotonic()
    with reserved_ports(2) as ports, agents(folder, 3, *run_words(steps, ports[0])) as running:
        wait_until(lambda: len(read_rows(folder)) >= 4, running, folder)
        before, rows = pids_of(folder), len(read_rows(folder))
        killed_s = time.monotonic()
        os.kill(before["trainer-1"], signal.SIGKILL)
        wait_until(lambda: len(read_rows(folder)) > rows + 4, running, folder)
        # A minute on a machine that starts the run within 30 s; the start measures a slower machine.
        assert time.monotonic() - killed_s < max(60, 2 * (killed_s - started_s))
        now = pids_of(folder)
        assert all(now[name] != before[name] for name in ("trainer-0", "trainer-1"))
        assert all(now[name] == before[name] for name in ("controller", "generate-0", "reward-0"))
        wait_until(lambda: all(agent.poll() == 0 for agent in running), running, folder)
    # The other member ends by the group's generation, or by its own collective that lost its peer.
    assert "trainer-0 starts again" in said(folder) and "trainer-1 starts again" in said(folder)
    audit = audit_run(folder)
    assert audit.ok and audit.trained == steps * 16 and audit.in_flight == 0
    assert [row["step"] for row in read_rows(folder)] == list(range(steps))
    assert pids_of(folder) == {}
