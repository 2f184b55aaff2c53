"""Tests of an answer, run inside the sandbox: what they can say, and what the answer cannot see of them."""

from __future__ import annotations

import json

import pytest

from areal_jax.sandbox.runner import Ran, SandboxLimits, run_tests

pytestmark = pytest.mark.usefixtures("sandbox")


def verdicts(ran: Ran) -> list[dict]:
    return [json.loads(line) for line in ran.stdout.splitlines()]


def test_calls_and_code_are_judged_in_order_and_values_keep_their_types():
    source = (
        "class Point:\n"
        "    def __init__(self, x): self.x = x\n"
        "    def moved(self, by): return Point(self.x + by)\n"
        "def same(x): return x\n"
        "def distance(a, b=None): return abs(a.x - (b.x if b else 0))\n"
        "LIMIT = 7\n"
        "def bad(x): raise ValueError(f'no {x}')\n"
    )
    values = "[1, -2.5, 'ä\\ud800', None, True, (1, (2,)), {3}, frozenset({4}), {5: {'a': b'x'}}, 1j, 10**50]"
    codes = [
        f"for v in {values}:\n    assert same(v) == v and type(same(v)) is type(v), v",
        "assert distance(Point(3), b=Point(5).moved(1)) == 3\nassert Point(4).x == 4\nassert LIMIT == 7",
        "import math\nassert math.isnan(same(math.nan)) and math.isinf(same(math.inf))",
        "try: bad(3)\nexcept ValueError as error: assert str(error) == 'no 3'\nelse: assert False",
        "def check(candidate):\n    assert candidate(1) == 1\ncheck(same)",
        "print('tests may print')",
        "assert same(1) == 2, 'one is not two'",
        "assert other(1)",
        "bad(5)",
    ]
    tests = [{"function": "same", "args": [[1, {"a": [2]}]]}, *({"code": code} for code in codes)]
    ran = run_tests(source, tests)
    got = verdicts(ran)
    assert got[0] == {"value": [1, {"type": "dict", "items": [["a", [2]]]}]}
    assert got[1:7] == [{}] * 6
    assert got[7:] == [
        {"problem": "the assertion failed: one is not two"},
        {"problem": "NameError: name 'other' is not defined"},
        {"problem": "ValueError: no 5"},
    ]


def test_the_answer_sees_neither_the_tests_nor_what_they_expect():
    """It looks into every object, frame and descriptor that it can reach: when it is loaded, when asked."""
    source = """
import gc, os, sys
def look(word):
    found = []
    frame = sys._getframe().f_back
    while frame:
        found += [dict(frame.f_locals), frame.f_globals, frame.f_code.co_consts]
        frame = frame.f_back
    found += gc.get_objects()
    texts = [repr(item) for item in found if isinstance(item, (str, list, tuple, dict)) and item is not found]
    for fd in range(64):
        try: texts.append(os.pread(fd, 1 << 20, 0).decode(errors="replace"))
        except OSError: pass
    return any(word in text for text in texts)
def secret(code): return look("".join(map(chr, code)))
early = secret([51, 49, 51, 51, 55] * 4)
KNOWN = "needle"
"""
    tests = [
        {"code": "assert early is False, early"},
        {"code": "assert secret([51, 49, 51, 51, 55] * 4) is False, 31337313373133731337"},
        {"code": "assert secret([110, 101, 101, 100, 108, 101]), 'it does look'"},
    ]
    assert verdicts(run_tests(source, tests, SandboxLimits(seconds=20))) == [{}, {}, {}]
