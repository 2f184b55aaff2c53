"""The parts, for a loop of one's own."""

from __future__ import annotations

from typing import Any

from areal_jax.config import AlgorithmConfig, make_config
from areal_jax.models.config import SHAPES, model_config
from areal_jax.models.model import Model, Params
from areal_jax.presets import PRESETS
from areal_jax.runtime.sources import open_source
from areal_jax.tasks.tokenizers import ByteTokenizer, Tokenizer
from areal_jax.types import ArealError


def load_model(
    source: str,
    *,
    tokenizer: Tokenizer | None = None,
    seed: int = 0,
    dtype: str = "float32",
    **overrides: Any,
) -> tuple[Model, Params]:
    """A model and its float32 parameters.

    `source` is a named shape, whose parameters are random (bytes are its tokens unless a tokenizer is given,
    `overrides` change single sizes), or what `model.source` takes: smollm2, a Hugging Face folder, a GGUF
    file, a run's folder. Raises ArealError for anything else.
    """
    if source in SHAPES:
        tokenizer = tokenizer or ByteTokenizer()
        model = Model(model_config(source, tokenizer.vocab_size, dtype, **overrides), tokenizer)
        return model, model.init(seed)
    if tokenizer is not None:
        raise ArealError(f"model {source!r} has its own tokenizer; leave tokenizer out, or name a shape")
    settings = {"source": source, "dtype": dtype, "overrides": overrides}
    opened = open_source(make_config({"run": {"seed": seed}, "model": settings}), {})
    return opened.model, opened.load(None)


def preset(name: str, **settings: Any) -> AlgorithmConfig:
    """The `algorithm` section of that preset, with these settings over its defaults. Raises ConfigError."""
    minibatches = settings.get(
        "minibatches", PRESETS[name].settings.get("minibatches", 1) if name in PRESETS else 1
    )
    tree = {"algorithm": {"preset": name, **settings}, "trainer": {"batch_size": minibatches}}
    return make_config(tree).algorithm
