r"""Whether a completion's final answer equals the gold one: read from text, compared by math-verify.

Which part of a completion is its answer, the first that there is:

1. the inside of the last complete \boxed{...}
2. what follows the last "####" on its line, as in GSM8K, if it begins like a number or a formula
3. what follows the last "answer is" or "answer:", to the end of the sentence
4. the last expression or number that math-verify finds

Only the last of a kind counts, so naming many answers wins nothing. Of a completion the last TAIL_CHARS
characters are read; an answer longer than ANSWER_CHARS is none.
"""

from __future__ import annotations

import re
import threading
from functools import lru_cache
from types import ModuleType
from typing import Any

from areal_jax.tasks.task import TaskError

TAIL_CHARS = 4_000
ANSWER_CHARS = 300
TIMEOUT_S = 5
"""Longest that reading an answer, or comparing two, may take where signals can interrupt it."""

_NOTE_CHARS = 60
_BOXED = re.compile(r"\\boxed\s*\{")
_HASHES = re.compile(r"####\s*([-+.$\\(\[{\d][^\n#]*)")
_ANSWER_IS = re.compile(r"\banswer\s*(?:is|:|=)[\s:*]*([^\n]+?)(?=\.(?:\s|$)|\n|$)", re.IGNORECASE)
_IN_MATH = re.compile(r"\$|\\\(|\\\[")


class VerifierError(Exception):
    """The comparison was given up; the sample's reward is unknown, which is not 0."""


def verify_math(text: str, gold: str) -> tuple[bool, str]:
    r"""Whether the answer in `text` equals `gold` (LaTeX or a number), and a note of what was compared.

    Text without a readable answer is wrong. Raises VerifierError when reading or comparing takes longer than
    TIMEOUT_S, TaskError for a gold answer that cannot be read or where math-verify is not installed; what its
    algebra raises is passed on. Code that signals cannot interrupt, such as computing 9^(9^(9^9)), ends with
    the process: give it a deadline, as reward workers have.
    """
    wanted = f"wanted {gold:.{_NOTE_CHARS}}"
    answer = find_answer(text)
    if answer is not None and len(answer) > ANSWER_CHARS:
        return False, f"found an answer of {len(answer)} characters, {wanted}"
    found = _read(_tail(text) if answer is None else answer)
    if not found:
        return False, f"found {'no answer' if answer is None else _inside(answer)}, {wanted}"
    is_right = _is_same(_read_gold(gold), found)
    return is_right, f"found {_inside(answer or _written(found))}, {wanted}"


def find_answer(text: str) -> str | None:
    r"""The marked answer of a text, by rule 1 (its \boxed{} included), 2 or 3; None without one."""
    tail = _tail(text)
    boxed = last_boxed(tail)
    if boxed is not None:
        return f"\\boxed{{{boxed}}}"
    for pattern in (_HASHES, _ANSWER_IS):
        marked = pattern.findall(tail)
        if marked:
            return marked[-1].strip()
    return None


def last_boxed(text: str) -> str | None:
    r"""The inside of the last \boxed{...} whose braces close; None where there is none."""
    for start in reversed([match.end() for match in _BOXED.finditer(text)]):
        depth = 1
        for place in range(start, len(text)):
            depth += {"{": 1, "}": -1}.get(text[place], 0)
            if depth == 0:
                return text[start:place].strip()
    return None


def _tail(text: str) -> str:
    return text[-TAIL_CHARS:].replace("−", "-")


def _inside(answer: str) -> str:
    """An answer as a note shows it: without its box."""
    boxed = last_boxed(answer)
    return (answer if boxed is None else boxed)[:_NOTE_CHARS] or "nothing"


def _written(found: list[Any]) -> str:
    """How the answer was written; a formula computes its own text, which may never end."""
    return next((part for part in found if isinstance(part, str)), "a formula")


@lru_cache(maxsize=64)
def _read_gold(gold: str) -> tuple[Any, ...]:
    wanted = _read(f"\\boxed{{{gold}}}")
    if not wanted:
        raise TaskError(f"the gold answer {gold!r:.80} is neither a number nor LaTeX that math-verify reads")
    return tuple(wanted)


def _read(answer: str) -> list[Any]:
    """What math-verify makes of an answer: its value and its text, or nothing."""
    if "\\" in answer and not answer.startswith("\\boxed") and not _IN_MATH.search(answer):
        answer = f"${answer}$"
    library = _math_verify()
    try:
        return library.parse(answer, parsing_timeout=_timeout_s(), raise_on_error=True)
    except library.errors.TimeoutException as error:
        raise VerifierError(f"reading {answer[-_NOTE_CHARS:]!r} took longer than {TIMEOUT_S} s") from error


def _is_same(wanted: tuple[Any, ...], found: list[Any]) -> bool:
    library = _math_verify()
    try:
        return library.verify(list(wanted), found, timeout_seconds=_timeout_s(), raise_on_error=True)
    except library.errors.TimeoutException as error:
        raise VerifierError(
            f"comparing with {_written(list(wanted))!r:.80} took longer than {TIMEOUT_S} s"
        ) from error


def _timeout_s() -> int | None:
    """math-verify sets alarms, which only a main thread can: a reward worker scores in its own."""
    return TIMEOUT_S if threading.current_thread() is threading.main_thread() else None


def _math_verify() -> ModuleType:
    try:
        import math_verify
        import math_verify.errors
    except ModuleNotFoundError as error:
        raise TaskError(
            f"math answers are compared by math-verify, which lacks here ({error.name}): "
            "pip install 'areal-jax[tasks]'"
        ) from error
    return math_verify
