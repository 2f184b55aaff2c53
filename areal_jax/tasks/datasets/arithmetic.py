"""Arithmetic problems of chosen difficulty, made without files; a completion's last number is its answer."""

from __future__ import annotations

import re
from collections.abc import Sequence
from decimal import Decimal

from areal_jax.tasks.chat import Chat, check_split
from areal_jax.tasks.datasets.drawn import Drawn, Draws, check_operations, first_drawn, is_in_split
from areal_jax.tasks.datasets.verify import last_boxed
from areal_jax.tasks.errors import TaskError
from areal_jax.types import Completion, Prompt, Reward

OPERATIONS = "+-*"

_MAX_DIGITS = 12
_MAX_TERMS = 16
_TAIL_CHARS = 2_000
"""Number of characters at a completion's end that are searched for the answer."""

# A minus right after a digit, a letter or a closing bracket is subtraction, not a sign: "3-5" ends in 5.
_NUMBER = re.compile(r"(?:(?<![\w)\]])[-−])?(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?")


class Arithmetic(Drawn):
    """Sums, differences and products of a chosen difficulty: procedural, no files.

    A prompt asks for the value of a problem such as "3 + 5"; the reward is 1 for the right value, else 0.
    Prompt i depends on i and the settings alone. If `size` exceeds the number of distinct problems (only 100
    for sums of two one-digit numbers), prompts repeat. Problems with the same numbers, in any order, are in
    the same split, so that no test problem is ever trained on; about one in ten sets of numbers is in the
    test split.
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
        """All numbers of a problem have the same number of digits, drawn uniformly from min_digits..digits.

        `terms` numbers are joined by operations that are drawn independently from `operations`, with the
        usual precedence. `split`: train or test; `size`: number of prompts. `question` is the user's message
        and must contain {problem}; `system` is the system message, null for none.
        """
        if not 1 <= min_digits <= digits <= _MAX_DIGITS:
            raise TaskError(
                f"min_digits={min_digits} and digits={digits} violate 1 <= min_digits <= digits <= "
                f"{_MAX_DIGITS}"
            )
        if not 2 <= terms <= _MAX_TERMS:
            raise TaskError(f"terms={terms} is out of range; give 2 to {_MAX_TERMS}")
        check_operations(operations, OPERATIONS)
        check_split(split)
        super().__init__(size)
        self._grades = range(min_digits, digits + 1)
        self._terms = terms
        self._operations = tuple(operations)
        self._split = split
        self._chat = Chat(question, system)

    def _prompt(self, i: int) -> Prompt:
        draws = Draws.of(i)
        numbers, operations = first_drawn(lambda: self._drawn(draws), self._split)
        problem = str(numbers[0])
        for operation, number in zip(operations, numbers[1:], strict=True):
            problem += f" {operation} {number}"
        # The problem has digits, spaces and + - * alone: it is its own Python expression.
        return self._chat.prompt(problem, {"problem": problem, "answer": eval(problem)})

    def score(self, prompt: Prompt, completion: Completion) -> Reward:
        r"""Returns 1 if the completion's last number is the answer, else 0.

        If the completion has a \boxed{}, the last number in the last \boxed{} counts. Only one number counts,
        so that listing many gains nothing.
        """
        found = last_number(completion.text)
        wanted = prompt.info["answer"]
        correct = float(found is not None and found == wanted)
        says = "no number" if found is None else f"{found:.40}"
        return Reward(correct, {"correct": correct}, f"found {says}, wanted {wanted}")

    def reference(self, prompt: Prompt) -> str:
        return str(prompt.info["answer"])

    def _drawn(self, draws: Draws) -> tuple[list[int], list[str]] | None:
        """Returns (numbers, operations) of a drawn problem, or None if it is in the other split.

        Problems with the same numbers, in any order, are in the same split.
        """
        digits = draws.one(self._grades)
        least = 10 ** (digits - 1) if digits > 1 else 0
        numbers = [least + draws.below(10**digits - least) for _ in range(self._terms)]
        operations = [draws.one(self._operations) for _ in range(self._terms - 1)]
        content = ",".join(map(str, sorted(numbers)))
        return (numbers, operations) if is_in_split(content, self._split) else None


def last_number(text: str) -> Decimal | None:
    r"""Returns the last number of the last \boxed{} or, without \boxed{}, of the text; None if there is none.

    Only the last _TAIL_CHARS characters of the text count. "1,234" is one number; a minus sign belongs to the
    number unless it directly follows a digit, letter or closing bracket.
    """
    tail = text[-_TAIL_CHARS:]
    boxed = last_boxed(tail)
    numbers = _NUMBER.findall(tail if boxed is None else boxed)
    return Decimal(numbers[-1].replace(",", "").replace("−", "-")) if numbers else None
