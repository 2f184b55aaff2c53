"""Every loss against float64 numpy, its gradient against difference quotients, and its extremes."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from areal_jax.algorithms.advantages import ADVANTAGES
from areal_jax.algorithms.losses import LOSSES, policy_gradient, ppo_clip
from areal_jax.algorithms.off_policy import truncate
from areal_jax.algorithms.ratios import binary_kl
from areal_jax.config.loading import load_config
from areal_jax.config.presets import OWN_RATIO
from areal_jax.types import ArealError, PolicyOutputs, PreparedBatch
from tests.algorithms import reference_losses as reference
from tests.algorithms.batches import prepared
from tests.algorithms.sequences import each, slopes, wide


@pytest.fixture
def float64() -> Iterator[None]:
    with jax.enable_x64(True):
        yield


CASES: list[tuple[str, dict[str, Any]]] = [
    ("ppo_clip", {}),
    ("ppo_clip", {"low": 0.2, "high": 0.28}),
    ("ppo_clip", {"low": 0.1, "high": 0.1, "dual": 1.2}),
    ("ppo_clip", {"low": 0.02, "high": 0.03, "level": "sequence"}),
    ("ppo_clip", {"low": 0.02, "high": 0.03, "level": "sequence_token"}),
    ("sapo", {}),
    ("sapo", {"tau_positive": 2.0, "tau_negative": 0.5}),
    ("importance", {}),
    ("importance", {"level": "sequence"}),
    ("importance", {"level": "sequence_token"}),
    ("policy_gradient", {}),
    ("cispo", {}),
    ("cispo", {"high": 0.1}),
    ("aipo", {"cap": 1.1}),
    ("dppo", {"delta": 0.03}),
    ("dppo", {"delta": 0.01, "divergence": "binary_kl"}),
]


@pytest.mark.parametrize(("name", "settings"), CASES)
def test_a_loss_is_its_formula(float64: None, name: str, settings: dict[str, Any]):
    """Value to 1e-9, gradient to 1e-7 of the difference quotient."""
    now, batch = prepared(0)
    logp, batch = now.logp.astype(np.float64), wide(batch)
    loss = functools.partial(LOSSES[name], **settings)
    formula = functools.partial(reference.LOSSES[name], **settings)
    arrays = (batch.proximal_logp, batch.behavior_logp, batch.advantages)
    got, _ = loss(PolicyOutputs(jnp.asarray(logp)), batch)
    assert got.dtype == jnp.float64
    want = each(batch, formula, logp, logp, *arrays)
    np.testing.assert_allclose(np.where(batch.loss_mask, got, 0), want, rtol=0, atol=1e-9)

    def objective(x: jax.Array) -> jax.Array:
        return jnp.where(batch.loss_mask, batch.loss_weights * loss(PolicyOutputs(x), batch)[0], 0).sum()

    slope = jax.grad(objective)(jnp.asarray(logp))
    np.testing.assert_allclose(slope, slopes(batch, formula, logp, *arrays), rtol=0, atol=1e-7)
    assert np.abs(slope).max() > 0.01


@pytest.mark.parametrize(("name", "settings"), CASES)
def test_float32_is_near(name: str, settings: dict[str, Any]):
    now, batch = prepared(1)
    got, _ = LOSSES[name](now, batch, **settings)
    formula = functools.partial(reference.LOSSES[name], **settings)
    want = each(
        batch, formula, now.logp, now.logp, batch.proximal_logp, batch.behavior_logp, batch.advantages
    )
    np.testing.assert_allclose(np.where(batch.loss_mask, got, 0), want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", LOSSES)
def test_losses_that_read_the_behaviour_policy_are_those_that_say_so(name: str):
    """`presets.OWN_RATIO` is what refuses a second correction; it must name exactly these."""
    now, batch = prepared(2)
    other = batch._replace(behavior_logp=batch.behavior_logp - np.float32(0.3))
    here, there = (np.where(batch.loss_mask, LOSSES[name](now, x)[0], 0) for x in (batch, other))
    assert np.array_equal(here, there) == (name not in OWN_RATIO)


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        (
            "ppo_clip",
            {"level": "turn"},
            "loss_settings.level='turn' is unknown; use token, sequence or sequence_token",
        ),
        (
            "dppo",
            {"divergence": "kl"},
            "algorithm.loss_settings.divergence='kl' is unknown to the loss dppo; use total_variation or "
            "binary_kl",
        ),
    ],
)
def test_a_level_or_divergence_that_is_none(name: str, settings: dict[str, Any], message: str):
    with pytest.raises(ArealError, match=message):
        LOSSES[name](*prepared(3), **settings)


# --- clipping -----------------------------------------------------------------------------------------------


def test_clip_share_counts_the_tokens_whose_gradient_is_cut():
    """u = 1.5 with A > 0 and u = 0.5 with A < 0 are cut, their twins with the other sign are not."""
    _, batch = prepared(0, rows=((5,),), length=5)
    u = np.array([[1.0, 1.5, 0.5, 1.5, 0.5]], np.float32)
    batch = batch._replace(
        proximal_logp=np.zeros((1, 5), np.float32),
        advantages=np.array([[1.0, 1.0, -1.0, -1.0, 1.0]], np.float32),
    )
    now = PolicyOutputs(np.log(u))
    np.testing.assert_array_equal(ppo_clip(now, batch)[1]["clip_share"], [[0, 1, 1, 0, 0]])
    np.testing.assert_array_equal(ppo_clip(now, batch, dual=1.2)[1]["clip_share"], [[0, 1, 1, 1, 0]])
    slope = jax.grad(lambda x: ppo_clip(PolicyOutputs(x), batch, dual=1.2)[0].sum())(now.logp)
    np.testing.assert_array_equal(np.asarray(slope) == 0, [[False, True, True, True, False]])


def test_dual_clip_bounds_only_negative_advantages():
    """u = e on both tokens: A = -1 would cost e and costs dual; A = 1 is clipped at 1.2 as ever."""
    _, batch = prepared(8, rows=((3,),), length=3)
    batch = batch._replace(
        proximal_logp=np.zeros((1, 3), np.float32), advantages=np.array([[0.0, -1.0, 1.0]], np.float32)
    )
    now = PolicyOutputs(np.ones((1, 3), np.float32))
    np.testing.assert_allclose(ppo_clip(now, batch)[0], [[0, np.e, -1.2]], rtol=1e-6)
    np.testing.assert_allclose(ppo_clip(now, batch, dual=2.0)[0], [[0, 2, -1.2]], rtol=1e-6)


def test_cispo_and_aipo_clip_the_weight_and_not_the_token():
    """Far above the cap a token still gets the capped gradient, whatever A's sign; no lower bound."""
    _, batch = prepared(4, rows=((4,),), length=4)
    batch = batch._replace(
        behavior_logp=np.full((1, 4), -3, np.float32), advantages=np.array([[1, 1, -1, 1]], np.float32)
    )
    logp = np.array([[-3.0, -0.1, -0.1, -9.0]], np.float32)
    r = np.minimum(np.exp(logp + 3), 2)
    for name, settings in (("aipo", {"cap": 2.0}), ("cispo", {"high": 1.0})):
        slope = jax.grad(lambda x, n=name, s=settings: LOSSES[n](PolicyOutputs(x), batch, **s)[0].sum())(logp)
        np.testing.assert_allclose(slope, -r * batch.advantages, rtol=1e-6)


def test_dppo_cuts_only_tokens_that_move_away():
    """0.5 against 0.2 and 0.1: cut where A pushes further, kept where it pulls back; and kept near 0.2."""
    _, batch = prepared(5, rows=((5,),), length=5)
    batch = batch._replace(
        behavior_logp=np.log(np.full((1, 5), 0.2, np.float32)),
        advantages=np.array([[1.0, 1.0, -1.0, -1.0, 1.0]], np.float32),
    )
    logp = np.log(np.array([[0.2, 0.5, 0.5, 0.02, 0.3]], np.float32))
    _, metrics = LOSSES["dppo"](PolicyOutputs(logp), batch, delta=0.15)
    np.testing.assert_array_equal(metrics["clip_share"], [[0, 1, 0, 1, 0]])


def test_binary_kl_keeps_its_digits_in_float32():
    """Of nearly sure tokens too, whose probability rounds to 1; and of impossible ones it is finite."""
    p = np.array([-1e-6, -3e-6, -1e-4, -0.5, -30.0, 0.0], np.float32)
    q = np.array([-3e-6, -1e-6, -2e-4, -1.0, 0.0, -30.0], np.float32)
    want = reference.binary_kl(p.astype(np.float64), q.astype(np.float64))
    np.testing.assert_allclose(binary_kl(jnp.asarray(p), jnp.asarray(q)), want, rtol=1e-4)
    assert want[0] == pytest.approx(9.0e-7, rel=0.01)


# --- the decoupled objective (A3) ---------------------------------------------------------------------------


def decoupled(logp: jax.Array, batch: PreparedBatch) -> jax.Array:
    """weights x off-policy weight x loss, over the mask."""
    return jnp.where(
        batch.loss_mask, batch.loss_weights * truncate(batch)[0] * ppo_clip(PolicyOutputs(logp), batch)[0], 0
    ).sum()


def test_proximal_at_behaviour_is_ppo(float64: None):
    now, batch = prepared(3)
    batch = wide(batch)._replace(proximal_logp=batch.behavior_logp.astype(np.float64))
    logp = now.logp.astype(np.float64)
    b = batch.behavior_logp
    want = (batch.loss_weights * each(batch, reference.ppo_clip, logp, logp, b, b, batch.advantages)).sum()
    assert abs(decoupled(jnp.asarray(logp), batch) - want) <= 1e-10


def test_proximal_at_current_is_the_weighted_policy_gradient(float64: None):
    """(pi_theta / pi_behav) A grad log pi, as at the first minibatch."""
    now, batch = prepared(4)
    logp = now.logp.astype(np.float64)
    batch = wide(batch)._replace(proximal_logp=logp)
    slope = jax.grad(decoupled)(jnp.asarray(logp), batch)
    ratio = np.minimum(np.exp(logp - batch.behavior_logp), 5)
    np.testing.assert_allclose(slope, -batch.loss_weights * ratio * batch.advantages, rtol=0, atol=1e-10)


def test_aipo_on_policy_has_the_gradient_of_reinforce(float64: None):
    now, batch = prepared(4)
    logp = now.logp.astype(np.float64)
    batch = wide(batch)._replace(behavior_logp=logp)

    def slope(name: str) -> jax.Array:
        return jax.grad(lambda x: LOSSES[name](PolicyOutputs(x), batch)[0].sum())(jnp.asarray(logp))

    np.testing.assert_allclose(slope("aipo"), slope("policy_gradient"), rtol=0, atol=1e-12)


def aipo_slope(logp: np.ndarray, batch: PreparedBatch, cap: float) -> np.ndarray:
    """The gradient of the framework's objective, sum of weights x loss over the mask, by the log-probs."""

    def objective(x: jax.Array) -> jax.Array:
        token_loss, _ = LOSSES["aipo"](PolicyOutputs(x), batch, cap=cap)
        return jnp.where(batch.loss_mask, batch.loss_weights * token_loss, 0).sum()

    return np.asarray(jax.grad(objective)(jnp.asarray(logp)))


def test_aipo_on_policy_is_reinforce_with_the_groups_mean_reward_as_baseline(float64: None):
    """-(weight) (R - mean of the group): from rewards, by numpy, and not from the estimator's advantages."""
    now, batch = prepared(4)
    logp, batch = now.logp.astype(np.float64), batch._replace(token_rewards=None)
    reward, groups = np.asarray(batch.reward, np.float64), np.asarray(batch.group_ids)
    centred = reward - np.array([reward[groups == group].mean() for group in groups])
    advantages = np.where(batch.loss_mask, np.concatenate([[0], centred])[batch.segment_ids], 0)
    a = load_config("algorithm.preset=aipo").algorithm
    estimated = ADVANTAGES[a.advantage](reward, batch, **a.advantage_settings)
    np.testing.assert_allclose(np.where(batch.loss_mask, estimated, 0), advantages, atol=1e-6)
    batch = wide(batch)._replace(behavior_logp=logp, advantages=advantages)
    np.testing.assert_allclose(
        aipo_slope(logp, batch, 5.0), -batch.loss_weights * advantages, rtol=0, atol=1e-12
    )


def test_aipos_weight_is_a_constant_and_grows_with_the_cap_up_to_plain_importance_sampling(float64: None):
    """d(loss)/d(logp) is -min(r, cap) A: were r differentiated, it would be that times (1 + logp)."""
    now, batch = prepared(6)
    logp, batch = now.logp.astype(np.float64), wide(batch)
    far = np.random.default_rng(0).normal(0, 2, logp.shape)
    batch = batch._replace(behavior_logp=logp - far)
    ratio = np.exp(far)
    of_all = batch.loss_weights * batch.advantages
    is_asked = batch.loss_mask & (of_all != 0)
    caps = (1.0, 2.0, 4.0, 10.0, 1e300)
    found = {cap: -aipo_slope(logp, batch, cap)[is_asked] / of_all[is_asked] for cap in caps}
    assert (ratio[is_asked] > 10).any() and (ratio[is_asked] < 1).any()
    for cap, weight in found.items():
        np.testing.assert_allclose(weight, np.minimum(ratio[is_asked], cap), rtol=1e-12)
        assert weight.max() <= cap
    for lower, higher in itertools.pairwise(caps):
        assert (found[lower] <= found[higher]).all() and (found[lower] < found[higher]).any()


def test_padding_and_prompts_contribute_nothing_to_aipo():
    """Even if they hold infinities: off the mask the gradient is 0, and on it the same."""
    now, batch = prepared(3)
    clean = aipo_slope(now.logp, batch, 5.0)
    dirty = batch._replace(
        behavior_logp=np.where(batch.loss_mask, batch.behavior_logp, -np.float32(200)),
        advantages=np.where(batch.loss_mask, batch.advantages, np.float32(7)),
    )
    np.testing.assert_array_equal(aipo_slope(now.logp, dirty, 5.0), clean)
    assert not clean[~np.asarray(batch.loss_mask)].any() and clean.any()


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


def test_policy_gradient_weighs_log_probs_by_advantages():
    now, batch = prepared(9)
    loss, metrics = policy_gradient(now, batch)
    np.testing.assert_allclose(loss, -batch.advantages * now.logp, rtol=1e-6)
    np.testing.assert_array_equal(metrics["nll"], -now.logp)
