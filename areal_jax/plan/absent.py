"""Devices that are not there: XLA compiles for them from a description, and nothing can run on them."""

from __future__ import annotations

from typing import Any

import jax
from jax.experimental import topologies

from areal_jax.parallel.private_jax import cudnn_attention, pallas_gpus
from areal_jax.plan.targets import Machine
from areal_jax.types import ArealError


def absent_devices(machine: Machine) -> list[Any]:
    """Returns compile-only devices of `machine`; the process needs the variables of `targets.environment`.

    Raises ArealError if XLA cannot describe them.
    """
    target = machine.target
    try:
        if not target.is_gpu:
            alone = {"chips_per_host_bounds": (1, 1, 1)} if machine.count == 1 else {}
            return list(topologies.get_topology_desc(machine.topology, platform="tpu", **alone).devices)
        _compile_cudnn_for(target.capability)
        _compile_pallas_for(target.capability)
        described: dict[str, Any] = {"target_config": target.config_text, "topology": machine.topology}
        return list(topologies.get_topology_desc(platform="cuda", **described).devices)
    except Exception as error:
        raise ArealError(f"XLA cannot compile for {machine.name}: {error}; use another --target") from error


def _compile_cudnn_for(capability: tuple[int, int]) -> None:
    """Make jax's cuDNN attention ask for the target's compute capability, not for that of a local GPU.

    The checks are private functions of jax, which look at the first local device. Where jax has none, cuDNN's
    packed layout would be refused for every target.
    """
    fused = cudnn_attention()

    def number(text: str) -> tuple[int, ...]:
        return tuple(int(part) for part in text.split("."))

    fused.check_compute_capability = lambda text: capability >= number(text)
    fused.is_cuda_compute_capability_equal = lambda text: capability == number(text)


def _compile_pallas_for(capability: tuple[int, int]) -> None:
    """Describe the target to Pallas, which otherwise asks the default device, and refuses a CPU."""
    gpus = pallas_gpus()
    if gpus is not None:
        major, minor = capability
        known = {"arch_name": f"{major}.{minor}", "compute_capability": 10 * major + minor}
        found = gpus.GpuInfo(gpu_version=None, **known)
        gpus.registry[jax.devices()[0].device_kind] = lambda: found
