"""Programming tasks from a JSONL file: the answer's Python code runs against tests, in the sandbox."""

from __future__ import annotations

import json
import re
import signal
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from itertools import chain
from pathlib import Path
from typing import Any

from areal_jax.sandbox import child as sandboxed
from areal_jax.sandbox.runner import Ran, SandboxLimits, require_sandbox, run_python, run_tests
from areal_jax.tasks.datasets.jsonl import JsonLines
from areal_jax.tasks.errors import TaskError
from areal_jax.types import WALL_PER_CPU, Completion, Prompt, Reward

_BLOCK = re.compile(r"```(?:python3?|py)[ \t]*\n(.*?)(?:```|\Z)", re.DOTALL)
_PASSED = ""
_NOT_REACHED = "not run, because an earlier test ended the run"
_SHORT = 80
"""Maximum length of a quoted value in a reward's note, in characters."""


class Code(JsonLines):
    """Programming tasks of a JSONL file, scored by their tests in a bubblewrap sandbox.

    Answers are Python code; the reward is 1 if all tests pass, else 0. A line of the file has a prompt,
    `tests` and, for supervised steps, a `solution`. The reward's part `passed` is the fraction of passed
    tests. `tests` has one of three forms:

        {"stdin": ["2 3", ...], "stdout": ["5", ...]}              a program, run once per test
        {"function": "add", "inputs": [[2, 3], ...], "outputs": [5, ...]}     a call per test
        {"asserts": ["assert add(2, 3) == 5", ...]}

    Lines of stdout are compared without trailing spaces, outputs by ==, except that a tuple equals a list.
    The answer never shares a process with the expected values. Asserts get only plain data from the answer
    (numbers, text, lists, tuples, sets, dicts). An assert can call any other object of the answer, read the
    object's attributes and pass the object back, but not compare it. So an assert that needs more, such as
    `==` on a class of the answer, fails even if the answer is right. Every failure of the answer scores 0,
    with the reason in the note. `score` raises SandboxError if the sandbox itself fails.
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
        """Give either `path`, the JSONL file, or `data_dir`, a folder with exactly one `<split>*.jsonl`.

        `test_timeout_s` limits the CPU time of one run of the answer, in seconds: one test with stdin, or all
        calls, or all asserts. Its wall time may be four times as long. No run starts later than 4 timeout_s
        seconds after the sample's first run, so scoring a group of G samples takes at most
        4 G (timeout_s + test_timeout_s): the limit on wall time, 4 runtime.reward_timeout_s, must be longer.
        `memory_mib` limits the address space of each process, in MiB.
        """
        if test_timeout_s <= 0 or timeout_s <= 0 or memory_mib < 64:
            raise TaskError(
                f"tasks.code: test_timeout_s={test_timeout_s} and timeout_s={timeout_s} must be positive, "
                f"and memory_mib={memory_mib} at least 64, which Python itself needs"
            )
        require_sandbox()
        self._limits = SandboxLimits(seconds=test_timeout_s, memory_bytes=memory_mib << 20)
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
            codes = [{"code": code} for code in tests["asserts"]]
            problems = self._judge_values(source, codes, [None] * len(codes))
        passed = problems.count(_PASSED)
        is_correct = float(passed == len(problems))
        return Reward(is_correct, {"correct": is_correct, "passed": passed / len(problems)}, _note(problems))

    def reference(self, prompt: Prompt) -> str:
        if not isinstance(solution := prompt.info.get("solution"), str):
            raise TaskError(
                f"a row of {self._path} has no text in column 'solution'; set trainer.supervised.steps=0, or "
                "add a solution to every row"
            )
        return f"```python\n{solution.strip()}\n```"

    def _judge_programs(self, source: str, inputs: Sequence[str], outputs: Sequence[str]) -> list[str]:
        """Runs the answer once per test, with stdin from `inputs`; returns each test's failure, "" if passed.

        After a test that timed out, or after WALL_PER_CPU * `timeout_s` seconds in all, the remaining tests
        do not run; they fail for that reason.
        """
        problems = []
        end_s = time.monotonic() + WALL_PER_CPU * self._timeout_s
        for given, wanted in zip(inputs, outputs, strict=True):
            if time.monotonic() > end_s:
                problems.append(
                    f"not run: the tests before it took longer than tasks.code.timeout_s={self._timeout_s:g}"
                )
                break
            ran = run_python(source, stdin=given, limits=self._limits)
            problems.append(self._problem(ran) or _compare(_lines(wanted), _lines(ran.stdout)))
            if ran.outcome == "timed_out":
                break
        return [*problems, *[_NOT_REACHED] * (len(inputs) - len(problems))]

    def _judge_values(
        self, source: str, tests: Sequence[Mapping[str, Any]], wanted: Sequence[Any]
    ) -> list[str]:
        """Runs `tests`, calls or asserts, on the answer; returns each test's failure, "" if passed.

        `wanted` has the expected value of each call, and None for an assert, which has no value.
        """
        ran = run_tests(source, tests, self._limits)
        problems = []
        for number, line in enumerate(ran.stdout.splitlines(keepends=True)):
            if not line.endswith("\n"):
                break  # the run ended within this line
            verdict = json.loads(line)
            problems.append(verdict.get("problem") or _compare_value(wanted[number], verdict.get("value")))
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
    """Returns the last ```python block of a completion, or the whole text if there is no such block."""
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
            f"{data_dir} must contain exactly one {split}*.jsonl, but has {names}; give tasks.code.path=FILE"
        )
    return found[0]


def _check_tests(tests: Any, where: str) -> None:
    """Raises TaskError unless `tests` has one of the three forms listed in Code, with at least one test.

    `where` names file, line and column at the start of the message.
    """
    forms = '{"stdin", "stdout"}, {"function", "inputs", "outputs"} or {"asserts"}'
    if not isinstance(tests, dict):
        raise TaskError(f"{where} is {tests!r:.60}, but must be an object: {forms}")
    if set(tests) not in ({"stdin", "stdout"}, {"function", "inputs", "outputs"}, {"asserts"}):
        raise TaskError(
            f"{where} has {', '.join(sorted(map(str, tests))) or 'no keys'}; its keys must be {forms}"
        )
    lists = {name: tests[name] for name in tests if name != "function"}
    for name, values in lists.items():
        if not isinstance(values, list) or not values:
            raise TaskError(f"{where}: {name} is {values!r:.60}, but must be a list with one entry per test")
    if len({len(values) for values in lists.values()}) > 1:
        counts = " and ".join(f"{len(lists[name])} {name}" for name in sorted(lists))
        raise TaskError(f"{where} has {counts}; give each list one entry per test")
    texts = [tests["function"]] if "function" in tests else chain.from_iterable(lists.values())
    for text in texts:
        if not isinstance(text, str):
            raise TaskError(f"{where} contains {text!r:.60} where text is required; put it in quotes")
    for args in tests.get("inputs", ()):
        if not isinstance(args, list):
            raise TaskError(
                f"{where}: an entry of inputs is {args!r:.60}, but must be the list of the arguments of one "
                "call"
            )


def _compare(wanted: Any, got: Any) -> str:
    return _PASSED if wanted == got else f"expected {_quote(wanted)}, got {_quote(got)}"


def _compare_value(wanted: Any, value: Any) -> str:
    """Returns what is wrong with `value`, the encoded value of a call, or "" if it equals `wanted`.

    The value is decoded, then converted to JSON and back, because the expected value comes from JSON: so
    tuples become lists.
    """
    try:
        found = sandboxed.decode(value, lambda _: object())
        with suppress(TypeError, ValueError):  # not JSON, such as a set: compared as it is
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
    """Returns a text: how many tests passed, and the first problem. A test with the problem "" passed."""
    failed = [(number, problem) for number, problem in enumerate(problems, 1) if problem != _PASSED]
    passed = f"{len(problems) - len(failed)} of {len(problems)} tests"
    note = f"{passed}; test {failed[0][0]}: {failed[0][1]}" if failed else passed
    return note.encode("utf-8", errors="replace").decode()  # an answer's output may hold lone surrogates
