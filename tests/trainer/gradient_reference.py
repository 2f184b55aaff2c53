"""The gradient of the sum of slope x log-prob over rows of tokens, in float64: dense, differentiated by JAX.

Its forward pass is checked against `tests.models.reference`, which is numpy and shares no code with it.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from areal_jax.models.config import ModelConfig


def logits(c: ModelConfig, p: Any, tokens: np.ndarray) -> jax.Array:
    """(n, V) of one sequence that begins at position 0, in the dtype of `p`."""
    count = len(tokens)
    angles = np.arange(count)[:, None] / c.rope_theta ** (np.arange(c.head_dim // 2) * 2 / c.head_dim)

    def norm(x: jax.Array, scale: jax.Array) -> jax.Array:
        return x / jnp.sqrt((x**2).mean(-1, keepdims=True) + c.norm_eps) * scale

    def rope(x: jax.Array) -> jax.Array:  # (heads, n, h)
        left, right = jnp.split(x, 2, -1)
        cos, sin = np.cos(angles), np.sin(angles)
        return jnp.concatenate([left * cos - right * sin, right * cos + left * sin], -1)

    x = p["embedding"][tokens]
    for layer in range(c.layers):
        block = jax.tree.map(lambda leaf: leaf[layer], p["blocks"])  # noqa: B023
        attention, mlp = block["attention"], block["mlp"]
        normed = norm(x, block["attention_norm"])
        q, k, v = (jnp.einsum("td,dhk->htk", normed, attention[name]) for name in "qkv")
        k, v = (jnp.repeat(part, c.heads // c.kv_heads, 0) for part in (rope(k), v))
        scores = rope(q) @ jnp.swapaxes(k, 1, 2) / c.head_dim**0.5
        weights = jax.nn.softmax(jnp.where(np.tri(count, dtype=bool), scores, -jnp.inf))
        x = x + jnp.einsum("hts,hsk,hkd->td", weights, v, attention["out"])
        normed = norm(x, block["mlp_norm"])
        x = x + (jax.nn.silu(normed @ mlp["gate"]) * (normed @ mlp["up"])) @ mlp["down"]
    return norm(x, p["norm"]) @ (p["embedding"].T if c.is_tied else p["head"])


def gradient(c: ModelConfig, params: Any, tokens: np.ndarray, slopes: np.ndarray) -> Any:
    """With respect to float64 `params`; `tokens` and `slopes` are (B, T), a sequence a row."""

    def value(p: Any) -> jax.Array:
        def of_row(row: jax.Array, slope: jax.Array) -> jax.Array:
            logp = jax.nn.log_softmax(logits(c, p, row))
            return (slope[1:] * logp[np.arange(len(row) - 1), row[1:]]).sum()

        return jax.vmap(of_row)(tokens, slopes).sum()

    # An oracle in float64 needs no optimised program; compiling one takes longer than running it.
    return jax.jit(jax.grad(value), compiler_options={"xla_backend_optimization_level": 0})(params)
