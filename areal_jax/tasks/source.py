"""Loads a run's tasks, and finds the prompt at each ordinal (place in the run's order)."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np

from areal_jax.plugin import check_settings, load_object
from areal_jax.tasks.errors import USERS, PromptError, TaskError, raised
from areal_jax.tasks.task import Task
from areal_jax.types import Prompt

BUILTIN = {
    "arithmetic": "areal_jax.tasks.datasets.arithmetic:Arithmetic",
    "calculator": "areal_jax.tasks.datasets.calculator:Calculator",
    "chained": "areal_jax.tasks.datasets.chained:Chained",
    "code": "areal_jax.tasks.datasets.code:Code",
    "countdown": "areal_jax.tasks.datasets.countdown:Countdown",
    "gsm8k": "areal_jax.tasks.datasets.math_data:Gsm8k",
    "guess": "areal_jax.tasks.datasets.guess:Guess",
    "gsm8k_interleaved": "areal_jax.tasks.datasets.gsm8k_interleaved:Gsm8kInterleaved",
    "jsonl": "areal_jax.tasks.datasets.jsonl:JsonLines",
    "knights": "areal_jax.tasks.datasets.knights:Knights",
    "math": "areal_jax.tasks.datasets.math_data:Math",
    "reasoning_gym": "areal_jax.tasks.datasets.reasoning_gym:ReasoningGym",
    "textarena": "areal_jax.tasks.outside.environments:TextArenaGame",
    "tool_game": "areal_jax.tasks.datasets.tool_game:ToolGame",
    "verifiers": "areal_jax.tasks.outside.environments:VerifiersTaskset",
}
"""Name of a built-in task -> module:Name of the class. The class's docstring describes the task."""

BLOCK = 1000
"""Number of consecutive prompts in which each task gets its fraction by weight, rounded to whole prompts."""


@dataclass(frozen=True)
class WeightedTask:
    """A task and its weight: a task's fraction of the prompts is its weight / the sum of all weights."""

    task: Task
    weight: float = 1.0
    split: str | None = None
    """The task's setting `split`, such as train or test; None: the config does not set it."""


def load_tasks(
    settings: Mapping[str, Mapping[str, Any]], objects: Sequence[Task] = ()
) -> dict[str, WeightedTask]:
    """Returns tasks by name: `objects` or, if that is empty, the tasks that `settings` describes.

    `settings` is the section `tasks` of a config: task name -> settings. An object is named after its class;
    a second object of the class CLASS is named CLASS-2. Raises ArealError if there is no task, or if a task
    cannot be made.
    """
    if objects:
        return _named(objects)
    if not settings:
        raise TaskError(
            f"a run needs a task; give tasks=NAME, one of {', '.join(BUILTIN)}, or module:Name of your own"
        )
    return {name: _load(name, given or {}) for name, given in settings.items()}


def _named(objects: Sequence[Task]) -> dict[str, WeightedTask]:
    tasks: dict[str, WeightedTask] = {}
    for task in objects:
        if not isinstance(task, Task):
            raise TaskError(f"{task!r:.80} is not a Task; subclass areal_jax.Task, or use Task.from_rows")
        name = base = type(task).__name__.lstrip("_")
        number = 1
        while name in tasks:
            number += 1
            name = f"{base}-{number}"
        tasks[name] = WeightedTask(task)
    return tasks


def _load(name: str, given: Mapping[str, Any]) -> WeightedTask:
    key = f"tasks.{name}"
    own = {setting: value for setting, value in given.items() if setting != "weight"}
    weight = given.get("weight", 1.0)
    if isinstance(weight, bool) or not isinstance(weight, (int, float)) or not 0 < weight < float("inf"):
        raise TaskError(
            f"{key}.weight={weight!r} is not a positive number; to switch a task off, leave it out of `tasks`"
        )
    make = load_object(name, BUILTIN, "task")
    if isinstance(make, Task):
        if own:
            raise TaskError(f"{key} is a Task object, which takes no settings; leave out {', '.join(own)}")
        return WeightedTask(make, float(weight))
    check_settings(make, own, key)
    try:
        task = make(**own)
    except (TypeError, ValueError) as error:
        raise TaskError(f"{key} cannot be made with the settings {own}: {error}; correct them") from error
    if not isinstance(task, Task):
        raise TaskError(f"{key} returned a {type(task).__name__}, not a Task; subclass areal_jax.Task")
    return WeightedTask(task, float(weight), own.get("split"))


def prompt_at(task: Task, name: str, index: int) -> Prompt:
    """Returns a task's prompt at `index`, with the task's name; PromptError if the task returns none."""
    try:
        prompt = task[index]
    except (IndexError, StopIteration) as error:
        raise PromptError(
            f"tasks.{name} has no prompt at index {index} ({error!r}), but its __len__ returns "
            f"{len(task)}; prompts are read in any order and more than once: return from __len__ the "
            "number of prompts that the task has, and keep the prompts of an iterator in a list"
        ) from error
    except USERS as error:
        raise PromptError(
            f"tasks.{name} could not read its prompt at index {index}: {raised(error)}; correct this row of "
            "its data, or leave the row out"
        ) from error
    if not isinstance(prompt, Prompt):
        raise PromptError(
            f"tasks.{name} returned {prompt!r:.80} for its prompt at index {index}, a "
            f"{type(prompt).__name__}; return an areal_jax.Prompt"
        )
    return replace(prompt, task=name)


class PromptStream:
    """A run's prompts by ordinal (place in the run's order), a pure function of tasks, seed and ordinal.

    So a resumed run gets the same prompts again. Each epoch of a task, one pass over its prompts, has its own
    shuffle, in which `Task.successive` prompts stay together. In every block of BLOCK (1000) consecutive
    ordinals each task gets its fraction by weight; which task comes at which place is drawn at random for
    each block. Shuffles depend on a task's position in `tasks`, not on its name, because `generation.rollout`
    names a task after its class and must get the same prompts as a run.
    """

    def __init__(self, tasks: Mapping[str, WeightedTask], seed: int) -> None:
        """Raises TaskError if a task has no prompts, a weight too small for one prompt in BLOCK, or a number
        `successive` below 1.
        """
        for name, weighted in tasks.items():
            if len(weighted.task) < 1:
                split = f" in its split {weighted.split}" if weighted.split else ""
                raise TaskError(
                    f"tasks.{name} has no prompts{split}; correct its settings, such as its split, its data "
                    "folder or a filter, or leave the task out"
                )
            if weighted.task.successive < 1:
                raise TaskError(
                    f"{type(weighted.task).__name__}.successive={weighted.task.successive} is not positive; "
                    "give at least 1"
                )
        self._names = list(tasks)
        self._tasks = [tasks[name].task for name in self._names]
        self._seed = seed
        self._quotas = _quotas({name: weighted.weight for name, weighted in tasks.items()})
        # Pure functions, cached because a group's prompt is needed several times, and neighbouring ordinals
        # need the same block and the same epochs.
        self.prompt = lru_cache(maxsize=4096)(self.prompt)
        self._order = lru_cache(maxsize=4)(self._order)
        self._permutation = lru_cache(maxsize=2 * len(self._names) + 2)(self._permutation)

    def place(self, ordinal: int) -> tuple[str, int]:
        """Returns (task name, index in that task) of the prompt at place `ordinal` in the run's order."""
        block, within = divmod(ordinal, BLOCK)
        order = self._order(block)
        number = int(order[within])
        drawn = block * int(self._quotas[number]) + int(np.count_nonzero(order[:within] == number))
        epoch, turn = divmod(drawn, len(self._tasks[number]))
        return self._names[number], int(self._permutation(number, epoch)[turn])

    def prompt(self, ordinal: int) -> Prompt:
        """Returns the prompt at place `ordinal` in the run's order, with the task's name as `task`.

        Raises PromptError if the task raises an error, or returns no Prompt.
        """
        name, index = self.place(ordinal)
        return prompt_at(self._tasks[self._names.index(name)], name, index)

    def _order(self, block: int) -> np.ndarray:
        """Returns the number of the task (0 is the first) for each of the BLOCK places in block `block`."""
        turns = np.repeat(np.arange(len(self._names)), self._quotas)
        return turns[_shuffled(BLOCK, f"{self._seed}/mixture/{block}")]

    def _permutation(self, number: int, epoch: int) -> np.ndarray:
        count, successive = len(self._tasks[number]), self._tasks[number].successive
        runs = _shuffled(-(-count // successive), f"{self._seed}/task/{number}/{epoch}")
        order = (runs[:, None] * successive + np.arange(successive)).ravel()
        # The last run may be shorter than the others.
        return order[order < count]


def _quotas(weights: Mapping[str, float]) -> np.ndarray:
    """Returns each task's number of prompts in a block of BLOCK ordinals; the numbers add up to BLOCK.

    Shares by weight are rounded by largest remainder; of equal remainders, the earlier task's is rounded up.
    Raises TaskError if a task would get no prompt.
    """
    shares = np.array(list(weights.values())) * (BLOCK / sum(weights.values()))
    # 1e-9: a share that is an integer but for rounding is not rounded down.
    quotas = np.floor(shares + 1e-9).astype(np.int64)
    remainders = np.argsort(quotas - shares, kind="stable")
    quotas[remainders[: BLOCK - quotas.sum()]] += 1
    for name, quota in zip(weights, quotas, strict=True):
        if quota < 1:
            raise TaskError(
                f"tasks.{name}.weight={weights[name]} is below 1/{BLOCK} of the sum of all weights: no "
                "prompt of the task would be drawn; raise its weight, or leave the task out"
            )
    return quotas


def _shuffled(count: int, name: str) -> np.ndarray:
    """Returns a permutation of range(count), random but always the same for equal `count` and text `name`."""
    # numpy keeps raw Philox bits stable between releases, but not its own shuffle.
    key = int.from_bytes(hashlib.blake2b(name.encode(), digest_size=16).digest(), "little")
    return np.argsort(np.random.Philox(key=key).random_raw(count), kind="stable")
