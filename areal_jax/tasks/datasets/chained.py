"""Chains of modular arithmetic: each step computes with the result of the step before."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np

from areal_jax.tasks.datasets.drawn import Draws, check_operations
from areal_jax.tasks.datasets.instructions import INSTRUCTIONS, with_parts
from areal_jax.tasks.datasets.procedural import SEPARATOR, Procedural, numbers_up_to
from areal_jax.tasks.errors import TaskError
from areal_jax.types import Prompt

OPERATIONS = "+-*"
STEPS = range(2, 9)
MODULI = range(2, 98)

ASK = ":"
"""The last character of a compact prompt."""

ALPHABET = "0123456789" + OPERATIONS + ASK + SEPARATOR
"""The characters of compact prompts and responses.

They are the same for all settings, so that a model trained with some can be evaluated with others.
"""

_GRAIN = 1_000_000
"""The setting `solved` counts in steps of 1 / _GRAIN."""

_WORDS = {"+": "Add {}.", "-": "Subtract {}.", "*": "Multiply by {}."}
_STEP = re.compile(r"([-+*])([0-9]+)")
_NUMBER = re.compile(r"0*([0-9]{1,2})\.?")


class Problem(NamedTuple):
    """A chain of steps, from left to right: each is an operation and its number."""

    start: int
    steps: tuple[tuple[str, int], ...]

    @property
    def text(self) -> str:
        """The problem in few symbols: 3+4*2 is (3 + 4) * 2."""
        return str(self.start) + "".join(f"{operation}{number}" for operation, number in self.steps)


class Chained(Procedural):
    """Modular arithmetic in steps, with each step's result as a sub-answer: procedural, no files.

    A prompt gives a start value and steps, each of which adds, subtracts or multiplies by a number and
    reduces the result modulo `modulus`. The sub-answers are the results of all steps but the last; the final
    answer is the last result. Prompt i depends on i and the settings alone. About one problem in ten is in
    the test split; if `size` exceeds the number of distinct problems, prompts repeat.
    """

    def __init__(
        self,
        *,
        steps: int = 3,
        min_steps: int | None = None,
        modulus: int = 10,
        operations: str | Sequence[str] = OPERATIONS,
        compact: bool = False,
        solved: float = 0.0,
        split: str = "train",
        size: int = 100_000,
        template: str = "interleave",
        reward: Mapping[str, Any] | None = None,
        system: str | None = INSTRUCTIONS,
    ) -> None:
        """The number of steps is drawn uniformly from min_steps..steps, by default it is `steps`.

        Each step's operation is drawn from `operations`, its number from 1..modulus-1. `compact`: a problem
        is asked as "3+4*2:", to be computed from left to right, and the task has a tokenizer of its own, for
        small models without pretraining. `solved`: fraction of the steps that a reference answer computes,
        0 to 1; the results of the others are drawn, so that 0 teaches the format alone. `split`: train or
        test; `size`: number of prompts. `template` and `reward`: as of Interleaved. `system`: the system
        message, null for none; {instructions} stands for the explanation of the template.
        """
        super().__init__(
            split=split,
            size=size,
            template=template,
            reward=reward,
            system=system,
            alphabet=ALPHABET if compact else "",
        )
        self._lengths = numbers_up_to("steps", steps, min_steps, STEPS)
        if modulus not in MODULI:
            raise TaskError(f"modulus={modulus} is out of range; give {MODULI[0]} to {MODULI[-1]}")
        check_operations(operations, OPERATIONS)
        self._modulus = modulus
        if not 0 <= solved <= 1:
            raise TaskError(f"solved={solved} is not a fraction; give 0 (the format alone) to 1")
        self._operations = tuple(operations)
        self._solved = solved
        for length in self._lengths:
            # With few distinct problems, a split may have none of a length: an error now, not in a run.
            self._problem(Draws.of(0), length)

    def guess(self, prompt: Prompt, rng: np.random.Generator) -> tuple[list[str], list[str]]:
        """Returns the steps as thoughts, with drawn results as answers.

        A thought computes with the result of the step before: what is computed from what is shown, and the
        arithmetic only in the steps that are solved (setting `solved`).
        """
        draws = Draws(rng.bit_generator)
        problem = prompt.info["problem"]
        form = "{}{}{}" if self._is_compact else f"{{}} {{}} {{}} modulo {self._modulus}"
        previous = _STEP.sub("", problem)
        thoughts, answers = [], []
        for operation, number in _STEP.findall(problem):
            thoughts.append(form.format(previous, operation, number))
            step = Problem(int(previous), ((operation, int(number)),))
            (right,) = results(step, self._modulus)
            is_solved = draws.below(_GRAIN) < self._solved * _GRAIN
            previous = str(right if is_solved else draws.below(self._modulus))
            answers.append(previous)
        return thoughts, answers

    def normalized(self, text: str) -> str:
        return self._number(text) or super().normalized(text)

    def parsed_answer(self, prompt: Prompt, text: str) -> str | None:
        """Returns a decimal number below the modulus without leading zeros; None for any other text."""
        return self._number(text)

    def _number(self, text: str) -> str | None:
        found = _NUMBER.fullmatch(text.strip())
        return str(int(found[1])) if found and int(found[1]) < self._modulus else None

    def _drawn(self, draws: Draws) -> Prompt:
        problem = self._problem(draws, draws.one(self._lengths))
        *steps, answer = map(str, results(problem, self._modulus))
        info = {"problem": problem.text, "steps": tuple(steps), "answer": answer}
        return self._asked(problem.text + ASK if self._is_compact else self._words(problem), info)

    def _problem(self, draws: Draws, length: int) -> Problem:
        """Returns a problem of `length` steps in this task's split."""

        def draw() -> Problem | None:
            start = draws.below(self._modulus)
            steps = tuple(
                (draws.one(self._operations), 1 + draws.below(self._modulus - 1)) for _ in range(length)
            )
            problem = Problem(start, steps)
            return problem if self._is_own(problem.text) else None

        return self._first(draw)

    def _words(self, problem: Problem) -> str:
        steps = " ".join(_WORDS[operation].format(number) for operation, number in problem.steps)
        question = (
            f"Start with {problem.start}. {steps} Take the steps in this order, and reduce the result of "
            f"each step modulo {self._modulus}, to a number from 0 to {self._modulus - 1}. What is the last "
            "step's result? The final answer is this number alone."
        )
        return with_parts(self.template, question, "A partial answer is the number that one step results in.")


def results(problem: Problem, modulus: int) -> list[int]:
    """Returns the result of each step, in 0..modulus-1."""

    def apply(value: int, step: tuple[str, int]) -> int:
        operation, number = step
        return {"+": value + number, "-": value - number, "*": value * number}[operation] % modulus

    return list(accumulate(problem.steps, apply, initial=problem.start))[1:]
