"""Assigns devices to trainer, reference policy, teacher and hosts, and describes this machine."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import statistics
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh

from areal_jax.assembly.gpus import gpu_environment, visible_gpus
from areal_jax.config.tree import Config
from areal_jax.models.model import Model
from areal_jax.parallel.compile_once import compile_once
from areal_jax.parallel.mesh import make_mesh
from areal_jax.plugin import version_of
from areal_jax.types import ArealError
from areal_jax.weights.store import bytes_in


@dataclass(frozen=True)
class Devices:
    placement: str  # split | shared
    trainer: Mesh
    hosts: tuple[Mesh, ...]
    evaluation: Mesh | None = None
    """The mesh of the evaluation host; None unless observe.evaluate is set."""
    reference: Mesh | None = None
    """The reference policy's own mesh; None: the trainer's (`runtime.reference`)."""
    teacher: Mesh | None = None
    """The teacher's own mesh; None: the trainer's (`runtime.teacher`)."""


def use_virtual_cpus(count: int) -> None:
    """Make jax use `count` virtual CPU devices, or JAX_NUM_CPU_DEVICES if that is more.

    Does nothing if XLA_FLAGS already sets the number, or if jax has been initialised, after which its devices
    are fixed.
    """
    if "xla_force_host_platform_device_count" in os.environ.get("XLA_FLAGS", ""):
        return
    wanted = max(count, jax.config.jax_num_cpu_devices)  # pyright: ignore[reportAttributeAccessIssue]
    with suppress(RuntimeError):  # raised if jax has been initialised
        jax.config.update("jax_num_cpu_devices", wanted)


def host_mesh(config: Config, what: str) -> Mesh:
    """Returns the mesh of a process that only decodes: its first runtime.host_tensor devices.

    On a machine without accelerators these are virtual CPU devices. Raises ArealError if there are too few
    devices; `what` names the process in the message.
    """
    use_virtual_cpus(config.runtime.host_tensor)
    return make_mesh({"tensor": config.runtime.host_tensor}, jax.devices(), what)


def place(config: Config, devices: Sequence[Any] | None = None) -> Devices:
    """Returns the meshes of trainer, hosts and evaluation (if observe.evaluate is set).

    `devices`: the devices to place them on; None: all devices of jax. With runtime.placement=split each mesh
    has devices of its own; with shared every mesh begins at the first device; auto selects split if there are
    enough devices. Raises ArealError if there are too few devices, or if evaluation would have to share a
    device.
    """
    r = config.runtime
    hosts = r.hosts + bool(config.observe.evaluate)
    trainer_devices, host_devices = config.trainer_devices, hosts * r.host_tensor
    wanted = r.placement
    together = max(trainer_devices, r.host_tensor)
    if devices is None:
        use_virtual_cpus(together if wanted == "shared" else trainer_devices + host_devices)
        devices = jax.devices()
    if wanted == "auto":
        wanted = "split" if len(devices) >= trainer_devices + host_devices else "shared"
    if refusal := _against(config, wanted, len(devices)):
        raise ArealError(refusal)
    own = place_trainer(config, devices)
    first = trainer_devices if wanted == "split" else 0
    step = r.host_tensor if wanted == "split" else 0
    meshes = [
        make_mesh({"tensor": r.host_tensor}, devices[first + i * step :], f"generation host {i}")
        for i in range(hosts)
    ]
    evaluation = meshes[r.hosts] if config.observe.evaluate else None
    return replace(own, placement=wanted, hosts=tuple(meshes[: r.hosts]), evaluation=evaluation)


def _against(config: Config, placement: str, count: int) -> str:
    """Returns why the config's meshes cannot be placed as `placement` on `count` devices; "" if they can."""
    r = config.runtime
    if placement == "split":
        needed = (r.hosts + bool(config.observe.evaluate)) * r.host_tensor
        if count >= config.trainer_devices + needed:
            return ""
        return (
            f"runtime.placement=split needs {config.trainer_devices} devices for the trainer and {needed} "
            f"for the hosts, but there are {count}; use runtime.placement=shared, or reduce "
            "trainer.mesh, runtime.hosts or runtime.host_tensor"
        )
    if config.trainer_devices > config.trainer.mesh.devices:
        return (
            "runtime.reference.mesh and runtime.teacher.mesh need devices of their own, but with "
            "runtime.placement=shared trainer and hosts take turns on one; set runtime.placement=split, or "
            "leave these meshes out"
        )
    if config.observe.evaluate:
        return (
            f"observe.evaluate={config.observe.evaluate} needs a device of its own, but with "
            "runtime.placement=shared all meshes share one; set runtime.placement=split, or set "
            "observe.evaluate=0 and evaluate the run later with `areal-jax eval RUN`"
        )
    if config.generation.calls_ahead == 1:
        return (
            "generation.calls_ahead=1 leaves a decode call on the device at the end of a host's turn, when "
            "with runtime.placement=shared the trainer's turn begins; set generation.calls_ahead=auto, or "
            "runtime.placement=split"
        )
    return ""


def place_trainer(config: Config, devices: Sequence[Any]) -> Devices:
    """Returns the meshes of the trainer's process, without hosts: trainer, reference policy, teacher.

    They take `devices` in this order. Raises ArealError if there are too few.
    """
    first, meshes = config.trainer.mesh.devices, {}
    for name, executor in (("reference", config.runtime.reference), ("teacher", config.runtime.teacher)):
        if executor.mesh is not None:
            meshes[name] = make_mesh(executor.mesh.shape, devices[first:], f"the {name}")
            first += executor.devices
    return Devices("split", make_mesh(config.trainer.mesh.shape, devices, "the trainer"), (), **meshes)


def params_bytes(model: Model, dtype: str) -> int:
    """Returns the size in bytes of a model's parameters with all floating-point leaves stored in `dtype`.

    The integer codes of quantised matrices keep their own type.
    """
    return bytes_in(model.abstract_params, dtype)


def overwrites_serving(config: Config, placement: str) -> bool:
    """Returns whether publishing overwrites the host's weights in place, so that there is only one copy.

    True if a single host shares the trainer's process and only device, decodes with the published weights,
    and generation.on_update is recompute or keep. With drain and pinned, samples in progress still need the
    weights under which they began. `placement`: split or shared.
    """
    r = config.runtime
    is_alone = r.hosts == 1 and config.trainer.mesh.devices == 1 and r.host_tensor == 1
    is_in_memory = config.weights_backend == "memory"
    is_as_published = config.generation.quantize == "none"
    return (
        placement == "shared"
        and is_alone
        and is_in_memory
        and is_as_published
        and config.on_update in ("recompute", "keep")
    )


def usable_cores() -> int:
    """Returns the number of CPU cores that this process may use; all cores if the system cannot tell."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def header(config: Config) -> dict[str, Any]:
    """Returns what of this machine may change the bits of results: devices, cores, jaxlib, XLA flags, layout.

    On a machine with GPUs also the environment of the processes on them (`gpu_environment`). A new run stores
    this dict in its journal; a resumed run warns of each value that differs.
    """
    return {
        "device_kind": jax.devices()[0].device_kind,
        "devices": jax.device_count(),
        "usable_cores": usable_cores(),
        "jaxlib": version_of("jaxlib"),
        "xla_flags": os.environ.get("XLA_FLAGS", ""),
        "weight_layout": config.generation.weight_layout,
        **({"gpu_environment": gpu_environment(config)} if visible_gpus() else {}),
    }


def training_machine(config: Config, devices: int | None = None) -> str:
    """Returns a hash of what the bits of an update depend on beside the train state and the batch.

    That is the header but for the layout of the hosts' weights, the kind of CPU, the versions of the packages
    that compute, and the executors of reference and teacher. Each trained batch records it. `devices`: the
    trainer's number of devices, if this process has another one.
    """
    own = {name: value for name, value in header(config).items() if name != "weight_layout"}
    own["devices"] = devices or own["devices"]
    packages = ("areal-jax", "jax", "flax", "optax")
    own["packages"] = [version_of(name) for name in packages]
    own["executors"] = [config.runtime.reference.model_dump(), config.runtime.teacher.model_dump()]
    own["cpu"] = cpu_kind() if jax.devices()[0].platform == "cpu" else ""
    return hashlib.blake2b(json.dumps(own, sort_keys=True).encode(), digest_size=8).hexdigest()


def repeats_bits() -> bool:
    """Returns whether this process's devices give equal bits when they run a program again.

    GPUs do so only with deterministic kernels (`gpu_environment`).
    """
    is_gpu = jax.devices()[0].platform in ("gpu", "cuda", "rocm")
    return not is_gpu or "--xla_gpu_deterministic_ops=true" in os.environ.get("XLA_FLAGS", "")


def cpu_kind() -> str:
    """Returns the CPU's model and instruction sets as Linux names them; elsewhere as Python does."""
    try:
        lines = Path("/proc/cpuinfo").read_text().split("\n\n")[0].splitlines()
    except OSError:
        return platform.processor()
    fields = {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    named = ("vendor_id", "cpu family", "model", "model name", "CPU part", "cache size", "flags", "Features")
    return " ".join(fields[name] for name in named if name in fields)


def use_compilation_cache() -> None:
    """Store compiled programs in the user's cache folder for later runs, unless jax's cache folder is set.

    Processes that share the folder, whichever it is, and need one program compile it once.
    """
    compile_once()
    if jax.config.jax_compilation_cache_dir is not None:  # type: ignore[attr-defined]
        return
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "areal-jax" / "xla"
    jax.config.update("jax_compilation_cache_dir", str(cache))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


def machine(shape: str, dtype: str, runs: Sequence[float]) -> dict[str, Any]:
    """Returns what every benchmark reports: the seconds, and this machine's device, packages and load.

    `runs`: the seconds of each repetition, reported as median, minimum and maximum. `shape`: what was
    measured, such as the name of the model size.
    """
    return {
        "seconds": statistics.median(runs),
        "seconds_min": min(runs),
        "seconds_max": max(runs),
        "shape": shape,
        "dtype": dtype,
        "device": jax.devices()[0].device_kind,
        "versions": {name: version_of(name) for name in ("jax", "jaxlib", "flax", "areal-jax")},
        "load": list(os.getloadavg()),
        "allocator": os.environ.get("GLIBC_TUNABLES", "default"),
    }
