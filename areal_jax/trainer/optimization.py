"""The train state of version 0, the placement of its leaves on a mesh, and the optimiser step.

Policy and critic use the same optax transformation with separate states, so that clipping the gradient of one
never scales the step of the other.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh
from jaxtyping import Array, Bool

from areal_jax.config.sections import AlgorithmConfig
from areal_jax.models.model import Model, Params
from areal_jax.parallel.mesh import param_shardings, replicated
from areal_jax.trainer.critic import Critic
from areal_jax.trainer.state import KLControl, TrainState, kl_coef
from areal_jax.trainer.trainable import Trainable
from areal_jax.trainer.update_metrics import Sums


@dataclass(frozen=True)
class Optimization:
    """Creates the train state of one algorithm over one model, and updates it by optimiser steps."""

    model: Model
    algorithm: AlgorithmConfig
    optimizer: optax.GradientTransformation
    critic: Critic | None
    trainable: Trainable

    holds_reference: bool
    """Whether the state of this mesh's programs contains the reference policy."""

    memory: str
    """Where the optimiser's moments are stored between two steps: device | host."""

    def first(self, params: Params) -> TrainState:
        """Returns the train state of version 0, which contains the arrays of `params`, not copies.

        A reference policy and a critic's trunk, if the algorithm has them, are copies of the leaves that
        training changes (`Trainable` selects these leaves; the others are frozen).
        """
        a, zero = self.algorithm, jnp.zeros((), jnp.int32)
        trained = self.trainable.of(params)
        state = TrainState(zero, zero, params, self.optimizer.init(trained))
        if self.holds_reference:
            state = state.replace(reference=jax.tree.map(jnp.copy, trained))
        if self.critic is not None:
            critic = self.critic.first(params)
            state = state.replace(critic=critic, critic_optimizer=self.optimizer.init(critic))
        if a.has_reference and a.kl.target is not None:
            state = state.replace(kl_control=KLControl.first(a.kl.coef))
        return state

    def abstract(self) -> TrainState:
        """Returns the train state with jax.ShapeDtypeStruct in place of arrays."""
        return jax.eval_shape(self.first, self.model.abstract_params)

    def shardings(self, mesh: Mesh) -> TrainState:
        """Returns a sharding per leaf; with `memory` host, the optimiser's moments are in host memory."""
        abstract = self.abstract()
        kind = "pinned_host" if self.memory == "host" else None

        def of_optimizer(state: Any, params: Any) -> Any:
            return optax.tree_utils.tree_map_params(
                self.optimizer,
                lambda _, sharding: sharding.with_memory_kind(kind) if kind else sharding,
                state,
                params,
                transform_non_params=lambda _: replicated(mesh),
            )

        params = param_shardings(self.model.logical_axes, abstract.params, mesh)
        placed = jax.tree.map(lambda _: replicated(mesh), abstract)
        trained = self.trainable.of(params)
        placed = placed.replace(params=params, optimizer=of_optimizer(abstract.optimizer, trained))
        if self.holds_reference:
            placed = placed.replace(reference=trained)
        if self.critic is not None:
            critic = self.critic.shardings(mesh)
            moments = of_optimizer(abstract.critic_optimizer, critic)
            placed = placed.replace(critic=critic, critic_optimizer=moments)
        return placed

    def apply(
        self,
        state: TrainState,
        sums: tuple[tuple[Params, Params | None], Sums],
        is_last: Bool[Array, ""],
    ) -> tuple[TrainState, Sums]:
        """Returns the state after one optimiser step, and the minibatch's metrics.

        `sums`: the minibatch's gradients of policy and critic (None without a critic), and its metric sums.
        `is_last`: whether this is the batch's last minibatch; the version then increases by 1.
        """
        grads, metrics = sums
        trained, optimizer = self._step(grads[0], state.optimizer, self.trainable.of(state.params))
        new = state.replace(
            step=state.step + 1,
            version=state.version + is_last.astype(jnp.int32),
            params=self.trainable.whole(trained, state.params),
            optimizer=optimizer,
        )
        out = metrics | {"grad_norm": optax.tree.norm(grads[0])}
        if self.critic is not None:
            critic, moments = self._step(grads[1], state.critic_optimizer, state.critic)
            new = new.replace(critic=critic, critic_optimizer=moments)
            out |= {"critic_grad_norm": optax.tree.norm(grads[1])}
        if self.algorithm.has_reference:
            out |= {"kl_coef": jnp.asarray(kl_coef(self.algorithm, state.kl_control), float)}
            new = self._move_reference(new, metrics, is_last)
        return new, out

    def _step(self, grads: Params, optimizer: Any, params: Params) -> tuple[Params, Any]:
        if self.memory == "host":  # the program's output shardings return them to the host
            optimizer = jax.device_put(optimizer, jax.memory.Space.Device)
        updates, optimizer = self.optimizer.update(grads, optimizer, params)
        return optax.apply_updates(params, updates), optimizer

    def _move_reference(self, state: TrainState, metrics: Sums, is_last: Bool[Array, ""]) -> TrainState:
        """Returns the state with the reference's moving average and the adaptive KL coefficient updated.

        Average and coefficient change only at the batch's last minibatch (`is_last`), and only if the
        algorithm has them; before that, the minibatches' KL is only summed.
        """
        a = self.algorithm
        if a.reference == "ema":
            decay = a.reference_decay
            moved = jax.tree.map(
                lambda old, now: jnp.where(is_last, decay * old + (1 - decay) * now, old),
                state.reference,
                self.trainable.of(state.params),
            )
            state = state.replace(reference=moved)
        if state.kl_control is not None and a.kl.target is not None:
            control = state.kl_control.after(
                metrics["kl"], metrics["tokens"], is_last, a.kl.target, a.kl.horizon
            )
            state = state.replace(kl_control=control)
        return state
