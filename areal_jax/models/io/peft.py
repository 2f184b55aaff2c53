"""Adapters in the file layout of Hugging Face's peft: `adapter_config.json`, `adapter_model.safetensors`.

For a layer's matrix W of O outputs and I inputs the files store lora_A (r, I) and lora_B (O, r), with rank r:
the adapted matrix is W + (alpha / r) B A.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path

import jax
import numpy as np

from areal_jax.models.config import ModelConfig
from areal_jax.models.io.families import Tensor, axis_sizes, tensors_of
from areal_jax.models.io.safetensors_folder import NewTensor, require_dtype, save_tensors, staged, write_json
from areal_jax.models.lora import SUFFIX, leaves_of
from areal_jax.models.model import Params
from areal_jax.types import ArealError

CONFIG, TENSORS = "adapter_config.json", "adapter_model.safetensors"


def export_adapter(
    folder: Path, config: ModelConfig, params: Params, base: str, dtype: str = "float32"
) -> None:
    """Write the adapters in `params` as a folder for peft.

    `base`: name or folder of the model that the adapters change. Raises ArealError if the model has no
    adapters, `dtype` cannot be exported, or the folder exists.
    """
    lora = config.lora
    if lora is None:
        raise ArealError(
            "this model has no adapters to write (model.lora.rank=0); export the whole model with --as merged"
        )
    require_dtype(dtype)
    leaves = leaves_of(params, sep=".")
    matrices = [tensor for tensor in tensors_of(config) if f"{tensor.path}{SUFFIX}.a" in leaves]
    about = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "target_modules": [tensor.name.split(".")[-2] for tensor in matrices],
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "use_rslora": False,
        "use_dora": False,
        "modules_to_save": None,
        "inference_mode": True,
    }
    sizes = axis_sizes(config)
    entries = [entry for tensor in matrices for entry in _entries(tensor, leaves, sizes)]
    with staged(folder) as stage:
        save_tensors(stage / TENSORS, entries, dtype)
        write_json(stage / CONFIG, about)


def _entries(
    tensor: Tensor, leaves: Mapping[str, jax.Array], sizes: Mapping[str, int]
) -> Iterator[NewTensor]:
    outputs, inputs = tensor.shape(sizes)
    a, b = (leaves[f"{tensor.path}{SUFFIX}.{name}"] for name in "ab")
    factors = {"A": (a, (inputs, b.shape[1])), "B": (b, (b.shape[1], outputs))}
    for (layer,), name in tensor.names(sizes).items():
        beside = f"base_model.model.{name.removesuffix('.weight')}"
        for letter, (leaf, shape) in factors.items():
            value = partial(_factor, leaf, layer, shape)
            yield NewTensor(f"{beside}.lora_{letter}.weight", shape[::-1], value)


def _factor(leaf: jax.Array, layer: int, shape: tuple[int, int]) -> np.ndarray:
    """Returns one layer of an adapter's factor as `shape`, then transposed: peft multiplies W x, not x W."""
    return np.asarray(leaf[layer]).reshape(shape).T
