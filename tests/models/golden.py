"""The golden fixtures: tiny models of every family, and what transformers computes of them."""

from __future__ import annotations

import shutil
from pathlib import Path

import jax
import numpy as np
from flax.traverse_util import unflatten_dict

from areal_jax.generation.engine import Engine
from areal_jax.models.config import ModelConfig
from areal_jax.models.io.families import axis_sizes, tensors_of
from areal_jax.models.model import Model, Params
from areal_jax.tasks.tokenizers import CharTokenizer
from areal_jax.types import SampleId, Sampling, VersionedParams

GOLDEN = Path(__file__).parent / "golden"
MIXTURES = ("qwen3-moe", "qwen3-moe-single", "qwen2-moe", "olmoe", "mixtral")
NAMES = ("llama-tied", "llama3-scaled", "qwen2-sharded", "qwen3-untied", *MIXTURES)
SEGMENTS = (9, 5, 14)
TOKENIZER = CharTokenizer("".join(map(chr, range(33, 127))))  # 96 ids, as the fixtures have


def expected(name: str) -> dict[str, np.ndarray]:
    with np.load(GOLDEN / name / "expected.npz") as arrays:
        return dict(arrays)


def model_of(config: ModelConfig) -> Model:
    return Model(config, TOKENIZER)


def abstract_of(config: ModelConfig) -> Params:
    """The parameter tree that the files of a model with this config fill: shapes and dtypes."""
    sizes = axis_sizes(config)
    shapes = {tensor.path: [sizes[axis] for axis in tensor.ours.split()] for tensor in tensors_of(config)}
    leaves = {path: jax.ShapeDtypeStruct(shape, np.float32) for path, shape in shapes.items()}
    return unflatten_dict(leaves, sep=".")


def greedy(engine: Engine, params: Params, prompt: np.ndarray, new: int) -> list[int]:
    """The likeliest continuation: prefilled in chunks, then decoded through pages."""
    value = engine.load_params(VersionedParams(0, params, ""))
    prefix = engine.prefill(params=value, padded_tokens=prompt, true_length=len(prompt))
    request = engine.request(SampleId(0, 0), 0, Sampling(temperature=0, max_tokens=new), len(prompt))
    state = engine.insert(prefix, engine.init_decode_state(), 0, request=request)
    tokens: list[int] = []
    while len(tokens) < new:
        state, results = engine.generate(value, state)
        rows = results.rows
        assert rows["valid"][0, 0]
        tokens += rows["tokens"][0, rows["valid"][0].astype(bool)].tolist()
    return tokens


def copy_of(name: str, folder: Path) -> Path:
    """A fixture that may be broken."""
    return shutil.copytree(GOLDEN / name, folder / name)
