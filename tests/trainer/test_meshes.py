"""How devices share the work changes nothing that is learnt: two AdamW updates on every kind of mesh."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from areal_jax.config.presets import preset_settings
from areal_jax.config.sections import AlgorithmConfig
from areal_jax.models.model import Model
from areal_jax.parallel.mesh import make_mesh, own_rows, row_axes
from areal_jax.trainer.checkpoint import Checkpointer, restore
from areal_jax.trainer.learner import Learner
from areal_jax.trainer.state import TrainState
from areal_jax.trajectories.packing import pack
from areal_jax.types import ArealError
from tests.trainer.conftest import LENGTH, MakeLearner, distance, same_bits
from tests.trainer.test_shared_prompts import groups_of
from tests.trajectories.unpacking import unpack

pytestmark = pytest.mark.few_optimizations

BOTH = {"fsdp": 2, "tensor": 2}
MESHES = [{"data": 2}, {"fsdp": 2}, {"tensor": 2}, BOTH]
PLAIN = {"preset": "grpo", "kl": {"coef": 0.0}, "proximal": "recompute"}
EVERYTHING = {
    "preset": "ppo",
    "critic": {"kind": "separate", "coef": 0.3},
    "kl": {"coef": 0.1, "place": "reward", "estimator": "k1", "target": 0.01, "horizon": 2000},
    "reference": "ema",
    "reference_decay": 0.75,
    "entropy_coef": 0.01,
    "minibatches": 2,
}
UPDATES = 2


class Trained(NamedTuple):
    learner: Learner
    state: TrainState
    metrics: list[dict[str, float]]
    prepared: list[list[dict[str, Any]]]
    """Of each batch its sequences' arrays."""


MakeTrained = Callable[..., Trained]


@pytest.fixture(scope="module")
def trained(model: Model, params: Any) -> MakeTrained:
    """`trained(settings, mesh, memory)`: on prompts that their groups share."""
    made: dict[str, Trained] = {}

    def make(settings: dict[str, Any], mesh: dict[str, int] | None = None, memory: Any = "device") -> Trained:
        key = repr((settings, mesh, memory))
        if key not in made:
            made[key] = run(settings, mesh or {}, memory)
        return made[key]

    def run(settings: dict[str, Any], mesh: dict[str, int], memory: Any) -> Trained:
        algorithm = AlgorithmConfig.model_validate(preset_settings({"group_size": 4, **settings}))
        of = Learner(
            model,
            algorithm,
            optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(0.01, weight_decay=0.1)),
            rows=2,
            length=LENGTH,
            mesh=make_mesh({"data": 1, "fsdp": 1, "tensor": 1, **mesh}, jax.devices(), "the trainer"),
            logp_chunk=8,
            optimizer_memory=memory,
        )
        state, all_metrics, all_prepared = of.init(params), [], []
        for _ in range(UPDATES):
            prepared = of.prepare(state, pack(groups_of(), 2, LENGTH, algorithm.minibatches))
            state, metrics = of.update(state, prepared)
            all_metrics.append(metrics)
            all_prepared.append(unpack(prepared))
        return Trained(of, state, all_metrics, all_prepared)

    return make


def assert_as_one_device(one: Trained, other: Trained, params: Any) -> None:
    """To 1e-5: parameters, what else the state holds, metrics, what was prepared."""
    assert distance(one.state.params, params) > 1e-2
    assert distance(one.state, other.state) <= 1e-5
    for wanted, found in zip(one.metrics, other.metrics, strict=True):
        assert found == {name: pytest.approx(value, rel=1e-5, abs=1e-5) for name, value in wanted.items()}
    for wanted, found in zip(one.prepared, other.prepared, strict=True):
        for left, right in zip(wanted, found, strict=True):
            for name, value in left.items():
                np.testing.assert_allclose(right[name], value, rtol=1e-5, atol=1e-5, err_msg=name)


def assert_lies_as_parameters(of: Learner, state: TrainState) -> None:
    """Every moment, reference and critic leaf has its parameter's shards."""
    trees = [(state.params, state.optimizer)]
    if state.critic is not None:
        trees += [(state.critic, state.critic_optimizer), (state.params, {"mu": state.reference})]
    for params, others in trees:
        named = jax.tree_util.tree_leaves_with_path(others)
        by_path = {jax.tree_util.keystr(path): leaf for path, leaf in named}
        seen = 0
        for path, leaf in jax.tree_util.tree_leaves_with_path(params):
            own = [x for name, x in by_path.items() if name.endswith(jax.tree_util.keystr(path))]
            assert all(x.sharding.spec == leaf.sharding.spec for x in own if x.shape == leaf.shape)
            seen += len([x for x in own if x.shape == leaf.shape])
        assert seen >= len(jax.tree.leaves(params))
    gate, mesh = state.params["blocks"]["mlp"]["gate"], of.mesh.shape
    assert gate.sharding.shard_shape(gate.shape) == (2, 16 // mesh["fsdp"], 24 // mesh["tensor"])


@pytest.mark.slow
@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_the_mesh_does_not_matter(params: Any, trained: MakeTrained, mesh: dict[str, int]):
    one, other = trained(PLAIN), trained(PLAIN, mesh)
    assert_as_one_device(one, other, params)
    assert_lies_as_parameters(other.learner, other.state)


@pytest.mark.slow
@pytest.mark.parametrize(
    "mesh", [*(pytest.param(mesh, marks=pytest.mark.soak) for mesh in MESHES[:3]), BOTH], ids=str
)
def test_the_mesh_does_not_matter_to_critic_reference_and_coefficients(
    params: Any, trained: MakeTrained, mesh: dict[str, int]
):
    one, other = trained(EVERYTHING), trained(EVERYTHING, mesh)
    assert one.state.kl_control.coef != EVERYTHING["kl"]["coef"]
    assert distance(one.state.reference, one.state.params) > 1e-3
    assert_as_one_device(one, other, params)
    assert_lies_as_parameters(other.learner, other.state)


@pytest.mark.slow
def test_moments_in_the_hosts_memory_train_the_same(trained: MakeTrained, tmp_path: Path):
    """Every bit of the update, and the checkpoint, which is restored to where it came from."""
    one, other = trained(PLAIN, BOTH), trained(PLAIN, BOTH, "host")
    assert same_bits(one.state, other.state)
    assert one.metrics == other.metrics
    kinds = jax.tree.map(lambda leaf: leaf.sharding.memory_kind, other.state)
    (adam,) = (part for part in jax.tree.leaves(kinds.optimizer, is_leaf=is_adam) if is_adam(part))
    assert {*jax.tree.leaves(adam.mu), *jax.tree.leaves(adam.nu)} == {"pinned_host"}
    assert {adam.count, *jax.tree.leaves(kinds.params)} == {"device"}
    assert_lies_as_parameters(other.learner, other.state)
    checkpointer = Checkpointer(tmp_path)
    checkpointer.save(other.state, lambda version: None, 60)
    checkpointer.close(60)
    for memory, of in (("pinned_host", other), ("device", one)):
        restored = restore(tmp_path, of.learner.abstract_state()).state
        assert same_bits(restored, other.state)
        moment = next(p for p in jax.tree.leaves(restored.optimizer, is_leaf=is_adam) if is_adam(p)).mu
        assert {leaf.sharding.memory_kind for leaf in jax.tree.leaves(moment)} == {memory}


def is_adam(part: Any) -> bool:
    return hasattr(part, "mu")


@pytest.mark.slow
def test_no_device_computes_another_ones_rows(trained: MakeTrained):
    """The compiled gradient of 4 rows of 16 tokens, width 16: none holds them all, but for the gradient of
    the embedding, which has half of the width of each.
    """
    made = trained(PLAIN, {"data": 2})
    mesh = make_mesh({"data": 1, "fsdp": 2, "tensor": 1}, jax.devices(), "the trainer")
    of = Learner(made.learner.model, made.learner.algorithm, optax.sgd(1.0), rows=4, length=LENGTH, mesh=mesh)
    by_row, whole = (NamedSharding(mesh, spec) for spec in (row_axes(mesh), PartitionSpec()))
    prepared = made.learner.prepare(made.state, pack(groups_of(), 2, LENGTH))

    def abstract(x: jax.Array) -> jax.ShapeDtypeStruct:
        shape, sharding = (x.shape, whole) if x.ndim == 1 else ((4, *x.shape[1:]), by_row)
        return jax.ShapeDtypeStruct(shape, x.dtype, sharding=sharding)

    arguments = (of.abstract_state(), jax.eval_shape(of.programs.zero_sums), jax.tree.map(abstract, prepared))
    text = of.programs.accumulate.lower(*arguments).compile().as_text()
    shapes = {tuple(map(int, found.split(","))) for found in re.findall(r"f32\[([\d,]+)\]", text)}
    assert (2, LENGTH, 16) in shapes
    whole_rows = {shape for shape in shapes if shape[:2] == (4, LENGTH) or shape[0] == 4 * LENGTH}
    assert {int(np.prod(shape)) for shape in whole_rows} <= {4 * LENGTH * 16 // 2}
    sums = [line for line in text.splitlines() if " all-reduce(" in line]
    assert not [line for line in sums if "= pred[]" in line]  # each device visits what its own rows see
    assert not [line for line in sums if "f32[37,16]" in line]
    of_head = [line for line in text.splitlines() if " reduce-scatter(" in line]
    assert len(of_head) == 1 and "= f32[8,37]" in of_head[0]  # each device's part of the sum
    assert "/while/" not in of_head[0]  # not once a chunk


def test_what_does_not_divide_is_named(learner: MakeLearner):
    of = learner(mesh={"data": 2})
    np.testing.assert_array_equal(of.own_rows(8), np.arange(8))
    with pytest.raises(
        ArealError, match=r"trainer\.rows=3 does not divide .* x fsdp x expert = 2 .* multiple"
    ):
        Learner(of.model, of.algorithm, of.optimizer, rows=3, length=LENGTH, mesh=of.mesh)


def test_a_mesh_without_a_device_of_this_process_is_named(monkeypatch):
    mesh = make_mesh({"data": 2, "fsdp": 1}, jax.devices(), "the trainer")
    monkeypatch.setattr(jax.sharding.Mesh, "local_devices", property(lambda self: []))
    with pytest.raises(ArealError, match=r"no device of the mesh data=2, which takes 2 of .*trainer\.mesh"):
        own_rows(mesh, 4)
