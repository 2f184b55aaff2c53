"""Advantage estimators: pure functions `advantage(rewards, batch, *, settings)` that return (B, T).

`rewards` (S,) is one reward per sequence, equal for all sequences of a sample; `batch.token_rewards`, if not
None, is a further reward per token. An estimator with one advantage per sample adds the token rewards of all
its sequences to its reward; the other estimators add each token reward at its token; `ones` ignores all
rewards. Means and standard deviations are over samples. An estimator that trains a critic returns an
`Estimate`. Results at tokens off the loss mask are undefined. Shapes: B rows, T columns, S sequences; all
tokens of a sequence are in one row.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

import chex
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from areal_jax.algorithms import masked
from areal_jax.algorithms.masked import (
    is_segment_end,
    keep,
    once_per_sample,
    per_sample,
    per_sequence,
    per_token,
)
from areal_jax.algorithms.shapes import check_batch
from areal_jax.types import EQUAL_WITHIN, NOT_SAMPLED, ArealError, PreparedBatch

HEADROOM = 0.125
"""Rewards are multiplied by this power of two, without rounding, and results are divided by this power, so
that differences and standard deviations stay finite even for the largest float32 rewards.
"""


class Estimate(NamedTuple):
    """The result of an advantage estimator with a critic; each field is (B, T)."""

    advantages: Array
    returns: Array
    """The targets on which the critic is trained."""


# --- before an estimator ------------------------------------------------------------------------------------


def overlong_penalty(lengths: Float[Array, " S"], max_tokens: float, margin: float) -> Float[Array, " S"]:
    """Returns each sequence's penalty for its length, from -1 to 0; the caller adds it to the reward.

    `lengths`: each sequence's number L of sampled tokens. The penalty is 0 for L up to max_tokens - margin,
    -1 for L of at least max_tokens, and (max_tokens - margin - L) / margin in between. DAPO, Yu et al.
    (arXiv:2503.14476), Eq. 13.
    """
    chex.assert_rank(lengths, 1)
    return jnp.clip((max_tokens - margin - lengths) / margin, -1.0, 0.0)


def with_overlong_penalty(batch: PreparedBatch, max_tokens: float, margin: float) -> Float[Array, " S"]:
    """Returns each sequence's reward plus the `overlong_penalty` of its sample's longest turn.

    `max_tokens`, `margin`: as there; `max_tokens` is the limit of one turn.
    """
    longest, ids = _longest_turn(batch), batch.sample_ids
    if ids is not None:
        longest = jax.ops.segment_max(longest, ids, len(ids))[ids]
    return batch.reward + overlong_penalty(longest, max_tokens, margin)


# --- one number per sequence --------------------------------------------------------------------------------


def group_normalized(
    rewards: Float[Array, " S"],
    batch: PreparedBatch,
    *,
    center: Literal["group", "batch", "none"] = "group",
    scale: Literal["group", "batch", "batch_centered", "none"] = "group",
    ddof: int = 1,
    eps: float = 1e-6,
) -> Float[Array, "B T"]:
    """Returns (R - mean) / (std + eps) at every token of a sequence with reward R, token rewards included.

    `center` selects the mean, `scale` the std: over the sequence's group (the samples of one prompt), or over
    the batch; with none, the mean is not subtracted or nothing is divided. scale=batch_centered: the std,
    over the batch, of R - mean. As center/scale, group/group is GRPO (arXiv:2402.03300), group/none Dr.GRPO
    (arXiv:2503.20783), batch/batch AReaL's global-batch normalisation (arXiv:2505.24298), group/batch LitePPO
    (arXiv:2508.08221), group/batch_centered REINFORCE++-baseline (arXiv:2501.03262). `ddof` 1 is the sample
    standard deviation, 0 the population's. The result is exactly 0 if all values over which the mean or the
    std is taken are equal but for rounding (EQUAL_WITHIN).
    """
    check_batch(batch._replace(reward=rewards))
    total = HEADROOM * _with_token_rewards(rewards, batch)
    groups = batch.group_ids
    whole = jnp.zeros_like(groups)
    centred = total
    if center != "none":
        mean, _, is_flat = _statistics(total, groups if center == "group" else whole, ddof, batch.sample_ids)
        centred = jnp.where(is_flat, 0.0, total - mean)
    if scale == "none":
        return per_token(centred / HEADROOM, batch.segment_ids)
    spread = centred if scale == "batch_centered" else total
    _, std, is_flat = _statistics(spread, groups if scale == "group" else whole, ddof, batch.sample_ids)
    return per_token(jnp.where(is_flat, 0.0, centred / (std + HEADROOM * eps)), batch.segment_ids)


def leave_one_out(rewards: Float[Array, " S"], batch: PreparedBatch) -> Float[Array, "B T"]:
    """Returns each sample's reward minus the mean reward of its group's other samples, at every token.

    A group is the samples of one prompt; the result is 0 for a group of one. RLOO, Ahmadian et al.
    (arXiv:2402.14740).
    """
    check_batch(batch._replace(reward=rewards))
    total = HEADROOM * _with_token_rewards(rewards, batch)
    mean, _, is_flat = _statistics(total, batch.group_ids, 0, batch.sample_ids)
    samples = once_per_sample(jnp.ones_like(total), batch.sample_ids)
    size = jax.ops.segment_sum(samples, batch.group_ids, total.shape[0])[batch.group_ids]
    others = jnp.maximum(size - 1, 1)
    own = jnp.where(is_flat, 0.0, size / others * (total - mean))
    return per_token(own / HEADROOM, batch.segment_ids)


def ones(rewards: Float[Array, " S"], batch: PreparedBatch) -> Float[Array, "B T"]:
    """Returns the advantage 1 at every token of a sequence; ignores the rewards: for supervised learning."""
    check_batch(batch._replace(reward=rewards))
    return per_token(jnp.ones_like(rewards), batch.segment_ids)


# --- one number per token -----------------------------------------------------------------------------------


def reward_to_go(
    rewards: Float[Array, " S"], batch: PreparedBatch, *, baseline: float = 0.0
) -> Float[Array, "B T"]:
    """Returns the sum of the rewards from each token to the end of its sequence.

    A token's reward is its `batch.token_rewards`; the sequence's last loss token also gets the sequence's
    reward minus `baseline`. REINFORCE, Williams (1992); with the KL in the reward and whitened advantages
    REINFORCE++ (arXiv:2501.03262).
    """
    check_batch(batch._replace(reward=rewards))
    earned = _at_last_token(rewards - baseline, batch) + _token_rewards(batch)
    zero = jnp.zeros_like(earned)
    return _backwards(earned, zero, zero, zero + 1, batch.loss_mask, batch.segment_ids, gamma=1.0)


def teacher_gap(rewards: Float[Array, " S"], batch: PreparedBatch) -> Float[Array, "B T"]:
    """Returns teacher_logp - behavior_logp at each token: on-policy distillation (arXiv:2306.13649).

    `batch.token_rewards` are added; `rewards` are ignored. Raises ArealError if `algorithm.teacher` is not
    set.
    """
    check_batch(batch._replace(reward=rewards))
    if batch.teacher_logp is None:
        raise ArealError("advantage=teacher_gap needs a teacher; set algorithm.teacher to a model")
    mask = batch.loss_mask
    return keep(batch.teacher_logp, mask) - keep(batch.behavior_logp, mask) + _token_rewards(batch)


def gae(
    rewards: Float[Array, " S"],
    batch: PreparedBatch,
    *,
    gamma: float = 1.0,
    lam: float = 1.0,
    lam_length: float | None = None,
    critic_lam: float | None = None,
    step: Literal["token", "turn"] = "token",
) -> Estimate:
    """Returns the generalised advantage estimates A and the critic's targets A + V (arXiv:1506.02438).

    A_t = d_t + gamma lam A' and d_t = r_t + gamma V' - V_t, with reward r_t of loss token t and value V_t
    before it. A' and V' are A and V at the sequence's next loss token: tokens in between (a tool's output)
    are skipped and not discounted. At the last loss token A' is 0 and V' is `batch.bootstrap`: the critic's
    value if the length limit cut the sample, else 0. Advantages and targets are not whitened.

    `lam_length` replaces lam by max(0, 1 - 1 / (lam_length L)) for a sequence of L sampled tokens; None: lam
    stays. `critic_lam` is the lam of the targets; None: the lam of the advantages (VAPO, arXiv:2504.05118).
    With step=turn, t counts turns: V_t is the value before the turn's first token, and all tokens of the turn
    get the turn's advantage and target; a token reward is then added to the advantage of its own token only,
    and to no target.

    Raises ArealError if the batch has no critic's values.
    """
    if batch.values is None or batch.bootstrap is None:
        raise ArealError(
            "advantage=gae needs a critic's values; set algorithm.critic.kind to separate or shared"
        )
    check_batch(batch._replace(reward=rewards))
    mask, values = batch.loss_mask, keep(batch.values, batch.loss_mask)
    earned, at = _at_last_token(rewards, batch), mask
    turns = _Turns(batch) if step == "turn" else None
    if turns is None:
        earned += _token_rewards(batch)
    else:
        earned, at = turns.spread(earned), turns.is_first
    after = per_token(batch.bootstrap, batch.segment_ids)

    def estimate(lam: Float[Array, "B T"]) -> Float[Array, "B T"]:
        return _backwards(earned, values, after, lam, at, batch.segment_ids, gamma=gamma)

    own = _lam_of(lam, lam_length, batch)
    advantages = estimate(own)
    returns = values + (advantages if critic_lam is None else estimate(jnp.full_like(own, critic_lam)))
    if turns is None:
        return Estimate(advantages, keep(returns, mask))
    advantages, returns = (turns.spread(keep(x, at)) for x in (advantages, returns))
    return Estimate(keep(advantages, mask) + _token_rewards(batch), keep(returns, mask))


# --- after an estimator -------------------------------------------------------------------------------------


def whitened(advantages: Float[Array, "B T"], mask: Bool[Array, "B T"]) -> Float[Array, "B T"]:
    """Returns (A - mean) / (std + 1e-8) on the mask, for the advantages A; 0 off the mask.

    Mean and population std are taken over the mask. If all A on the mask are equal but for rounding
    (EQUAL_WITHIN), the result is 0 everywhere.
    """
    chex.assert_equal_shape([advantages, mask])
    chex.assert_type([advantages, mask], [float, bool])
    largest = keep(jnp.abs(advantages), mask).max()
    unit = _unit(largest)
    scaled = advantages / unit
    mean = masked.mean(scaled, mask)
    std = jnp.sqrt(masked.mean((keep(scaled, mask) - mean) ** 2, mask))
    top = jnp.where(mask, scaled, -jnp.inf).max()
    is_flat = top - jnp.where(mask, scaled, jnp.inf).min() <= EQUAL_WITHIN * (largest / unit)
    return jnp.where(is_flat, 0.0, keep((scaled - mean) / (std + 1e-8 / unit), mask))


# --- parts --------------------------------------------------------------------------------------------------


def _token_rewards(batch: PreparedBatch) -> Float[Array, "B T"]:
    if batch.token_rewards is None:
        return jnp.zeros(batch.loss_mask.shape)
    return keep(batch.token_rewards, batch.loss_mask)


def _with_token_rewards(rewards: Float[Array, " S"], batch: PreparedBatch) -> Float[Array, " S"]:
    if batch.token_rewards is None:
        return rewards
    own = per_sequence(_token_rewards(batch), batch.segment_ids, rewards.shape[0])
    return rewards + per_sample(own, batch.sample_ids)


def _at_last_token(rewards: Float[Array, " S"], batch: PreparedBatch) -> Float[Array, "B T"]:
    """Returns each sequence's reward at the sequence's last loss token, and 0 at all other tokens."""
    columns = jnp.broadcast_to(jnp.arange(batch.loss_mask.shape[1]), batch.loss_mask.shape)
    on_mask = jnp.where(batch.loss_mask, columns, -1)
    last = jax.ops.segment_max(on_mask.ravel(), batch.segment_ids.ravel(), rewards.shape[0] + 1)[1:]
    is_last = batch.loss_mask & (columns == per_token(last, batch.segment_ids))
    return keep(per_token(rewards, batch.segment_ids), is_last)


def _lam_of(lam: float, lam_length: float | None, batch: PreparedBatch) -> Float[Array, "B T"]:
    if lam_length is None:
        return jnp.full(batch.loss_mask.shape, lam, float)
    lengths = _completion_tokens(batch)
    own = jnp.maximum(0.0, 1 - 1 / (lam_length * jnp.maximum(lengths, 1)))
    return per_token(own, batch.segment_ids)


def _completion_tokens(batch: PreparedBatch) -> Float[Array, " S"]:
    """Returns the number of each sequence's sampled tokens."""
    return per_sequence(_is_sampled(batch).astype(float), batch.segment_ids, batch.group_ids.shape[0])


def _is_sampled(batch: PreparedBatch) -> Bool[Array, "B T"]:
    """Returns whether each token is part of a completion, also if it is too old to be trained."""
    return batch.loss_mask | (batch.versions != NOT_SAMPLED)


def _longest_turn(batch: PreparedBatch) -> Float[Array, " S"]:
    """Returns the number of tokens in each sequence's longest turn, a run of successive sampled tokens."""
    is_sampled = _is_sampled(batch)
    columns = jnp.broadcast_to(jnp.arange(is_sampled.shape[1]), is_sampled.shape)
    goes_on = is_sampled[:, 1:] & is_sampled[:, :-1]
    for ids in (batch.segment_ids, batch.turn_ids):
        goes_on &= ids[:, 1:] == ids[:, :-1]
    begins = jnp.concatenate([jnp.ones_like(is_sampled[:, :1]), ~goes_on], axis=1)
    lengths = jnp.where(is_sampled, columns - jax.lax.cummax(jnp.where(begins, columns, 0), axis=1) + 1, 0)
    sequences = batch.group_ids.shape[0]
    longest = jax.ops.segment_max(lengths.ravel(), batch.segment_ids.ravel(), sequences + 1)[1:]
    return jnp.maximum(longest, 0).astype(float)  # a sequence without tokens has the least integer


def _backwards(
    rewards: Float[Array, "B T"],
    values: Float[Array, "B T"],
    after: Float[Array, "B T"],
    lam: Float[Array, "B T"],
    at: Bool[Array, "B T"],
    segment_ids: Int[Array, "B T"],
    *,
    gamma: float,
) -> Float[Array, "B T"]:
    """Returns the advantages A of `gae` at the tokens where the mask `at` is True, and 0 elsewhere.

    `values` are the values before the tokens, `after` is the value after a segment's last token. The scan
    goes backwards token by token, because in an associative scan the bits of a result would depend on the
    row's other segments.
    """

    def column(carry: tuple[Array, Array], x: tuple[Array, ...]) -> tuple[tuple[Array, Array], Array]:
        reward, value, beyond, decay, ends, is_on = x
        # A token off `at` hands its successor's value and advantage on to the token before it.
        following = jnp.where(ends, beyond, carry[0])
        gathered = jnp.where(ends, 0.0, carry[1])
        here = reward + gamma * following - value + gamma * decay * gathered
        carry = jnp.where(is_on, value, following), jnp.where(is_on, here, gathered)
        return carry, jnp.where(is_on, here, 0.0)

    nothing = jnp.zeros_like(rewards[:, 0])
    columns = tuple(x.T for x in (rewards, values, after, lam, is_segment_end(segment_ids), at))
    return jax.lax.scan(column, (nothing, nothing), columns, reverse=True)[1].T


class _Turns:
    """The turns in a batch: a turn is a sequence's successive loss tokens that have the same turn id."""

    def __init__(self, batch: PreparedBatch) -> None:
        mask, shape = batch.loss_mask, batch.loss_mask.shape
        columns = jnp.broadcast_to(jnp.arange(shape[1]), shape)
        seen = jax.lax.cummax(jnp.where(mask, columns, -1), axis=1)
        before = jnp.concatenate([jnp.full((shape[0], 1), -1), seen[:, :-1]], axis=1)  # the loss token before

        def differs(ids: Int[Array, "B T"]) -> Bool[Array, "B T"]:
            return jnp.take_along_axis(ids, jnp.maximum(before, 0), axis=1) != ids

        is_new = (before < 0) | differs(batch.segment_ids) | differs(batch.turn_ids)
        self.is_first = mask & is_new
        number = jnp.cumsum(self.is_first, axis=1)
        # Turn numbers of a row run from 0 (before its first turn) to T, so rows are T + 1 apart.
        self._place = number + jnp.arange(shape[0])[:, None] * (shape[1] + 1)
        self._count = shape[0] * (shape[1] + 1)

    def spread(self, x: Float[Array, "B T"]) -> Float[Array, "B T"]:
        """Returns at every token the sum of `x` over all tokens of the token's turn."""
        return jax.ops.segment_sum(x.ravel(), self._place.ravel(), self._count)[self._place]


def _statistics(
    x: Float[Array, " S"], ids: Int[Array, " S"], ddof: int, sample_ids: Int[Array, " S"] | None
) -> tuple[Array, Array, Array]:
    """Returns for each element of `x` its group's mean and std, and whether the group's values are equal.

    Values that differ by rounding (EQUAL_WITHIN) are equal. A group is the elements with the same id in
    `ids`; those of one sample are equal, and count once. The std is the root of the sum of squared deviations
    over the group's size minus `ddof`. Each result is (S,).
    """
    size = x.shape[0]
    count = jax.ops.segment_sum(once_per_sample(jnp.ones_like(x), sample_ids), ids, size)
    largest = jax.ops.segment_max(jnp.abs(x), ids, size)
    unit = _unit(largest)
    scaled = x / unit[ids]
    mean = jax.ops.segment_sum(once_per_sample(scaled, sample_ids), ids, size) / jnp.maximum(count, 1)
    squares = jax.ops.segment_sum(once_per_sample((scaled - mean[ids]) ** 2, sample_ids), ids, size)
    std = jnp.sqrt(squares / jnp.maximum(count - ddof, 1))
    spread = jax.ops.segment_max(x, ids, size) - jax.ops.segment_min(x, ids, size)
    is_flat = spread <= EQUAL_WITHIN * largest
    return (unit * mean)[ids], jnp.where(is_flat, 0.0, unit * std)[ids], is_flat[ids]


def _unit(largest: Float[Array, "..."]) -> Float[Array, "..."]:
    """Returns the largest power of two up to `largest`, the largest magnitude in an array.

    The result is limited to 2^-120..2^120. Dividing the array by the result is exact, and the squares of the
    quotients do not overflow.
    """
    # XLA may multiply by the reciprocal instead of dividing: the reciprocal must be a normal float32 too.
    exponent = jnp.clip(jnp.frexp(largest)[1] - 1, -120, 120)
    return jnp.ldexp(jnp.ones_like(largest), exponent)


ADVANTAGES: Mapping[str, Any] = {
    f.__name__: f for f in (group_normalized, leave_one_out, reward_to_go, gae, teacher_gap, ones)
}
"""The built-in estimators by their names in a config, which are the names of the functions."""
