"""The critic: a transformer of its own, or a head on the policy's trunk.

Its parameters are `TrainState.critic`, beside the policy's, with an optimiser state of their own: {"head"},
and {"trunk"} where it has one. Both begin as functions of the policy's first parameters: the trunk is their
copy, the head is 0, so every value is 0 until the first update. Where only some of the policy's leaves are
trained, the trunk holds those alone and reads the others where the policy does.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from functools import cached_property

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Array, Float, Int

from areal_jax.algorithms.masked import keep, per_sequence
from areal_jax.models.model import Model, Params
from areal_jax.parallel.mesh import param_shardings
from areal_jax.trainer.trainable import ALL, Trainable


@dataclass(frozen=True)
class Critic:
    policy: Model
    kind: str  # separate | shared
    trainable: Trainable = ALL

    @cached_property
    def trunk(self) -> Model | None:
        """The policy's model without its LM head; None where the policy's own trunk is used."""
        if self.kind == "shared":
            return None
        sizes = dataclasses.replace(self.policy.config, is_tied=True, params_dtype="float32")
        return Model(sizes, self.policy.tokenizer)

    @property
    def parameter_count(self) -> int:
        """Trained ones: what the critic adds to the policy."""
        head = self.policy.config.width + 1
        return head + (0 if self.trunk is None else self.trainable.count(self.trunk))

    def first(self, params: Params) -> Params:
        """The critic of version 0, in buffers of its own."""
        critic = {"head": self._first_head()}
        if self.trunk is None:
            return critic
        return critic | {"trunk": jax.tree.map(jnp.copy, self.trainable.of(self._of_trunk(params)))}

    def shardings(self, mesh: Mesh) -> Params:
        """One for every leaf."""
        axes = {"weight": PartitionSpec("embed"), "bias": PartitionSpec()}
        placed = {"head": param_shardings(axes, jax.eval_shape(self._first_head), mesh)}
        if self.trunk is None:
            return placed
        trunk = param_shardings(self.trunk.logical_axes, self.trunk.abstract_params, mesh)
        return placed | {"trunk": self.trainable.of(trunk)}

    def trunk_params(self, critic: Params, params: Params) -> Params:
        """The trunk's parameters, those that are not trained from the policy's."""
        return self.trainable.whole(critic["trunk"], self._of_trunk(params))

    def _of_trunk(self, params: Params) -> Params:
        assert self.trunk is not None
        return {name: params[name] for name in self.trunk.abstract_params}

    def _first_head(self) -> Params:
        return {"weight": jnp.zeros(self.policy.config.width), "bias": jnp.zeros(())}

    def values(self, critic: Params, hidden: Float[Array, "B T D"]) -> Float[Array, "B T"]:
        """The value of the state after each token, float32, from the hidden states of the trunk."""
        return hidden @ critic["head"]["weight"] + critic["head"]["bias"]


def before(after: Float[Array, "B T"], previous: Int[Array, "B T"]) -> Float[Array, "B T"]:
    """The value of the state before each token: that after its predecessor; 0 where it has none."""
    values = jnp.take_along_axis(after, jnp.maximum(previous, 0), axis=1)
    return jnp.where(previous >= 0, values, 0.0)


def at_end(after: Float[Array, "B T"], segment_ids: Int[Array, "B T"], sequences: int) -> Float[Array, " S"]:
    """The value of the state after each sequence's last token."""
    is_end = jnp.concatenate(
        [segment_ids[:, 1:] != segment_ids[:, :-1], jnp.ones_like(segment_ids[:, :1], bool)], axis=1
    )
    return per_sequence(keep(after, is_end), segment_ids, sequences)
