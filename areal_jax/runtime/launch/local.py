"""All of a run's processes on this machine, with a Redis of their own unless the config names one."""

from __future__ import annotations

import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TextIO

from areal_jax.runtime.launch.plan import (
    SECRET_FILE,
    LaunchError,
    Plan,
    Process,
    environment,
    make_plan,
    words_of,
)
from areal_jax.runtime.launch.shell import command
from areal_jax.runtime.launch.submit import Launch, make_secret, write
from areal_jax.runtime.launch.supervisor import Command, Supervisor, Unit

PROGRAM = (sys.executable, "-m", "areal_jax.cli.main")
"""`areal-jax` of this interpreter, whatever PATH says."""


def local_plan(launch: Launch) -> Plan:
    """Raises LaunchError where this machine has fewer devices than the run needs."""
    config, wanted = launch.config, launch.config.launch.accelerator
    gpus = count_gpus() if wanted in ("auto", "gpu") else 0
    accelerator = wanted if wanted != "auto" else "gpu" if gpus else "cpu"
    plan = make_plan(
        config,
        launch.folder,
        accelerator,
        launch.overrides,
        goes_on=launch.goes_on,
        one_machine=True,
    )
    if accelerator == "gpu" and plan.devices_per_machine > gpus:
        raise LaunchError(
            f"the run needs {plan.devices_per_machine} GPUs (trainer.mesh {config.trainer.mesh.devices}, "
            f"runtime.hosts={config.runtime.hosts} of {config.runtime.host_tensor}); here are {gpus}; "
            "use fewer, `areal-jax run` with runtime.placement=shared on one, or launch.accelerator=cpu"
        )
    return plan


def run_local(launch: Launch, out: TextIO) -> int:
    """Run it to its end; the exit status. Raises LaunchError where it cannot start."""
    plan = local_plan(launch)
    if plan.has_own_redis and shutil.which("redis-server") is None:
        raise LaunchError(
            "there is no redis-server on this machine, and runtime.redis names none; install Redis "
            "(redis-server of Debian and Ubuntu), or set runtime.redis=redis://HOST:PORT/0"
        )
    write(launch)
    secret = make_secret(launch.folder / SECRET_FILE)
    with _redis(plan, secret) as redis:
        units = units_of(plan, PROGRAM, f"127.0.0.1:{_free_port()}", redis, {"AREAL_JAX_SECRET": secret})
        return Supervisor(units, launch.folder / "logs", out, launch.config.launch.restarts).run()


def units_of(
    plan: Plan, program: tuple[str, ...], coordinator: str, redis: str | None, env: dict[str, str]
) -> list[Unit]:
    """What the supervisor keeps; the trainer's processes are one unit."""

    def as_command(process: Process) -> Command:
        folder = str(plan.folder)
        words = words_of(process, plan, folder, f"{folder}/config.yaml", coordinator, redis)
        return Command(process.name, (*program, *words[1:]), {**environment(plan, process), **env})

    alone = ("reward", "generate", "evaluate")
    return [
        Unit(tuple(map(as_command, plan.of("controller"))), is_needed=True, ends_run=True),
        Unit(tuple(map(as_command, plan.of("trainer"))), is_needed=True),
        *(Unit((as_command(process),)) for role in alone for process in plan.of(role)),
    ]


def describe(plan: Plan) -> str:
    """The commands, as --dry-run prints them."""
    redis = "redis://127.0.0.1:PORT/0" if plan.has_own_redis else None
    first = ["redis-server at a free PORT, with the run's secret as its password"] if redis else []
    units = units_of(plan, ("areal-jax",), "127.0.0.1:PORT", redis, {})
    commands = [
        command(["env", *(f"{key}={value}" for key, value in each.env.items()), *each.words])
        for unit in units
        for each in unit.commands
    ]
    return "\n".join([*first, *commands])


def count_gpus() -> int:
    """That NVIDIA's driver lists; jax is not asked, since it would take them."""
    if shutil.which("nvidia-smi") is None:
        return 0
    listed = subprocess.run(
        ["nvidia-smi", "--list-gpus"], capture_output=True, text=True, timeout=60, check=False
    )
    return sum(line.startswith("GPU ") for line in listed.stdout.splitlines())


@contextmanager
def _redis(plan: Plan, secret: str) -> Iterator[str | None]:
    if not plan.has_own_redis:
        yield None
        return
    from areal_jax.runtime.redis_server import redis_server

    with redis_server(plan.folder / "redis", secret=secret) as server:
        yield server.url


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
