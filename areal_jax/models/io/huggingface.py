"""Reads pretrained parameters from a Hugging Face folder straight onto a mesh, and writes such folders."""

from __future__ import annotations

import itertools
import math
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import SingleDeviceSharding

from areal_jax.models.config import ModelConfig
from areal_jax.models.io.families import Tensor, axis_sizes, read_config, tensors_of, write_config
from areal_jax.models.io.safetensors_folder import (
    ABOUT,
    CONFIG,
    READABLE,
    NewTensor,
    Stored,
    read_header,
    read_json,
    require_dtype,
    staged,
    write_json,
    write_tensors,
)
from areal_jax.models.lora import leaves_of
from areal_jax.models.model import Params
from areal_jax.types import ArealError

COMPANIONS = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "additional_chat_templates",
    "generation_config.json",
)
CARRIED = ("max_position_embeddings", "bos_token_id", "eos_token_id", "pad_token_id")
"""Keys of `config.json` that an export copies from the folder `tokenizer_from`."""
_COMPARED_ROWS = 4096


@dataclass(frozen=True, eq=False)
class Pretrained:
    """A Hugging Face folder: its config, and the headers of its tensors, which match the config; no data."""

    folder: Path
    config: ModelConfig
    stored: Mapping[str, Stored] = field(repr=False)

    def load(self, abstract_params: Params, shardings: Params | None = None) -> Params:
        """Returns float32 parameters with these shardings; without shardings, on the first local device.

        Each device's shard is read by itself, so that host memory contains at most one shard in addition to
        the parameters. Raises ArealError if the config ties the head to the embedding, but the head in the
        folder differs from the embedding.
        """
        self._check_tie()
        tensors = {tensor.path: tensor for tensor in tensors_of(self.config)}
        here = SingleDeviceSharding(jax.local_devices()[0])

        def place(path: Any, leaf: jax.ShapeDtypeStruct, sharding: Any = here) -> jax.Array:
            tensor = tensors[jax.tree_util.keystr(path, simple=True, separator=".")]
            read = partial(self._read, tensor, leaf.shape)
            return jax.make_array_from_callback(leaf.shape, sharding, read)

        trees = (abstract_params,) if shardings is None else (abstract_params, shardings)
        return jax.tree_util.tree_map_with_path(place, *trees)

    def _read(self, tensor: Tensor, shape: tuple[int, ...], index: Any) -> np.ndarray:
        """Returns the part `index` (a slice per axis) of a parameter leaf with the shape `shape`.

        Each tensor in the files is read by itself: one for each layer, or each layer and expert.
        """
        ranges = [range(*piece.indices(size)) for piece, size in zip(index, shape, strict=True)]
        wanted = dict(zip(tensor.ours.split(), ranges, strict=True))
        if not tensor.spread:
            return self._read_one(tensor, tensor.name, wanted)
        out = np.empty([len(each) for each in ranges], np.float32)
        spread = [wanted[letter] for letter in tensor.spread]
        places = np.ndindex(out.shape[: len(spread)])
        for place, numbers in zip(places, itertools.product(*spread), strict=True):
            out[place] = self._read_one(tensor, tensor.name.format(*numbers), wanted)
        return out

    def _read_one(self, tensor: Tensor, name: str, wanted: Mapping[str, range]) -> np.ndarray:
        """Returns a part of the stored tensor `name`, float32.

        `wanted`: the part's range of indices in each axis of `tensor.ours`. If a stored axis combines two
        axes (H*h), the range of the first axis is read from the file, and the range of the second axis is
        then cut out.
        """
        sizes = axis_sizes(self.config)
        index = []
        for axis in tensor.axes:
            outer, step = wanted[axis[0]] if axis else range(1), math.prod(sizes[one] for one in axis[1:])
            index.append(slice(outer.start * step, outer.stop * step))
        inner = {letter for axis in tensor.axes for letter in axis[1:]}
        shape = [sizes[one] if one in inner else len(wanted[one]) for one in tensor.letters]
        cut = [
            slice(wanted[one].start, wanted[one].stop) if one in inner else slice(None)
            for one in tensor.letters
        ]
        piece = self.stored[name].read(*index).reshape(shape)[tuple(cut)]
        return piece.transpose(tensor.order).astype(np.float32, copy=False)

    def _check_tie(self) -> None:
        """Raise ArealError if the config ties the head to the embedding, but the stored head differs from it.

        transformers would silently ignore the stored head.
        """
        head, embedding = (self.stored.get(f"{name}.weight") for name in ("lm_head", "model.embed_tokens"))
        if not self.config.is_tied or head is None or embedding is None:
            return
        for start in range(0, self.config.vocab_size, _COMPARED_ROWS):
            rows = slice(start, min(start + _COMPARED_ROWS, self.config.vocab_size))
            if not np.array_equal(head.read(rows), embedding.read(rows)):
                raise ArealError(
                    f"{self.folder}: tie_word_embeddings is true, but lm_head.weight differs from "
                    "model.embed_tokens.weight; set tie_word_embeddings to false in config.json, or delete "
                    "lm_head.weight"
                )


def open_folder(folder: Path) -> Pretrained:
    """Returns a Hugging Face folder, after comparing the headers of its tensors with its config.

    Raises ArealError if the folder or its config is missing, an architecture or option is not implemented, a
    file is truncated, a tensor is missing or not used by the model, or a tensor has another shape or a dtype
    other than F32, F16, BF16.
    """
    if not folder.is_dir():
        raise ArealError(f"{folder} is not a folder; give one with {CONFIG} and safetensors files")
    raw = read_json(folder / CONFIG)
    try:
        config = read_config(raw)
    except ArealError as error:
        raise ArealError(f"{folder / CONFIG}: {error}") from None
    stored = read_header(folder)
    _check_tensors(folder, config, stored)
    return Pretrained(folder, config, stored)


def _check_tensors(folder: Path, config: ModelConfig, stored: Mapping[str, Stored]) -> None:
    """Raise ArealError if a tensor is missing, unused, not readable or not shaped as `config` requires."""
    sizes = axis_sizes(config)
    expected = {
        name: tensor.shape(sizes) for tensor in tensors_of(config) for name in tensor.names(sizes).values()
    }
    fused = [name for name in stored if name.endswith(".experts.gate_up_proj")]
    if fused:
        raise ArealError(
            f"{folder}: {_some(fused)} of the tensors contain the matrices of all experts, which is not "
            "implemented; load the folder with transformers 5 and save it by save_pretrained, which writes a "
            "tensor for each expert"
        )
    missing = [name for name in expected if name not in stored]
    if missing:
        raise ArealError(
            f"{folder} lacks {_some(missing)} of {len(expected)} tensors; download the folder again"
        )
    if config.is_tied and "lm_head.weight" in stored:
        expected["lm_head.weight"] = expected["model.embed_tokens.weight"]
    surplus = [name for name in stored if name not in expected and not name.endswith("rotary_emb.inv_freq")]
    if surplus:
        raise ArealError(
            f"{folder}: the architecture in {CONFIG} does not use {_some(surplus)} of the tensors; use the "
            f"{CONFIG} that belongs to the tensors"
        )
    for name, shape in expected.items():
        if stored[name].shape != shape:
            raise ArealError(
                f"{folder}: {name} has the shape {list(stored[name].shape)}, but {CONFIG} requires "
                f"{list(shape)}; use the {CONFIG} that belongs to the tensors"
            )
        if stored[name].dtype not in READABLE:
            raise ArealError(
                f"{folder}: {name} is {stored[name].dtype}, which is not implemented; use a folder with only "
                + ", ".join(READABLE)
            )


def _some(names: list[str]) -> str:
    shown = ", ".join(names[:3])
    return f"{len(names)} ({shown}{', ...' if len(names) > 3 else ''})"


def export_folder(
    folder: Path,
    config: ModelConfig,
    params: Params,
    dtype: str = "float32",
    tokenizer_from: Path | None = None,
    *,
    about: Mapping[str, Any] | None = None,
) -> None:
    """Write parameters as a Hugging Face folder that transformers 4 and 5 load.

    The tokenizer's files, the special ids and the context length are copied from the Hugging Face folder
    `tokenizer_from` (None: left out). `about`: plain values on the origin of the parameters, written to
    `config.json` under "areal_jax". Raises ArealError if the folder exists, Hugging Face has no name for the
    dtype or no architecture with the model's options, or a value exceeds float16's range.
    """
    require_dtype(dtype)
    if tokenizer_from is not None and not tokenizer_from.is_dir():
        raise ArealError(f"tokenizer_from={tokenizer_from} is not a folder; give one with tokenizer.json")
    raw = write_config(config, dtype)
    leaves = leaves_of(params, sep=".")
    sizes = axis_sizes(config)
    entries = [
        NewTensor(name, tensor.shape(sizes), partial(_stored, tensor, leaves[tensor.path], index, sizes))
        for tensor in tensors_of(config)
        for index, name in tensor.names(sizes).items()
    ]
    with staged(folder) as stage:
        write_tensors(stage, entries, dtype)
        said = {ABOUT: dict(about)} if about else {}
        write_json(stage / CONFIG, raw | _companions(tokenizer_from, stage) | said)


def _stored(tensor: Tensor, leaf: jax.Array, index: tuple[int, ...], sizes: Mapping[str, int]) -> np.ndarray:
    """Returns the part of a leaf at `index` of the axes `tensor.spread`, as Hugging Face files have it."""
    value = np.asarray(leaf[index] if index else leaf)
    return value.transpose(np.argsort(tensor.order)).reshape(tensor.shape(sizes))


def _companions(source: Path | None, stage: Path) -> dict[str, Any]:
    """Copy the files and folders that COMPANIONS names, such as the tokenizer's, from `source` to `stage`.

    Returns the items of the source's config.json that an export keeps (CARRIED); {} without a source.
    """
    if source is None:
        return {}
    for name in COMPANIONS:
        if (source / name).is_file():
            shutil.copyfile(source / name, stage / name)
        elif (source / name).is_dir():
            shutil.copytree(source / name, stage / name)
    raw = read_json(source / CONFIG) if (source / CONFIG).is_file() else {}
    return {key: raw[key] for key in CARRIED if key in raw}
