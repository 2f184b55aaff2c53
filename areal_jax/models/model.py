"""A model split at the border: a static graph definition beside a plain tree of parameters."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import NamedSharding
from jaxtyping import Array, Float, Int

from areal_jax.models.attention import Attention, KVPages
from areal_jax.models.config import ModelConfig
from areal_jax.models.exact import as_published, in_tiles, rounded
from areal_jax.models.lora import adapters_of, base_of, merge_adapters, with_adapters
from areal_jax.models.quantize import dequantize_tree, quantize_tree
from areal_jax.models.transformer import Remat, Transformer, head_logits
from areal_jax.types import ArealError

Params = Any
"""Nested dict of arrays; layers are stacked along axis 0 of every leaf under `blocks`.

Or as `generation.layout` has them for serving: `blocks` a tuple of layers, matrices `FeatureMajor`, and a
`head` of that form also where the embedding is tied.
"""


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
        """A quantised matrix counts as the one it stands for."""
        adapters = self.abstract_params if self.base is self else adapters_of(self.abstract_params)
        own = sum(leaf.size for leaf in jax.tree.leaves(adapters))
        return own if self.base is self else own + self.base.parameter_count

    @cached_property
    def base(self) -> Model:
        """The same model in floats and without adapters: what sources hold, and what a run is merged into."""
        plain = dataclasses.replace(self.config, lora=None, quantize="none")
        return self if plain == self.config else Model(plain, self.tokenizer)

    def init(self, seed: int) -> Params:
        """Random parameters, float32 but for codes: a function of the seed alone, as those of `base` are."""
        if self.base is self:
            return self._init(jax.random.key(seed))
        return self.from_base(self.base.init(seed), seed)

    def from_base(self, params: Params, seed: int) -> Params:
        """Parameters of `base` made this model's: matrices quantised, and adapters that change no output yet.

        Other leaves are the arrays given, not copies.
        """
        if self.config.quantize != "none":
            params = self._quantize(params)
        if self.config.lora is None:
            return params
        return with_adapters(params, self._first_adapters(jax.random.fold_in(jax.random.key(seed), 1)))

    @cached_property
    def _quantize(self) -> Callable[[Params], Params]:
        return jax.jit(partial(quantize_tree, kind=self.config.quantize))

    @cached_property
    def _first_adapters(self) -> Callable[[Array], Params]:
        def make(key: Array) -> Params:
            return adapters_of(nnx.to_pure_dict(nnx.state(Transformer(self.config, nnx.Rngs(key)))))

        return jax.jit(make)

    def merged(self, params: Params) -> Params:
        """Parameters of `base`, float32, that compute the same: every W becomes W + (alpha / rank) a b."""
        lora, params = self.config.lora, self._in_floats(params)
        return params if lora is None else merge_adapters(params, lora.scale)

    def without_adapters(self, params: Params) -> Params:
        """Parameters of `base`, float32: what the adapters belong to."""
        return base_of(self._in_floats(params))

    def _in_floats(self, params: Params) -> Params:
        kind = self.config.quantize
        return params if kind == "none" else dequantize_tree(params, kind)

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
        apart = ()
        if isinstance(params["blocks"], tuple):
            apart = params["blocks"]
            params = {name: params[name] for name in self.abstract_params} | {"blocks": apart[0]}
        transformer = nnx.merge(self._abstract[0], params)
        return transformer(tokens, positions, attend, cache, remat, rows, apart)

    def logits(self, params: Params, hidden: Float[Array, "n D"]) -> Float[Array, "n V"]:
        """Float32 logits; ids beyond the tokenizer's vocabulary are neither sampled nor normalised over."""
        return self.head_by_rows(self.head_weight(params), hidden)

    def head_by_rows(self, weight: Array, hidden: Float[Array, "n D"]) -> Float[Array, "n V"]:
        """`head` in the numerics of the model; it has no gradient where those are exact."""
        if self.config.numerics == "bounded":
            return self.head(weight, hidden)
        weight = rounded(weight, self.config.dtype).astype(self.config.dtype)  # once for all tiles
        return in_tiles(partial(self.head, weight), hidden)

    def head_weight(self, params: Params) -> Array:
        """The LM head's parameters: the embedding (V, D) where it is tied, else (D, V)."""
        return as_published(params["head" if "head" in params else "embedding"], self.config.params_dtype)

    def in_rows(self, f: Callable[..., Any]) -> Callable[..., Any]:
        """`f`, whose results' rows come from its arguments' rows, in the numerics of the model.

        It has no gradient where those are exact.
        """
        return f if self.config.numerics == "bounded" else partial(in_tiles, f)

    def head(self, weight: Array, hidden: Float[Array, "n D"]) -> Float[Array, "n V"]:
        """`logits` by the head's weight alone."""
        logits = head_logits(weight, hidden, self.config.is_tied, self.config.dtype)
        known = self.tokenizer.vocab_size
        if known == self.config.vocab_size:
            return logits
        return jnp.where(jnp.arange(self.config.vocab_size) < known, logits, -jnp.inf)

    def kv_pages(self, pages: int, page_tokens: int, dtype: str) -> KVPages:
        """`pages` of them, zeros. Raises ArealError where exact numerics would lose bits in them."""
        c = self.config
        if c.numerics == "exact" and dtype not in ("float32", c.dtype):
            raise ArealError(
                f"trainer.numerics=exact with KV in {dtype}: the trainer reads keys and values of "
                f"model.dtype={c.dtype}; hold KV in that, or use trainer.numerics=bounded"
            )
        return KVPages.zeros(c.layers, pages, page_tokens, c.kv_heads, c.head_dim, dtype)
