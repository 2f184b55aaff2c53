"""A task: prompts by index, and the score of a completion."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from areal_jax.tasks.errors import TaskError
from areal_jax.types import Completion, Prompt, Reward

if TYPE_CHECKING:
    from areal_jax.tasks.tokenizers import Tokenizer

Score = Callable[[Prompt, Completion], "Reward | float"]
Workflow = Callable[[Prompt, Any], Awaitable["Reward | float | None"]]


class Task:
    """A source of prompts by index, and the reward of a completion. Subclass it to define a task.

    Define `__len__`, `__getitem__` and `score`; the constructor's arguments are the task's settings. The
    three must be pure functions: a resumed run reads prompts again, and a score may be computed in another
    process. The framework shuffles the prompts and mixes several tasks.
    """

    tokenizer: Tokenizer | None = None
    """The task's own tokenizer, used unless the model is pretrained or model.tokenizer=byte.

    None: the task is for any tokenizer.
    """

    wants_pieces: bool = False
    """Whether `score` reads `Completion.pieces`, the text of each token."""

    successive: int = 1
    """Number of prompts that stay together when the prompts are shuffled.

    Prompts k * successive up to, but without, (k + 1) * successive come one after another, for example
    because they are turns of one game, whose common prefix a batch computes once (trainer.compute=tree).
    """

    workflow: Workflow | None = None
    """`async def workflow(self, prompt, episode)`: conducts an episode of several turns (`episodes.Episode`).

    It returns the reward, or None to reject the sample; `score` is then not called.
    """

    def __len__(self) -> int:
        raise TaskError(f"{type(self).__name__} has no __len__; define it to return the number of prompts")

    def __getitem__(self, i: int) -> Prompt:
        raise TaskError(
            f"{type(self).__name__} has no __getitem__; define it to return the Prompt at an index"
        )

    def score(self, prompt: Prompt, completion: Completion) -> Reward | float:
        """Returns the reward of one completion.

        An exception or a NaN is a failure, not a reward of 0: a training run then samples all completions of
        the prompt again, and drops the prompt at the second failure.
        """
        raise TaskError(
            f"{type(self).__name__} has no score; define it: (prompt, completion) -> Reward or float"
        )

    def score_group(self, prompt: Prompt, completions: Sequence[Completion]) -> Sequence[Reward | float]:
        """Returns the rewards of a prompt's completions, in the order of `completions`.

        Override this method if a completion's reward depends on the prompt's other completions.
        """
        return [self.score(prompt, completion) for completion in completions]

    def reference(self, prompt: Prompt) -> str:
        """Returns a correct answer to the prompt, for the supervised steps that may precede RL.

        Raises TaskError if the task has no reference answers.
        """
        raise TaskError(
            f"{type(self).__name__} has no reference answers; set trainer.supervised.steps=0, or define "
            "reference(prompt) -> str"
        )

    def close(self) -> None:
        """Ends what the task's workflows have started, such as processes; called when a run ends."""

    @staticmethod
    def from_rows(
        rows: Sequence[Mapping[str, Any]], score: Score, *, prompt: str | Callable[[Any], Prompt] = "prompt"
    ) -> Task:
        """Returns a task with one prompt per row, scored by `score(prompt, completion)`.

        `prompt` is the name of the prompt's column, or a function that makes a Prompt of a row. A named
        column must contain text, messages or token ids; all other columns become the prompt's `info`. Raises
        TaskError if the named column is missing from a row, or contains another kind of value.
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


def column_of(row: Mapping[str, Any], column: str, where: str) -> Any:
    """Returns a row's value in `column`; raises TaskError if the row has no such column.

    `where` names the row, for example by file and line, at the start of the error's message.
    """
    if column not in row:
        raise TaskError(
            f"{where} has no column {column!r}; its columns are {', '.join(map(str, row)) or 'none'}: "
            "add the column"
        )
    return row[column]


def row_prompt(row: Mapping[str, Any], column: str, where: str) -> Prompt:
    """Returns the Prompt made of a row's value in `column`; all other columns become its `info`.

    Raises TaskError if the column is missing or the value is not a prompt. `where` names the row, for example
    by file and line, at the start of the error's message.
    """
    value = column_of(row, column, where)
    info = {name: other for name, other in row.items() if name != column}
    if isinstance(value, str):
        return Prompt(value, info=info)
    if isinstance(value, Sequence) and value:
        if all(isinstance(item, Mapping) and {"role", "content"} <= item.keys() for item in value):
            return Prompt(messages=tuple(value), info=info)
        if all(isinstance(item, int) and not isinstance(item, bool) for item in value):
            return Prompt(tokens=tuple(value), info=info)
    raise TaskError(
        f"{where}: column {column!r} is {value!r:.80}, but a prompt must be text, a list of messages with "
        "role and content, or a list of token ids"
    )
