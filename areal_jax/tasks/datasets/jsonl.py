"""A task from a JSONL file: one object per line, with a prompt and its answer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from areal_jax.tasks.errors import TaskError
from areal_jax.tasks.task import Task, column_of, row_prompt
from areal_jax.types import Completion, Prompt, Reward


class JsonLines(Task):
    """Prompts and answers of a JSONL file, scored by exact match.

    The reward is 1 for a completion equal to the answer, else 0. Whitespace around completion and answer is
    ignored. The constructor reads every line; for a line without a usable prompt or answer it raises a
    TaskError that names the file, the line and the problem. Later each prompt is read from the file when it
    is needed. Override `score` for another reward.
    """

    def __init__(self, *, path: str, prompt: str = "prompt", answer: str = "answer") -> None:
        """`path`: the JSONL file; `prompt`, `answer`: names of the columns with prompts and answers."""
        self._path = Path(path)
        self._prompt = prompt
        self._answer = answer
        try:
            self._numbers, self._offsets = self._index()
        except OSError as error:
            raise TaskError(
                f"{path} cannot be read: {error.strerror}; set the task's `path` to a JSONL file"
            ) from error

    def __len__(self) -> int:
        return len(self._offsets)

    def __getitem__(self, i: int) -> Prompt:
        with self._path.open("rb") as file:
            file.seek(self._offsets[i])
            return self._parse(file.readline(), int(self._numbers[i]))

    def score(self, prompt: Prompt, completion: Completion) -> Reward:
        return Reward(float(completion.text.strip() == self.reference(prompt)))

    def reference(self, prompt: Prompt) -> str:
        return str(prompt.info[self._answer]).strip()

    def _index(self) -> tuple[np.ndarray, np.ndarray]:
        """Returns (line numbers from 1, byte offsets) of all non-blank lines; parses each line as a check."""
        found: list[tuple[int, int]] = []
        offset = 0
        with self._path.open("rb") as file:
            for number, line in enumerate(file, 1):
                if line.strip():
                    self._parse(line, number)
                    found.append((number, offset))
                offset += len(line)
        lines = np.array(found, np.int64).reshape(-1, 2)
        return lines[:, 0], lines[:, 1]

    def _parse(self, line: bytes, number: int) -> Prompt:
        where = f"{self._path}, line {number}"
        row = parse_object(line, where)
        self._check_answer(row, where)
        return row_prompt(row, self._prompt, where)

    def _check_answer(self, row: dict[str, Any], where: str) -> None:
        answer = column_of(row, self._answer, where)
        if isinstance(answer, bool) or not isinstance(answer, (str, int, float)):
            raise TaskError(
                f"{where}: column {self._answer!r} is {answer!r:.60}; an answer must be text or a number"
            )


def parse_object(line: bytes, where: str) -> dict[str, Any]:
    """Returns the JSON object on a line. Raises TaskError if the line is not UTF-8 or not a JSON object.

    `where` names file and line at the start of the error's message.
    """
    try:
        row = json.loads(line.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise TaskError(
            f"{where} is not UTF-8 ({error.reason} at byte {error.start}); save it as UTF-8"
        ) from error
    except json.JSONDecodeError as error:
        raise TaskError(
            f"{where} is not JSON ({error.msg} at column {error.colno}): {line[:60]!r}; write one "
            f"JSON object per line"
        ) from error
    except (RecursionError, ValueError) as error:  # thousands of levels or digits
        raise TaskError(f"{where} cannot be read ({error}): {line[:60]!r}; leave the value out") from error
    if not isinstance(row, dict):
        raise TaskError(
            f"{where} is a {type(row).__name__}; each line must be a JSON object with named columns"
        )
    return row
