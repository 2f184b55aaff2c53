"""Forward and backward passes over the prefix tree of a batch: each distinct prefix is computed once.

The functions take the steps of planned walks (`trajectories.walk`). A push computes tokens without gradients,
and keeps what later tokens read of them while they are on the path: KV, hidden states, statistics. A pop
computes the path's last tokens again, with gradients: those of the losses of the sequences that end here, and
those with respect to what deeper tokens have read, which `Slopes` holds. It then adds the gradients with
respect to what these tokens read themselves to `Slopes`, and those with respect to the parameters to the
gradient's sums. Only one path of each walk is in memory, never the tree. AReaL-DTA's method; here every sum
over branches is float32. Shapes: B sequences of at most T tokens, one a row; W walks; P places of a path; n
tokens of a step; D width.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jaxtyping import Array, Bool, Float, Int

from areal_jax.algorithms.logprobs import PackedTokens, TokenStats
from areal_jax.algorithms.shapes import map_batch
from areal_jax.models.attention import BLOCK, CPU_BLOCK
from areal_jax.models.model import Model, Params
from areal_jax.models.prefix_attention import KVStack, PrefixAttention, taken, written
from areal_jax.parallel.mesh import platform_of
from areal_jax.trainer.forward import Forward
from areal_jax.trainer.state import KLControl, TrainState
from areal_jax.trainer.update import Objective
from areal_jax.trainer.update_metrics import add_metrics
from areal_jax.trajectories.walk import Blocks
from areal_jax.types import Batch


class Sequences(NamedTuple):
    """A batch with one sequence per row, and which log-probs its tree needs."""

    batch: Batch
    is_asked: Bool[Array, "B T"]
    """Whether a sequence with this prefix trains the token."""
    temperature: Float[Array, "B T"]
    """Temperature at which the tokens that are asked for were sampled."""
    order: Int[Array, " B"]
    """The sequences by leaf, as the walk gives them."""


class Path(NamedTuple):
    """What later tokens read of the tokens on each walk's path; places beyond the path may hold anything."""

    kv: KVStack
    critic_kv: KVStack | None
    """Of a separate critic."""
    hidden: Float[Array, "W P D"]
    """The policy's hidden states, from which the next token's log-prob is computed."""
    stats: TokenStats
    """Statistics of the tokens, (W, P) each."""
    values: Float[Array, "W P"] | None
    """The critic's value of the state after each token."""


class Slopes(NamedTuple):
    """Gradients of the loss with respect to the arrays of a `Path`, also float32 if these are bfloat16.

    They are 0 at places beyond the path.
    """

    kv: KVStack
    critic_kv: KVStack | None
    hidden: Float[Array, "W P D"]
    logp: Float[Array, "W P"]
    entropy: Float[Array, "W P"]
    values: Float[Array, "W P"] | None


class Gradients(NamedTuple):
    """What the pops of an update have summed so far."""

    sums: Any
    """Gradients of policy and critic, and metric sums (`learner_programs.GradientSums`)."""
    slopes: Slopes


class Read(NamedTuple):
    """What the tokens of a step read of their path."""

    hidden: Float[Array, "W D"]
    """Hidden state of the token before them."""
    stacks: tuple[KVStack | None, KVStack | None]
    """KV of policy and separate critic, as `PrefixAttention` has them: None if no gradient is computed."""


class Step(NamedTuple):
    """One step of W walks, each an int32 array (W,); see `trajectories.walk.Walk.rows`."""

    sequence: Int[Array, " W"]
    start: Int[Array, " W"]
    length: Int[Array, " W"]
    first: Int[Array, " W"]
    count: Int[Array, " W"]


class Outputs(NamedTuple):
    """The model's outputs for n tokens of each walk."""

    hidden: Float[Array, "W n D"]
    stats: TokenStats
    values: Float[Array, "W n"] | None


class TreePasses:
    """The pure functions of a tree update, for `walks` walks over sequences of at most `length` tokens."""

    def __init__(self, objective: Objective, mesh: Mesh, walks: int, length: int, blocks: Blocks) -> None:
        self._objective, self._mesh = objective, mesh
        self._walks, self._length, self._blocks = walks, length, blocks
        widest = CPU_BLOCK if platform_of(mesh) == "cpu" else BLOCK
        # Attention reads the stack in blocks; the tokens of a walk that waits go behind the longest path.
        multiple = math.lcm(*(min(widest, size) for size in blocks.buckets))
        self.places = -(-(length + blocks.most) // multiple) * multiple

    # --- state ----------------------------------------------------------------------------------------------

    def empty_path(self) -> Path:
        model, critic = self._objective.forward.model, self._objective.critic
        zeros = jnp.zeros((self._walks, self.places), model.config.accumulate)
        return Path(
            self._stack(model),
            None if critic is None or critic.trunk is None else self._stack(critic.trunk),
            jnp.zeros((*zeros.shape, model.config.width), zeros.dtype),
            TokenStats(zeros, zeros, zeros),
            None if critic is None else zeros,
        )

    def no_slopes(self) -> Slopes:
        path, dtype = self.empty_path(), self._objective.forward.model.config.accumulate
        read = path.kv, path.critic_kv, path.hidden, path.stats.logp, path.stats.entropy, path.values
        return Slopes(*jax.tree.map(lambda x: jnp.zeros(x.shape, dtype), read))

    def _stack(self, model: Model) -> KVStack:
        return KVStack.zeros(model.config, self._walks, self.places)

    # --- a step ---------------------------------------------------------------------------------------------

    def push(
        self, size: int, params: Params, critic: Params | None, path: Path, sequences: Sequences, step: Step
    ) -> Path:
        """Returns the path with each walk's next tokens behind it, computed without gradients.

        `size`: tokens of the call.
        """
        read, caches = Read(_last_hidden(path, step), (None, None)), (path.kv, path.critic_kv)
        out, (kv, critic_kv) = self._outputs(size, (params, critic), read, caches, sequences, step)
        return self._extended(size, path, out, step)._replace(kv=kv, critic_kv=critic_kv)

    def pop(
        self,
        size: int,
        state: TrainState,
        gradients: Gradients,
        path: Path,
        sequences: Sequences,
        step: Step,
    ) -> Gradients:
        """Returns the gradients after the last tokens of each walk's path were popped."""
        trainable, (sums, slopes) = self._objective.trainable, gradients

        def outputs(trained: Any, hidden: Array, ports: Any) -> tuple[Outputs, Any]:
            models = trainable.whole(trained[0], state.params), trained[1]
            read = Read(hidden, (path.kv, path.critic_kv))
            return self._outputs(size, models, read, ports, sequences, step)

        trained = trainable.of(state.params), state.critic
        ports = slopes.kv, slopes.critic_kv
        (out, _), pull = jax.vjp(outputs, trained, _last_hidden(path, step), ports)
        path = self._extended(size, path, out, step)
        slopes, metrics = self._with_losses(slopes, path, sequences, step, state.kl_control)
        of_out, slopes = self._taken(size, slopes, step)
        grads, of_hidden, (kv, critic_kv) = pull((of_out, ports))
        hidden = _added_behind(slopes.hidden, of_hidden, step)
        sums = jax.tree.map(jnp.add, sums[0], grads), add_metrics(sums[1], metrics)
        return Gradients(sums, slopes._replace(kv=kv, critic_kv=critic_kv, hidden=hidden))

    def collect(
        self, scores: dict[str, Array], path: Path, sequences: Sequences, step: Step
    ) -> dict[str, Array]:
        """Returns `scores`, (B, T) each, with those of the sequences that end in the leaves of `step`.

        The names are those of `Objective.arrive`, and logp for any log-probs.
        """
        found = {"proximal_logp": path.stats.logp, "logp": path.stats.logp, "values_after": path.values}

        def add(place: Array, scores: dict[str, Array]) -> dict[str, Array]:
            row = _ending(place, step, sequences.order, fill=len(sequences.order))
            return {
                name: x.at[row].set(found[name][:, : self._length], mode="drop") for name, x in scores.items()
            }

        return jax.lax.fori_loop(0, step.count.max(), add, scores)

    # --- parts of a step ------------------------------------------------------------------------------------

    def _outputs(
        self,
        size: int,
        models: tuple[Params, Params | None],
        read: Read,
        caches: tuple[KVStack, KVStack | None],
        sequences: Sequences,
        step: Step,
    ) -> tuple[Outputs, Any]:
        """Returns the model's outputs for `size` tokens of each walk, and the attention's caches after them.

        `models`: parameters of policy and critic. `caches`: those of policy and separate critic, as in
        `PrefixAttention`.
        """
        objective, forward, (params, critic) = self._objective, self._objective.forward, models
        positions = step.start[:, None] + jnp.arange(size)
        at = step.sequence[:, None], jnp.minimum(positions, self._length - 1)
        tokens, batch = sequences.batch.tokens[at], sequences.batch
        places = self._places(size, step)

        def attended(forward: Forward, params: Params, of: int) -> tuple[Array, Any]:
            attend = PrefixAttention(_path_tokens(step), places, read.stacks[of], self._mesh)
            return forward.attended(params, tokens, positions, attend, caches[of])

        hidden, cache = attended(forward, params, 0)
        # Column 0 is the token before, whose hidden state the first token's log-prob is computed from.
        front = partial(jnp.pad, pad_width=((0, 0), (1, 0)))
        is_live = jnp.arange(size) < step.length[:, None]
        previous = jnp.broadcast_to(jnp.arange(size + 1) - 1, (len(tokens), size + 1))
        asked = PackedTokens(
            tokens=front(tokens),
            previous=previous.at[:, 1].set(jnp.where(step.start > 0, 0, -1)),
            mask=front(sequences.is_asked[at] & is_live),
            temperature=front(sequences.temperature[at], constant_values=1.0),
            support=None if batch.support is None else jnp.pad(batch.support[at], ((0, 0), (1, 0), (0, 0))),
        )
        stats = forward.stats(params, jnp.concatenate([read.hidden[:, None], hidden], axis=1), asked)
        stats = TokenStats(*(x[:, 1:] for x in stats))
        if critic is None or objective.critic is None:
            return Outputs(hidden, stats, None), (cache, None)
        critic_cache = None

        def of_trunk(forward: Forward, params: Params) -> Array:
            nonlocal critic_cache
            hidden, critic_cache = attended(forward, params, 1)
            return hidden

        values = objective.critic.values(critic, params, forward, hidden, of_trunk)
        return Outputs(hidden, stats, values), (cache, critic_cache)

    def _extended(self, size: int, path: Path, out: Outputs, step: Step) -> Path:
        """Returns the path, its KV unchanged, with the outputs for each walk's tokens in their places."""
        put = partial(written, places=self._places(size, step))
        return path._replace(
            hidden=put(path.hidden, out.hidden),
            stats=TokenStats(*map(put, path.stats, out.stats)),
            values=None if path.values is None or out.values is None else put(path.values, out.values),
        )

    def _with_losses(
        self, slopes: Slopes, path: Path, sequences: Sequences, step: Step, control: KLControl | None
    ) -> tuple[Slopes, Any]:
        """Returns the slopes with those of the losses of the sequences that end here; and metric sums."""
        length = self._length
        of_path = partial(jax.tree.map, lambda x: x[:, :length])

        def add(place: Array, carry: tuple[Any, Any]) -> tuple[Any, Any]:
            row = _ending(place, step, sequences.order, fill=0)
            is_live = (place < step.count)[:, None]
            micro = map_batch(lambda x: x[row], lambda x: x, sequences.batch)
            micro = micro._replace(
                loss_mask=micro.loss_mask & is_live, segment_ids=jnp.where(is_live, micro.segment_ids, 0)
            )

            def loss(stats: TokenStats, values: Array | None) -> tuple[Array, Any]:
                return self._objective.loss(stats, values, micro, control)

            gradient = jax.grad(loss, argnums=(0, 1), has_aux=True)
            (stats, values), metrics = gradient(*of_path((path.stats, path.values)))
            new = stats.logp, stats.entropy, values
            return jax.tree.map(jnp.add, carry[0], new), add_metrics(carry[1], metrics)

        of = slopes.logp, slopes.entropy, slopes.values
        start = of_path(of), self._objective.no_metrics(self._walks, length)
        new, metrics = jax.lax.fori_loop(0, step.count.max(), add, start)
        logp, entropy, values = jax.tree.map(lambda x, part: x.at[:, :length].set(part), of, new)
        return slopes._replace(logp=logp, entropy=entropy, values=values), metrics

    def _taken(self, size: int, slopes: Slopes, step: Step) -> tuple[Outputs, Slopes]:
        """Returns the gradients with respect to each walk's outputs, and the slopes without them."""
        places = self._places(size, step)

        def apart(x: Array) -> tuple[Array, Array]:
            own = taken(x, places, size)
            return own, written(x, jnp.zeros_like(own), places)

        logp, entropy, hidden = map(apart, (slopes.logp, slopes.entropy, slopes.hidden))
        values = (None, None) if slopes.values is None else apart(slopes.values)
        of_stats = TokenStats(logp[0], entropy[0], jnp.zeros_like(logp[0]))
        rest = slopes._replace(logp=logp[1], entropy=entropy[1], hidden=hidden[1], values=values[1])
        return Outputs(hidden[0], of_stats, values[0]), rest

    def _places(self, size: int, step: Step) -> Int[Array, " W"]:
        """Returns where in the path each walk's tokens go; a walk that waits writes where nothing reads."""
        return jnp.where(step.length > 0, step.start, self.places - size)


def _ending(place: Array, step: Step, order: Array, fill: int) -> Int[Array, " W"]:
    """Returns the sequence number `place` of those that end in each walk's leaf; `fill` if there is none."""
    at = jnp.minimum(step.first + place, len(order) - 1)
    return jnp.where(place < step.count, order[at], fill)


def _path_tokens(step: Step) -> Int[Array, " W"]:
    """Returns the number of tokens before those of `step`; 0 for a walk that waits."""
    return jnp.where(step.length > 0, step.start, 0)


def _last_hidden(path: Path, step: Step) -> Float[Array, "W D"]:
    """Returns the hidden state of the token before each walk's tokens; undefined if there is none."""
    at = jnp.maximum(step.start - 1, 0)
    return jnp.take_along_axis(path.hidden, at[:, None, None], axis=1)[:, 0]


def _added_behind(slopes: Float[Array, "W P D"], new: Float[Array, "W D"], step: Step) -> Array:
    """Returns the slopes with `new` added at the token before each walk's tokens, if there is one."""
    new = jnp.where((_path_tokens(step) > 0)[:, None], new, 0.0)
    return slopes.at[jnp.arange(len(new)), jnp.maximum(step.start - 1, 0)].add(new)
