"""The accelerators that `areal-jax plan` compiles for, as data: memory, speeds, and what XLA knows of them.

Figures are the vendors' published ones, without sparsity. A speed that is not listed is not known. This
module imports no jax, because the environment of a compile-only process must be set before jax is imported.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

from areal_jax.assembly.gpus import MEMORY_FRACTION
from areal_jax.plugin import did_you_mean, install_extra
from areal_jax.types import ArealError

GIB = 2**30

TPU_FRACTION = 0.97
"""Share of a TPU's memory that XLA allocates."""


@dataclass(frozen=True, kw_only=True)
class Target:
    """One kind of accelerator. Speeds are of one device: what jax calls a device, on a TPU a chip."""

    name: str
    device: str
    """The device's own name."""
    memory: int
    """Device memory in bytes."""
    bandwidth: float
    """Bytes per second between the device and its memory."""
    flops: Mapping[str, float]
    """dtype of a product's operands -> FLOP/s. A float32 product on a GPU is computed in TF32 (f32), or in
    float32 at jax's precision "highest" (f32 highest)."""
    link: float
    """Bytes per second that one device can send to the others of its machine (or TPU slice)."""
    link_name: str
    host_link: float
    """Bytes per second between the device and the host's memory."""
    is_gpu: bool = True
    capability: tuple[int, int] = (0, 0)
    """CUDA compute capability of a GPU."""
    cores: int = 0
    """Streaming multiprocessors of a GPU."""
    clock_ghz: float = 0.0
    l2: int = 0
    """Bytes of a GPU's second-level cache."""
    shared_memory: int = 0
    """Bytes of shared memory that one block of a GPU may use."""
    chips: Mapping[int, str] | None = None
    """The number N of a TPU's name, as in v5e-8 -> the topology of its chips, as in 2x4."""

    @property
    def extra(self) -> str:
        return "cuda12" if self.is_gpu else "tpu"

    def usable(self, fraction: float | None = None) -> int:
        """Returns the bytes that XLA allocates of the memory.

        `fraction`: XLA_PYTHON_CLIENT_MEM_FRACTION, on GPUs; None: not set, and a run sets MEMORY_FRACTION.
        """
        return int(self.memory * ((fraction or MEMORY_FRACTION) if self.is_gpu else TPU_FRACTION))

    @property
    def config_text(self) -> str:
        """The GpuTargetConfigProto, as text, from which XLA compiles for this GPU."""
        major, minor = self.capability
        per_core = self.shared_memory + 1024
        threads = 1536 if self.capability == (8, 9) else 2048
        return (
            "gpu_device_info { threads_per_block_limit: 1024 threads_per_warp: 32 "
            f"shared_memory_per_block: 49152 shared_memory_per_core: {per_core} "
            f"threads_per_core_limit: {threads} core_count: {self.cores} fpus_per_core: "
            f"{64 if self.capability == (8, 0) else 128} block_dim_limit_x: 2147483647 "
            "block_dim_limit_y: 65535 block_dim_limit_z: 65535 "
            f"memory_bandwidth: {int(self.bandwidth)} l2_cache_size: {self.l2} "
            f"clock_rate_ghz: {self.clock_ghz} device_memory_size: {self.memory} "
            f"shared_memory_per_block_optin: {self.shared_memory} "
            f"cuda_compute_capability {{ major: {major} minor: {minor} }} "
            "registers_per_core_limit: 65536 registers_per_block_limit: 65536 } "
            'platform_name: "CUDA" dnn_version_info { major: 9 minor: 8 } '
            "runtime_version { major: 12 minor: 9 patch: 0 } "
            f'device_description_str: "{self.device}"'
        )


def _gpu(
    name: str, device: str, gib: float, bandwidth: float, bf16: float, f32: float, **more: Any
) -> Target:
    """Returns a GPU; `bandwidth`: GB/s.

    `bf16`: TFLOP/s of bfloat16 products, twice those of TF32; `f32`: of float32 products, by no tensor core.
    """
    speeds = {"bf16": bf16, "f16": bf16, "f32": bf16 / 2, "f32 highest": f32}
    flops = {dtype: 1e12 * speed for dtype, speed in speeds.items()}
    memory = int(gib * GIB)
    return Target(name=name, device=device, memory=memory, bandwidth=bandwidth * 1e9, flops=flops, **more)


def _tpu(name: str, device: str, gib: int, bandwidth: float, bf16: float, **more: Any) -> Target:
    # A float32 product at jax's default precision is one bfloat16 pass on a TPU.
    flops: dict[str, float] = {"bf16": bf16 * 1e12, "f32": bf16 * 1e12}
    return Target(
        name=name, device=device, memory=gib * GIB, bandwidth=bandwidth * 1e9, flops=flops,
        link_name="ICI", host_link=16e9, is_gpu=False, **more,
    )  # fmt: skip


_FLAT = {1: "1x1", 4: "2x2", 8: "2x4", 16: "4x4", 32: "4x8", 64: "8x8", 128: "8x16", 256: "16x16"}
# v5p-N counts TensorCores, of which a chip (one jax device) has two.
_CUBES = {8: "2x2x1", 16: "2x2x2", 32: "2x2x4", 64: "2x4x4", 128: "4x4x4", 256: "4x4x8"}

_HOPPER = dict(
    capability=(9, 0), cores=132, clock_ghz=1.98, l2=50 * 2**20, shared_memory=232_448,
    link=450e9, link_name="NVLink", host_link=64e9,
)  # fmt: skip
_ADA = dict(capability=(8, 9), shared_memory=101_376, link=32e9, link_name="PCIe", host_link=32e9)

TARGETS: Mapping[str, Target] = {
    target.name: target
    for target in (
        _gpu("h100", "NVIDIA H100 80GB HBM3", 79.1, 3352, 989.4, 66.9, **_HOPPER),
        _gpu("h200", "NVIDIA H200", 139.8, 4800, 989.4, 66.9, **_HOPPER),
        _gpu(
            "a100-80", "NVIDIA A100-SXM4-80GB", 79.3, 2039, 312, 19.5, capability=(8, 0), cores=108,
            clock_ghz=1.41, l2=40 * 2**20, shared_memory=166_912, link=300e9, link_name="NVLink",
            host_link=32e9,
        ),
        _gpu("l40s", "NVIDIA L40S", 44.5, 864, 362.1, 91.6, cores=142, clock_ghz=2.52, l2=96 * 2**20, **_ADA),
        _gpu(
            "rtx4090", "NVIDIA GeForce RTX 4090", 23.5, 1008, 165.2, 82.6, cores=128, clock_ghz=2.52,
            l2=72 * 2**20, **_ADA,
        ),
        _tpu("v5e", "TPU v5e", 16, 819, 197, link=200e9, chips=_FLAT),
        _tpu("v6e", "TPU v6e", 32, 1640, 918, link=448e9, chips=_FLAT),
        _tpu("v5p", "TPU v5p", 95, 2765, 459, link=600e9, chips=_CUBES),
    )
}  # fmt: skip
"""name -> Target. Links: NVLink of Hopper 450 and of Ampere 300 GB/s a direction, PCIe 4 x16 32 GB/s a
direction; of the ICI bandwidth of a TPU chip in all directions together (v5e 1.6, v6e 3.58, v5p 4.8 Tbit/s).
"""


@dataclass(frozen=True)
class Machine:
    """`count` devices of one kind; `topology` arranges them as XLA's compiler wants it."""

    target: Target
    count: int
    topology: str
    fraction: float | None = None
    """Share of a GPU's memory that XLA allocates; None: MEMORY_FRACTION, which a run sets."""

    @property
    def usable(self) -> int:
        """Bytes that XLA allocates on one device."""
        return self.target.usable(self.fraction)

    @property
    def name(self) -> str:
        return f"{self.count} x {self.target.device}"


def target_of(device_kind: str) -> Target | None:
    """Returns the target whose own name is `device_kind` (jax.Device.device_kind); None if none has it."""
    return next((target for target in TARGETS.values() if target.device == device_kind), None)


def parse_target(text: str) -> Machine:
    """Returns the devices that `text` names: h100, h100x8, v5e-8.

    Raises ArealError for a name or a number that is not known.
    """
    known = ", ".join(f"{name}[xN]" if target.is_gpu else f"{name}-N" for name, target in TARGETS.items())
    found = re.fullmatch(r"(?P<name>.+?)(?:x(?P<gpus>\d+)|-(?P<cores>\d+))?", text)
    name = found["name"] if found else text
    if text in TARGETS:  # a name may end as a number of devices does: a100-80, rtx4090
        name, found = text, None
    if name not in TARGETS:
        raise ArealError(f"--target {text} is unknown; {did_you_mean(name, TARGETS, f'use one of {known}')}")
    target = TARGETS[name]
    if target.is_gpu:
        if found and found["cores"]:
            raise ArealError(f"--target {text}: GPUs are counted as in {name}x{found['cores']}")
        count = int(found["gpus"] or 1) if found else 1
        if count < 1:
            raise ArealError(f"--target {text} has no device; give at least {name}x1")
        return Machine(target, count, f"1x1x{count}")
    number, shapes = int((found and found["cores"]) or 0), target.chips or {}
    if number not in shapes:
        numbers = ", ".join(f"{name}-{number}" for number in shapes)
        raise ArealError(f"--target {text}: this TPU has no such size; use one of {numbers}")
    shape = shapes[number]
    return Machine(target, math.prod(int(part) for part in shape.split("x")), f"{name}:{shape}")


def missing_extra(target: Target) -> str | None:
    """Returns how to install the compiler for `target` if it is not there; None if it is."""
    if find_spec("jax_cuda12_plugin" if target.is_gpu else "libtpu"):
        return None
    return f"compiling for {target.device} needs the extra [{target.extra}]: {install_extra(target.extra)}"


def environment(flags: str = "") -> dict[str, str]:
    """Returns the environment variables of a process that compiles for devices that are not there.

    They must be set before jax is imported. The process itself runs on the CPU, also on a machine with
    accelerators. `flags`: XLA_FLAGS so far. Autotuning is off, because it would run kernels on the device.
    """
    return {
        "JAX_PLATFORMS": "cpu",
        "JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1",
        "TPU_SKIP_MDS_QUERY": "1",
        "TPU_WORKER_HOSTNAMES": "localhost",
        "TPU_ACCELERATOR_TYPE": "v5litepod-8",
        "TPU_MIN_LOG_LEVEL": "3",
        "TF_CPP_MIN_LOG_LEVEL": "3",
        "XLA_FLAGS": f"{flags} --xla_gpu_autotune_level=0".strip(),
    }
