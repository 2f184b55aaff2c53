"""A reference policy and a teacher on meshes of their own: log-probs, devices and checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
import pytest

from areal_jax.config.presets import preset_settings
from areal_jax.config.sections import AlgorithmConfig
from areal_jax.models.model import Model
from areal_jax.parallel.mesh import make_mesh, rows_over
from areal_jax.trainer.checkpoint import Checkpointer, restore
from areal_jax.trainer.learner import Learner, Teacher
from areal_jax.trainer.scorer import Executor
from areal_jax.trajectories.packing import pack
from areal_jax.types import Batch
from tests.trainer.conftest import LENGTH, make_groups, random_params, same_bits
from tests.trainer.test_prepare import exact

pytestmark = pytest.mark.few_optimizations


def executor(first: int, dtype: str = "auto", **sizes: int) -> Executor:
    shape = {"data": 1, "fsdp": 1, "tensor": 1, **sizes}
    return Executor(make_mesh(shape, jax.devices()[first:], "a test"), dtype)


def learner_of(model: Model, settings: dict[str, Any], **apart: Any) -> Learner:
    """On a mesh of two devices, fsdp=2."""
    algorithm = AlgorithmConfig.model_validate(preset_settings({"group_size": 4, **settings}))
    mesh = executor(0, fsdp=2).mesh
    return Learner(model, algorithm, optax.sgd(0.5), rows=2, length=LENGTH, mesh=mesh, **apart)


@pytest.fixture(scope="module")
def batch() -> Batch:
    return pack(make_groups(), 2, LENGTH)


KL = {"preset": "grpo", "kl": {"coef": 0.1}, "proximal": "recompute"}


def devices_of(tree: Any) -> set[int]:
    return {device.id for leaf in jax.tree.leaves(tree) for device in leaf.devices()}


@pytest.fixture(scope="module")
def together(model: Model) -> Learner:
    return learner_of(model, KL)


@pytest.fixture(scope="module")
def apart(model: Model) -> Learner:
    return learner_of(model, KL, reference=executor(2, tensor=2))


@pytest.mark.slow
def test_a_reference_apart_gives_the_same_update_and_lies_on_its_own_devices(
    model, params, batch, together, apart, tmp_path: Path
):
    """Policy moved away from it; two updates, then a checkpoint that brings it back to its own mesh."""
    states, found = [], []
    for learner in (together, apart):
        state = learner.init(params)
        half = jax.tree.map(lambda leaf: 0.5 * leaf, state.params)
        state = state.replace(params=half)
        for _ in range(2):
            prepared = learner.prepare(state, batch)
            state, metrics = learner.update(state, prepared)
        states.append(state)
        found.append((prepared.ref_logp, metrics))
        assert prepared.ref_logp.sharding.is_equivalent_to(rows_over(learner.mesh), 2)
    want = np.where(batch.loss_mask, exact(model, params, batch)[0], 0)
    for ref_logp, _ in found:
        np.testing.assert_allclose(ref_logp, want, rtol=0, atol=1e-5)
    assert found[0][1]["kl"] > 0.01
    assert found[1][1] == pytest.approx(found[0][1], rel=1e-3, abs=1e-6)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), states[0].params, states[1].params)
    state = states[1]
    assert devices_of(state.reference) == {2, 3}
    assert devices_of(state.replace(reference=None)) == {0, 1}
    assert devices_of(states[0]) == {0, 1}
    checkpointer = Checkpointer(tmp_path)
    checkpointer.save(state, lambda version: None, 60)
    checkpointer.close(60)
    restored = restore(tmp_path, apart.abstract_state()).state
    assert restored is not None and same_bits(restored, state)
    assert devices_of(restored.reference) == {2, 3}


@pytest.mark.slow
def test_a_reference_in_bfloat16_takes_half_the_bytes_and_rounds(model, params, batch, together):
    """Also on the trainer's own mesh; the policy stays in float32."""
    rounding = learner_of(model, KL, reference=executor(0, "bfloat16", fsdp=2))
    state = rounding.init(params)
    dtypes = [{str(leaf.dtype) for leaf in jax.tree.leaves(of)} for of in (state.reference, state.params)]
    assert dtypes == [{"bfloat16"}, {"float32"}]
    exactly = together.prepare(together.init(params), batch).ref_logp
    gap = np.abs(rounding.prepare(state, batch).ref_logp - exactly)
    assert 1e-3 < gap.max() < 0.5


def test_a_teacher_apart_gives_its_log_probs(model, batch):
    """From parameters that it loads onto its own mesh; rows split over data there and over fsdp here."""
    theirs = random_params(model, 5)

    def load(shardings: Any) -> Any:
        placed = jax.device_put(theirs, shardings)
        assert devices_of(placed) == {1, 2}
        return placed

    settings = {"preset": "distillation", "teacher": "a test's", "off_policy": "none"}
    learner = learner_of(model, settings, teacher=Teacher(model, load, executor(1, data=2)))
    prepared = learner.prepare(learner.init(random_params(model, 0)), batch)
    want = np.where(batch.loss_mask, exact(model, theirs, batch)[0], 0)
    np.testing.assert_allclose(prepared.teacher_logp, want, rtol=0, atol=1e-5)
