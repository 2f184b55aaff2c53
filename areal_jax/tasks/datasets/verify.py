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
import sys
from importlib.util import find_spec

from areal_jax.tasks.datasets.math_process import compared
from areal_jax.tasks.errors import TaskError, import_extra

TAIL_CHARS = 4_000
ANSWER_CHARS = 300
LIMIT_CPU_S = 3
"""Limit on the CPU time, in whole seconds, in which an answer is read and compared."""

_NOTE_CHARS = 60
_BOXED = re.compile(r"\\boxed\s*\{")
_HASHES = re.compile(r"####\s*([-+.$\\(\[{\d][^\n#]*)")
_ANSWER_IS = re.compile(r"\banswer\s*(?:is|:|=)[\s:*]*([^\n]+?)(?=\.(?:\s|$)|\n|$)", re.IGNORECASE)
_IN_MATH = re.compile(r"\$|\\\(|\\\[")


def verify_math(text: str, gold: str) -> tuple[bool, str]:
    """Returns whether the answer in `text` equals `gold` (LaTeX or a number), and a note that quotes both.

    Whatever the text, it is scored: without a readable answer, or with one that takes more than LIMIT_CPU_S
    to compare, it is wrong. Raises TaskError if the gold answer cannot be read or math-verify is not
    installed, and VerifierError if the process that compares answers (`math_process`) cannot work.
    """
    wanted = f"wanted {gold:.{_NOTE_CHARS}}"
    answer = find_answer(text)
    if answer is not None and len(answer) > ANSWER_CHARS:
        return False, f"found an answer of {len(answer)} characters, {wanted}"
    _require_math_verify()
    asked = _delimited(_tail(text) if answer is None else answer)
    said = compared(gold, asked, LIMIT_CPU_S)
    if "gold" in said:
        raise TaskError(
            f"the gold answer {gold!r:.80} is not a number or LaTeX that math-verify reads ({said['gold']}); "
            "correct the data"
        )
    if "problem" in said:
        what = "an answer" if answer is None else _inside(answer)
        return False, f"found {what}, which cannot be compared ({said['problem']}), {wanted}"
    if not said["found"]:
        return False, f"found {'no answer' if answer is None else _inside(answer)}, {wanted}"
    # A formula is not converted to text, because the conversion may never end.
    return said["is_right"], f"found {_inside(answer or said['written'] or 'a formula')}, {wanted}"


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


def _delimited(answer: str) -> str:
    """Returns an answer with the delimiters or the box in which alone math-verify reads LaTeX."""
    if "\\" in answer and not answer.startswith("\\boxed") and not _IN_MATH.search(answer):
        return f"${answer}$"
    return answer


def _require_math_verify() -> None:
    """Raises TaskError if math-verify is not installed; it is not loaded here, but in `math_process`."""
    if sys.modules.get("math_verify", sys) is None or find_spec("math_verify") is None:
        import_extra("math_verify", "math answers are compared by math-verify", "tasks")
