"""The trainer's state between batches, the optimiser, and the KL's adaptive coefficient."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import optax
from flax import struct
from jaxtyping import Array, Bool, Float, Int

from areal_jax.config.sections import AlgorithmConfig, TrainerConfig

LARGEST_ERROR = 0.2


class KLControl(struct.PyTreeNode):
    """The adaptive coefficient of the KL to the reference policy.

    `coef` is the coefficient. `kl` is the sum of the tokens' KL (nats) and `tokens` the number of loss tokens
    over the batch's minibatches so far; between two batches `kl` and `tokens` are 0.
    """

    coef: Float[Array, ""]
    kl: Float[Array, ""]
    tokens: Float[Array, ""]

    @classmethod
    def first(cls, coef: float) -> KLControl:
        return cls(*(jnp.asarray(x, float) for x in (coef, 0, 0)))

    def after(
        self,
        kl: Float[Array, ""],
        tokens: Float[Array, ""],
        is_last: Bool[Array, ""],
        target: float,
        horizon: float,
    ) -> KLControl:
        """Returns the control after a minibatch with a KL sum of `kl` over `tokens` loss tokens.

        At the batch's last minibatch (`is_last`) coef *= 1 + clip(KL / target - 1, +-0.2) min(n / horizon,
        1), where KL is the mean over the batch's n loss tokens, and the sums return to 0. `target` is in nats
        per token, `horizon` in tokens. Ziegler et al. (arXiv:1909.08593), Eq. 4 and 5; bounding n / horizon
        by 1 keeps the coefficient above 0 for a batch of any size.
        """
        kl, tokens = self.kl + kl, self.tokens + tokens
        error = kl / jnp.maximum(tokens, 1) / target - 1
        error = jnp.clip(error, -LARGEST_ERROR, LARGEST_ERROR)
        moved = self.coef * (1 + error * jnp.minimum(tokens / horizon, 1.0))
        zero = jnp.zeros_like(kl)
        return KLControl(
            jnp.where(is_last, moved, self.coef),
            jnp.where(is_last, zero, kl),
            jnp.where(is_last, zero, tokens),
        )


def kl_coef(a: AlgorithmConfig, control: KLControl | None) -> Array | float:
    """Returns the KL's coefficient β: `control.coef` if the coefficient adapts, else the config's."""
    return a.kl.coef if control is None else control.coef


class TrainState(struct.PyTreeNode):
    """All state that an update replaces. It has no PRNG key: random numbers are derived from counters."""

    step: Int[Array, ""]
    """Number of optimiser steps taken so far."""
    version: Int[Array, ""]
    """Policy version: number of batches trained so far."""
    params: Any
    """The policy's parameters: float32 master weights."""
    optimizer: Any
    """optax state of the trained parameters."""
    reference: Any = None
    """The reference policy without the policy's frozen leaves (`Trainable.of`); None: no reference policy."""
    critic: Any = None
    """Parameters of the critic; None if the algorithm has no critic."""
    critic_optimizer: Any = None
    """optax state of the critic; None if the algorithm has no critic."""
    kl_control: KLControl | None = None
    """The KL's adaptive coefficient; None if the coefficient is fixed."""


def depends_on_steps(c: TrainerConfig) -> bool:
    """Returns whether the learning rate of a step depends on the run's number of steps."""
    return c.lr_schedule == "cosine"


def make_optimizer(c: TrainerConfig, optimizer_steps: int) -> optax.GradientTransformation:
    """Returns AdamW (Loshchilov & Hutter, arXiv:1711.05101) on gradients clipped by their global norm.

    For lr_warmup_steps steps the learning rate rises linearly, from learning_rate / lr_warmup_steps to
    learning_rate. Then the rate follows lr_schedule: constant, or cosine, which falls to a tenth of
    learning_rate at step `optimizer_steps`.
    """
    rates = {
        "constant": optax.constant_schedule(c.learning_rate),
        "cosine": optax.cosine_decay_schedule(
            c.learning_rate, max(1, optimizer_steps - c.lr_warmup_steps), alpha=0.1
        ),
    }
    first = c.learning_rate / max(1, c.lr_warmup_steps)
    warmup = optax.linear_schedule(first, c.learning_rate, c.lr_warmup_steps)
    schedule = optax.join_schedules([warmup, rates[c.lr_schedule]], [c.lr_warmup_steps])
    return optax.chain(
        optax.clip_by_global_norm(c.grad_clip),
        optax.adamw(schedule, c.adam_b1, c.adam_b2, c.adam_eps, weight_decay=c.weight_decay),
    )
