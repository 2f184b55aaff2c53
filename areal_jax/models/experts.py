"""A mixture of experts: each token passes through the MLPs of its k likeliest experts (arXiv:1701.06538).

A token has a row for each of its experts. The rows are sorted by expert, and each block of B rows is
multiplied by the matrices of the expert that its first row belongs to. Blocks are computed in the order of
the rows: what a block computes for rows of the next expert, the next block overwrites. So nothing is padded.
Shapes: n tokens, E experts, k experts a token, M = n k rows and B more at the end, I inputs and O outputs of
a matrix.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial, reduce
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jaxtyping import Array, Bool, Float, Int

from areal_jax.models.products import summed
from areal_jax.models.quantize import dequantized

BLOCK = 32
"""Most rows of a block: more of them would compute more rows of other experts."""
FEWEST = 8
"""Fewest rows of a block, for fast products."""
WHOLE = 32_768
"""So many rows are computed at once by each of several devices, though it has a part of the experts."""
NO_EXPERT = 255
"""Stands in place of each expert of a token if they are not known; experts have lower numbers."""


class Routes(NamedTuple):
    """Which experts a token passes through, and with which weights their results are added."""

    experts: Int[Array, "*n k"]
    """The likeliest expert first; of equally likely ones the lower number."""
    weights: Float[Array, "*n k"]
    probabilities: Float[Array, "*n E"]
    """Of all experts; their sum is 1."""
    own: Int[Array, "*n k"]
    """The experts that the router chooses, also where others are given."""


class RouterSums(NamedTuple):
    """What the routers of L layers did, summed over tokens; it has no gradient."""

    tokens: Float[Array, "L E"]
    """Number of tokens that passed through each expert."""
    probabilities: Float[Array, "L E"]
    entropy: Float[Array, " L"]
    """Sum of the entropies of the tokens' probabilities, in nats."""
    differing: Float[Array, " L"] | None = None
    """Number of tokens with other given experts than the router chooses; None: none are given."""

    @classmethod
    def zeros(cls, layers: int, experts: int, dtype: str, are_given: bool = False) -> RouterSums:
        each, one = jnp.zeros((layers, experts), dtype), jnp.zeros(layers, dtype)
        return cls(each, each, one, one if are_given else None)

    def adding(self, layer: Any, routes: Routes, is_live: Bool[Array, "B T"]) -> RouterSums:
        """Returns the sums with those of the live tokens of layer number `layer` added."""
        probabilities = jax.lax.stop_gradient(routes.probabilities)
        of = jnp.where(is_live[..., None], probabilities, 0)
        chosen = (routes.experts[..., None] == jnp.arange(of.shape[-1])) & is_live[..., None, None]
        entropy = -jax.scipy.special.xlogy(of, of).sum()
        others = (jnp.sort(routes.own, -1) != jnp.sort(routes.experts, -1)).any(-1) & is_live
        added = RouterSums(
            chosen.sum((0, 1, 2)),
            of.sum((0, 1)),
            entropy,
            None if self.differing is None else others.sum(),  # type: ignore[arg-type]
        )
        return jax.tree.map(lambda x, more: x.at[layer].add(more), self, added)

    def figures(self) -> dict[str, float]:
        """Returns metrics of the routers, each a mean over the layers; without tokens there are none.

        Those of the load: the most and the fewest tokens of an expert, over their mean. The loss for balanced
        experts (arXiv:2101.03961, with k experts a token) is E sum_e f_e P_e, where f_e is the mean number of
        times that a token of a layer passes through expert e, and P_e the expert's mean probability; it is k
        if all experts have the same number of tokens.
        """
        tokens, probabilities, entropy = (np.asarray(x, np.float64) for x in self[:3])
        total = probabilities.sum()  # tokens times layers
        if total == 0:
            return {}
        load = tokens / tokens.mean(1, keepdims=True)
        own = {} if self.differing is None else {"routes_differ": float(np.sum(self.differing)) / total}
        return own | {
            "router_load_max": load.max(1).mean(),
            "router_load_min": load.min(1).mean(),
            "router_entropy": entropy.sum() / total,
            "router_balance_loss": tokens.shape[1] * float(tokens.sum(0) @ probabilities.sum(0)) / total**2,
        }


def routes(
    logits: Float[Array, "*n E"], k: int, has_unit_weights: bool, experts: Int[Array, "*n k"] | None = None
) -> Routes:
    """Returns the routes that a router with these `logits` chooses.

    A token's `experts`, if given, are not chosen anew; NO_EXPERT as the first one: they are.
    A weight is the expert's probability among all E, divided by the sum of the k if `has_unit_weights`.
    """
    probabilities = jax.nn.softmax(logits, axis=-1)
    own = jax.lax.top_k(jax.lax.stop_gradient(probabilities), k)[1]
    if experts is None:
        experts = own
    else:
        experts = jnp.where(experts[..., :1] == NO_EXPERT, own, experts.astype(own.dtype))
    weights = jnp.take_along_axis(probabilities, experts, axis=-1)
    if has_unit_weights:
        weights = weights / weights.sum(-1, keepdims=True)
    return Routes(experts, weights, probabilities, own)


class Rows(struct.PyTreeNode):
    """The order of the rows: number t k + j is that of the j-th expert of token t."""

    order: Int[Array, " M+B"]
    """Numbers of the rows, sorted by expert. Rows without an expert come last; B times number 0 follows."""
    place: Int[Array, "n k"]
    """Where in `order` a row is: the inverse. A row at no place from 0 to `starts[-1]` - 1 has no expert."""
    starts: Int[Array, " E+1"]
    """Place of the first row of each expert, and of the first row without an expert."""
    block: int = struct.field(pytree_node=False)
    """Rows of a block, B."""

    @classmethod
    def of(cls, experts: Int[Array, "n k"], count: int, block: int) -> Rows:
        """Returns the order of the rows of `count` experts, for blocks of `block` rows.

        A row with another number than 0 to `count` - 1 has no expert.
        """
        keys = jnp.where((experts >= 0) & (experts < count), experts, count).ravel()
        order = jnp.argsort(keys, stable=True)
        place = jnp.zeros_like(order).at[order].set(jnp.arange(len(order)), unique_indices=True)
        starts = jnp.searchsorted(keys[order], jnp.arange(count + 1))
        return cls(jnp.pad(order, (0, block)), place.reshape(experts.shape), starts, block)

    def window(self, first: Int[Array, ""], size: int) -> Rows:
        """Returns the `size` rows from place `first` on; all others have no expert there."""
        padded = jnp.pad(self.order, (0, size))
        order = jax.lax.dynamic_slice_in_dim(padded, first, size + self.block)
        return Rows(order, self.place - first, jnp.clip(self.starts - first, 0, size), self.block)

    @property
    def has_expert(self) -> Bool[Array, "n k"]:
        return (self.place >= 0) & (self.place < self.starts[-1])

    def spread(self, x: Float[Array, "n D"], by: Arithmetic) -> Float[Array, "M+B D"]:
        """Returns each row's token."""
        return _spread(by, x, self)

    def weights(self, weights: Float[Array, "n k"]) -> Float[Array, "M+B 1"]:
        """Returns each row's weight."""
        return _row_weights(weights, self)[:, None]

    def summed(self, y: Float[Array, "M+B D"], by: Arithmetic) -> Float[Array, "n D"]:
        """Returns the sum of each token's rows, in the order of its experts.

        A row without an expert counts 0.
        """
        return _summed(by, y, self)

    def chosen(self, y: Float[Array, "M+B D"]) -> Float[Array, "n k D"]:
        """Returns the rows by token and expert; 0 for a row without an expert."""
        return jnp.where(self.has_expert[..., None], y[jnp.where(self.has_expert, self.place, 0)], 0)


def block_size(rows: int, experts: int) -> int:
    """Returns the number of rows of a block: about as many as an expert has, from FEWEST to BLOCK."""
    mean = -(-rows // experts)
    return min(BLOCK, max(FEWEST, 1 << (mean - 1).bit_length()))


def window_size(rows: int, parts: int) -> int:
    """Returns of how many of `rows` rows a window is, on each of `parts` devices with as many experts.

    It is more than a device has on average, so that one window is enough if the load is even.
    """
    return rows if parts == 1 or rows <= WHOLE else min(rows, -(-rows * 5 // (4 * parts * 8)) * 8)


def expected_blocks(tokens: int, k: int, experts: int, own: int) -> int:
    """Returns the blocks that `own` of the experts have on average, if each has as many tokens as any other.

    `tokens`: of the call. The number of an expert's tokens is then binomial, with probability k / experts.
    """
    block = block_size(tokens * k, experts)
    if k == experts:
        return own * -(-tokens // block)
    counts, odds = np.arange(tokens + 1), k / experts
    # The logarithm of the binomial coefficients, by sums of logarithms.
    factorials = np.concatenate([[0.0], np.cumsum(np.log(np.arange(1, tokens + 1)))])
    chances = factorials[-1] - factorials - factorials[::-1]
    chances = np.exp(chances + counts * np.log(odds) + (tokens - counts) * np.log1p(-odds))
    return max(1, round(own * float(chances @ -(-counts // block))))


def weighted(y: Float[Array, "*n k D"], weights: Float[Array, "*n k"]) -> Float[Array, "*n D"]:
    """Returns the weighted sum over the experts of a token, added one after the other."""
    each = [y[..., j, :] * weights[..., j, None] for j in range(y.shape[-2])]
    return reduce(jnp.add, each)


@dataclass(frozen=True)
class Arithmetic:
    """How the experts' matrices are read: as operands of `dtype`; codes of `kind` are dequantised."""

    dtype: str
    kind: str = "none"
    kernels: Callable[[], ExpertKernels] | None = None
    """Returns what computes products of matrices that are no codes, and sums; None: JAX code does."""

    def matrix(self, weights: Any, expert: Array) -> Float[Array, "I O"]:
        """Returns an expert's matrix; `weights`: all of them, (E, I, O), or their codes and scale."""
        one = jax.tree.map(lambda leaf: leaf[expert], weights)
        return (one if self.kind == "none" else dequantized(**one, kind=self.kind)).astype(self.dtype)


class ExpertKernels(NamedTuple):
    """Kernels for a mixture's experts on GPUs; `starts` (E + 1,) as in `Rows`."""

    rows: Callable[..., Array]
    """`rows(x (M, I), matrices (E, I, O), starts, axis, dtype)` returns each row times its expert's matrix
    (axis 1: times the transposed matrix), in `dtype`.
    """
    matrices: Callable[..., Array]
    """`matrices(x (M, I), slope (M, O), starts)` returns for each expert the sum of its rows' outer products,
    (E, I, O) float32.
    """
    sums: Callable[..., Array]
    """`sums(y (M, D), place (n, k))` returns the sum of the rows at each token's places, (n, D) float32; a
    place of -1 counts 0.
    """


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _spread(by: Arithmetic, x: Array, rows: Rows) -> Array:
    return x[rows.order // rows.place.shape[1]]


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _summed(by: Arithmetic, y: Array, rows: Rows) -> Array:
    if by.kernels is not None:
        return by.kernels().sums(y, jnp.where(rows.has_expert, rows.place, -1))

    def row(j: int) -> Array:
        has_expert, place = rows.has_expert[:, j], rows.place[:, j]
        return jnp.where(has_expert[:, None], y[jnp.where(has_expert, place, 0)], 0)

    return reduce(jnp.add, map(row, range(rows.place.shape[1])))


def _spread_backward(by: Arithmetic, rows: Rows, slope: Array) -> tuple[Array, None]:
    found: Any = _summed(by, slope, rows)
    return found.astype(slope.dtype), None


def _summed_backward(by: Arithmetic, kept: tuple[Rows, Array], slope: Array) -> tuple[Array, None]:
    rows, like = kept
    found: Any = _spread(by, slope, rows)
    return found.astype(like.dtype), None


# Each is the other's transpose. XLA would make a scattered sum of a gradient, which adds in no fixed order.
_spread.defvjp(lambda by, x, rows: (_spread(by, x, rows), rows), _spread_backward)
_summed.defvjp(lambda by, y, rows: (_summed(by, y, rows), (rows, jnp.empty(0, y.dtype))), _summed_backward)


@jax.custom_vjp
def _row_weights(weights: Array, rows: Rows) -> Array:
    return weights.ravel()[rows.order]


_row_weights.defvjp(
    lambda weights, rows: (_row_weights(weights, rows), rows),
    lambda rows, slope: (
        jnp.where(rows.has_expert, slope[jnp.where(rows.has_expert, rows.place, 0)], 0),
        None,
    ),
)


def in_windows(
    f: Callable[..., Float[Array, "n D"]], rows: Rows, size: int, floats: Any, fixed: Any
) -> Float[Array, "n D"]:
    """Returns the sum of `f(window, floats, fixed)` over windows of `size` rows, as many as have an expert.

    A device of several has few of all rows, but could have all of them: memory is needed for one window. The
    first one is computed outside of the loop, because it is mostly the only one, and then nothing is added.
    Gradients are with respect to `floats`; they compute each window again.
    """
    return _in_windows(f, size, rows, floats, fixed)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _in_windows(f: Any, size: int, rows: Rows, floats: Any, fixed: Any) -> Array:
    return _over_windows(lambda window: f(window, floats, fixed), size, rows)


def _over_windows(f: Callable[[Rows], Any], size: int, rows: Rows) -> Any:
    """Returns the sum of `f(window)`, a tree of arrays, over the windows with a row that has an expert."""

    def add(i: Array, total: Any) -> Any:
        return jax.tree.map(jnp.add, total, f(rows.window(i * size, size)))

    first = f(rows.window(jnp.int32(0), size))
    with jax.named_scope("more_windows"):
        return jax.lax.fori_loop(1, -(-rows.starts[-1] // size), add, first)


def _in_windows_backward(f: Any, size: int, kept: tuple, slope: Array) -> tuple[None, Any, None]:
    rows, floats, fixed = kept

    def of(window: Rows) -> Any:
        return jax.vjp(lambda floats: f(window, floats, fixed), floats)[1](slope)[0]

    return None, _over_windows(of, size, rows), None


_in_windows.defvjp(lambda f, size, *kept: (_in_windows(f, size, *kept), kept), _in_windows_backward)


class Blocks(NamedTuple):
    """The blocks that cover the rows of all experts; the first `count` of them are used."""

    expert: Int[Array, " b"]
    first: Int[Array, " b"]
    """Place of the block's first row."""
    count: Int[Array, ""]

    @classmethod
    def of(cls, starts: Int[Array, " E+1"], block: int, rows: int) -> Blocks:
        experts = len(starts) - 1
        numbers = -(-jnp.diff(starts) // block)
        ends = jnp.cumsum(numbers)
        at = jnp.arange(min(rows, rows // block + experts))  # no block is without a row
        expert = jnp.minimum(jnp.searchsorted(ends, at, side="right"), experts - 1)
        return cls(expert, starts[expert] + (at - (ends - numbers)[expert]) * block, ends[-1])


def in_blocks(
    f: Callable[[Array, Array], Array], rows: Float[Array, "M+B I"], starts: Int[Array, " E+1"], block: int
) -> Float[Array, "M+B O"]:
    """Returns the rows that `f(rows (B, I), expert)` computes of each expert's rows; others are undefined."""
    blocks = Blocks.of(starts, block, len(rows) - block)

    def one(i: Array, out: Array) -> Array:
        found = f(jax.lax.dynamic_slice_in_dim(rows, blocks.first[i], block), blocks.expert[i])
        return jax.lax.dynamic_update_slice_in_dim(out, found, blocks.first[i], 0)

    like = jax.eval_shape(f, rows[:block], blocks.expert[0])
    with jax.named_scope("expert_blocks"):
        return jax.lax.fori_loop(0, blocks.count, one, jnp.zeros((len(rows), *like.shape[1:]), like.dtype))


@partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def product(
    x: Float[Array, "M+B I"], weights: Any, starts: Int[Array, " E+1"], block: int, arithmetic: Arithmetic
) -> Float[Array, "M+B O"]:
    """Returns each row times the matrix of its expert, as `products.product` computes it.

    `starts`: see `Rows`. Rows without an expert are undefined, also in gradients. Codes have no gradient.
    """
    return _forward(x, weights, starts, block, arithmetic)[0]


def _forward(x: Array, weights: Any, starts: Array, block: int, by: Arithmetic) -> tuple[Array, tuple]:
    read = x.astype(by.dtype)
    if by.kernels is not None:
        out = by.kernels().rows(read, weights.astype(by.dtype), starts, 0, jnp.float32)
    else:
        out = in_blocks(lambda rows, e: summed(rows, by.matrix(weights, e), 1, 0), read, starts, block)
    return out, (read, jnp.empty(0, x.dtype), weights, starts)


def _backward(block: int, by: Arithmetic, kept: tuple, slope: Array) -> tuple[Array, Any, None]:
    (x, like, weights, starts), slope = kept, slope.astype(by.dtype)
    if by.kernels is not None:
        of_x = by.kernels().rows(slope, weights.astype(by.dtype), starts, 1, like.dtype)
        of_weights = by.kernels().matrices(x, slope, starts).astype(weights.dtype)
        return of_x, of_weights, None
    of_x = in_blocks(
        lambda rows, e: summed(rows, by.matrix(weights, e), 1, 1, like.dtype), slope, starts, block
    )
    of_weights = _of_weights(x, slope, weights, starts, block) if by.kind == "none" else None
    return of_x, of_weights, None


def _of_weights(x: Array, slope: Array, weights: Array, starts: Array, block: int) -> Array:
    """Returns the gradient with respect to `weights`: for each expert, its rows of x times those of slope."""
    blocks = Blocks.of(starts, block, len(x) - block)

    def one(i: Array, total: Array) -> Array:
        e, first = blocks.expert[i], blocks.first[i]
        left, right = (jax.lax.dynamic_slice_in_dim(part, first, block) for part in (x, slope))
        is_own = first + jnp.arange(block) < starts[e + 1]
        return total.at[e].add(summed(jnp.where(is_own[:, None], left, 0), right, 0, 0))

    like = jax.eval_shape(lambda: summed(x, slope, 0, 0))
    with jax.named_scope("expert_blocks"):
        total = jax.lax.fori_loop(0, blocks.count, one, jnp.zeros(weights.shape, like.dtype))
    return total.astype(weights.dtype)


product.defvjp(_forward, _backward)
