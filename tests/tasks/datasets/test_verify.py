r"""What a completion's final answer is, and whether it equals the gold one."""

from __future__ import annotations

import queue
import sys
import threading
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from areal_jax.control.events import RewardScored
from areal_jax.tasks.datasets import math_process, verify
from areal_jax.tasks.datasets.math_process import MathProcess, VerifierError
from areal_jax.tasks.datasets.verify import find_answer, last_boxed, verify_math
from areal_jax.tasks.errors import TaskError
from areal_jax.tasks.pool import RewardPool
from areal_jax.tasks.task import Task
from areal_jax.types import Completion, Prompt, Reward
from tests.hangs import HANG_S

ENDLESS = r"\boxed{99999999!}"
"""A number of which sympy takes hours to compute the digits."""


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (r"\boxed{1} #### 2, the answer is 3", r"\boxed{1}"),
        (r"\boxed{1} and \boxed{2}", r"\boxed{2}"),
        (r"\boxed{\frac{1}{2}}.", r"\boxed{\frac{1}{2}}"),
        (r"\boxed{1}, cut off: \boxed{\frac{2}{", r"\boxed{1}"),
        ("#### 1\n#### 2 apples\nThe answer is 3", "2 apples"),
        ("#### Step 1\nThe answer is 3.", "3"),
        ("The answer is 3. The ANSWER is: 4.5. Then 5", "4.5"),
        ("Answer: **7**\nBecause 3 + 4", "7**"),
        ("the answer is\n18 dollars, as 3 * 6 = 18", "18 dollars, as 3 * 6 = 18"),
        ("3 + 5 = 8", None),
        ("", None),
    ],
)
def test_the_marked_answer_is_found_in_the_written_order(text: str, answer: str | None):
    assert find_answer(text) == answer


@given(st.text("{}a\\"), st.text("{}ab\\"))
def test_a_box_is_found_exactly_where_its_braces_close(before: str, inside: str):
    depth, lowest = 0, 0
    for character in inside:
        depth += {"{": 1, "}": -1}.get(character, 0)
        lowest = min(lowest, depth)
    found = last_boxed(f"{before}\\boxed{{{inside}}}")
    if depth == 0 and lowest == 0:
        assert found == inside.strip()


@pytest.mark.parametrize(
    ("text", "gold", "is_right"),
    [
        ("She has 3 apples and 5 pears, so 8 in all.", "8", True),
        ("So she pays $18 for 3 apples", "18", False),
        ("#### $1,800.00", "1800", True),
        ("#### 18 dollars", "18", True),
        ("The answer is −5.", "-5", True),
        ("it is 18%", "18", True),
        (r"\boxed{18\%}", "18", True),
        (r"\boxed{18\text{ cm}^2}", "18", True),
        (r"The answer is \frac{2}{4}.", r"\frac12", True),
        (r"\boxed{0.5}", r"\frac12", True),
        (r"\boxed{0.51}", r"\frac12", False),
        (r"so $x = \frac{9}{256}$", r"\frac{9}{256}", True),
        (r"\boxed{[1,2)}", "[1,2)", True),
        (r"\boxed{(1,2)}", "[1,2)", False),
        (r"\boxed{(3, \pi/2)}", r"\left( 3, \frac{\pi}{2} \right)", True),
        (r"\boxed{2, 1}", "1, 2", True),
        (r"\boxed{3 > x}", "x < 3", True),
        (r"\boxed{x=18}", "18", True),
        (r"\boxed{Evelyn}", r"\text{Evelyn}", True),
        (r"\boxed{Angela}", r"\text{Evelyn}", False),
        ("1 2 3 4 5 6 7 8", "5", False),
        (r"\boxed{16, 17, 18}", "18", False),
        (r"\boxed{1/0}", "18", False),
        (r"\boxed{x}", "18", False),
        (r"\boxed{18", "18", False),
    ],
)
def test_answers_are_compared_by_value(text: str, gold: str, is_right: bool):
    assert verify_math(text, gold)[0] is is_right


@pytest.mark.parametrize(
    ("text", "note"),
    [
        ("#### 18", "found 18, wanted 18"),
        (r"so $\frac{1}{2}$ or \boxed{\frac{3}{4}}", r"found \frac{3}{4}, wanted 18"),
        ("3 + 5 = 8", "found 8, wanted 18"),
        ("I do not know", "found no answer, wanted 18"),
        ("", "found no answer, wanted 18"),
        ("The answer is unknown", "found unknown, wanted 18"),
        (r"\boxed{}", "found nothing, wanted 18"),
        (r"\boxed{" + "1+" * 400 + "1}", "found an answer of 809 characters, wanted 18"),
    ],
)
def test_the_note_says_what_was_compared_and_silence_is_wrong(text: str, note: str):
    is_right, said = verify_math(text, "18")
    assert (said, is_right) == (note, note == "found 18, wanted 18")


def test_of_megabytes_the_end_is_read():
    """In CPU seconds; a search through the whole text would take hours."""
    start_s = time.process_time()
    assert verify_math("the answer is 3 " * 200_000 + "#### 18", "18")[0]
    assert not verify_math("#### 18" + " and so on" * 200_000, "18")[0]
    assert not verify_math("1" * 3_000_000, "18")[0]
    assert time.process_time() - start_s < 5


@settings(max_examples=40, deadline=None)
@given(st.text(r"\${}()[]^_+-*/=<>.,:;|!%#& 019２१²xπe√∞" + "frac boxed sqrt", max_size=40))
def test_no_short_text_breaks_it(text: str):
    is_right, note = verify_math(f"\\boxed{{{text}}}".replace("^", "").replace("!", ""), r"\frac{17}{113}")
    assert is_right is False and note.startswith("found ")


@pytest.mark.parametrize(
    "text",
    [
        "#### ２２",
        "The answer is २२",
        r"\boxed{²²}",
        "#### 1e400",
        r"\boxed{\sqrt[}",
        "#### 1" + "0" * 290,
        "answer: \ud800\0\x1b[0m",
        r"\boxed{\frac{1}{0}^{\infty}}",
    ],
)
def test_what_cannot_be_read_is_a_wrong_answer_and_no_exception(text: str):
    """Otherwise one completion decides that its whole group is not trained."""
    is_right, note = verify_math(text, "22")
    assert is_right is False and note.endswith("wanted 22")


def test_a_gold_answer_that_cannot_be_read_is_an_error_not_a_zero():
    with pytest.raises(TaskError, match="the gold answer '' is not a number or LaTeX"):
        verify_math("#### 18", "")


@pytest.mark.parametrize("text", [r"\boxed{10^{10^{10}}}", r"\boxed{9^{9^{9^9}}}", ENDLESS])
def test_what_takes_too_long_to_compare_is_a_wrong_answer(text: str, monkeypatch: pytest.MonkeyPatch):
    """In CPU time, and also in code that no signal interrupts; the next answer finds the process at work."""
    monkeypatch.setattr(verify, "LIMIT_CPU_S", 1)
    is_right, note = verify_math(text, "18")
    assert not is_right and "cannot be compared (it takes more than 1 s of CPU time), wanted 18" in note
    assert verify_math("#### 18", "18")[0]


def test_a_process_that_was_killed_is_started_again():
    process = MathProcess()
    assert process.ask("18", "18", 3)["is_right"]
    assert process._process is not None
    process._process.kill()
    assert process.ask("18", "18", 3)["is_right"]
    process._end()


def test_a_process_that_cannot_answer_is_an_error_not_a_zero(tmp_path, monkeypatch: pytest.MonkeyPatch):
    program = tmp_path / "ends.py"
    program.write_text("input()")
    monkeypatch.setattr(math_process, "PROGRAM", program)
    with pytest.raises(VerifierError, match="ended while it compared '17' with '18'"):
        MathProcess().ask("18", "17", 3)


def test_another_thread_verifies_too():
    """The plain loop may score anywhere, and an agent's answers are scored in threads."""
    said: list[tuple[bool, str]] = []
    thread = threading.Thread(target=lambda: said.append(verify_math(r"\boxed{\frac{36}{2}}", "18")))
    thread.start()
    thread.join(HANG_S)
    assert said == [(True, r"found \frac{36}{2}, wanted 18")]


def test_a_missing_library_is_named(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "math_verify", None)
    with pytest.raises(TaskError, match=r"math-verify.*pip install '\.\[tasks\]'"):
        verify_math("#### 17", "17")


# --- in reward workers --------------------------------------------------------------------------------


class Judge(Task):
    def score(self, prompt: Prompt, completion: Completion) -> Reward:
        is_right, note = verify_math(completion.text, "18")
        return Reward(float(is_right), note=note)


@pytest.mark.slow
def test_an_endless_answer_does_not_keep_its_group_from_being_scored():
    texts = "#### 18", r"\boxed{9^{9^{9^9}}}", "#### 17", ""
    answers: queue.SimpleQueue = queue.SimpleQueue()
    with RewardPool({"judge": Judge()}, workers=1, timeout_s=HANG_S) as pool:
        completions = [Completion(text, (1,), "stop") for text in texts]
        pool.submit(0, 0, Prompt("?", task="judge"), completions, answers.put)
        got = answers.get(timeout=HANG_S)
    assert isinstance(got, RewardScored), got
    assert got.rewards == (1.0, 0.0, 0.0, 0.0)
    assert got.notes[0] == "found 18, wanted 18" and got.notes[-1] == "found no answer, wanted 18"
