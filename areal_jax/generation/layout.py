"""How parameters and pages lie while a host decodes: in the form that its device reads fastest.

On a CPU a decode step is bound by reading weights, and XLA would copy each layer's slice out of the stack of
layers before it reads it: there every layer's leaves lie apart, and matrices have a row for each output
(`FeatureMajor`). The copy is made once, when a version is adopted. Elsewhere, and where the numerics are
exact, parameters lie as they are: there generator and trainer run the same products.
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
    """Whether `serving_layout` gave them a form of their own already."""
    return isinstance(params.get("head"), FeatureMajor)


def serving_layout(model: Model, params: Params, platform: str) -> Params:
    """The parameters for decoding on `platform`: as they are, but on a single CPU device."""
    is_settled = isinstance(params["blocks"], tuple) or model.config.numerics == "exact"
    if platform != "cpu" or is_settled or any(len(leaf.devices()) > 1 for leaf in jax.tree.leaves(params)):
        return params
    layers = tuple(_layer(params["blocks"], index) for index in range(model.config.layers))
    head = FeatureMajor(params["embedding"]) if model.config.is_tied else _transposed(params["head"])
    return params | {"blocks": layers, "head": head}


def pages_dtype(dtype: str, platform: str) -> str:
    """What KV pages of a model that computes in `dtype` are held in, unless the config says."""
    return dtype


@jax.jit
def _layer(blocks: Any, index: Array) -> Any:
    """One layer's parameters out of the stack; adapters and codes keep their form."""

    def one(path: tuple, leaf: Array) -> Any:
        own, name = leaf[index], path[-1].key
        if name not in PROJECTIONS:
            return own
        inputs = math.prod(own.shape[: inputs_of(name)])
        return FeatureMajor(own.reshape(inputs, -1).T)

    return jax.tree_util.tree_map_with_path(one, blocks)


@jax.jit
def _transposed(matrix: Array) -> FeatureMajor:
    return FeatureMajor(matrix.T)
