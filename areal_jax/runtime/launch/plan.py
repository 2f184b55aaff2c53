"""Which processes a run consists of, on which machines and devices: a function of the config alone.

    controller, reward-0, trainer-0 .. trainer-(P-1), generate-0 .. generate-(H-1), evaluate-0

The trainer's P processes share `trainer.mesh` evenly; a host has `runtime.host_tensor` devices, and so has
the one that evaluates. What fits on one machine of `launch.machine_devices` runs on one. Otherwise the
trainer has machines of its own, from machine 0 on, and the hosts have those after them. Controller, reward
worker and Redis are on machine 0, which is called the head; so is evaluate-0 where it only exports.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePosixPath

from areal_jax.config import Config
from areal_jax.types import ArealError

LONGEST_NAME = 40
"""Characters of a run's name in names of machines and pods, which end at 63."""


MOUNT = PurePosixPath("/mnt/areal-jax")
"""Where machines that are made for the run mount launch.volume."""


SECRET_FILE = "launch/secret"
"""The run's secret, in its folder."""


class LaunchError(ArealError):
    """A config that this launcher cannot start; the message names the key and the remedy."""


@dataclass(frozen=True)
class Process:
    role: str  # controller | reward | trainer | generate | evaluate
    name: str
    index: int
    """Among those of its role."""
    machine: int
    devices: tuple[int, ...] = ()
    """Accelerators of its machine that it computes on."""


@dataclass(frozen=True)
class Plan:
    config: Config
    folder: Path
    """The run's, on the machine that launches; absolute."""
    accelerator: str  # gpu | tpu | cpu
    processes: tuple[Process, ...]
    trainer_machines: int
    """Machines that the trainer's processes are on, from 0 on."""
    generation_machines: int
    """Machines after those with nothing but hosts, that of evaluation among them; 0: they are on machine 0.
    """
    overrides: Mapping[str, str] = field(default_factory=dict)
    """Keys given to a run that goes on; a fresh run's stand in its config.yaml."""
    goes_on: bool = False

    @property
    def machines(self) -> int:
        return self.trainer_machines + self.generation_machines

    @property
    def trainer_processes(self) -> int:
        return len(self.of("trainer"))

    @property
    def name(self) -> str:
        """The run's name in the alphabet of host names."""
        return _host_name(self.config.run.name)

    @property
    def devices_per_machine(self) -> int:
        return max(
            sum(len(p.devices) for p in self.processes if p.machine == machine)
            for machine in range(self.machines)
        )

    @property
    def decoding(self) -> tuple[Process, ...]:
        """Hosts, that of evaluation among them."""
        return tuple(p for p in self.processes if p.devices and p.role != "trainer")

    @property
    def has_own_redis(self) -> bool:
        """Whether the launcher starts Redis; otherwise the config names one."""
        return self.config.runtime.redis is None

    def of(self, role: str) -> tuple[Process, ...]:
        return tuple(process for process in self.processes if process.role == role)

    def on(self, machine: int) -> tuple[Process, ...]:
        return tuple(process for process in self.processes if process.machine == machine)


def make_plan(
    config: Config,
    folder: Path,
    accelerator: str = "gpu",
    overrides: Mapping[str, str] | None = None,
    *,
    goes_on: bool = False,
    one_machine: bool = False,
) -> Plan:
    """The run's processes. `one_machine`: all on this one, however many devices they need.

    Raises LaunchError where devices cannot be shared out so.
    """
    r, mesh, room = config.runtime, config.trainer.mesh, config.launch.machine_devices
    _require_processes(config)
    share, host_share = mesh.devices // r.trainer_processes, r.host_tensor
    is_evaluated = config.observe.evaluate > 0
    count = r.hosts + is_evaluated
    total = mesh.devices + count * host_share
    if one_machine or (total <= room and accelerator != "tpu"):
        trainers = tuple(_place("trainer", r.trainer_processes, share, total, 0, 0))
        hosts = tuple(_place("generate", count, host_share, total, 0, mesh.devices))
        machines = (1, 0)
    else:
        _require_room("trainer.mesh over runtime.trainer_processes", share, room)
        _require_room("runtime.host_tensor", host_share, room)
        trainers = tuple(_place("trainer", r.trainer_processes, share, room, 0, 0))
        first = trainers[-1].machine + 1
        hosts = tuple(_place("generate", count, host_share, room, first, 0))
        machines = (first, hosts[-1].machine - first + 1)
    head = (Process("controller", "controller", 0, 0), Process("reward", "reward-0", 0, 0))
    beside = [replace(host, role="evaluate", name="evaluate-0", index=0) for host in hosts[r.hosts :]]
    if config.observe.exports and not beside:
        beside = [Process("evaluate", "evaluate-0", 0, 0)]
    processes = (*head, *trainers, *hosts[: r.hosts], *beside)
    plan = Plan(config, folder, accelerator, processes, *machines, overrides or {}, goes_on)
    _host_name(config.run.name)
    if accelerator == "tpu":
        _require_whole_machines(plan)
    return plan


def environment(plan: Plan, process: Process) -> dict[str, str]:
    """What a process's environment says of devices: it sees its own, and falls back to no other kind."""
    common = {"PYTHONUNBUFFERED": "1"}
    if not process.devices or plan.accelerator == "cpu":
        count = {"JAX_NUM_CPU_DEVICES": str(len(process.devices))} if process.devices else {}
        return {**common, "JAX_PLATFORMS": "cpu", **count}
    if plan.accelerator == "tpu":
        return {**common, "JAX_PLATFORMS": "tpu"}
    visible = ",".join(map(str, process.devices))
    return {**common, "JAX_PLATFORMS": "cuda", "CUDA_VISIBLE_DEVICES": visible}


def words_of(
    process: Process, plan: Plan, folder: str, config: str, coordinator: str, redis: str | None
) -> list[str]:
    """The command of a process. `folder`, `config`: the run's, as that process reaches them; `coordinator`:
    host:port of the trainer's process 0; `redis`: address of the one that the launcher started.
    """
    words = ["areal-jax", "role", process.role, f"--config={config}", f"--run={folder}"]
    words.append(f"--name={process.name}")
    if process.role == "trainer":
        words += [
            f"--index={process.index}",
            f"--processes={plan.trainer_processes}",
            f"--coordinator={coordinator}",
        ]
    found = {"runtime.redis": redis} if redis is not None else {}
    return words + [f"{key}={value}" for key, value in {**found, **plan.overrides}.items()]


def on_volume(plan: Plan) -> PurePosixPath:
    """The run's folder on the volume that all machines mount. Raises LaunchError for none, or elsewhere."""
    if plan.config.launch.volume is None:
        raise LaunchError(
            "launch.volume is not given: controller, trainer and hosts need a file system that they share"
        )
    folder = MOUNT / PurePosixPath(plan.config.run.folder)
    if not folder.is_relative_to(MOUNT) or ".." in folder.parts:
        raise LaunchError(
            f"run.dir={plan.config.run.dir} is not on launch.volume, which is mounted at {MOUNT}; give a "
            "folder relative to that"
        )
    return folder


# --- inside -------------------------------------------------------------------------------------------------


def _place(
    role: str, count: int, devices: int, room: int, first_machine: int, first_device: int
) -> Iterator[Process]:
    """`count` processes of `devices` each, as many on a machine as it has room for."""
    per_machine = max(1, (room - first_device) // devices)
    for index in range(count):
        machine, place = divmod(index, per_machine)
        start = first_device + place * devices
        yield Process(
            role, f"{role}-{index}", index, first_machine + machine, tuple(range(start, start + devices))
        )


def _require_processes(config: Config) -> None:
    r, devices = config.runtime, config.trainer.mesh.devices
    if r.placement == "shared":
        raise LaunchError(
            "runtime.placement=shared: trainer and host take turns within one process; use `areal-jax run`, "
            "or runtime.placement=split"
        )
    if devices % r.trainer_processes:
        raise LaunchError(
            f"runtime.trainer_processes={r.trainer_processes} does not divide the {devices} devices of "
            "trainer.mesh; choose a divisor"
        )


def _require_room(what: str, devices: int, room: int) -> None:
    if devices > room:
        raise LaunchError(
            f"{what}: {devices} devices for one process, on machines of launch.machine_devices={room}; use "
            "more processes, or larger machines"
        )


def _require_whole_machines(plan: Plan) -> None:
    """A process takes every TPU chip that its machine has."""
    for machine in range(plan.machines):
        owners = [process for process in plan.on(machine) if process.devices]
        if len(owners) > 1:
            room = plan.config.launch.machine_devices
            raise LaunchError(
                f"{', '.join(owner.name for owner in owners)} would share one machine's TPU chips, which "
                f"belong to one process; give trainer.mesh {room} devices a process and "
                f"runtime.host_tensor={room} (launch.machine_devices)"
            )


def _host_name(text: str) -> str:
    name = re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")
    if not name or not name[0].isalpha() or len(name) > LONGEST_NAME:
        raise LaunchError(
            f"run.name={text} makes no name of a machine: begin it with a letter, and keep it within "
            f"{LONGEST_NAME} of the characters a-z, 0-9 and -"
        )
    return name
