"""Which tasks a run has, and which prompt stands at which place of its order."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np

from areal_jax.plugin import check_settings, load_object
from areal_jax.tasks.task import Task, TaskError
from areal_jax.types import Prompt

BUILTIN: dict[str, tuple[str, str]] = {
    "arithmetic": (
        "areal_jax.tasks.arithmetic:Arithmetic",
        "sums, differences and products of a chosen difficulty: procedural, no files",
    ),
    "code": (
        "areal_jax.tasks.code:Code",
        "programming tasks of a JSONL file, scored by their tests in a bubblewrap sandbox",
    ),
    "countdown": (
        "areal_jax.tasks.countdown:Countdown",
        "count down from a letter: procedural, no files, learnt within a minute",
    ),
    "gsm8k": (
        "areal_jax.tasks.math_data:Gsm8k",
        "grade-school word problems, from data_dir or downloaded, verified by math-verify",
    ),
    "jsonl": (
        "areal_jax.tasks.jsonl:JsonLines",
        "prompts and answers of a JSONL file, scored by exact match",
    ),
    "math": (
        "areal_jax.tasks.math_data:Math",
        "competition problems (MATH, test split MATH-500), verified by math-verify",
    ),
    "reasoning_gym": (
        "areal_jax.tasks.reasoning_gym:ReasoningGym",
        "one of reasoning-gym's procedural data sets, by name (dataset=chain_sum), with its own score",
    ),
}
"""name -> (module:Name, what it is)."""

BLOCK = 1000
"""Ordinals over which the mixture of tasks is exact."""


@dataclass(frozen=True)
class WeightedTask:
    """A task and its share of the prompts, relative to the other tasks' weights."""

    task: Task
    weight: float = 1.0


def load_tasks(
    settings: Mapping[str, Mapping[str, Any]], objects: Sequence[Task] = ()
) -> dict[str, WeightedTask]:
    """The tasks of a config's `tasks` section, by name; `objects`, if there are any, stand in for them.

    An object's name is its class's, numbered from the second of a class on. Raises ArealError.
    """
    if objects:
        return _named(objects)
    if not settings:
        raise TaskError(
            f"a run needs a task; give tasks=NAME: {', '.join(BUILTIN)}, or module:Name of your own"
        )
    return {name: _load(name, given or {}) for name, given in settings.items()}


def _named(objects: Sequence[Task]) -> dict[str, WeightedTask]:
    tasks: dict[str, WeightedTask] = {}
    for task in objects:
        if not isinstance(task, Task):
            raise TaskError(f"{task!r:.80} is no Task; subclass areal_jax.Task, or use Task.from_rows")
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
            f"{key}.weight={weight!r} is not a positive number; leave the task out to switch it off"
        )
    make = load_object(name, {known: path for known, (path, _) in BUILTIN.items()}, "task")
    if isinstance(make, Task):
        if own:
            raise TaskError(
                f"{key} is a task that is already made; it takes no settings, but got {', '.join(own)}"
            )
        return WeightedTask(make, float(weight))
    check_settings(make, own, key)
    try:
        task = make(**own)
    except (TypeError, ValueError) as error:
        raise TaskError(f"{key} cannot be made with {own}: {error}") from error
    if not isinstance(task, Task):
        raise TaskError(f"{key} makes a {type(task).__name__}, which is no Task; subclass areal_jax.Task")
    return WeightedTask(task, float(weight))


class PromptStream:
    """The run's prompts in order: a pure function of (seed, ordinal), so a resume asks for the same.

    Every task is shuffled anew for each of its epochs. Of every BLOCK ordinals each task gets its share by
    weight, exactly, in an order drawn for that block. Shuffles are keyed by a task's place among the tasks,
    not by its name: the plain loop, which names no tasks, asks for the same prompts as a run.
    """

    def __init__(self, tasks: Mapping[str, WeightedTask], seed: int) -> None:
        """Raises TaskError for a task without prompts, or one whose weight is too small ever to be drawn."""
        for name, weighted in tasks.items():
            if len(weighted.task) < 1:
                raise TaskError(f"tasks.{name} has no prompts; check its settings, or leave it out")
        self._names = list(tasks)
        self._tasks = [tasks[name].task for name in self._names]
        self._seed = seed
        self._quotas = _quotas({name: weighted.weight for name, weighted in tasks.items()})
        # Pure functions, kept because a group's prompt is asked for several times on its way, and
        # neighbouring ordinals ask for the same block and the same epochs.
        self.prompt = lru_cache(maxsize=4096)(self.prompt)
        self._order = lru_cache(maxsize=4)(self._order)
        self._permutation = lru_cache(maxsize=2 * len(self._names) + 2)(self._permutation)

    def place(self, ordinal: int) -> tuple[str, int]:
        """Name of the task and index within it of the prompt at `ordinal`."""
        block, within = divmod(ordinal, BLOCK)
        order, before = self._order(block)
        number = int(order[within])
        drawn = block * int(self._quotas[number]) + int(before[within])
        epoch, turn = divmod(drawn, len(self._tasks[number]))
        return self._names[number], int(self._permutation(number, epoch)[turn])

    def prompt(self, ordinal: int) -> Prompt:
        """The prompt at `ordinal`, with its task's name filled in."""
        name, index = self.place(ordinal)
        return replace(self._tasks[self._names.index(name)][index], task=name)

    def _order(self, block: int) -> tuple[np.ndarray, np.ndarray]:
        """Whose turn each place of a block is, and how many turns that task had in the block before it."""
        turns = np.repeat(np.arange(len(self._names)), self._quotas)
        turns = turns[_shuffled(BLOCK, f"{self._seed}/mixture/{block}")]
        before = np.empty(BLOCK, np.int64)
        for number in range(len(self._names)):
            mine = np.flatnonzero(turns == number)
            before[mine] = np.arange(len(mine))
        return turns, before

    def _permutation(self, number: int, epoch: int) -> np.ndarray:
        return _shuffled(len(self._tasks[number]), f"{self._seed}/task/{number}/{epoch}")


def _quotas(weights: Mapping[str, float]) -> np.ndarray:
    """Turns of each task in a block, by largest remainder; ties go to the first. Their sum is BLOCK."""
    shares = np.array(list(weights.values())) * (BLOCK / sum(weights.values()))
    quotas = np.floor(shares + 1e-9).astype(np.int64)
    remainders = np.argsort(quotas - shares, kind="stable")
    quotas[remainders[: BLOCK - quotas.sum()]] += 1
    for name, quota in zip(weights, quotas, strict=True):
        if quota < 1:
            raise TaskError(
                f"tasks.{name}.weight={weights[name]} is below 1/{BLOCK} of all weights: it would never be "
                "drawn; raise it, or leave the task out"
            )
    return quotas


def _shuffled(count: int, name: str) -> np.ndarray:
    """A permutation of range(count), drawn for `name`.

    Sorted by raw Philox bits rather than by numpy's own shuffle, whose stream may change with a release.
    """
    key = int.from_bytes(hashlib.blake2b(name.encode(), digest_size=16).digest(), "little")
    return np.argsort(np.random.Philox(key=key).random_raw(count), kind="stable")
