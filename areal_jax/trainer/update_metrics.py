"""An update's metrics: sums over the loss tokens of micro-batches, and the means computed from them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from areal_jax.algorithms import masked
from areal_jax.algorithms.logprobs import TokenStats
from areal_jax.models.experts import RouterSums
from areal_jax.trainer.effective_size import WeightSums, effective_sizes
from areal_jax.trainer.gaps import Gaps, gap_figures, gap_sums
from areal_jax.types import PreparedBatch

Sums = dict[str, Any]
"""Metric name -> scalar sum; except `gaps`, a Gaps, the effective sizes, each a WeightSums, with a critic
`values`, a ValueSums, and with a mixture of experts `routers`, a RouterSums.
"""

OF_MINIBATCHES = ("loss", "grad_norm", "critic_grad_norm", "kl_coef")
"""Names of metrics that are one number per minibatch instead of a sum over tokens."""


class ValueSums(NamedTuple):
    """Sums of the critic's metrics over loss tokens, a scalar each; an error is return - value."""

    loss: Any
    is_clipped: Any
    returns: Any
    returns_squared: Any
    errors: Any
    errors_squared: Any


def token_sums(micro: PreparedBatch, stats: TokenStats, own: dict[str, Array], is_recomputed: bool) -> Sums:
    """Returns the framework's metrics and the loss function's metrics `own`, summed over the loss mask.

    If a metric in `own` has the name of a framework's metric, the framework's metric is returned.
    `is_recomputed`: whether the proximal log-probs are those of the policy before the batch's first update;
    if not, effective sample sizes use `stats`, of the policy before this minibatch's update.
    """
    mask = micro.loss_mask
    sums = {
        **own,
        "tokens": mask.astype(stats.entropy.dtype),
        "entropy": stats.entropy,
        "support_mass_outside": stats.outside,
        "off_policy_weight_mean": micro.off_policy_weight,
        "off_policy_capped_share": micro.off_policy_cut.astype(stats.entropy.dtype),
    }
    gaps = gap_sums(micro.proximal_logp, micro.behavior_logp, micro.ages, mask)
    before = micro.proximal_logp if is_recomputed else jax.lax.stop_gradient(stats.logp)
    totals = {name: masked.total(values, mask) for name, values in sums.items()}
    return totals | {"gaps": gaps} | effective_sizes(before, micro)


def value_sums(
    loss: Float[Array, "B T"],
    is_clipped: Bool[Array, "B T"],
    values: Float[Array, "B T"],
    returns: Float[Array, "B T"],
    mask: Bool[Array, "B T"],
) -> ValueSums:
    """Returns the sums of the critic's metrics over the tokens with `mask` True.

    `loss` and `is_clipped` are the results of `value_loss`; `values` are the critic's values before the
    update.
    """
    errors = returns - values
    each = (loss, is_clipped.astype(loss.dtype), returns, returns**2, errors, errors**2)
    return ValueSums(*(masked.total(x, mask) for x in each))


def add_metrics(left: Sums, right: Sums) -> Sums:
    """Returns the metric sums over the tokens of `left` and `right` together; `right` may lack routers'."""

    def added(one: Any, other: Any) -> Any:
        return one.joined(other) if isinstance(one, Gaps | WeightSums) else jax.tree.map(jnp.add, one, other)

    return {name: added(value, right[name]) if name in right else value for name, value in left.items()}


def to_floats(minibatches: Sequence[Sums]) -> dict[str, float]:
    """Returns metrics by name: means over loss tokens, or over minibatches for those in OF_MINIBATCHES."""
    tokens = sum(float(m["tokens"]) for m in minibatches)
    out = {"trained_tokens": tokens}
    for name, first in minibatches[0].items():
        values = [m[name] for m in minibatches]
        if isinstance(first, Gaps):
            out |= gap_figures(reduce(Gaps.joined, values))
        elif isinstance(first, WeightSums):
            out[name] = reduce(WeightSums.joined, values).share()
        elif isinstance(first, RouterSums):
            out |= jax.tree.map(lambda *parts: sum(parts), *values).figures()
        elif isinstance(first, ValueSums):
            out |= _value_figures(ValueSums(*map(float, map(sum, zip(*values, strict=True)))), tokens)
        elif name in OF_MINIBATCHES:
            out[name] = sum(map(float, values)) / len(values)
        elif name != "tokens":
            out[name] = sum(map(float, values)) / max(tokens, 1.0)
    return out


def _value_figures(sums: ValueSums, tokens: float) -> dict[str, float]:
    """Returns the critic's metrics, means over `tokens` tokens.

    explained_variance is 1 - var(return - value) / var(return), or 0 if var(return) is 0.
    """
    n = max(tokens, 1.0)
    of_returns = sums.returns_squared / n - (sums.returns / n) ** 2
    of_errors = sums.errors_squared / n - (sums.errors / n) ** 2
    return {
        "value_loss": sums.loss / n,
        "value_clip_share": sums.is_clipped / n,
        "explained_variance": 1 - of_errors / of_returns if of_returns > 0 else 0.0,
    }
