"""Arithmetic with large numbers in two turns: a call of a calculator, then the answer."""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from typing import Any

from areal_jax.tasks.chat import check_split
from areal_jax.tasks.datasets.arithmetic import last_number
from areal_jax.tasks.datasets.drawn import Drawn, Draws, check_operations, first_drawn, is_in_split
from areal_jax.tasks.errors import TaskError
from areal_jax.types import Prompt, Reward

QUESTIONS: Mapping[str, tuple[str, ...]] = {
    "+": ("What is {a} plus {b}?", "Add {a} and {b}."),
    "-": ("What is {a} minus {b}?", "Reduce {a} by {b}."),
    "*": ("What is {a} times {b}?", "Multiply {a} by {b}."),
    "/": ("What is {a} divided by {b}?", "Divide {a} by {b}."),
}
"""Operation -> questions for the value of a operation b."""

EXAMPLES = (("*", 12, 34, 408), ("-", 90, 25, 65), ("/", 144, 12, 12), ("+", 310, 42, 352))
"""(operation, a, b, result) of the solved examples, in the order in which prompts have them."""

CALL_TOKENS, ANSWER_TOKENS = 16, 10
"""The most tokens of a turn that may call, and of one that answers."""

_CALL = re.compile(r"calc\(((?:[^()\n]|\([^()\n]*\))*)\)")
_EXPRESSION = re.compile(r"[0-9.+*/() -]{1,100}")
"""Characters of an expression. Their number bounds its depth, and without powers the size of its value."""

_DECIMALS = 6

_OPERATORS: Mapping[type[ast.AST], Callable[..., Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.UAdd: operator.pos,
    ast.USub: operator.neg,
}


def calculate(expression: str) -> str:
    """Returns the value of an expression of numbers, + - * / and brackets as text, or "error" and the reason.

    The value is computed exactly, and written as an integer or with up to six decimals. It raises nothing,
    because a policy writes the expression, and may read what is wrong with it.
    """
    if not _EXPRESSION.fullmatch(expression):
        return "error: no expression"
    try:
        return _written(_value(ast.parse(expression.strip(), mode="eval").body))
    except ZeroDivisionError:
        return "error: division by zero"
    except (SyntaxError, ValueError):
        return "error: no expression"


def _value(node: ast.expr) -> Fraction:
    match node:
        case ast.Constant(value=number):
            return Fraction(str(number))
        case ast.BinOp(left, op, right) if type(op) in _OPERATORS:
            return _OPERATORS[type(op)](_value(left), _value(right))
        case ast.UnaryOp(op, operand):
            return _OPERATORS[type(op)](_value(operand))
    # Powers and // are of the same characters.
    raise ValueError(f"{type(node).__name__} is no arithmetic")


def _written(value: Fraction) -> str:
    whole, decimals = divmod(abs(round(value * 10**_DECIMALS)), 10**_DECIMALS)
    sign = "-" if value < 0 and (whole or decimals) else ""
    return f"{sign}{whole}.{decimals:0{_DECIMALS}}".rstrip("0").rstrip(".")


def call_in(text: str) -> str | None:
    """Returns the expression of the first call, calc(EXPRESSION), in a sampled text, or None."""
    found = _CALL.search(text)
    return found[1].strip() if found else None


class Calculator(Drawn):
    """Problems with numbers too large for a small model, solved with a calculator: procedural, no files.

    An episode has two turns. The policy calls the calculator by writing calc(37*46), and the workflow adds
    its result, which the policy reads before it answers. The last number of the answer counts. Prompt i
    depends on i and the settings alone. About one problem in ten is in the test split.
    """

    def __init__(
        self,
        *,
        operations: str | Sequence[str] = "+-*/",
        examples: int = 1,
        call_reward: float = 0.1,
        split: str = "train",
        size: int = 100_000,
    ) -> None:
        """Each problem's operation is drawn from `operations`; a prompt begins with 0 to 4 solved `examples`.

        `call_reward`: the reward of a wrong answer after a call that has a value; a right answer has 1.
        `split`: train or test; `size`: number of prompts.
        """
        check_operations(operations, QUESTIONS)
        if not 0 <= examples <= len(EXAMPLES):
            raise TaskError(f"examples={examples} is out of range; give 0 to {len(EXAMPLES)}")
        if not 0 <= call_reward < 1:
            raise TaskError(
                f"call_reward={call_reward} must be at least 0 and below 1, a right answer's reward"
            )
        check_split(split)
        super().__init__(size)
        self._operations, self._call_reward, self._split = tuple(operations), call_reward, split
        self._examples = "".join(map(_example, EXAMPLES[:examples]))

    def _prompt(self, i: int) -> Prompt:
        draws = Draws.of(i)
        question, expression, answer = first_drawn(lambda: self._drawn(draws), self._split)
        info = {"expression": expression, "answer": answer}
        return Prompt(f"{self._examples}Question: {question}\nCall:", info=info)

    async def workflow(self, prompt: Prompt, episode: Any) -> Reward:
        said = (await episode.generate(max_tokens=CALL_TOKENS, stop=["\n"])).text
        expression = call_in(said)
        if expression is None:
            return Reward(0.0, {"correct": 0.0, "called": 0.0}, "no call of the calculator")
        result = await episode.tool(calculate, expression, is_idempotent=True)
        end = "" if said.endswith("\n") else "\n"  # a turn that was cut off
        episode.add("tool", f"{end}Result: {result}\nAnswer:")
        answer = (await episode.generate(max_tokens=ANSWER_TOKENS, stop=["\n"])).text
        found, wanted = last_number(answer), prompt.info["answer"]
        correct, called = float(found == wanted), float(not result.startswith("error"))
        says = "no number" if found is None else f"{found:.40}"
        parts = {"correct": correct, "called": called}
        return Reward(correct or self._call_reward * called, parts, f"answered {says}, wanted {wanted}")

    def _drawn(self, draws: Draws) -> tuple[str, str, int] | None:
        """Returns (question, expression, answer) of a drawn problem, or None if it is in the other split."""
        operation = draws.one(self._operations)
        a, b = (12 + draws.below(88) for _ in range(2))
        if operation in "+-":
            a, b = 100 * (1 + draws.below(9)) + a, 100 * (1 + draws.below(9)) + b
        if operation == "-":
            a, b = max(a, b), min(a, b)
        if operation == "/":
            a, b = a * b, a
        answer = {"+": a + b, "-": a - b, "*": a * b, "/": a // b}[operation]
        expression = f"{a}{operation}{b}"
        if not is_in_split(expression, self._split):
            return None
        return draws.one(QUESTIONS[operation]).format(a=a, b=b), expression, answer


def _example(example: tuple[str, int, int, int]) -> str:
    operation, a, b, result = example
    question = QUESTIONS[operation][0].format(a=a, b=b)
    return f"Question: {question}\nCall: calc({a}{operation}{b})\nResult: {result}\nAnswer: {result}\n\n"
