"""The one model definition: a decoder-only transformer (GQA, RoPE, RMSNorm, gated MLP) in Flax NNX.

The trainer's packed forward, the generator's prefill and its decode step are calls of the same `Transformer`
with another `Attention`. Layers are stacked along a leading axis L and run by a scan. Residuals, norms,
rotary embeddings and softmax are float32; matrix products read `config.dtype` and accumulate in float32.
Logical axis names stand beside each parameter's shape and initializer; `parallel.mesh` maps them onto
devices.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Literal, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx, struct
from jax.sharding import NamedSharding
from jaxtyping import Array, Float, Int

from areal_jax.models.attention import Attention
from areal_jax.models.blockwise import KEPT
from areal_jax.models.config import ModelConfig
from areal_jax.models.exact import as_attended, as_published, is_exact, rows_of, with_matrices_in
from areal_jax.models.quantize import dequantized, inputs_of, shapes
from areal_jax.models.rope import inverse_frequencies

Remat = Literal["none", "layer", "dots"]
"""What a layer's backward pass computes again: nothing, all of it, or all but products and attention."""


def rematerialised(layer: Callable[..., Any], remat: Remat) -> Callable[..., Any]:
    if remat == "none":
        return layer
    if remat == "layer":
        return jax.checkpoint(layer)
    policies = jax.checkpoint_policies
    kept = policies.save_from_both_policies(policies.checkpoint_dots, policies.save_only_these_names(KEPT))
    return jax.checkpoint(layer, policy=kept)


Axes = tuple[str | None, ...]
"""Logical names; None stays whole on every mesh."""


def _param(key: Array, shape: tuple[int, ...], axes: Axes, scale: float) -> nnx.Param:
    return nnx.Param(scale * jax.random.normal(key, shape), out_sharding=axes, eager_sharding=False)


def _zeros(shape: tuple[int, ...], axes: Axes) -> nnx.Param:
    return nnx.Param(jnp.zeros(shape), out_sharding=axes, eager_sharding=False)


def _ones(size: int, axis: str) -> nnx.Param:
    return nnx.Param(jnp.ones(size), out_sharding=(axis,), eager_sharding=False)


def rms_norm(x: Float[Array, "... D"], scale: Array, eps: float) -> Float[Array, "... D"]:
    """x / rms(x) * scale, in float32 (Zhang & Sennrich, arXiv:1910.07467)."""
    x = x.astype(jnp.float32)
    return x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + eps) * scale.astype(jnp.float32)


def rotate(
    x: Float[Array, "B T H h"], positions: Int[Array, "B T"], frequencies: np.ndarray
) -> Float[Array, "B T H h"]:
    """Rotary position embedding by (h/2,) `frequencies`, halves convention (Su et al., arXiv:2104.09864)."""
    half = x.shape[-1] // 2
    angles = positions[..., None] * jnp.asarray(frequencies)  # (B, T, h/2)
    cos, sin = jnp.cos(angles)[:, :, None], jnp.sin(angles)[:, :, None]
    left, right = x[..., :half], x[..., half:]
    return jnp.concatenate([left * cos - right * sin, right * cos + left * sin], axis=-1)


class FeatureMajor(struct.PyTreeNode):
    """A matrix with a row for each output: what a CPU reads as it lies, where a product has few rows."""

    rows: Float[Array, "O I"]

    def product(self, x: Float[Array, "... I"], dtype: str) -> Float[Array, "... O"]:
        flat = x.reshape(-1, x.shape[-1]).astype(dtype)
        count = len(flat)
        if dtype == "bfloat16" and count < FEWEST_ROWS:
            flat = jnp.pad(flat, ((0, FEWEST_ROWS - count), (0, 0)))
        out = jax.lax.dot_general(
            self.rows.astype(dtype), flat, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32
        )
        # Fenced: XLA would take operands and transposition for x @ rows.T, whose kernel repacks the matrix.
        return jax.lax.optimization_barrier(out).T[:count].reshape(*x.shape[:-1], -1)


FEWEST_ROWS = 8
"""Of a product of bfloat16: with fewer, XLA takes a kernel on a CPU that is several times slower."""


def project(x: Float[Array, "... I"], weight: Array | FeatureMajor, dtype: str) -> Float[Array, "... O"]:
    """x @ weight in `dtype` with float32 accumulation; two-dimensional, as CPU kernels want it."""
    if isinstance(weight, FeatureMajor):
        return weight.product(x, dtype)
    flat = weight.reshape(x.shape[-1], -1).astype(dtype)
    out = jnp.dot(x.reshape(-1, x.shape[-1]).astype(dtype), flat, preferred_element_type=jnp.float32)
    return out.reshape(*x.shape[:-1], -1)


class Adapter(nnx.Module):
    """Low-rank factors beside a matrix whose first `inputs` axes are contracted: a random, b zero, so that
    nothing changes yet (Hu et al., arXiv:2106.09685). The axis of the rank stays whole on a mesh.
    """

    def __init__(self, key: Array, shape: tuple[int, ...], axes: Axes, inputs: int, rank: int) -> None:
        scale = math.prod(shape[:inputs]) ** -0.5
        self.a = _param(key, (*shape[:inputs], rank), (*axes[:inputs], None), scale)
        self.b = _zeros((rank, *shape[inputs:]), (None, *axes[inputs:]))


class Quantized(nnx.Module):
    """A frozen matrix's codes and scale (`models.quantize`); zeros until a matrix is quantised."""

    def __init__(self, kind: str, shape: tuple[int, ...], axes: Axes, inputs: int) -> None:
        for name, leaf in shapes(kind, shape, inputs).items():
            zeros = jnp.zeros(leaf.shape, leaf.dtype)
            setattr(self, name, nnx.Param(zeros, out_sharding=axes, eager_sharding=False))


Projections: TypeAlias = "SelfAttention | GatedMLP"


def add_matrix(
    block: Projections,
    name: str,
    rngs: nnx.Rngs,
    shape: tuple[int, ...],
    axes: Axes,
    scale: float,
) -> None:
    """The projection `name` of a block, as floats or quantised, and its adapter where the config has one."""
    c, inputs = block.config, inputs_of(name)
    if c.quantize == "none":
        setattr(block, name, _param(rngs.params(), shape, axes, scale))
    else:
        setattr(block, name, Quantized(c.quantize, shape, axes, inputs))
    if c.lora is not None and name in c.lora.names:
        setattr(block, f"{name}_lora", Adapter(rngs.params(), shape, axes, inputs, c.lora.rank))


def matrix(block: Projections, name: str) -> Array | FeatureMajor:
    """W of the projection `name`."""
    weight, kind = getattr(block, name), block.config.quantize
    if kind == "none":
        return weight.get_value()
    return dequantized(weight.codes[...], weight.scale[...], kind)


def projected(block: Projections, name: str, x: Float[Array, "... I"]) -> Float[Array, "... O"]:
    """x W, and (alpha / rank) (x a) b where the block has an adapter beside W; each as `project` does it."""
    c = block.config
    out = project(x, matrix(block, name), c.dtype)
    if c.lora is None or name not in c.lora.names:
        return out
    adapter = getattr(block, f"{name}_lora")
    return out + c.lora.scale * project(project(x, adapter.a[...], c.dtype), adapter.b[...], c.dtype)


class SelfAttention(nnx.Module):
    def __init__(self, c: ModelConfig, rngs: nnx.Rngs) -> None:
        self.config = nnx.static(c)
        scale = c.width**-0.5
        for name, heads, axis in (
            ("q", c.heads, "heads"),
            ("k", c.kv_heads, "kv_heads"),
            ("v", c.kv_heads, "kv_heads"),
        ):
            add_matrix(self, name, rngs, (c.width, heads, c.head_dim), ("embed", axis, "head_dim"), scale)
        scale = (2 * c.layers * c.heads * c.head_dim) ** -0.5
        shape = (c.heads, c.head_dim, c.width)
        add_matrix(self, "out", rngs, shape, ("heads", "head_dim", "embed"), scale)
        if c.has_qkv_bias:
            self.q_bias = _zeros((c.heads, c.head_dim), ("heads", "head_dim"))
            self.k_bias = _zeros((c.kv_heads, c.head_dim), ("kv_heads", "head_dim"))
            self.v_bias = _zeros((c.kv_heads, c.head_dim), ("kv_heads", "head_dim"))
        if c.has_qk_norm:
            self.q_norm, self.k_norm = _ones(c.head_dim, "head_dim"), _ones(c.head_dim, "head_dim")

    def queries_keys_values(self, x: Array, positions: Array) -> tuple[Array, Array, Array]:
        c = self.config
        q, k, v = (projected(self, name, x).reshape(*x.shape[:-1], -1, c.head_dim) for name in "qkv")
        if c.has_qkv_bias:
            q, k, v = q + self.q_bias[...], k + self.k_bias[...], v + self.v_bias[...]
        if c.has_qk_norm:
            q, k = rms_norm(q, self.q_norm[...], c.norm_eps), rms_norm(k, self.k_norm[...], c.norm_eps)
        frequencies = inverse_frequencies(c.head_dim, c.rope_theta, c.rope_scaling)
        q, k = rotate(q, positions, frequencies), rotate(k, positions, frequencies)
        return q, k.astype(c.dtype), v.astype(c.dtype)

    def mixed(self, attended: Float[Array, "B T H h"]) -> Float[Array, "B T D"]:
        return projected(self, "out", attended.reshape(*attended.shape[:-2], -1))


class GatedMLP(nnx.Module):
    """down(silu(gate(x)) * up(x)) (Shazeer, arXiv:2002.05202)."""

    def __init__(self, c: ModelConfig, rngs: nnx.Rngs) -> None:
        self.config = nnx.static(c)
        add_matrix(self, "gate", rngs, (c.width, c.mlp_width), ("embed", "mlp"), c.width**-0.5)
        add_matrix(self, "up", rngs, (c.width, c.mlp_width), ("embed", "mlp"), c.width**-0.5)
        scale = (2 * c.layers * c.mlp_width) ** -0.5
        add_matrix(self, "down", rngs, (c.mlp_width, c.width), ("mlp", "embed"), scale)

    def __call__(self, x: Array) -> Array:
        gated = jax.nn.silu(projected(self, "gate", x)) * projected(self, "up", x)
        return projected(self, "down", gated)


class Block(nnx.Module):
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
        """Queries, keys and values; a row's from that row alone."""
        normed = rms_norm(x, self.attention_norm[...], self.config.norm_eps)
        return self.attention.queries_keys_values(normed, positions)

    def after(self, x: Array, attended: Array) -> Array:
        """The residual stream behind attention and MLP; a row's from that row alone."""
        x = x + self.attention.mixed(attended)
        return x + self.mlp(rms_norm(x, self.mlp_norm[...], self.config.norm_eps))


class Transformer(nnx.Module):
    def __init__(self, c: ModelConfig, rngs: nnx.Rngs) -> None:
        self.config = nnx.static(c)
        self.embedding = _param(rngs.params(), (c.vocab_size, c.width), ("vocab", "embed"), c.width**-0.5)

        @nnx.split_rngs(splits=c.layers)
        @nnx.vmap(in_axes=0, out_axes=0, transform_metadata={nnx.PARTITION_NAME: "layers"})
        def stacked(rngs: nnx.Rngs) -> Block:
            return Block(c, rngs)

        self.blocks = stacked(rngs)
        self.norm = _ones(c.width, "embed")
        if not c.is_tied:
            self.head = _param(rngs.params(), (c.width, c.vocab_size), ("embed", "vocab"), c.width**-0.5)

    def __call__(
        self,
        tokens: Int[Array, "B T"],
        positions: Int[Array, "B T"],
        attend: Attention,
        cache: Any,
        remat: Remat,
        rows: NamedSharding | None = None,
        apart: Sequence[Any] = (),
    ) -> tuple[Float[Array, "B T D"], Any]:
        """Hidden states after the last norm, and the cache with these tokens in it.

        With an exact attention (`models.exact`) only a layer's inputs are kept for the backward pass,
        whatever `remat` says. `rows`: how they lie on a mesh, in every layer. XLA would have them lie as the
        parameters do: on an fsdp mesh, a share of the width of all rows on each device. `apart`: the layers'
        parameters one by one, where they are not stacked; there is no scan then.
        """
        graph, layers = nnx.split(self.blocks)
        read = self.config.params_dtype

        def layer_by(attend: Attention, fixed: tuple, inputs: tuple) -> tuple[Array, Any]:
            (index, positions), (params, x, cache) = fixed, inputs
            if is_exact(attend):
                params = with_matrices_in(params, self.config.dtype)
            return nnx.merge(graph, params)(index, x, positions, attend, cache)

        def one_layer(carry: tuple[Array, Any], layer: tuple[Any, Any]) -> tuple[tuple[Array, Any], None]:
            index, params = layer
            params = as_published(params, read)
            x, cache = as_attended(layer_by, attend, (index, positions), (params, *carry))
            return (placed(x), cache), None

        def last_norm(attend: Attention, fixed: None, inputs: tuple[Array, Array]) -> Array:
            x, scale = inputs
            return rows_of(attend)(lambda x: rms_norm(x, scale, self.config.norm_eps), x)

        def placed(x: Array) -> Array:
            return x if rows is None else jax.lax.with_sharding_constraint(x, rows)

        x = placed(as_published(self.embedding[...][tokens].astype(jnp.float32), read))
        if apart:
            for index, params in enumerate(apart):
                (x, cache), _ = one_layer((x, cache), (index, params))
        else:
            body = one_layer if is_exact(attend) else rematerialised(one_layer, remat)
            (x, cache), _ = jax.lax.scan(body, (x, cache), (jnp.arange(self.config.layers), layers))
        return as_attended(last_norm, attend, None, (x, as_published(self.norm[...], read))), cache


def head_logits(
    weight: Array | FeatureMajor, hidden: Float[Array, "n D"], is_tied: bool, dtype: str
) -> Float[Array, "n V"]:
    """The LM head: `weight` is the embedding (V, D) where it is tied, else (D, V)."""
    if not is_tied or isinstance(weight, FeatureMajor):
        return project(hidden, weight, dtype)
    return jax.lax.dot_general(  # the embedding as it lies: CPUs are slow to transpose bfloat16
        hidden.astype(dtype),
        weight.astype(dtype),
        (((1,), (1,)), ((), ())),
        preferred_element_type=jnp.float32,
    )
