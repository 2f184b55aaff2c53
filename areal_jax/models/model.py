"""A model split at the border: a static graph definition beside a plain tree of parameters."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import NamedSharding
from jaxtyping import Array, Float, Int

from areal_jax.models.attention import Attention, KVPages
from areal_jax.models.config import ModelConfig
from areal_jax.models.lora import adapters_of, merge_adapters, with_adapters
from areal_jax.models.transformer import Remat, Transformer, head_logits

Params = Any
"""Nested dict of arrays; layers are stacked along axis 0 of every leaf under `blocks`."""


@dataclass(frozen=True)
class Model:
    """The definition as pure functions of params; hashable, so that jitted functions can close over it."""

    config: ModelConfig
    tokenizer: Any
    """A `tasks.tokenizers.Tokenizer`."""

    @cached_property
    def _abstract(self) -> tuple[Any, Any]:
        return nnx.split(nnx.eval_shape(lambda: Transformer(self.config, nnx.Rngs(0))))

    @cached_property
    def abstract_params(self) -> Params:
        """The tree of jax.ShapeDtypeStruct."""
        return nnx.to_pure_dict(self._abstract[1])

    @cached_property
    def logical_axes(self) -> Params:
        """The tree of logical axis names, a PartitionSpec a leaf."""
        return nnx.to_pure_dict(nnx.get_partition_spec(self._abstract[1]))

    @property
    def parameter_count(self) -> int:
        return sum(leaf.size for leaf in jax.tree.leaves(self.abstract_params))

    @cached_property
    def base(self) -> Model:
        """The same model without adapters: what sources hold, and what adapters are merged into."""
        if self.config.lora is None:
            return self
        return Model(dataclasses.replace(self.config, lora=None), self.tokenizer)

    def init(self, seed: int) -> Params:
        """Random float32 parameters, a function of the seed alone; the base's are the same with adapters."""
        if self.config.lora is None:
            return self._init(jax.random.key(seed))
        return self.adapted(self.base.init(seed), seed)

    def adapted(self, params: Params, seed: int) -> Params:
        """Parameters of `base` with the adapters that this model adds, which change no output yet.

        The base's are the arrays given, not copies.
        """
        if self.config.lora is None:
            return params
        return with_adapters(params, self._first_adapters(jax.random.fold_in(jax.random.key(seed), 1)))

    @cached_property
    def _first_adapters(self) -> Callable[[Array], Params]:
        def make(key: Array) -> Params:
            return adapters_of(nnx.to_pure_dict(nnx.state(Transformer(self.config, nnx.Rngs(key)))))

        return jax.jit(make)

    def merged(self, params: Params) -> Params:
        """Parameters of `base`, float32, that compute the same: every W becomes W + (alpha / rank) a b."""
        lora = self.config.lora
        return params if lora is None else merge_adapters(params, lora.scale)

    @cached_property
    def _init(self) -> Callable[[Array], Params]:
        def make(key: Array) -> Params:
            return nnx.to_pure_dict(nnx.state(Transformer(self.config, nnx.Rngs(key))))

        return jax.jit(make)

    def hidden(
        self,
        params: Params,
        tokens: Int[Array, "B T"],
        positions: Int[Array, "B T"],
        attend: Attention,
        cache: Any = None,
        remat: Remat = "none",
        rows: NamedSharding | None = None,
    ) -> tuple[Float[Array, "B T D"], Any]:
        return nnx.merge(self._abstract[0], params)(tokens, positions, attend, cache, remat, rows)

    def logits(self, params: Params, hidden: Float[Array, "n D"]) -> Float[Array, "n V"]:
        """Float32 logits; ids beyond the tokenizer's vocabulary are neither sampled nor normalised over."""
        return self.head(self.head_weight(params), hidden)

    def head_weight(self, params: Params) -> Array:
        """The LM head's parameters: the embedding (V, D) where it is tied, else (D, V)."""
        return params["embedding" if self.config.is_tied else "head"]

    def head(self, weight: Array, hidden: Float[Array, "n D"]) -> Float[Array, "n V"]:
        """`logits` by the head's weight alone."""
        logits = head_logits(weight, hidden, self.config.is_tied, self.config.dtype)
        known = self.tokenizer.vocab_size
        if known == self.config.vocab_size:
            return logits
        return jnp.where(jnp.arange(self.config.vocab_size) < known, logits, -jnp.inf)

    def kv_pages(self, pages: int, page_tokens: int, dtype: str) -> KVPages:
        c = self.config
        return KVPages.zeros(c.layers, pages, page_tokens, c.kv_heads, c.head_dim, dtype)
