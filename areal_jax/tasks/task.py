"""What a task is: prompts by index, and the score of what the policy answered."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from areal_jax.types import ArealError, Completion, Prompt, Reward

if TYPE_CHECKING:
    from areal_jax.tasks.tokenizers import Tokenizer

Score = Callable[[Prompt, Completion], "Reward | float"]


class TaskError(ArealError):
    """A task that cannot be made or read; the message names the file, the line or the setting."""


class Task:
    """A random-access source of prompts and their reward. Subclass it; the framework shuffles and mixes.

    `__len__`, `__getitem__` and `score` are what a task has; the constructor's arguments are its settings.
    All are pure: a prompt is asked for again on resume, a score may be computed in another process.
    """

    tokenizer: Tokenizer | None = None
    """The task's own, used where the config says model.tokenizer=task."""

    def __len__(self) -> int:
        raise TaskError(f"{type(self).__name__} has no __len__; define it: the number of its prompts")

    def __getitem__(self, i: int) -> Prompt:
        raise TaskError(f"{type(self).__name__} has no __getitem__; define it: index -> Prompt")

    def score(self, prompt: Prompt, completion: Completion) -> Reward | float:
        """How good one completion is. An exception or a NaN counts as a failure, never as a reward of 0."""
        raise TaskError(
            f"{type(self).__name__} has no score; define it: prompt, completion -> Reward or float"
        )

    def score_group(self, prompt: Prompt, completions: Sequence[Completion]) -> Sequence[Reward | float]:
        """The scores of all completions of a prompt. Override it where they depend on one another."""
        return [self.score(prompt, completion) for completion in completions]

    def reference(self, prompt: Prompt) -> str:
        """A right answer, for the supervised start. Raises TaskError unless the task has one."""
        raise TaskError(
            f"{type(self).__name__} has no reference answers; set trainer.supervised_steps=0, or define "
            "reference(prompt) -> str"
        )

    @staticmethod
    def from_rows(
        rows: Sequence[Mapping[str, Any]], score: Score, *, prompt: str | Callable[[Any], Prompt] = "prompt"
    ) -> Task:
        """A task of Python rows. `prompt` names the column, or makes a row's Prompt.

        A column of text, messages or token ids becomes the prompt; every other column goes into `info`.
        Raises TaskError for a row without the column.
        """
        return _Rows(rows, score, prompt)


class _Rows(Task):
    def __init__(
        self, rows: Sequence[Mapping[str, Any]], score: Score, prompt: str | Callable[[Any], Prompt]
    ) -> None:
        if isinstance(prompt, str):
            for number, row in enumerate(rows):
                row_prompt(row, prompt, f"row {number}")
        self._rows = rows
        self._score = score
        self._prompt = prompt

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, i: int) -> Prompt:
        if isinstance(self._prompt, str):
            return row_prompt(self._rows[i], self._prompt, f"row {i}")
        return self._prompt(self._rows[i])

    def score(self, prompt: Prompt, completion: Completion) -> Reward | float:
        return self._score(prompt, completion)


def row_prompt(row: Mapping[str, Any], column: str, where: str) -> Prompt:
    """The prompt in `column`, with the other columns as info. Raises TaskError that begins with `where`."""
    if column not in row:
        raise TaskError(
            f"{where} has no column {column!r}; its columns are {', '.join(map(str, row)) or 'none'}"
        )
    value = row[column]
    info = {name: other for name, other in row.items() if name != column}
    if isinstance(value, str):
        return Prompt(value, info=info)
    if isinstance(value, Sequence) and value:
        if all(isinstance(item, Mapping) and {"role", "content"} <= item.keys() for item in value):
            return Prompt(messages=tuple(value), info=info)
        if all(isinstance(item, int) and not isinstance(item, bool) for item in value):
            return Prompt(tokens=tuple(value), info=info)
    raise TaskError(
        f"{where}: column {column!r} holds {value!r:.80}; a prompt is text, a list of messages with role and "
        "content, or a list of token ids"
    )
