"""The critic, which estimates values: a separate transformer, or a head on the policy's hidden states.

The critic's parameters, `TrainState.critic`, are {"head"}, and for a separate transformer also {"trunk"};
they have an optimiser state of their own. At version 0 the trunk is a copy of the policy's transformer, and
the head is 0, so every value is 0 until the first update. If only some of the policy's leaves are trained,
"trunk" contains only these leaves; the frozen leaves are read from the policy.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import chex
import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Array, Bool, Float, Int

from areal_jax.algorithms.masked import is_segment_end, keep, per_sequence
from areal_jax.models.model import Model, Params
from areal_jax.parallel.mesh import param_shardings
from areal_jax.trainer.forward import Forward
from areal_jax.trainer.trainable import Trainable


@dataclass(frozen=True)
class Critic:
    """The critic of one policy: pure functions of the critic's parameters, which the train state holds."""

    policy: Model
    kind: str  # separate | shared
    trainable: Trainable

    @cached_property
    def trunk(self) -> Model | None:
        """The separate critic's transformer, without an LM head; None for a head on the policy's states."""
        if self.kind == "shared":
            return None
        # A tied model has no parameters for an LM head; critics are never published, so never rounded.
        sizes = dataclasses.replace(self.policy.config, is_tied=True, params_dtype="float32")
        return Model(sizes, self.policy.tokenizer)

    @property
    def parameter_count(self) -> int:
        """Number of the critic's own trained parameters, the policy's not included."""
        head = self.policy.config.width + 1
        return head + (0 if self.trunk is None else self.trainable.count(self.trunk))

    def first(self, params: Params) -> Params:
        """Returns the critic's parameters at version 0; the trunk is copied from the policy's `params`."""
        critic = {"head": self._first_head()}
        if self.trunk is None:
            return critic
        return critic | {"trunk": jax.tree.map(jnp.copy, self.trainable.of(self._of_trunk(params)))}

    def shardings(self, mesh: Mesh) -> Params:
        """Returns a sharding for every leaf of the critic's parameters."""
        axes = {"weight": PartitionSpec("embed"), "bias": PartitionSpec()}
        placed = {"head": param_shardings(axes, jax.eval_shape(self._first_head), mesh)}
        if self.trunk is None:
            return placed
        trunk = param_shardings(self.trunk.logical_axes, self.trunk.abstract_params, mesh)
        return placed | {"trunk": self.trainable.of(trunk)}

    def _of_trunk(self, params: Params) -> Params:
        assert self.trunk is not None
        return {name: params[name] for name in self.trunk.abstract_params}

    def _first_head(self) -> Params:
        c = self.policy.config
        return {"weight": jnp.zeros(c.width, c.accumulate), "bias": jnp.zeros((), c.accumulate)}

    def values(
        self,
        critic: Params,
        params: Params,
        forward: Forward,
        hidden: Float[Array, "B T D"],
        of_trunk: Callable[[Forward, Params], Float[Array, "B T D"]],
    ) -> Float[Array, "B T"]:
        """Returns the value of the state after each token.

        `params`, `forward` and `hidden` are the policy's parameters, forward pass and hidden states.
        `of_trunk(forward, params)` computes the hidden states of a separate critic.
        """
        if self.trunk is not None:
            # With the policy's attention kernel: its self-test, which cannot run here, is not repeated for a
            # model of equal sizes.
            remat = forward.execution.remat
            trunk = Forward(self.trunk, forward.mesh, chunk=forward.chunk, remat=remat)
            # Leaves of the trunk that are not trained are the policy's.
            hidden = of_trunk(trunk, self.trainable.whole(critic["trunk"], self._of_trunk(params)))
        return hidden @ critic["head"]["weight"] + critic["head"]["bias"]


def before(after: Float[Array, "B T"], previous: Int[Array, "B T"]) -> Float[Array, "B T"]:
    """Returns the value of the state before each token, which is the value after the token's predecessor.

    `after`: the value after each token. `previous`: the column of each token's predecessor in its sample; -1
    for a sample's first token, where the result is 0.
    """
    chex.assert_equal_shape([after, previous])
    values = jnp.take_along_axis(after, jnp.maximum(previous, 0), axis=1)
    return jnp.where(previous >= 0, values, 0.0)


def at_end(after: Float[Array, "B T"], segment_ids: Int[Array, "B T"], sequences: int) -> Float[Array, " S"]:
    """Returns the value after each sequence's last token; `after` has the values after all tokens."""
    chex.assert_equal_shape([after, segment_ids])
    return per_sequence(keep(after, is_segment_end(segment_ids)), segment_ids, sequences)


def value_loss(
    value: Float[Array, "B T"],
    arrived: Float[Array, "B T"],
    returns: Float[Array, "B T"],
    clip: float | None,
) -> tuple[Float[Array, "B T"], Bool[Array, "B T"]]:
    """Returns max((V - R)^2, (V_a + clamp(V - V_a, +-clip) - R)^2) / 2, and whether the second is larger.

    V is the critic's `value`, R the return, V_a (`arrived`) the value before the batch's first update: moving
    V further than `clip` from V_a does not lower the loss. If `clip` is None, the loss is (V - R)^2 / 2.
    PPO's clipped value loss (Schulman et al., arXiv:1707.06347; openai/baselines).
    """
    chex.assert_equal_shape([value, arrived, returns])
    chex.assert_type([value, arrived, returns], float)
    plain = 0.5 * (value - returns) ** 2
    if clip is None:
        return plain, jnp.zeros_like(plain, bool)
    clipped = 0.5 * (arrived + jnp.clip(value - arrived, -clip, clip) - returns) ** 2
    return jnp.maximum(plain, clipped), clipped > plain
