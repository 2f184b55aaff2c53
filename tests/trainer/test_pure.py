"""`areal_jax.prepare` and `areal_jax.objective`: the update's mathematics without a learner."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import areal_jax as aj
from areal_jax.algorithms.shapes import map_batch
from areal_jax.config.presets import preset_settings
from areal_jax.models.model import Model
from areal_jax.trajectories.packing import pack
from areal_jax.types import ArealError, Batch
from tests.trainer.conftest import LENGTH, MakeLearner, make_groups

CASES: dict[str, dict[str, Any]] = {
    "grpo": {},
    "with a reference": {"kl": {"coef": 0.1}, "entropy_coef": 0.01},
    "proximal log-probs of the loss": {"proximal": "loglinear", "off_policy": "truncate"},
}


def algorithm(**settings: Any) -> aj.AlgorithmConfig:
    given = {"preset": "grpo", "kl": {"coef": 0.0}, "group_size": 4, "proximal": "recompute", **settings}
    return aj.AlgorithmConfig.model_validate(preset_settings(given))


@pytest.fixture(scope="module")
def batch() -> Batch:
    return pack(make_groups(), 2, LENGTH)


def moved(params: Any) -> Any:
    """Another policy: the reference."""
    return jax.tree.map(lambda leaf: leaf * 0.9, params)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] if name != "grpo" else []) for name in CASES]
)
def test_a_step_by_hand_is_the_learners(
    name: str, model: Model, params: Any, learner: MakeLearner, batch: Batch
):
    """SGD at rate 0.5: the parameters after the learner's update are those before, less half the gradient."""
    of, a = learner(**CASES[name]), algorithm(**CASES[name])
    prepared = jax.jit(aj.prepare(model, a))(params, batch, 3, params)
    (loss, metrics), grads = jax.jit(jax.value_and_grad(aj.objective(model, a), has_aux=True))(
        params, prepared
    )
    state = of.init(params).replace(version=jnp.int32(3))
    state, want = of.update(state, of.prepare(state, batch))
    by_hand = optax.apply_updates(params, jax.tree.map(lambda g: -0.5 * g, grads))
    for mine, theirs in zip(jax.tree.leaves(by_hand), jax.tree.leaves(state.params), strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=2e-5, atol=2e-6)
    assert float(metrics["tokens"]) == want["trained_tokens"] == batch.loss_mask.sum()
    assert float(loss) == pytest.approx(want["loss"], abs=1e-6)
    for metric in ("entropy", "clip_share", "off_policy_weight_mean"):
        assert float(metrics[metric]) == pytest.approx(want[metric], rel=1e-5, abs=1e-6)


@pytest.mark.slow
def test_the_gradient_is_the_losss_slope_and_parts_of_a_minibatch_add_up(
    model: Model, params: Any, batch: Batch
):
    a = algorithm(kl={"coef": 0.1})
    prepared = jax.jit(aj.prepare(model, a))(params, batch, 3, moved(params))
    grad = jax.jit(jax.grad(aj.objective(model, a), has_aux=True))
    loss = jax.jit(aj.objective(model, a))
    here = jax.tree.map(lambda leaf: leaf * 1.02, params)  # the ratio is not 1
    whole, _ = grad(here, prepared)
    direction = jax.tree.map(lambda leaf: np.sign(np.asarray(leaf)), whole)
    slope = sum(np.abs(leaf).sum() for leaf in jax.tree.leaves(whole))
    step = 1e-4

    def at(way: float) -> float:
        return float(loss(jax.tree.map(lambda x, d: x + way * step * d, here, direction), prepared)[0])

    assert (at(1) - at(-1)) / (2 * step) == pytest.approx(float(slope), rel=0.02)
    parts = [map_batch(lambda x, i=i: np.split(x, 2)[i], lambda x: x, prepared) for i in (0, 1)]
    added = jax.tree.map(jnp.add, *(grad(here, part)[0] for part in parts))
    for one, two in zip(jax.tree.leaves(added), jax.tree.leaves(whole), strict=True):
        np.testing.assert_allclose(one, two, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"preset": "ppo"}, r"critic.kind=\w+ needs more state"),
        ({"kl": {"coef": 0.1, "target": 0.05}}, r"kl.target=0.05 needs more state"),
    ],
)
def test_an_algorithm_with_a_state_of_its_own_is_refused(settings: Any, message: str, model: Model):
    for function in (aj.prepare, aj.objective):
        with pytest.raises(ArealError, match=message):
            function(model, algorithm(**settings))


def test_a_missing_reference_is_named(model: Model, params: Any, batch: Batch):
    with pytest.raises(ArealError, match=r"kl\.coef=0\.1 measures .* pass reference=PARAMS"):
        aj.prepare(model, algorithm(kl={"coef": 0.1}))(params, batch)
