"""What multiplies a token's loss: the reduction's weight and the off-policy weight.

Reduction weights are computed once, over whole minibatches, before any micro-batch is formed; so micro-batch
gradients are plain sums and their split cannot matter. Off-policy weights are functions
`off_policy(batch, *, settings) -> (weight, is_cut)` of the proximal and the behaviour log-probs, (B, T) each;
no gradient flows through them. What they say off the loss mask is ignored. They are given whole batches or
micro-batches (a sequence lies whole in a row); one with a second parameter `minibatches` takes statistics
over them and is only ever given whole batches.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Annotated, Any, Literal

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int
from pydantic import Field

from areal_jax.algorithms.masked import Aggregate, of_sequence, per_sequence, per_token
from areal_jax.algorithms.ratios import DIVERGENCES, exp_bounded
from areal_jax.presets import OWN_RATIO
from areal_jax.sections import AlgorithmConfig
from areal_jax.types import ArealError, Batch

Level = Literal["token", "sequence"]


def reduction_weights(
    loss_mask: Bool[Array, "B T"],
    segment_ids: Int[Array, "B T"],
    sequences: int,
    minibatches: int,
    reduction: str,
    constant: float = 1.0,
) -> Float[Array, "B T"]:
    """Weights of the named reduction; minibatch m owns the m-th of `minibatches` equal runs of rows.

    With m the mask, |o| a sequence's loss tokens and S the minibatch's sequences that have any:
    token_mean m / sum(m); token_mean_batch m / (sum over the batch / minibatches); sequence_mean m / (|o| S);
    sequence_sum m / S; constant m / (C S).
    """
    m = loss_mask.astype(float)  # float32, or float64 where that is enabled
    of_minibatch = jnp.repeat(jnp.arange(minibatches), m.shape[0] // minibatches)  # (B,)
    tokens = m.reshape(minibatches, -1).sum(1)
    if reduction == "token_mean":
        return m / jnp.maximum(tokens, 1)[of_minibatch][:, None]
    if reduction == "token_mean_batch":
        return m / jnp.maximum(tokens.sum() / minibatches, 1)
    lengths = per_sequence(m, segment_ids, sequences)
    own_length = jnp.maximum(per_token(lengths, segment_ids), 1)
    with_tokens = (m / own_length).reshape(minibatches, -1).sum(1).round()  # sequences, a minibatch
    share = m / jnp.maximum(with_tokens, 1)[of_minibatch][:, None]
    if reduction == "sequence_mean":
        return share / own_length
    if reduction == "sequence_sum":
        return share
    if reduction == "constant":
        return share / constant
    raise ValueError(f"no reduction {reduction!r}")


# --- off-policy weights -------------------------------------------------------------------------------------


def truncate(
    batch: Batch,
    *,
    cap: Annotated[float, Field(gt=0)] = 5.0,
    level: Level = "token",
    aggregate: Aggregate = "mean",
) -> tuple[Array, Array]:
    """min(w, cap), w = exp(proximal - behaviour): AReaL Eq. 4 (arXiv:2505.24298).

    level sequence: w is one number a sequence, exp of the `aggregate` of its tokens' log-ratios.
    """
    weight = exp_bounded(_at(level, aggregate, _log_ratio(batch), batch))
    return jnp.minimum(weight, cap), weight > cap


def mask(
    batch: Batch,
    *,
    metric: Literal["ratio", "k1", "k2", "k3", "binary_kl"] = "ratio",
    level: Level = "token",
    aggregate: Aggregate = "mean",
    lower: float | None = None,
    upper: float | None = 5.0,
    weight: Literal["ratio", "one"] = "ratio",
) -> tuple[Array, Array]:
    """w where lower <= metric <= upper, else 0; w = exp(proximal - behaviour), or 1.

    `metric` is the ratio w itself, or an estimate of KL(behaviour | proximal): k1 = behaviour - proximal (of
    either sign), k2, k3, or binary_kl, the larger direction of the KL between "this token" and "another".
    level sequence: the ratio is aggregated in log space and is the weight of the whole sequence; a KL is
    aggregated as it is, and tokens keep weights of their own.
    """
    log_weight = _log_ratio(batch)
    if metric == "ratio":
        log_weight = _at(level, aggregate, log_weight, batch)
        measured = exp_bounded(log_weight)
    elif metric in DIVERGENCES:
        measured = _at(level, aggregate, DIVERGENCES[metric](batch.behavior_logp, batch.proximal_logp), batch)
    else:
        raise ArealError(f"metric={metric!r} of mask: use ratio, {', '.join(DIVERGENCES)}")
    is_cut = jnp.zeros_like(batch.loss_mask)
    if lower is not None:
        is_cut |= measured < lower
    if upper is not None:
        is_cut |= measured > upper
    w = exp_bounded(log_weight)
    if weight == "one":
        w = jnp.where(jnp.isnan(w), w, 1.0)
    return _without(is_cut, w), is_cut


def m2po(
    batch: Batch, minibatches: int, *, budget: Annotated[float, Field(gt=0)] = 0.04
) -> tuple[Array, Array]:
    """w = exp(proximal - behaviour), but 0 where (proximal - behaviour)^2 is among a minibatch's largest.

    As many are cut as bring the mean square of the rest down to `budget`; equal ones go together, so that the
    order of rows plays no part. A statistic over the whole minibatch, which is why it takes their number: it
    is right where the proximal log-probs are known before the update. M2PO, Zheng et al. (arXiv:2510.01161).
    """
    gap = _log_ratio(batch)
    square = jnp.where(batch.loss_mask, gap**2, jnp.inf).reshape(minibatches, -1)
    ascending = jnp.sort(square, axis=1)
    means = jnp.cumsum(ascending, axis=1) / jnp.arange(1, square.shape[1] + 1)
    first_cut = jnp.where(means > budget, ascending, jnp.inf).min(axis=1, keepdims=True)
    is_cut = (square >= first_cut).reshape(gap.shape) & batch.loss_mask
    return _without(is_cut, exp_bounded(gap)), is_cut


def none(batch: Batch) -> tuple[Array, Array]:
    """1: no correction."""
    return jnp.ones_like(batch.proximal_logp), jnp.zeros_like(batch.loss_mask)


def _log_ratio(batch: Batch) -> Float[Array, "B T"]:
    """proximal - behaviour; NaN where it is not finite, so that no bound and no aggregate hides it."""
    gap = batch.proximal_logp - batch.behavior_logp
    return jnp.where(jnp.isfinite(gap), gap, jnp.nan)


def _at(level: str, aggregate: Aggregate, values: Float[Array, "B T"], batch: Batch) -> Float[Array, "B T"]:
    if level == "token":
        return values
    if level != "sequence":
        raise ArealError(f"level={level!r} of an off-policy weight: use token or sequence")
    return of_sequence(aggregate, values, batch.loss_mask, batch.segment_ids, batch.group_ids.shape[0])


def _without(is_cut: Bool[Array, "B T"], weight: Float[Array, "B T"]) -> Float[Array, "B T"]:
    """0 where cut; a weight that is no number stays visible even there."""
    return jnp.where(is_cut & ~jnp.isnan(weight), 0.0, weight)


OFF_POLICY: Mapping[str, Any] = {"truncate": truncate, "mask": mask, "m2po": m2po, "none": none}


def fitting(
    loss: Callable[..., Any], off_policy: Callable[..., Any], algorithm: AlgorithmConfig
) -> Callable[..., Any]:
    """The off-policy weight as `off_policy(batch, *, settings)`: told the number of minibatches if it asks.

    Raises ArealError where the loss holds a ratio of its own and demands another off-policy weight, and where
    a statistic over minibatches is asked for before their proximal log-probs exist.
    """
    a = algorithm
    wanted = "none" if a.loss in OWN_RATIO else getattr(loss, "off_policy", a.off_policy)
    if a.off_policy != wanted:
        raise ArealError(
            f"algorithm.loss={a.loss} with algorithm.off_policy={a.off_policy}: the loss corrects for the "
            f"behaviour policy itself, so its tokens would be corrected twice; set "
            f"algorithm.off_policy={wanted}"
        )
    if "minibatches" not in inspect.signature(off_policy).parameters:
        return off_policy
    if a.proximal_form != "recompute":
        raise ArealError(
            f"algorithm.off_policy={a.off_policy} with algorithm.proximal={a.proximal}: its statistic over a "
            "minibatch needs the proximal log-probs before the update; set algorithm.proximal=recompute"
        )
    return functools.partial(off_policy, minibatches=a.minibatches)
