"""The transformer in float64 numpy, a token and a head at a time, written from the papers."""

from __future__ import annotations

from typing import Any

import numpy as np

from areal_jax.models.config import ModelConfig


def norm(x: np.ndarray, scale: np.ndarray, eps: float) -> np.ndarray:
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + eps) * scale


def rope(x: np.ndarray, position: int, theta: float) -> np.ndarray:
    """Element i turns with element i + h/2, by position / theta^(2 i / h)."""
    half = len(x) // 2
    out = np.empty_like(x)
    for i in range(half):
        angle = position / theta ** (2 * i / len(x))
        out[i] = x[i] * np.cos(angle) - x[i + half] * np.sin(angle)
        out[i + half] = x[i + half] * np.cos(angle) + x[i] * np.sin(angle)
    return out


def attention(c: ModelConfig, p: dict[str, Any], x: np.ndarray) -> np.ndarray:
    n = len(x)
    q = np.einsum("td,dhk->thk", x, p["q"]) + p.get("q_bias", 0)
    k = np.einsum("td,dhk->thk", x, p["k"]) + p.get("k_bias", 0)
    v = np.einsum("td,dhk->thk", x, p["v"]) + p.get("v_bias", 0)
    if c.is_qk_norm_joint:
        q, k = (
            norm(x.reshape(n, -1), p[f"{name}_norm"].ravel(), c.norm_eps).reshape(x.shape)
            for name, x in (("q", q), ("k", k))
        )
    elif c.has_qk_norm:
        q, k = norm(q, p["q_norm"], c.norm_eps), norm(k, p["k_norm"], c.norm_eps)
    if c.clip_qkv is not None:
        q, k, v = (np.clip(x, -c.clip_qkv, c.clip_qkv) for x in (q, k, v))
    q = np.array([[rope(q[t, h], t, c.rope_theta) for h in range(c.heads)] for t in range(n)])
    k = np.array([[rope(k[t, h], t, c.rope_theta) for h in range(c.kv_heads)] for t in range(n)])
    out = np.zeros((n, c.width))
    for t in range(n):
        for head in range(c.heads):
            shared = head // (c.heads // c.kv_heads)
            scores = k[: t + 1, shared] @ q[t, head] / np.sqrt(c.head_dim)
            weights = np.exp(scores - scores.max())
            out[t] += weights / weights.sum() @ v[: t + 1, shared] @ p["out"][head]
    return out


def mlp(p: dict[str, Any], x: np.ndarray) -> np.ndarray:
    gate = x @ p["gate"]
    return (gate / (1 + np.exp(-gate)) * (x @ p["up"])) @ p["down"]


def probabilities(p: dict[str, Any], x: np.ndarray) -> np.ndarray:
    """(n, E): the router's probability of each expert."""
    scores = np.exp(x @ p["router"])
    return scores / scores.sum(-1, keepdims=True)


def mixture(c: ModelConfig, p: dict[str, Any], x: np.ndarray, given: np.ndarray | None = None) -> np.ndarray:
    """Each token's experts, one after the other; a shared expert times the sigmoid of its gate.

    `given`: (n, k) of the experts to use; 255: those that the router chooses.
    """
    out = np.zeros_like(x)
    for t, (token, scores) in enumerate(zip(x, probabilities(p, x), strict=True)):
        best = sorted(range(c.experts), key=lambda e: -scores[e])[: c.experts_per_token]
        if given is not None and given[t, 0] != 255:
            best = given[t].tolist()
        total = scores[best].sum() if c.has_unit_weights else 1.0
        for e in best:
            own = {name: p[f"expert_{name}"][e] for name in ("gate", "up", "down")}
            out[t] += scores[e] / total * mlp(own, token)
        if c.shared_width:
            out[t] += mlp(p["shared"], token) / (1 + np.exp(-token @ p["shared_gate"]))
    return out


def hidden(
    c: ModelConfig,
    params: dict[str, Any],
    tokens: np.ndarray,
    routed: list[np.ndarray] | None = None,
    given: np.ndarray | None = None,
) -> np.ndarray:
    """(n, D) after the last norm, of one sequence that begins at position 0.

    `routed` gets each layer's (n, E) of the router's probabilities. `given`: (L, n, k), see `mixture`.
    """
    wide = {name: _float64(value) for name, value in params.items()}
    x = wide["embedding"][tokens]
    for layer in range(c.layers):
        p = {name: _layer(value, layer) for name, value in wide["blocks"].items()}
        x = x + attention(c, p["attention"], norm(x, p["attention_norm"], c.norm_eps))
        normed = norm(x, p["mlp_norm"], c.norm_eps)
        if routed is not None:
            routed.append(probabilities(p["mlp"], normed))
        experts = None if given is None else given[layer]
        x = x + (mixture(c, p["mlp"], normed, experts) if c.experts else mlp(p["mlp"], normed))
    return norm(x, wide["norm"], c.norm_eps)


def logits(c: ModelConfig, params: dict[str, Any], tokens: np.ndarray) -> np.ndarray:
    """(n, V) of one sequence that begins at position 0."""
    weight = _float64(params["embedding"]).T if c.is_tied else _float64(params["head"])
    return hidden(c, params, tokens) @ weight


def _float64(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _float64(item) for name, item in value.items()}
    return np.asarray(value, np.float64)


def _layer(value: Any, layer: int) -> Any:
    if isinstance(value, dict):
        return {name: _layer(item, layer) for name, item in value.items()}
    return value[layer]
