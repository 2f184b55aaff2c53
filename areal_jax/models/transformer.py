"""The one model definition: a decoder-only transformer (GQA, RoPE, RMSNorm, gated MLP) in Flax NNX.

The trainer's packed forward, the generator's prefill and its decode step call the same `Transformer` with
different kinds of `Attention`. Layers are stacked along a leading axis L and run by a scan. Residuals, norms,
rotary embeddings and softmax are in `config.accumulate`, float32 except in tests; matrix products read
`config.dtype` and write `config.accumulate`, but the backward pass reads and writes `config.activations`.
Each parameter is declared with its shape, initializer and logical axis names, which `parallel.mesh` maps onto
devices.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from jaxtyping import Array, Float, Int

from areal_jax.models.attention import Attention, with_routes
from areal_jax.models.blockwise import KEPT
from areal_jax.models.config import ModelConfig, is_router
from areal_jax.models.exact import as_attended, is_exact, rounded, rows_of, with_matrices_in
from areal_jax.models.experts import ExpertKernels, Routes
from areal_jax.models.mlp import ROUTES, GatedMLP, Mixture
from areal_jax.models.projections import Projections, normal, ones, param
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
    mesh: Mesh | None = None
    """The parameters' mesh, on whose devices a mixture of experts is split; None: one device."""
    expert_kernels: Callable[[], ExpertKernels] | None = None
    """Returns what computes the experts' products (`kernels.expert_products`); None: JAX code does."""


PLAIN = Execution()


def rematerialised(layer: Callable[..., Any], remat: Remat) -> Callable[..., Any]:
    """Returns `layer` with a backward pass that recomputes activations instead of storing them.

    `remat`: none (it stores all), layer (recomputes all), dots (all but results of matrix products and
    attention).
    """
    if remat == "none":
        return layer
    policies = jax.checkpoint_policies
    if remat == "layer":
        return jax.checkpoint(layer, policy=policies.save_only_these_names(ROUTES))
    named = policies.save_only_these_names(KEPT, ROUTES)
    return jax.checkpoint(layer, policy=policies.save_from_both_policies(policies.checkpoint_dots, named))


@partial(jax.custom_vjp, nondiff_argnums=(1,))
def as_published(params: Any, dtype: str) -> Any:
    """Returns the parameters rounded to `dtype`, as if published in `dtype`; gradients pass unchanged.

    Routers are published whole.
    """
    return jax.tree_util.tree_map_with_path(
        lambda path, leaf: leaf if is_router(path) else rounded(leaf, dtype), params
    )


as_published.defvjp(
    lambda params, dtype: (as_published(params, dtype), None), lambda dtype, _, slope: (slope,)
)


def rms_norm(
    x: Float[Array, "... D"], scale: Array, eps: float, axes: int | tuple[int, ...] = -1
) -> Float[Array, "... D"]:
    """Returns x / rms(x) * scale, in x's dtype (Zhang & Sennrich, arXiv:1910.07467).

    `axes`: those over which the mean of squares is taken.
    """
    return x * jax.lax.rsqrt(jnp.mean(x * x, axis=axes, keepdims=True) + eps) * scale.astype(x.dtype)


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
                setattr(self, f"{name}_bias", param(jnp.zeros((heads, c.head_dim)), (axis, "head_dim")))
        scale = (2 * c.layers * c.heads * c.head_dim) ** -0.5
        shape = (c.heads, c.head_dim, c.width)
        self.add(rngs, "out", shape, ("heads", "head_dim", "embed"), scale)
        if c.has_qk_norm and c.is_qk_norm_joint:
            self.q_norm = param(jnp.ones((c.heads, c.head_dim)), ("heads", "head_dim"))
            self.k_norm = param(jnp.ones((c.kv_heads, c.head_dim)), ("kv_heads", "head_dim"))
        elif c.has_qk_norm:
            self.q_norm, self.k_norm = ones(c.head_dim, "head_dim"), ones(c.head_dim, "head_dim")

    def queries_keys_values(self, x: Array, positions: Array) -> tuple[Array, Array, Array]:
        c = self.config
        q, k, v = (self.projected(name, x).reshape(*x.shape[:-1], -1, c.head_dim) for name in "qkv")
        if c.has_qkv_bias:
            q, k, v = (
                x + getattr(self, f"{name}_bias")[...] for x, name in zip((q, k, v), "qkv", strict=True)
            )
        if c.has_qk_norm:
            axes = (-2, -1) if c.is_qk_norm_joint else -1
            q = rms_norm(q, self.q_norm[...], c.norm_eps, axes)
            k = rms_norm(k, self.k_norm[...], c.norm_eps, axes)
        if (most := c.clip_qkv) is not None:
            q, k, v = (jnp.clip(x, -most, most) for x in (q, k, v))
        frequencies = inverse_frequencies(c.head_dim, c.rope_theta, c.rope_scaling, c.accumulate)
        q, k = rotate(q, positions, frequencies), rotate(k, positions, frequencies)
        return q, k.astype(c.dtype), v.astype(c.dtype)

    def mixed(self, attended: Float[Array, "B T H h"]) -> Float[Array, "B T D"]:
        return self.projected("out", attended.reshape(*attended.shape[:-2], -1))


class Block(nnx.Module):
    """One layer: attention, then MLP; each reads the normed residual stream and adds its result to it."""

    def __init__(self, c: ModelConfig, rngs: nnx.Rngs) -> None:
        self.config = nnx.static(c)
        self.attention_norm = ones(c.width, "embed")
        self.attention = SelfAttention(c, rngs)
        self.mlp_norm = ones(c.width, "embed")
        self.mlp = Mixture(c, rngs) if c.experts else GatedMLP(c, rngs)

    def __call__(
        self,
        layer: Array,
        x: Array,
        positions: Array,
        attend: Attention,
        cache: Any,
        *,
        experts: Int[Array, "B T k"] | None,
        execution: Execution,
    ) -> tuple[tuple[Array, Any], Int[Array, "B T k"] | None]:
        """Returns (x after this layer, cache), and the experts of each token (None without a mixture).

        `experts`: those to use; None: the router chooses them.
        """
        by_rows = rows_of(attend)
        q, k, v = by_rows(self.before, x, positions)
        attended, cache = attend(layer, q, k, v, cache)
        if isinstance(self.mlp, GatedMLP):
            return (by_rows(self.after, x, attended), cache), None
        x, normed, routes = by_rows(self.routed, x, attended, *([] if experts is None else [experts]))
        mixed = self.mlp.mixed(normed, routes, attend, execution.mesh, execution.expert_kernels)
        cache = with_routes(attend, layer, cache, routes)
        return (by_rows(self.joined, x, normed, mixed), cache), routes.experts

    def before(self, x: Array, positions: Array) -> tuple[Array, Array, Array]:
        """Returns the queries, keys and values of the tokens in `x`, each computed from its token alone."""
        return self.attention.queries_keys_values(self._normed(x, self.attention_norm), positions)

    def after(self, x: Array, attended: Array) -> Array:
        """Returns `x` plus the projected attention output `attended`, plus the MLP's result for that sum."""
        assert isinstance(self.mlp, GatedMLP)
        x = x + self.attention.mixed(attended)
        return x + self.mlp(self._normed(x, self.mlp_norm))

    def routed(self, x: Array, attended: Array, experts: Array | None = None) -> tuple[Array, Array, Routes]:
        """Returns the sum after attention, what the experts read of it, and the routes of its tokens."""
        assert isinstance(self.mlp, Mixture)
        x = x + self.attention.mixed(attended)
        normed = rms_norm(x, self.mlp_norm[...], self.config.norm_eps)
        return x, normed.astype(self.config.activations), self.mlp.routes(normed, experts)

    def joined(self, x: Array, normed: Array, mixed: Array) -> Array:
        """Returns `x` plus the results of the experts, and of the MLP that all tokens share."""
        assert isinstance(self.mlp, Mixture)
        return x + self.mlp.with_shared(normed, mixed)

    def _normed(self, x: Array, scale: nnx.Param) -> Array:
        return rms_norm(x, scale[...], self.config.norm_eps).astype(self.config.activations)


class Transformer(nnx.Module):
    """Embedding, stacked blocks and last norm; `Model.head` applies the LM head."""

    def __init__(self, c: ModelConfig, rngs: nnx.Rngs) -> None:
        self.config = nnx.static(c)
        self.embedding = normal(rngs.params(), (c.vocab_size, c.width), ("vocab", "embed"), c.width**-0.5)

        @nnx.split_rngs(splits=c.layers)
        @nnx.vmap(in_axes=0, out_axes=0, transform_metadata={nnx.PARTITION_NAME: "layers"})
        def stacked(rngs: nnx.Rngs) -> Block:
            return Block(c, rngs)

        self.blocks = stacked(rngs)
        self.norm = ones(c.width, "embed")
        if not c.is_tied:
            self.head = normal(rngs.params(), (c.width, c.vocab_size), ("embed", "vocab"), c.width**-0.5)

    def __call__(
        self,
        tokens: Int[Array, "B T"],
        positions: Int[Array, "B T"],
        attend: Attention,
        cache: Any,
        execution: Execution,
        *,
        apart: Sequence[Any] = (),
        experts: Int[Array, "L B T k"] | None = None,
    ) -> tuple[Float[Array, "B T D"], Any, Int[Array, "L B T k"] | None]:
        """Returns the hidden states after the last norm, the cache with these tokens' KV added, and the
        experts that each token passed through (None without a mixture); `experts`: those to use.

        With an exact attention (`models.exact`) the forward pass keeps only each layer's inputs for the
        backward pass, whatever `execution.remat` is. `apart`: each layer's parameters as a tree of their own;
        the layers then run one after another. Empty: they are stacked, and run by a scan.
        """
        graph, layers = nnx.split(self.blocks)
        read = self.config.params_dtype

        # The backward pass runs a layer again, without a copy of its parameters and from a rounded `x`.
        rounds = self.config.activations != self.config.accumulate
        kept = self.config.dtype if execution.remat == "layer" and rounds else None

        def layer_by(attend: Attention, fixed: tuple, x: Array, others: tuple) -> Any:
            ((index, positions), experts), (params, cache) = fixed, others
            params = as_published(params, read)
            if is_exact(attend):
                params = with_matrices_in(params, self.config.dtype)
            block = nnx.merge(graph, params)
            return block(index, x, positions, attend, cache, experts=experts, execution=execution)

        def one_layer(carry: tuple[Array, Any], layer: tuple[Any, ...]) -> tuple[tuple[Array, Any], Any]:
            (x, cache), (index, params, experts) = carry, layer
            fixed, others = ((index, positions), experts), (params, cache)
            (x, cache), experts = as_attended(layer_by, attend, fixed, x, others, kept)
            return (placed(x), cache), experts

        def last_norm(attend: Attention, fixed: tuple, x: Array, scale: Array) -> tuple[Array, None]:
            return rows_of(attend)(lambda x: rms_norm(x, scale, self.config.norm_eps), x), None

        def placed(x: Array) -> Array:
            rows = execution.rows
            return x if rows is None else jax.lax.with_sharding_constraint(x, rows)

        x = placed(as_published(self.embedding[...][tokens].astype(self.config.accumulate), read))
        if apart:
            found = []
            for index, params in enumerate(apart):
                own = None if experts is None else experts[index]
                (x, cache), used = one_layer((x, cache), (index, params, own))
                found.append(used)
            experts = jnp.stack(found) if self.config.experts else None
        else:
            is_stored_whole = kept is None and not is_exact(attend)
            body = rematerialised(one_layer, execution.remat) if is_stored_whole else one_layer
            each = jnp.arange(self.config.layers), layers, experts
            (x, cache), experts = jax.lax.scan(body, (x, cache), each)
        x, _ = as_attended(last_norm, attend, (None, None), x, as_published(self.norm[...], read))
        return x, cache, experts
