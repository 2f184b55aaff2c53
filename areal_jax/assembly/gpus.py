"""The GPUs that a process may use, and the environment variables that its programs need there."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Mapping
from ctypes.util import find_library
from pathlib import Path

from areal_jax.config.tree import Config
from areal_jax.plugin import NOT_INSTALLED, install_extra, version_of

FRACTION, FLAGS = "XLA_PYTHON_CLIENT_MEM_FRACTION", "XLA_FLAGS"
PRECISION = "JAX_DEFAULT_MATMUL_PRECISION"
MEMORY_FRACTION = 0.92
"""Share of a GPU's memory that a process allocates when it starts. jax's own default, 0.75, leaves a quarter
unused; the rest is for CUDA, its libraries, and the self-tests of kernels (`models.kernels.trials`).
"""

PLUGINS = "jax-cuda13-plugin", "jax-cuda12-plugin"
NCCL = "nvidia-nccl-cu13", "nvidia-nccl-cu12"


def visible_gpus() -> list[str]:
    """Returns the GPUs that this process may use, by index or name: CUDA_VISIBLE_DEVICES if set, else all.

    All GPUs are listed by nvidia-smi or, if it is not installed, from /dev. Asking jax would reserve the
    GPUs.
    """
    given = os.environ.get("CUDA_VISIBLE_DEVICES")
    if given is not None:
        return [name for name in given.split(",") if name]
    if shutil.which("nvidia-smi") is None:
        return [path.name.removeprefix("nvidia") for path in sorted(Path("/dev").glob("nvidia[0-9]*"))]
    listed = subprocess.run(
        ["nvidia-smi", "--list-gpus"], capture_output=True, text=True, timeout=60, check=False
    )
    return [str(n) for n in range(sum(line.startswith("GPU ") for line in listed.stdout.splitlines()))]


def gpu_problems(platform: str) -> list[str]:
    """Returns why jax, whose devices are of `platform`, cannot use this machine's GPUs well, with remedies.

    An empty list if there are no GPUs, or no problem is found.
    """
    gpus = visible_gpus()
    if not gpus:
        return []
    problems, plugin = [], next(filter(_is_installed, PLUGINS), None)
    if plugin is None:
        problems.append(f"jax has no CUDA plugin; {install_extra('cuda12')}")
    elif (found := version_of(plugin)) != (wanted := version_of("jaxlib")):
        problems.append(f"{plugin} {found} does not match jaxlib {wanted}; install both in one version")
    elif platform == "cpu":
        problems.append(
            f"jax does not use the GPUs although {plugin} is installed; perhaps the driver ({_driver()}) is "
            "too old: `JAX_PLATFORMS=cuda python -c 'import jax; jax.devices()'` prints the reason"
        )
    if len(gpus) > 1 and not any(map(_is_installed, NCCL)) and not find_library("nccl"):
        problems.append(
            "NCCL is missing, without which several GPUs cannot compute together; install nvidia-nccl-cu12 "
            "(nvidia-nccl-cu13 for CUDA 13)"
        )
    return problems


def _is_installed(package: str) -> bool:
    return version_of(package) != NOT_INSTALLED


def _driver() -> str:
    """Returns the version of NVIDIA's kernel driver."""
    found = Path("/proc/driver/nvidia/version")
    match = re.search(r"\d+\.\d+(\.\d+)?", found.read_text()) if found.exists() else None
    return match[0] if match else "of unknown version"


def gpu_environment(config: Config, given: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Returns the environment variables of a run's processes on GPUs; what `given` sets already has priority.

    The latency-hiding scheduler overlaps collectives with computation. Deterministic kernels are used if the
    run promises bits: with trainer.numerics=exact, and with control.max_staleness=0, where a run that is
    started again gives the same parameters. A float32 model's products are computed in float32, not in TF32,
    whose 10 bits of mantissa are the default.
    """
    flags = ["--xla_gpu_enable_latency_hiding_scheduler=true"]
    if config.promises_bits:
        flags.append("--xla_gpu_deterministic_ops=true")
    # XLA takes the last of two equal flags: those of the user come last.
    own = [flag for flag in flags if flag.partition("=")[0] not in given.get(FLAGS, "")]
    return {
        FRACTION: given.get(FRACTION, str(MEMORY_FRACTION)),
        FLAGS: " ".join([*own, given.get(FLAGS, "")]).strip(),
        **({PRECISION: given.get(PRECISION, "highest")} if config.model.dtype == "float32" else {}),
    }


def use_gpu_environment(config: Config) -> None:
    """Set `gpu_environment` in this process if it may use GPUs; call it before jax is asked for devices."""
    if not visible_gpus():
        return
    import jax

    chosen = gpu_environment(config)
    os.environ.update(chosen)
    if precision := chosen.get(PRECISION):
        # jax read this variable when it was imported, and the others are read when it looks for devices.
        jax.config.update("jax_default_matmul_precision", precision)
