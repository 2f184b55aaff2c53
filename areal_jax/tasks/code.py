"""Programming tasks from a JSONL file: the answer's Python runs against tests, in the sandbox."""

from __future__ import annotations

import json
import re
import signal
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from areal_jax.tasks import sandboxed
from areal_jax.tasks.jsonl import JsonLines
from areal_jax.tasks.sandbox import Limits, Ran, require_sandbox, run_python, run_tests
from areal_jax.tasks.task import TaskError
from areal_jax.types import Completion, Prompt, Reward

_BLOCK = re.compile(r"```(?:python3?|py)[ \t]*\n(.*?)(?:```|\Z)", re.DOTALL)
_PASSED = ""
_NOT_REACHED = "not reached"
_SHORT = 80
"""Longest quotation in a note, in characters."""


class Code(JsonLines):
    """Answers are Python; the reward is 1 where all tests pass, its part `passed` the share that does.

    A row has a prompt, `tests` and, for a supervised start, a `solution`. Tests are one of

        {"stdin": ["2 3", ...], "stdout": ["5", ...]}              a program, run once a test
        {"function": "add", "inputs": [[2, 3], ...], "outputs": [5, ...]}
        {"asserts": ["assert add(2, 3) == 5", ...]}

    Lines of stdout are compared without the spaces at their end; outputs by ==, where tuples are lists. The
    answer never shares a process with what is expected of it. Asserts see only plain data of the answer's
    (numbers, text, lists, tuples, sets, dicts); its other objects they can call, look into and pass back,
    not compare. So one that needs more, `==` on a class of the answer's say, fails for a right answer too.
    Whatever the answer does scores 0 and is said in the note; TaskError is for a sandbox that fails.
    """

    def __init__(
        self,
        *,
        path: str = "",
        data_dir: str = "",
        split: str = "train",
        test_timeout_s: float = 2.0,
        timeout_s: float = 6.0,
        memory_mib: int = 512,
    ) -> None:
        """`path` of the file, or `data_dir` that holds one `split*.jsonl`. `test_timeout_s` is for one run of
        the answer: a test with stdin, or all calls, or all asserts; no run starts later than `timeout_s`.

        A group of G takes at most G * (timeout_s + test_timeout_s): runtime.reward_timeout_s must be longer.
        """
        if test_timeout_s <= 0 or timeout_s <= 0 or memory_mib < 64:
            raise TaskError(
                f"tasks.code: test_timeout_s={test_timeout_s} and timeout_s={timeout_s} must be positive, "
                f"and memory_mib={memory_mib} at least 64, which Python itself needs"
            )
        require_sandbox()
        self._limits = Limits(seconds=test_timeout_s, memory_bytes=memory_mib << 20)
        self._timeout_s = timeout_s
        super().__init__(path=str(_file(path, data_dir, split)), answer="tests")

    def score(self, prompt: Prompt, completion: Completion) -> Reward:
        tests = prompt.info["tests"]
        source = extract_python(completion.text)
        if "stdin" in tests:
            problems = self._judge_programs(source, tests["stdin"], tests["stdout"])
        elif "function" in tests:
            calls = [{"function": tests["function"], "args": args} for args in tests["inputs"]]
            problems = self._judge_values(source, calls, tests["outputs"])
        else:
            problems = self._judge_values(source, [{"code": code} for code in tests["asserts"]], None)
        passed = problems.count(_PASSED)
        is_correct = float(passed == len(problems))
        return Reward(is_correct, {"correct": is_correct, "passed": passed / len(problems)}, _note(problems))

    def reference(self, prompt: Prompt) -> str:
        if not isinstance(solution := prompt.info.get("solution"), str):
            raise TaskError(
                f"a row of {self._path} has no text in column 'solution'; set trainer.supervised_steps=0, or "
                "add one to every row"
            )
        return f"```python\n{solution.strip()}\n```"

    def _judge_programs(self, source: str, inputs: Sequence[str], outputs: Sequence[str]) -> list[str]:
        """The problem of each test, empty where it passed. One that takes too long is the last to run."""
        problems = []
        end_s = time.monotonic() + self._timeout_s
        for given, wanted in zip(inputs, outputs, strict=True):
            if time.monotonic() > end_s:
                problems.append(f"{_NOT_REACHED} within {self._timeout_s:g} s")
                break
            ran = run_python(source, stdin=given, limits=self._limits)
            problems.append(self._problem(ran) or _compare(_lines(wanted), _lines(ran.stdout)))
            if ran.outcome == "timed_out":
                break
        return [*problems, *[_NOT_REACHED] * (len(inputs) - len(problems))]

    def _judge_values(
        self, source: str, tests: Sequence[Mapping[str, Any]], wanted: Sequence[Any] | None
    ) -> list[str]:
        """The same for calls, whose values are compared here, and for asserts (`wanted` None)."""
        ran = run_tests(source, tests, self._limits)
        problems = []
        for number, line in enumerate(ran.stdout.splitlines(keepends=True)):
            if not line.endswith("\n"):
                break  # cut short
            verdict = json.loads(line)
            if "problem" in verdict:
                problems.append(verdict["problem"])
            else:
                is_call = wanted is not None
                problems.append(_compare_value(wanted[number], verdict["value"]) if is_call else _PASSED)
        if len(problems) < len(tests):
            problems.append(self._problem(ran) or "the tests ended early")
        return [*problems, *[_NOT_REACHED] * (len(tests) - len(problems))]

    def _problem(self, ran: Ran) -> str:
        if ran.outcome == "timed_out":
            return f"timed out after {self._limits.seconds:g} s"
        if ran.outcome == "out_of_memory":
            return "killed: memory"
        if ran.outcome == "too_much_output":
            return f"killed: more than {self._limits.output_bytes >> 20} MiB of output"
        if ran.outcome == "error":
            return _last_line(ran.stderr) or _exit(ran.exit_code)
        return _PASSED

    def _check_answer(self, row: dict[str, Any], where: str) -> None:
        _check_tests(row.get("tests"), f"{where}: column 'tests'")


def extract_python(text: str) -> str:
    """The last ```python block of a completion; the whole text where there is none."""
    blocks = _BLOCK.findall(text)
    return blocks[-1] if blocks else text


def _file(path: str, data_dir: str, split: str) -> Path:
    if bool(path) == bool(data_dir):
        raise TaskError(
            "tasks.code needs a file: give tasks.code.path=FILE, or tasks.code.data_dir=DIR (with "
            "tasks.code.split=NAME), and not both"
        )
    if path:
        return Path(path)
    found = sorted(Path(data_dir).glob(f"{split}*.jsonl"))
    if len(found) != 1:
        names = ", ".join(file.name for file in found) or "none"
        raise TaskError(
            f"{data_dir} has to hold one file {split}*.jsonl and holds {names}; give tasks.code.path=FILE"
        )
    return found[0]


def _check_tests(tests: Any, where: str) -> None:
    """Raises TaskError unless `tests` is one of the three forms, with at least one test."""
    forms = '{"stdin", "stdout"}, {"function", "inputs", "outputs"} or {"asserts"}'
    if not isinstance(tests, dict):
        raise TaskError(f"{where} holds {tests!r:.60}; tests are an object: {forms}")
    keys = set(tests)
    if keys == {"stdin", "stdout"}:
        _check_lists(tests, "stdin", "stdout", where)
        _check_texts([*tests["stdin"], *tests["stdout"]], where)
    elif keys == {"function", "inputs", "outputs"}:
        _check_lists(tests, "inputs", "outputs", where)
        _check_texts([tests["function"]], where)
        if wrong := [args for args in tests["inputs"] if not isinstance(args, list)]:
            raise TaskError(f"{where}: an input is {wrong[0]!r:.60}; it is the list of a call's arguments")
    elif keys == {"asserts"}:
        _check_lists(tests, "asserts", "asserts", where)
        _check_texts(tests["asserts"], where)
    else:
        raise TaskError(f"{where} has {', '.join(sorted(map(str, keys))) or 'no keys'}; it is one of {forms}")


def _check_lists(tests: Mapping[str, Any], one: str, other: str, where: str) -> None:
    for name in (one, other):
        if not isinstance(tests[name], list) or not tests[name]:
            raise TaskError(f"{where}: {name} is {tests[name]!r:.60}; it is a list with an entry a test")
    if len(tests[one]) != len(tests[other]):
        raise TaskError(f"{where} has {len(tests[one])} {one} and {len(tests[other])} {other}; pair them")


def _check_texts(values: Sequence[Any], where: str) -> None:
    if wrong := [value for value in values if not isinstance(value, str)]:
        raise TaskError(f"{where} holds {wrong[0]!r:.60} where a text belongs")


def _compare(wanted: Any, got: Any) -> str:
    return _PASSED if wanted == got else f"expected {_quote(wanted)}, got {_quote(got)}"


def _compare_value(wanted: Any, value: Any) -> str:
    """Compares a call's value as JSON would give it, which is how the file gave the one that is wanted."""
    try:
        found = sandboxed.decode(value, lambda _: object())
        with suppress(TypeError, ValueError):  # a set, say: compared as it is
            found = json.loads(json.dumps(found))
        return _compare(wanted, found)
    except RecursionError:
        return "returned a value that is nested too deeply"


def _quote(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= _SHORT else text[: _SHORT - 3] + "..."


def _lines(output: str) -> str:
    return "\n".join(line.rstrip() for line in output.rstrip().splitlines())


def _last_line(stderr: str) -> str:
    lines = stderr.strip().splitlines()
    return lines[-1][: 2 * _SHORT] if lines else ""


def _exit(code: int | None) -> str:
    if code is not None and code - 128 in {*signal.Signals}:
        return f"killed by {signal.Signals(code - 128).name}"
    return f"exit status {code}"


def _note(problems: Sequence[str]) -> str:
    """How many passed, and what was wrong with the first that did not."""
    failed = [(number, problem) for number, problem in enumerate(problems, 1) if problem != _PASSED]
    passed = f"{len(problems) - len(failed)} of {len(problems)} tests"
    note = f"{passed}; test {failed[0][0]}: {failed[0][1]}" if failed else passed
    return note.encode("utf-8", errors="replace").decode()  # what an answer said may hold lone surrogates
