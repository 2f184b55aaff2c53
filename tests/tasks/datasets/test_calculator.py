from __future__ import annotations

import asyncio
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

import pytest

from areal_jax.tasks.datasets.calculator import Calculator, calculate, call_in
from areal_jax.tasks.errors import TaskError
from areal_jax.types import Prompt

TASK = Calculator()


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("37*46", "1702"),
        ("1702/46", "37"),
        (" 586 - 1347 ", "-761"),
        ("2+3*4", "14"),
        ("10-4-3", "3"),
        ("-2*(3+4.5)", "-15"),
        ("0.1+0.2", "0.3"),  # exact, unlike floats
        ("1/3", "0.333333"),
        ("2/3", "0.666667"),
        ("-1/9999999", "0"),
        ("100", "100"),
        ("9" * 100, "9" * 100),
        ("(" * 49 + "7" + ")" * 49, "7"),
        ("-" * 99 + "7", "-7"),
    ],
)
def test_the_calculator_computes_exactly(expression: str, value: str):
    assert calculate(expression) == value


@pytest.mark.parametrize(
    ("expression", "error"),
    [
        ("1/0", "division by zero"),
        ("5/(3-3)", "division by zero"),
        ("", "no expression"),
        ("9" * 101, "no expression"),
        ("37 x 46", "no expression"),
        ("__import__('os').getcwd()", "no expression"),
        ("1e999", "no expression"),
        ("3\n+4", "no expression"),
        ("9**9**9", "no expression"),
        ("7//2", "no expression"),
        ("1+", "no expression"),
        ("2(3)", "no expression"),
        ("()", "no expression"),
        ("...", "no expression"),
        ("1.2.3", "no expression"),
        ("(1+2", "no expression"),
    ],
)
def test_the_calculator_answers_what_is_wrong_with_an_expression(expression: str, error: str):
    assert calculate(expression) == f"error: {error}"


@pytest.mark.parametrize(
    ("text", "expression"),
    [
        ("calc(37*46)", "37*46"),
        ("I write calc( 37 * 46 ), and read.", "37 * 46"),
        ("calc(1+2) calc(3+4)", "1+2"),
        ("calc(2*(3+4))", "2*(3+4)"),
        ("calc()", ""),
        ("37*46 = 1702", None),
        ("calc(37*46", None),
        ("calc(37\n*46)", None),
        ("calc 37*46)", None),
    ],
)
def test_the_first_complete_call_is_found(text: str, expression: str | None):
    assert call_in(text) == expression


class Said(NamedTuple):
    text: str


class Scripted:
    """An episode with given turns; it keeps what is added, and calls tools at once."""

    def __init__(self, turns: Sequence[str]) -> None:
        self._turns, self.added = list(turns), ""

    async def generate(self, *, max_tokens: int, stop: Sequence[str]) -> Said:
        assert max_tokens <= 16 and stop == ["\n"]
        return Said(self._turns.pop(0))

    async def tool(self, function: Any, *arguments: Any, is_idempotent: bool) -> Any:
        assert is_idempotent
        return function(*arguments)

    def add(self, role: str, content: str) -> None:
        assert role == "tool"
        self.added += content


@pytest.mark.parametrize(
    ("turns", "value", "called", "added"),
    [
        ((" calc(37*46)\n", " 1702\n"), 1.0, 1.0, "Result: 1702\nAnswer:"),
        ((" calc(46*37)", " There are 1,702."), 1.0, 1.0, "\nResult: 1702\nAnswer:"),  # cut off
        ((" calc(37+46)\n", " 83\n"), 0.1, 1.0, "Result: 83\nAnswer:"),
        ((" calc(37*46)\n", " pens\n"), 0.1, 1.0, "Result: 1702\nAnswer:"),
        ((" calc(37*)\n", " 0\n"), 0.0, 0.0, "Result: error: no expression\nAnswer:"),
        ((" 1702\n",), 0.0, 0.0, ""),
        (("",), 0.0, 0.0, ""),
    ],
)
def test_an_episode_has_what_it_earns(turns: Sequence[str], value: float, called: float, added: str):
    episode, prompt = Scripted(turns), Prompt("37 * 46?", info={"expression": "37*46", "answer": 1702})
    reward = asyncio.run(TASK.workflow(prompt, episode))
    assert (reward.value, dict(reward.parts), episode.added) == (
        value,
        {"correct": float(value == 1), "called": called},
        added,
    )


def test_a_note_says_what_was_answered():
    prompt = Prompt("37 * 46?", info={"expression": "37*46", "answer": 1702})
    for turns, note in (
        (["calc(1+2)\n", "3\n"], "answered 3, wanted 1702"),
        (["calc(1+2)", "three"], "answered no number, wanted 1702"),
        (["three"], "no call of the calculator"),
    ):
        assert asyncio.run(TASK.workflow(prompt, Scripted(turns))).note == note


def test_a_prompt_begins_with_solved_examples():
    assert Calculator(examples=0)[1].text == "Question: What is 925 minus 186?\nCall:"
    solved = "Question: What is 12 times 34?\nCall: calc(12*34)\nResult: 408\nAnswer: 408\n\n"
    assert TASK[1].text == solved + Calculator(examples=0)[1].text
    for call, result in re.findall(r"Call: calc\((.*)\)\nResult: (.*)\n", Calculator(examples=4)[1].text):
        assert calculate(call) == result
    assert Calculator(examples=4)[1].text.count("Answer: ") == 4


@pytest.mark.parametrize("operations", ["+", "-", "*", "/", "+-*/"])
def test_a_question_has_the_numbers_of_its_expression_and_the_value_is_the_answer(operations: str):
    task = Calculator(operations=operations, examples=0)
    for i in range(100):
        prompt = task[i]
        expression, answer = prompt.info["expression"], prompt.info["answer"]
        assert task[i] == prompt and calculate(expression) == str(answer) and answer >= 0
        numbers = re.fullmatch(r"([0-9]+)[-+*/]([0-9]+)", expression).groups()
        assert sorted(re.findall(r"[0-9]+", prompt.text)) == sorted(numbers)


def test_test_problems_are_never_trained():
    train, test = Calculator(), Calculator(split="test")
    trained = {train[i].info["expression"] for i in range(1000)}
    assert len(trained) > 900 and not trained & {test[i].info["expression"] for i in range(1000)}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"operations": "+%"}, r"operations='\+%': give one or more of \+-\*/"),
        ({"operations": ""}, "operations=''"),
        ({"examples": 5}, "examples=5 is out of range; give 0 to 4"),
        ({"call_reward": 1.0}, "call_reward=1.0 must be at least 0 and below 1"),
        ({"split": "dev"}, "split='dev' is unknown"),
        ({"size": 0}, "size=0 is not positive"),
    ],
)
def test_bad_settings_are_errors(settings: dict[str, Any], message: str):
    with pytest.raises(TaskError, match=message):
        Calculator(**settings)


def test_there_is_no_prompt_beyond_the_last():
    with pytest.raises(IndexError, match="no prompt 3"):
        Calculator(size=3)[3]
