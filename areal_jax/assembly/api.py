"""The parts of a run as functions, for training loops that users write themselves."""

from __future__ import annotations

from typing import Any

from areal_jax.assembly.sources import open_source
from areal_jax.config.loading import make_config
from areal_jax.config.presets import PRESETS
from areal_jax.config.sections import AlgorithmConfig
from areal_jax.models.config import SHAPES, model_config
from areal_jax.models.model import Model, Params
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
    """Returns a model and its float32 parameters.

    `source` is a built-in model size (tiny, 5m, ...), smollm2, or the path of a Hugging Face folder, a GGUF
    file or a run's folder. A built-in size has random parameters, drawn from `seed`; its tokens are bytes
    unless `tokenizer` is given; `overrides` change its sizes, such as layers=4. `dtype`: type of the inputs
    of matrix products. Raises ArealError if `source` does not exist, or if `tokenizer` or `overrides` are
    given for a source with its own tokenizer and sizes.
    """
    if source in SHAPES:
        tokenizer = tokenizer or ByteTokenizer()
        model = Model(model_config(source, tokenizer.vocab_size, dtype, **overrides), tokenizer)
        return model, model.init(seed)
    if tokenizer is not None:
        raise ArealError(
            f"model {source!r} has its own tokenizer; leave out the argument tokenizer, or use a built-in "
            "size (tiny)"
        )
    settings = {"source": source, "dtype": dtype, "overrides": overrides}
    opened = open_source(make_config({"run": {"seed": seed}, "model": settings}), {})
    return opened.model, opened.load(None)


def preset(name: str, **settings: Any) -> AlgorithmConfig:
    """Returns the config section `algorithm` of the preset `name`; `settings` override the preset's values.

    Raises ConfigError for an unknown name or an invalid setting.
    """
    minibatches = settings.get(
        "minibatches", PRESETS[name].settings.get("minibatches", 1) if name in PRESETS else 1
    )
    tree = {"algorithm": {"preset": name, **settings}, "trainer": {"batch_size": minibatches}}
    return make_config(tree).algorithm
