"""The layout of parameters during decoding: the form that the host's device reads fastest.

On a CPU a decode step is bound by reading weights, and XLA would first copy each layer's weights out of the
arrays that stack all layers. On a CPU, therefore, each layer has arrays of its own, and a matrix has a row
for each output (`FeatureMajor`). A host converts each weights version once, when it loads the version. On
other devices, and with trainer.numerics=exact, parameters stay as they are: generator and trainer then run
the same matrix products.
"""

from __future__ import annotations

import math
from typing import Any

import jax
from jaxtyping import Array

from areal_jax.models.config import PROJECTIONS
from areal_jax.models.model import Model, Params
from areal_jax.models.quantize import inputs_of
from areal_jax.models.transformer import FeatureMajor


def is_laid_out(params: Params) -> bool:
    """Whether the parameters are already in the layout that `serving_layout` returns on a CPU."""
    return isinstance(params.get("head"), FeatureMajor)


def serving_layout(model: Model, params: Params, platform: str) -> Params:
    """Returns the parameters in the layout that decodes fastest on `platform`, a jax platform name.

    Parameters are converted only on a CPU, with bounded numerics, and only if each leaf is on one device.
    """
    is_settled = isinstance(params["blocks"], tuple) or model.config.numerics == "exact"
    if platform != "cpu" or is_settled or any(len(leaf.devices()) > 1 for leaf in jax.tree.leaves(params)):
        return params
    # The copy is made once per version; without it, every decode step would copy each layer.
    layers = tuple(_layer(params["blocks"], index) for index in range(model.config.layers))
    head = params["embedding"] if model.config.is_tied else params["head"].T
    return params | {"blocks": layers, "head": FeatureMajor(head)}


@jax.jit
def _layer(blocks: Any, index: Array) -> Any:
    """Returns layer `index` of the stacked parameters `blocks`, with a row per output in its matrices.

    LoRA adapters and quantised weights keep their form.
    """

    def one(path: tuple, leaf: Array) -> Any:
        own, name = leaf[index], path[-1].key
        if name not in PROJECTIONS:
            return own
        inputs = math.prod(own.shape[: inputs_of(name)])
        return FeatureMajor(own.reshape(inputs, -1).T)

    return jax.tree_util.tree_map_with_path(one, blocks)
