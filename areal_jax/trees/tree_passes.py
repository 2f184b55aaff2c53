"""Forward and backward passes over the prefix tree of a batch: each distinct prefix is computed once.

The functions take the steps of planned walks (`trajectories.walk`). A push computes tokens without gradients,
and keeps what later tokens read of them while they are on the path: KV, hidden states, statistics. A pop
computes the path's last tokens again, with gradients: those of the losses of the sequences that end here, and
those with respect to what deeper tokens have read, which `Slopes` holds. It then adds the gradients with
respect to what these tokens read themselves to `Slopes`, and those with respect to the parameters to the
gradient's sums. Only one path of each walk is in memory, never the tree. AReaL-DTA's method; here every sum
over branches is float32. Shapes: B sequences of at most T tokens, one a row, of which E end in a walk; W
walks; P places of a path; n tokens of a step; D width.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jaxtyping import Array, Float, Int

from areal_jax.algorithms.logprobs import PackedTokens, TokenStats
from areal_jax.algorithms.shapes import map_batch
from areal_jax.models.attention import BLOCK, CPU_BLOCK
from areal_jax.models.model import Model, Params
from areal_jax.parallel.mesh import platform_of
from areal_jax.trainer.forward import Forward
from areal_jax.trainer.state import KLControl, TrainState
from areal_jax.trainer.update import Objective
from areal_jax.trainer.update_metrics import add_metrics
from areal_jax.trajectories.leaf_order import Blocks
from areal_jax.trees.prefix_attention import KVStack, PrefixAttention, taken, written
from areal_jax.trees.tree_arrays import Ending, Gradients, Outputs, Path, Read, Sequences, Slopes, WalkStep
from areal_jax.types import PreparedBatch


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
        self,
        params: Params,
        critic: Params | None,
        path: Path,
        scores: dict[str, Array],
        sequences: Sequences,
        step: WalkStep,
    ) -> tuple[Path, dict[str, Array]]:
        """Returns the path with each walk's next tokens behind it, computed without gradients; and `scores`.

        `scores`: arrays (B, T) named logp or values_after, which get the values of the sequences that are
        complete with this step.
        """
        read, caches = Read(_last_hidden(path, step), (None, None)), (path.kv, path.critic_kv)
        out, (kv, critic_kv) = self._outputs((params, critic), read, caches, sequences, step)

        def add(place: Array, scores: dict[str, Array]) -> dict[str, Array]:
            ending = Ending.of(place, step, self._length)
            stats, values = ending.joined(path, out)
            found = {"logp": stats.logp, "values_after": values}
            row = jnp.where(ending.is_live, ending.row, len(sequences.is_asked))
            return {name: x.at[row].set(found[name], mode="drop") for name, x in scores.items()}

        if scores:
            scores = jax.lax.fori_loop(0, step.count.max(), add, scores)
        return self._extended(path, out, step)._replace(kv=kv, critic_kv=critic_kv), scores

    def pop(
        self,
        state: TrainState,
        gradients: Gradients,
        path: Path,
        batch: PreparedBatch,
        sequences: Sequences,
        step: WalkStep,
    ) -> Gradients:
        """Returns the gradients after the last tokens of each walk's path were popped.

        `batch`: the prepared batch, whose losses and gradients these are; one sequence per row.
        """
        trainable, (sums, slopes) = self._objective.trainable, gradients

        def outputs(trained: Any, hidden: Array, ports: Any) -> tuple[Outputs, Any]:
            models = trainable.whole(trained[0], state.params), trained[1]
            read = Read(hidden, (path.kv, path.critic_kv))
            return self._outputs(models, read, ports, sequences, step)

        trained = trainable.of(state.params), state.critic
        ports = slopes.kv, slopes.critic_kv
        (out, _), pull = jax.vjp(outputs, trained, _last_hidden(path, step), ports)
        of_out, slopes = self._taken(slopes, step)
        (of_path, of_own), metrics = self._losses(batch, path, out, step, state.kl_control)
        slopes = slopes._replace(
            logp=slopes.logp + of_path[0].logp,
            entropy=slopes.entropy + of_path[0].entropy,
            values=_sum(slopes.values, of_path[1]),
        )
        stats = jax.tree.map(jnp.add, of_out.stats, of_own[0])
        of_out = of_out._replace(stats=stats, values=_sum(of_out.values, of_own[1]))
        grads, of_hidden, (kv, critic_kv) = pull((of_out, ports))
        hidden = _added_behind(slopes.hidden, of_hidden, step)
        sums = jax.tree.map(jnp.add, sums[0], grads), add_metrics(sums[1], metrics)
        return Gradients(sums, slopes._replace(kv=kv, critic_kv=critic_kv, hidden=hidden))

    # --- parts of a step ------------------------------------------------------------------------------------

    def _outputs(
        self,
        models: tuple[Params, Params | None],
        read: Read,
        caches: tuple[KVStack, KVStack | None],
        sequences: Sequences,
        step: WalkStep,
    ) -> tuple[Outputs, Any]:
        """Returns the model's outputs for the columns of each walk, and the attention's caches after them.

        `models`: parameters of policy and critic. `caches`: those of policy and separate critic, as in
        `PrefixAttention`.
        """
        objective, forward, (params, critic) = self._objective, self._objective.forward, models
        at = step.sequence, step.position
        tokens, support = sequences.tokens[at], sequences.support
        # XLA computes several rows faster than one of as many tokens: on a CPU 0.19 instead of 0.23 ms each.
        split = partial(jnp.reshape, shape=(self._walks * math.gcd(4, step.columns), -1))

        def attended(forward: Forward, params: Params, of: int) -> tuple[Array, Any]:
            places = self._places(step)
            attend = PrefixAttention(_path_tokens(step), places, step.ends, read.stacks[of], self._mesh)
            hidden, cache = forward.attended(params, split(tokens), split(step.position), attend, caches[of])
            return hidden.reshape(*tokens.shape, -1), cache

        hidden, cache = attended(forward, params, 0)
        # Column 0 is the path's last token, from whose hidden state those behind it get their log-probs.
        front = partial(jnp.pad, pad_width=((0, 0), (1, 0)))
        is_first = (step.position == 0) | (step.ends == 0)
        asked = PackedTokens(
            tokens=front(tokens),
            previous=front(jnp.where(is_first, -1, step.previous + 1), constant_values=-1),
            mask=front(sequences.is_asked[at] & (step.ends > 0)),
            temperature=front(sequences.temperature[at], constant_values=1.0),
            support=None if support is None else jnp.pad(support[at], ((0, 0), (1, 0), (0, 0))),
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

    def _extended(self, path: Path, out: Outputs, step: WalkStep) -> Path:
        """Returns the path, its KV unchanged, with the outputs for each walk's tokens in their places."""
        put = partial(written, places=self._places(step))
        return path._replace(
            hidden=put(path.hidden, out.hidden),
            stats=TokenStats(*map(put, path.stats, out.stats)),
            values=None if path.values is None or out.values is None else put(path.values, out.values),
        )

    def _losses(
        self, batch: PreparedBatch, path: Path, out: Outputs, step: WalkStep, control: KLControl | None
    ) -> tuple[Any, Any]:
        """Returns the gradients of the losses of the sequences that end here, and the metric sums.

        The gradients are with respect to (statistics, values) of the path, and of the step's columns.
        """
        read = (path.stats, path.values), (out.stats, out.values)

        def add(place: Array, carry: tuple[Any, Any]) -> tuple[Any, Any]:
            ending = Ending.of(place, step, self._length)
            micro = map_batch(lambda x: x[ending.row], lambda x: x, batch)
            is_live = ending.is_live[:, None]
            micro = micro._replace(
                loss_mask=micro.loss_mask & is_live, segment_ids=jnp.where(is_live, micro.segment_ids, 0)
            )

            def loss(read: Any) -> tuple[Array, Any]:
                (of_path, path_values), (own, own_values) = read
                stats, values = ending.joined(
                    path._replace(stats=of_path, values=path_values),
                    out._replace(stats=own, values=own_values),
                )
                return self._objective.loss(stats, values, micro, control)

            gradient, metrics = jax.grad(loss, has_aux=True)(read)
            return jax.tree.map(jnp.add, carry[0], gradient), add_metrics(carry[1], metrics)

        start = jax.tree.map(jnp.zeros_like, read), self._objective.no_metrics(self._walks, self._length)
        return jax.lax.fori_loop(0, step.count.max(), add, start)

    def _taken(self, slopes: Slopes, step: WalkStep) -> tuple[Outputs, Slopes]:
        """Returns the gradients with respect to each walk's outputs, and the slopes without them."""
        places = self._places(step)

        def apart(x: Array) -> tuple[Array, Array]:
            own = taken(x, places, step.columns)
            return own, written(x, jnp.zeros_like(own), places)

        logp, entropy, hidden = map(apart, (slopes.logp, slopes.entropy, slopes.hidden))
        values = (None, None) if slopes.values is None else apart(slopes.values)
        of_stats = TokenStats(logp[0], entropy[0], jnp.zeros_like(logp[0]))
        rest = slopes._replace(logp=logp[1], entropy=entropy[1], hidden=hidden[1], values=values[1])
        return Outputs(hidden[0], of_stats, values[0]), rest

    def _places(self, step: WalkStep) -> Int[Array, " W"]:
        """Returns where in the path each walk's tokens go; a walk that waits writes where nothing reads."""
        return jnp.where(step.tokens > 0, step.start, self.places - step.columns)


def _sum(one: Array | None, other: Array | None) -> Array | None:
    return None if one is None or other is None else one + other


def _path_tokens(step: WalkStep) -> Int[Array, " W"]:
    """Returns the number of tokens before those of `step`; 0 for a walk that waits."""
    return jnp.where(step.tokens > 0, step.start, 0)


def _last_hidden(path: Path, step: WalkStep) -> Float[Array, "W D"]:
    """Returns the hidden state of the token before each walk's tokens; undefined if there is none."""
    at = jnp.maximum(step.start - 1, 0)
    return jnp.take_along_axis(path.hidden, at[:, None, None], axis=1)[:, 0]


def _added_behind(slopes: Float[Array, "W P D"], new: Float[Array, "W D"], step: WalkStep) -> Array:
    """Returns the slopes with `new` added at the token before each walk's tokens, if there is one."""
    new = jnp.where((_path_tokens(step) > 0)[:, None], new, 0.0)
    return slopes.at[jnp.arange(len(new)), jnp.maximum(step.start - 1, 0)].add(new)
