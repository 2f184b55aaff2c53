"""A model's forward pass over packed rows: hidden states, and log-prob and entropy of each loss token."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Array, Float, Int

from areal_jax.algorithms import masked
from areal_jax.algorithms.logprobs import PackedTokens, TokenStats, packed_stats, token_stats
from areal_jax.algorithms.shapes import check_batch
from areal_jax.models.attention import Attention
from areal_jax.models.config import ModelConfig
from areal_jax.models.experts import RouterSums
from areal_jax.models.kernels import expert_products
from areal_jax.models.kernels.packed_attention import choose, on_mesh
from areal_jax.models.model import Model, Params
from areal_jax.models.products import gathered
from areal_jax.models.transformer import Execution, Remat
from areal_jax.parallel.mesh import (
    absent_device,
    param_shardings,
    platform_of,
    row_axes,
    row_parts,
    rows_over,
)
from areal_jax.types import ArealError, Batch, PreparedBatch


def asked_tokens(micro: Batch | PreparedBatch) -> PackedTokens:
    """Returns the micro-batch's loss tokens, with all that their log-probs depend on but hidden states."""
    temperature = masked.per_token(micro.temperature, micro.segment_ids)
    return PackedTokens(micro.tokens, micro.previous, micro.loss_mask, temperature, micro.support)


def require_split(config: ModelConfig, mesh: Mesh) -> None:
    """Raise ArealError if the mesh splits experts that the model does not have, or not into equal parts."""
    parts, experts = mesh.shape.get("expert", 1), config.experts
    if parts > 1 and (not experts or experts % parts):
        what = f"whose number of experts, {experts}, it does not divide" if experts else "without experts"
        raise ArealError(
            f"trainer.mesh.expert={parts} with a model {what}; "
            + (f"choose a divisor of {experts}" if experts else "set it to 1, and raise trainer.mesh.fsdp")
        )


class Forward:
    """A model's forward pass over micro-batches of packed rows on a mesh, as a function of parameters."""

    def __init__(
        self, model: Model, mesh: Mesh, *, chunk: int, remat: Remat, has_entropy_gradient: bool = False
    ) -> None:
        """`chunk`: number of tokens, over all devices, for which logits are in memory at once.

        `remat`: what the backward pass recomputes. `has_entropy_gradient`: whether gradients also flow
        through the tokens' entropies.
        """
        c = model.config
        require_split(c, mesh)
        sizes = (c.heads, c.kv_heads, c.head_dim, c.dtype)
        self.attention = choose(platform_of(mesh), *sizes, absent=absent_device(mesh))
        """The attention path, and the reasons against each kernel that was preferred to it."""
        self.model, self.mesh, self.chunk = model, mesh, chunk
        self.products, kernels = expert_products.choose_for(c, mesh)
        """The way of the experts' products, and the reasons against each kernel that was preferred to it."""
        self.execution = Execution(remat, rows_over(mesh), mesh, kernels)
        self.has_entropy_gradient = has_entropy_gradient
        self.kernel = on_mesh(self.attention, mesh, c.kv_heads)
        """The attention kernel, the first that passed its self-test on this device; None: plain JAX code."""

    def logp(self, params: Params, micro: Batch | PreparedBatch) -> Float[Array, "R T"]:
        """Returns the log-probs of the loss tokens under `params`; 0 elsewhere."""
        stats = self.stats(params, self.hidden(params, micro), asked_tokens(micro))
        return masked.keep(stats.logp, micro.loss_mask)

    def hidden(self, params: Params, micro: Batch | PreparedBatch) -> Float[Array, "R T D"]:
        """Returns the model's hidden state at each token of packed rows, after the last norm.

        Tokens pass through the experts that the model's routers choose.
        """
        return self._hidden(params, micro, None, None)[0]

    def routed(
        self, params: Params, micro: Batch | PreparedBatch
    ) -> tuple[Float[Array, "R T D"], RouterSums | None]:
        """Returns the hidden states, and what the routers did (None without a mixture of experts).

        Tokens pass through the experts that the batch names, if it does.
        """
        return self._hidden(params, micro, self.no_routes(micro.experts is not None), micro.experts)

    def no_routes(self, are_given: bool) -> RouterSums | None:
        """Returns the sums of no token (None without a mixture of experts).

        `are_given`: whether batches name experts.
        """
        c = self.model.config
        return RouterSums.zeros(c.layers, c.experts, c.accumulate, are_given) if c.experts else None

    def _hidden(
        self, params: Params, micro: Batch | PreparedBatch, cache: Any, experts: Array | None
    ) -> tuple[Array, Any]:
        check_batch(micro)
        attend, c = self.model.packed_attention(micro, self.kernel, self.mesh), self.model.config
        if experts is not None:
            each = experts.reshape(*micro.tokens.shape, c.layers, c.experts_per_token)
            experts = jnp.moveaxis(each, 2, 0)
        return self.model.hidden(
            params, micro.tokens, micro.positions, attend, cache, self.execution, experts=experts
        )

    def attended(
        self,
        params: Params,
        tokens: Int[Array, "R T"],
        positions: Int[Array, "R T"],
        attend: Attention,
        cache: Any,
    ) -> tuple[Float[Array, "R T D"], Any]:
        """Returns the hidden states under any attention, and the attention's cache after it."""
        return self.model.hidden(params, tokens, positions, attend, cache, self.execution)

    def stats(self, params: Params, hidden: Float[Array, "R T D"], asked: PackedTokens) -> TokenStats:
        """Returns the log-prob and entropy (`TokenStats`) of each token that is asked for, 0 at other tokens.

        `hidden`: the hidden state at each token. Each device computes its own rows.
        """
        mesh, model = self.mesh, self.model
        shards, rows = row_parts(mesh), row_axes(mesh)
        split = self._head_axis()

        def head_of_gathered(weight: Array, hidden: Array) -> Array:
            return model.head(jnp.moveaxis(weight, 0, split or 0), hidden)

        def of_rows(weight: Array, hidden: Array, asked: PackedTokens) -> TokenStats:
            head = model.head
            if split is not None:
                # Gathered by rows: XLA would copy the matrix if its columns came from different devices.
                weight = gathered(jnp.moveaxis(weight, split, 0), 0, model.config.dtype)
                head = head_of_gathered
            return packed_stats(
                head,
                weight,
                hidden,
                asked,
                max(1, self.chunk // shards),
                dtype=model.config.dtype,
                has_entropy_gradient=self.has_entropy_gradient,
                values=None if model.config.numerics == "bounded" else self._values,
            )

        if shards > 1:  # sums the head's gradient over the devices once, not chunk by chunk
            by_axis = () if split is None else (*[None] * split, "fsdp")
            of_rows = jax.shard_map(
                of_rows,
                mesh=mesh,
                in_specs=(PartitionSpec(*by_axis), rows, rows),
                out_specs=rows,
                axis_names=set(rows[0]),
                check_vma=False,
            )
        return of_rows(model.head_weight(params), hidden, asked)

    def _head_axis(self) -> int | None:
        """Returns the axis along which the LM head's matrix is split over the fsdp devices; None if whole."""
        model = self.model
        name = "head" if "head" in model.abstract_params else "embedding"
        leaf = model.abstract_params[name]
        spec = param_shardings(model.logical_axes[name], leaf, self.mesh).spec
        return spec.index("fsdp") if self.mesh.shape["fsdp"] > 1 and "fsdp" in spec else None

    def _values(
        self, weight: Array, hidden: Array, tokens: Array, temperature: Array, support: Array | None
    ) -> TokenStats:
        """Returns the statistics of n tokens, computed in tiles, so that the bits equal the generator's.

        `weight`: the LM head's matrix. `hidden`: (n, D).
        """
        logits = self.model.head_by_rows(weight, hidden)
        return self.model.in_rows(token_stats)(logits, tokens, temperature, support)
