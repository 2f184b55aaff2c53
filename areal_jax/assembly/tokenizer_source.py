"""Finds the tokenizer of `model.source`, without jax, for processes that only read tokens or score them."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import cast

from areal_jax.config.loading import load_config
from areal_jax.config.tree import Config
from areal_jax.plugin import needing
from areal_jax.tasks.source import WeightedTask, load_tasks
from areal_jax.tasks.tokenizers import ByteTokenizer, Tokenizer
from areal_jax.types import ArealError

RANDOM, SMOLLM2 = "random", "smollm2"

PACKAGES = ("gguf", "jinja2", "tokenizers", "transformers")

RUN_CONFIG, MODEL_CONFIG = "config.yaml", "config.json"


def open_tokenizer(config: Config, tasks: Mapping[str, WeightedTask]) -> Tokenizer:
    """Opens the tokenizer of the model `config.model.source`; with source=random, that which `tasks` define.

    Raises ArealError if there is no such model.
    """
    m = config.model
    if m.source == RANDOM:
        return own_tokenizer(config, tasks)
    if (Path(m.source) / RUN_CONFIG).exists():
        return open_tokenizer(*run_model(Path(m.source), m.special_text))
    with explained(f"model.source={m.source}"):
        from areal_jax.tasks.hf_tokenizer import HFTokenizer

        return cast(Tokenizer, HFTokenizer.from_folder(model_folder(m.source), m.special_text))


def run_model(folder: Path, special_text: str | None = None) -> tuple[Config, Mapping[str, WeightedTask]]:
    """Returns the config of the run in `folder`, and those of its tasks on which its tokenizer depends.

    `special_text`: value of model.special_text; None: the run's own.
    """
    theirs = load_config(folder / RUN_CONFIG)
    theirs = theirs.with_values("model", special_text=special_text or theirs.model.special_text)
    # Their tasks may be anybody's code, and decide nothing of another model than a random one's vocabulary.
    is_theirs = theirs.model.source == RANDOM and theirs.model.tokenizer != "byte"
    try:
        return theirs, load_tasks(theirs.tasks) if is_theirs else {}
    except ArealError as error:
        raise ArealError(f"{folder / RUN_CONFIG}: {error}") from None


def own_tokenizer(config: Config, tasks: Mapping[str, WeightedTask]) -> Tokenizer:
    """Returns the tokenizer that the tasks define, or a byte tokenizer if no task defines one.

    With model.tokenizer=byte, the result is always a byte tokenizer. Raises ArealError if the tasks define
    tokenizers of different types.
    """
    if config.model.tokenizer == "byte":
        return ByteTokenizer()
    own = {name: weighted.task.tokenizer for name, weighted in tasks.items()}
    kinds = {type(tokenizer) for tokenizer in own.values()}
    if len(kinds) > 1:
        named = ", ".join(f"{name}: {type(t).__name__ if t else 'none'}" for name, t in own.items())
        raise ArealError(
            f"the tasks define different tokenizers ({named}); set model.tokenizer=byte to use bytes for all"
        )
    return next(iter(own.values()), None) or ByteTokenizer()


def model_folder(name: str) -> Path:
    """Returns the Hugging Face folder of the model `name`: smollm2, a GGUF file, or a Hugging Face folder.

    A GGUF file is first converted. Raises ArealError if no file or folder `name` exists.
    """
    from areal_jax.models.io.gguf import cached_folder, smollm2_gguf

    path = Path(name)
    if name == SMOLLM2:
        return cached_folder(smollm2_gguf())
    if path.is_file():
        return cached_folder(path)
    if path.is_dir():
        return path
    raise ArealError(
        f"model.source={name}: no such file or folder; give {RANDOM}, {SMOLLM2}, a folder with "
        f"{MODEL_CONFIG} and safetensors, a GGUF file, or a run's folder"
    )


def explained(what: str) -> AbstractContextManager[None]:
    """Returns a context manager: in its block, a missing package of the extra [pretrained] raises ArealError.

    The message says that `what` (a setting or command) needs the package, and how to install it.
    """
    return needing(what, "pretrained", PACKAGES)
