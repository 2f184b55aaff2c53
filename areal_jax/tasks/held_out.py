"""What a model is evaluated on: tasks on the split that nothing was trained on, where they have one."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any, NamedTuple

from areal_jax.plugin import load_object
from areal_jax.tasks.source import BUILTIN, WeightedTask, load_tasks
from areal_jax.tasks.task import Task
from areal_jax.types import ArealError

SPLIT = "test"


class HeldOut(NamedTuple):
    tasks: Mapping[str, WeightedTask]
    splits: Mapping[str, str | None]
    """Of each task; None: one without splits, evaluated as it is."""


def held_out(given: Mapping[str, Mapping[str, Any]]) -> HeldOut:
    """The tasks of a config's `tasks` section, with split=test where they have one that was not given.

    Raises ArealError.
    """
    if not given:
        raise ArealError(f"eval needs a task; give tasks=NAME: {', '.join(BUILTIN)}, or module:Name")
    settings, splits = {}, {}
    for name, own in given.items():
        own = dict(own or {})
        make = load_object(name, {known: path for known, (path, _) in BUILTIN.items()}, "task")
        if not isinstance(make, Task) and callable(make) and "split" in inspect.signature(make).parameters:
            own.setdefault("split", SPLIT)
        settings[name], splits[name] = own, own.get("split")
    return HeldOut(load_tasks(settings), splits)


def without_splits(given: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """A run's `tasks` section without what it says of training alone."""
    return {
        name: {key: value for key, value in (own or {}).items() if key != "split"}
        for name, own in given.items()
    }
