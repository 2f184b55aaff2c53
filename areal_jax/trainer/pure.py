"""Preparation and objective as pure functions, for training loops of one's own.

Both can be jitted, and the objective can be differentiated. Neither keeps a state: the caller holds the
parameters, the optimiser's state and the version.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jaxtyping import Array, Float, Int

from areal_jax.config.sections import AlgorithmConfig
from areal_jax.models.model import Model, Params
from areal_jax.models.transformer import Remat
from areal_jax.parallel.mesh import one_device
from areal_jax.trainer.forward import Forward
from areal_jax.trainer.trainable import Trainable
from areal_jax.trainer.update import Objective
from areal_jax.trainer.update_metrics import OF_MINIBATCHES
from areal_jax.types import ArealError, Batch, PreparedBatch

ObjectiveFunction = Callable[[Params, PreparedBatch], tuple[Float[Array, ""], dict[str, Float[Array, ""]]]]


def prepare(
    model: Model,
    algorithm: AlgorithmConfig,
    *,
    max_tokens: int | None = None,
    mesh: Mesh | None = None,
    logp_chunk: int = 1024,
) -> Callable[..., PreparedBatch]:
    """Returns a pure function `(params, batch, version=0, reference=None) -> PreparedBatch`.

    It computes the log-probs under `params` (the policy before the batch's first update) and `reference` that
    the algorithm needs, then ages, advantages and weights. `batch` is a result of `pack`. `version` is that
    of `params`; ages are relative to it. `reference` holds the reference policy's parameters. `max_tokens`,
    `mesh` and `logp_chunk` are those of `Learner`.

    Raises ArealError for an algorithm with a critic, a teacher or an adaptive coefficient of the KL, and in a
    call without the reference policy that the algorithm has.
    """
    _refuse_state(algorithm)

    def prepared(
        params: Params, batch: Batch, version: Int[Array, ""] | int = 0, reference: Params | None = None
    ) -> PreparedBatch:
        of = _objective(model, algorithm, mesh, logp_chunk, max_tokens or batch.tokens.shape[1])
        batch = jax.tree.map(jnp.asarray, batch)
        scores = of.arrive(params, None, batch) if of.on_arrival else {}
        if algorithm.has_reference:
            if reference is None:
                raise ArealError(
                    f"algorithm.kl.coef={algorithm.kl.coef} measures the KL to a reference policy, and the "
                    "call has none; pass reference=PARAMS, or set algorithm.kl.coef to 0"
                )
            scores["ref_logp"] = of.forward.logp(reference, batch)
        return of.finish(batch, jnp.asarray(version, jnp.int32), None, scores)

    return prepared


def objective(
    model: Model,
    algorithm: AlgorithmConfig,
    *,
    mesh: Mesh | None = None,
    logp_chunk: int = 1024,
    remat: Remat = "layer",
) -> ObjectiveFunction:
    """Returns a pure function `(params, prepared) -> (loss, metrics)`, whose loss `Learner.update` minimises.

    `prepared` is a minibatch from `prepare`, or some of its rows with all arrays per sequence: losses and
    gradients of parts that make up a minibatch add up to the minibatch's. `metrics` are float32 scalars:
    `tokens`, the number of loss tokens, and means over these. `mesh`, `logp_chunk` and `remat` are those of
    `Learner`.

    Raises ArealError for an algorithm with a critic, a teacher or an adaptive coefficient of the KL.
    """
    _refuse_state(algorithm)
    of = _objective(model, algorithm, mesh, logp_chunk, max_tokens=1, remat=remat)  # only `finish` reads it

    def loss(params: Params, prepared: PreparedBatch) -> tuple[Array, dict[str, Array]]:
        stats, _ = of.outputs(params, None, prepared)
        total, sums = of.loss(stats, None, prepared)
        of_tokens = {
            name: x for name, x in sums.items() if isinstance(x, Array) and name not in OF_MINIBATCHES
        }
        tokens = of_tokens.pop("tokens")
        return total, {"tokens": tokens} | {name: x / jnp.maximum(tokens, 1) for name, x in of_tokens.items()}

    return loss


def _objective(
    model: Model,
    algorithm: AlgorithmConfig,
    mesh: Mesh | None,
    logp_chunk: int,
    max_tokens: int,
    remat: Remat = "layer",
) -> Objective:
    forward = partial(Forward, mesh=mesh or one_device(), chunk=logp_chunk, remat=remat)
    return Objective.of(forward, model, algorithm, float(max_tokens), None, Trainable())


def _refuse_state(algorithm: AlgorithmConfig) -> None:
    """Raises ArealError if the algorithm needs more than parameters and a batch."""
    needs = {
        f"critic.kind={algorithm.critic.kind}": algorithm.critic.kind != "none",
        f"teacher={algorithm.teacher}": algorithm.teacher is not None,
        f"kl.target={algorithm.kl.target}": algorithm.kl.target is not None,
    }
    for setting, is_needed in needs.items():
        if is_needed:
            raise ArealError(
                f"algorithm.{setting} needs more state than the policy's parameters, and a pure function "
                "keeps none; train with areal_jax.Learner, or leave the setting out"
            )
