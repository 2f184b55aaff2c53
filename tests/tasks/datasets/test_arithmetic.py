from __future__ import annotations

import ast
import operator
from collections import Counter
from decimal import Decimal

import pytest

from areal_jax.tasks.datasets.arithmetic import Arithmetic, last_number
from areal_jax.tasks.errors import TaskError
from areal_jax.types import Completion, Prompt

DEEDS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul}


def value(problem: str) -> int:
    """The problem's value by Python's own grammar."""

    def walk(node: ast.expr) -> int:
        if isinstance(node, ast.BinOp):
            return DEEDS[type(node.op)](walk(node.left), walk(node.right))
        assert isinstance(node, ast.Constant)
        return node.value

    return walk(ast.parse(problem, mode="eval").body)


def numbers(prompt: Prompt) -> list[str]:
    return [part for part in prompt.info["problem"].split() if part.isdigit()]


def judge(text: str, answer: int):
    return Arithmetic().score(Prompt("?", info={"answer": answer}), Completion(text, (1,), "stop"))


def test_a_prompt_is_a_short_chat():
    task = Arithmetic()
    a, b = numbers(task[0])
    assert task[0].messages == (
        {"role": "system", "content": "Answer with a number."},
        {"role": "user", "content": f"What is {a} + {b}?"},
    )
    assert task[0].info == {"problem": f"{a} + {b}", "answer": int(a) + int(b)}
    plain = Arithmetic(system=None, question="{problem} =")
    assert plain[0].messages == ({"role": "user", "content": f"{a} + {b} ="},)


@pytest.mark.parametrize("operations", ["+", "-", "*", "+-*", ["+", "*"]])
@pytest.mark.parametrize("terms", [2, 4])
def test_answers_are_the_problems_values(operations, terms: int):
    task = Arithmetic(digits=3, terms=terms, operations=operations)
    seen = set()
    for i in range(300):
        prompt = task[i]
        assert len(numbers(prompt)) == terms
        assert prompt.info["answer"] == value(prompt.info["problem"])
        seen |= set(prompt.info["problem"]) & set("+-*")
        assert task.score(prompt, Completion(task.reference(prompt), (1,), "stop")).value == 1.0
    assert seen == set(operations)


def test_all_one_digit_sums_belong_to_exactly_one_split():
    """100 sums: 81 to train and 19 to test, a sum and its mirror image together."""
    train, test = (
        {Arithmetic(split=split)[i].info["problem"] for i in range(3000)} for split in ("train", "test")
    )
    assert not train & test
    assert train | test == {f"{a} + {b}" for a in range(10) for b in range(10)}
    assert (len(train), len(test)) == (81, 19)
    for problems in (train, test):
        assert {" ".join(reversed(problem.split())) for problem in problems} == problems


def test_about_a_tenth_of_large_problems_are_tests():
    """Split parity: the numbers of a train problem never make a test problem, whatever joins them."""
    held = {tuple(sorted(numbers(Arithmetic(split="test", digits=2, min_digits=2)[i]))) for i in range(4000)}
    pairs = 90 * 91 / 2
    assert 0.08 < len(held) / pairs < 0.11
    task = Arithmetic(digits=2, min_digits=2, operations="+-*")
    assert not held & {tuple(sorted(numbers(task[i]))) for i in range(4000)}


def test_grades_are_mixed_evenly_and_a_problem_is_of_one_grade():
    task = Arithmetic(digits=3, min_digits=1)
    counts = Counter()
    for i in range(3000):
        lengths = {len(number) for number in numbers(task[i])}
        assert len(lengths) == 1
        counts[lengths.pop()] += 1
    assert sorted(counts) == [1, 2, 3]
    assert min(counts.values()) > 900
    assert {len(n) for i in range(50) for n in numbers(Arithmetic(digits=4, min_digits=4)[i])} == {4}


def test_a_prompt_depends_on_its_index_alone():
    one, other = Arithmetic(digits=2, size=50), Arithmetic(digits=2)
    assert [one[i] for i in (49, 7, 0)] == [other[i] for i in (49, 7, 0)]
    for i in (50, -1):
        with pytest.raises(IndexError, match=f"there is no prompt {i}: the task has 50"):
            one[i]


@pytest.mark.parametrize(
    ("text", "answer", "wanted", "note"),
    [
        ("The sum of 3 and 5 is 8.", 8, 1, "found 8, wanted 8"),
        ("8", 8, 1, "found 8, wanted 8"),
        ("1 2 3 4 5 6 7 8 9 10", 8, 0, "found 10, wanted 8"),
        ("12345678", 8, 0, "found 12345678, wanted 8"),
        ("8, because 3 + 5 is 8", 8, 1, "found 8, wanted 8"),
        ("8 is the sum of 3 and 5", 8, 0, "found 5, wanted 8"),
        (r"\boxed{8}. Check: 3 + 5", 8, 1, "found 8, wanted 8"),
        (r"\boxed{8} no, \boxed{9}", 8, 0, "found 9, wanted 8"),
        (r"\boxed{1 2 3 8 9}", 8, 0, "found 9, wanted 8"),
        ("8.0", 8, 1, "found 8.0, wanted 8"),
        ("8.5", 8, 0, "found 8.5, wanted 8"),
        ("1,234", 1234, 1, "found 1234, wanted 1234"),
        ("The sum of 30 and 5 is 3", 35, 0, "found 3, wanted 35"),
        ("no idea", 8, 0, "found no number, wanted 8"),
        ("", 8, 0, "found no number, wanted 8"),
    ],
)
def test_the_last_number_decides(text: str, answer: int, wanted: float, note: str):
    reward = judge(text, answer)
    assert (reward.value, reward.parts, reward.note) == (wanted, {"correct": wanted}, note)


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("3 - 5 = -2", -2),
        ("it is −2.", -2),
        ("$-2$", -2),
        ("7-5", 5),
        ("x-5", 5),
        ("(2)-5", 5),
        ("minus 2", 2),
        ("3,000,123.50", Decimal("3000123.5")),
        ("1,2345", 2345),
    ],
)
def test_signs_and_commas(text: str, wanted: int):
    assert last_number(text) == wanted


def test_a_huge_completion_is_judged_by_its_end():
    assert judge("9" * 3_000_000, 8).value == 0.0
    assert judge("1 " * 1_000_000 + "so 8", 8).value == 1.0


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"digits": 0}, "digits=0"),
        ({"digits": 13}, "digits=13"),
        ({"digits": 2, "min_digits": 3}, "min_digits=3 and digits=2"),
        ({"terms": 1}, "terms=1"),
        ({"operations": "/"}, "operations='/'"),
        ({"operations": ""}, "operations=''"),
        ({"operations": [None]}, r"operations=\[None\].*in quotes"),
        ({"split": "dev"}, "split='dev'"),
        ({"size": 0}, "size=0"),
        ({"question": "What is it?"}, "question='What is it"),
    ],
)
def test_settings_that_cannot_work_are_named(settings: dict, problem: str):
    with pytest.raises(TaskError, match=problem):
        Arithmetic(**settings)
