"""`prepare`, and what the learner minimises, against float64 numpy."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest

from areal_jax.models.model import Model
from areal_jax.trajectories.packing import pack
from areal_jax.types import ArealError, Batch
from tests.algorithms import reference
from tests.models.reference import logits
from tests.trainer.conftest import LENGTH, MakeLearner, make_groups, poisoned, same_bits


def exact(model: Model, params: Any, batch: Batch) -> tuple[np.ndarray, np.ndarray]:
    """Log-prob and entropy of every token but each segment's first, by the numpy transformer."""
    logp, entropy = np.zeros((2, *batch.tokens.shape))
    for segment in range(1, batch.segment_ids.max() + 1):
        where = batch.segment_ids == segment
        tokens = batch.tokens[where]
        t = np.full(len(tokens) - 1, batch.temperature[segment - 1], np.float64)
        z = logits(model.config, params, tokens)[:-1]
        values = reference.token_stats(z, tokens[1:], t)
        logp[where] = np.concatenate([[0], values[0]])
        entropy[where] = np.concatenate([[0], values[1]])
    return logp, entropy


@pytest.fixture(scope="module")
def batch() -> Batch:
    return pack(make_groups(), 2, LENGTH)


@pytest.mark.slow
def test_proximal_and_reference_log_probs(model: Model, params: Any, learner: MakeLearner, batch: Batch):
    with_kl = learner(kl={"coef": 0.1})
    state = with_kl.init(params)
    half = jax.tree.map(lambda leaf: 0.5 * leaf, state.params)
    prepared = with_kl.prepare(state.replace(params=half), batch)
    for got, under in ((prepared.proximal_logp, half), (prepared.ref_logp, params)):
        want = np.where(batch.loss_mask, exact(model, under, batch)[0], 0)
        assert np.abs(want).max() > 1
        np.testing.assert_allclose(got, want, rtol=0, atol=1e-5)


def test_advantages_weights_and_off_policy_weights(params: Any, learner: MakeLearner, batch: Batch):
    plain = learner()
    prepared = plain.prepare(plain.init(params), batch)
    each = reference.group_normalized(batch.reward.astype(float), batch.group_ids, "group", "group", 1)
    want = np.where(batch.loss_mask, np.concatenate([[0], each])[batch.segment_ids], 0)
    np.testing.assert_allclose(prepared.advantages, want, atol=1e-5)
    weights = reference.reduction_weights(batch.loss_mask, batch.segment_ids, 1, "sequence_mean", 1)
    np.testing.assert_allclose(prepared.loss_weights, weights, rtol=1e-6)
    gap = np.asarray(prepared.proximal_logp, np.float64) - batch.behavior_logp
    off_policy = np.where(batch.loss_mask, np.minimum(np.exp(gap), 5), 1)
    assert (off_policy == 5).any()
    np.testing.assert_allclose(prepared.off_policy_weight, off_policy, rtol=1e-5)


def test_proximal_behavior_recomputes_nothing(params: Any, learner: MakeLearner, batch: Batch):
    plain = learner(proximal="none")
    prepared = plain.prepare(plain.init(params), batch)
    np.testing.assert_array_equal(prepared.proximal_logp, batch.behavior_logp)
    np.testing.assert_array_equal(prepared.off_policy_weight, 1)


def test_truncation_mask_keeps_the_reward_in_its_group(params: Any, learner: MakeLearner, batch: Batch):
    """A truncated sample trains no token and leaves the denominators; its group's statistics know it."""
    masking, keeping = learner(truncation="mask"), learner()
    got = masking.prepare(masking.init(params), batch)
    kept = keeping.prepare(keeping.init(params), batch)
    is_cut = np.concatenate([[False], batch.truncated])[batch.segment_ids]
    assert (is_cut & batch.loss_mask).any()
    mask = batch.loss_mask & ~is_cut
    np.testing.assert_array_equal(got.loss_mask, mask)
    np.testing.assert_array_equal(got.advantages, np.where(mask, kept.advantages, 0))
    want = reference.reduction_weights(mask, batch.segment_ids, 1, "sequence_mean", 1)
    np.testing.assert_allclose(got.loss_weights, want, rtol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("estimator", ["k2", "k3"])
def test_the_objective_is_its_formula(
    model: Model, params: Any, learner: MakeLearner, batch: Batch, estimator: str
):
    """weights (off-policy weight ppo + beta KL - c entropy); KL has its own ratio to b, and no other."""
    of = learner(
        kl={"coef": 0.3, "estimator": estimator},
        entropy_coef=0.2,
        loss_settings={"low": 0.1, "high": 0.3},
    )
    state = of.init(params)
    prepared = of.prepare(state, batch)
    micros = [micro for micro in of.micro_batches(prepared)[0] if micro is not None]
    assert len(micros) > 1
    moved = jax.tree.map(lambda leaf: 0.9 * leaf, params)
    compiled = jax.jit(
        jax.value_and_grad(lambda p, m: of.objective.loss(*of.objective.outputs(p, None, m), m)[0])
    )
    found = [compiled(moved, micro) for micro in micros]

    logp, entropy = exact(model, moved, batch)
    mask, b = batch.loss_mask, batch.behavior_logp.astype(np.float64)
    proximal, ref = (np.asarray(x, np.float64) for x in (prepared.proximal_logp, prepared.ref_logp))
    surrogate = reference.ppo_clip(logp, proximal, np.asarray(prepared.advantages, np.float64), 0.1, 0.3)
    d = ref - logp
    kl = np.exp(logp - b) * (d**2 / 2 if estimator == "k2" else np.exp(d) - 1 - d)
    each = np.minimum(np.exp(proximal - b), 5) * surrogate + 0.3 * kl - 0.2 * entropy
    want = (np.asarray(prepared.loss_weights, np.float64) * each)[mask].sum()
    assert sum(float(value) for value, _ in found) == pytest.approx(want, rel=2e-5)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(found))

    for poison in (np.nan, np.inf, -np.inf):
        for micro, (value, slope) in zip(micros, found, strict=True):
            bad_value, bad = compiled(moved, poisoned(micro, poison))
            assert float(bad_value) == float(value)
            assert same_bits(bad, slope)


def test_a_segment_never_moves_its_neighbour(params: Any, learner: MakeLearner, batch: Batch):
    """Change every token of segment 1: not one bit of another segment's log-probs."""
    plain = learner()
    state = plain.init(params)
    mine = batch.segment_ids == 1
    other = batch._replace(tokens=np.where(mine, (batch.tokens + 5) % 37, batch.tokens).astype(np.int32))
    before = np.asarray(plain.prepare(state, batch).proximal_logp)
    after = np.asarray(plain.prepare(state, other).proximal_logp)
    assert before[~mine].tobytes() == after[~mine].tobytes()
    assert np.abs(before - after)[mine].max() > 0.01


def test_batches_and_meshes_that_do_not_fit_are_refused(params: Any, learner: MakeLearner, batch: Batch):
    plain = learner()
    state = plain.init(params)
    short = Batch(*(x[:, :8] if x is not None and x.ndim > 1 else x for x in batch))
    with pytest.raises(
        ArealError, match=r"rows of 8 tokens does not fit this learner.*2 rows of 16 tokens and 1 minibatches"
    ):
        plain.prepare(state, short)
    odd = Batch(*(x[:-1] if x is not None and x.ndim > 1 else x for x in batch))
    with pytest.raises(ArealError, match="a multiple of 2 rows"):
        plain.prepare(state, odd)
    with pytest.raises(
        ArealError, match=r"trainer.rows=3 .* x fsdp x expert = 2 shards; set .* multiple of 2"
    ):
        learner(rows=3, mesh={"data": 2})
    with pytest.raises(ArealError, match=r"data=3 x fsdp=2 needs 6 devices, but only 4 are there"):
        learner(mesh={"data": 3, "fsdp": 2})


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"loss": "ppo_clp"}, "no loss is called 'ppo_clp'; did you mean ppo_clip?"),
        ({"loss_settings": {"lo": 0.1}}, "unknown key algorithm.loss_settings.lo; did you mean"),
        ({"advantage": "group_normalised"}, "did you mean group_normalized?"),
        ({"advantage_settings": {"dof": 1}}, "did you mean algorithm.advantage_settings.ddof?"),
    ],
)
def test_losses_and_estimators_that_are_not_there(learner: MakeLearner, settings: Any, message: str):
    with pytest.raises(ArealError) as caught:
        learner(**settings)
    assert message in str(caught.value)
