"""Makes the config tree from YAML files, mappings and `section.key=value` words of a command line.

In `load_config("a.yaml", "b.yaml", "control.max_staleness=2")` later sources override earlier ones. An
unknown key raises ConfigError with the nearest known spelling.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from itertools import groupby
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from areal_jax.config.removed import ADDED, REMOVED
from areal_jax.config.sections import AlgorithmConfig, Section
from areal_jax.config.tree import Config
from areal_jax.plugin import did_you_mean, nearest
from areal_jax.types import ArealError

TASK_SECTIONS = ("tasks", "trainer.supervised.tasks")
"""Keys of mappings from the name of a task to its settings."""

STORED = Config.model_fields.keys() - {"episode", "launch"}
"""The sections that every config.yaml of a run's folder has; no recipe has them all."""


class ConfigError(ArealError):
    """An invalid config; the message names the key, the value and the remedy."""


def load_config(*sources: str | Path | Mapping[str, Any]) -> Config:
    """Composes YAML files, mappings and `section.key=value` words; later sources override earlier ones.

    Raises ConfigError for an invalid config. A source that changes algorithm.preset discards the algorithm
    settings of earlier sources, since settings of one algorithm do not apply to another. Consecutive words
    count as one source: an algorithm.preset among these words, at any position, discards none of the words.
    """
    tree: dict[str, Any] = {}
    for are_words, layer in groupby(sources, key=_is_word):
        if are_words:
            words = sorted(map(str, layer), key=lambda word: not word.startswith("algorithm.preset="))
            trees = [_from_word(word) for word in words]
        else:
            trees = [each if isinstance(each, Mapping) else _from_file(Path(each)) for each in layer]
        for each in trees:
            tree = _merge(tree, _of_this_version(each))
    return make_config(tree)


def _is_word(source: str | Path | Mapping[str, Any]) -> bool:
    return isinstance(source, str) and re.match(r"^[A-Za-z_][\w.:-]*=", source) is not None


def make_config(tree: Mapping[str, Any]) -> Config:
    """Returns the config with the values of `tree`: section -> key -> value.

    Raises ConfigError for unknown keys and invalid values; its message names each key with the remedy.
    """
    tree = _merge({}, _of_this_version(tree))
    _refuse_unknown(tree, Config, "")
    try:
        return Config.model_validate(tree)
    except ValidationError as error:
        raise ConfigError("\n".join(_explain(item) for item in error.errors())) from None


def resolved(config: Config) -> dict[str, Any]:
    """Returns the config as nested dicts; defaults that depend on other keys are replaced by their values."""
    tree = config.model_dump(mode="json")
    if config.control.max_staleness is None:
        tree["control"]["max_staleness"] = config.max_staleness
    tree["model"]["activations"] = config.activations
    tree["generation"]["on_update"] = config.on_update
    tree["generation"]["page_tokens"] = config.generation.tokens_per_page
    tree["trainer"]["length"] = config.row_length
    tree["trainer"]["logp_chunk"] = config.logp_chunk
    tree["weights"]["wire_dtype"] = config.wire_dtype
    tree["run"]["dir"] = str(config.run.folder)
    return tree


def to_yaml(config: Config) -> str:
    """Returns the resolved config as YAML; a run with this YAML as its config repeats the run."""
    return yaml.safe_dump(resolved(config), sort_keys=False, width=110)


def leaves(section: type[Section] = Config, prefix: str = "") -> Iterator[tuple[str, Any, Any, str]]:
    """Yields (key, type, default, doc) for every key of `section`; each key begins with `prefix`.

    Keys of subsections are included, as `subsection.key`.
    """
    for name, field in section.model_fields.items():
        kind = field.annotation
        if isinstance(kind, type) and issubclass(kind, Section):
            yield from leaves(kind, f"{prefix}{name}.")
        else:
            yield (
                f"{prefix}{name}",
                kind,
                field.get_default(call_default_factory=True, validated_data={}),
                field.description or "",
            )


class _Loader(yaml.SafeLoader):
    """Reads 3e-4 as a number; YAML 1.1, and so PyYAML, wants 3.0e-4."""


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?\d+(\.\d*)?[eE][-+]?\d+$"), list("-+0123456789")
)


def parsed(text: str) -> Any:
    """Returns the value of a YAML text. Raises yaml.YAMLError if it is not YAML."""
    return yaml.load(text, _Loader)  # a SafeLoader


def _from_file(path: Path) -> Mapping[str, Any]:
    if not path.is_file() and (packaged := Path(__file__).parents[1] / path).is_file():
        path = packaged  # configs/quickstart.yaml, wherever the working folder is
    if not path.is_file():
        recipes = [
            f"configs/{recipe.name}" for recipe in (Path(__file__).parents[1] / "configs").glob("*.yaml")
        ]
        remedy = did_you_mean(str(path), recipes, "give a YAML file, or section.key=value")
        raise ConfigError(f"there is no config file {path}; {remedy}")
    try:
        tree = parsed(path.read_text(encoding="utf-8")) or {}
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not text in UTF-8 ({error}); save it as UTF-8") from None
    except yaml.YAMLError as error:
        raise ConfigError(f"{path} is not YAML; correct this line: {error}") from None
    if not isinstance(tree, Mapping):
        raise ConfigError(
            f"{path} contains a {type(tree).__name__}, not a mapping of sections; write `section: "
            f"{{key: value}}`"
        )
    return tree


def _from_word(word: str) -> Mapping[str, Any]:
    key, _, text = word.partition("=")
    try:
        value = parsed(text)
    except yaml.YAMLError as error:
        raise ConfigError(
            f"{word}: the value is not YAML ({error}); to give text, put the value in quotes"
        ) from None
    parts = key.split(".")
    section = next((name.split(".") for name in TASK_SECTIONS if key.startswith(f"{name}.")), None)
    if section and ":" in key:  # the module path in tasks.pkg.module:Name.key has dots of its own
        end = next(number for number, part in enumerate(parts) if ":" in part)
        parts = [*section, ".".join(parts[len(section) : end + 1]), *parts[end + 1 :]]
    return _nested(parts, value)


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


def _of_this_version(tree: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns the config `tree` without keys of earlier versions (`REMOVED`), and with those `ADDED` since.

    Only a config that a run has stored may have such keys: a value whose key was renamed gets the new key,
    and one that says what the code does anyway is dropped. Raises ConfigError for any other.
    """
    is_stored = tree.keys() >= STORED
    for key, value in ADDED.items() if is_stored else ():
        tree = _merge(_nested(key.split("."), value), tree)
    for key, removed in REMOVED.items():
        parts = key.split(".")
        section: Any = tree
        for part in parts[:-1]:
            section = section.get(part) if isinstance(section, Mapping) else None
        if not isinstance(section, Mapping) or parts[-1] not in section:
            continue
        value = section[parts[-1]]
        if not is_stored:
            raise ConfigError(f"{key}={value}: this key was removed; {removed.instead}")
        if not removed.renamed and not removed.is_ignored and value != removed.now:
            raise ConfigError(
                f"{key}={value} in the config of an earlier version's run: areal-jax now works as with "
                f"{key}={removed.now} only; use the version that started the run"
            )
        tree = _without(tree, parts)
        if removed.renamed:
            tree = _merge(tree, _nested(removed.renamed.split("."), value))
    return tree


def _without(tree: Mapping[str, Any], parts: list[str]) -> dict[str, Any]:
    name, *rest = parts
    own = {key: value for key, value in tree.items() if key != name}
    return {**own, name: _without(tree[name], rest)} if rest else own


def _nested(parts: list[str], value: Any) -> dict[str, Any]:
    for part in reversed(parts):
        value = {part: value}
    return value


def _is_another_preset(old: Any, new: Any) -> bool:
    if not (isinstance(old, Mapping) and isinstance(new, Mapping) and "preset" in new):
        return False
    return new["preset"] != old.get("preset", AlgorithmConfig().preset)


def _tasks(value: str | list[Any]) -> dict[str, Any]:
    names = [value] if isinstance(value, str) else value
    for name in names:
        if not isinstance(name, str):
            raise ConfigError(
                f"tasks: {name!r} is not a task's name (a string); write tasks=[NAME, module:Name], and "
                "settings as tasks.NAME.KEY=VALUE"
            )
    return {name: {} for name in names}


def _refuse_unknown(tree: Mapping[str, Any], section: type[Section], prefix: str) -> None:
    names = section.model_fields
    for key, value in tree.items():
        if key not in names:
            deepest_first = sorted((leaf for leaf, *_ in leaves()), key=lambda leaf: -leaf.count("."))
            everywhere = {leaf.split(".")[-1]: leaf for leaf in deepest_first}
            near = nearest(str(key), names)
            meant = prefix + near if near else everywhere.get(nearest(str(key), everywhere))
            hint = f"did you mean {meant}?" if meant else f"known keys: {', '.join(names)}"
            raise ConfigError(f"unknown key {prefix}{key}; {hint}")
        kind = names[key].annotation
        if isinstance(kind, type) and issubclass(kind, Section) and isinstance(value, Mapping):
            _refuse_unknown(value, kind, f"{prefix}{key}.")


def _explain(item: Any) -> str:
    key = ".".join(str(part) for part in item["loc"])
    if item["type"] == "value_error" and not key:
        return str(item["ctx"]["error"])
    value = f" (got {item['input']!r})" if not isinstance(item["input"], Mapping) else ""
    return f"{key}: {item['msg']}{value}; `areal-jax config {key}` explains the key"
