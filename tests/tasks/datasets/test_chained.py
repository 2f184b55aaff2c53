from __future__ import annotations

import re
from collections import Counter

import pytest

from areal_jax.tasks.blocks import parse
from areal_jax.tasks.datasets.chained import Chained
from areal_jax.tasks.errors import TaskError
from areal_jax.types import Prompt
from tests.tasks.responses import judge, perfect

ONE_PROBLEM = Prompt("3+4*2-9:", info={"problem": "3+4*2-9", "steps": ("7", "4"), "answer": "5"})
"""Modulo 10: 3 + 4 = 7, 7 * 2 = 14 = 4, 4 - 9 = -5 = 5."""


def values(problem: str, modulus: int) -> list[str]:
    """The results of the steps by Python's own arithmetic, reduced only at the end of each prefix."""
    start, *steps = re.findall(r"^\d+|[-+*]\d+", problem)
    expressions = [start]
    for step in steps:
        expressions.append(f"({expressions[-1]}){step}")
    return [str(eval(expression) % modulus) for expression in expressions[1:]]


@pytest.mark.parametrize(("modulus", "operations"), [(2, "*"), (7, "+-"), (97, "+-*"), (10, ["+", "*"])])
def test_sub_answers_and_answer_are_the_results_of_the_steps(modulus: int, operations):
    task = Chained(steps=8, min_steps=4, modulus=modulus, operations=operations, compact=True)
    lengths, seen, numbers = Counter(), set(), set()
    for i in range(300):
        prompt = task[i]
        assert prompt.text == prompt.info["problem"] + ":"
        assert [*prompt.info["steps"], prompt.info["answer"]] == values(prompt.info["problem"], modulus)
        lengths[len(prompt.info["steps"]) + 1] += 1
        seen |= set(re.findall(r"[-+*]", prompt.text))
        numbers |= {int(number) for number in re.findall(r"[-+*](\d+)", prompt.text)}
    assert sorted(lengths) == [4, 5, 6, 7, 8] and min(lengths.values()) > 35
    assert seen == set(operations)
    assert min(numbers) >= 1 and max(numbers) < modulus


def test_one_problem_in_symbols_and_in_words():
    compact, chat = Chained(steps=4, compact=True), Chained(steps=4)
    words = {"Add": "+", "Subtract": "-", "Multiply by": "*"}
    for i in range(50):
        text = chat[i].messages[1]["content"]
        (start,) = re.findall(r"Start with (\d+)\.", text)
        steps = re.findall(r"(Add|Subtract|Multiply by) (\d+)\.", text)
        problem = start + "".join(words[word] + number for word, number in steps)
        assert compact[i].text == problem + ":"
        assert chat[i].info == compact[i].info
        assert "modulo 10, to a number from 0 to 9." in text


def test_a_right_response_gets_format_final_and_all_of_the_sub_answers():
    for compact in (True, False):
        task = Chained(compact=compact)
        for i in range(20):
            reward = perfect(task, task[i])
            assert reward.value == 1 + 2 + 0.5
            assert (reward.parts["sub_correct"], reward.parts["first_correct"]) == (1.0, 1.0)
    task = Chained(template="think_answer")
    assert perfect(task, task[0], "think_answer").value == 1 + 2
    task = Chained(template="delayed")
    assert perfect(task, task[0], "delayed").value == 1 + 2 + 0.5


@pytest.mark.parametrize(
    ("answers", "wanted"),
    [
        (["7", "4", "5"], 3.5),
        ([" 07.", "4\n", "05. "], 3.5),
        (["7", "4", "6"], 1 - 1.5),
        (["7", "4", "15"], 1 - 2.0),
        (["7", "4", "-5"], 1 - 2.0),
        (["7", "4", "x = 5"], 1 - 2.0),
        (["7", "4", "5 5"], 1 - 2.0),
        (["7", "4", "٥"], 1 - 2.0),
        (["7", "4", "5" * 10_000], 1 - 2.0),
        (["6", "4", "5"], 3 + 0.25 / 2),
        (["7", "14", "5"], 3 + 0.25),
        (["7 or 4", "4 or 7", "5"], 3.0),
    ],
)
def test_answers_are_numbers_below_the_modulus(answers: list[str], wanted: float):
    assert judge(Chained(compact=True), ONE_PROBLEM, answers).value == wanted


def test_a_reference_shows_what_is_computed_from_what_and_not_the_results():
    """Each thought takes the drawn answer before it; one answer in ten is right, as by chance."""
    right, drawn = Counter(), set()
    for compact, form in ((True, "{}{}{}"), (False, "{} {} {} modulo 10")):
        task = Chained(compact=compact)
        for i in range(500):
            prompt = task[i]
            blocks = parse([task.reference(prompt)]).blocks
            thoughts, answers = (
                [block.text for block in blocks if block.kind == k] for k in ("think", "answer")
            )
            start, *steps = re.findall(r"^\d+|[-+*]\d+", prompt.info["problem"])
            befores = [start, *answers[:-1]]
            wanted = [form.format(b, step[0], step[1:]) for b, step in zip(befores, steps, strict=True)]
            assert thoughts == wanted
            truth = [*prompt.info["steps"], prompt.info["answer"]]
            right.update(one == other for one, other in zip(answers, truth, strict=True))
            drawn |= set(answers)
    assert drawn == set("0123456789")
    assert 0.07 < right[True] / right.total() < 0.13


@pytest.mark.parametrize("solved", [0.0, 0.35, 1.0])
def test_a_reference_solves_the_fraction_of_its_steps_that_the_setting_says(solved: float):
    """A drawn result is right by chance in one of seven."""
    task, right = Chained(compact=True, modulus=7, operations="+", solved=solved), []
    for i in range(700):
        thought_answers = parse([task.reference(task[i])]).blocks
        for thought, answer in zip(thought_answers[::2], thought_answers[1::2], strict=True):
            one, other = thought.text.split("+")
            right.append((int(one) + int(other)) % 7 == int(answer.text))
    assert sum(right) / len(right) == pytest.approx(solved + (1 - solved) / 7, abs=0.04)


def test_a_problem_is_in_one_split_and_a_tenth_is_for_tests():
    """720 problems: 5 starts, and 12 steps twice."""
    tasks = (Chained(steps=2, modulus=5, compact=True, split=split) for split in ("train", "test"))
    train, test = ({task[i].text for i in range(7000)} for task in tasks)
    assert not train & test
    assert len(train | test) == 5 * (3 * 4) ** 2
    assert 0.07 < len(test) / 720 < 0.13


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"steps": 1}, "steps=1"),
        ({"steps": 9}, "steps=9"),
        ({"steps": 3, "min_steps": 4}, "min_steps=4 and steps=3"),
        ({"modulus": 1}, "modulus=1"),
        ({"modulus": 98}, "modulus=98"),
        ({"operations": "/"}, "operations='/'"),
        ({"operations": ""}, "operations=''"),
    ],
)
def test_settings_that_cannot_work_are_named(settings: dict, problem: str):
    with pytest.raises(TaskError, match=problem):
        Chained(**settings)


def test_solved_is_a_fraction():
    with pytest.raises(TaskError, match=r"solved=35 is not a fraction; give 0"):
        Chained(solved=35)
