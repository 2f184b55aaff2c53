r"""Decides whether a completion's final answer equals the gold (right) answer; math-verify compares them.

The answer is the first of these parts that the completion has:

1. the content of the last complete \boxed{...}
2. the rest of the line after the last "####", as in GSM8K, if that begins like a number or a formula
3. the text after the last "answer is" or "answer:", to the end of the sentence
4. the last expression or number that math-verify finds

Only the last part of a kind counts, so naming many answers gains nothing. Only the last TAIL_CHARS characters
of a completion are read; an answer longer than ANSWER_CHARS is wrong.
"""

from __future__ import annotations

import re
import threading
from functools import lru_cache
from typing import Any

from areal_jax.tasks.errors import TaskError, import_extra

TAIL_CHARS = 4_000
ANSWER_CHARS = 300
TIMEOUT_S = 5
"""Time limit, in seconds, for parsing one answer and for comparing two answers (see `verify_math`)."""

_NOTE_CHARS = 60
_BOXED = re.compile(r"\\boxed\s*\{")
_HASHES = re.compile(r"####\s*([-+.$\\(\[{\d][^\n#]*)")
_ANSWER_IS = re.compile(r"\banswer\s*(?:is|:|=)[\s:*]*([^\n]+?)(?=\.(?:\s|$)|\n|$)", re.IGNORECASE)
_IN_MATH = re.compile(r"\$|\\\(|\\\[")


class VerifierError(Exception):
    """Reading or comparing answers took longer than TIMEOUT_S: the reward is unknown, and not 0."""


def verify_math(text: str, gold: str) -> tuple[bool, str]:
    """Returns whether the answer in `text` equals `gold` (LaTeX or a number), and a note that quotes both.

    Text without a readable answer is wrong. Raises VerifierError if parsing or comparing takes longer than
    TIMEOUT_S; TaskError if the gold answer cannot be read or math-verify is not installed; and any exception
    of math-verify's algebra. The time limit works by signals: it cannot interrupt code such as the
    computation of 9^(9^(9^9)), which ends only with the process. So give the process a deadline, as reward
    workers have.
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
    r"""Returns the answer that a text marks by \boxed{}, "####" or "answer is"; None without such a mark.

    If the text has several kinds of marks, the one listed first here counts; of several marks of that kind,
    the last. A boxed answer is returned with \boxed{} around it.
    """
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
    r"""Returns the content of the last \boxed{...} with closed braces; None if the text has no such box."""
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
    r"""Returns an answer for a reward's note: without its \boxed{}, cut to _NOTE_CHARS characters."""
    boxed = last_boxed(answer)
    return (answer if boxed is None else boxed)[:_NOTE_CHARS] or "nothing"


def _written(found: list[Any]) -> str:
    """Returns the text in `found`, a result of `_read`; "a formula" if `found` contains no text.

    A formula is not converted to text, because the conversion may never end.
    """
    return next((part for part in found if isinstance(part, str)), "a formula")


@lru_cache(maxsize=64)
def _read_gold(gold: str) -> tuple[Any, ...]:
    wanted = _read(f"\\boxed{{{gold}}}")
    if not wanted:
        raise TaskError(
            f"the gold answer {gold!r:.80} is not a number or LaTeX that math-verify reads; correct the data"
        )
    return tuple(wanted)


def _read(answer: str) -> list[Any]:
    """Returns what math-verify parses from an answer, the value and its text; [] if it finds nothing.

    Raises VerifierError if parsing takes longer than TIMEOUT_S.
    """
    # math-verify reads LaTeX only in a box or between math delimiters.
    if "\\" in answer and not answer.startswith("\\boxed") and not _IN_MATH.search(answer):
        answer = f"${answer}$"
    library = _math_verify()
    try:
        return library.parse(answer, parsing_timeout=_timeout_s(), raise_on_error=True)
    except library.errors.TimeoutException as error:
        raise VerifierError(
            f"parsing {answer[-_NOTE_CHARS:]!r} took longer than {TIMEOUT_S} s; the group gets no reward"
        ) from error


def _is_same(wanted: tuple[Any, ...], found: list[Any]) -> bool:
    library = _math_verify()
    try:
        return library.verify(list(wanted), found, timeout_seconds=_timeout_s(), raise_on_error=True)
    except library.errors.TimeoutException as error:
        raise VerifierError(
            f"comparing the answer with {_written(list(wanted))!r:.80} took longer than {TIMEOUT_S} s; "
            "the group gets no reward"
        ) from error


def _timeout_s() -> int | None:
    """Returns math-verify's time limit in seconds; None (no limit) outside the main thread.

    The limit uses alarm signals, which only the main thread can set; a reward worker scores in its main
    thread.
    """
    return TIMEOUT_S if threading.current_thread() is threading.main_thread() else None


def _math_verify() -> Any:
    return import_extra("math_verify", "math answers are compared by math-verify", "tasks")
