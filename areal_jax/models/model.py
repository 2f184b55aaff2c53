"""A model without its parameters: pure functions that take the parameters, a tree of arrays, as argument."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial, wraps
from typing import Any

import chex
import jax
import jax.numpy as jnp
from flax import nnx
from jax.core import Tracer
from jax.sharding import Mesh
from jaxtyping import Array, Bool, Float, Int

from areal_jax.models.attention import Attention, PackedAttention, PagedAttention
from areal_jax.models.config import EXPERT_PROJECTIONS, ModelConfig
from areal_jax.models.exact import ExactPackedAttention, ExactPagedAttention, in_tiles, rounded
from areal_jax.models.kernels.packed_attention import Kernel
from areal_jax.models.kv_pages import KVPages, PagedKernel
from areal_jax.models.lora import adapters_of, base_of, merge_adapters, with_adapters
from areal_jax.models.products import product
from areal_jax.models.projections import FeatureMajor, project
from areal_jax.models.quantize import dequantize_tree, quantize_tree
from areal_jax.models.transformer import PLAIN, Execution, Transformer, as_published
from areal_jax.types import ArealError, Batch, PreparedBatch

Params = Any
"""Nested dict of arrays; layers are stacked along axis 0 of every leaf under `blocks`.

`models.device_layout` converts the tree for decoding: `blocks` is then a tuple of layers; on a CPU,
matrices may be `FeatureMajor`, and the LM head's matrix is stored as `head`, even if the head is tied to the
embedding.
"""


CPU_OPTIONS = {"xla_backend_optimization_level": 1}
"""XLA's options for a program that draws parameters on a CPU.

The program runs once. At LLVM's level 1 it has the same bits as at XLA's default, is as fast, and compiles in
a quarter of the time; at level 0 no multiplication is fused with an addition, which changes bits.
"""

Draw = Callable[[Any, Array], Params]


def drawing(draw: Draw) -> Draw:
    """Returns `draw`, a method of a model and a random key, jitted; on a CPU with `CPU_OPTIONS`."""
    plain = jax.jit(draw, static_argnums=0)
    on_cpu = jax.jit(draw, static_argnums=0, compiler_options=CPU_OPTIONS)

    @wraps(draw)
    def drawn(model: Any, key: Array) -> Params:
        # A traced key is part of another program, which has its own options and may be lowered for another
        # platform: jax allows options for the outermost jit only. A concrete key is where the draw will run.
        is_on_cpu = not isinstance(key, Tracer) and {one.platform for one in key.devices()} == {"cpu"}
        return (on_cpu if is_on_cpu else plain)(model, key)

    return drawn


@dataclass(frozen=True)
class Model:
    """A model definition as pure functions of parameters; hashable, so jitted functions can close over it."""

    config: ModelConfig
    tokenizer: Any
    """The model's tokenizer, a `tasks.tokenizers.Tokenizer`."""

    @cached_property
    def _abstract(self) -> tuple[Any, Any]:
        return nnx.split(nnx.eval_shape(lambda: Transformer(self.config, nnx.Rngs(0))))

    @cached_property
    def abstract_params(self) -> Params:
        """Shapes and dtypes of the parameters: a tree of jax.ShapeDtypeStruct."""
        return nnx.to_pure_dict(self._abstract[1])

    @cached_property
    def logical_axes(self) -> Params:
        """Names of each parameter's axes (embed, mlp, ...): a tree with a PartitionSpec per leaf."""
        return nnx.to_pure_dict(nnx.get_partition_spec(self._abstract[1]))

    @property
    def parameter_count(self) -> int:
        """Number of parameters, adapters included; a quantised matrix counts like the matrix in floats."""
        leaves = jax.tree.leaves((self.base.abstract_params, adapters_of(self.abstract_params)))
        return sum(leaf.size for leaf in leaves)

    @cached_property
    def expert_parameter_count(self) -> int:
        """Number of parameters of all experts; 0 without a mixture of experts."""
        named = jax.tree.leaves_with_path(self.base.abstract_params)
        return sum(leaf.size for path, leaf in named if path[-1].key in EXPERT_PROJECTIONS)

    @property
    def active_parameter_count(self) -> int:
        """Number of parameters that a token passes through: of all experts only its own."""
        c = self.config
        if not c.experts:
            return self.parameter_count
        idle = c.experts - c.experts_per_token
        return self.parameter_count - self.expert_parameter_count * idle // c.experts

    @cached_property
    def base(self) -> Model:
        """This model without quantisation and adapters: the model of pretrained and of merged parameters."""
        plain = dataclasses.replace(self.config, lora=None, quantize="none")
        return self if plain == self.config else Model(plain, self.tokenizer)

    def with_codes(self, kind: str) -> Model:
        """Returns the model with projections stored as codes of `kind` (`quantize_tree`); none: this
        model. Raises ArealError if this model's projections are codes already.
        """
        if kind == "none":
            return self
        if self.config.quantize != "none":
            raise ArealError(
                f"a model with model.quantize={self.config.quantize} cannot be quantised again, to {kind}; "
                "set generation.quantize=none"
            )
        return Model(dataclasses.replace(self.config, quantize=kind), self.tokenizer)

    def init(self, seed: int) -> Params:
        """Returns random parameters, float32, except for quantised codes; the seed alone decides them.

        Their bits are the same on any number of devices and processes. They differ between kinds of device:
        x86 CPUs with fused multiply-add (AVX2, AVX-512) have one set of bits, those without it another. In
        a jitted program of the caller, codes may differ by 1, because XLA fuses the draw with the rounding.
        """
        if self.base is self:
            return self._random(jax.random.key(seed))
        return self.from_base(self.base.init(seed), seed)

    def from_base(self, params: Params, seed: int) -> Params:
        """Returns this model's parameters, computed from `params`, the parameters of the model `base`.

        Matrices are quantised and adapters added as the config says. Adapters are drawn from `seed`, but do
        not change the model's outputs until they are trained. All other leaves are the arrays in `params`,
        not copies.
        """
        if self.config.quantize != "none":
            params = quantize_tree(params, self.config.quantize)
        if self.config.lora is None:
            return params
        return with_adapters(params, self._first_adapters(jax.random.fold_in(jax.random.key(seed), 1)))

    @drawing
    def _first_adapters(self, key: Array) -> Params:
        return adapters_of(self._random(key))

    def merged(self, params: Params) -> Params:
        """Returns float32 parameters of `base`: a matrix W with adapter (a, b) is W + (alpha / rank) a b."""
        lora, params = self.config.lora, dequantize_tree(params, self.config.quantize)
        return params if lora is None else merge_adapters(params, lora.scale)

    def without_adapters(self, params: Params) -> Params:
        """Returns float32 parameters of `base`: matrices dequantised, adapters left out."""
        return base_of(dequantize_tree(params, self.config.quantize))

    @drawing
    def _random(self, key: Array) -> Params:
        return nnx.to_pure_dict(nnx.state(Transformer(self.config, nnx.Rngs(key))))

    def hidden(
        self,
        params: Params,
        tokens: Int[Array, "B T"],
        positions: Int[Array, "B T"],
        attend: Attention,
        cache: Any = None,
        execution: Execution = PLAIN,
        *,
        experts: Int[Array, "L B T k"] | None = None,
    ) -> tuple[Float[Array, "B T D"], Any]:
        """Returns the hidden states after the last norm, and the cache with these tokens' KV added.

        `cache`: KVPages if `attend` is paged attention; RouterSums or None if it is attention over packed
        rows, which adds what the routers did. `experts`: those that tokens pass through; NO_EXPERT: those
        that the router chooses for the token; None: it chooses all.
        """
        chex.assert_rank(tokens, 2)
        chex.assert_equal_shape([tokens, positions])
        chex.assert_type([tokens, positions], int)
        self._require_float64()
        apart = ()
        if isinstance(params["blocks"], tuple):
            apart = params["blocks"]
            params = {name: params[name] for name in self.abstract_params} | {"blocks": apart[0]}
        transformer = nnx.merge(self._abstract[0], params)
        return transformer(tokens, positions, attend, cache, execution, apart=apart, experts=experts)[:2]

    def _require_float64(self) -> None:
        """Raise ArealError if the config accumulates in float64, but JAX would use float32 instead."""
        kind = self.config.accumulate
        if jnp.zeros(()).dtype != kind == "float64":
            raise ArealError(
                f"model: accumulate={kind} with jax_enable_x64=False: JAX would compute in float32; enable "
                "jax_enable_x64 or set dtype=float32 and accumulate=float32"
            )

    def logits(self, params: Params, hidden: Float[Array, "n D"]) -> Float[Array, "n V"]:
        """Returns the logits of hidden states; ids beyond the tokenizer's vocabulary get -inf."""
        chex.assert_shape(hidden, (None, self.config.width))
        return self.head_by_rows(self.head_weight(params), hidden)

    def head_by_rows(self, weight: Array, hidden: Float[Array, "n D"]) -> Float[Array, "n V"]:
        """Returns `head(weight, hidden)`; with exact numerics computed in tiles and without a gradient."""
        if self.config.numerics == "bounded":
            return self.head(weight, hidden)
        weight = rounded(weight, self.config.dtype).astype(self.config.dtype)  # once for all tiles
        return in_tiles(partial(self.head, weight), hidden)

    def head_weight(self, params: Params) -> Array:
        """Returns the LM head's matrix, rounded to `params_dtype`.

        If the head is tied to the embedding, this is the embedding, (V, D); else the matrix is (D, V).
        """
        return as_published(params["head" if "head" in params else "embedding"], self.config.params_dtype)

    def in_rows(self, f: Callable[..., Any]) -> Callable[..., Any]:
        """Returns `f`; with exact numerics, a function that computes `f` in tiles and has no gradient.

        Row i of the result of `f` may depend only on row i of its arguments (`exact.in_tiles`).
        """
        return f if self.config.numerics == "bounded" else partial(in_tiles, f)

    def head(self, weight: Array, hidden: Float[Array, "n D"]) -> Float[Array, "n V"]:
        """Returns the logits of hidden states; ids beyond the tokenizer's vocabulary get -inf.

        The logits are in `config.accumulate`. `weight`: the LM head's matrix, as `head_weight` returns it.
        """
        dtype = self.config.dtype
        if not self.config.is_tied or isinstance(weight, FeatureMajor):
            logits = project(hidden, weight, dtype)
        else:  # reads the embedding untransposed: CPUs transpose bfloat16 slowly
            logits = product(hidden, weight, dtype, axis=1)
        known = self.tokenizer.vocab_size
        if known == self.config.vocab_size:
            return logits
        return jnp.where(jnp.arange(self.config.vocab_size) < known, logits, -jnp.inf)

    def packed_attention(
        self, batch: Batch | PreparedBatch, kernel: Kernel | None, mesh: Mesh | None = None
    ) -> Attention:
        """Returns the attention over a batch's packed rows, exact or bounded as `config.numerics` says.

        `kernel`: the attention kernel to use (None: JAX code); with exact numerics only the backward pass
        uses it. `mesh`: the trainer's mesh, on which each device computes its own rows; None: XLA chooses the
        split.
        """
        bounded = PackedAttention(batch.segment_ids, batch.subtree_ends, kernel, mesh)
        if self.config.numerics == "bounded":
            return bounded
        return ExactPackedAttention.of(bounded, batch.positions, batch.previous)

    def paged_attention(
        self,
        table: Int[Array, "N M"],
        positions: Int[Array, "N C"],
        is_written: Bool[Array, "N C"],
        kernel: PagedKernel | None = None,
        ends_early: bool = True,
    ) -> Attention:
        """Returns the attention over pages of KV, exact or bounded as `config.numerics` says.

        The arguments are the fields of `PagedAttention`; exact numerics ignore the last two.
        """
        if self.config.numerics == "exact":
            return ExactPagedAttention(table, positions, is_written)
        return PagedAttention(table, positions, is_written, kernel, ends_early)

    def kv_pages(
        self,
        pages: int,
        page_tokens: int,
        dtype: str,
        *,
        platform: str | None = None,
        keeps_experts: bool = False,
    ) -> KVPages:
        """Returns KV pages of zeros: the scratch page 0 and `pages` pages, of `page_tokens` tokens each.

        `platform`: that of the devices that hold them; None: of jax's default device. `keeps_experts`:
        whether they have the numbers of each token's experts, too. Raises ArealError if
        numerics are exact and `dtype` would round keys or values.
        """
        c = self.config
        if c.numerics == "exact" and dtype not in ("float32", c.dtype):
            raise ArealError(
                f"trainer.numerics=exact with a KV cache in {dtype}: hosts would read rounded keys and "
                f"values, but the trainer reads them in model.dtype={c.dtype}; set "
                f"generation.kv_dtype={c.dtype} or trainer.numerics=bounded"
            )
        sizes = (c.layers, pages, page_tokens, c.kv_heads, c.head_dim)
        kept = c.experts_per_token if keeps_experts else 0
        return KVPages.zeros(*sizes, dtype, platform=platform, experts=kept)
