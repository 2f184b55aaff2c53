"""The processes of a run, with the machine and devices of each, computed from the config.

    controller, reward-0, trainer-0 .. trainer-(P-1), generate-0 .. generate-(H-1), evaluate-0

The devices of `trainer.mesh` are divided evenly among the trainer's P processes; each of the H hosts and the
evaluation process have `runtime.host_tensor` devices. If all of these fit on one machine of
`launch.machine_devices` GPUs or CPUs, the run uses one machine. Otherwise the trainer uses the machines from
rank 0 on, and the hosts use the machines after those. Controller, reward process and Redis are on the machine
of rank 0. evaluate-0 is placed like a further host if it evaluates, and on the machine of rank 0 if it only
exports.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from areal_jax.assembly.gpus import FLAGS, gpu_environment
from areal_jax.config.tree import Config
from areal_jax.types import ArealError

LONGEST_NAME = 40
"""Maximum length of a run's name, which is part of names of machines and pods (at most 63 characters)."""

PROGRAM = (sys.executable, "-m", "areal_jax.cli.main")
"""The command `areal-jax`, run by the Python interpreter of this process, independently of PATH."""


class LaunchError(ArealError):
    """Raised if a run cannot be launched; the message names the setting and the remedy."""


@dataclass(frozen=True)
class Process:
    role: str  # controller | reward | trainer | generate | evaluate
    name: str
    machine: int
    devices: tuple[int, ...] = ()
    """Indices of the machine's devices that the process computes on; empty: the process needs none."""


@dataclass(frozen=True)
class Plan:
    config: Config
    accelerator: str  # gpu | tpu | cpu
    processes: tuple[Process, ...]
    trainer_machines: int
    """Number of machines with trainer processes; these machines come first, from rank 0 on."""
    generation_machines: int
    """Number of further machines, with hosts and evaluation only; 0: hosts and trainer share machine 0."""

    @property
    def machines(self) -> int:
        return self.trainer_machines + self.generation_machines

    @property
    def name(self) -> str:
        """The run's name as a valid host name: lowercase letters, digits and hyphens."""
        return _host_name(self.config.run.name)

    def devices_on(self, *machines: int) -> int:
        """Returns the largest number of devices that the processes of one of these machines need together."""
        return max(sum(len(process.devices) for process in self.on(machine)) for machine in machines)

    def on(self, machine: int) -> tuple[Process, ...]:
        return tuple(process for process in self.processes if process.machine == machine)


def make_plan(config: Config, accelerator: str = "gpu", one_machine: bool = False) -> Plan:
    """Returns the run's processes, with the machine and devices of each.

    `accelerator`: gpu, tpu or cpu. `one_machine`: place all processes on one machine, even if they need more
    devices than launch.machine_devices. Raises LaunchError if runtime.placement=shared, if the devices cannot
    be divided among processes and machines, or if run.name is not valid in a machine's name.
    """
    r, devices, room = config.runtime, config.trainer_devices, config.launch.machine_devices
    _require_processes(config)
    share, host_share = devices // r.trainer_processes, r.host_tensor
    is_evaluated = config.observe.evaluate > 0
    count = r.hosts + is_evaluated
    total = devices + count * host_share
    # A TPU process takes all chips of its machine, so there trainer and hosts never share one.
    if one_machine or (total <= room and accelerator != "tpu"):
        trainers = tuple(_place("trainer", r.trainer_processes, share, total, 0, 0))
        hosts = tuple(_place("generate", count, host_share, total, 0, devices))
        machines = (1, 0)
    else:
        _require_room("trainer.mesh with runtime.trainer_processes", share, room)
        _require_room("runtime.host_tensor", host_share, room)
        trainers = tuple(_place("trainer", r.trainer_processes, share, room, 0, 0))
        first = trainers[-1].machine + 1
        hosts = tuple(_place("generate", count, host_share, room, first, 0))
        machines = (first, hosts[-1].machine - first + 1)
    head = (Process("controller", "controller", 0), Process("reward", "reward-0", 0))
    beside = [replace(host, role="evaluate", name="evaluate-0") for host in hosts[r.hosts :]]
    if config.observe.exports and not beside:
        beside = [Process("evaluate", "evaluate-0", 0)]
    processes = (*head, *trainers, *hosts[: r.hosts], *beside)
    plan = Plan(config, accelerator, processes, *machines)
    _host_name(config.run.name)
    if accelerator == "tpu":
        _require_whole_machines(plan)
    return plan


def environment(plan: Plan, process: Process, visible: Sequence[str] = ()) -> dict[str, str]:
    """Returns environment variables that restrict a process to its own devices.

    The variables also keep jax from falling back to another kind of device. In a run on GPUs, processes on
    the CPU get the same XLA flags as those on GPUs, because the controller records its flags in the journal.
    `visible`: the names of the GPUs that this machine's job may use, into which `process.devices` are
    indices; empty: all GPUs of the machine.
    """
    common = {"PYTHONUNBUFFERED": "1"}
    on_gpu = gpu_environment(plan.config) if plan.accelerator == "gpu" else {}
    if on_gpu and not process.devices:
        return {**common, "JAX_PLATFORMS": "cpu", FLAGS: on_gpu[FLAGS]}
    if not process.devices or plan.accelerator == "cpu":
        count = {"JAX_NUM_CPU_DEVICES": str(len(process.devices))} if process.devices else {}
        return {**common, "JAX_PLATFORMS": "cpu", **count}
    if plan.accelerator == "tpu":
        return {**common, "JAX_PLATFORMS": "tpu"}
    names = [visible[device] if visible else str(device) for device in process.devices]
    return {**common, **on_gpu, "JAX_PLATFORMS": "cuda", "CUDA_VISIBLE_DEVICES": ",".join(names)}


def words_of(
    process: Process, plan: Plan, config: Path, folder: Path, coordinator: str, redis: str
) -> list[str]:
    """Returns the command that starts the process.

    `config`: the config file; `folder`: the run's folder; `coordinator`: host:port of trainer process 0;
    `redis`: the url of the run's Redis.
    """
    own = [f"--coordinator={coordinator}"] if process.role == "trainer" else []
    return [
        *PROGRAM,
        "role",
        process.role,
        f"--config={config}",
        f"--run={folder}",
        f"--name={process.name}",
        *own,
        f"runtime.redis={redis}",
    ]


# --- inside -------------------------------------------------------------------------------------------------


def _place(
    role: str, count: int, devices: int, room: int, first_machine: int, first_device: int
) -> Iterator[Process]:
    """Yields `count` processes of `devices` devices each, as many per machine as fit on its `room` devices.

    The first process is on machine `first_machine`; on each machine the first `first_device` devices are left
    out.
    """
    # All devices of a process are on one machine; devices left over stay unused.
    per_machine = max(1, (room - first_device) // devices)
    for index in range(count):
        machine, place = divmod(index, per_machine)
        start = first_device + place * devices
        yield Process(role, f"{role}-{index}", first_machine + machine, tuple(range(start, start + devices)))


def _require_processes(config: Config) -> None:
    r, devices = config.runtime, config.trainer_devices
    if r.placement == "shared":
        raise LaunchError(
            "runtime.placement=shared: trainer and host take turns within one process, so they cannot be "
            "launched as several processes; use `areal-jax run`, or set runtime.placement=split"
        )
    if devices % r.trainer_processes:
        raise LaunchError(
            f"runtime.trainer_processes={r.trainer_processes} does not divide the {devices} devices of "
            f"trainer.mesh; set it to a divisor of {devices}"
        )


def _require_room(what: str, devices: int, room: int) -> None:
    if devices > room:
        raise LaunchError(
            f"{what} gives one process {devices} devices, but a machine has only {room} "
            f"(launch.machine_devices); change these settings, or use machines with at least {devices} "
            "devices"
        )


def _require_whole_machines(plan: Plan) -> None:
    """Raises LaunchError if two processes share a machine's TPU chips: one process takes all of them."""
    for machine in range(plan.machines):
        owners = [process for process in plan.on(machine) if process.devices]
        if len(owners) > 1:
            room = plan.config.launch.machine_devices
            raise LaunchError(
                f"{', '.join(owner.name for owner in owners)} would share one machine's TPU chips, but "
                f"only one process can use them. Because launch.machine_devices={room}, set "
                f"runtime.host_tensor={room}, and choose trainer.mesh with {room} devices per process "
                "(runtime.trainer_processes)"
            )


def _host_name(text: str) -> str:
    name = re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")
    if not name or not name[0].isalpha() or len(name) > LONGEST_NAME:
        raise LaunchError(
            f"run.name={text} cannot be part of a machine's name: choose a name that begins with a letter "
            f"and has at most {LONGEST_NAME} characters, of a-z, 0-9 and -"
        )
    return name
