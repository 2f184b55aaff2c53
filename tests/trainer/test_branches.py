"""A sample with a branched episode is trained on all its paths, and counts as one sample."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import chex
import jax
import numpy as np
import pytest

from areal_jax.models.model import Model
from areal_jax.trajectories.packing import pack
from areal_jax.trajectories.paths import paths_of
from areal_jax.types import Batch
from tests.trainer import gradient_reference
from tests.trainer.branches import branched_groups, slopes_of
from tests.trainer.conftest import LENGTH, MakeLearner

pytestmark = pytest.mark.few_optimizations

RATE = 0.5
"""The learning rate of the learners; their first step is plain gradient descent."""

CASES: dict[str, dict[str, Any]] = {
    "token_mean": dict(preset="grpo", reduction="token_mean"),
    "sequence_mean": dict(preset="grpo", reduction="sequence_mean"),
    "gspo": dict(preset="gspo", minibatches=1),
}
GROUPS = branched_groups()
PATHS = {
    (one.sample, number): path
    for group in GROUPS
    for one in group.trajectories
    for number, path in enumerate(paths_of(one))
}


class Reference(NamedTuple):
    """The model in float64, by path."""

    logp: dict[Any, np.ndarray]
    proximal: dict[Any, np.ndarray]
    """Near the log-probs, as those of a batch's second minibatch."""
    gradient: Callable[[dict[Any, np.ndarray]], Any]
    """By the parameters, from the derivatives by the log-probs."""


@pytest.fixture(scope="module")
def reference(model: Model, params: Any) -> Reference:
    tokens, rng = np.zeros((len(PATHS), LENGTH), np.int32), np.random.default_rng(1)
    for row, path in zip(tokens, PATHS.values(), strict=True):
        row[: len(path.tokens)] = path.tokens
    with jax.enable_x64(True):
        wide = jax.tree.map(lambda leaf: np.float64(leaf), params)

        def logp(p: Any) -> jax.Array:
            logits = jax.vmap(lambda row: gradient_reference.logits(model.config, p, row))(tokens)
            each = jax.nn.log_softmax(logits[:, :-1])
            return jax.numpy.take_along_axis(each, tokens[:, 1:, None], axis=2)[..., 0]

        found, pull = jax.vjp(jax.jit(logp), wide)
    rows = dict(zip(PATHS, np.asarray(found), strict=True))
    found = {key: np.append(0.0, rows[key])[: len(path.tokens)] for key, path in PATHS.items()}

    def gradient(slopes: dict[Any, np.ndarray]) -> Any:
        each = [np.pad(slopes[key], (0, LENGTH - len(slopes[key])))[1:] for key in PATHS]
        with jax.enable_x64(True):
            return jax.tree.map(np.asarray, pull(jax.numpy.array(each))[0])

    near = {key: values + 0.02 * rng.normal(size=len(values)) for key, values in found.items()}
    return Reference(found, near, gradient)


def with_proximal(batch: Batch, proximal: dict[Any, np.ndarray], level: str) -> dict[str, np.ndarray]:
    """Proximal log-probs (B, T), and the off-policy weights that follow from them."""
    near, weight = np.zeros(batch.tokens.shape), np.ones(batch.tokens.shape)
    for place, (key, path) in enumerate(PATHS.items(), 1):
        at = (np.asarray(batch.segment_ids) == place) & np.asarray(batch.loss_mask)
        near[at] = proximal[key][path.loss_mask]
        gap = near[at] - np.asarray(batch.behavior_logp)[at]
        weight[at] = np.minimum(np.exp(gap.mean() if level == "sequence" else gap), 5)
    return {"proximal_logp": near.astype(np.float32), "off_policy_weight": weight.astype(np.float32)}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "layout"),
    [("token_mean", "repeated"), ("gspo", "shared"), ("sequence_mean", "shared"), ("gspo", "apart")],
)
def test_loss_and_gradient_are_those_of_the_formulas(
    params: Any, learner: MakeLearner, reference: Reference, name: str, layout: Any
):
    of, is_tree = learner(group_size=3, **CASES[name]), layout == "apart"
    learns: Any = of.over_trees() if is_tree else of
    level, clip = ("sequence", (3e-4, 4e-4)) if name == "gspo" else ("token", (0.2, 0.2))
    reduction = "token_mean" if name == "token_mean" else "sequence_mean"
    of_policies = reference.logp, reference.proximal
    loss, slopes = slopes_of(GROUPS, *of_policies, reduction=reduction, level=level, clip=clip)

    batch, state = pack(GROUPS, 2, LENGTH, layout=layout), of.init(params)
    # Ten paths of six samples; the number of sequences is filled up to a power of two.
    assert batch.sample_ids.tolist() == [0, 0, 0, 1, 2, 2, 3, 4, 5, 5, *[5] * 6]
    prepared: Any = learns.prepare(state, batch)
    changed = with_proximal(batch, reference.proximal, level)
    prepared = (
        prepared._replace(batch=prepared.batch._replace(**changed))
        if is_tree
        else prepared._replace(**changed)
    )
    new, metrics = learns.update(state, prepared)
    moved = jax.tree.map(lambda before, after: (before - np.asarray(after)) / RATE, params, new.params)
    assert metrics["trained_tokens"] == sum(int(path.loss_mask.sum()) for path in PATHS.values())
    np.testing.assert_allclose(metrics["loss"], loss, rtol=1e-4, atol=1e-6)
    chex.assert_trees_all_close(moved, reference.gradient(slopes), rtol=1e-3, atol=2e-5)
    assert max(np.abs(leaf).max() for leaf in jax.tree.leaves(moved)) > 0.05
