"""A model's forward pass over packed rows: hidden states, and log-prob and entropy of each loss token."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import jax
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Array, Float

from areal_jax.algorithms import masked
from areal_jax.algorithms.logprobs import PackedTokens, TokenStats, packed_stats, token_stats
from areal_jax.algorithms.shapes import check_batch
from areal_jax.models.exact import packed_attention
from areal_jax.models.kernels.packed_attention import choose, on_mesh
from areal_jax.models.model import Model, Params
from areal_jax.models.transformer import Execution, Remat
from areal_jax.parallel.mesh import ROWS, rows_over
from areal_jax.types import Batch


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
        choice = choose(mesh.devices.flat[0].platform, c.heads, c.kv_heads, c.head_dim, c.dtype)
        self.model, self.mesh, self.chunk = model, mesh, chunk
        self.execution = Execution(remat, rows_over(mesh))
        self.has_entropy_gradient = has_entropy_gradient
        self.kernel = on_mesh(choice, mesh, c.kv_heads)
        """The attention kernel, the first that passed its self-test on this device; None: plain JAX code."""

    def logp(self, params: Params, micro: Batch) -> Float[Array, "R T"]:
        """Returns the log-probs of the loss tokens under `params`; 0 elsewhere."""
        stats = self.stats(params, self.hidden(params, micro), micro)
        return masked.keep(stats.logp, micro.loss_mask)

    def hidden(self, params: Params, micro: Batch) -> Float[Array, "R T D"]:
        """Returns the model's hidden state at each token, after the last norm."""
        check_batch(micro)
        attend = packed_attention(self.model.config, micro, self.kernel, self.mesh)
        return self.model.hidden(params, micro.tokens, micro.positions, attend, None, self.execution)[0]

    def stats(self, params: Params, hidden: Float[Array, "R T D"], micro: Batch) -> TokenStats:
        """Returns each loss token's log-prob and entropy (`TokenStats`), and 0 at other tokens.

        `hidden`: the hidden states that the method `hidden` returns. Each device computes its own rows.
        """
        mesh, model = self.mesh, self.model
        shards = mesh.shape["data"] * mesh.shape["fsdp"]
        of_rows: Callable[..., TokenStats] = partial(
            packed_stats,
            model.head,
            chunk=max(1, self.chunk // shards),
            has_entropy_gradient=self.has_entropy_gradient,
            values=None if model.config.numerics == "bounded" else self._values,
        )
        if shards > 1:  # sums the head's gradient over the devices once, not chunk by chunk
            of_rows = jax.shard_map(
                of_rows,
                mesh=mesh,
                in_specs=(PartitionSpec(), ROWS, ROWS),
                out_specs=ROWS,
                axis_names=set(ROWS[0]),
                check_vma=False,
            )
        temperature = masked.per_token(micro.temperature, micro.segment_ids)
        asked = PackedTokens(micro.tokens, micro.previous, micro.loss_mask, temperature, micro.support)
        return of_rows(model.head_weight(params), hidden, asked)

    def _values(
        self, weight: Array, hidden: Array, tokens: Array, temperature: Array, support: Array | None
    ) -> TokenStats:
        """Returns the statistics of n tokens, computed in tiles, so that the bits equal the generator's.

        `weight`: the LM head's matrix. `hidden`: (n, D).
        """
        logits = self.model.head_by_rows(weight, hidden)
        return self.model.in_rows(token_stats)(logits, tokens, temperature, support)
