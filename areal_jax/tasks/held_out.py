"""Loads the tasks of an evaluation; a task with the setting `split` gets its test split by default."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from areal_jax.plugin import load_object
from areal_jax.tasks.source import BUILTIN, WeightedTask, load_tasks
from areal_jax.tasks.task import Task
from areal_jax.types import ArealError

SPLIT = "test"


def held_out(given: Mapping[str, Mapping[str, Any]]) -> dict[str, WeightedTask]:
    """Returns the tasks of `given`, a config's `tasks` section; split=test unless the section sets `split`.

    A task that has no setting `split` offers all its prompts. Raises ArealError if the section is empty or a
    task cannot be made.
    """
    if not given:
        raise ArealError(f"eval needs a task; give tasks=NAME, one of {', '.join(BUILTIN)}, or module:Name")
    settings = {}
    for name, own in given.items():
        own = dict(own or {})
        make = load_object(name, BUILTIN, "task")
        if not isinstance(make, Task) and callable(make) and "split" in inspect.signature(make).parameters:
            own.setdefault("split", SPLIT)
        settings[name] = own
    return load_tasks(settings)


def without_splits(given: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Returns a run's `tasks` section without the setting `split`, which selects prompts for training."""
    return {
        name: {key: value for key, value in (own or {}).items() if key != "split"}
        for name, own in given.items()
    }
