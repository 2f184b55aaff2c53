"""What every loss, off-policy weight and estimator must keep; a new one in the tables is tested unasked."""

from __future__ import annotations

import functools
import inspect
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
from areal_jax.algorithms.off_policy import OFF_POLICY
from areal_jax.algorithms.ratios import ratio
from areal_jax.plugin import check_settings, load_object
from areal_jax.types import PolicyOutputs, PreparedBatch
from tests.algorithms.batches import prepared

OWN = "conformance_own"
ROWS, LENGTH = 8, 15
"""Where sequences are moved to: one compiled program serves every arrangement."""


def my_loss(now: PolicyOutputs, batch: PreparedBatch, *, power: float = 1.0) -> tuple[Any, dict[str, Any]]:
    """One of one's own, which off the mask takes the logarithm of whatever it is given."""
    u = ratio(now.logp, batch.proximal_logp)
    return -batch.advantages * u**power * jnp.log(2 + u), {"ratio": u}


def my_advantage(rewards: Any, batch: PreparedBatch) -> Any:
    return per_token(rewards - rewards.mean(), batch.segment_ids)


def my_weight(batch: PreparedBatch) -> tuple[Any, Any]:
    gap = batch.proximal_logp - batch.behavior_logp
    return jnp.exp(jnp.clip(gap, -1, 1)), jnp.abs(gap) > 1


@pytest.fixture(autouse=True)
def own_module() -> Iterator[None]:
    module = ModuleType(OWN)
    for own in (my_loss, my_advantage, my_weight):
        setattr(module, own.__name__, own)
    sys.modules[OWN] = module
    yield
    del sys.modules[OWN]


LEVELS = {
    f"{name}/{level}": functools.partial(LOSSES[name], level=level)
    for name in ("ppo_clip", "importance")
    for level in ("sequence", "sequence_token")
}
"""Losses that look at whole sequences."""

SEQUENCE_WEIGHTS = {
    f"{name}/{aggregate}": functools.partial(OFF_POLICY[name], level="sequence", aggregate=aggregate)
    for name in ("truncate", "mask")
    for aggregate in ("mean", "sum", "max")
} | {"mask/binary_kl": functools.partial(OFF_POLICY["mask"], metric="binary_kl", upper=0.01)}


@pytest.fixture(params=[*LOSSES, *LEVELS, f"{OWN}:my_loss"])
def loss(request: pytest.FixtureRequest) -> Callable[..., Any]:
    if request.param in LEVELS:
        return LEVELS[request.param]
    found = load_object(request.param, LOSSES, "loss")
    check_settings(found, {}, "algorithm.loss_settings")
    return found


@pytest.fixture(params=[*OFF_POLICY, *SEQUENCE_WEIGHTS, f"{OWN}:my_weight"])
def weight(request: pytest.FixtureRequest) -> Callable[..., Any]:
    """A statistic over minibatches is given one minibatch."""
    if request.param in SEQUENCE_WEIGHTS:
        return SEQUENCE_WEIGHTS[request.param]
    found = load_object(request.param, OFF_POLICY, "off-policy weight")
    check_settings(found, {}, "algorithm.off_policy_settings")
    is_statistic = "minibatches" in inspect.signature(found).parameters
    return functools.partial(found, minibatches=1) if is_statistic else found


@pytest.fixture(params=[*ADVANTAGES, f"{OWN}:my_advantage"])
def advantage(request: pytest.FixtureRequest) -> Callable[..., Any]:
    found = load_object(request.param, ADVANTAGES, "advantage estimator")
    check_settings(found, {}, "algorithm.advantage_settings")
    return found


# --- arrangements -------------------------------------------------------------------------------------------

Move = Callable[[np.ndarray], Any]


def over_tokens(batch: PreparedBatch, move: Move, values: Any) -> Any:
    """The tuple of arrays with those of tokens moved."""
    is_token = [x is not None and np.shape(x) == batch.tokens.shape for x in values]
    return type(values)(*(move(np.asarray(x)) if y else x for x, y in zip(values, is_token, strict=True)))


def poison(batch: PreparedBatch, value: float) -> Move:
    """`value` off the mask, in every array of floats."""
    return lambda x: np.where(batch.loss_mask, x, np.float32(value)) if x.dtype == np.float32 else x


def pad(x: np.ndarray) -> np.ndarray:
    return np.pad(x, ((0, ROWS - x.shape[0]), (0, LENGTH - x.shape[1])))


def unpack(batch: PreparedBatch) -> Move:
    """Each sequence in a row of its own, the rest padding: as a system without packing would have it."""

    def move(x: np.ndarray) -> np.ndarray:
        out = np.zeros((ROWS, LENGTH), x.dtype)
        for segment in range(1, batch.segment_ids.max() + 1):
            tokens = x[batch.segment_ids == segment]
            out[segment - 1, : len(tokens)] = tokens
        return out

    return move


# --- losses -------------------------------------------------------------------------------------------------


def objective(loss: Callable[..., Any], now: PolicyOutputs, batch: PreparedBatch) -> jax.Array:
    """As the framework reduces: outputs are kept on the mask before the loss, token losses after it."""
    kept = PolicyOutputs(*(None if x is None else keep(x, batch.loss_mask) for x in now))
    token_loss, _ = loss(kept, batch)
    return total(batch.loss_weights * batch.off_policy_weight * token_loss, batch.loss_mask)


COMPILED = jax.jit(jax.value_and_grad(objective, argnums=1), static_argnums=0)


def gradient(
    loss: Callable[..., Any], now: PolicyOutputs, batch: PreparedBatch
) -> tuple[jax.Array, PolicyOutputs]:
    return COMPILED(loss, now, batch)


def moved(move: Move, now: PolicyOutputs, batch: PreparedBatch) -> tuple[PolicyOutputs, PreparedBatch]:
    return over_tokens(batch, move, now), over_tokens(batch, move, batch)


def test_shapes_and_types(loss: Callable[..., Any]):
    now, batch = prepared(0)
    token_loss, metrics = loss(now, batch)
    assert (token_loss.shape, token_loss.dtype) == (batch.tokens.shape, jnp.float32)
    assert {name: x.shape for name, x in metrics.items()} == dict.fromkeys(metrics, batch.tokens.shape)
    assert np.isfinite(np.asarray(token_loss)[batch.loss_mask]).all()
    assert np.abs(np.asarray(token_loss)[batch.loss_mask]).max() > 0


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, 200.0])
def test_off_the_mask_nothing_counts(loss: Callable[..., Any], value: float):
    """NaN and infinities off the mask, in every array: same loss, same gradient, none off the mask."""
    now, batch = prepared(1)
    want, slope = gradient(loss, now, batch)
    bad_value, bad_slope = gradient(loss, *moved(poison(batch, value), now, batch))
    assert float(bad_value) == float(want)
    for one, other in zip(slope, bad_slope, strict=True):
        np.testing.assert_array_equal(one, other)
        np.testing.assert_array_equal(np.asarray(other)[~batch.loss_mask], 0)
    assert np.abs(slope.logp).max() > 0


@pytest.mark.parametrize("arrangement", ["rows permuted", "padded", "a sequence a row"])
def test_where_a_sequence_lies_changes_nothing(loss: Callable[..., Any], arrangement: str):
    now, batch = prepared(2)
    moves = {"rows permuted": lambda x: x[np.array([2, 0, 3, 1])], "padded": pad}
    move = moves.get(arrangement) or unpack(batch)
    value, slope = gradient(loss, now, batch)
    other_value, other = gradient(loss, *moved(move, now, batch))
    assert float(other_value) == pytest.approx(float(value), rel=1e-5, abs=1e-6)
    np.testing.assert_allclose(other.logp, move(np.asarray(slope.logp)), rtol=1e-5, atol=1e-7)


def test_neighbours_do_not_matter(loss: Callable[..., Any]):
    """Everything about sequence 1 changed, extremes included: not a bit of any other's gradient."""
    now, batch = prepared(3)
    mine = batch.segment_ids == 1

    def other(x: np.ndarray) -> np.ndarray:
        return np.where(mine, x * 3 - 40, x).astype(x.dtype) if x.dtype == np.float32 else x

    _, slope = gradient(loss, now, batch)
    _, changed = gradient(loss, *moved(other, now, batch))
    here, there = np.asarray(slope.logp), np.asarray(changed.logp)
    assert here[~mine].tobytes() == there[~mine].tobytes()
    assert (here != there)[mine].any()


def test_jit_changes_nothing(loss: Callable[..., Any]):
    now, batch = prepared(4)
    value, slope = gradient(loss, now, batch)
    with jax.disable_jit():
        plain_value, plain = jax.value_and_grad(objective, argnums=1)(loss, now, batch)
    assert float(plain_value) == pytest.approx(float(value), rel=1e-6)
    np.testing.assert_allclose(plain.logp, slope.logp, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("advantage", [-1.0, 0.0, 1.0])
@pytest.mark.parametrize("gap", [-200.0, 200.0])
def test_extreme_ratios_stay_finite(loss: Callable[..., Any], gap: float, advantage: float):
    """Also with A = 0, where nothing is lost and nothing pushed."""
    now, batch = prepared(5)
    mask = batch.loss_mask
    far = np.where(mask, batch.behavior_logp - np.float32(gap), 0)
    batch = batch._replace(
        behavior_logp=far, proximal_logp=far, advantages=np.where(mask, np.float32(advantage), 0)
    )
    value, slope = gradient(loss, now._replace(logp=far + np.float32(gap) * mask), batch)
    assert np.isfinite(value) and np.isfinite(slope.logp).all()
    if advantage == 0:
        assert float(value) == 0
        np.testing.assert_array_equal(slope.logp, 0)


@pytest.mark.parametrize("advantage", [-1.0, 1.0])
def test_a_good_token_is_made_likelier(loss: Callable[..., Any], advantage: float):
    """At ratio 1 the gradient falls where A > 0 and rises where A < 0: at every token."""
    _, batch = prepared(6)
    mask = batch.loss_mask
    batch = batch._replace(
        proximal_logp=batch.behavior_logp, advantages=np.where(mask, np.float32(advantage), 0)
    )
    _, slope = gradient(loss, PolicyOutputs(batch.behavior_logp), batch)
    assert (advantage * np.asarray(slope.logp)[mask] < 0).all()


@pytest.mark.parametrize("advantage", [-1.0, 1.0])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_a_log_prob_that_is_no_number_shows_in_the_gradient(
    loss: Callable[..., Any], value: float, advantage: float
):
    """On the mask: never a ratio of 1, of the clamp, or a token cut in silence."""
    now, batch = prepared(7)
    at = tuple(np.argwhere(batch.loss_mask)[3])
    logp = np.array(now.logp)
    logp[at] = value
    batch = batch._replace(advantages=np.where(batch.loss_mask, np.float32(advantage), 0))
    got, slope = gradient(loss, now._replace(logp=logp), batch)
    assert not np.isfinite(got)
    has_ratio = (
        "ratio" in loss(now, batch)[1]
    )  # without one the gradient is a constant, and the value shows it
    assert np.isfinite(slope.logp).all() == (not has_ratio)


# --- off-policy weights -------------------------------------------------------------------------------------


def weighed(weight: Callable[..., Any], batch: PreparedBatch) -> np.ndarray:
    """(2, B, T): the weight and where it was cut, on the mask."""
    w, is_cut = weight(batch)
    assert w.shape == is_cut.shape == batch.tokens.shape
    assert (w.dtype, is_cut.dtype) == (jnp.float32, jnp.bool_)
    return np.stack([np.where(batch.loss_mask, x, 0) for x in (w, is_cut)])


def test_weights_are_finite_and_not_below_zero(weight: Callable[..., Any]):
    _, batch = prepared(0)
    got = weighed(weight, batch)
    assert np.isfinite(got).all() and (got >= 0).all() and got[0].max() > 0


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, 200.0])
def test_weights_read_nothing_off_the_mask(weight: Callable[..., Any], value: float):
    _, batch = prepared(1)
    bad = over_tokens(batch, lambda x: jnp.asarray(poison(batch, value)(x)), batch)
    np.testing.assert_array_equal(weighed(weight, bad), weighed(weight, batch))


@pytest.mark.slow
@pytest.mark.parametrize("arrangement", ["rows permuted", "padded", "a sequence a row"])
def test_weights_do_not_depend_on_where_a_sequence_lies(weight: Callable[..., Any], arrangement: str):
    """With jit and without."""
    _, batch = prepared(2)
    moves = {"rows permuted": lambda x: x[np.array([2, 0, 3, 1])], "padded": pad}
    move = moves.get(arrangement) or unpack(batch)
    want = np.stack([move(x) for x in weighed(weight, batch)])
    other = over_tokens(batch, move, batch)
    np.testing.assert_allclose(weighed(weight, other), want, rtol=1e-6)
    if arrangement == "padded":
        np.testing.assert_allclose(weighed(jax.jit(weight), other), want, rtol=1e-6)


def test_weights_of_neighbours_do_not_matter(weight: Callable[..., Any]):
    """A micro-batch is enough: but for a statistic over minibatches, which is only given whole ones."""
    _, batch = prepared(3)
    mine = batch.segment_ids == 1
    other = batch._replace(proximal_logp=np.where(mine, batch.behavior_logp, batch.proximal_logp))
    here, there = weighed(weight, batch), weighed(weight, other)
    if "minibatches" in getattr(weight, "keywords", {}):
        assert not np.array_equal(here[:, ~mine], there[:, ~mine])
    else:
        assert here[:, ~mine].tobytes() == there[:, ~mine].tobytes()


# --- estimators ---------------------------------------------------------------------------------------------


def estimated(advantage: Callable[..., Any], batch: PreparedBatch) -> np.ndarray:
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

    other = PreparedBatch(*(moved(x) for x in batch))
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

    bad = PreparedBatch(*(poisoned(x) for x in batch))
    np.testing.assert_array_equal(estimated(advantage, bad), estimated(advantage, batch))


def test_advantages_do_not_depend_on_the_order_of_groups(advantage: Callable[..., Any]):
    _, batch = prepared(7)
    got = estimated(advantage, batch)
    renamed = batch._replace(group_ids=(batch.group_ids.max() - batch.group_ids).astype(np.int32))
    np.testing.assert_allclose(estimated(advantage, renamed), got, rtol=1e-6, atol=1e-6)
