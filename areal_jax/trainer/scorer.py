"""A frozen model on a mesh of its own: it computes log-probs of the trainer's micro-batches."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
from jax.sharding import Mesh
from jaxtyping import Array

from areal_jax.algorithms.shapes import map_batch
from areal_jax.models.model import Model, Params
from areal_jax.parallel.mesh import param_shardings, rows_over
from areal_jax.trainer.compiled import Compiled, Program
from areal_jax.trainer.forward import Forward
from areal_jax.types import Batch
from areal_jax.weights.links import Broadcast, Gather, Scatter, Weights
from areal_jax.weights.store import abstract_in, dtypes_in


class Executor(NamedTuple):
    """Where, and in which dtype, a reference policy or a teacher computes."""

    mesh: Mesh
    dtype: str
    """dtype of its parameters and of the inputs of its matrix products; auto: float32 parameters, and
    products as in the model's config.
    """


class Scorer:
    """Computes log-probs under `model` on the executor's mesh, for micro-batches on the mesh `trainer`.

    `forward`: makes the forward pass, as `forward(model, mesh)`. `name`, `report`: of its program, as
    `Program` needs them.
    """

    def __init__(
        self,
        model: Model,
        executor: Executor,
        trainer: Mesh,
        forward: Callable[..., Forward],
        name: str,
        report: Callable[[Compiled], None],
    ) -> None:
        mesh, dtype = executor
        self._dtype = "float32" if dtype == "auto" else dtype
        # Its log-probs are compared with no host's.
        changes = {} if dtype == "auto" else {"dtype": dtype, "params_dtype": dtype}
        self.model = Model(dataclasses.replace(model.config, numerics="bounded", **changes), model.tokenizer)
        self.shardings = param_shardings(model.logical_axes, model.abstract_params, mesh)
        self._weights = Weights(self.shardings)
        self._work = Scatter(mesh), Broadcast(mesh)
        self._results = Gather(mesh, trainer)
        logp = forward(self.model, mesh=mesh).logp
        self._program = Program(name, logp, report, out_shardings=rows_over(mesh))

    def take(self, params: Params) -> Params:
        """Returns copies of the parameters, which may lie on another mesh, as `logp` needs them."""
        return self._weights(_cast(params, self._dtype))

    def abstract_params(self) -> Params:
        """Returns shapes, dtypes and shardings of the result of `take`, as jax.ShapeDtypeStruct."""
        return abstract_in(self._dtype, self.model.abstract_params, self.shardings)

    def logp(self, params: Params, micro: Batch) -> Array:
        """Returns the log-probs of a micro-batch's loss tokens, (R, T) on the trainer's mesh; 0 elsewhere."""
        return self._results(self._program(params, map_batch(*self._work, micro)))


@partial(jax.jit, static_argnums=1)
def _cast(params: Any, dtype: str) -> Any:
    """Returns copies of the leaves, which the trainer's update may not donate, with floats in `dtype`."""
    return jax.tree.map(lambda leaf, kind: leaf.astype(kind).copy(), params, dtypes_in(params, dtype))
