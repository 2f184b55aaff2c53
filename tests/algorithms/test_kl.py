"""The KL term's gradient by exact expectation over a small softmax, on- and off-policy."""

from __future__ import annotations

from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from areal_jax.algorithms.kl import kl_loss, kl_reward
from areal_jax.types import ArealError
from tests.algorithms import reference_losses
from tests.algorithms.reference import log_softmax

RNG = np.random.default_rng(0)
THETA, REFERENCE, BEHAVIOR = RNG.normal(size=(3, 7))


@pytest.fixture(autouse=True)
def float64() -> Iterator[None]:
    with jax.enable_x64(True):
        yield


def expected(theta: jax.Array, behavior: np.ndarray, estimator: str) -> jax.Array:
    """E over behaviour of the term: every outcome weighed by its probability."""
    logp = jax.nn.log_softmax(theta)
    term = kl_loss(logp, jnp.asarray(log_softmax(REFERENCE)), jnp.asarray(log_softmax(behavior)), estimator)
    return (np.exp(log_softmax(behavior)) * term).sum()


def exact_gradient() -> np.ndarray:
    """d KL(theta | reference) / d theta_j = p_j (log p_j - log f_j - KL)."""
    gap = log_softmax(THETA) - log_softmax(REFERENCE)
    p = np.exp(log_softmax(THETA))
    return p * (gap - (p * gap).sum())


@pytest.mark.parametrize("behavior", [THETA, BEHAVIOR], ids=["on-policy", "off-policy"])
@pytest.mark.parametrize("estimator", ["k2", "k3"])
def test_gradient_is_that_of_the_kl(estimator: str, behavior: np.ndarray):
    got = jax.grad(expected)(jnp.asarray(THETA), behavior, estimator)
    np.testing.assert_allclose(got, exact_gradient(), rtol=0, atol=1e-12)


@pytest.mark.parametrize("behavior", [THETA, BEHAVIOR], ids=["on-policy", "off-policy"])
def test_k3_has_the_value_of_the_kl(behavior: np.ndarray):
    p, gap = np.exp(log_softmax(THETA)), log_softmax(THETA) - log_softmax(REFERENCE)
    assert float(expected(jnp.asarray(THETA), behavior, "k3")) == pytest.approx((p * gap).sum(), abs=1e-12)


@pytest.mark.parametrize("estimator", ["k2", "k3"])
def test_without_the_weight_the_gradient_is_wrong(estimator: str):
    """The control: k3 even on-policy, both off-policy (arXiv:2512.21852), so the tests above can fail."""

    def unweighted(theta: jax.Array) -> jax.Array:
        logp = jax.nn.log_softmax(theta)
        frozen = jax.lax.stop_gradient(logp)  # a behaviour equal to the policy: no weight, and none to derive
        own = kl_loss(logp, jnp.asarray(log_softmax(REFERENCE)), frozen, "k2")
        gap = jnp.asarray(log_softmax(REFERENCE)) - logp
        term = own if estimator == "k2" else jnp.exp(gap) - 1 - gap
        return (np.exp(log_softmax(BEHAVIOR)) * term).sum()

    assert np.abs(jax.grad(unweighted)(jnp.asarray(THETA)) - exact_gradient()).max() > 0.01


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_a_term_is_its_formula(estimator: str):
    theta, ref, b = (log_softmax(x) for x in (THETA, REFERENCE, BEHAVIOR))
    got = kl_loss(*map(jnp.asarray, (theta, ref, b)), estimator)
    np.testing.assert_allclose(
        got, reference_losses.kl_loss(theta, theta, ref, b, estimator), rtol=0, atol=1e-9
    )
    want = reference_losses.kl_estimate(b, ref, estimator)
    np.testing.assert_allclose(
        kl_reward(jnp.asarray(b), jnp.asarray(ref), estimator), want, rtol=0, atol=1e-9
    )


@pytest.mark.parametrize("behavior", [THETA, BEHAVIOR], ids=["on-policy", "off-policy"])
def test_k1_as_a_loss_has_no_gradient_to_speak_of(behavior: np.ndarray):
    """Why it is refused: every token has one, their expectation is 0."""
    got = jax.grad(expected)(jnp.asarray(THETA), behavior, "k1")
    np.testing.assert_allclose(got, 0, rtol=0, atol=1e-12)


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_of_the_rewards_only_k1_has_the_gradient_of_the_kl(estimator: str):
    """The policy gradient of E[-reward] on policy, every outcome weighed by its probability."""
    logp, ref = log_softmax(THETA), log_softmax(REFERENCE)
    cost = kl_reward(jnp.asarray(logp), jnp.asarray(ref), estimator)

    def surrogate(theta: jax.Array) -> jax.Array:
        return (np.exp(logp) * cost * jax.nn.log_softmax(theta)).sum()

    gap = np.abs(jax.grad(surrogate)(jnp.asarray(THETA)) - exact_gradient()).max()
    assert gap <= 1e-12 if estimator == "k1" else gap > 0.01


def test_the_reward_carries_no_gradient():
    slope = jax.grad(lambda b, f: kl_reward(b, f).sum(), (0, 1))(jnp.ones((1, 2)), jnp.zeros((1, 2)))
    np.testing.assert_array_equal(slope, np.zeros((2, 1, 2)))


def test_no_such_estimator():
    with pytest.raises(ArealError, match=r"algorithm\.kl\.estimator='k4' is unknown; use k1, k2 or k3"):
        kl_reward(jnp.zeros(1), jnp.zeros(1), "k4")


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_a_log_prob_that_is_no_number_shows(estimator: str, value: float):
    """In the gradient, whichever of the three policies it comes from: that ends a run with an error."""
    bad, good = jnp.full((1, 1), value), jnp.full((1, 1), -1.0)
    for arrays in ((good, good, bad), (good, bad, good)):
        if estimator == "k1" and arrays[1] is bad:
            continue  # a constant to k1's gradient; its value shows
        slope = jax.grad(lambda x, a=arrays: kl_loss(x, *a[1:], estimator).sum())(arrays[0])
        assert not np.isfinite(slope).any()
        assert not np.isfinite(kl_loss(*arrays, estimator)).any()


@pytest.mark.parametrize("gap", [-200.0, 200.0])
@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_extreme_gaps_stay_finite(estimator: str, gap: float):
    logp, zero = jnp.full((1, 1), -1.0), jnp.zeros((1, 1))
    for ref, behavior in ((logp + gap, zero), (zero, logp + gap)):
        value, slope = jax.value_and_grad(lambda x, r=ref, b=behavior: kl_loss(x, r, b, estimator).sum())(
            logp
        )
        assert np.isfinite(value)
        assert np.isfinite(slope).all()


@pytest.mark.parametrize("estimator", ["k2", "k3"])
def test_equal_policies_have_no_kl(estimator: str):
    logp = jnp.asarray(log_softmax(THETA))[None]
    value, slope = jax.value_and_grad(lambda x: kl_loss(x, logp, logp, estimator).sum())(logp)
    assert float(value) == 0
    np.testing.assert_array_equal(slope, 0)


WIDE = np.stack(
    np.meshgrid(
        -np.geomspace(1e-4, 60, 12),  # current
        np.concatenate(
            [-np.geomspace(1e-4, 60, 12)[::-1], np.geomspace(1e-4, 60, 12)]
        ),  # reference - current
        [-19.5, -3.0, 0.0, 2.0, 15.0],  # current - behaviour
    )
).reshape(3, -1)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_k3_has_the_gradient_of_its_formula_at_any_distance(dtype: type):
    """r (current - reference), however far apart: e^d - 1 - d, differentiated, has no digits left for it."""
    theta, d, log_ratio = WIDE
    logp, ref, behavior = (x.astype(dtype) for x in (theta, theta + d, theta - log_ratio))
    got = jax.grad(lambda x: kl_loss(x, jnp.asarray(ref), jnp.asarray(behavior), "k3").sum())(
        jnp.asarray(logp)
    )
    exact = [x.astype(float) for x in (logp, ref, behavior)]
    want = np.exp(exact[0] - exact[2]) * (exact[0] - exact[1])
    assert got.dtype == dtype
    np.testing.assert_allclose(got, want, rtol=1e-5 if dtype == np.float32 else 1e-12)


def test_k3_keeps_its_sign_where_the_reference_is_far_likelier():
    """e^-4 against e^-25: the loss has to raise the token's probability, as the KL asks."""
    logp, ref = jnp.full(1, -25.0), jnp.full(1, -4.0)
    got = jax.grad(lambda x: kl_loss(x, ref, jnp.full(1, -25.0), "k3").sum())(logp)
    np.testing.assert_array_equal(got, -21)


@pytest.mark.parametrize("broken", ["logp", "ref_logp", "behavior_logp"])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_a_log_prob_that_is_no_number_makes_the_gradient_of_k3_one_too(broken: str, value: float):
    given = dict.fromkeys(("logp", "ref_logp", "behavior_logp"), jnp.full(1, -2.0))
    given |= {broken: jnp.full(1, value)}
    got = jax.grad(lambda x: kl_loss(**{**given, "logp": x}, estimator="k3").sum())(given["logp"])
    assert np.isnan(got).all()
