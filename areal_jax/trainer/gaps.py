"""The gap between proximal and behaviour log-probs, over all loss tokens and by the tokens' age.

A token's age is the trainer's version minus the version that sampled the token. At age 0 the gap is only the
numerical mismatch between trainer and generator, because both used the same version. At greater ages the gap
also contains what the policy learned since the token was sampled. The gap is 0 if the two log-probs are equal
in every bit, even if both are infinite.

The sums of micro-batches can be added. |gap| is counted in bins, with edges from 1e-8 to 100 nats that are a
factor of 10^(1/32) apart, so that quantiles are exact to 3.7 %. Shapes: A age buckets, N bins.
"""

from __future__ import annotations

import operator
from typing import NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from areal_jax.algorithms.masked import keep
from areal_jax.algorithms.ratios import ratio

AGES = ("0", "1", "2", "3", "4", "5-8", "9-up")
"""Names of the buckets of ages; an age is a number of versions."""
OLDEST = (0, 1, 2, 3, 4, 8)
"""The greatest age in each bucket but the last, which has no limit."""

PER_DECADE, SMALLEST, LARGEST = 32, -8, 2
BINS = (LARGEST - SMALLEST) * PER_DECADE + 2
"""Number of bins, including one for |gap| below the smallest edge and one for |gap| from the largest on."""


class Gaps(NamedTuple):
    """Sums over the loss tokens of each age bucket; gap = proximal - behaviour log-prob.

    `counts` is the number of tokens per bin of |gap|, `largest` the largest |gap|.
    """

    counts: Int[Array, "A N"]
    absolute: Float[Array, " A"]
    """Sum of |gap|, in nats."""
    kl: Float[Array, " A"]
    """Sum of r - 1 - log r with r = exp(gap): the k3 estimate of the KL."""
    largest: Float[Array, " A"]
    unequal: Int[Array, " A"]
    """Number of tokens for which the two log-probs differ in at least one bit."""

    def joined(self, other: Gaps) -> Gaps:
        """Returns the statistics over the tokens of both `self` and `other`.

        `largest` is the greater of the two; all other fields are added.
        """
        largest = jnp.maximum(self.largest, other.largest)
        return jax.tree.map(operator.add, self, other)._replace(largest=largest)


def gap_sums(
    proximal: Float[Array, "B T"],
    behavior: Float[Array, "B T"],
    ages: Int[Array, "B T"],
    mask: Bool[Array, "B T"],
) -> Gaps:
    """Returns the sums over the tokens with `mask` True, from the tokens' log-probs and ages in versions."""
    chex.assert_equal_shape([proximal, behavior, ages, mask])
    chex.assert_type([proximal, behavior, ages, mask], [float, float, int, bool])
    proximal, behavior = keep(proximal, mask), keep(behavior, mask)
    gap = proximal - behavior
    size = jnp.abs(gap)
    bucket = jnp.where(mask, jnp.searchsorted(jnp.array(OLDEST), ages), len(AGES))  # off the mask: dropped
    number = jnp.floor((jnp.log10(jnp.maximum(size, 1e-30)) - SMALLEST) * PER_DECADE) + 1
    # A NaN gap counts in the last bin.
    number = jnp.clip(jnp.nan_to_num(number, nan=BINS), 0, BINS - 1).astype(jnp.int32)
    places = (bucket * BINS + number).ravel()
    counts = jnp.zeros(len(AGES) * BINS, jnp.int32).at[places].add(1, mode="drop")

    def total(x: Array) -> Array:
        return jax.ops.segment_sum(x.ravel(), bucket.ravel(), len(AGES))

    largest = jax.ops.segment_max(size.ravel(), bucket.ravel(), len(AGES))
    return Gaps(
        counts.reshape(len(AGES), BINS),
        total(size),
        total(jnp.where(mask, ratio(gap, jnp.zeros_like(gap)) - 1 - gap, 0.0)),
        jnp.maximum(largest, 0.0),
        total((_bits(proximal) != _bits(behavior)).astype(jnp.int32)),
    )


def _bits(x: Float[Array, "..."]) -> Int[Array, "..."]:
    return jax.lax.bitcast_convert_type(x, jnp.int64 if x.dtype == jnp.float64 else jnp.int32)


def gap_figures(gaps: Gaps) -> dict[str, float]:
    """Returns metrics by name, over all tokens, and the same metrics over each age bucket that has tokens.

    A bucket's names end in "/age_<bucket>". The metrics are mean, 99.9th percentile and maximum of |gap| in
    nats, the mean KL estimate, and the number of tokens for which the two log-probs differ in at least one
    bit.
    """
    gaps = jax.tree.map(lambda x: np.asarray(x, np.float64), gaps)
    out = _figures(jax.tree.map(lambda x: x.sum(0), gaps)._replace(largest=gaps.largest.max()))
    for number, age in enumerate(AGES):
        if gaps.counts[number].any():
            own = _figures(jax.tree.map(lambda x, number=number: x[number], gaps))
            out |= {f"{name}/age_{age}": value for name, value in own.items()}
    return out


def _figures(gaps: Gaps) -> dict[str, float]:
    """Returns the metrics of one age bucket, or of all tokens; `gaps` are sums without the axis of ages."""
    tokens = max(float(gaps.counts.sum()), 1.0)
    return {
        "logp_gap_mean": float(gaps.absolute) / tokens,
        "logp_gap_p999": _quantile(np.asarray(gaps.counts), 0.999, float(gaps.largest)),
        "logp_gap_max": float(gaps.largest),
        "mismatch_kl": float(gaps.kl) / tokens,
        "logp_unequal": float(gaps.unequal),
    }


def _quantile(counts: np.ndarray, share: float, largest: float) -> float:
    """Returns the quantile `share` (0 to 1) of |gap|, from the number of tokens per bin, `counts`.

    The result is the middle of the bin with the quantile, but at most `largest`, the largest |gap|. The
    result is 0 for the first bin and `largest` for the last bin.
    """
    number = int(np.searchsorted(np.cumsum(counts), share * counts.sum()))
    if number == 0:
        return 0.0
    if number >= BINS - 1:
        return largest
    return min(10.0 ** (SMALLEST + (number - 0.5) / PER_DECADE), largest)
