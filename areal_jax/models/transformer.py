"""The one model definition: a decoder-only transformer (GQA, RoPE, RMSNorm, gated MLP) in Flax NNX.

The trainer's packed forward, the generator's prefill and its decode step call the same `Transformer` with
different kinds of `Attention`. Layers are stacked along a leading axis L and run by a scan. Residuals, norms,
rotary embeddings and softmax are in `config.accumulate`, float32 except in tests; matrix products read
`config.dtype` and write `config.accumulate`, but the backward pass reads and writes `config.activations`.
Each parameter is declared with its shape, initializer and logical axis names, which `parallel.mesh` maps onto
devices.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx, struct
from jax.sharding import NamedSharding
from jaxtyping import Array, Float, Int

from areal_jax.models.attention import Attention
from areal_jax.models.blockwise import KEPT
from areal_jax.models.config import ModelConfig
from areal_jax.models.exact import as_attended, is_exact, rounded, rows_of, with_matrices_in
from areal_jax.models.products import product
from areal_jax.models.quantize import dequantized, inputs_of, quantized
from areal_jax.models.rope import inverse_frequencies

Remat = Literal["none", "layer", "dots"]
"""Which of a layer's activations the backward pass recomputes: none; layer: all; dots: all but the results
of matrix products and attention.
"""


class Execution(NamedTuple):
    """How a forward pass is executed; the choice changes results only by rounding."""

    remat: Remat = "none"
    rows: NamedSharding | None = None
    """Sharding of the activations' rows over a mesh, applied after every layer; None leaves it to XLA.

    XLA would shard activations like parameters: on an fsdp mesh each device would then compute all rows, but
    only a part of their width.
    """


PLAIN = Execution()


def rematerialised(layer: Callable[..., Any], remat: Remat) -> Callable[..., Any]:
    """Returns `layer` with a backward pass that recomputes activations instead of storing them.

    `remat`: none (it stores all), layer (recomputes all), dots (all but results of matrix products and
    attention).
    """
    if remat == "none":
        return layer
    if remat == "layer":
        return jax.checkpoint(layer)
    policies = jax.checkpoint_policies
    kept = policies.save_from_both_policies(policies.checkpoint_dots, policies.save_only_these_names(KEPT))
    return jax.checkpoint(layer, policy=kept)


@partial(jax.custom_vjp, nondiff_argnums=(1,))
def as_published(params: Any, dtype: str) -> Any:
    """Returns the parameters rounded to `dtype`, as if published in `dtype`; gradients pass unchanged."""
    return jax.tree.map(lambda leaf: rounded(leaf, dtype), params)


as_published.defvjp(
    lambda params, dtype: (as_published(params, dtype), None), lambda dtype, _, slope: (slope,)
)


Axes = tuple[str | None, ...]
"""Logical names of an array's axes; an axis with the name None is not sharded on any mesh."""


def _param(value: Array, axes: Axes) -> nnx.Param:
    return nnx.Param(value, out_sharding=axes, eager_sharding=False)


def _normal(key: Array, shape: tuple[int, ...], axes: Axes, scale: float) -> nnx.Param:
    return _param(scale * jax.random.normal(key, shape), axes)


def _ones(size: int, axis: str) -> nnx.Param:
    return _param(jnp.ones(size), (axis,))


def rms_norm(x: Float[Array, "... D"], scale: Array, eps: float) -> Float[Array, "... D"]:
    """Returns x / rms(x) * scale, in x's dtype (Zhang & Sennrich, arXiv:1910.07467)."""
    return x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + eps) * scale.astype(x.dtype)


def rotate(
    x: Float[Array, "B T H h"], positions: Int[Array, "B T"], frequencies: np.ndarray
) -> Float[Array, "B T H h"]:
    """Returns x with each pair (i, i + h/2) of elements rotated by position * frequencies[i].

    RoPE, Su et al. (arXiv:2104.09864). `frequencies` is (h/2,).
    """
    half = x.shape[-1] // 2
    angles = positions[..., None] * jnp.asarray(frequencies)  # (B, T, h/2)
    cos, sin = jnp.cos(angles)[:, :, None], jnp.sin(angles)[:, :, None]
    left, right = x[..., :half], x[..., half:]
    return jnp.concatenate([left * cos - right * sin, right * cos + left * sin], axis=-1)


class FeatureMajor(struct.PyTreeNode):
    """A matrix stored transposed, a row per output: a CPU multiplies few rows of x by it without a copy."""

    rows: Float[Array, "O I"]

    def product(self, x: Float[Array, "... I"], dtype: str) -> Float[Array, "... O"]:
        flat = x.reshape(-1, x.shape[-1]).astype(dtype)
        count = len(flat)
        if dtype == "bfloat16" and count < FEWEST_ROWS:
            flat = jnp.pad(flat, ((0, FEWEST_ROWS - count), (0, 0)))
        out = jax.lax.dot_general(
            self.rows.astype(dtype), flat, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32
        )
        # The barrier keeps XLA from rewriting this as x @ rows.T, which repacks the matrix.
        return jax.lax.optimization_barrier(out).T[:count].reshape(*x.shape[:-1], -1)


FEWEST_ROWS = 8
"""bfloat16 products are padded to this many rows: for fewer, XLA's CPU kernel is several times slower."""


def project(x: Float[Array, "... I"], weight: Array | FeatureMajor, dtype: str) -> Float[Array, "... O"]:
    """Returns x @ weight as `products.product` computes it; the output axes are flattened to one.

    Both operands are reshaped to two dimensions, as fast CPU kernels require.
    """
    if isinstance(weight, FeatureMajor):
        return weight.product(x, dtype)
    flat = weight.reshape(x.shape[-1], -1)
    return product(x.reshape(-1, x.shape[-1]), flat, dtype).reshape(*x.shape[:-1], -1)


class Adapter(nnx.Module):
    """The low-rank factors a and b that adapt a matrix of `shape`; its first `inputs` axes are its inputs.

    Initially a is random and b is zero, so that a b adds 0 (Hu et al., arXiv:2106.09685). The rank's axis is
    not sharded.
    """

    def __init__(self, key: Array, shape: tuple[int, ...], axes: Axes, inputs: int, rank: int) -> None:
        scale = math.prod(shape[:inputs]) ** -0.5
        self.a = _normal(key, (*shape[:inputs], rank), (*axes[:inputs], None), scale)
        self.b = _param(jnp.zeros((rank, *shape[inputs:])), (None, *axes[inputs:]))


class Quantized(nnx.Module):
    """A frozen matrix's codes and scale (`models.quantize`), all zeros until `Model.from_base` sets them."""

    def __init__(self, kind: str, shape: tuple[int, ...], axes: Axes, inputs: int) -> None:
        matrix = jax.ShapeDtypeStruct((1, *shape), jnp.float32)
        for name, leaf in jax.eval_shape(partial(quantized, kind=kind, inputs=inputs), matrix).items():
            setattr(self, name, _param(jnp.zeros(leaf.shape[1:], leaf.dtype), axes))


class Projections(nnx.Module):
    """The matrices of attention or of the MLP, in floats or quantised, and their adapters."""

    def __init__(self, c: ModelConfig) -> None:
        self.config = nnx.static(c)

    def add(self, rngs: nnx.Rngs, name: str, shape: tuple[int, ...], axes: Axes, scale: float) -> None:
        """Add the matrix `name` of `shape`, and its adapter, if the config has one.

        `axes`: logical names of its axes. `scale`: standard deviation of its initial values.
        """
        c, inputs = self.config, inputs_of(name)
        if c.quantize == "none":
            setattr(self, name, _normal(rngs.params(), shape, axes, scale))
        else:
            setattr(self, name, Quantized(c.quantize, shape, axes, inputs))
        if c.lora is not None and name in c.lora.names:
            setattr(self, f"{name}_lora", Adapter(rngs.params(), shape, axes, inputs, c.lora.rank))

    def matrix(self, name: str) -> Array | FeatureMajor:
        """Returns the matrix W of the projection `name`, dequantised if it is stored as codes."""
        weight, kind = getattr(self, name), self.config.quantize
        if kind == "none":
            return weight.get_value()
        return dequantized(weight.codes[...], weight.scale[...], kind)

    def projected(self, name: str, x: Float[Array, "... I"]) -> Float[Array, "... O"]:
        """Returns x W, plus (alpha / rank) (x a) b if W has an adapter; `project` computes each product."""
        c = self.config
        x, by = x.astype(c.activations), partial(project, dtype=c.dtype)
        out = by(x, self.matrix(name))
        if c.lora is None or name not in c.lora.names:
            return out
        adapter = getattr(self, f"{name}_lora")
        return out + c.lora.scale * by(by(x, adapter.a[...]), adapter.b[...])


class SelfAttention(Projections):
    """The projections before and after attention; the attention itself is an argument of `Block`."""

    def __init__(self, c: ModelConfig, rngs: nnx.Rngs) -> None:
        super().__init__(c)
        scale = c.width**-0.5
        for name, heads, axis in (
            ("q", c.heads, "heads"),
            ("k", c.kv_heads, "kv_heads"),
            ("v", c.kv_heads, "kv_heads"),
        ):
            self.add(rngs, name, (c.width, heads, c.head_dim), ("embed", axis, "head_dim"), scale)
            if c.has_qkv_bias:
                setattr(self, f"{name}_bias", _param(jnp.zeros((heads, c.head_dim)), (axis, "head_dim")))
        scale = (2 * c.layers * c.heads * c.head_dim) ** -0.5
        shape = (c.heads, c.head_dim, c.width)
        self.add(rngs, "out", shape, ("heads", "head_dim", "embed"), scale)
        if c.has_qk_norm:
            self.q_norm, self.k_norm = _ones(c.head_dim, "head_dim"), _ones(c.head_dim, "head_dim")

    def queries_keys_values(self, x: Array, positions: Array) -> tuple[Array, Array, Array]:
        c = self.config
        q, k, v = (self.projected(name, x).reshape(*x.shape[:-1], -1, c.head_dim) for name in "qkv")
        if c.has_qkv_bias:
            q, k, v = (
                x + getattr(self, f"{name}_bias")[...] for x, name in zip((q, k, v), "qkv", strict=True)
            )
        if c.has_qk_norm:
            q, k = rms_norm(q, self.q_norm[...], c.norm_eps), rms_norm(k, self.k_norm[...], c.norm_eps)
        frequencies = inverse_frequencies(c.head_dim, c.rope_theta, c.rope_scaling, c.accumulate)
        q, k = rotate(q, positions, frequencies), rotate(k, positions, frequencies)
        return q, k.astype(c.dtype), v.astype(c.dtype)

    def mixed(self, attended: Float[Array, "B T H h"]) -> Float[Array, "B T D"]:
        return self.projected("out", attended.reshape(*attended.shape[:-2], -1))


class GatedMLP(Projections):
    """Computes down(silu(gate(x)) * up(x)) (Shazeer, arXiv:2002.05202)."""

    def __init__(self, c: ModelConfig, rngs: nnx.Rngs) -> None:
        super().__init__(c)
        self.add(rngs, "gate", (c.width, c.mlp_width), ("embed", "mlp"), c.width**-0.5)
        self.add(rngs, "up", (c.width, c.mlp_width), ("embed", "mlp"), c.width**-0.5)
        scale = (2 * c.layers * c.mlp_width) ** -0.5
        self.add(rngs, "down", (c.mlp_width, c.width), ("mlp", "embed"), scale)

    def __call__(self, x: Array) -> Array:
        gate, up = self.projected("gate", x), self.projected("up", x)
        if self.config.activations == self.config.accumulate:
            return self.gated(gate, up)
        graph, params = nnx.split(self)
        return _gated(graph, params, gate, up)

    def gated(self, gate: Array, up: Array) -> Array:
        """Returns down(silu(gate) * up) of the projections' results `gate` and `up`."""
        return self.projected("down", jax.nn.silu(gate) * up)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _gated(graph: Any, params: Any, gate: Array, up: Array) -> Array:
    """Returns `GatedMLP.gated`. The backward pass reads `gate` and `up` rounded to the model's dtype.

    It computes their product again from these, so that it needs no float32 array of their size.
    """
    return nnx.merge(graph, params).gated(gate, up)


def _gated_forward(graph: Any, params: Any, gate: Array, up: Array) -> tuple[Array, tuple]:
    mlp = nnx.merge(graph, params)
    return mlp.gated(gate, up), (params, gate.astype(mlp.config.dtype), up.astype(mlp.config.dtype))


def _gated_backward(graph: Any, kept: tuple, slope: Array) -> tuple:
    params, *inputs = kept
    # XLA fuses what reads one array into one kernel, but not if the array is a product's own result.
    inputs = jax.lax.optimization_barrier(inputs)

    def gated(params: Any, gate: Array, up: Array) -> Array:
        return nnx.merge(graph, params).gated(gate, up)

    return jax.vjp(gated, params, *(x.astype(slope.dtype) for x in inputs))[1](slope)


_gated.defvjp(_gated_forward, _gated_backward)


class Block(nnx.Module):
    """One layer: attention, then MLP; each reads the normed residual stream and adds its result to it."""

    def __init__(self, c: ModelConfig, rngs: nnx.Rngs) -> None:
        self.config = nnx.static(c)
        self.attention_norm = _ones(c.width, "embed")
        self.attention = SelfAttention(c, rngs)
        self.mlp_norm = _ones(c.width, "embed")
        self.mlp = GatedMLP(c, rngs)

    def __call__(
        self, layer: Array, x: Array, positions: Array, attend: Attention, cache: Any
    ) -> tuple[Array, Any]:
        by_rows = rows_of(attend)
        q, k, v = by_rows(self.before, x, positions)
        attended, cache = attend(layer, q, k, v, cache)
        return by_rows(self.after, x, attended), cache

    def before(self, x: Array, positions: Array) -> tuple[Array, Array, Array]:
        """Returns the queries, keys and values of the tokens in `x`, each computed from its token alone."""
        return self.attention.queries_keys_values(self._normed(x, self.attention_norm), positions)

    def after(self, x: Array, attended: Array) -> Array:
        """Returns `x` plus the projected attention output `attended`, plus the MLP's result for that sum."""
        x = x + self.attention.mixed(attended)
        return x + self.mlp(self._normed(x, self.mlp_norm))

    def _normed(self, x: Array, scale: nnx.Param) -> Array:
        return rms_norm(x, scale[...], self.config.norm_eps).astype(self.config.activations)


class Transformer(nnx.Module):
    """Embedding, stacked blocks and last norm; `Model.head` applies the LM head."""

    def __init__(self, c: ModelConfig, rngs: nnx.Rngs) -> None:
        self.config = nnx.static(c)
        self.embedding = _normal(rngs.params(), (c.vocab_size, c.width), ("vocab", "embed"), c.width**-0.5)

        @nnx.split_rngs(splits=c.layers)
        @nnx.vmap(in_axes=0, out_axes=0, transform_metadata={nnx.PARTITION_NAME: "layers"})
        def stacked(rngs: nnx.Rngs) -> Block:
            return Block(c, rngs)

        self.blocks = stacked(rngs)
        self.norm = _ones(c.width, "embed")
        if not c.is_tied:
            self.head = _normal(rngs.params(), (c.width, c.vocab_size), ("embed", "vocab"), c.width**-0.5)

    def __call__(
        self,
        tokens: Int[Array, "B T"],
        positions: Int[Array, "B T"],
        attend: Attention,
        cache: Any,
        execution: Execution,
        apart: Sequence[Any] = (),
    ) -> tuple[Float[Array, "B T D"], Any]:
        """Returns the hidden states after the last norm, and the cache with these tokens' KV added.

        With an exact attention (`models.exact`) the forward pass keeps only each layer's inputs for the
        backward pass, whatever `execution.remat` is. `apart`: each layer's parameters as a tree of their own;
        the layers then run one after another. Empty: they are stacked, and run by a scan.
        """
        graph, layers = nnx.split(self.blocks)
        read = self.config.params_dtype

        # The backward pass runs a layer again, without a copy of its parameters and from a rounded `x`.
        rounds = self.config.activations != self.config.accumulate
        kept = self.config.dtype if execution.remat == "layer" and rounds else None

        def layer_by(attend: Attention, fixed: tuple, x: Array, others: tuple) -> tuple[Array, Any]:
            (index, positions), (params, cache) = fixed, others
            params = as_published(params, read)
            if is_exact(attend):
                params = with_matrices_in(params, self.config.dtype)
            return nnx.merge(graph, params)(index, x, positions, attend, cache)

        def one_layer(carry: tuple[Array, Any], layer: tuple[Any, Any]) -> tuple[tuple[Array, Any], None]:
            (x, cache), (index, params) = carry, layer
            x, cache = as_attended(layer_by, attend, (index, positions), x, (params, cache), kept)
            return (placed(x), cache), None

        def last_norm(attend: Attention, fixed: None, x: Array, scale: Array) -> Array:
            return rows_of(attend)(lambda x: rms_norm(x, scale, self.config.norm_eps), x)

        def placed(x: Array) -> Array:
            rows = execution.rows
            return x if rows is None else jax.lax.with_sharding_constraint(x, rows)

        x = placed(as_published(self.embedding[...][tokens].astype(self.config.accumulate), read))
        if apart:
            for index, params in enumerate(apart):
                (x, cache), _ = one_layer((x, cache), (index, params))
        else:
            is_stored_whole = kept is None and not is_exact(attend)
            body = rematerialised(one_layer, execution.remat) if is_stored_whole else one_layer
            (x, cache), _ = jax.lax.scan(body, (x, cache), (jnp.arange(self.config.layers), layers))
        return as_attended(last_norm, attend, None, x, as_published(self.norm[...], read)), cache
