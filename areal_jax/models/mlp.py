"""The second part of a layer: a gated MLP, or a mixture of experts, each a gated MLP."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Array, Float, Int

from areal_jax.models.attention import Attention, live_tokens
from areal_jax.models.config import ModelConfig
from areal_jax.models.exact import TILE, is_exact
from areal_jax.models.experts import (
    Arithmetic,
    ExpertKernels,
    Routes,
    Rows,
    block_size,
    in_blocks,
    in_windows,
    product,
    routes,
    weighted,
    window_size,
)
from areal_jax.models.products import gathered, summed
from areal_jax.models.projections import Projections, normal
from areal_jax.models.quantize import CODES, SCALE
from areal_jax.parallel.mesh import row_axes, spec_of

ROUTES = "routes"
"""Name of the experts that tokens are sent to; a backward pass that runs a layer again repeats these."""


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


MATRICES = {
    "expert_gate": ("experts", "embed", "mlp"),
    "expert_up": ("experts", "embed", "mlp"),
    "expert_down": ("experts", "mlp", "embed"),
}
"""Matrix of all experts of a layer -> logical names of its axes."""


class Mixture(Projections):
    """Computes the weighted sum of gated MLPs, the experts that the router chooses for each token.

    With `shared_width` it adds an MLP that all tokens pass, times a sigmoid of the token (Qwen2-MoE).
    """

    def __init__(self, c: ModelConfig, rngs: nnx.Rngs) -> None:
        super().__init__(c)
        self.router = normal(rngs.params(), (c.width, c.experts), ("embed", None), c.width**-0.5)
        for name, axes in MATRICES.items():
            scale = (2 * c.layers * c.expert_width if name == "expert_down" else c.width) ** -0.5
            self.add(rngs, name, self._shape(axes), axes, scale)
        if c.shared_width:
            self.shared = GatedMLP(dataclasses.replace(c, mlp_width=c.shared_width), rngs)
            self.shared_gate = normal(rngs.params(), (c.width,), ("embed",), c.width**-0.5)

    def _shape(self, axes: tuple[str, ...]) -> tuple[int, ...]:
        """Returns the size of each of these axes, by their logical names."""
        c = self.config
        sizes = {"experts": c.experts, "embed": c.width, "mlp": c.expert_width}
        return tuple(sizes[axis] for axis in axes)

    def routes(self, x: Float[Array, "B T D"], experts: Int[Array, "B T k"] | None = None) -> Routes:
        """Returns the routes of the normed tokens `x`; `experts`, if given, are not chosen anew.

        The product with the router is in `accumulate` throughout, since rounding could change a choice.
        """
        c = self.config
        logits = jnp.matmul(x, self.router[...], precision=jax.lax.Precision.HIGHEST)
        found = routes(logits, c.experts_per_token, c.has_unit_weights, experts)
        return found._replace(experts=checkpoint_name(found.experts, ROUTES))

    def with_shared(self, x: Float[Array, "B T D"], mixed: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        """Returns `mixed` plus the result of the MLP that all tokens pass, if the model has one."""
        if not self.config.shared_width:
            return mixed
        gate = jnp.matmul(x, self.shared_gate[...], precision=jax.lax.Precision.HIGHEST)
        return mixed + jax.nn.sigmoid(gate)[..., None] * self.shared(x)

    def mixed(
        self,
        x: Float[Array, "B T D"],
        chosen: Routes,
        attend: Attention,
        mesh: Mesh | None,
        kernels: Callable[[], ExpertKernels] | None,
    ) -> Float[Array, "B T D"]:
        """Returns the weighted sums of the experts' results for the normed tokens `x`.

        `mesh`, `kernels`: as in `transformer.Execution`. Padding tokens pass through no expert. On a mesh,
        the devices that split the experts have all of their tokens for the time of the products; each
        computes the rows of its own experts, and they add their sums. With an exact attention, no bit depends
        on the other tokens.
        """
        experts = jnp.where(live_tokens(attend, x)[..., None], chosen.experts, -1)
        if is_exact(attend):
            return attend.rows(weighted, self._by_rows(x, experts), chosen.weights)
        if mesh is None or mesh.size == 1:
            return self._sums(self._matrices(), 0, kernels)(x, experts, chosen.weights)
        rows = row_axes(mesh) if "data" in mesh.shape else PartitionSpec()
        # Codes and their scales would be split differently, and are split by expert alone.
        is_whole = self.config.quantize != "none"
        specs = {}
        for name, axes in MATRICES.items():
            axes = axes[:1] if is_whole else axes
            specs[name] = spec_of(axes, self._shape(axes), mesh)
        by, inner = specs["expert_gate"][0], None if is_whole else specs["expert_gate"][2]
        has_parts = bool(rows) and by in rows[0]

        def on_device(matrices: Any, *of_tokens: Array) -> Array:
            if has_parts:
                of_tokens = jax.lax.all_gather(of_tokens, by, tiled=True)
            x, experts, weights = of_tokens
            for name, spec in specs.items():
                if "fsdp" in spec:
                    matrices[name] = gathered(matrices[name], spec.index("fsdp"), self.config.dtype)
            count = len(jax.tree.leaves(matrices)[0])
            first = 0 if by is None else count * jax.lax.axis_index(by)
            total = self._sums(matrices, first, kernels)(x, experts, weights)
            if has_parts:
                total = jax.lax.psum_scatter(total, by, tiled=True)
            return jax.lax.psum(total, [axis for axis in (None if has_parts else by, inner) if axis])

        return jax.shard_map(
            on_device, mesh=mesh, in_specs=(specs, *[rows] * 3), out_specs=rows, check_vma=False
        )(self._matrices(), x, experts, chosen.weights)

    def _matrices(self) -> dict[str, Any]:
        """Returns the matrices of all experts; of each its codes and scale if they are quantised."""
        leaves = {name: getattr(self, name) for name in MATRICES}
        if self.config.quantize == "none":
            return {name: leaf[...] for name, leaf in leaves.items()}
        return {name: {CODES: leaf.codes[...], SCALE: leaf.scale[...]} for name, leaf in leaves.items()}

    def _sums(
        self, matrices: Any, first: Any, kernels: Callable[[], ExpertKernels] | None
    ) -> Callable[[Array, Array, Array], Float[Array, "B T D"]]:
        """Returns a function of tokens, their experts (-1: none) and weights that computes the weighted sums.

        They are over the experts that `matrices` are of, which have the numbers from `first` on.
        """
        c, by = self.config, Arithmetic(self.config.dtype, self.config.quantize, kernels)
        count = len(jax.tree.leaves(matrices)[0])
        is_trained = c.quantize == "none"

        def of_rows(rows: Rows, floats: Any, codes: Any) -> Array:
            x, weights, *own = floats
            own = own[0] if is_trained else codes

            def of(name: str, x: Array) -> Array:
                return product(x, own[name], rows.starts, rows.block, by)  # type: ignore[return-value]

            each = rows.spread(x, by)
            each = jax.nn.silu(of("expert_gate", each)) * of("expert_up", each) * rows.weights(weights)
            return rows.summed(of("expert_down", each.astype(c.activations)), by)

        def sums(x: Array, experts: Array, weights: Array) -> Array:
            own = (experts - first).reshape(-1, c.experts_per_token)
            rows = Rows.of(own, count, block_size(own.size, c.experts))
            floats = (x.reshape(-1, c.width), weights.reshape(own.shape), *([matrices] if is_trained else []))
            codes = None if is_trained else matrices
            size = window_size(own.size, c.experts // count)
            if size == own.size:
                return of_rows(rows, floats, codes).reshape(x.shape)
            return in_windows(of_rows, rows, size, floats, codes).reshape(x.shape)

        return sums

    def _by_rows(self, x: Float[Array, "B T D"], experts: Int[Array, "B T k"]) -> Float[Array, "B T k D"]:
        """Returns the result of each of a token's experts (-1: none); no bit depends on other tokens.

        Blocks have TILE rows, and barriers keep XLA from fusing a block's products with other code.
        """
        c, matrices = self.config, self._matrices()
        by = Arithmetic(c.dtype, c.quantize)
        order = Rows.of(experts.reshape(-1, c.experts_per_token), c.experts, TILE)

        def mlp(rows: Array, expert: Array) -> Array:
            own = {name: by.matrix(leaf, expert) for name, leaf in matrices.items()}
            rows, own = jax.lax.optimization_barrier((rows, own))
            gate, up = (summed(rows, own[name], 1, 0) for name in ("expert_gate", "expert_up"))
            out = summed((jax.nn.silu(gate) * up).astype(c.dtype), own["expert_down"], 1, 0)
            return jax.lax.optimization_barrier(out)

        found = in_blocks(mlp, order.spread(x.reshape(-1, c.width), by).astype(c.dtype), order.starts, TILE)
        return order.chosen(found).reshape(*experts.shape, c.width)
