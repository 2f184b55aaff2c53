"""Critic, moving reference, KL in the reward and teacher: prepared, trained, and restored bit for bit."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
import pytest

from areal_jax.config.presets import preset_settings
from areal_jax.config.sections import AlgorithmConfig
from areal_jax.models.model import Model
from areal_jax.parallel.mesh import make_mesh
from areal_jax.trainer.checkpoint import Checkpointer, restore
from areal_jax.trainer.critic import value_loss
from areal_jax.trainer.learner import Learner, Teacher
from areal_jax.trainer.state import TrainState
from areal_jax.trajectories.packing import pack
from areal_jax.types import Batch
from tests.algorithms import advantage_reference
from tests.models.reference import logits
from tests.trainer.conftest import LENGTH, distance, make_groups, same_bits
from tests.trainer.test_prepare import exact

pytestmark = pytest.mark.few_optimizations

COEF, TARGET, HORIZON, DECAY = 0.1, 0.01, 2000, 0.75


def make(
    model: Model, kind: str, frozen: Teacher | None = None, mesh: Any = None, **settings: Any
) -> Learner:
    given = {"preset": "ppo", "critic": {"kind": kind, "coef": 0.3}, "group_size": 4, **settings}
    return Learner(
        model,
        AlgorithmConfig.model_validate(preset_settings(given)),
        optax.adam(1e-2),
        rows=2,
        length=LENGTH,
        mesh=make_mesh({"data": 1, "fsdp": 1, "tensor": 1, **(mesh or {})}, jax.devices(), "the trainer"),
        logp_chunk=8,
        teacher=frozen,
    )


@pytest.fixture(scope="module")
def half(params: Any) -> Any:
    return jax.tree.map(lambda leaf: 0.5 * leaf, params)


@pytest.fixture(scope="module")
def full(model: Model, half: Any) -> Learner:
    """All at once: a critic of its own, a moving reference, an adaptive KL in the reward, a teacher."""
    return make(
        model,
        "separate",
        Teacher(model, lambda shardings: jax.device_put(half, shardings)),
        kl={"coef": COEF, "place": "reward", "estimator": "k1", "target": TARGET, "horizon": HORIZON},
        reference="ema",
        reference_decay=DECAY,
        minibatches=2,
        teacher="half",
    )


@pytest.fixture(scope="module")
def batch() -> Batch:
    return pack(make_groups(), 2, LENGTH, 2)


def with_head(of: Learner, params: Any) -> TrainState:
    """A critic whose values are not 0."""
    state = of.init(params)
    weight = np.random.default_rng(5).normal(size=16).astype(np.float32)
    head = {"weight": jax.device_put(weight, of.state_shardings.critic["head"]["weight"]), "bias": 0.25}
    head["bias"] = jax.device_put(np.float32(0.25), of.state_shardings.critic["head"]["bias"])
    return state.replace(critic={**state.critic, "head": head})


def exact_values(model: Model, trunk: Any, head: Any, batch: Batch) -> tuple[np.ndarray, np.ndarray]:
    """The value before every token, and after each sequence's last, by the numpy transformer."""
    config = dataclasses.replace(model.config, is_tied=False)
    params = {**trunk, "head": np.asarray(head["weight"])[:, None]}
    before, ends = np.zeros(batch.tokens.shape), np.zeros(len(batch.reward))
    for segment in range(1, len(batch.reward) + 1):
        where = batch.segment_ids == segment
        after = logits(config, params, batch.tokens[where])[:, 0] + float(head["bias"])
        before[where] = np.concatenate([[0], after[:-1]])
        ends[segment - 1] = after[-1]
    return before, ends


def test_prepare_asks_critic_reference_and_teacher(
    model: Model, params: Any, half: Any, full: Learner, batch: Batch
):
    state = with_head(full, params)
    prepared = full.prepare(state, batch)
    mask = batch.loss_mask
    before, ends = exact_values(model, params, state.critic["head"], batch)
    np.testing.assert_allclose(prepared.values, np.where(mask, before, 0), atol=2e-5)
    assert batch.truncated.any() and not batch.truncated.all()
    np.testing.assert_allclose(prepared.bootstrap, np.where(batch.truncated, ends, 0), atol=2e-5)
    for got, under in ((prepared.teacher_logp, half), (prepared.ref_logp, params)):
        np.testing.assert_allclose(got, np.where(mask, exact(model, under, batch)[0], 0), atol=1e-5)
    kl = batch.behavior_logp - np.asarray(prepared.ref_logp)
    np.testing.assert_allclose(prepared.token_rewards, np.where(mask, -COEF * kl, 0), atol=1e-5)

    values, kl = np.asarray(prepared.values, float), np.asarray(prepared.token_rewards, float)
    for segment, reward in enumerate(batch.reward):
        where = (batch.segment_ids == segment + 1) & mask
        earned = kl[where]
        earned[-1] += reward
        want = advantage_reference.gae(earned, values[where], float(prepared.bootstrap[segment]), 1.0, 0.95)
        np.testing.assert_allclose(np.asarray(prepared.advantages)[where], want, rtol=1e-4, atol=1e-4)
        np.testing.assert_allclose(
            np.asarray(prepared.returns)[where], want + values[where], rtol=1e-4, atol=1e-4
        )


@pytest.mark.slow
def test_a_killed_update_goes_on_with_the_same_bits(params: Any, full: Learner, batch: Batch, tmp_path: Path):
    """Critic, its moments, the moving reference and the coefficient are all in the checkpoint."""
    state = full.init(params)
    state, _ = full.update(state, full.prepare(state, batch))
    checkpointer = Checkpointer(tmp_path)
    checkpointer.save(state, lambda version: None, 60.0)
    checkpointer.close(60.0)
    restored = restore(tmp_path, full.abstract_state())
    assert restored.refused == () and restored.state is not None
    assert same_bits(restored.state, state)
    on, metrics = full.update(state, full.prepare(state, batch))
    again, same = full.update(restored.state, full.prepare(restored.state, batch))
    assert same_bits(on, again) and metrics == same
    assert int(on.version) == 2 and int(on.step) == 4
    fresh = full.init(params)
    for name in ("critic", "critic_optimizer", "reference", "kl_control"):
        assert not same_bits(getattr(on, name), getattr(fresh, name)), name


def test_a_version_moves_reference_and_coefficient_once(params: Any, half: Any, full: Learner, batch: Batch):
    """However many minibatches it has: two here."""
    state = full.init(params)
    new, metrics = full.update(state, full.prepare(state, batch))
    want = jax.tree.map(lambda old, now: DECAY * old + (1 - DECAY) * np.asarray(now), params, new.params)
    assert distance(new.reference, want) < 1e-6
    assert distance(new.reference, params) > 1e-3
    assert metrics["kl_coef"] == pytest.approx(COEF)
    kl, from_teacher = (
        (batch.behavior_logp - exact(full.model, under, batch)[0])[batch.loss_mask].mean()
        for under in (params, half)
    )
    assert metrics["teacher_kl"] == pytest.approx(from_teacher, rel=1e-3)
    assert metrics["kl"] == pytest.approx(kl, rel=1e-3)
    tokens = batch.loss_mask.sum()
    want = COEF * (1 + np.clip(kl / TARGET - 1, -0.2, 0.2) * tokens / HORIZON)
    assert float(new.kl_control.coef) == pytest.approx(want, rel=1e-5)
    assert float(new.kl_control.tokens) == 0


def test_a_critic_learns_the_returns(params: Any, full: Learner, batch: Batch):
    """From values of 0, which explain nothing, to values that explain most; returns move meanwhile."""
    by_prompt = batch._replace(reward=np.where(batch.group_ids % 2, 1, -1).astype(np.float32))
    state, explained = full.init(params), []
    for _ in range(12):
        state, metrics = full.update(state, full.prepare(state, by_prompt))
        explained.append(metrics["explained_variance"])
    assert explained[0] == 0
    assert explained[-1] > 0.5
    assert metrics["critic_grad_norm"] > 0


@pytest.mark.slow
def test_a_shared_critic_is_a_head_whose_gradient_reaches_the_trunk(model: Model, params: Any, batch: Batch):
    """d/dw of sum weights coef (V - R)^2 / 2 at arrival is sum weights coef (V - R) h; so does the trunk."""
    of = make(model, "shared", minibatches=1)
    state = with_head(of, params)
    assert set(state.critic) == {"head"}
    prepared = of.prepare(state, batch)
    before, _ = exact_values(model, params, state.critic["head"], batch)
    np.testing.assert_allclose(prepared.values, np.where(batch.loss_mask, before, 0), atol=2e-5)

    def sums_of(state: TrainState) -> tuple[Any, Any]:
        sums = of.programs.zero_sums()
        for micro in of.micro_batches(prepared)[0]:
            sums = sums if micro is None else of.programs.accumulate(state, sums, micro)
        return sums[0]

    grads, head = sums_of(state)
    error = np.asarray(prepared.values, float) - np.asarray(prepared.returns, float)
    slope = 0.3 * np.asarray(prepared.loss_weights, float) * error
    assert float(head["head"]["bias"]) == pytest.approx(slope.sum(), rel=1e-3)
    weight = np.asarray(state.critic["head"]["weight"], float)
    bias = float(state.critic["head"]["bias"])
    want = (slope * np.where(batch.loss_mask, before - bias, 0)).sum()  # w . dL/dw
    assert float(weight @ np.asarray(head["head"]["weight"], float)) == pytest.approx(want, rel=1e-3)
    without = state.replace(critic=jax.tree.map(lambda leaf: 0 * leaf, state.critic))
    assert distance(sums_of(without)[0], grads) > 1e-4


def test_a_value_that_moves_further_than_the_clip_gains_nothing():
    value = np.array([[1.0, 1.0, -2.0, 0.3]], np.float32)
    arrived = np.array([[0.0, 0.0, 0.0, 0.0]], np.float32)
    returns = np.array([[2.0, 0.4, 1.0, 0.5]], np.float32)
    loss, is_clipped = value_loss(value, arrived, returns, 0.5)
    # clipped to 0.5, 0.5, -0.5, 0.3: errors 1.5, 0.1, -1.5, -0.2 against plain -1, 0.6, -3, -0.2
    np.testing.assert_allclose(loss[0], [0.5 * 1.5**2, 0.5 * 0.6**2, 0.5 * 3**2, 0.5 * 0.2**2], rtol=1e-5)
    np.testing.assert_array_equal(is_clipped[0], [True, False, False, False])
    slope = jax.grad(lambda v: value_loss(v, arrived, returns, 0.5)[0].sum())(value)
    np.testing.assert_allclose(slope[0], [0, 0.6, -3, -0.2], rtol=1e-5)
    plain, never = value_loss(value, arrived, returns, None)
    np.testing.assert_allclose(plain[0], 0.5 * (value - returns)[0] ** 2, rtol=1e-6)
    assert not never.any()
