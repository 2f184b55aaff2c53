"""The layout of parameters during decoding: the form that the host's device reads fastest.

A decode step is bound by reading weights. Parameters are trained and published stacked: an array has a
matrix of all layers. XLA would copy each layer's matrix out of it at every step, on CPUs and on GPUs. A host
therefore converts each weights version once, when it loads the version, to one of the layouts `WeightLayout`.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any, Literal

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array

from areal_jax.models.config import PROJECTIONS
from areal_jax.models.model import Model, Params
from areal_jax.models.projections import FeatureMajor
from areal_jax.models.quantize import inputs_of
from areal_jax.parallel.mesh import platform_of, replicated

WeightLayout = Literal["stacked", "split", "feature_major"]
"""stacked: as published. split: each layer has arrays of its own. feature_major: as split, and a projection's
matrix has a row for each output (`FeatureMajor`).
"""

FASTEST: dict[str, WeightLayout] = {"cpu": "feature_major", "gpu": "split", "cuda": "split"}
"""Platform -> layout that `auto` stands for; stacked for a platform that is not listed.

CPUs: measured. GPUs: by the bytes that compiled programs read (docs/figures.md).
"""


def layout_on(mesh: Mesh, model: Model, wanted: WeightLayout | Literal["auto"]) -> WeightLayout:
    """Returns the layout for decoding on `mesh`: `wanted`, with auto replaced by what it stands for.

    With exact numerics auto is stacked, because generator and trainer must run the same matrix products; also
    on a mesh of several CPUs, where a feature-major matrix cannot be sharded.
    """
    if wanted != "auto":
        return wanted
    platform = platform_of(mesh)
    if model.config.numerics == "exact" or (platform == "cpu" and mesh.size > 1):
        return "stacked"
    return FASTEST.get(platform, "stacked")


def is_laid_out(params: Params) -> bool:
    """Whether the parameters are already converted to another layout than stacked."""
    return isinstance(params["blocks"], tuple)


def laid_out(model: Model, params: Params, layout: WeightLayout, platform: str) -> Params:
    """Returns published parameters in `layout`, for decoding on devices of `platform`.

    A converted tree is returned unchanged. On a CPU a converted tree has the LM head's matrix too with a row
    per output. Split arrays are sharded as the stacked ones; feature-major ones need a single device.
    """
    if layout == "stacked" or is_laid_out(params):
        return params
    # The copy is made once per version; without it, every decode step would copy each layer.
    layers = tuple(_layer(params["blocks"], index, layout) for index in range(model.config.layers))
    served = params | {"blocks": layers}
    if platform != "cpu":
        return served
    return served | {"head": FeatureMajor(params["embedding"] if model.config.is_tied else params["head"].T)}


def abstractly_laid_out(model: Model, params: Params, layout: WeightLayout, mesh: Mesh) -> Params:
    """Returns the result of `laid_out` for `params`, a tree of jax.ShapeDtypeStruct with shardings on `mesh`.

    The result is such a tree, too.
    """
    platform = platform_of(mesh)
    served = jax.eval_shape(partial(laid_out, model, layout=layout, platform=platform), params)
    on = jax.tree.map(lambda leaf: leaf.sharding, params)
    if layout == "feature_major":
        on = jax.tree.map(lambda _: replicated(mesh), served)
    elif layout == "split":
        own = jax.tree.map(lambda it: NamedSharding(mesh, PartitionSpec(*it.spec[1:])), on["blocks"])
        on["blocks"] = (own,) * model.config.layers
        if platform == "cpu":
            rows = PartitionSpec(*on["head"].spec[::-1]) if "head" in on else on["embedding"].spec
            on["head"] = FeatureMajor(NamedSharding(mesh, rows))  # type: ignore[arg-type]
    return jax.tree.map(lambda of, at: jax.ShapeDtypeStruct(of.shape, of.dtype, sharding=at), served, on)


@partial(jax.jit, static_argnums=2)
def _layer(blocks: Any, index: Array, layout: WeightLayout) -> Any:
    """Returns layer `index` of the stacked parameters `blocks`, in `layout`.

    LoRA adapters and quantised weights never become feature-major.
    """

    def one(path: tuple, leaf: Array) -> Any:
        own, name = leaf[index], path[-1].key
        if layout == "split" or name not in PROJECTIONS:
            return own
        inputs = math.prod(own.shape[: inputs_of(name)])
        return FeatureMajor(own.reshape(inputs, -1).T)

    return jax.tree_util.tree_map_with_path(one, blocks)
