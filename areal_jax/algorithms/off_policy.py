"""Off-policy weights: they correct a token's loss for the ratio of the proximal to the behaviour policy.

They are functions `off_policy(batch, *, settings) -> (weight, is_cut)`; both results are (B, T), have no
gradient and are ignored off the loss mask. `batch` may be a micro-batch (a sequence is always in one row).
But a function with a second parameter `minibatches` (the number of minibatches) gets only whole batches.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float
from pydantic import Field

from areal_jax.algorithms.masked import Aggregate, of_sequence
from areal_jax.algorithms.ratios import DIVERGENCES, exp_bounded
from areal_jax.algorithms.shapes import check_batch
from areal_jax.types import ArealError, PreparedBatch

WeightLevel = Literal["token", "sequence"]


def truncate(
    batch: PreparedBatch,
    *,
    cap: Annotated[float, Field(gt=0)] = 5.0,
    level: WeightLevel = "token",
    aggregate: Aggregate = "mean",
) -> tuple[Array, Array]:
    """Returns min(w, cap) and whether w > cap, w = exp(proximal_logp - behavior_logp).

    level=sequence: w is one number per sequence, exp of the `aggregate` (mean, sum or max) of the log-ratios
    of the sequence's loss tokens. AReaL (arXiv:2505.24298), Eq. 4.
    """
    weight = exp_bounded(_at(level, aggregate, _log_ratio(batch), batch))
    return jnp.minimum(weight, cap), weight > cap


def mask(
    batch: PreparedBatch,
    *,
    metric: Literal["ratio", "k1", "k2", "k3", "binary_kl"] = "ratio",
    level: WeightLevel = "token",
    aggregate: Aggregate = "mean",
    lower: float | None = None,
    upper: float | None = 5.0,
    weight: Literal["ratio", "one"] = "ratio",
) -> tuple[Array, Array]:
    """Returns each token's weight, cut to 0 unless lower <= metric <= upper, and whether the weight is cut.

    A bound of None does not cut. `weight`: ratio, exp(proximal_logp - behavior_logp), or one, weight 1.
    `metric`: the same ratio, or an estimate of KL(behaviour | proximal): k1, k2, k3 (`ratios.kl_estimate`; k1
    may be negative), or binary_kl, the larger of the two directions of KL over the events this token and any
    other. With level=sequence the metric is the `aggregate` (mean, sum or max) over the sequence's loss
    tokens. With metric=ratio log-ratios are aggregated, and all tokens of the sequence have the ratio
    exp(aggregate); with an estimate of the KL as metric, each token keeps its own ratio.
    """
    log_weight = _log_ratio(batch)
    if metric == "ratio":
        log_weight = _at(level, aggregate, log_weight, batch)
        measured = exp_bounded(log_weight)
    elif metric in DIVERGENCES:
        measured = _at(level, aggregate, DIVERGENCES[metric](batch.behavior_logp, batch.proximal_logp), batch)
    else:
        raise ArealError(
            f"algorithm.off_policy_settings.metric={metric!r} is unknown; use ratio, {', '.join(DIVERGENCES)}"
        )
    is_cut = jnp.zeros_like(batch.loss_mask)
    if lower is not None:
        is_cut |= measured < lower
    if upper is not None:
        is_cut |= measured > upper
    w = exp_bounded(log_weight)
    if weight == "one":
        # A NaN ratio stays NaN, so that it still ends the run.
        w = jnp.where(jnp.isnan(w), w, 1.0)
    return _without(is_cut, w), is_cut


def m2po(
    batch: PreparedBatch, minibatches: int, *, budget: Annotated[float, Field(gt=0)] = 0.04
) -> tuple[Array, Array]:
    """Returns exp(d), d = proximal_logp - behavior_logp, but 0 for tokens with the largest d^2; and is_cut.

    In each of the `minibatches` minibatches as few tokens as possible are cut to 0 (is_cut) so that the mean
    d^2 of the other tokens is at most `budget`; tokens with equal d^2 are cut together, so the order of rows
    does not matter. `proximal_logp` must be computed before the update. M2PO, Zheng et al.
    (arXiv:2510.01161).
    """
    gap = _log_ratio(batch)
    # inf sorts tokens off the mask behind all others, so they do not enter the means of loss tokens.
    square = jnp.where(batch.loss_mask, gap**2, jnp.inf).reshape(minibatches, -1)
    ascending = jnp.sort(square, axis=1)
    means = jnp.cumsum(ascending, axis=1) / jnp.arange(1, square.shape[1] + 1)
    first_cut = jnp.where(means > budget, ascending, jnp.inf).min(axis=1, keepdims=True)
    is_cut = (square >= first_cut).reshape(gap.shape) & batch.loss_mask
    return _without(is_cut, exp_bounded(gap)), is_cut


def none(batch: PreparedBatch) -> tuple[Array, Array]:
    """Returns weight 1 and is_cut False for every token: no off-policy correction."""
    check_batch(batch)
    return jnp.ones_like(batch.proximal_logp), jnp.zeros_like(batch.loss_mask)


def _log_ratio(batch: PreparedBatch) -> Float[Array, "B T"]:
    """Returns proximal_logp - behavior_logp; infinities become NaN, which no bound or mean can hide."""
    check_batch(batch)
    gap = batch.proximal_logp - batch.behavior_logp
    return jnp.where(jnp.isfinite(gap), gap, jnp.nan)


def _at(
    level: str, aggregate: Aggregate, values: Float[Array, "B T"], batch: PreparedBatch
) -> Float[Array, "B T"]:
    if level == "token":
        return values
    if level != "sequence":
        raise ArealError(f"algorithm.off_policy_settings.level={level!r} is unknown; use token or sequence")
    return of_sequence(aggregate, values, batch.loss_mask, batch.segment_ids, batch.group_ids.shape[0])


def _without(is_cut: Bool[Array, "B T"], weight: Float[Array, "B T"]) -> Float[Array, "B T"]:
    """Returns `weight`, but 0 for cut tokens; NaN stays NaN, even if cut, so that the run ends."""
    return jnp.where(is_cut & ~jnp.isnan(weight), 0.0, weight)


OFF_POLICY: Mapping[str, Any] = {"truncate": truncate, "mask": mask, "m2po": m2po, "none": none}
