"""What the trainer carries from batch to batch, and the optimiser."""

from __future__ import annotations

from typing import Any

import optax
from flax import struct
from jaxtyping import Array, Int

from areal_jax.config import TrainerConfig
from areal_jax.trainer.kl_control import KLControl


class TrainState(struct.PyTreeNode):
    """No rng: randomness is counted, not carried."""

    step: Int[Array, ""]
    """Optimiser steps taken."""
    version: Int[Array, ""]
    """Policy version: batches trained."""
    params: Any
    """float32 master weights."""
    optimizer: Any
    """optax state."""
    reference: Any = None
    """Parameters of the reference policy; None where the algorithm has no KL."""
    critic: Any = None
    """Parameters of the critic; None where the algorithm has none."""
    critic_optimizer: Any = None
    """optax state of the critic's."""
    kl_control: KLControl | None = None
    """Where the KL's coefficient adapts."""


def make_optimizer(c: TrainerConfig, optimizer_steps: int) -> optax.GradientTransformation:
    """AdamW (Loshchilov & Hutter, arXiv:1711.05101) after clipping by global norm.

    The rate rises linearly from learning_rate / lr_warmup_steps; after the warm-up it is the schedule's.
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
