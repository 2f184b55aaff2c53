"""Samples tokens without sorting the vocabulary, with random numbers fixed by sample key and position.

Thresholds of top-k and top-p are found by bisection over the ordered bits of float32; if a support (the ids
left to draw from) is recorded, they are found in the sorted list of the likeliest ids. Which truncations a
program computes is fixed when it is compiled (`Truncation`): no value decides what runs, because a GPU would
copy that value to the host for each token. The draw inverts the cumulative distribution in two steps, first a
block of ids, then an id, with one uniform number each, so that no float32 cumulative sum runs over the whole
vocabulary. Symbols: N slots, V vocabulary, K ids of a support.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool, Float, Int, UInt32

from areal_jax.types import ArealError

BLOCK = 128
GENERATOR = "threefry2x32"  # explicit, so that no setting of jax changes what a key draws

HALVINGS = 32
"""Halvings after which a bisection over the bits of a float32 has ended, whatever it looks for."""


IN_PROMPT, IN_COMPLETION = 1, 2
"""Where an id occurs in a sample: in its prompt alone, or in its completion; 0: nowhere."""


class Settings(NamedTuple):
    """How each slot's token is chosen, as arrays; the fields are those of `types.Sampling`."""

    temperature: Float[Array, " N"]
    top_k: Int[Array, " N"]
    top_p: Float[Array, " N"]
    min_p: Float[Array, " N"]


class RequestPenalty(struct.PyTreeNode):
    """Clients' penalties and biases as arrays, for each slot; see `penalized`.

    With them, tokens are not drawn from the policy itself.
    """

    repetition: Float[Any, "*N"]
    presence: Float[Any, "*N"]
    bias: Float[Any, "*N V"]


class Truncation(NamedTuple):
    """The truncations that a program computes. Samples that use another one need another program."""

    is_any: bool = False
    """Whether top_k, top_p or min_p cut any slot's ids."""
    has_top_k: bool = False
    has_top_p: bool = False

    @classmethod
    def of(cls, sampling: Any) -> Truncation:
        """Returns the truncations that a sample with these settings, a Sampling or a Request, needs."""
        has_top_k, has_top_p = bool(sampling.top_k > 0), bool(sampling.top_p < 1)
        return cls(has_top_k or has_top_p or bool(sampling.min_p > 0), has_top_k, has_top_p)

    @classmethod
    def joined(cls, each: Iterable[Truncation]) -> Truncation:
        """Returns what all of these together need."""
        return cls(*(any(one) for one in zip(*each, strict=True)))

    def is_within(self, other: Truncation) -> bool:
        """Whether a program with the truncations `other` has all of these."""
        return Truncation.joined([self, other]) == other


EVERY = Truncation(True, True, True)


def sample_key(
    seed: Int[Array, ""],
    ordinal: Int[Array, ""],
    member: Int[Array, ""],
    attempt: Int[Array, ""],
    segment: Int[Array, ""] | int = 0,
    seed_high: Int[Array, ""] | int = 0,
) -> UInt32[Array, "2"]:
    """Returns the random key of one sample, as raw key data; it depends on these six numbers only.

    `ordinal` numbers the prompts, `member` the samples of a prompt; `attempt` counts reissues of the group,
    `segment` the branches of an episode, of which 0 is the first. `seed` and `seed_high` are the lower and
    the upper 32 bits of the seed.
    """
    # Counted, never split: the draws depend neither on earlier draws nor on their order.
    whole = jnp.stack([jnp.asarray(half).astype(jnp.uint32) for half in (seed_high, seed)])
    key = jax.random.wrap_key_data(whole, impl=GENERATOR)
    for number in (ordinal, member, attempt):
        key = jax.random.fold_in(key, number)
    own = jax.random.key_data(key)
    # Two branches have the same positions, and would draw the same tokens.
    return jnp.where(jnp.asarray(segment) > 0, jax.random.key_data(jax.random.fold_in(key, segment)), own)


def require_counted_randomness() -> None:
    """Raises ArealError if jax_threefry_partitionable is off: draws would then depend on the sharding."""
    if not jax.config.jax_threefry_partitionable:  # pyright: ignore[reportAttributeAccessIssue]
        raise ArealError(
            "with jax_threefry_partitionable=False, sharded hosts would draw other tokens than one device; "
            "set JAX_THREEFRY_PARTITIONABLE=1 in the environment, or remove the code that sets it False"
        )


def uniforms(keys: UInt32[Array, "N 2"], positions: Int[Array, " N"]) -> Float[Array, "N 2"]:
    """Returns two uniform numbers from [0, 1) per slot, for the token at `positions` in its sample.

    They depend only on the sample's key and the position.
    """

    def one(key: Array, position: Array) -> Array:
        own = jax.random.wrap_key_data(key, impl=GENERATOR)
        return jax.random.uniform(jax.random.fold_in(own, position), (2,))

    return jax.vmap(one)(keys, positions)


def require_support_fits(support_size: int, vocab_size: int) -> None:
    """Raises ArealError if a token's support would have more ids than the model's vocabulary."""
    if support_size > vocab_size:
        raise ArealError(
            f"generation.support_size={support_size} exceeds the model's vocabulary of {vocab_size} tokens; "
            "lower generation.support_size, and generation.top_k, to at most that"
        )


def draw(
    logits: Float[Array, "N V"],
    randoms: Float[Array, "N 2"],
    settings: Settings,
    support_size: int,
    truncation: Truncation = EVERY,
    ends_early: bool = True,
) -> tuple[Int[Array, " N"], Int[Array, "N K"] | None]:
    """Returns one token per slot and its support: the ids it was drawn from, padded with -1.

    The support is all -1 if the slot's settings cut no ids, and None if `support_size` is 0. `randoms`: see
    `uniforms`. `truncation` must have every truncation that `settings` use; more of them change no bit of
    the result. `ends_early`: see `_bisected`.

    Order of truncation: top-k (0: none), then top-p of what is left, then min-p. Ties at a threshold are
    kept, but if ids are cut and `support_size` is not 0, at most so many ids are kept: the likeliest, and of
    equals the lower ids. Temperature 0 selects the likeliest kept id.
    """
    temperature, top_k, top_p, min_p = settings
    z = logits / jnp.where(temperature > 0, temperature, 1.0)[:, None]
    kept = z
    if truncation.is_any and not support_size:
        least = _least_kept(z, settings, truncation, ends_early)
        kept = jnp.where(z < least[:, None], -jnp.inf, z)
    tokens = jnp.where(temperature > 0, _inverse_cdf(kept, randoms), _likeliest(z))
    if not support_size:
        return tokens, None
    if not truncation.is_any:
        return tokens, jnp.full((len(z), support_size), -1, jnp.int32)
    is_cut = (top_k > 0) | (top_p < 1.0) | (min_p > 0.0)
    k = jnp.where(top_k > 0, jnp.minimum(top_k, support_size), support_size)
    values, ids = _truncated_support(z, k, top_p, min_p, support_size)
    place = jnp.where(temperature > 0, _inverse_cdf(values, randoms), 0)
    inside = jnp.take_along_axis(ids, place[:, None], axis=1)[:, 0]
    support = jnp.where(is_cut[:, None] & (values > -jnp.inf), ids, -1)
    return jnp.where(is_cut, inside, tokens), support


def penalized(
    logits: Float[Array, "N V"], occurs: Int[Array, "N V"], penalty: RequestPenalty
) -> Float[Array, "N V"]:
    """Returns the logits with a client's penalties and biases applied.

    `occurs`: 0, IN_PROMPT or IN_COMPLETION. For ids of prompt or completion, positive logits are divided by
    `repetition`, others multiplied by it (CTRL, Keskar et al., arXiv:1909.05858); for ids of the completion,
    `presence` is then subtracted (as OpenAI has it). `bias` is added for every id.
    """
    factor = penalty.repetition[:, None]
    repeated = jnp.where(logits > 0, logits / factor, logits * factor)
    logits = jnp.where(occurs > 0, repeated, logits)
    return jnp.where(occurs == IN_COMPLETION, logits - penalty.presence[:, None], logits) + penalty.bias


def _truncated_support(
    z: Float[Array, "N V"],
    top_k: Int[Array, " N"],
    top_p: Float[Array, " N"],
    min_p: Float[Array, " N"],
    size: int,
) -> tuple[Float[Array, "N K"], Int[Array, "N K"]]:
    """Returns (the `size` largest of `z`, descending, -inf where the id is cut; their ids).

    `z` is logits / temperature; `top_k` must be at most `size`. Top-k, top-p and min-p cut ids at the
    thresholds of `_least_kept`. Ids tied with the k-th value that do not fit in the list count in top-p's
    total mass.
    """
    z = jnp.where(z == 0, 0.0, z)  # -0 equals 0
    # Without the barrier, slicing the values makes XLA sort the whole vocabulary on a CPU.
    values, ids = jax.lax.optimization_barrier(jax.lax.top_k(z, size))
    weights = jnp.exp(values - values[:, :1])
    bound = jnp.take_along_axis(values, top_k[:, None] - 1, axis=1)
    kept = values >= bound
    # Ties at the k-th value that the list has no room for; each weighs as much as that value.
    left_out = (z >= bound).sum(-1) - kept.sum(-1)
    tie = jnp.take_along_axis(weights, top_k[:, None] - 1, axis=1)[:, 0]
    mass = jnp.where(kept, weights, 0.0)
    total = mass.sum(-1) + left_out * tie
    reached = jnp.cumsum(mass, axis=-1) >= (top_p * total)[:, None]
    bound = jnp.take_along_axis(values, jnp.argmax(reached, axis=-1)[:, None], axis=1)
    is_whole = (top_p >= 1.0) | ~reached.any(-1)
    kept &= is_whole[:, None] | (values >= bound)
    return jnp.where(kept & (weights >= min_p[:, None]), values, -jnp.inf), ids


def _least_kept(
    z: Float[Array, "N V"], settings: Settings, truncation: Truncation, ends_early: bool
) -> Float[Array, " N"]:
    """Returns, per slot, the smallest `z` (logit / temperature) that top-k, top-p and min-p all keep."""
    _, top_k, top_p, min_p = settings

    def by_count(z: Array) -> Array:
        order = _ordered_bits(z)
        all_ids, lowest = jnp.full_like(top_k, z.shape[-1]), jnp.zeros_like(top_k, jnp.uint32)
        bound = _bisected(
            lambda bound: (order >= bound).sum(-1),
            jnp.where(top_k > 0, jnp.minimum(top_k, all_ids), all_ids),
            (lowest, ~lowest),
            all_ids,
            (lambda _, between: between == 1) if ends_early else None,
        )
        return jnp.where(order >= bound[:, None], z, -jnp.inf)

    def by_mass(weights: Array) -> Array:
        total = weights.sum(-1)

        def is_one(bound: Array, between: Array) -> Array:
            # One id of at least the bound's weight, if float32 sums resolve it.
            return (between < 1.5 * _float(bound)) & (_float(bound) > 3e-5 * total)

        # All ids lighter than `low` together weigh less than 1 - top_p; halved, since sums are rounded.
        low = jnp.where(top_p < 1.0, (1 - top_p) * total / weights.shape[-1] / 2, 1.0)
        # The likeliest id has weight 1, so no id reaches the float after 1.
        bounds = _bits(low), _bits(jnp.ones_like(total)) + 1
        bound = _bisected(
            lambda bound: jnp.where(weights >= _float(bound), weights, 0.0).sum(-1),
            top_p * total,
            bounds,
            total,
            is_one if ends_early else None,
        )
        return jnp.where(top_p < 1.0, _float(bound), 0.0)

    if truncation.has_top_k:
        z = by_count(z)
    weights = jnp.exp(z - z.max(-1, keepdims=True))
    least = jnp.maximum(by_mass(weights), min_p) if truncation.has_top_p else min_p
    # Ids that top-k cut have weight 0, which may be as much as the bound: they are not kept.
    is_kept = (weights >= least[:, None]) & (z > -jnp.inf)
    return jnp.where(is_kept, z, jnp.inf).min(-1)


def _ordered_bits(z: Float[Array, "N V"]) -> UInt32[Array, "N V"]:
    """Returns uint32 values that have the same order as the float32 values `z`."""
    bits = _bits(jnp.where(z == 0, 0.0, z))  # -0 equals 0
    # Negative floats are ordered backwards: their bits are inverted. Others move above them by the sign bit.
    return jnp.where(bits >> 31 == 1, ~bits, bits | jnp.uint32(1 << 31))


def _bits(x: Float[Array, "*n"]) -> UInt32[Array, "*n"]:
    return jax.lax.bitcast_convert_type(x.astype(jnp.float32), jnp.uint32)


def _float(bits: UInt32[Array, "*n"]) -> Float[Array, "*n"]:
    return jax.lax.bitcast_convert_type(bits, jnp.float32)


def _bisected(
    amount: Callable[[UInt32[Array, "N 1"]], Array],
    wanted: Array,
    bounds: tuple[UInt32[Array, " N"], UInt32[Array, " N"]],
    most: Array,
    is_one: Callable[[Array, Array], Bool[Array, " N"]] | None,
) -> UInt32[Array, " N"]:
    """Returns, per slot, the largest bound at which `amount(bound)` is at least `wanted`.

    `amount` must not increase with the bound. `bounds` are (low, high) to start from: there, amount(low) must
    be at least `wanted` and at most `most`, and amount(high) must be 0. The search may end early once
    `is_one(low, amount(low) - amount(high))` is True for the low and high reached by then: only one element
    is left between them. `is_one` None: it always takes HALVINGS steps.
    """

    def halved(state: tuple[Array, ...]) -> tuple[Array, ...]:
        low, beyond, at_low, at_beyond = state
        tried = low + (beyond - low) // 2
        there = amount(tried[:, None])
        is_enough = there >= wanted
        return (
            jnp.where(is_enough, tried, low),
            jnp.where(is_enough, beyond, tried),
            jnp.where(is_enough, there, at_low),
            jnp.where(is_enough, at_beyond, there),
        )

    start = (*bounds, most, jnp.zeros_like(most))
    if is_one is None:
        return jax.lax.fori_loop(0, HALVINGS, lambda _, state: halved(state), start)[0]

    def is_open(state: tuple[Array, ...]) -> Array:
        low, beyond, at_low, at_beyond = state
        return ((beyond - low > 1) & ~is_one(low, at_low - at_beyond)).any()

    return jax.lax.while_loop(is_open, halved, start)[0]


def _inverse_cdf(z: Float[Array, "N V"], randoms: Float[Array, "N 2"]) -> Int[Array, " N"]:
    """Returns an id drawn from softmax(z): draws a block of ids by its mass, then an id of that block."""
    weights = _in_blocks(jnp.exp(z - z.max(-1, keepdims=True)), 0.0)
    block = _pick(weights.sum(-1), randoms[:, 0])
    inside = jnp.take_along_axis(weights, block[:, None, None], axis=1)[:, 0]
    return block * BLOCK + _pick(inside, randoms[:, 1])


def _likeliest(z: Float[Array, "N V"]) -> Int[Array, " N"]:
    """Returns, per slot, the id of the largest value, and of equal values the lowest id.

    It finds the block of BLOCK ids first, then the id in it: several times faster on a CPU than one argmax.
    """
    blocks = _in_blocks(z, -jnp.inf)
    block = jnp.argmax(blocks.max(-1), axis=-1)
    inside = jnp.take_along_axis(blocks, block[:, None, None], axis=1)[:, 0]
    return block * BLOCK + jnp.argmax(inside, axis=-1)


def _in_blocks(x: Float[Array, "N V"], fill: float) -> Float[Array, "N blocks BLOCK"]:
    blocks = -(-x.shape[-1] // BLOCK)
    padded = jnp.pad(x, ((0, 0), (0, blocks * BLOCK - x.shape[-1])), constant_values=fill)
    return padded.reshape(-1, blocks, BLOCK)


def _pick(weights: Float[Array, "N n"], random: Float[Array, " N"]) -> Int[Array, " N"]:
    """Returns, per row, index i with probability weights[i] / sum, and never an index of weight 0.

    `random` is uniform in [0, 1). The weight itself is checked too, because a cumulative sum computed in
    parallel is not monotone to the last bit, and random * sum may round up to the sum.
    """
    below = jnp.cumsum(weights, axis=-1)
    is_hit = (below > random[:, None] * below[:, -1:]) & (weights > 0)
    last = weights.shape[-1] - 1 - jnp.argmax(weights[:, ::-1] > 0, axis=-1)
    return jnp.where(is_hit.any(-1), jnp.argmax(is_hit, axis=-1), last)
