"""Forecasts the memory of a run on each of its devices, without the temporaries of its programs."""

from __future__ import annotations

from functools import partial
from typing import Literal

import jax
import jax.numpy as jnp

from areal_jax.assembly.devices import overwrites_serving, params_bytes
from areal_jax.config.sections import ExecutorConfig, MeshConfig
from areal_jax.config.tree import Config
from areal_jax.models.config import ModelConfig
from areal_jax.models.model import Model
from areal_jax.models.quantize import CODES, SCALE
from areal_jax.trainer.critic import Critic
from areal_jax.trainer.trainable import Trainable
from areal_jax.weights.store import dtypes_in


def memory_table(
    config: Config, model: Model, placement: str, teacher: Model | None = None
) -> list[tuple[str, str, int]]:
    """Returns (owner, content, bytes per device) of everything that stays allocated during a run.

    Owner and content are texts, such as trainer and "gradient, float32". `placement`: split or shared. Not
    included: temporaries of the programs. The trainer needs 4 bytes per parameter for master weights, and per
    trained parameter 8 for Adam and 4 for the gradient. If publishing overwrites the host's weights in place,
    there is one copy of the published weights; otherwise the trainer holds one, and each host holds the
    current and the next version (with on_update=pinned, more). `teacher`: None without distillation.
    """
    c, dtype = model.config, config.wire_dtype
    host_shards, on_one = config.runtime.host_tensor, partial(on_one_device, config.trainer.mesh, model)
    wire = params_bytes(model, dtype)
    moments = "trainer" if config.trainer.optimizer_memory == "device" else "the trainer's host memory"
    trainable = Trainable(config.trainable)
    trained = trainable.count(model)
    few = "" if trained == model.parameter_count else f", of {trained:,} trained parameters"
    rows = [
        ("trainer", "master weights, float32", on_one(params_bytes(model, "float32"))),
        (moments, f"Adam moments, float32{few}", on_one(8 * trained)),
        ("trainer", f"gradient, float32{few}", on_one(4 * trained)),
    ]
    if config.algorithm.has_reference:
        rows.append(_frozen_row(config, "reference", f"reference policy{{}}{few}", model, trained))
    if config.algorithm.critic.kind != "none":
        critic = Critic(model, config.algorithm.critic.kind, trainable).parameter_count
        rows += [
            ("trainer", "critic, float32", on_one(4 * critic)),
            (moments, "the critic's Adam moments, float32", on_one(8 * critic)),
            ("trainer", "the critic's gradient, float32", on_one(4 * critic)),
        ]
    state = sum(size for _, what, size in rows if "gradient" not in what)
    if config.trainer.compute != "packed":
        rows.append(("trainer", "a prefix tree's path, and its gradient in float32", _path_bytes(config, c)))
    rows.append(("the host's memory", "all but the gradient, while a checkpoint is written", state))
    if teacher is not None:
        rows.append(_frozen_row(config, "teacher", "teacher{}", teacher, teacher.parameter_count))
    rows += _published_rows(config, model, placement)
    pages = _kv_pages(config, model)
    rows.append(("each host", *pages))
    if config.observe.evaluate:
        read = params_bytes(model, "float32") + (wire if dtype != "float32" else 0)
        rows += [
            ("evaluation host", "a checkpoint's weights, as read and as served", read // host_shards),
            ("evaluation host", *pages),
        ]
    return rows


def on_one_device(mesh: MeshConfig, model: Model, size: int) -> int:
    """Returns the bytes on each device of `size` bytes of parameters that the mesh splits.

    The axis expert splits the matrices of experts alone.
    """
    rest = 1 - model.expert_parameter_count / model.base.parameter_count * (1 - 1 / mesh.expert)
    return int(size * rest) // (mesh.fsdp * mesh.tensor)


def _frozen_row(
    config: Config, name: Literal["reference", "teacher"], what: str, model: Model, count: int
) -> tuple[str, str, int]:
    """Returns the row of `memory_table` of a reference policy or a teacher.

    `what`: its content, with {} for the dtype. `count`: its parameters on the trainer's mesh; on devices of
    its own, or in a dtype of its own, it has all parameters of `model`.
    """
    executor: ExecutorConfig = getattr(config.runtime, name)
    dtype = "float32" if executor.dtype == "auto" else executor.dtype
    mesh = executor.mesh or config.trainer.mesh
    owner = f"the {name}'s devices" if executor.mesh else "trainer"
    size = params_bytes(model, dtype) if executor.is_apart else 4 * count
    return owner, what.format(f", {dtype}"), on_one_device(mesh, model, size)


def _published_rows(config: Config, model: Model, placement: str) -> list[tuple[str, str, int]]:
    """Returns the rows of `memory_table` of the weights that are published, and of hosts' own copies."""
    dtype, kind = config.wire_dtype, config.generation.quantize
    host_shards = config.runtime.host_tensor
    wire = params_bytes(model, dtype)
    if overwrites_serving(config, placement):
        return [("each host", f"serving weights, overwritten in place, {dtype}", wire)]
    is_staged = config.weights_backend == "orbax"
    what = "published weights, one being written and one waiting" if is_staged else "published weights"
    on_trainer = on_one_device(config.trainer.mesh, model, (1 + is_staged) * wire)
    rows = [("trainer", f"{what}, {dtype}", on_trainer)]
    is_ahead = config.on_update == "pinned" and config.runtime.redis is not None
    sets = config.parameter_sets + is_ahead  # one waits in its process for room
    what = "and the next ones" if sets == 2 else f"of up to {sets} versions"
    if kind != "none":
        rows.append(("each host", f"a version as it arrives, {dtype}", wire // host_shards))
        dtype += f" with {kind} matrices"
    served = served_bytes(model, config.wire_dtype, kind)
    return [*rows, ("each host", f"serving weights, {what}, {dtype}", sets * served // host_shards)]


def _kv_pages(config: Config, model: Model) -> tuple[str, int]:
    """Returns content and bytes per device of a host's KV pages."""
    c, g, shards = model.config, config.generation, config.runtime.host_tensor
    room, page = g.kv_tokens or g.slots * g.length, g.tokens_per_page
    dtype = c.dtype if g.kv_dtype == "auto" else g.kv_dtype
    has_routes = config.algorithm.routes == "replay"
    abstract = jax.eval_shape(lambda: model.kv_pages(room // page, page, dtype, keeps_experts=has_routes))
    size = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(abstract))
    return f"KV pages, {room} tokens, {dtype}", size // (shards if c.kv_heads % shards == 0 else 1)


def _path_bytes(config: Config, c: ModelConfig) -> int:
    """Returns the bytes of a walk's path and of the gradient with respect to it (`trees.tree_arrays`).

    These are KV, of policy and separate critic, and hidden states. The path has room for the longest sample
    and for the tokens that are computed at once.
    """
    places = config.row_length + config.tree_block
    kv = 2 * c.layers * c.kv_heads * c.head_dim * (1 + (config.algorithm.critic.kind == "separate"))
    return places * (kv * (jnp.dtype(c.dtype).itemsize + 4) + 8 * c.width)


def served_bytes(model: Model, dtype: str, kind: str) -> int:
    """Returns the size in bytes of the parameters with which a host decodes that stores them by `kind`.

    `dtype`: of the published parameters. `kind`: as generation.quantize.
    """
    if kind == "none":
        return params_bytes(model, dtype)
    served = model.with_codes(kind).abstract_params
    kinds = jax.tree.leaves(dtypes_in(served, dtype))
    return sum(
        leaf.size * (leaf.dtype if path[-1].key in (CODES, SCALE) else kind).itemsize
        for (path, leaf), kind in zip(jax.tree.leaves_with_path(served), kinds, strict=True)
    )
