"""Writes a model as a Hugging Face folder; of a LoRA run, if asked, only the adapters or the base model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax

from areal_jax.assembly.sources import Source, open_source, run_params, run_source
from areal_jax.assembly.tokenizer_source import RUN_CONFIG, explained
from areal_jax.config.loading import make_config
from areal_jax.config.tree import Config
from areal_jax.models.lora import base_of
from areal_jax.models.model import Model, Params
from areal_jax.trainer.trainable import Trainable
from areal_jax.types import ArealError

MERGED, ADAPTER, BASE = FORMS = ("merged", "adapter", "base")


def convert(source: str, target: Path, dtype: str = "float32", form: str = MERGED) -> dict[str, Any]:
    """Write the model `source`, a value of `model.source`, to `target`, a new folder for transformers.

    Of a run, the newest committed version is written. `form`, for a run with adapters: merged (the base model
    with the adapters added to its matrices), adapter (the adapters alone, for peft) or base (the base model
    alone). `dtype`: type of the written parameters. Returns a dict to show: folder, parameters (their
    number), dtype, has_tokenizer; with form=adapter also base: where to find the base model. Raises
    ArealError if the source does not exist or has no such form, or if the target already exists.
    """
    if form not in FORMS:
        raise ArealError(f"--as {form} is unknown; choose one of: {', '.join(FORMS)}")
    with explained("convert"):
        if form == MERGED:
            opened = open_source(make_config({"model": {"source": source}}), {})
            return _write_model(opened, opened.model, opened.load(None), target, dtype)
        config, opened = _run_with_adapters(Path(source), form)
        params = run_params(Path(source), config, opened.model)
        if form == BASE:
            params = opened.model.without_adapters(params)
            return _write_model(opened, opened.model.base, params, target, dtype)
        return _write_adapter(source, config, opened, params, target, dtype)


def _run_with_adapters(folder: Path, form: str) -> tuple[Config, Source]:
    if (folder / RUN_CONFIG).exists():
        config, opened = run_source(folder)
        if config.model.lora.rank:
            return config, opened
    raise ArealError(
        f"--as {form}: {folder} is not a run with adapters (model.lora.rank > 0); leave out --as {form}"
    )


def _write_model(opened: Source, model: Model, params: Params, target: Path, dtype: str) -> dict[str, Any]:
    from areal_jax.models.io.huggingface import export_folder

    export_folder(target, model.config, params, dtype, tokenizer_from=opened.folder)
    return _figures(target, model.parameter_count, dtype, opened.folder is not None)


def _write_adapter(
    run: str, config: Config, opened: Source, params: Params, target: Path, dtype: str
) -> dict[str, Any]:
    from areal_jax.models.io.peft import export_adapter

    trained = Trainable(config.trainable).of(opened.model.abstract_params)
    if jax.tree.leaves(base_of(trained)):
        raise ArealError(
            f"--as adapter: {run} trained parameters outside its adapters (trainer.trainable="
            f"{config.trainable}), which an adapter file cannot hold; use --as merged"
        )
    name = base_name(run, config, opened)
    export_adapter(target, opened.model.config, params, name, dtype)
    count = opened.model.parameter_count - opened.model.base.parameter_count
    return _figures(target, count, dtype, False) | {"base": name}


def base_name(run: str, config: Config, opened: Source) -> str:
    """Returns the folder of a run's base model, to which its adapters belong, or a text with a command.

    The command writes the base model to a folder; it is returned if no folder contains this model yet,
    because the run started from random parameters or from another run, or had supervised steps. `run`: the
    run's folder; `config`: the run's config; `opened`: the source from which the run started.
    """
    is_as_read = not (Path(config.model.source) / RUN_CONFIG).exists() and not config.trainer.supervised.steps
    if opened.folder is not None and is_as_read:
        return str(opened.folder)
    return f"the folder written by: areal-jax convert {run} FOLDER --as base"


def _figures(target: Path, parameters: int, dtype: str, has_tokenizer: bool) -> dict[str, Any]:
    return {
        "folder": str(target),
        "parameters": parameters,
        "dtype": dtype,
        "has_tokenizer": has_tokenizer,
    }
