"""The off-policy weights."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from areal_jax.algorithms.functions import fitting
from areal_jax.algorithms.losses import LOSSES
from areal_jax.algorithms.off_policy import OFF_POLICY, m2po, mask, none, truncate
from areal_jax.algorithms.reduction import reduction_weights
from areal_jax.config.sections import AlgorithmConfig
from areal_jax.types import ArealError
from tests.algorithms import reference_losses
from tests.algorithms.batches import prepared
from tests.algorithms.sequences import each, places, wide

CASES: list[tuple[str, dict[str, Any]]] = [
    ("truncate", {}),
    ("truncate", {"cap": 1.1}),
    *(("truncate", {"cap": 1.05, "level": "sequence", "aggregate": a}) for a in ("mean", "sum", "max")),
    ("mask", {"upper": 1.2}),
    ("mask", {"lower": 0.8, "upper": 1.25, "weight": "one"}),
    *(
        ("mask", {"lower": 0.9, "upper": 1.3, "level": "sequence", "aggregate": a})
        for a in ("mean", "sum", "max")
    ),
    *(("mask", {"metric": m, "upper": 0.03}) for m in ("k1", "k2", "k3", "binary_kl")),
    *(
        ("mask", {"metric": m, "upper": upper * x, "level": "sequence", "aggregate": a})
        for m, x in (("k1", 1), ("k2", 1), ("k3", 1), ("binary_kl", 0.2))
        for a, upper in (("mean", 0.03), ("sum", 0.15))
    ),
    ("none", {}),
]


@pytest.mark.parametrize(("name", "settings"), CASES)
def test_an_off_policy_weight_is_its_formula(name: str, settings: dict[str, Any]):
    """To 1e-9 in float64, to 1e-5 in float32; what is cut too."""
    _, batch = prepared(10)
    formula = functools.partial(reference_losses.OFF_POLICY[name], **settings)
    p, b, mask = batch.proximal_logp, batch.behavior_logp, batch.loss_mask
    want = each(batch, lambda *x: formula(*x)[0], p, b)
    want_cut = each(batch, lambda *x: formula(*x)[1], p, b)
    weight, is_cut = OFF_POLICY[name](batch, **settings)
    np.testing.assert_allclose(np.where(mask, weight, 0), want, rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(np.where(mask, is_cut, 0), want_cut)
    with jax.enable_x64(True):
        np.testing.assert_allclose(
            np.where(mask, OFF_POLICY[name](wide(batch), **settings)[0], 0), want, rtol=0, atol=1e-9
        )
    assert not settings or 0 < want_cut.sum() < mask.sum()


@pytest.mark.parametrize("aggregate", ["mean", "sum", "max"])
def test_a_sequence_weight_is_one_number_and_never_above_the_cap(aggregate: str):
    """No token of a sequence that is out of bounds keeps a weight of its own."""
    _, batch = prepared(11)
    weight, _ = truncate(batch, cap=1.02, level="sequence", aggregate=aggregate)
    for at in places(batch):
        assert len(set(np.asarray(weight)[at].tolist())) <= 1
    assert np.asarray(weight)[batch.loss_mask].max() == np.float32(1.02)


def test_binary_kl_can_be_configured_and_cuts_by_the_larger_direction():
    """0.9 against 1e-6: KL(b | p) = 12.3, KL(p | b) = 2.3; both ways round the larger one is seen."""
    _, batch = prepared(0, rows=((4,),), length=4)
    behavior = np.log(np.array([[0.9, 1e-6, 0.5, 0.5]], np.float32))
    proximal = np.log(np.array([[1e-6, 0.9, 0.4, 0.5]], np.float32))
    batch = batch._replace(behavior_logp=behavior, proximal_logp=proximal)
    _, is_cut = mask(batch, metric="binary_kl", upper=2.5)
    np.testing.assert_array_equal(is_cut, [[True, True, False, False]])


@pytest.mark.parametrize("minibatches", [1, 2, 4])
def test_m2po_cuts_a_minibatchs_largest_squares(minibatches: int):
    _, batch = prepared(12)
    weight, is_cut = m2po(batch, minibatches, budget=0.02)
    gap = batch.proximal_logp - batch.behavior_logp
    for rows in np.split(np.arange(len(batch.tokens)), minibatches):
        at = np.nonzero(batch.loss_mask & np.isin(np.arange(len(batch.tokens)), rows)[:, None])
        want, want_cut = reference_losses.m2po(*(x[at].astype(np.float64) for x in (gap, 0 * gap)), 0.02)
        np.testing.assert_allclose(np.asarray(weight)[at], want, rtol=1e-6)
        np.testing.assert_array_equal(np.asarray(is_cut)[at], want_cut)
        assert 0 < want_cut.sum() < want_cut.size
        assert (np.asarray(gap)[at] ** 2)[~want_cut].mean() <= 0.02
    assert not np.asarray(is_cut)[~batch.loss_mask].any()


def test_m2po_cuts_equal_squares_together_and_nothing_that_fits():
    """0, 0.09, 0.09: two of the three would fit 0.04 only one at a time, so both go; 0, 0.03, 0.05 stay."""
    _, batch = prepared(0, rows=((3,),), length=3)
    batch = batch._replace(behavior_logp=np.zeros((1, 3), np.float32), loss_mask=np.ones((1, 3), bool))
    for squares, want in (([0, 0.09, 0.09], [False, True, True]), ([0.05, 0, 0.03], [False] * 3)):
        moved = batch._replace(proximal_logp=np.sqrt(np.array([squares], np.float32)))
        np.testing.assert_array_equal(m2po(moved, 1)[1], [want])


def test_m2po_leaves_the_denominators_as_they_were():
    """Weights are those of the whole minibatch: what is cut makes the step smaller, not the rest heavier."""
    _, batch = prepared(13)
    batch = batch._replace(proximal_logp=batch.behavior_logp * np.float32(0.9))
    weights = reduction_weights(batch.loss_mask, batch.segment_ids, 8, 1, "token_mean")
    cut, _ = m2po(batch, 1)
    kept = np.asarray(cut) > 0
    tokens = batch.loss_mask.sum()
    assert kept[batch.loss_mask].sum() < tokens
    np.testing.assert_allclose(np.asarray(weights)[kept & batch.loss_mask], 1 / tokens, rtol=1e-6)


@pytest.mark.parametrize("gap", [-200.0, 200.0])
@pytest.mark.parametrize(("name", "settings"), CASES)
def test_extreme_gaps_stay_finite(name: str, settings: dict[str, Any], gap: float):
    _, batch = prepared(0)
    far = batch._replace(proximal_logp=batch.behavior_logp + np.float32(gap))
    assert np.isfinite(OFF_POLICY[name](far, **settings)[0]).all()


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize(("name", "settings"), [case for case in CASES if case[0] != "none"] + [("m2po", {})])
def test_a_log_ratio_that_is_no_number_is_never_a_weight(name: str, settings: dict[str, Any], value: float):
    """Neither 1, nor the cap, nor cut in silence: NaN, which ends a run with an error."""
    _, batch = prepared(14)
    at = (0, 2)
    assert batch.loss_mask[at]
    proximal = batch.proximal_logp.copy()
    proximal[at] = value
    extra = (1,) if name == "m2po" else ()
    weight, _ = OFF_POLICY[name](batch._replace(proximal_logp=proximal), *extra, **settings)
    assert np.isnan(np.asarray(weight)[at])
    neighbours = batch.loss_mask & (batch.segment_ids != batch.segment_ids[at])
    assert np.isfinite(np.asarray(weight)[neighbours]).all()


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        (
            "truncate",
            {"level": "group"},
            "algorithm.off_policy_settings.level='group' is unknown; use token or sequence",
        ),
        ("truncate", {"level": "sequence", "aggregate": "min"}, "aggregate='min'.*use mean, sum or max"),
        ("mask", {"metric": "kl"}, "metric='kl' is unknown; use ratio, k1, k2, k3, binary_kl"),
    ],
)
def test_a_level_metric_or_aggregate_that_is_none(name: str, settings: dict[str, Any], message: str):
    with pytest.raises(ArealError, match=message):
        OFF_POLICY[name](prepared(0)[1], **settings)


def test_what_a_loss_or_a_statistic_demands_is_checked_for_own_ones_too():
    """An own loss says `off_policy`, an own weight asks for `minibatches`; both are held to it."""

    def own_loss(now: Any, batch: Any) -> Any: ...

    own_loss.off_policy = "none"  # type: ignore[attr-defined]

    def own_weight(batch: Any, minibatches: int, *, power: float = 1.0) -> int:
        return minibatches

    def algorithm(**settings: Any) -> AlgorithmConfig:
        return AlgorithmConfig.model_validate(settings)

    with pytest.raises(ArealError, match=r"loss=my:loss with algorithm.off_policy=truncate.*off_policy=none"):
        fitting(own_loss, truncate, algorithm(loss="my:loss"))
    with pytest.raises(ArealError, match=r"loss=aipo with algorithm.off_policy=truncate.*corrected twice"):
        fitting(LOSSES["aipo"], truncate, algorithm(loss="aipo"))
    with pytest.raises(ArealError, match=r"off_policy=my:weight .*proximal=reuse.*proximal=recompute"):
        fitting(LOSSES["ppo_clip"], own_weight, algorithm(off_policy="my:weight", proximal="reuse"))
    assert fitting(own_loss, none, algorithm(loss="my:loss", off_policy="none")) is none
    filled = fitting(LOSSES["ppo_clip"], own_weight, algorithm(off_policy="my:weight", minibatches=3))
    assert filled(None) == 3


def test_rejected_tokens_stay_in_the_denominator():
    """Masking an off-policy token changes its own weight and nobody else's: weights come before rejection."""
    _, batch = prepared(1)
    far = batch._replace(proximal_logp=batch.behavior_logp + np.float32(9))
    weights = reduction_weights(
        jnp.asarray(batch.loss_mask), jnp.asarray(batch.segment_ids), 8, 1, "token_mean"
    )
    rejected, is_cut = OFF_POLICY["mask"](far)
    np.testing.assert_array_equal(np.asarray(is_cut)[batch.loss_mask], True)
    np.testing.assert_array_equal(np.asarray(rejected)[batch.loss_mask], 0)
    assert float(weights.sum()) == pytest.approx(1)
