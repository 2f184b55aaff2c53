"""Commands that explain config keys, presets, tasks and this machine: config, algorithms, tasks, doctor."""

from __future__ import annotations

from inspect import getdoc
from typing import Annotated, Union, get_args, get_origin

import typer

from areal_jax.cli.shell import AsJson, show


def config(
    key: Annotated[str, typer.Argument(help="The key or section to explain; all keys if omitted.")] = "",
    json: AsJson = False,
) -> None:
    """Explain config keys: type, default and meaning."""
    from areal_jax.config.loading import ConfigError, leaves
    from areal_jax.plugin import did_you_mean

    every = {
        name: {"type": _kind(kind), "default": default, "doc": doc} for name, kind, default, doc in leaves()
    }
    shown = {
        name: leaf for name, leaf in every.items() if name == key or name.startswith(f"{key}." if key else "")
    }
    if not shown:
        hint = did_you_mean(key, every, "`areal-jax config` lists all keys")
        raise ConfigError(f"there is no config key {key}; {hint}")
    lines = (
        f"{name} = {leaf['default']!r}  ({leaf['type']})\n    {' '.join(leaf['doc'].split())}"
        for name, leaf in shown.items()
    )
    show(shown, json, lines)


def _kind(kind: object) -> str:
    if get_origin(kind) is Union:  # the type of `int | Literal[...]`
        return " | ".join("None" if one is type(None) else _kind(one) for one in get_args(kind))
    return kind.__name__ if isinstance(kind, type) else str(kind).replace("typing.", "")


def algorithms(json: AsJson = False) -> None:
    """List the algorithm presets: formula and paper."""
    from areal_jax.config.presets import PRESETS

    lines = (f"{name}\n    {preset.formula}\n    {preset.paper}" for name, preset in PRESETS.items())
    show({name: preset._asdict() for name, preset in PRESETS.items()}, json, lines)


def tasks(json: AsJson = False) -> None:
    """List the built-in tasks, for tasks=NAME; your own task is given as tasks=module:Name."""
    from areal_jax.plugin import load_object
    from areal_jax.tasks.source import BUILTIN

    docs = {name: getdoc(load_object(name, BUILTIN, "task")) or "" for name in BUILTIN}
    show({name: doc.partition("\n")[0] for name, doc in docs.items()}, json)


def doctor(json: AsJson = False) -> None:
    """Show devices, memory and versions of this machine."""
    from areal_jax.assembly.doctor import diagnose

    show(diagnose(), json)
