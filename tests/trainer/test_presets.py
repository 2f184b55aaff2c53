"""Every preset, through the framework's own prepare and objective, against its formula in numpy; no model."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from areal_jax.algorithms import masked
from areal_jax.algorithms.functions import Functions
from areal_jax.algorithms.logprobs import TokenStats
from areal_jax.algorithms.reduction import reduction_weights
from areal_jax.config.presets import PRESETS, preset_settings
from areal_jax.config.sections import AlgorithmConfig
from areal_jax.trainer.trainable import Trainable
from areal_jax.trainer.update import Objective
from areal_jax.types import Batch, PreparedBatch
from tests.algorithms.batches import prepared
from tests.algorithms.preset_formulas import FORMULAS, MAX_TOKENS, Sample
from tests.algorithms.sequences import places, wide

ROWS = ((5, 4), (3, 6), (9,), (2, 2, 4), (4, 4)) * 2
REDUCTIONS = ("token_mean", "token_mean_batch", "sequence_mean", "sequence_sum", "constant")


def algorithm_of(name: str, **settings: Any) -> AlgorithmConfig:
    teacher = {"teacher": "tiny"} if name == "distillation" else {}
    return AlgorithmConfig.model_validate(preset_settings({"preset": name, **teacher, **settings}))


def objective_of(a: AlgorithmConfig) -> Objective:
    critic = cast(Any, None if a.critic.kind == "none" else object())  # its values are given
    return Objective(
        forward=cast(Any, None),
        algorithm=a,
        functions=Functions.of(a),
        critic=critic,
        max_tokens=float(MAX_TOKENS),
        trainable=Trainable(),
    )


def packed(seed: int, rows: Any) -> tuple[np.ndarray, PreparedBatch, np.ndarray]:
    """Current log-probs, a batch, and the critic's values after each token; some samples are truncated."""
    now, batch = prepared(seed, rows=rows)
    rng = np.random.default_rng(seed)
    truncated = rng.random(len(batch.reward)) < 0.4
    return now.logp, batch._replace(truncated=truncated), rng.normal(size=batch.tokens.shape)


def prepare(of: Objective, theta: np.ndarray, batch: PreparedBatch, after: np.ndarray) -> PreparedBatch:
    """`finish` of the scores that this algorithm has; version 3, so ages are 1 to 3."""
    a = of.algorithm
    scores = {
        "proximal_logp": batch.proximal_logp if a.proximal_form == "recompute" else None,
        "ref_logp": batch.ref_logp if a.has_reference else None,
        "teacher_logp": batch.teacher_logp if a.teacher else None,
        "values_after": after.astype(theta.dtype) if of.critic else None,
    }
    packed = Batch(*(None if x is None else jnp.asarray(x) for x in batch[: len(Batch._fields)]))
    kept = {name: jnp.asarray(x) for name, x in scores.items() if x is not None}
    return of.finish(packed, 3, None, kept)  # type: ignore[arg-type]


def minimised(of: Objective, theta: jax.Array, micro: PreparedBatch) -> jax.Array:
    """What `Objective.loss` minimises, given the log-probs instead of a model."""
    zero = jnp.zeros_like(theta)
    value = None if micro.values is None else micro.values
    terms, _ = of._terms(TokenStats(theta, zero, zero), value, micro, None)
    return masked.total(micro.loss_weights * terms, micro.loss_mask)


def samples_of(of: Objective, theta: np.ndarray, batch: PreparedBatch, after: np.ndarray) -> list[Sample]:
    """The batch taken apart, as the formulas want it."""
    a, out = of.algorithm, []
    rows = len(batch.tokens) // a.minibatches
    for segment, at in enumerate(places(batch), start=1):
        row, columns = at[0][0], at[1]
        end = np.nonzero(batch.segment_ids[row] == segment)[0][-1]
        wide_at = {name: np.asarray(getattr(batch, f"{name}_logp"), float)[at] for name in ("ref", "teacher")}
        center = {"recompute": batch.proximal_logp, "none": batch.behavior_logp}.get(a.proximal_form, theta)
        out.append(
            Sample(
                reward=float(batch.reward[segment - 1]),
                group=int(batch.group_ids[segment - 1]),
                minibatch=int(row // rows),
                theta=theta[at],
                held=theta[at],
                p=np.asarray(center, float)[at],
                b=np.asarray(batch.behavior_logp, float)[at],
                values=after[row, batch.previous[row, columns]],
                bootstrap=float(after[row, end]) if batch.truncated[segment - 1] else 0.0,
                ages=3 - batch.versions[at],
                **wide_at,
            )
        )
    return out


def test_every_preset_has_a_formula():
    assert FORMULAS.keys() == PRESETS.keys()


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_is_its_formula(name: str):
    """Value and gradient, two prompts of every length a minibatch; float64 to 1e-9, float32 to 1e-5."""
    rows = ROWS[:4] * 2
    theta, batch, after = packed(len(name), rows)
    of = objective_of(algorithm_of(name))
    with jax.enable_x64(True):
        exact = theta.astype(np.float64)
        batch64 = wide(batch)
        ready = prepare(of, exact, batch64, after)
        value, slope = jax.value_and_grad(functools.partial(minimised, of))(jnp.asarray(exact), ready)
    samples = samples_of(of, exact, batch, after)
    want = FORMULAS[name](samples)
    assert float(value) == pytest.approx(want, rel=1e-9, abs=1e-9)

    rng = np.random.default_rng(0)
    for _ in range(3):
        direction = np.where(batch.loss_mask, rng.normal(size=theta.shape), 0)

        def along(step: float, direction: np.ndarray = direction) -> float:
            for s, at in zip(samples, places(batch), strict=True):
                s.theta = s.held + step * direction[at]
            return FORMULAS[name](samples)

        quotient = (along(1e-6) - along(-1e-6)) / 2e-6
        assert float((np.asarray(slope) * direction).sum()) == pytest.approx(quotient, rel=1e-6, abs=1e-7)
    assert np.abs(slope).max() > 0

    single = prepare(of, theta, batch, after.astype(np.float32))
    assert float(minimised(of, jnp.asarray(theta), single)) == pytest.approx(want, rel=1e-5, abs=1e-5)


# --- micro-batches ------------------------------------------------------------------------------------------

Gradient = Callable[[jax.Array, PreparedBatch], jax.Array]
_compiled: dict[str, Gradient] = {}


def gradient_of(of: Objective) -> Gradient:
    """Jitted once for presets that differ in advantages and reductions alone."""
    a = of.algorithm
    pieces = (a.loss, a.loss_settings, a.off_policy, a.off_policy_settings, a.proximal_form, a.kl, a.critic)
    if a.off_policy == "m2po":  # fixed in prepare
        pieces = (a.loss, a.loss_settings, "fixed")
    return _compiled.setdefault(repr(pieces), jax.jit(jax.grad(functools.partial(minimised, of))))


@pytest.mark.slow
@pytest.mark.parametrize("name", PRESETS)
def test_micro_batches_and_reductions_change_no_gradient(name: str):
    """Each reduction, in 1, 2 and 5 micro-batches of one minibatch, and one sequence at a time, as over a
    prefix tree: the gradients are equal, and not zero.
    """
    theta, batch, after = packed(3, ROWS)
    of = objective_of(algorithm_of(name, minibatches=1))
    ready, gradient = prepare(of, theta, batch, after.astype(np.float32)), gradient_of(of)
    seen = []
    for reduction in REDUCTIONS:
        weights = reduction_weights(
            ready.loss_mask, ready.segment_ids, len(batch.reward), 1, reduction, float(MAX_TOKENS)
        )
        whole, *split = (
            in_parts(gradient, theta, ready._replace(loss_weights=weights), parts) for parts in (1, 2, 5)
        )
        for other in (*split, by_sequence(gradient, theta, ready._replace(loss_weights=weights))):
            np.testing.assert_allclose(other, whole, rtol=1e-5, atol=1e-8)
        assert np.abs(whole).max() > 0
        seen.append(whole.tobytes())
    assert len(set(seen)) >= 4  # token_mean and token_mean_batch are one with one minibatch


def by_sequence(gradient: Gradient, theta: np.ndarray, batch: PreparedBatch) -> np.ndarray:
    """The sum over sequences of the gradient by every log-prob, each with all others masked."""
    total = np.zeros_like(theta)
    for segment in range(1, len(batch.reward) + 1):
        is_own = batch.segment_ids == segment
        own = batch._replace(
            loss_mask=batch.loss_mask & is_own, segment_ids=jnp.where(is_own, batch.segment_ids, 0)
        )
        total += gradient(jnp.asarray(theta), own)
    return total


def in_parts(gradient: Gradient, theta: np.ndarray, batch: PreparedBatch, parts: int) -> np.ndarray:
    """The gradient by every log-prob, `parts` runs of rows one after another."""
    rows = len(theta) // parts
    is_token = [x is not None and x.shape == batch.tokens.shape for x in batch]

    def micro(start: int) -> PreparedBatch:
        return PreparedBatch(
            *(x[start : start + rows] if y else x for x, y in zip(batch, is_token, strict=True))
        )

    starts = range(0, len(theta), rows)
    return np.concatenate([gradient(jnp.asarray(theta[i : i + rows]), micro(i)) for i in starts])
