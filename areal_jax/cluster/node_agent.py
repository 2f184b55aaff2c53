"""The node agent of a machine: starts its processes of a run, and restarts them until the run ends.

Every launcher (Slurm, Kubernetes, ...) starts one agent per machine. The agent of rank 0, the head, also
writes the run's folder, starts Redis unless runtime.redis is set, and publishes the address of Redis; the
other agents wait for the address. Agents communicate only through the run's folder and Redis.
"""

from __future__ import annotations

import shlex
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TextIO

from areal_jax.assembly.gpus import visible_gpus
from areal_jax.cluster.launched import Launch, write
from areal_jax.cluster.placement import PROGRAM, LaunchError, Plan, Process, environment, make_plan, words_of
from areal_jax.cluster.redis_server import free_port, redis_server
from areal_jax.cluster.rendezvous import POLL_S, AwayError, Meeting, Place, find, lead
from areal_jax.cluster.supervisor import GRACE_S, MOVED, ChildProcess, Supervisor, Unit
from areal_jax.config.tree import Config
from areal_jax.secret import VARIABLE
from areal_jax.trajectories.lock import WriterLock
from areal_jax.weights.folder import cleaned_weights

ONLY = Place(0, 1, "127.0.0.1")
"""Rank, number of machines and address for a run on a single machine."""
LOCKED_S = 120.0
"""Seconds that an agent of rank 0 (the head) waits for the lock of an earlier head: a file system may release
the lock of a lost machine late.
"""


def run_node(launch: Launch, place: Place, out: TextIO) -> int:
    """Runs this machine's processes until the run ends; returns the run's exit status.

    `place`: this machine's rank and address. `out`: where the processes' output is printed. Raises
    LaunchError if the config does not fit the run's machines; on rank 0 if another agent of rank 0 drives the
    run; on other ranks if rank 0 publishes no address of Redis within MEET_S seconds.
    """
    plan = plan_of(launch.config, place)
    if place.rank == 0:
        return _run_head(launch, plan, place, out)
    while True:
        meeting = find(launch.folder, launch.config.run.name, place.rank)
        status = _supervise(launch, plan, out, meeting)
        if status != MOVED:  # else a new head leads the run: find it and start again
            return status


def _run_head(launch: Launch, plan: Plan, place: Place, out: TextIO) -> int:
    is_alone = plan.machines == 1
    with (
        _only_head(launch.folder, 0.0 if is_alone else LOCKED_S),
        cleaned_weights(launch.config, launch.folder),
    ):
        # Redis ends after the processes, which report their end through it, and after the other agents know.
        secret = write(launch)
        with _redis(launch, plan, place, secret) as (url, tend):
            port = free_port(place.address) if is_alone else launch.config.launch.port + 1
            coordinator = f"{place.address}:{port}"
            meeting = lead(launch.folder, url, launch.config.run.name, coordinator, secret)
            status = _supervise(launch, plan, out, meeting, tend)
            _await_agents(meeting, tend)
            return status


def plan_of(config: Config, place: Place) -> Plan:
    """Returns the placement of the run's processes on its machines.

    Raises LaunchError if the number of machines is not the one that the config needs, or if this machine
    (`place`) has too few GPUs.
    """
    wanted, gpus = config.launch.accelerator, visible_gpus()
    if wanted == "auto":  # in a run on several machines, one without GPUs must not use CPUs
        wanted = "gpu" if gpus or place.machines != 1 else "cpu"
    plan = make_plan(config, wanted, one_machine=place.machines == 1)
    if (place.machines or plan.machines) != plan.machines or place.rank >= plan.machines:
        raise LaunchError(
            f"this config needs {plan.machines} machines of {config.launch.machine_devices} accelerators "
            f"each (launch.machine_devices), but the job has {place.machines or place.rank + 1} machines: "
            f"request {plan.machines} from the scheduler (Slurm: sbatch --nodes={plan.machines}), or change "
            "trainer.mesh, runtime.hosts or launch.machine_devices"
        )
    needed = plan.devices_on(place.rank)
    if plan.accelerator == "gpu" and needed > len(gpus):
        raise LaunchError(
            f"machine {place.rank} has {len(gpus)} GPUs, but its processes need {needed} (devices of "
            f"the trainer: {config.trainer_devices}; runtime.hosts={config.runtime.hosts} with "
            f"runtime.host_tensor={config.runtime.host_tensor} each). Reduce these settings; or use one GPU "
            "(`areal-jax run` with runtime.placement=shared), or CPUs (launch.accelerator=cpu)"
        )
    return plan


def units_of(plan: Plan, rank: int, launch: Launch, meeting: Meeting) -> list[Unit]:
    """Returns the units of machine `rank`; a unit holds the commands of processes that restart together.

    The trainer's processes on this machine are one unit, which restarts together with the trainer's processes
    on other machines. Every other process is a unit of its own. `meeting` contains the addresses of Redis and
    of trainer process 0, and the secret, which the commands need.
    """
    # The secret goes through the environment: every user of the machine can see arguments.
    env = {VARIABLE: meeting.secret}
    gpus = visible_gpus() if plan.accelerator == "gpu" else []

    def command(process: Process) -> ChildProcess:
        words = words_of(process, plan, launch.effective, launch.folder, meeting.coordinator, meeting.url)
        return ChildProcess(process.name, tuple(words), {**environment(plan, process, gpus), **env})

    here = plan.on(rank)
    trainers = tuple(command(process) for process in here if process.role == "trainer")
    units = [
        Unit((command(process),), ends_run=process.role == "controller")
        for process in here
        if process.role != "trainer"
    ]
    return [*units, Unit(trainers, is_group=True)] if trainers else units


def describe(plan: Plan, launch: Launch) -> str:
    """Returns the shell commands of all processes of the run, as --dry-run prints them.

    In these commands, HEAD and PORT stand for the address of rank 0's machine and for ports there.
    """
    lines = [] if launch.config.runtime.redis else ["redis-server, with the run's secret as its password"]
    address = launch.config.runtime.redis or "redis://HEAD:PORT/0"
    for process in plan.processes:
        words = words_of(process, plan, launch.effective, launch.folder, "HEAD:PORT", address)
        env = [f"{key}={value}" for key, value in environment(plan, process).items()]
        where = f"# machine {process.machine}\n" if plan.machines > 1 else ""
        lines.append(where + shlex.join(["env", *env, "areal-jax", *words[len(PROGRAM) :]]))
    return "\n".join(lines)


# --- inside -------------------------------------------------------------------------------------------------


def _supervise(
    launch: Launch, plan: Plan, out: TextIO, meeting: Meeting, tend: Callable[[], None] = lambda: None
) -> int:
    """Runs the processes of this machine until the run ends, and returns the result of `Supervisor.run`.

    `tend()` is called again and again until then, and restarts Redis if it has ended.
    """
    units, logs = units_of(plan, meeting.rank, launch, meeting), launch.folder / "logs"
    restarts, away_s = launch.config.launch.restarts, launch.config.runtime.deadline_s
    return Supervisor(units, logs, out, restarts, meeting, tend=tend, away_s=away_s).run()


@contextmanager
def _only_head(folder: Path, wait_s: float) -> Iterator[None]:
    """Holds the lock of the run's head (the agent of rank 0) while the block runs.

    Without the lock, two heads could start two Redis servers and two controllers. Raises LaunchError if
    another head still has the lock after `wait_s` seconds.
    """
    (folder / "launch").mkdir(parents=True, exist_ok=True)
    lock, end_s = WriterLock(folder / "launch" / "head"), time.monotonic() + wait_s
    while (holder := lock.acquire()) is not None:
        if time.monotonic() >= end_s:
            raise LaunchError(
                f"another node agent ({holder}) already runs the run in {folder}; wait until that process "
                "ends, or stop it, then start this command again"
            )
        time.sleep(POLL_S)
    try:
        yield
    finally:
        lock.release()


@contextmanager
def _redis(launch: Launch, plan: Plan, place: Place, secret: str) -> Iterator[tuple[str, Callable[[], None]]]:
    """Yields the url of the run's Redis, and a function that restarts Redis if it has ended.

    If runtime.redis is not set, starts a redis-server, which ends with the block. If it is set, the yielded
    function does nothing.
    """
    if launch.config.runtime.redis is not None:
        yield launch.config.runtime.redis, lambda: None
        return
    # On one machine any free port will do, so that several runs can share the machine.
    port = 0 if plan.machines == 1 else launch.config.launch.port
    with redis_server(launch.folder / "redis", port, address=place.address, secret=secret) as server:
        yield server.url, server.tend


def _await_agents(meeting: Meeting, tend: Callable[[], None]) -> None:
    """Waits until all other node agents have ended, for at most GRACE_S seconds.

    Meanwhile `tend()` restarts Redis if it has ended. Deletes the state that the agents share in Redis,
    unless another agent is still running after GRACE_S seconds.
    """
    end_s = time.monotonic() + GRACE_S
    while time.monotonic() < end_s:
        tend()
        with suppress(AwayError):
            if not meeting.situation().agents - {0}:
                return meeting.close()
        time.sleep(POLL_S)
