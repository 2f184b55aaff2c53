"""Token-level advantages in float64 numpy, a sequence at a time, written from the papers' sums."""

from __future__ import annotations

import numpy as np


def gae(rewards: np.ndarray, values: np.ndarray, bootstrap: float, gamma: float, lam: float) -> np.ndarray:
    """sum_l (gamma lam)^l d_{t+l}, d_t = r_t + gamma V_{t+1} - V_t: every pair of steps, as defined."""
    n = len(rewards)
    following = np.append(values[1:], bootstrap)
    deltas = rewards + gamma * following - values
    return np.array([sum((gamma * lam) ** (k - t) * deltas[k] for k in range(t, n)) for t in range(n)])


def whole_row(
    estimate, rewards: np.ndarray, batch, per_step=lambda where: [[i] for i in where]
) -> np.ndarray:
    """`estimate(steps' rewards, steps' values, sequence) -> a number a step`, spread over the batch's tokens.

    `per_step` groups a sequence's loss tokens, given as flat indices, into steps.
    """
    out = np.zeros(batch.tokens.size)
    flat = {name: np.asarray(getattr(batch, name)).ravel() for name in ("segment_ids", "loss_mask", "values")}
    for sequence, reward in enumerate(rewards):
        where = np.flatnonzero((flat["segment_ids"] == sequence + 1) & flat["loss_mask"])
        steps = per_step(where)
        if not steps:
            continue
        earned = np.zeros(len(steps))
        earned[-1] = reward
        values = np.array([flat["values"][step[0]] for step in steps], float)
        for step, answer in zip(steps, estimate(earned, values, sequence), strict=True):
            out[step] = answer
    return out.reshape(batch.tokens.shape)
