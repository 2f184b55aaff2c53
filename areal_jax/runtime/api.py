"""The parts, for a loop of one's own."""

from __future__ import annotations

from typing import Any

from areal_jax.config import AlgorithmConfig, make_config
from areal_jax.models.config import SHAPES, model_config
from areal_jax.models.model import Model, Params
from areal_jax.presets import PRESETS
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
    """A model and its parameters. `source` is a named shape, whose parameters are random.

    The tokenizer is bytes unless given. Raises ArealError for anything else.
    """
    if source not in SHAPES:
        raise ArealError(
            f"no model {source!r}; there are the shapes {', '.join(SHAPES)}, with random parameters"
        )
    tokenizer = tokenizer or ByteTokenizer()
    model = Model(model_config(source, tokenizer.vocab_size, dtype, **overrides), tokenizer)
    return model, model.init(seed)


def preset(name: str, **settings: Any) -> AlgorithmConfig:
    """The `algorithm` section of that preset, with these settings over its defaults. Raises ConfigError."""
    minibatches = settings.get(
        "minibatches", PRESETS[name].settings.get("minibatches", 1) if name in PRESETS else 1
    )
    tree = {"algorithm": {"preset": name, **settings}, "trainer": {"batch_size": minibatches}}
    return make_config(tree).algorithm
