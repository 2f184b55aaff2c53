"""How far proximal and behaviour log-probs lie apart, over all loss tokens and by their age.

At age 0 that is what the trainer computes against what the generator recorded under the same version: their
mismatch. At greater ages what the policy learned since then is in it too. A token whose log-prob is equal in
every bit has mismatch 0, whatever its size.

Sums that add up over micro-batches: the distribution of |gap| is counted in bins whose edges are
10^(1/32) apart, from 1e-8 to 100 nats, so that a quantile is known to 3.7 %. Shapes: A age buckets, N bins.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from areal_jax.algorithms.losses import ratio
from areal_jax.algorithms.masked import keep

AGES = ("0", "1", "2", "3", "4", "5-8", "9-up")
"""Buckets of ages, in versions."""
OLDEST = (0, 1, 2, 3, 4, 8)
"""Their upper ends; the last has none."""

PER_DECADE, SMALLEST, LARGEST = 32, -8, 2
BINS = (LARGEST - SMALLEST) * PER_DECADE + 2
"""One below the smallest edge, one from the largest on."""


class Gaps(NamedTuple):
    counts: Int[Array, "A N"]
    absolute: Float[Array, " A"]
    """Sum of |gap|."""
    kl: Float[Array, " A"]
    """Sum of r - 1 - log r, r = exp(gap)."""
    largest: Float[Array, " A"]
    unequal: Int[Array, " A"]
    """Tokens whose two log-probs differ in any bit."""

    def joined(self, other: Gaps) -> Gaps:
        """Of both's tokens together."""
        return Gaps(
            self.counts + other.counts,
            self.absolute + other.absolute,
            self.kl + other.kl,
            jnp.maximum(self.largest, other.largest),
            self.unequal + other.unequal,
        )


def gap_sums(
    proximal: Float[Array, "B T"],
    behavior: Float[Array, "B T"],
    ages: Int[Array, "B T"],
    mask: Bool[Array, "B T"],
) -> Gaps:
    """Of the tokens on the mask."""
    proximal, behavior = keep(proximal, mask), keep(behavior, mask)
    gap = proximal - behavior
    size = jnp.abs(gap)
    bucket = jnp.where(mask, jnp.searchsorted(jnp.array(OLDEST), ages), len(AGES))  # off the mask: dropped
    number = jnp.floor((jnp.log10(jnp.maximum(size, 1e-30)) - SMALLEST) * PER_DECADE) + 1
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
    return jax.lax.bitcast_convert_type(x.astype(jnp.float32), jnp.int32)


def gap_figures(gaps: Gaps) -> dict[str, float]:
    """Means, 99.9th percentile and maximum of |gap|, the KL, and how many tokens' log-probs are not equal in
    every bit: of all tokens, and of each age there is.
    """
    counts, absolute, kl, largest, unequal = (np.asarray(x, np.float64) for x in gaps)
    out = _figures(counts.sum(0), absolute.sum(), kl.sum(), largest.max(), unequal.sum())
    for number, age in enumerate(AGES):
        if counts[number].any():
            own = _figures(*(x[number] for x in (counts, absolute, kl, largest, unequal)))
            out |= {f"{name}/age_{age}": value for name, value in own.items()}
    return out


def _figures(
    counts: np.ndarray, absolute: float, kl: float, largest: float, unequal: float
) -> dict[str, float]:
    tokens = max(float(counts.sum()), 1.0)
    return {
        "logp_gap_mean": float(absolute) / tokens,
        "logp_gap_p999": _quantile(counts, 0.999, float(largest)),
        "logp_gap_max": float(largest),
        "mismatch_kl": float(kl) / tokens,
        "logp_unequal": float(unequal),
    }


def _quantile(counts: np.ndarray, share: float, largest: float) -> float:
    """The middle of the bin that holds it, no further than the largest; 0 below the smallest edge."""
    number = int(np.searchsorted(np.cumsum(counts), share * counts.sum()))
    if number == 0:
        return 0.0
    if number >= BINS - 1:
        return largest
    return min(10.0 ** (SMALLEST + (number - 0.5) / PER_DECADE), largest)
