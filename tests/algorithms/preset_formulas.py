"""The presets' objectives in float64 numpy, written down one by one from their papers: golden values.

A `Sample` holds the loss tokens of one sequence. What a function answers is minimised; `held` is the current
log-prob where a formula stops the gradient, so a difference quotient by `theta` is the gradient meant.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from tests.algorithms.reference_losses import binary_kl, exp, kl_estimate, m2po

MAX_TOKENS = 12
"""generation.max_tokens: Dr.GRPO's constant, and what DAPO's penalty is counted from."""


@dataclass
class Sample:
    reward: float
    group: int
    minibatch: int
    theta: np.ndarray
    held: np.ndarray
    p: np.ndarray
    """Proximal: recomputed; with one minibatch the held current one."""
    b: np.ndarray
    ref: np.ndarray
    teacher: np.ndarray
    values: np.ndarray
    bootstrap: float
    ages: np.ndarray

    def __len__(self) -> int:
        return len(self.theta)


Samples = Sequence[Sample]


# --- rewards and advantages ---------------------------------------------------------------------------------


def group(samples: Samples, s: Sample) -> np.ndarray:
    return np.array([x.reward for x in samples if x.group == s.group])


def rewards(samples: Samples) -> np.ndarray:
    return np.array([s.reward for s in samples])


def z_of_group(samples: Samples, s: Sample) -> float:
    own = group(samples, s)
    return 0.0 if np.ptp(own) == 0 else (s.reward - own.mean()) / (own.std(ddof=1) + 1e-6)


def off_mean(samples: Samples, s: Sample) -> float:
    return s.reward - group(samples, s).mean()


def gae(s: Sample, gamma: float, lam: float) -> np.ndarray:
    following = np.append(s.values[1:], s.bootstrap)
    deltas = np.eye(len(s))[-1] * s.reward + gamma * following - s.values
    n = np.arange(len(s))
    return np.array([((gamma * lam) ** (n[t:] - t) * deltas[t:]).sum() for t in n])


# --- terms --------------------------------------------------------------------------------------------------


def weight(s: Sample, cap: float = 5.0) -> np.ndarray:
    return np.minimum(exp(s.p - s.b), cap)


def clipped(u: np.ndarray, a: np.ndarray | float, low: float = 0.2, high: float = 0.2) -> np.ndarray:
    return -np.minimum(u * a, np.clip(u, 1 - low, 1 + high) * a)


def decoupled(s: Sample, a: np.ndarray | float, high: float = 0.2) -> np.ndarray:
    return weight(s) * clipped(exp(s.theta - s.p), a, high=high)


# --- reductions, a minibatch at a time ----------------------------------------------------------------------

Loss = Callable[[Sample], np.ndarray]


def _minibatches(samples: Samples) -> list[list[Sample]]:
    return [[s for s in samples if s.minibatch == m] for m in sorted({s.minibatch for s in samples})]


def token_mean(samples: Samples, loss: Loss) -> float:
    return sum(sum(loss(s).sum() for s in own) / sum(map(len, own)) for own in _minibatches(samples))


def sequence_mean(samples: Samples, loss: Loss) -> float:
    return sum(sum(loss(s).mean() for s in own) / len(own) for own in _minibatches(samples))


def sequence_sum(samples: Samples, loss: Loss) -> float:
    return sum(sum(loss(s).sum() for s in own) / len(own) for own in _minibatches(samples))


# --- presets ------------------------------------------------------------------------------------------------


def ppo(samples: Samples) -> float:
    """Policy and critic, whose values are those of arrival: there its loss is half the squared error."""
    a = {id(s): gae(s, 1.0, 0.95) for s in samples}
    return token_mean(samples, lambda s: decoupled(s, a[id(s)]) + 0.5 * 0.5 * a[id(s)] ** 2)


def grpo(samples: Samples) -> float:
    return sequence_mean(
        samples,
        lambda s: (
            decoupled(s, z_of_group(samples, s))
            + 0.04 * exp(s.theta - s.b) * kl_estimate(s.theta, s.ref, "k3")
        ),
    )


def dr_grpo(samples: Samples) -> float:
    return sequence_sum(samples, lambda s: decoupled(s, off_mean(samples, s)) / MAX_TOKENS)


def dapo(samples: Samples) -> float:
    """Penalty: the last fifth of MAX_TOKENS."""
    margin = MAX_TOKENS / 5
    penalised = [
        Sample(
            **{**vars(s), "reward": s.reward + min(0.0, max(-1.0, (MAX_TOKENS - margin - len(s)) / margin))}
        )
        for s in samples
    ]
    return token_mean(penalised, lambda s: decoupled(s, z_of_group(penalised, s), high=0.28))


def rloo(samples: Samples) -> float:
    paid = [Sample(**{**vars(s), "reward": s.reward - 0.05 * (s.b - s.ref).sum()}) for s in samples]

    def loss(s: Sample) -> np.ndarray:
        others = [x.reward for x in paid if x.group == s.group and x is not s]
        return -weight(s) * (s.reward - np.mean(others)) * s.theta

    return sequence_sum(paid, loss)


def reinforce(samples: Samples) -> float:
    return sequence_sum(samples, lambda s: -weight(s) * s.reward * s.theta)


def reinforce_pp(samples: Samples) -> float:
    to_go = {id(s): s.reward - 0.01 * np.cumsum((s.b - s.ref)[::-1])[::-1] for s in samples}
    every = np.concatenate(list(to_go.values()))
    return token_mean(samples, lambda s: decoupled(s, (to_go[id(s)] - every.mean()) / (every.std() + 1e-8)))


def reinforce_pp_baseline(samples: Samples) -> float:
    std = np.std([off_mean(samples, s) for s in samples], ddof=1) + 1e-6
    return token_mean(samples, lambda s: decoupled(s, off_mean(samples, s) / std))


def lite_ppo(samples: Samples) -> float:
    std = rewards(samples).std(ddof=1) + 1e-6
    return token_mean(samples, lambda s: decoupled(s, off_mean(samples, s) / std))


def gspo(samples: Samples) -> float:
    def loss(s: Sample) -> np.ndarray:
        ratio = np.full(len(s), np.exp(np.mean(s.theta - s.p)))
        of_sequence = min(np.exp(np.mean(s.p - s.b)), 5.0)
        return of_sequence * clipped(ratio, z_of_group(samples, s), 3e-4, 4e-4)

    return sequence_mean(samples, loss)


def gspo_token(samples: Samples) -> float:
    def loss(s: Sample) -> np.ndarray:
        ratio = np.exp(np.mean(s.held - s.p)) * np.exp(s.theta - s.held)
        of_sequence = min(np.exp(np.mean(s.p - s.b)), 5.0)
        return of_sequence * clipped(ratio, z_of_group(samples, s), 3e-4, 4e-4)

    return sequence_mean(samples, loss)


def sapo(samples: Samples) -> float:
    def loss(s: Sample) -> np.ndarray:
        a = z_of_group(samples, s)
        tau = 1.0 if a > 0 else 1.05
        return -weight(s) * 4 / tau / (1 + np.exp(-tau * (exp(s.theta - s.p) - 1))) * a

    return sequence_mean(samples, loss)


def cispo(samples: Samples) -> float:
    return token_mean(
        samples, lambda s: -np.minimum(exp(s.held - s.b), 5.0) * z_of_group(samples, s) * s.theta
    )


def m2po_preset(samples: Samples) -> float:
    """One minibatch, and every token of it in one budget."""
    p, b = (np.concatenate([getattr(s, name) for s in samples]) for name in ("p", "b"))
    w = np.split(m2po(p, b, 0.04)[0], np.cumsum([len(s) for s in samples])[:-1])
    of = {id(s): each for s, each in zip(samples, w, strict=True)}
    return token_mean(samples, lambda s: -of[id(s)] * exp(s.theta - s.p) * z_of_group(samples, s))


def icepop(samples: Samples) -> float:
    def loss(s: Sample) -> np.ndarray:
        k = exp(s.p - s.b)
        return np.where((k >= 0.5) & (k <= 5), k, 0) * clipped(exp(s.theta - s.p), z_of_group(samples, s))

    return sequence_mean(samples, loss)


def kpop(samples: Samples) -> float:
    def loss(s: Sample) -> np.ndarray:
        is_kept = np.maximum(binary_kl(s.b, s.p), binary_kl(s.p, s.b)) <= 2
        return is_kept * exp(s.p - s.b) * clipped(exp(s.theta - s.p), z_of_group(samples, s))

    return token_mean(samples, loss)


def dppo(samples: Samples) -> float:
    def loss(s: Sample) -> np.ndarray:
        a, moved = z_of_group(samples, s), np.exp(s.held) - np.exp(s.b)
        return np.where((np.abs(moved) > 0.15) & (a * moved > 0), 0, -exp(s.theta - s.b) * a)

    return token_mean(samples, loss)


def aipo(samples: Samples) -> float:
    return sequence_sum(
        samples, lambda s: -np.minimum(exp(s.held - s.b), 5.0) * off_mean(samples, s) * s.theta
    )


def decoupled_ppo(samples: Samples) -> float:
    every = rewards(samples)
    mean, std = every.mean(), every.std(ddof=1) + 1e-6
    return token_mean(samples, lambda s: decoupled(s, (s.reward - mean) / std))


def _between(samples: Samples, alpha: Callable[[Sample], np.ndarray]) -> Samples:
    return [Sample(**{**vars(s), "p": s.b + alpha(s) * (s.held - s.b)}) for s in samples]


def decoupled_ppo_loglinear(samples: Samples) -> float:
    """Minibatch k of n of the step from v: (v - v_b) / (v + k / n - v_b); the current policy at k = 0."""
    n = len(_minibatches(samples))
    return decoupled_ppo(
        _between(samples, lambda s: s.ages / (s.ages + s.minibatch / n) if s.minibatch else np.ones(len(s)))
    )


def decoupled_ppo_loglinear_published(samples: Samples) -> float:
    return decoupled_ppo(_between(samples, lambda s: np.where(s.ages > 0, 1 - 1 / np.maximum(s.ages, 1), 0)))


def sft(samples: Samples) -> float:
    return token_mean(samples, lambda s: -s.theta)


def distillation(samples: Samples) -> float:
    return token_mean(samples, lambda s: -weight(s) * exp(s.theta - s.p) * (s.teacher - s.b))


FORMULAS: dict[str, Callable[[Samples], float]] = {
    "ppo": ppo,
    "grpo": grpo,
    "dr_grpo": dr_grpo,
    "dapo": dapo,
    "rloo": rloo,
    "reinforce": reinforce,
    "reinforce_pp": reinforce_pp,
    "reinforce_pp_baseline": reinforce_pp_baseline,
    "lite_ppo": lite_ppo,
    "gspo": gspo,
    "gspo_token": gspo_token,
    "sapo": sapo,
    "cispo": cispo,
    "m2po": m2po_preset,
    "icepop": icepop,
    "kpop": kpop,
    "dppo": dppo,
    "aipo": aipo,
    "decoupled_ppo": decoupled_ppo,
    "decoupled_ppo_loglinear": decoupled_ppo_loglinear,
    "decoupled_ppo_loglinear_published": decoupled_ppo_loglinear_published,
    "sft": sft,
    "distillation": distillation,
}
