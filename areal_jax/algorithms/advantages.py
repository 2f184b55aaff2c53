"""Advantage estimators: pure functions `advantage(rewards (S,), batch, *, settings) -> (B, T)`.

`rewards` are the sequences' own; `batch.token_rewards`, where there are any, are what single tokens earn
beside them, and enter every estimator that reads rewards. One that trains a critic answers an `Estimate`.
Values off the loss mask mean nothing. Shapes: B rows, T columns, S sequences; a sequence lies in one row.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from areal_jax.algorithms import masked
from areal_jax.algorithms.masked import keep, per_sequence, per_token
from areal_jax.types import ArealError, Batch


class Estimate(NamedTuple):
    """What an estimator with a critic answers; both (B, T) float32."""

    advantages: Array
    returns: Array
    """What the critic is trained towards."""


# --- a number a sequence ------------------------------------------------------------------------------------


def group_normalized(
    rewards: Float[Array, " S"],
    batch: Batch,
    *,
    center: Literal["group", "batch", "none"] = "group",
    scale: Literal["group", "batch", "batch_centered", "none"] = "group",
    ddof: int = 1,
    eps: float = 1e-6,
) -> Float[Array, "B T"]:
    """(R - mean) / (std + eps), broadcast to every token; mean by `center`, std by `scale`.

    group/group is GRPO (arXiv:2402.03300), group/none Dr.GRPO (arXiv:2503.20783), batch/batch AReaL's
    global-batch normalisation (arXiv:2505.24298), group/batch LitePPO (arXiv:2508.08221). batch_centered is
    the batch's standard deviation of what `center` left, R - mean_g: REINFORCE++-baseline (arXiv:2501.03262).
    `ddof` 1 is the sample standard deviation, as the public systems take it; 0 the population's. Equal
    values, in what gives the mean or in what gives the standard deviation, get exactly 0.
    """
    total = _with_token_rewards(rewards, batch)
    groups = batch.group_ids
    whole = jnp.zeros_like(groups)
    centred = total
    if center != "none":
        mean, _, is_flat = _statistics(total, groups if center == "group" else whole, ddof)
        centred = jnp.where(is_flat, 0.0, total - mean)
    if scale == "none":
        return per_token(centred, batch.segment_ids)
    spread = centred if scale == "batch_centered" else total
    _, std, is_flat = _statistics(spread, groups if scale == "group" else whole, ddof)
    return per_token(jnp.where(is_flat, 0.0, centred / (std + eps)), batch.segment_ids)


def leave_one_out(rewards: Float[Array, " S"], batch: Batch) -> Float[Array, "B T"]:
    """R_i minus the mean reward of its group's others, which is G / (G - 1) (R_i - mean); alone: 0.

    RLOO, Ahmadian et al. (arXiv:2402.14740).
    """
    total = _with_token_rewards(rewards, batch)
    mean, _, is_flat = _statistics(total, batch.group_ids, 0)
    size = jax.ops.segment_sum(jnp.ones_like(total), batch.group_ids, total.shape[0])[batch.group_ids]
    others = jnp.maximum(size - 1, 1)
    return per_token(jnp.where(is_flat, 0.0, size / others * (total - mean)), batch.segment_ids)


def ones(rewards: Float[Array, " S"], batch: Batch) -> Float[Array, "B T"]:
    """1 everywhere: supervised learning by the policy gradient's machinery."""
    return per_token(jnp.ones_like(rewards), batch.segment_ids)


# --- a number a token ---------------------------------------------------------------------------------------


def reward_to_go(rewards: Float[Array, " S"], batch: Batch, *, baseline: float = 0.0) -> Float[Array, "B T"]:
    """What is earned from a token on: R - baseline at the last loss token, and what single tokens earn.

    REINFORCE, Williams (1992); with the KL in the reward and whitened, REINFORCE++ (arXiv:2501.03262).
    """
    earned = _at_last_token(rewards - baseline, batch) + _token_rewards(batch)
    zero = jnp.zeros_like(earned)
    return _backwards(earned, zero, zero, zero + 1, batch.loss_mask, batch.segment_ids, gamma=1.0)


def teacher_gap(rewards: Float[Array, " S"], batch: Batch) -> Float[Array, "B T"]:
    """log teacher - log behaviour, a token at a time: on-policy distillation (arXiv:2306.13649).

    Reads no reward of a sequence. Raises ArealError without `algorithm.teacher`.
    """
    del rewards
    if batch.teacher_logp is None:
        raise ArealError("advantage=teacher_gap needs a teacher; set algorithm.teacher to a model source")
    mask = batch.loss_mask
    return keep(batch.teacher_logp, mask) - keep(batch.behavior_logp, mask) + _token_rewards(batch)


def gae(
    rewards: Float[Array, " S"],
    batch: Batch,
    *,
    gamma: float = 1.0,
    lam: float = 1.0,
    lam_length: float | None = None,
    critic_lam: float | None = None,
    step: Literal["token", "turn"] = "token",
) -> Estimate:
    """A_t = d_t + gamma lam A_next, d_t = r_t + gamma V_next - V_t; returns A + V, before any whitening.

    Next is the next loss token of the sequence: those off the mask in between (a tool's turn) neither
    discount nor earn. After the last one stands `batch.bootstrap`, the critic's value where the length limit
    cut the sample, else 0. Schulman et al. (arXiv:1506.02438).

    `lam_length` makes lam = max(0, 1 - 1 / (lam_length L)) of a sequence of L loss tokens, and `critic_lam`
    is the lam of the returns, `lam` unless given (VAPO, arXiv:2504.05118). step=turn takes one step a turn,
    whose value is that before its first token, and gives its tokens the turn's advantage and return; what
    single tokens earn then stays at the token, added to its advantage and to no return.

    Raises ArealError without a critic.
    """
    if batch.values is None or batch.bootstrap is None:
        raise ArealError("advantage=gae needs values; set algorithm.critic.kind to separate or shared")
    mask, values = batch.loss_mask, keep(batch.values, batch.loss_mask)
    earned, at = _at_last_token(rewards, batch), mask
    turns = _Turns(batch) if step == "turn" else None
    if turns is None:
        earned += _token_rewards(batch)
    else:
        earned, at = turns.spread(earned), turns.is_first
    after = per_token(batch.bootstrap, batch.segment_ids)

    def estimate(lam: Float[Array, "B T"]) -> Float[Array, "B T"]:
        return _backwards(earned, values, after, lam, at, batch.segment_ids, gamma)

    own = _lam_of(lam, lam_length, batch)
    advantages = estimate(own)
    returns = values + (advantages if critic_lam is None else estimate(jnp.full_like(own, critic_lam)))
    if turns is None:
        return Estimate(advantages, keep(returns, mask))
    advantages, returns = (turns.spread(keep(x, at)) for x in (advantages, returns))
    return Estimate(keep(advantages, mask) + _token_rewards(batch), keep(returns, mask))


# --- after an estimator -------------------------------------------------------------------------------------


def whitened(
    advantages: Float[Array, "B T"], mask: Bool[Array, "B T"], eps: float = 1e-8
) -> Float[Array, "B T"]:
    """(A - mean) / (std + eps) over the mask, the population's std; 0 off it, and where all are equal."""
    mean = masked.mean(advantages, mask)
    std = jnp.sqrt(masked.mean((keep(advantages, mask) - mean) ** 2, mask))
    top = jnp.where(mask, advantages, -jnp.inf).max()
    is_flat = top == jnp.where(mask, advantages, jnp.inf).min()
    return jnp.where(is_flat, 0.0, keep((advantages - mean) / (std + eps), mask))


# --- parts --------------------------------------------------------------------------------------------------


def _token_rewards(batch: Batch) -> Float[Array, "B T"]:
    if batch.token_rewards is None:
        return jnp.zeros(batch.loss_mask.shape, jnp.float32)
    return keep(batch.token_rewards, batch.loss_mask)


def _with_token_rewards(rewards: Float[Array, " S"], batch: Batch) -> Float[Array, " S"]:
    if batch.token_rewards is None:
        return rewards
    return rewards + per_sequence(_token_rewards(batch), batch.segment_ids, rewards.shape[0])


def _at_last_token(rewards: Float[Array, " S"], batch: Batch) -> Float[Array, "B T"]:
    """A sequence's reward at its last loss token, wherever in the row that is; 0 elsewhere."""
    columns = jnp.broadcast_to(jnp.arange(batch.loss_mask.shape[1]), batch.loss_mask.shape)
    on_mask = jnp.where(batch.loss_mask, columns, -1)
    last = jax.ops.segment_max(on_mask.ravel(), batch.segment_ids.ravel(), rewards.shape[0] + 1)[1:]
    is_last = batch.loss_mask & (columns == per_token(last, batch.segment_ids))
    return keep(per_token(rewards, batch.segment_ids), is_last)


def _lam_of(lam: float, lam_length: float | None, batch: Batch) -> Float[Array, "B T"]:
    if lam_length is None:
        return jnp.full(batch.loss_mask.shape, lam, jnp.float32)
    lengths = per_sequence(batch.loss_mask.astype(jnp.float32), batch.segment_ids, batch.group_ids.shape[0])
    own = jnp.maximum(0.0, 1 - 1 / (lam_length * jnp.maximum(lengths, 1)))
    return per_token(own, batch.segment_ids)


def _backwards(
    rewards: Float[Array, "B T"],
    values: Float[Array, "B T"],
    after: Float[Array, "B T"],
    lam: Float[Array, "B T"],
    at: Bool[Array, "B T"],
    segment_ids: Int[Array, "B T"],
    gamma: float,
) -> Float[Array, "B T"]:
    """A_t = d_t + gamma lam A_next at the tokens `at`, 0 elsewhere, in one scan over columns from the right.

    A segment starts with A_next 0 and V_next `after`. Sums are taken token by token and not by an associative
    scan, so that not a bit depends on what else lies in the row.
    """
    is_end = jnp.concatenate(
        [segment_ids[:, 1:] != segment_ids[:, :-1], jnp.ones_like(segment_ids[:, :1], bool)], axis=1
    )

    def column(carry: tuple[Array, Array], x: tuple[Array, ...]) -> tuple[tuple[Array, Array], Array]:
        reward, value, beyond, decay, ends, is_on = x
        following = jnp.where(ends, beyond, carry[0])
        gathered = jnp.where(ends, 0.0, carry[1])
        here = reward + gamma * following - value + gamma * decay * gathered
        carry = jnp.where(is_on, value, following), jnp.where(is_on, here, gathered)
        return carry, jnp.where(is_on, here, 0.0)

    nothing = jnp.zeros_like(rewards[:, 0])
    columns = tuple(x.T for x in (rewards, values, after, lam, is_end, at))
    return jax.lax.scan(column, (nothing, nothing), columns, reverse=True)[1].T


class _Turns:
    """The turns of every sequence: runs of loss tokens of one turn id; tool text between is no turn's."""

    def __init__(self, batch: Batch) -> None:
        mask, shape = batch.loss_mask, batch.loss_mask.shape
        columns = jnp.broadcast_to(jnp.arange(shape[1]), shape)
        seen = jax.lax.cummax(jnp.where(mask, columns, -1), axis=1)
        before = jnp.concatenate([jnp.full((shape[0], 1), -1), seen[:, :-1]], axis=1)  # the loss token before

        def differs(ids: Int[Array, "B T"]) -> Bool[Array, "B T"]:
            return jnp.take_along_axis(ids, jnp.maximum(before, 0), axis=1) != ids

        is_new = (before < 0) | differs(batch.segment_ids) | differs(batch.turn_ids)
        self.is_first = mask & is_new
        number = jnp.cumsum(self.is_first, axis=1)
        self._place = number + jnp.arange(shape[0])[:, None] * (shape[1] + 1)
        self._count = shape[0] * (shape[1] + 1)

    def spread(self, x: Float[Array, "B T"]) -> Float[Array, "B T"]:
        """The sum over each turn, at all of its tokens."""
        return jax.ops.segment_sum(x.ravel(), self._place.ravel(), self._count)[self._place]


def _statistics(x: Float[Array, " S"], ids: Int[Array, " S"], ddof: int) -> tuple[Array, Array, Array]:
    """Mean, standard deviation and whether all values are equal, of each element's own group; (S,) each."""
    size = x.shape[0]
    count = jax.ops.segment_sum(jnp.ones_like(x), ids, size)
    mean = jax.ops.segment_sum(x, ids, size) / jnp.maximum(count, 1)
    squares = jax.ops.segment_sum((x - mean[ids]) ** 2, ids, size)
    std = jnp.sqrt(squares / jnp.maximum(count - ddof, 1))
    is_flat = jax.ops.segment_max(x, ids, size) == jax.ops.segment_min(x, ids, size)
    return mean[ids], jnp.where(is_flat, 0.0, std)[ids], is_flat[ids]


ADVANTAGES: Mapping[str, Any] = {
    "group_normalized": group_normalized,
    "leave_one_out": leave_one_out,
    "reward_to_go": reward_to_go,
    "gae": gae,
    "teacher_gap": teacher_gap,
    "ones": ones,
}
