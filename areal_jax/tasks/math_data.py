"""GSM8K and MATH: word problems and competition problems, their answers compared by math-verify."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, ClassVar

from areal_jax.tasks.chat import Chat, check_split
from areal_jax.tasks.problems import from_folder, from_web
from areal_jax.tasks.task import Task, TaskError
from areal_jax.tasks.verify import last_boxed, verify_math
from areal_jax.types import Completion, Prompt, Reward

_CALCULATOR = re.compile(r"<<[^<>]*>>")
_NUMBER = re.compile(r"-?\d+(?:\.\d+)?|-?\.\d+")


class ProblemSet(Task):
    """Problems with worked solutions; the reward is 1 for the right final answer, else 0.

    Prompt i is line i of the split's files. Which part of a completion is its answer: areal_jax.tasks.verify.
    """

    name: ClassVar[str]
    urls: ClassVar[Mapping[str, str]]
    """Where each split comes from without data_dir."""

    def __init__(self, *, data_dir: str | None, split: str, question: str, system: str | None) -> None:
        """Prepares the problems, and opens them at the first prompt. Raises TaskError."""
        check_split(split)
        self._chat = Chat(question, system)
        if data_dir is None:
            self._problems = from_web(self.name, self.urls, split, self.parse)
        else:
            self._problems = from_folder(self.name, data_dir, split, self.parse)

    def __len__(self) -> int:
        return len(self._problems)

    def __getitem__(self, i: int) -> Prompt:
        row = self._problems[i]
        return self._chat.prompt(row["problem"], {"answer": row["answer"], "solution": row["solution"]})

    def score(self, prompt: Prompt, completion: Completion) -> Reward:
        is_right, note = verify_math(completion.text, prompt.info["answer"])
        return Reward(float(is_right), {"correct": float(is_right)}, note)

    def reference(self, prompt: Prompt) -> str:
        return prompt.info["solution"]

    @staticmethod
    def parse(row: Mapping[str, Any], where: str) -> dict[str, str]:
        """A line as problem, solution and answer; the solution ends in the answer as `score` reads it."""
        raise NotImplementedError


class Gsm8k(ProblemSet):
    """Grade-school word problems: Cobbe et al. 2021, "Training verifiers to solve math word problems"."""

    name = "gsm8k"
    urls: ClassVar[Mapping[str, str]] = {
        split: "https://raw.githubusercontent.com/openai/grade-school-math/master/grade_school_math/data/"
        f"{split}.jsonl"
        for split in ("train", "test")
    }

    def __init__(
        self,
        *,
        data_dir: str | None = None,
        split: str = "train",
        question: str = "{problem}\nThink step by step, then give the answer as a number after ####.",
        system: str | None = None,
    ) -> None:
        """`data_dir` holds <split>*.jsonl of {question, answer}, the answer ending in "#### 18".

        Without it the problems are downloaded. `question` is what the user says, {problem} filled in;
        `system` the system message, none if null.
        """
        super().__init__(data_dir=data_dir, split=split, question=question, system=system)

    @staticmethod
    def parse(row: Mapping[str, Any], where: str) -> dict[str, str]:
        solution = _CALCULATOR.sub("", _text(row, "answer", where))
        before, mark, answer = solution.rpartition("####")
        answer = answer.strip().replace(",", "")
        if not mark or not _NUMBER.fullmatch(answer):
            raise TaskError(
                f"{where}: the answer ends in {solution[-40:]!r}; it ends in #### and a number, as in #### 18"
            )
        solution = f"{before.rstrip()}\n#### {answer}"
        return {"problem": _text(row, "question", where), "solution": solution, "answer": answer}


class Math(ProblemSet):
    """Competition problems: Hendrycks et al. 2021 (MATH), in the split of Lightman et al. 2023 (MATH-500)."""

    name = "math"
    urls: ClassVar[Mapping[str, str]] = {
        split: "https://media.githubusercontent.com/media/openai/prm800k/main/prm800k/math_splits/"
        f"{split}.jsonl"
        for split in ("train", "test")
    }

    def __init__(
        self,
        *,
        data_dir: str | None = None,
        split: str = "train",
        question: str = "{problem}\nThink step by step, then give the answer in \\boxed{}.",
        system: str | None = None,
    ) -> None:
        r"""`data_dir` holds <split>*.jsonl of {problem, solution, answer}.

        A line without an answer has it in its solution's last \boxed{}. Without data_dir the problems are
        downloaded. `question` is what the user says, {problem} filled in; `system` the system message, none
        if null.
        """
        super().__init__(data_dir=data_dir, split=split, question=question, system=system)

    @staticmethod
    def parse(row: Mapping[str, Any], where: str) -> dict[str, str]:
        solution = _text(row, "solution", where)
        boxed = last_boxed(solution)
        answer = boxed if row.get("answer") is None else _text(row, "answer", where)
        if not answer:
            raise TaskError(
                f"{where} has no answer: neither a column 'answer' nor a \\boxed{{}} in its solution"
            )
        if boxed != answer:
            solution = f"{solution.rstrip()}\nThe answer is \\boxed{{{answer}}}."
        return {"problem": _text(row, "problem", where), "solution": solution, "answer": answer}


def _text(row: Mapping[str, Any], column: str, where: str) -> str:
    """A column's text; a number counts as its digits."""
    if column not in row:
        raise TaskError(f"{where} has no column {column!r}; its columns are {', '.join(row) or 'none'}")
    value = row[column]
    if isinstance(value, bool) or not isinstance(value, (str, int, float)) or not str(value).strip():
        raise TaskError(f"{where}: column {column!r} holds {value!r:.60}; it holds text")
    return str(value).strip()
