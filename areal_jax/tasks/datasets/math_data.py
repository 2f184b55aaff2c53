"""GSM8K and MATH: word problems and competition problems, with answers compared by math-verify."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar

from areal_jax.tasks.chat import SPLITS, Chat, check_split
from areal_jax.tasks.datasets.problems import from_folder, from_web
from areal_jax.tasks.datasets.verify import last_boxed, verify_math
from areal_jax.tasks.errors import TaskError
from areal_jax.tasks.task import Task, column_of
from areal_jax.types import Completion, Prompt, Reward

_CALCULATOR = re.compile(r"<<[^<>]*>>")
_NUMBER = re.compile(r"-?\d+(?:\.\d+)?|-?\.\d+")


class ProblemSet(Task, ABC):
    """Problems with worked solutions; the reward is 1 for the right final answer, else 0.

    Prompt i is non-blank line number i, counted from 0, of the split's files. `tasks.datasets.verify` finds a
    completion's answer and compares it with the right answer.
    """

    name: ClassVar[str]
    url: ClassVar[str]
    """The URL of a split's file, downloaded if no data_dir is given; {split} stands for the split's name."""
    question: ClassVar[str]
    """The user's message if the setting `question` is not given."""

    def __init__(
        self,
        *,
        data_dir: str | None = None,
        split: str = "train",
        question: str | None = None,
        system: str | None = None,
    ) -> None:
        """`data_dir`: a folder with files <split>*.jsonl; None: the problems are downloaded.

        `split`: train or test. `question` is the user's message and must contain {problem}; None: the class's
        own `question`. `system` is the system message, null for none. The constructor converts the files to
        array_record and opens the result. Raises TaskError if a file is missing or cannot be converted.
        """
        check_split(split)
        self._chat = Chat(self.question if question is None else question, system)
        if data_dir is None:
            urls = {name: self.url.format(split=name) for name in SPLITS}
            self._problems = from_web(self.name, urls, split, self.parse)
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
    @abstractmethod
    def parse(row: Mapping[str, Any], where: str) -> dict[str, str]:
        """Returns the problem, solution and answer of `row`, a line's object, by these three names.

        The solution contains the answer in a form in which `score` finds it. Raises TaskError if a column is
        missing or has no usable text; `where` names file and line at the start of the message.
        """


class Gsm8k(ProblemSet):
    """Grade-school word problems, from data_dir or downloaded, verified by math-verify.

    Cobbe et al. 2021, "Training verifiers to solve math word problems". A line is an object with `question`
    and `answer`; `answer` is a worked solution that ends like "#### 18".
    """

    name = "gsm8k"
    url = (
        "https://raw.githubusercontent.com/openai/grade-school-math/master/grade_school_math/data/"
        "{split}.jsonl"
    )
    question = "{problem}\nThink step by step, then give the answer as a number after ####."

    @staticmethod
    def parse(row: Mapping[str, Any], where: str) -> dict[str, str]:
        solution = _CALCULATOR.sub("", _text(row, "answer", where))
        before, mark, answer = solution.rpartition("####")
        answer = answer.strip().replace(",", "")
        if not mark or not _NUMBER.fullmatch(answer):
            raise TaskError(
                f"{where}: the answer ends in {solution[-40:]!r}; it must end in #### and a number, "
                f"as in #### 18"
            )
        solution = f"{before.rstrip()}\n#### {answer}"
        return {"problem": _text(row, "question", where), "solution": solution, "answer": answer}


class Math(ProblemSet):
    r"""Competition problems (MATH, test split MATH-500), verified by math-verify.

    Hendrycks et al. 2021 (MATH), in the split of Lightman et al. 2023 (MATH-500). A line is an object with
    `problem`, `solution` and `answer`; without `answer`, the content of the solution's last \boxed{} is the
    answer.
    """

    name = "math"
    url = "https://media.githubusercontent.com/media/openai/prm800k/main/prm800k/math_splits/{split}.jsonl"
    question = "{problem}\nThink step by step, then give the answer in \\boxed{}."

    @staticmethod
    def parse(row: Mapping[str, Any], where: str) -> dict[str, str]:
        solution = _text(row, "solution", where)
        boxed = last_boxed(solution)
        answer = boxed if row.get("answer") is None else _text(row, "answer", where)
        if not answer:
            raise TaskError(
                f"{where} has no answer: neither a column 'answer' nor a \\boxed{{}} in the solution; add "
                "the column"
            )
        if boxed != answer:
            solution = f"{solution.rstrip()}\nThe answer is \\boxed{{{answer}}}."
        return {"problem": _text(row, "problem", where), "solution": solution, "answer": answer}


def _text(row: Mapping[str, Any], column: str, where: str) -> str:
    """Returns a row's value in `column`, text or a number, as text without surrounding whitespace.

    Raises TaskError if the column is missing, blank or of another type; `where` names file and line at the
    start of the message.
    """
    value = column_of(row, column, where)
    if isinstance(value, bool) or not isinstance(value, (str, int, float)) or not str(value).strip():
        raise TaskError(
            f"{where}: column {column!r} is {value!r:.60}, but must be a number, or text that is not blank; "
            "correct the row"
        )
    return str(value).strip()
