"""Losses, off-policy weights and KL terms in float64 numpy, a sequence at a time: golden values.

Written from the papers and not from the package. Arrays are the loss tokens of one sequence; `held` is the
current log-prob where a formula stops the gradient, so that a difference quotient by `theta` is the gradient
that is meant. Losses are minimised.
"""

from __future__ import annotations

import numpy as np


def exp(log_ratio: np.ndarray) -> np.ndarray:
    return np.exp(np.clip(log_ratio, -20, 20))


def ratio(level: str, theta: np.ndarray, held: np.ndarray, center: np.ndarray) -> np.ndarray:
    if level == "token":
        return exp(theta - center)
    if level == "sequence":
        return np.full_like(theta, exp(np.mean(theta - center)))
    return exp(np.mean(held - center)) * np.exp(theta - held)


def ppo_clip(theta, held, p, b, a, low=0.2, high=0.2, dual=None, level="token"):
    u = ratio(level, theta, held, p)
    gain = [min(x * y, min(max(x, 1 - low), 1 + high) * y) for x, y in zip(u, a, strict=True)]
    if dual is not None:
        gain = [max(x, dual * y) if y < 0 else x for x, y in zip(gain, a, strict=True)]
    return -np.array(gain)


def sapo(theta, held, p, b, a, tau_positive=1.0, tau_negative=1.05):
    u = exp(theta - p)
    tau = np.array([tau_positive if x > 0 else tau_negative for x in a])
    return -4 / tau / (1 + np.exp(-tau * (u - 1))) * a


def importance(theta, held, p, b, a, level="token"):
    return -ratio(level, theta, held, p) * a


def policy_gradient(theta, held, p, b, a):
    return -a * theta


def cispo(theta, held, p, b, a, high=4.0):
    return -np.array([min(r, 1 + high) for r in exp(held - b)]) * a * theta


def aipo(theta, held, p, b, a, cap=5.0):
    return -np.array([min(r, cap) for r in exp(held - b)]) * a * theta


def dppo(theta, held, p, b, a, delta=0.15, divergence="total_variation"):
    x, y = np.exp(held), np.exp(b)
    far = np.abs(x - y) if divergence == "total_variation" else binary_kl(b, held)
    is_cut = (far > delta) & (((a > 0) & (x > y)) | ((a < 0) & (x < y)))
    return np.where(is_cut, 0.0, -exp(theta - b) * a)


LOSSES = {
    f.__name__: f for f in (ppo_clip, sapo, importance, policy_gradient, cispo, aipo, dppo)
}  # by the package's names


def binary_kl(p: np.ndarray, q: np.ndarray) -> np.ndarray:
    """KL of (token, any other) under e^p from that under e^q."""
    x, y = (np.clip(np.exp(z), 1e-8, 1 - 1e-8) for z in (p, q))
    return x * np.log(x / y) + (1 - x) * np.log((1 - x) / (1 - y))


def kl_estimate(p: np.ndarray, q: np.ndarray, estimator: str) -> np.ndarray:
    d = q - p
    return {"k1": -d, "k2": d * d / 2, "k3": np.exp(d) - 1 - d}[estimator]


def kl_loss(theta, held, ref, b, estimator):
    weight = exp((theta if estimator == "k3" else held) - b)
    return weight * kl_estimate(theta, ref, estimator)


AGGREGATES = {"mean": np.mean, "sum": np.sum, "max": np.max}


def truncate(p, b, cap=5.0, level="token", aggregate="mean"):
    gap = p - b if level == "token" else np.full_like(p, AGGREGATES[aggregate](p - b))
    w = exp(gap)
    return np.where(w > cap, cap, w), w > cap


def mask(p, b, metric="ratio", level="token", aggregate="mean", lower=None, upper=5.0, weight="ratio"):
    w = exp(p - b)
    measured = {
        "ratio": p - b,
        "binary_kl": np.maximum(binary_kl(b, p), binary_kl(p, b)),
        **{k: kl_estimate(b, p, k) for k in ("k1", "k2", "k3")},
    }[metric]
    if level == "sequence":
        measured = np.full_like(p, AGGREGATES[aggregate](measured))
    if metric == "ratio":
        w = measured = exp(measured)
    is_cut = np.zeros(len(p), bool)
    if lower is not None:
        is_cut |= measured < lower
    if upper is not None:
        is_cut |= measured > upper
    return np.where(is_cut, 0.0, w if weight == "ratio" else 1.0), is_cut


def none(p, b):
    return np.ones_like(p), np.zeros(len(p), bool)


OFF_POLICY = {"truncate": truncate, "mask": mask, "none": none}
"""Those that look at one sequence; m2po looks at a minibatch."""


def m2po(p: np.ndarray, b: np.ndarray, budget: float = 0.04) -> tuple[np.ndarray, np.ndarray]:
    """Over all loss tokens of a minibatch: the largest squares go, one at a time, until the rest will do."""
    squares = (p - b) ** 2
    kept = list(np.argsort(squares))
    while kept and squares[kept].mean() > budget:
        kept.pop()
    is_cut = np.ones(len(p), bool)
    is_cut[kept] = False
    return np.where(is_cut, 0.0, exp(p - b)), is_cut
