"""Verbs that say what there is: config, algorithms, tasks, doctor."""

from __future__ import annotations

import difflib
from typing import Annotated, Union, get_args, get_origin

import typer

from areal_jax.cli.shell import plain_errors, print_json
from areal_jax.cli.train import AsJson


def register(app: typer.Typer) -> None:
    app.command()(config)
    app.command()(algorithms)
    app.command()(tasks)
    app.command()(doctor)


@plain_errors
def config(
    key: Annotated[str, typer.Argument(help="A key or section; all without one.")] = "", json: AsJson = False
) -> None:
    """Explain config keys: type, default, what it does."""
    from areal_jax.config import ConfigError, leaves

    every = {name: (_kind(kind), default, doc) for name, kind, default, doc in leaves()}
    shown = {
        name: leaf for name, leaf in every.items() if name == key or name.startswith(f"{key}." if key else "")
    }
    if not shown:
        near = difflib.get_close_matches(key, every, n=1)
        raise ConfigError(f"no config key {key}" + (f"; did you mean {near[0]}?" if near else ""))
    if json:
        print_json(
            {
                name: {"type": kind, "default": default, "doc": doc}
                for name, (kind, default, doc) in shown.items()
            }
        )
        return
    for name, (kind, default, doc) in shown.items():
        typer.echo(f"{name} = {default!r}  ({kind})\n    {' '.join(doc.split())}")


def _kind(kind: object) -> str:
    if get_origin(kind) is Union:  # what `int | Literal[...]` evaluates to
        return " | ".join("None" if one is type(None) else _kind(one) for one in get_args(kind))
    return kind.__name__ if isinstance(kind, type) else str(kind).replace("typing.", "")


@plain_errors
def algorithms(json: AsJson = False) -> None:
    """The algorithm presets: formula and paper."""
    from areal_jax.presets import PRESETS

    if json:
        print_json({name: preset._asdict() for name, preset in PRESETS.items()})
        return
    for name, preset in PRESETS.items():
        typer.echo(f"{name}\n    {preset.formula}\n    {preset.paper}")


@plain_errors
def tasks(json: AsJson = False) -> None:
    """The built-in tasks; your own is module:Name."""
    from areal_jax.tasks.source import BUILTIN

    if json:
        print_json({name: doc for name, (_, doc) in BUILTIN.items()})
        return
    for name, (_, doc) in BUILTIN.items():
        typer.echo(f"{name}: {doc}")


@plain_errors
def doctor(json: AsJson = False) -> None:
    """Devices, memory and versions of this machine."""
    from areal_jax.runtime.devices import diagnose

    figures = diagnose()
    if json:
        print_json(figures)
        return
    for name, value in figures.items():
        typer.echo(f"{name}: {value}")
