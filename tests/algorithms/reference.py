"""The formulas in float64 numpy, written from the papers and not from the package: golden values."""

from __future__ import annotations

import numpy as np


def ppo_clip(
    logp: np.ndarray,
    proximal: np.ndarray,
    advantages: np.ndarray,
    low: float,
    high: float,
    dual: float | None = None,
) -> np.ndarray:
    """-min(u A, clip(u, 1 - low, 1 + high) A); bounded below by dual A where A < 0."""
    u = np.exp(logp - proximal)
    gain = np.minimum(u * advantages, np.clip(u, 1 - low, 1 + high) * advantages)
    if dual is not None:
        gain = np.where(advantages < 0, np.maximum(gain, dual * advantages), gain)
    return -gain


def ppo_clip_slope(
    logp: np.ndarray, proximal: np.ndarray, advantages: np.ndarray, low: float, high: float
) -> np.ndarray:
    """d loss / d logp away from the corners: -u A, and 0 where clipping binds."""
    u = np.exp(logp - proximal)
    is_bound = ((advantages > 0) & (u > 1 + high)) | ((advantages < 0) & (u < 1 - low))
    return np.where(is_bound, 0.0, -u * advantages)


def log_softmax(z: np.ndarray) -> np.ndarray:
    z = z - z.max(-1, keepdims=True)
    return z - np.log(np.exp(z).sum(-1, keepdims=True))


def token_stats(
    logits: np.ndarray, tokens: np.ndarray, temperature: np.ndarray, support: np.ndarray | None = None
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Log-prob, entropy and mass outside the support, a token at a time."""
    rows = []
    for i, token in enumerate(tokens):
        z = logits[i].astype(np.float64) / (temperature[i] or 1.0)
        p = np.exp(log_softmax(z))
        kept = np.arange(len(z))
        if support is not None and (support[i] >= 0).any():
            kept = support[i][support[i] >= 0]
        q = np.zeros_like(p)
        q[kept] = p[kept] / p[kept].sum()
        entropy = -sum(x * np.log(x) for x in q if x > 0)
        rows.append((z[token] - np.log(np.exp(z[kept]).sum()), entropy, 1 - p[kept].sum()))
    logp, entropy, outside = np.array(rows).T
    return logp, entropy, outside


def group_normalized(
    rewards: np.ndarray, groups: np.ndarray, center: str, scale: str, ddof: int, eps: float = 1e-6
) -> np.ndarray:
    """(R - mean) / (std + eps), a sequence at a time."""
    own = [rewards[groups == group] for group in groups]
    centres = {"group": own, "batch": [rewards] * len(groups), "none": [np.zeros(1)] * len(groups)}[center]
    centred = np.array([x - y.mean() for x, y in zip(rewards, centres, strict=True)])
    centred[[center != "none" and np.ptp(centre) == 0 for centre in centres]] = 0
    if scale == "none":
        return centred
    whole = {"batch": rewards, "batch_centered": centred}
    spreads = own if scale == "group" else [whole[scale]] * len(groups)
    return np.array(
        [x / (y.std(ddof=ddof) + eps) if np.ptp(y) else 0.0 for x, y in zip(centred, spreads, strict=True)]
    )


def reduction_weights(
    mask: np.ndarray, segments: np.ndarray, minibatches: int, reduction: str, constant: float
) -> np.ndarray:
    """The table of weights, a token at a time."""
    out = np.zeros(mask.shape)
    each = len(mask) // minibatches
    for row, column in np.argwhere(mask):
        own = slice(row // each * each, (row // each + 1) * each)
        tokens = mask[own].sum()
        sequences = len(set(segments[own][mask[own]].tolist()))
        length = (mask & (segments == segments[row, column])).sum()
        out[row, column] = {
            "token_mean": 1 / tokens,
            "token_mean_batch": 1 / (mask.sum() / minibatches),
            "sequence_mean": 1 / (length * sequences),
            "sequence_sum": 1 / sequences,
            "constant": 1 / (constant * sequences),
        }[reduction]
    return out
