"""What every loss and every estimator must keep; found by their tables, so a new one is tested unasked."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from areal_jax.algorithms.advantages import ADVANTAGES
from areal_jax.algorithms.losses import LOSSES
from areal_jax.algorithms.masked import keep, per_token, total
from areal_jax.plugin import check_settings, load_object
from areal_jax.types import Batch, PolicyOutputs
from tests.algorithms.batches import prepared

OWN = "conformance_own"


def my_loss(now: PolicyOutputs, batch: Batch, *, power: float = 1.0) -> tuple[Any, dict[str, Any]]:
    """One of one's own, which off the mask takes the logarithm of whatever it is given."""
    ratio = jnp.exp(now.logp - batch.proximal_logp)
    return -batch.advantages * ratio**power * jnp.log(2 + ratio), {"ratio": ratio}


def my_advantage(rewards: Any, batch: Batch) -> Any:
    return per_token(rewards - rewards.mean(), batch.segment_ids)


@pytest.fixture(autouse=True)
def own_module() -> Iterator[None]:
    module = ModuleType(OWN)
    module.my_loss, module.my_advantage = my_loss, my_advantage  # type: ignore[attr-defined]
    sys.modules[OWN] = module
    yield
    del sys.modules[OWN]


@pytest.fixture(params=[*LOSSES, f"{OWN}:my_loss"])
def loss(request: pytest.FixtureRequest) -> Callable[..., Any]:
    found = load_object(request.param, LOSSES, "loss")
    check_settings(found, {}, "algorithm.loss_settings")
    return found


@pytest.fixture(params=[*ADVANTAGES, f"{OWN}:my_advantage"])
def advantage(request: pytest.FixtureRequest) -> Callable[..., Any]:
    found = load_object(request.param, ADVANTAGES, "advantage estimator")
    check_settings(found, {}, "algorithm.advantage_settings")
    return found


def objective(loss: Callable[..., Any], now: PolicyOutputs, batch: Batch) -> jax.Array:
    """As the framework reduces: outputs are kept on the mask before the loss, token losses after it."""
    kept = PolicyOutputs(*(None if x is None else keep(x, batch.loss_mask) for x in now))
    token_loss, _ = loss(kept, batch)
    return total(batch.weights * batch.off_policy_weight * token_loss, batch.loss_mask)


COMPILED = jax.jit(jax.value_and_grad(objective, argnums=1), static_argnums=0)


def gradient(loss: Callable[..., Any], now: PolicyOutputs, batch: Batch) -> tuple[jax.Array, PolicyOutputs]:
    return COMPILED(loss, now, batch)


def test_shapes_and_types(loss: Callable[..., Any]):
    now, batch = prepared(0)
    token_loss, metrics = loss(now, batch)
    assert (token_loss.shape, token_loss.dtype) == (batch.tokens.shape, jnp.float32)
    assert {name: x.shape for name, x in metrics.items()} == dict.fromkeys(metrics, batch.tokens.shape)
    assert np.isfinite(np.asarray(token_loss)[batch.loss_mask]).all()
    assert np.abs(np.asarray(token_loss)[batch.loss_mask]).max() > 0


@pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf, 200.0])
def test_off_the_mask_nothing_counts(loss: Callable[..., Any], poison: float):
    """NaN and infinities off the mask, in every array: same loss, same gradient, none off the mask."""
    now, batch = prepared(1)
    value, slope = gradient(loss, now, batch)

    def poisoned(x: Any) -> Any:
        is_token = x is not None and x.shape == batch.tokens.shape and x.dtype == np.float32
        return np.where(batch.loss_mask, x, np.float32(poison)) if is_token else x

    bad = Batch(*(poisoned(x) for x in batch))
    bad_value, bad_slope = gradient(loss, PolicyOutputs(*(poisoned(x) for x in now)), bad)
    assert float(bad_value) == float(value)
    for one, other in zip(slope, bad_slope, strict=True):
        np.testing.assert_array_equal(one, other)
        np.testing.assert_array_equal(np.asarray(other)[~batch.loss_mask], 0)
    assert np.abs(slope.logp).max() > 0


def test_rows_may_come_in_any_order(loss: Callable[..., Any]):
    now, batch = prepared(2)
    order = np.array([2, 0, 3, 1])

    def permuted(x: Any) -> Any:
        return x[order] if x is not None and x.shape == batch.tokens.shape else x

    value, slope = gradient(loss, now, batch)
    other_value, other = gradient(
        loss, PolicyOutputs(*(permuted(x) for x in now)), Batch(*(permuted(x) for x in batch))
    )
    assert float(other_value) == pytest.approx(float(value), rel=1e-5, abs=1e-6)
    np.testing.assert_allclose(np.asarray(slope.logp)[order], other.logp, rtol=1e-6)


def test_padding_changes_nothing(loss: Callable[..., Any]):
    now, batch = prepared(3)

    def padded(x: Any) -> Any:
        is_token = x is not None and x.shape == batch.tokens.shape
        return np.pad(x, ((0, 2), (0, 5))) if is_token else x

    value, slope = gradient(loss, now, batch)
    other_value, other = gradient(
        loss, PolicyOutputs(*(padded(x) for x in now)), Batch(*(padded(x) for x in batch))
    )
    assert float(other_value) == pytest.approx(float(value), rel=1e-5, abs=1e-6)
    np.testing.assert_array_equal(other.logp, padded(np.asarray(slope.logp)))


def test_jit_changes_nothing(loss: Callable[..., Any]):
    now, batch = prepared(4)
    value, slope = gradient(loss, now, batch)
    with jax.disable_jit():
        plain_value, plain = jax.value_and_grad(objective, argnums=1)(loss, now, batch)
    assert float(plain_value) == pytest.approx(float(value), rel=1e-6)
    np.testing.assert_allclose(plain.logp, slope.logp, rtol=1e-5, atol=1e-7)


def estimated(advantage: Callable[..., Any], batch: Batch) -> np.ndarray:
    """What an estimator answers, on the loss mask: (1 or 2, B, T), the returns second."""
    answer = advantage(batch.reward, batch)
    arrays = answer if isinstance(answer, tuple) else (answer,)
    assert all(x.shape == batch.tokens.shape for x in arrays)
    return np.stack([np.where(batch.loss_mask, x, 0) for x in arrays])


def test_advantages_are_finite_and_not_all_zero(advantage: Callable[..., Any]):
    _, batch = prepared(5)
    got = estimated(advantage, batch)
    assert np.isfinite(got).all() and np.abs(got).max() > 0


def test_advantages_do_not_depend_on_where_sequences_lie(advantage: Callable[..., Any]):
    """Rows permuted, rows and columns of padding added; under jit and without."""
    _, batch = prepared(6)
    got = estimated(advantage, batch)
    order = np.array([3, 1, 0, 2])

    def moved(x: Any) -> Any:
        is_token = x is not None and x.shape == batch.tokens.shape
        return np.pad(x[order], ((0, 2), (0, 5))) if is_token else x

    other = Batch(*(moved(x) for x in batch))
    want = np.pad(got[:, order], ((0, 0), (0, 2), (0, 5)))
    np.testing.assert_array_equal(estimated(advantage, other), want)
    jitted = estimated(jax.jit(advantage), other)
    np.testing.assert_allclose(jitted, want, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("poison", [np.nan, np.inf])
def test_advantages_read_nothing_off_the_mask(advantage: Callable[..., Any], poison: float):
    _, batch = prepared(8)

    def poisoned(x: Any) -> Any:
        is_token = x is not None and x.shape == batch.tokens.shape and x.dtype == np.float32
        return np.where(batch.loss_mask, x, np.float32(poison)) if is_token else x

    bad = Batch(*(poisoned(x) for x in batch))
    np.testing.assert_array_equal(estimated(advantage, bad), estimated(advantage, batch))


def test_advantages_do_not_depend_on_the_order_of_groups(advantage: Callable[..., Any]):
    _, batch = prepared(7)
    got = estimated(advantage, batch)
    renamed = batch._replace(group_ids=(batch.group_ids.max() - batch.group_ids).astype(np.int32))
    np.testing.assert_allclose(estimated(advantage, renamed), got, rtol=1e-6, atol=1e-6)
