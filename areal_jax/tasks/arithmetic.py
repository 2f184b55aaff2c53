"""Graded arithmetic: from one-digit sums up, without files. Answers are read as a chat model gives them."""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Sequence
from decimal import Decimal

import numpy as np

from areal_jax.tasks.chat import Chat, check_split
from areal_jax.tasks.task import Task, TaskError
from areal_jax.tasks.verify import last_boxed
from areal_jax.types import Completion, Prompt, Reward

OPERATIONS = "+-*"

_TEST_ONE_IN = 10
_MAX_DIGITS = 12
_MAX_TERMS = 16
_TAIL_CHARS = 2_000
"""How much of a completion's end is read."""

# A minus right after a digit, a letter or a closing bracket is subtraction, not a sign: "3-5" ends in 5.
_NUMBER = re.compile(r"(?:(?<![\w)\]])[-−])?(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?")


class Arithmetic(Task):
    """The prompt asks for the value of a problem such as "3 + 5"; the reward is 1 for the right one, else 0.

    Prompt i depends on i and the settings alone; prompts repeat once `size` exceeds the problems there are
    (100 one-digit sums). Problems made of the same numbers, in whatever order, are all in the same split, so
    no test problem is ever trained on: about one in ten sets of numbers is test's.
    """

    def __init__(
        self,
        *,
        digits: int = 1,
        min_digits: int = 1,
        terms: int = 2,
        operations: str | Sequence[str] = "+",
        split: str = "train",
        size: int = 100_000,
        question: str = "What is {problem}?",
        system: str | None = "Answer with a number.",
    ) -> None:
        """Numbers of a problem all have the same count of digits, drawn evenly from min_digits..digits.

        `terms` numbers are joined by `operations`, each drawn anew, with the usual precedence. `question` is
        what the user says, {problem} filled in; `system` the system message, none if null.
        """
        if not 1 <= min_digits <= digits <= _MAX_DIGITS:
            raise TaskError(
                f"min_digits={min_digits} and digits={digits} do not hold 1 <= min <= max <= {_MAX_DIGITS}"
            )
        if not 2 <= terms <= _MAX_TERMS:
            raise TaskError(f"terms={terms} is none of 2..{_MAX_TERMS}")
        if not operations or any(operation not in tuple(OPERATIONS) for operation in operations):
            raise TaskError(
                f"operations={operations!r}: give one or more of {OPERATIONS}, in quotes as in '\"+-\"'"
            )
        check_split(split)
        if size < 1:
            raise TaskError(f"size={size} must be positive")
        self._grades = range(min_digits, digits + 1)
        self._terms = terms
        self._operations = tuple(operations)
        self._is_test = split == "test"
        self._size = size
        self._chat = Chat(question, system)

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, i: int) -> Prompt:
        if not 0 <= i < self._size:
            raise IndexError(f"prompt {i} of {self._size}")
        numbers, operations = self._draw(i)
        problem = str(numbers[0])
        for operation, number in zip(operations, numbers[1:], strict=True):
            problem += f" {operation} {number}"
        return self._chat.prompt(problem, {"problem": problem, "answer": _value(numbers, operations)})

    def score(self, prompt: Prompt, completion: Completion) -> Reward:
        r"""1 if the last number of the completion is the answer; of its last \boxed{} where it has one.

        Only the last counts, so naming many numbers wins nothing.
        """
        found = last_number(completion.text)
        wanted = prompt.info["answer"]
        correct = float(found is not None and found == wanted)
        says = "no number" if found is None else f"{found:.40}"
        return Reward(correct, {"correct": correct}, f"found {says}, wanted {wanted}")

    def reference(self, prompt: Prompt) -> str:
        return str(prompt.info["answer"])

    def _draw(self, i: int) -> tuple[list[int], list[str]]:
        """The first problem of prompt i's own stream of raw bits that belongs to the split."""
        stream = np.random.Philox(key=i)
        while True:
            grade, *bits = (int(raw) for raw in stream.random_raw(2 * self._terms))
            digits = self._grades[_below(grade, len(self._grades))]
            least = 10 ** (digits - 1) if digits > 1 else 0
            numbers = [least + _below(raw, 10**digits - least) for raw in bits[: self._terms]]
            if _is_test(numbers) == self._is_test:
                operations = [
                    self._operations[_below(raw, len(self._operations))] for raw in bits[self._terms :]
                ]
                return numbers, operations


def last_number(text: str) -> Decimal | None:
    r"""The last number of the text, or of its last \boxed{} where it has one; None where there is none.

    Commas group thousands; a minus sign counts unless it stands right after a digit, letter or bracket.
    """
    tail = text[-_TAIL_CHARS:]
    boxed = last_boxed(tail)
    numbers = _NUMBER.findall(tail if boxed is None else boxed)
    return Decimal(numbers[-1].replace(",", "").replace("−", "-")) if numbers else None


def _below(raw: int, bound: int) -> int:
    """64 raw bits as a number in 0..bound-1."""
    return raw * bound >> 64


def _is_test(numbers: Sequence[int]) -> bool:
    """Whether the problems made of these numbers are test's; their order does not matter."""
    name = ",".join(map(str, sorted(numbers)))
    digest = hashlib.blake2b(name.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") % _TEST_ONE_IN == 0


def _value(numbers: Sequence[int], operations: Sequence[str]) -> int:
    """The value of the problem: products first, then sums and differences."""
    signs = [1]
    products = [[numbers[0]]]
    for operation, number in zip(operations, numbers[1:], strict=True):
        if operation == "*":
            products[-1].append(number)
        else:
            products.append([number])
            signs.append(-1 if operation == "-" else 1)
    return sum(sign * math.prod(product) for sign, product in zip(signs, products, strict=True))
