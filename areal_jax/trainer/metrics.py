"""An update's metrics: sums over loss tokens that add up over micro-batches, and what is made of them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from areal_jax.algorithms import masked
from areal_jax.trainer.gaps import Gaps, gap_figures

Sums = dict[str, Any]
"""Totals by name, a scalar each; `gaps`: Gaps, and with a critic `values`: ValueSums."""

OF_MINIBATCHES = ("grad_norm", "critic_grad_norm", "kl_coef")
"""Metrics that are no sums over tokens, but a number a minibatch."""


class ValueSums(NamedTuple):
    """Scalars."""

    loss: Any
    is_clipped: Any
    returns: Any
    returns_squared: Any
    errors: Any
    errors_squared: Any


def value_sums(
    loss: Float[Array, "B T"],
    is_clipped: Bool[Array, "B T"],
    values: Float[Array, "B T"],
    returns: Float[Array, "B T"],
    mask: Bool[Array, "B T"],
) -> ValueSums:
    """Of the value loss, and of the returns against `values`, those of the critic when the batch arrived."""
    errors = returns - values
    each = (loss, is_clipped.astype(jnp.float32), returns, returns**2, errors, errors**2)
    return ValueSums(*(masked.total(x, mask) for x in each))


def add_metrics(left: Sums, right: Sums) -> Sums:
    """Of both's tokens together."""

    def added(one: Any, other: Any) -> Any:
        return one.joined(other) if isinstance(one, Gaps) else jax.tree.map(jnp.add, one, other)

    return {name: added(value, right[name]) for name, value in left.items()}


def to_floats(minibatches: Sequence[Sums]) -> dict[str, float]:
    """Means over all loss tokens of the batch; of what a minibatch has one of, over the minibatches."""
    tokens = sum(float(m["tokens"]) for m in minibatches)
    out = {"trained_tokens": tokens}
    for name, first in minibatches[0].items():
        values = [m[name] for m in minibatches]
        if isinstance(first, Gaps):
            out |= gap_figures(reduce(Gaps.joined, values))
        elif isinstance(first, ValueSums):
            out |= _value_figures(ValueSums(*map(float, map(sum, zip(*values, strict=True)))), tokens)
        elif name in OF_MINIBATCHES:
            out[name] = sum(map(float, values)) / len(values)
        elif name != "tokens":
            out[name] = sum(map(float, values)) / max(tokens, 1.0)
    return out


def _value_figures(sums: ValueSums, tokens: float) -> dict[str, float]:
    """explained_variance = 1 - var(R - V) / var(R); 0 where the returns do not vary."""
    n = max(tokens, 1.0)
    of_returns = sums.returns_squared / n - (sums.returns / n) ** 2
    of_errors = sums.errors_squared / n - (sums.errors / n) ** 2
    return {
        "value_loss": sums.loss / n,
        "value_clip_share": sums.is_clipped / n,
        "explained_variance": 1 - of_errors / of_returns if of_returns > 0 else 0.0,
    }
