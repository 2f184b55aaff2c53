"""The config tree: one frozen pydantic model a section, mirrored one to one by YAML.

`load_config("a.yaml", "b.yaml", "control.max_staleness=2")` composes left to right. Unknown keys fail with
the nearest spelling, combinations that cannot work fail here, before anything starts.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Mapping
from itertools import groupby
from pathlib import Path
from typing import Any

import yaml
from pydantic import Field, ValidationError, model_validator

from areal_jax.launch_section import LaunchConfig
from areal_jax.presets import preset_settings
from areal_jax.refusals import FIXED_STALENESS, ON_UPDATE, control_refusals, exact_refusals, refusals
from areal_jax.sections import (
    ADAPTERS,
    AlgorithmConfig,
    ControlConfig,
    GenerationConfig,
    ModelSettings,
    ObserveConfig,
    RunConfig,
    RuntimeConfig,
    Section,
    TrainerConfig,
    WeightsConfig,
)
from areal_jax.types import ArealError


class ConfigError(ArealError):
    """A config that cannot run; the message names the key, the value and the remedy."""


class Config(Section):
    run: RunConfig = RunConfig()
    tasks: dict[str, dict[str, Any]] = Field(default_factory=dict)
    """name or module:Name -> its settings, and `weight` where several tasks mix."""
    model: ModelSettings = ModelSettings()
    algorithm: AlgorithmConfig = AlgorithmConfig()
    generation: GenerationConfig = GenerationConfig()
    control: ControlConfig = ControlConfig()
    trainer: TrainerConfig = TrainerConfig()
    weights: WeightsConfig = WeightsConfig()
    runtime: RuntimeConfig = RuntimeConfig()
    observe: ObserveConfig = ObserveConfig()
    launch: LaunchConfig = LaunchConfig()

    @property
    def max_staleness(self) -> int | None:
        """η; None = unbounded."""
        if self.control.max_staleness is None:
            return FIXED_STALENESS.get(self.control.strategy, 2)
        return None if self.control.max_staleness == "unbounded" else self.control.max_staleness

    @property
    def on_update(self) -> str:
        return self.generation.on_update or ON_UPDATE[self.control.strategy][0]

    @property
    def parameter_sets(self) -> int:
        """Versions of the parameters that a host may hold at once: the one it decodes under and the next;
        pinned, that of every live sample and the next.
        """
        return max(2, 1 + (self.max_staleness or 0)) if self.on_update == "pinned" else 2

    @property
    def weights_backend(self) -> str:
        if self.weights.backend != "auto":
            return self.weights.backend
        return "transfer" if self.runtime.redis else "memory"

    @property
    def row_length(self) -> int:
        return self.trainer.length or self.generation.length

    @property
    def trainable(self) -> str | None:
        """Regular expression over the paths of the leaves that are trained; None: all."""
        return self.trainer.trainable or (ADAPTERS if self.model.lora.rank else None)

    @model_validator(mode="before")
    @classmethod
    def _with_preset(cls, data: Any) -> Any:
        if not isinstance(data, Mapping):
            return data
        given = data.get("algorithm") or {}
        if not isinstance(given, Mapping):
            return data
        return {**data, "algorithm": preset_settings(given)}

    @model_validator(mode="after")
    def _can_work(self) -> Config:
        for problem in _impossible(self):
            raise ValueError(problem)
        return self


def _impossible(c: Config) -> Iterator[str]:
    """Combinations that type-check and still cannot work, each with its remedy."""
    g, a, t = c.generation, c.algorithm, c.trainer
    yield from _impossible_control(c)
    if c.weights_backend == ("memory" if c.runtime.redis else "transfer"):
        yield (
            f"weights.backend={c.weights.backend} with runtime.redis={c.runtime.redis}: memory is for one "
            "process and transfer for several, which meet at runtime.redis; leave it at auto, or use orbax"
        )
    yield from refusals(a, g.max_tokens)
    if t.numerics == "exact":
        yield from exact_refusals(t.mesh.shape, c.runtime.host_tensor, c.on_update)
    if t.batch_size % a.minibatches:
        yield (
            f"algorithm.minibatches={a.minibatches} does not divide trainer.batch_size={t.batch_size} "
            "groups; choose a divisor"
        )
    if g.max_tokens >= g.length:
        yield (
            f"generation.max_tokens={g.max_tokens} leaves no room for a prompt in "
            f"generation.length={g.length}; raise length or lower max_tokens"
        )
    if c.row_length < g.length:
        yield (
            f"trainer.length={t.length} is shorter than generation.length={g.length}: the longest "
            "trajectory would fit no row; raise trainer.length"
        )
    if g.kv_tokens is not None and g.kv_tokens < g.length:
        yield (
            f"generation.kv_tokens={g.kv_tokens} has no room for one sample of generation.length={g.length}; "
            "give at least that many"
        )
    if g.page_tokens is not None and g.length % g.page_tokens:
        yield f"generation.page_tokens={g.page_tokens} is no divisor of generation.length={g.length}"
    if g.sampling.is_truncated and not 1 <= g.top_k <= g.support_size:
        yield (
            "truncated sampling for training needs 1 <= generation.top_k <= generation.support_size, so that "
            f"the support is an array; got top_k={g.top_k}, support_size={g.support_size}, top_p={g.top_p}, "
            f"min_p={g.min_p}. Set generation.top_k=256 generation.support_size=256, or top_p=1 min_p=0"
        )


def _impossible_control(c: Config) -> Iterator[str]:
    eta, control = c.max_staleness, c.control
    named = f"control.max_staleness={'unbounded' if eta is None else eta}"
    yield from control_refusals(control, eta, c.on_update)
    if eta is None and control.max_concurrent is None:
        yield (
            f"{named} needs a bound on the groups in flight; set control.max_concurrent="
            f"{max(1, 2 * c.runtime.hosts * c.generation.slots // c.algorithm.group_size)}, or another"
        )
    if control.max_token_age is not None and (eta is None or control.max_token_age < eta):
        yield (
            f"control.max_token_age={control.max_token_age} is below {named}: groups admitted in time would "
            "start again and again; raise max_token_age"
        )


# --- composing ----------------------------------------------------------------------------------------------


def load_config(*sources: str | Path | Mapping[str, Any]) -> Config:
    """Compose YAML files, mappings and `section.key=value` words, left to right. Raises ConfigError.

    What names another algorithm.preset starts that section anew: the settings of one algorithm are not
    another's. Words that follow one another are one layer, so their order plays no part in this.
    """
    tree: dict[str, Any] = {}
    for are_words, layer in groupby(sources, key=_is_word):
        if are_words:
            words = sorted(map(str, layer), key=lambda word: not word.startswith("algorithm.preset="))
            trees = [_from_word(word) for word in words]
        else:
            trees = [each if isinstance(each, Mapping) else _from_file(Path(each)) for each in layer]
        for each in trees:
            tree = _merge(tree, each)
    return make_config(tree)


def _is_word(source: str | Path | Mapping[str, Any]) -> bool:
    return isinstance(source, str) and re.match(r"^[A-Za-z_][\w.:-]*=", source) is not None


def make_config(tree: Mapping[str, Any]) -> Config:
    """The typed tree of a plain one. Raises ConfigError that names every bad key."""
    tree = _merge({}, tree)
    _refuse_unknown(tree, Config, "")
    try:
        return Config.model_validate(tree)
    except ValidationError as error:
        raise ConfigError("\n".join(_explain(item) for item in error.errors())) from None


def resolved(config: Config) -> dict[str, Any]:
    """The tree as plain values, with what a key left open stands for filled in."""
    tree = config.model_dump(mode="json")
    if config.control.max_staleness is None:
        tree["control"]["max_staleness"] = config.max_staleness
    tree["generation"]["on_update"] = config.on_update
    tree["generation"]["page_tokens"] = config.generation.tokens_per_page
    tree["trainer"]["length"] = config.row_length
    tree["run"]["dir"] = str(config.run.folder)
    return tree


def to_yaml(config: Config) -> str:
    """The resolved tree; loading it gives the same run."""
    return yaml.safe_dump(resolved(config), sort_keys=False, width=110)


def leaves(section: type[Section] = Config, prefix: str = "") -> Iterator[tuple[str, Any, Any, str]]:
    """(key, type, default, doc) of every key of the tree."""
    for name, field in section.model_fields.items():
        kind = field.annotation
        if isinstance(kind, type) and issubclass(kind, Section):
            yield from leaves(kind, f"{prefix}{name}.")
        else:
            yield (
                f"{prefix}{name}",
                kind,
                field.get_default(call_default_factory=True),
                field.description or "",
            )


def _from_file(path: Path) -> Mapping[str, Any]:
    if not path.is_file() and (packaged := Path(__file__).parent / path).is_file():
        path = packaged  # configs/quickstart.yaml, wherever the working folder is
    if not path.is_file():
        recipes = [f"configs/{recipe.name}" for recipe in (Path(__file__).parent / "configs").glob("*.yaml")]
        near = difflib.get_close_matches(str(path), recipes, n=1)
        remedy = f"did you mean {near[0]}?" if near else "give a YAML file, or section.key=value"
        raise ConfigError(f"no config file {path}; {remedy}")
    try:
        tree = yaml.safe_load(path.read_text()) or {}
    except yaml.YAMLError as error:
        raise ConfigError(f"{path} is not YAML: {error}") from None
    if not isinstance(tree, Mapping):
        raise ConfigError(f"{path} holds a {type(tree).__name__}; a config is a mapping of sections")
    return tree


def _from_word(word: str) -> Mapping[str, Any]:
    key, _, text = word.partition("=")
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ConfigError(f"{word}: the value is not YAML: {error}") from None
    if isinstance(value, str) and re.fullmatch(r"[+-]?\d+(\.\d*)?[eE][+-]?\d+", value):
        value = float(value)  # YAML 1.1 reads 1e-5 as text
    first, *rest = key.split(".")
    if first == "tasks" and ":" in key:  # the module path in tasks.pkg.module:Name.key has dots of its own
        end = next(number for number, part in enumerate(rest) if ":" in part)
        rest = [".".join(rest[: end + 1]), *rest[end + 1 :]]
    tree = {[first, *rest][-1]: value}
    for part in reversed([first, *rest][:-1]):
        tree = {part: tree}
    return tree


def _merge(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(base)
    for key, value in over.items():
        if key == "tasks" and isinstance(value, (str, list)):
            merged[key] = _tasks(value)  # a name or a list replaces the tasks, a mapping adds to them
            continue
        old = merged.get(key)
        if key == "algorithm" and _is_another_preset(old, value):
            old = None
        merged[key] = _merge(old, value) if isinstance(old, Mapping) and isinstance(value, Mapping) else value
    return merged


def _is_another_preset(old: Any, new: Any) -> bool:
    if not (isinstance(old, Mapping) and isinstance(new, Mapping) and "preset" in new):
        return False
    return new["preset"] != old.get("preset", AlgorithmConfig().preset)


def _tasks(value: str | list[Any]) -> dict[str, Any]:
    names = [value] if isinstance(value, str) else value
    for name in names:
        if not isinstance(name, str):
            raise ConfigError(f"tasks: {name!r} is not a task's name; write tasks=[name, module:Name]")
    return {name: {} for name in names}


def _refuse_unknown(tree: Mapping[str, Any], section: type[Section], prefix: str) -> None:
    names = section.model_fields
    for key, value in tree.items():
        if key not in names:
            everywhere = {leaf.split(".")[-1]: leaf for leaf, *_ in leaves()}
            near = difflib.get_close_matches(str(key), names, n=1)
            hint = prefix + near[0] if near else None
            if hint is None and (far := difflib.get_close_matches(str(key), everywhere, n=1)):
                hint = everywhere[far[0]]
            known = f"known here: {', '.join(names)}"
            raise ConfigError(f"unknown key {prefix}{key}; {f'did you mean {hint}?' if hint else known}")
        kind = names[key].annotation
        if isinstance(kind, type) and issubclass(kind, Section) and isinstance(value, Mapping):
            _refuse_unknown(value, kind, f"{prefix}{key}.")


def _explain(item: Any) -> str:
    key = ".".join(str(part) for part in item["loc"])
    if item["type"] == "value_error" and not key:
        return str(item["ctx"]["error"])
    value = f" (got {item['input']!r})" if not isinstance(item["input"], Mapping) else ""
    return f"{key}: {item['msg']}{value}; `areal-jax config {key}` explains it"
