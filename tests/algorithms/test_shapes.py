"""Pure functions refuse arrays of a wrong shape or kind when they are traced, and look at no value."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from areal_jax.algorithms.advantages import ADVANTAGES
from areal_jax.algorithms.kl import kl_loss, kl_reward
from areal_jax.algorithms.losses import LOSSES
from areal_jax.algorithms.off_policy import OFF_POLICY
from areal_jax.algorithms.ratios import binary_kl, kl_estimate, ratio, total_variation
from areal_jax.algorithms.shapes import AXES, PER_SEQUENCE, check_batch, check_result, empty_batch
from areal_jax.trainer.critic import value_loss
from areal_jax.types import ArealError, Batch, PreparedBatch
from tests.algorithms.batches import prepared

NOW, BATCH = prepared(0)
CALLS: dict[str, Callable[[PreparedBatch], Any]] = {
    **{name: lambda batch, f=f: f(NOW, batch) for name, f in LOSSES.items()},
    **{name: lambda batch, f=f: f(batch.reward, batch) for name, f in ADVANTAGES.items()},
    **{name: OFF_POLICY[name] for name in ("truncate", "mask", "none")},
    "m2po": lambda batch: OFF_POLICY["m2po"](batch, 1),
}


def test_a_prepared_batch_begins_with_the_arrays_of_a_packed_one():
    assert PreparedBatch._fields[: len(Batch._fields)] == Batch._fields
    assert PreparedBatch._field_defaults.items() >= Batch._field_defaults.items()


def test_every_array_of_a_batch_has_axes():
    assert tuple(AXES) != () and set(AXES) == set(PreparedBatch._fields)
    assert PER_SEQUENCE == ("reward", "group_ids", "temperature", "truncated", "sample_ids", "bootstrap")
    check_batch(BATCH, *NOW)
    check_batch(empty_batch(3, 5))


@pytest.mark.parametrize("name", [name for name in PreparedBatch._fields if getattr(BATCH, name) is not None])
def test_an_array_of_a_wrong_shape_or_kind_is_refused_by_name(name: str):
    x = getattr(BATCH, name)
    for wrong in (x[..., None], x[..., :-1], x.astype(np.complex64)):
        with pytest.raises(AssertionError):
            check_batch(BATCH._replace(**{name: wrong}))
    if name not in ("segment_ids", "group_ids"):  # by which the others are measured
        with pytest.raises(AssertionError, match=rf"batch.{name}\]"):
            check_batch(BATCH._replace(**{name: x[..., :-1]}))


@pytest.mark.parametrize("name", CALLS)
def test_a_border_refuses_a_batch_that_only_broadcasts(name: str):
    """(B, 1) where (B, T) is meant would broadcast to a wrong number without an error."""
    wrong = BATCH._replace(behavior_logp=BATCH.behavior_logp[:, :1])
    CALLS[name](BATCH)
    with pytest.raises(AssertionError, match=r"batch.behavior_logp"):
        jax.eval_shape(CALLS[name], wrong)


@pytest.mark.slow
@pytest.mark.parametrize("name", CALLS)
def test_compiled_and_step_by_step_give_the_same(name: str):
    with jax.disable_jit():
        plain = CALLS[name](BATCH)
    chex.assert_trees_all_close(jax.jit(CALLS[name])(BATCH), plain, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("f", [ratio, total_variation, binary_kl])
def test_log_probs_of_two_policies_have_one_shape(f: Callable[..., Any]):
    with pytest.raises(AssertionError):
        f(jnp.zeros((2, 3)), jnp.zeros((2, 1)))


def test_terms_refuse_log_probs_that_only_broadcast():
    whole, column = jnp.zeros((2, 3)), jnp.zeros((2, 1))
    for call in (
        lambda: kl_loss(whole, column, whole, "k3"),
        lambda: kl_reward(whole, column),
        lambda: kl_estimate(whole, column, "k2"),
        lambda: value_loss(whole, column, whole, 0.2),
    ):
        with pytest.raises(AssertionError):
            call()


def test_a_function_of_ones_own_that_reduces_is_refused_by_its_name():
    with pytest.raises(
        ArealError, match=r"algorithm.loss=my:loss must return only arrays of .* one value per token"
    ):
        check_result((jnp.zeros(()), {}), BATCH, "algorithm.loss=my:loss")
