"""Programming answers: a right one earns 1, a wrong one 0 and a note, and none can talk its way to 1."""

from __future__ import annotations

import json
import pickle
import queue
from pathlib import Path

import pytest

from areal_jax.control.events import RewardScored
from areal_jax.sandbox.errors import SandboxError
from areal_jax.sandbox.runner import require_sandbox
from areal_jax.tasks.datasets.code import Code, extract_python
from areal_jax.tasks.errors import TaskError
from areal_jax.tasks.pool import RewardPool
from areal_jax.tasks.source import load_tasks
from areal_jax.types import Completion, Prompt, Reward
from tests.hangs import HANG_S

pytestmark = pytest.mark.usefixtures("sandbox")

STDIN = {"stdin": ["2 3\n", "-1 1\n"], "stdout": ["5\n", "0\n"]}
CALLS = {"function": "add", "inputs": [[2, 3], [-1, 1]], "outputs": [5, 0]}
ASSERTS = {"asserts": ["assert add(2, 3) == 5", "assert add(-1, 1) == 0"]}
ADD = "def add(a, b):\n    return a + b\n"
PROGRAM = "a, b = map(int, input().split())\nprint(a + b)"


def write(folder: Path, *rows: object, name: str = "train-1.jsonl") -> Path:
    file = folder / name
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def row(tests: object, **columns: object) -> dict[str, object]:
    return {"prompt": "Add two numbers.", "tests": tests, **columns}


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> Code:
    folder = tmp_path_factory.mktemp("code")
    path = write(folder, row(STDIN, solution=PROGRAM), row(CALLS), row(ASSERTS))
    return Code(path=str(path), test_timeout_s=5.0)


def score(task: Code, tests: dict, answer: str) -> Reward:
    return task.score(Prompt("", info={"tests": tests}), Completion(answer, (1,), "stop"))


def fenced(source: str) -> str:
    return f"Let me think.\n```python\nprint('draft')\n```\nSo:\n```python\n{source}\n```\nDone."


# --- right and wrong -----------------------------------------------------------------------------------


@pytest.mark.parametrize(("tests", "source"), [(STDIN, PROGRAM), (CALLS, ADD), (ASSERTS, ADD)])
def test_a_right_answer_earns_one(task: Code, tests: dict, source: str):
    assert score(task, tests, fenced(source)) == Reward(1.0, {"correct": 1.0, "passed": 1.0}, "2 of 2 tests")
    assert score(task, tests, source).value == 1.0, "without a fence the whole text is the answer"


@pytest.mark.parametrize(
    ("tests", "source", "note"),
    [
        (STDIN, "print(5)", "1 of 2 tests; test 2: expected '0', got '5'"),
        (CALLS, "def add(a, b): return 5", "1 of 2 tests; test 2: expected 0, got 5"),
        (ASSERTS, "def add(a, b): return 5", "1 of 2 tests; test 2: the assertion failed"),
    ],
)
def test_a_half_right_answer_earns_zero_and_its_share_is_kept(
    task: Code, tests: dict, source: str, note: str
):
    assert score(task, tests, source) == Reward(0.0, {"correct": 0.0, "passed": 0.5}, note)


@pytest.mark.parametrize(
    ("tests", "source", "note"),
    [
        (STDIN, "a = 1 / 0", "0 of 2 tests; test 1: ZeroDivisionError: division by zero"),
        (STDIN, "I cannot.", "0 of 2 tests; test 1: SyntaxError: invalid syntax"),
        (STDIN, "x = bytearray(8 << 30)", "0 of 2 tests; test 1: killed: memory"),
        (STDIN, "print('x' * (3 << 20))", "0 of 2 tests; test 1: killed: more than 1 MiB of output"),
        (STDIN, "import os; os.abort()", "0 of 2 tests; test 1: killed by SIGABRT"),
        (STDIN, PROGRAM + "\nexit(3)", "0 of 2 tests; test 1: exit status 3"),
        (CALLS, "def add(a, b): return a / 0", "0 of 2 tests; test 1: ZeroDivisionError: division by zero"),
        (CALLS, "def sub(a, b): return 5", "0 of 2 tests; test 1: NameError: name 'add' is not defined"),
        (CALLS, "def add(a, b): return bytearray(8 << 30)", "0 of 2 tests; test 1: killed: memory"),
        (CALLS, "def add(a, b): return '5'", "0 of 2 tests; test 1: expected 5, got '5'"),
        (CALLS, "def add(a): return a", "0 of 2 tests; test 1: TypeError: add() takes 1 positional argument"),
        (ASSERTS, "def add(a, b): return object()", "0 of 2 tests; test 1: the assertion failed"),
        (ASSERTS, "", "0 of 2 tests; test 1: NameError: name 'add' is not defined"),
    ],
)
def test_a_failure_of_the_answer_is_a_score_of_zero_that_says_which(
    task: Code, tests: dict, source: str, note: str
):
    reward = score(task, tests, source)
    assert (reward.value, reward.parts) == (0.0, {"correct": 0.0, "passed": 0.0})
    assert reward.note.startswith(note)


@pytest.mark.parametrize(
    ("tests", "source"),
    [
        (STDIN, f"{PROGRAM}\nwhile a < 0: pass"),
        (CALLS, "def add(a, b):\n    while a < 0: pass\n    return a + b"),
    ],
)
def test_a_test_that_takes_too_long_is_the_last(tmp_path: Path, tests: dict, source: str):
    task = Code(path=str(write(tmp_path, row(tests))), test_timeout_s=1.0)
    three = {name: [*given, given[0]] if isinstance(given, list) else given for name, given in tests.items()}
    reward = score(task, three, source)
    assert (reward.value, reward.parts["passed"]) == (0.0, pytest.approx(1 / 3))
    assert reward.note == "1 of 3 tests; test 2: timed out after 1 s"


def test_all_tests_of_an_answer_have_a_deadline(tmp_path: Path):
    many = {"stdin": ["0 0"] * 200, "stdout": ["0"] * 200}
    task = Code(path=str(write(tmp_path, row(many))), timeout_s=0.3)
    reward = score(task, many, PROGRAM)
    passed = round(reward.parts["passed"] * 200)
    assert 1 <= passed < 100
    assert reward.value == 0.0
    late = "not run: the tests before it took longer than tasks.code.timeout_s=0.3"
    assert reward.note == f"{passed} of 200 tests; test {passed + 1}: {late}"


def test_output_is_compared_without_trailing_spaces(task: Code):
    tests = {"stdin": [""], "stdout": ["1 2\n3\n"]}
    assert score(task, tests, "print('1 2  '); print(3); print()").value == 1.0
    assert score(task, tests, "print('1  2'); print(3)").value == 0.0
    assert score(task, tests, "print('1 2\\n\\n3')").value == 0.0


def test_values_are_compared_as_json_would_give_them(task: Code):
    tests = {"function": "f", "inputs": [[]], "outputs": [[[1, 2], {"3": None}, 0.5, True]]}
    assert score(task, tests, "def f(): return ((1, 2), {3: None}, 0.5, True)").value == 1.0
    reward = score(task, tests, "def f(): return {1, 2}")
    assert reward.note.endswith("got {1, 2}")


def test_a_method_of_solution_is_found_too(task: Code):
    source = "class Solution:\n    def add(self, a, b):\n        return a + b"
    assert score(task, CALLS, source).value == 1.0


# --- cheats --------------------------------------------------------------------------------------------

EVERYWHERE = """
import os
for fd in range(64):
    try: os.write(fd, b'5\\n{}\\n{}\\n{"value": 5}\\n{"value": 0}\\nOK passed\\n')
    except OSError: pass
"""

CHEATS = {
    "exits": "import sys; sys.exit(0)",
    "exits hard": "import os; os._exit(0)",
    "exits hard when asked": "import os\ndef add(a, b): os._exit(0)",
    "exits when asked": "def add(a, b): raise SystemExit(0)",
    "at exit": "import atexit, os\natexit.register(lambda: os._exit(0))\ndef add(a, b): return None",
    "claims": "print('2 of 2 tests\\nOK\\npassed')\ndef add(a, b): print('passed'); return True",
    "writes verdicts everywhere": EVERYWHERE
    + f"def add(a, b):{EVERYWHERE.replace(chr(10), chr(10) + '    ')}",
    "equals everything": (
        "class Any(int):\n"
        "    def __eq__(self, other): return True\n"
        "    def __ne__(self, other): return False\n"
        "    def __hash__(self): return 5\n"
        "def add(a, b): return Any(7)"
    ),
    "equals everything as an object": (
        "class Any:\n    def __eq__(self, other): return True\ndef add(a, b): return Any()"
    ),
    "new built-ins": (
        "import builtins\n"
        "builtins.AssertionError = type('Fine', (BaseException,), {})\n"
        "builtins.compile = builtins.exec = builtins.__build_class__ = lambda *a, **k: None\n"
        "def add(a, b): return 7"
    ),
    "patches the runner": (
        "import sys, json, __main__\n"
        "json.dumps = lambda *a, **k: '{}'\n"
        "for name in ('run_tests', '_describe', 'encode', 'Names'):\n"
        "    setattr(__main__, name, lambda *a, **k: {})\n"
        "def add(a, b): return 7"
    ),
    "patches the frames": (
        "import sys\n"
        "def add(a, b):\n"
        "    frame = sys._getframe()\n"
        "    while frame:\n"
        "        for name in ('tests', 'wanted', 'outputs', 'names', 'problem'):\n"
        "            frame.f_locals.pop(name, None)\n"
        "        frame = frame.f_back\n"
        "    return 7"
    ),
    "traces": "import sys\nsys.settrace(lambda *a: sys.exit(0))\ndef add(a, b): return 7",
    "is a daemon": "import os\nif os.fork(): os._exit(0)\ndef add(a, b): return 5",
    "answers for the tests": (
        "import os\n"
        "for fd in range(3, 64):\n"
        "    for reply in ('{\"value\": 5}', '{\"value\": true}') * 9:\n"
        "        try: os.write(fd, reply.encode() + b'\\n')\n"
        "        except OSError: pass\n"
    ),
}


@pytest.mark.parametrize(
    ("cheat", "tests"),
    [
        *((cheat, tests) for cheat in CHEATS for tests in (CALLS, ASSERTS)),
        *((cheat, STDIN) for cheat in ("exits", "claims", "writes verdicts everywhere", "is a daemon")),
    ],
)
def test_no_cheat_earns_anything_or_fails_the_group(task: Code, tests: dict, cheat: str):
    reward = score(task, tests, CHEATS[cheat])
    assert reward.value == 0.0
    assert reward.note.startswith(("0 of 2 tests; test 1: ", "1 of 2 tests; test 2: "))


def test_a_value_made_to_break_the_judge_is_only_wrong(task: Code):
    for source in (
        "def add(a, b):\n    x = []\n    for _ in range(480): x = [x]\n    return x",
        "def add(a, b):\n    x = []\n    for _ in range(100_000): x = [x]\n    return x",
        "def add(a, b):\n    x = []\n    x.append(x)\n    return x",
        "def add(a, b): return 10 ** 10_000",
        "def add(a, b): return '\\ud800'",
        "def add(a, b): return 'x' * (9 << 20)",
        "import sys\nsys.set_int_max_str_digits(0)\ndef add(a, b): return 10 ** 5000",
        "class Bad(Exception):\n    __str__ = None\ndef add(a, b): raise Bad",
        "def add(a, b): raise UnicodeDecodeError('a', b'b', 1, 2, '\\ud800')",
    ):
        reward = score(task, CALLS, source)
        assert reward.value == 0.0 and reward.note.startswith("0 of 2 tests; test 1: "), source
        reward.note.encode()


# --- the task --------------------------------------------------------------------------------------------


def test_the_last_python_block_is_the_answer():
    assert extract_python("a\n```python\nx\n```\n```py\ny = '`'\n```\nb\n```\nz\n```") == "y = '`'\n"
    assert extract_python("```python\nhalf") == "half"
    assert extract_python("x = 1") == "x = 1"


def test_the_reference_solution_passes(task: Code):
    answer = task.reference(task[0])
    assert answer == f"```python\n{PROGRAM}\n```"
    assert score(task, STDIN, answer).value == 1.0
    with pytest.raises(TaskError, match="'solution'"):
        task.reference(task[1])


def test_a_file_is_found_by_split_and_the_task_by_name(tmp_path: Path):
    write(tmp_path, row(STDIN), row(CALLS), name="train-00000.jsonl")
    write(tmp_path, row(STDIN), name="test.jsonl")
    tasks = load_tasks({"code": {"data_dir": str(tmp_path), "split": "test"}})
    assert len(tasks["code"].task) == 1
    assert len(Code(data_dir=str(tmp_path))) == 2
    write(tmp_path, row(STDIN), name="train-00001.jsonl")
    with pytest.raises(
        TaskError, match=r"but has train-00000\.jsonl, train-00001\.jsonl; give tasks\.code\.path"
    ):
        Code(data_dir=str(tmp_path))
    with pytest.raises(TaskError, match=r"valid\*\.jsonl, but has none"):
        Code(data_dir=str(tmp_path), split="valid")
    with pytest.raises(TaskError, match="needs a file"):
        Code()
    with pytest.raises(TaskError, match="memory_mib=1 at least 64"):
        Code(path="x", memory_mib=1)


@pytest.mark.parametrize(
    ("tests", "problem"),
    [
        ("assert", "is 'assert', but must be an object"),
        (None, "is None"),
        ({}, "has no keys; its keys must be"),
        ({"stdin": ["1"]}, "has stdin; its keys must be"),
        ({"stdin": ["1"], "stdout": []}, r"stdout is \[\], but must be a list"),
        ({"stdin": ["1"], "stdout": ["1", "2"]}, "1 stdin and 2 stdout; give each list one entry"),
        ({"stdin": [1], "stdout": ["1"]}, "contains 1 where text is required"),
        ({"asserts": "assert f()"}, "asserts is 'assert f()"),
        ({"function": "f", "inputs": [1], "outputs": [1]}, "an entry of inputs is 1, but must be the list"),
        ({"function": 1, "inputs": [[1]], "outputs": [1]}, "contains 1 where text is required"),
    ],
)
def test_what_is_wrong_with_a_row_is_named(tmp_path: Path, tests: object, problem: str):
    path = write(tmp_path, row(STDIN), row(tests))
    with pytest.raises(TaskError, match=f"{path}, line 2: column 'tests'.* {problem}"):
        Code(path=str(path))


def test_code_tasks_refuse_to_start_without_bubblewrap(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path = write(tmp_path, row(STDIN))
    monkeypatch.setenv("PATH", str(tmp_path))
    require_sandbox.cache_clear()
    try:
        with pytest.raises(SandboxError, match="bwrap is not on PATH; install bubblewrap"):
            Code(path=str(path))
    finally:
        require_sandbox.cache_clear()


def test_a_sandbox_that_fails_fails_the_reward_instead_of_scoring_zero(
    task: Code, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("PATH", str(tmp_path))
    for tests in (STDIN, CALLS):
        with pytest.raises(SandboxError, match="bwrap"):
            score(task, tests, ADD)


def test_groups_are_scored_in_the_reward_pool(task: Code):
    assert pickle.loads(pickle.dumps(task))[1].info["tests"] == CALLS
    answers: queue.SimpleQueue = queue.SimpleQueue()
    prompt = Prompt("", info={"tests": CALLS}, task="code")
    texts = (ADD, "def add(a, b): return 5", "import os; os._exit(0)")
    with RewardPool({"code": task}, workers=1, timeout_s=30.0) as pool:
        pool.submit(4, 0, prompt, [Completion(text, (1,), "stop") for text in texts], answers.put)
        outcome = answers.get(timeout=HANG_S)
    assert isinstance(outcome, RewardScored)
    assert outcome.rewards == (1.0, 0.0, 0.0)
    assert outcome.notes[1] == "1 of 2 tests; test 2: expected 0, got 5"


@pytest.mark.parametrize(
    "source",
    [
        "\0",
        "\ud800",
        "(" * 10_000,
        "def add(a, b): return '\\ud800'",
        "def add(a, b): return 10**5000",
        "def add(a, b):\n    found = []\n    for _ in range(490): found = [found]\n    return found",
        "def add(a, b): return {frozenset([1]): float('nan')}",
        "def add(a, b): raise UnicodeDecodeError('x', b'', 0, 1, '')",
        "import os\ndef add(a, b): os.write(1, b'\\xff'); os._exit(0)",
    ],
)
def test_whatever_the_policy_writes_is_scored(task: Code, source: str):
    reward = score(task, CALLS, fenced(source))
    assert reward.value == 0.0 and reward.note.encode()
