"""Arrays of a tree update: what is on the walks' paths, the gradients with respect to it, a step's tokens.

Shapes: B sequences of at most T tokens, one a row, of which E end in a walk; W walks; P places of a path; n
tokens of a step; D width.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from areal_jax.algorithms.logprobs import TokenStats
from areal_jax.trees.prefix_attention import KVStack


class Sequences(NamedTuple):
    """The tokens of a batch with one sequence per row, and which log-probs its trees need."""

    tokens: Int[Array, "B T"]
    support: Int[Array, "B T K"] | None
    is_asked: Bool[Array, "B T"]
    """Whether a sequence with this prefix trains the token."""
    temperature: Float[Array, "B T"]
    """Temperature at which the tokens that are asked for were sampled."""


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


class WalkStep(NamedTuple):
    """One step of W walks (`trajectories.walk.Walk`), of n columns each."""

    endings: Int[Array, "E 2"]
    """Of the whole walk: a sequence, and the column of the last token of its leaf."""
    start: Int[Array, " W"]
    """Number of tokens on the path before the step."""
    tokens: Int[Array, " W"]
    """Number of tokens of the step; 0: the walk waits."""
    first: Int[Array, " W"]
    """Index in `endings` of the first sequence that is complete with the step."""
    count: Int[Array, " W"]
    """Number of these sequences."""
    sequence: Int[Array, "W n"]
    position: Int[Array, "W n"]
    previous: Int[Array, "W n"]
    """Column of the token before each token; -1: the path's last token."""
    ends: Int[Array, "W n"]
    """The column after the last token below each token; 0: no token."""

    @property
    def columns(self) -> int:
        return self.ends.shape[1]


class Outputs(NamedTuple):
    """The model's outputs for n tokens of each walk."""

    hidden: Float[Array, "W n D"]
    stats: TokenStats
    values: Float[Array, "W n"] | None


class Ending(NamedTuple):
    """A sequence of each walk that is complete with a step: it begins with the path and ends in a column."""

    row: Int[Array, " W"]
    """The sequence's row in the batch."""
    columns: Int[Array, "W T"]
    """For each of its tokens that is not on the path, its column."""
    start: Int[Array, " W"]
    """Number of its tokens on the path."""
    is_live: Bool[Array, " W"]
    """False: the walk has no such sequence."""

    @classmethod
    def of(cls, place: Array, step: WalkStep, length: int) -> Ending:
        """Returns number `place` of the sequences, of at most `length` tokens, that the step completes."""
        is_live = place < step.count
        at = jnp.minimum(step.first + place, len(step.endings) - 1)
        row, last = step.endings[jnp.where(is_live, at, 0)].T
        # The tokens above the leaf's last one are those that it sees.
        column = jnp.arange(step.columns)
        is_above = (column <= last[:, None]) & (step.ends > last[:, None])
        walk, position = jnp.arange(len(row))[:, None], jnp.where(is_above, step.position, length)
        columns = jnp.zeros((len(row), length), column.dtype).at[walk, position].set(column, mode="drop")
        return cls(row, columns, step.start, is_live)

    def joined(self, path: Path, out: Outputs) -> tuple[TokenStats, Array | None]:
        """Returns statistics and values of the sequence's tokens, (W, T) each."""
        length = self.columns.shape[1]
        is_own = jnp.arange(length) >= self.start[:, None]

        def join(of_path: Array, of_own: Array) -> Array:
            return jnp.where(is_own, jnp.take_along_axis(of_own, self.columns, axis=1), of_path[:, :length])

        values = None if path.values is None or out.values is None else join(path.values, out.values)
        return TokenStats(*map(join, path.stats, out.stats)), values
