"""The decoupled PPO objective against float64 references, and its extremes (A3)."""

from __future__ import annotations

from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from areal_jax.algorithms.losses import policy_gradient, ppo_clip
from areal_jax.algorithms.weights import truncate
from areal_jax.types import Batch, PolicyOutputs
from tests.algorithms import reference
from tests.algorithms.batches import prepared


@pytest.fixture
def float64() -> Iterator[None]:
    with jax.enable_x64(True):
        yield


def wide(batch: Batch) -> Batch:
    """The batch with float64 arrays."""
    return Batch(*(x.astype(np.float64) if x is not None and x.dtype == np.float32 else x for x in batch))


def objective(logp: jax.Array, batch: Batch, **settings: float) -> jax.Array:
    """What the framework minimises: weights x off-policy weight x loss, over the mask."""
    loss, _ = ppo_clip(PolicyOutputs(logp), batch, **settings)
    weight, _ = truncate(batch)
    return jnp.where(batch.loss_mask, batch.weights * weight * loss, 0).sum()


@pytest.mark.parametrize(
    "settings", [dict(low=0.2, high=0.2), dict(low=0.2, high=0.28), dict(low=0.1, high=0.1, dual=1.2)]
)
def test_ppo_clip_is_its_formula(float64: None, settings: dict[str, float]):
    now, batch = prepared(0)
    batch = wide(batch)
    logp = now.logp.astype(np.float64)
    loss, metrics = ppo_clip(PolicyOutputs(jnp.asarray(logp)), batch, **settings)
    want = reference.ppo_clip(
        logp, batch.proximal_logp, batch.advantages, settings["low"], settings["high"], settings.get("dual")
    )
    assert loss.dtype == jnp.float64
    np.testing.assert_allclose(loss, want, rtol=0, atol=1e-10)
    np.testing.assert_allclose(metrics["ratio"], np.exp(logp - batch.proximal_logp), rtol=0, atol=1e-10)


def test_clip_share_counts_the_tokens_whose_gradient_is_cut(float64: None):
    now, batch = prepared(1)
    batch = wide(batch)
    logp = now.logp.astype(np.float64)
    _, metrics = ppo_clip(PolicyOutputs(jnp.asarray(logp)), batch, low=0.2, high=0.28)
    slope = reference.ppo_clip_slope(logp, batch.proximal_logp, batch.advantages, 0.2, 0.28)
    is_cut = (slope == 0) & (batch.advantages != 0)
    assert 0 < is_cut.sum() < batch.loss_mask.sum()
    np.testing.assert_array_equal(metrics["clip_share"], is_cut)


def test_decoupled_objective_and_gradient(float64: None):
    """sum w exp(p - b) min(u A, clip(u) A), u = exp(theta - p): value and both kinds of gradient."""
    now, batch = prepared(2)
    batch = wide(batch)
    logp = now.logp.astype(np.float64)
    weight = np.minimum(np.exp(batch.proximal_logp - batch.behavior_logp), 5) * batch.weights
    want = (weight * reference.ppo_clip(logp, batch.proximal_logp, batch.advantages, 0.2, 0.2)).sum()
    value, slope = jax.value_and_grad(objective)(jnp.asarray(logp), batch, low=0.2, high=0.2)
    assert abs(value - want) <= 1e-10
    want_slope = weight * reference.ppo_clip_slope(logp, batch.proximal_logp, batch.advantages, 0.2, 0.2)
    np.testing.assert_allclose(slope, want_slope, rtol=0, atol=1e-10)
    step = 1e-6
    for row, column in np.argwhere(batch.loss_mask)[::3]:
        moved = np.zeros_like(logp)
        moved[row, column] = step
        up = objective(jnp.asarray(logp + moved), batch, low=0.2, high=0.2)
        down = objective(jnp.asarray(logp - moved), batch, low=0.2, high=0.2)
        assert abs((up - down) / (2 * step) - slope[row, column]) <= 1e-6


def test_proximal_at_behaviour_is_ppo(float64: None):
    now, batch = prepared(3)
    batch = wide(batch)._replace(proximal_logp=batch.behavior_logp.astype(np.float64))
    logp = now.logp.astype(np.float64)
    ppo = reference.ppo_clip(logp, batch.behavior_logp, batch.advantages, 0.2, 0.2)
    assert abs(objective(jnp.asarray(logp), batch) - (batch.weights * ppo).sum()) <= 1e-10


def test_proximal_at_current_is_the_weighted_policy_gradient(float64: None):
    """(pi_theta / pi_behav) A grad log pi, as at the first minibatch."""
    now, batch = prepared(4)
    logp = now.logp.astype(np.float64)
    batch = wide(batch)._replace(proximal_logp=logp)
    slope = jax.grad(objective)(jnp.asarray(logp), batch)
    ratio = np.minimum(np.exp(logp - batch.behavior_logp), 5)
    np.testing.assert_allclose(slope, -batch.weights * ratio * batch.advantages, rtol=0, atol=1e-10)


def test_no_gradient_reaches_behaviour_or_reference_through_the_loss():
    now, batch = prepared(5)

    def of(behavior: jax.Array, reference_logp: jax.Array) -> jax.Array:
        moved = batch._replace(behavior_logp=behavior, ref_logp=reference_logp)
        return ppo_clip(PolicyOutputs(now.logp), moved)[0].sum()

    for slope in jax.grad(of, (0, 1))(batch.behavior_logp, batch.ref_logp):
        np.testing.assert_array_equal(slope, 0)


def test_versions_may_be_mixed_inside_a_sequence():
    """Proposition 1: only recorded log-probs count, not which version recorded them."""
    now, batch = prepared(6)
    assert len(set(batch.versions[0][batch.loss_mask[0]].tolist())) > 1
    one_version = batch._replace(versions=np.zeros_like(batch.versions))
    np.testing.assert_array_equal(ppo_clip(now, batch)[0], ppo_clip(now, one_version)[0])


@pytest.mark.parametrize("advantage", [-1.0, 1.0])
@pytest.mark.parametrize("log_ratio", [-200.0, 200.0])
@pytest.mark.parametrize("dual", [None, 3.0])
def test_extreme_ratios_stay_finite(log_ratio: float, advantage: float, dual: float | None):
    _, batch = prepared(7)
    logp = (batch.proximal_logp + log_ratio).astype(np.float32)
    batch = batch._replace(advantages=np.full_like(batch.advantages, advantage))

    def of(logp: jax.Array) -> jax.Array:
        return jnp.where(batch.loss_mask, ppo_clip(PolicyOutputs(logp), batch, dual=dual)[0], 0).sum()

    value, slope = jax.value_and_grad(of)(logp)
    assert np.isfinite(value)
    assert np.isfinite(slope).all()
    if dual is not None and advantage < 0:
        assert value <= dual * batch.loss_mask.sum() + 1e-3


def test_dual_clip_bounds_only_negative_advantages():
    """u = e on both tokens: A = -1 would cost e and costs dual; A = 1 is clipped at 1.2 as ever."""
    _, batch = prepared(8, rows=((3,),), length=3)
    batch = batch._replace(
        proximal_logp=np.zeros((1, 3), np.float32), advantages=np.array([[0.0, -1.0, 1.0]], np.float32)
    )
    now = PolicyOutputs(np.ones((1, 3), np.float32))
    plain, _ = ppo_clip(now, batch)
    bounded, _ = ppo_clip(now, batch, dual=2.0)
    np.testing.assert_allclose(plain, [[0, np.e, -1.2]], rtol=1e-6)
    np.testing.assert_allclose(bounded, [[0, 2, -1.2]], rtol=1e-6)


def test_policy_gradient_weighs_log_probs_by_advantages():
    now, batch = prepared(9)
    loss, metrics = policy_gradient(now, batch)
    np.testing.assert_allclose(loss, -batch.advantages * now.logp, rtol=1e-6)
    np.testing.assert_array_equal(metrics["nll"], -now.logp)
