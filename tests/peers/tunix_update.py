"""google-tunix: its PeftTrainer with a clipped-ratio loss on its own Llama, one JSON line.

python tests/peers/tunix_update.py {update,logprob,skewed} SHAPE REPEATS

skewed: a padded row a sequence, as many optimiser steps as there are micro-batches.
"""

from __future__ import annotations

import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from shapes import LENGTH, MICRO_ROWS, SEQUENCES, SHAPES
from timing import report
from tunix.models.llama3 import model as llama
from tunix.rl import common
from tunix.sft import peft_trainer
from tunix_model import make


def main(what: str, name: str, repeats: int) -> None:
    s = SHAPES[name]
    model = make(name)
    rows = MICRO_ROWS if what == "skewed" else s["rows"]
    tokens = jnp.asarray(np.random.default_rng(0).integers(0, s["vocab"], (rows, LENGTH)), jnp.int32)
    positions = jnp.broadcast_to(jnp.arange(LENGTH), (rows, LENGTH))
    mask = jnp.broadcast_to(jnp.tri(LENGTH, dtype=bool), (rows, LENGTH, LENGTH))
    advantages = jnp.where(jnp.arange(rows) % 2 == 0, -1.0, 1.0)[:, None]

    def log_probs(model: llama.Llama3, tokens: jax.Array) -> jax.Array:
        logits, _ = model(tokens, positions, None, mask)
        return common.selective_log_softmax(logits[:, :-1], tokens[:, 1:])

    scored = nnx.jit(log_probs)

    def loss(model: llama.Llama3, tokens: jax.Array, behavior: jax.Array) -> jax.Array:
        ratio = jnp.exp(log_probs(model, tokens) - behavior)
        return -jnp.minimum(ratio * advantages, jnp.clip(ratio, 0.8, 1.2) * advantages).mean()

    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-5, 0.9, 0.95, weight_decay=0.0))
    training = peft_trainer.TrainingConfig(eval_every_n_steps=10**9, max_steps=10**9)
    trainer = peft_trainer.PeftTrainer(model, optimizer, training).with_loss_fn(loss)
    behavior = scored(model, tokens)
    trainer = trainer.with_gen_model_input_fn(lambda x: x)
    step = trainer.jit_train_and_eval_step(cache_nnx_graph=True)[0]

    def update() -> None:
        jax.block_until_ready(step({"tokens": tokens, "behavior": behavior}))
        jax.block_until_ready(nnx.state(model))

    def logprob() -> None:
        jax.block_until_ready(scored(model, tokens))

    def skewed() -> None:
        for _ in range(SEQUENCES // MICRO_ROWS):
            update()

    report({"update": update, "logprob": logprob, "skewed": skewed}[what], repeats)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
