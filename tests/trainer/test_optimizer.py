"""The optimiser against AdamW written out in float64 numpy."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import optax
import pytest

from areal_jax.config.sections import TrainerConfig
from areal_jax.trainer.state import make_optimizer

STEPS = 12


def rate(c: TrainerConfig, step: int) -> float:
    """Linear from learning_rate / warm-up to learning_rate, then flat or a cosine down to a tenth."""
    if step < c.lr_warmup_steps:
        first = c.learning_rate / c.lr_warmup_steps
        return first + (c.learning_rate - first) * step / c.lr_warmup_steps
    if c.lr_schedule == "constant":
        return c.learning_rate
    done = min(1.0, (step - c.lr_warmup_steps) / (STEPS - c.lr_warmup_steps))
    return c.learning_rate * (0.1 + 0.9 * (1 + np.cos(np.pi * done)) / 2)


def adamw(c: TrainerConfig, x: np.ndarray, grads: np.ndarray) -> np.ndarray:
    """Loshchilov & Hutter, Algorithm 2, after clipping by global norm."""
    m, v = np.zeros_like(x), np.zeros_like(x)
    for step, gradient in enumerate(grads):
        g = gradient * min(1.0, c.grad_clip / np.linalg.norm(gradient))
        m = c.adam_b1 * m + (1 - c.adam_b1) * g
        v = c.adam_b2 * v + (1 - c.adam_b2) * g**2
        m_hat, v_hat = m / (1 - c.adam_b1 ** (step + 1)), v / (1 - c.adam_b2 ** (step + 1))
        x = x - rate(c, step) * (m_hat / (np.sqrt(v_hat) + c.adam_eps) + c.weight_decay * x)
    return x


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"lr_warmup_steps": 4},
        {"lr_schedule": "cosine"},
        {"lr_warmup_steps": 3, "lr_schedule": "cosine", "weight_decay": 0.1, "grad_clip": 0.5},
    ],
    ids=str,
)
def test_make_optimizer_is_adamw(settings: dict[str, Any]):
    c = TrainerConfig(learning_rate=0.01, adam_b1=0.8, adam_b2=0.9, **settings)
    rng = np.random.default_rng(0)
    x, grads = rng.normal(size=7), rng.normal(size=(STEPS, 7)) * np.geomspace(0.01, 3, STEPS)[:, None]
    assert (np.linalg.norm(grads, axis=1) > c.grad_clip).any()
    optimizer = make_optimizer(c, STEPS)

    @jax.jit
    def step(params: Any, state: Any, gradient: Any) -> tuple[Any, Any]:
        updates, state = optimizer.update(gradient, state, params)
        return optax.apply_updates(params, updates), state

    params = {"a": x[:3].astype(np.float32), "b": x[3:].astype(np.float32)}
    state = optimizer.init(params)
    for gradient in grads.astype(np.float32):
        params, state = step(params, state, {"a": gradient[:3], "b": gradient[3:]})
    np.testing.assert_allclose(np.concatenate([params["a"], params["b"]]), adamw(c, x, grads), atol=2e-6)
