"""The program that runs inside the sandbox. It is passed to python as text, so it imports only the stdlib.

Process 1, the sandbox's first process, sets the limits and never runs the answer (the untrusted code). The
answer runs in a child process, and the sandbox ends when process 1 ends, even if the answer left processes
running. If there are tests, process 1 forks the child before it reads them, runs the tests itself, and asks
the child over a pipe for every value of the answer. So the answer cannot reach the tests, the values that
they expect, or the pipe for the results.
"""

from __future__ import annotations

import _thread
import builtins
import contextlib
import ctypes
import json
import os
import resource
import signal
import sys
import types
from typing import Any

STARTED = b"\0the sandbox stands\n"
"""Process 1 writes this to stderr once the limits are set, before the answer runs."""

OUT_OF_MEMORY = 70
"""Exit status of a program that ran out of memory."""

ANSWER = "answer.py"
"""The file name that tracebacks show for the answer's code."""

_LIFELINE = 3
"""File descriptor of the lifeline, a pipe that closes when the process that started the sandbox ends."""

_PR_SET_DUMPABLE = 4
_ENDS = signal.SIGALRM, signal.SIGXCPU
"""Signals by which limits on time end process 1; the kernel discards those that it does not handle."""
_LINE_BYTES = 1 << 24
_MADE_OF_ITEMS = {"tuple": tuple, "set": set, "frozenset": frozenset, "bytes": bytes, "dict": dict}


# --- values between processes: JSON, with a tag where JSON has no such type ------------------------------


def encode(value: Any, refs: list[Any] | None = None) -> Any:
    """Returns plain data as JSON; dicts, and types that JSON lacks, become {"type": ..., "items": ...}.

    A Remote (stand-in for an object of the answer) is encoded as its number. Any other object is appended to
    the list `refs` and encoded as its index in `refs`; if `refs` is None, such an object raises TypeError.
    """
    if value is None or isinstance(value, (bool, int, float, str)):
        return value  # JSON drops a subclass, and with it an __eq__ that always holds
    if isinstance(value, list):
        return [encode(item, refs) for item in value]
    if isinstance(value, (tuple, set, frozenset)):
        base = next(kind for kind in (tuple, set, frozenset) if isinstance(value, kind))
        return {"type": base.__name__, "items": [encode(item, refs) for item in value]}
    if isinstance(value, dict):
        return {"type": "dict", "items": [[encode(k, refs), encode(v, refs)] for k, v in value.items()]}
    if isinstance(value, (bytes, bytearray)):
        return {"type": "bytes", "items": list(value)}
    if isinstance(value, complex):
        return {"type": "complex", "items": [value.real, value.imag]}
    if isinstance(value, Remote):
        return {"type": "ref", "items": value._number}
    if refs is None:
        raise TypeError(f"a {type(value).__name__} cannot be passed to the answer; pass plain data")
    refs.append(value)
    return {"type": "ref", "items": len(refs) - 1}


def decode(value: Any, ref: Any = None) -> Any:
    """Returns the value that `encode` turned into `value`.

    `ref(i)` returns the object, or its stand-in, for an object that was encoded as number i; `ref` may be
    None if only plain data was encoded.
    """
    if isinstance(value, list):
        return [decode(item, ref) for item in value]
    if not isinstance(value, dict):
        return value
    kind, items = value["type"], value["items"]
    if kind == "ref":
        return ref(items)
    if kind == "complex":
        return complex(*items)
    return _MADE_OF_ITEMS[kind](decode(item, ref) for item in items)


# --- process 1 ------------------------------------------------------------------------------------------


def main() -> None:
    job = json.loads(sys.argv[1])
    with open(job["source_fd"], encoding="utf-8") as file:
        source = file.read()
    os.dup2(job["lifeline_fd"], _LIFELINE)
    os.closerange(_LIFELINE + 1, 1024)  # bubblewrap's descriptors
    _limit(job)
    os.write(2, STARTED)
    if not job["has_tests"]:
        child = _fork()
        if child == 0:
            return run_program(source)
        _, status = os.waitpid(child, 0)
        code = os.waitstatus_to_exitcode(status)
        os._exit(code if code >= 0 else 128 - code)
    ask_read, ask_write = os.pipe()
    reply_read, reply_write = os.pipe()
    child = _fork()
    if child == 0:
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)  # the tests come on descriptor 0
        os.dup2(2, 1)  # and the results go out on descriptor 1
        os.close(ask_write)
        os.close(reply_read)
        return answer_questions(source, ask_read, reply_write)
    os.close(ask_read)
    os.close(reply_write)
    verdicts = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # tests may print
    run_tests(json.load(sys.stdin), AnswerProcess(ask_write, reply_read, child), verdicts)
    os._exit(0)


def _fork() -> int:
    """Forks process 1; returns 0 in the child, the answer's process, and the child's id in process 1.

    From then on, a thread of process 1 ends the sandbox as soon as the process that started the sandbox ends.
    """
    # PR_SET_PDEATHSIG cannot do this: bubblewrap, the parent, may not signal another user's process.
    child = os.fork()
    if child == 0:
        os.close(_LIFELINE)
        for number in _ENDS:
            signal.signal(number, signal.SIG_DFL)
    else:
        _thread.start_new_thread(lambda: os._exit(len(os.read(_LIFELINE, 1))), ())
    return child


def _limit(job: dict[str, Any]) -> None:
    """Changes to an unprivileged user, forbids other processes to trace this one, and sets resource limits.

    `job` contains the user's id, the limits, and the seconds after which an alarm ends the sandbox.
    """
    # In this order: changing the user resets the flag that prctl sets.
    if os.getuid() == 0:
        os.setgroups([])
        os.setresgid(job["uid"], job["uid"], job["uid"])
        os.setresuid(job["uid"], job["uid"], job["uid"])
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0) != 0:
        message = (
            "prctl(PR_SET_DUMPABLE) failed, so no code is run; the container's seccomp profile must allow it"
        )
        raise OSError(ctypes.get_errno(), message)
    for number in _ENDS:
        signal.signal(number, lambda number, _: os._exit(128 + number))
    signal.alarm(job["alarm"])  # ends the sandbox if its parent does not
    for name, value in job["limits"].items():
        # At the hard limit on CPU time the kernel sends SIGKILL, which does not say why.
        hard = value + 1 if name == "RLIMIT_CPU" else value
        resource.setrlimit(getattr(resource, name), (value, hard))


# --- the answer as a program ------------------------------------------------------------------------------


def _load(source: str, name: str) -> dict[str, Any]:
    """Runs `source`, the answer's text, as the module `name` and returns the module's globals."""
    module = types.ModuleType(name)
    module.__dict__.update(__builtins__=builtins, exit=sys.exit, quit=sys.exit)
    sys.modules[name] = module
    sys.argv = [ANSWER]
    exec(compile(source, ANSWER, "exec"), module.__dict__)
    return module.__dict__


def run_program(source: str) -> None:
    """Runs the answer as a program; exits with the status and traceback that the interpreter would give.

    An answer that runs out of memory exits with the status OUT_OF_MEMORY instead.
    """
    try:
        _load(source, "__main__")
    except SystemExit:
        raise
    except MemoryError:
        sys.exit(OUT_OF_MEMORY)
    except BaseException as error:  # noqa: BLE001 - as the interpreter itself would
        trace = error.__traceback__
        while trace is not None and trace.tb_frame.f_code.co_filename != ANSWER:
            trace = trace.tb_next
        sys.excepthook(type(error), error.with_traceback(trace), trace)
        sys.exit(1)


# --- the answer as a module ------------------------------------------------------------------------------


def answer_questions(source: str, questions: int, replies: int) -> None:
    """Runs the answer as a module, then replies to requests until the pipe `questions` closes.

    A request asks for a global of the answer, an attribute of an object or the result of a call.
    `questions`, `replies`: file descriptors of the pipes for requests and replies. If running the module
    raises an exception, every reply is that error.
    """
    problem: BaseException | None = None
    names: dict[str, Any] = {}
    refs: list[Any] = []
    try:
        names = _load(source, "answer")
    except BaseException as error:  # noqa: BLE001 - sent as the reply
        problem = error
    for line in os.fdopen(questions, encoding="utf-8"):
        try:
            if problem is not None:
                raise problem
            reply = json.dumps({"value": encode(_do(json.loads(line), names, refs), refs)})
        except BaseException as error:  # noqa: BLE001 - sent as the reply
            reply = json.dumps({"error": type(error).__name__, "message": str(error)[:200]})
        data = reply.encode() + b"\n"
        while data:
            data = data[os.write(replies, data) :]


def _do(request: dict[str, Any], names: dict[str, Any], refs: list[Any]) -> Any:
    if "name" in request:
        return _find(request["name"], names)
    target = refs[request["ref"]]
    if "attribute" in request:
        return getattr(target, request["attribute"])
    args, kwargs = decode(request["args"], refs.__getitem__), decode(request["kwargs"], refs.__getitem__)
    return target(*args, **kwargs)


def _find(name: str, names: dict[str, Any]) -> Any:
    """Returns the answer's global `name` or, without it, the method `name` of a new object of class Solution.

    `names`: the answer's globals. Raises NameError if neither the global nor the method exists.
    """
    if name in names:
        return names[name]
    if hasattr(names.get("Solution"), name):
        return getattr(names["Solution"](), name)
    raise NameError(f"name {name!r} is not defined")


# --- the tests, in process 1 ------------------------------------------------------------------------------


class AnswerProcess:
    """Sends requests to the answer's process and reads the replies, over two pipes."""

    def __init__(self, questions: int, replies: int, process: int) -> None:
        """`questions`, `replies`: the pipes' file descriptors; `process`: the id of the answer's process."""
        self._process = process
        self._questions = os.fdopen(questions, "w", encoding="utf-8")
        self._replies = os.fdopen(replies, encoding="utf-8", errors="replace")

    def ask(self, **request: Any) -> Any:
        """Sends a request to the answer's process and returns the value in the reply.

        `request`: {name} asks for a global, {ref, attribute} for an object's attribute, {ref, args, kwargs}
        for the result of a call. If the answer raises an exception, raises the built-in exception of the same
        name, or RuntimeError if no built-in exception has that name. Raises RuntimeError if the answer's
        process has ended.
        """
        line = json.dumps(request) + "\n"
        try:
            self._questions.write(line)
            self._questions.flush()
            reply = self._replies.readline(_LINE_BYTES)
        except BrokenPipeError:
            reply = ""
        if not reply:
            self._end_if_out_of_time()
            raise RuntimeError("the answer ended its process")
        reply = json.loads(reply)
        if "error" not in reply:
            return decode(reply["value"], lambda number: Remote(self, number))
        error: Exception = RuntimeError(f"{reply['error']}: {reply['message']}")
        kind = getattr(builtins, reply["error"], None)
        if isinstance(kind, type) and issubclass(kind, Exception):
            with contextlib.suppress(TypeError):  # UnicodeError and the like take more than a message
                error = kind(reply["message"])
        raise error

    def _end_if_out_of_time(self) -> None:
        """Ends the sandbox as the answer's process ended, if that had no CPU time left."""
        process, self._process = self._process, 0
        if process and os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) == -signal.SIGXCPU:
            os._exit(128 + signal.SIGXCPU)


class Remote:
    """Stands for an object in the answer's process: a test can call it, read its attributes and pass it back.

    If a test passes a Remote as an argument of a call, the answer gets the object itself.
    """

    def __init__(self, answer: AnswerProcess, number: int) -> None:
        self._answer = answer
        self._number = number

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._answer.ask(ref=self._number, args=encode(args), kwargs=encode(kwargs))

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self._answer.ask(ref=self._number, attribute=name)


class Names(dict):
    """The tests' globals; a name found neither there nor in Python's built-ins is read from the answer."""

    def __init__(self, answer: AnswerProcess) -> None:
        super().__init__(__name__="tests", __builtins__=builtins)
        self._answer = answer

    def __missing__(self, name: str) -> Any:
        if hasattr(builtins, name):
            raise KeyError(name)
        return self._answer.ask(name=name)


def run_tests(tests: list[dict[str, Any]], answer: AnswerProcess, verdicts: Any) -> None:
    """Runs the tests and writes one JSON line for each to the file `verdicts`.

    A test is a call of the answer, or code with assertions (see `runner.run_tests`). {"value": ...} contains
    the call's encoded value, {} means that the assertions held, and {"problem": text} means that the test
    raised an exception.
    """
    names = Names(answer)
    for test in tests:
        try:
            if "function" in test:
                result = {"value": encode(answer.ask(name=test["function"])(*test["args"]))}
            else:
                exec(compile(test["code"], "test", "exec"), names)
                result = {}
        except BaseException as error:  # noqa: BLE001 - any exception fails the test
            result = {"problem": _describe(error)}
        verdicts.write(json.dumps(result) + "\n")
        verdicts.flush()


def _describe(error: BaseException) -> str:
    if isinstance(error, AssertionError):
        return f"the assertion failed{': ' if str(error) else ''}{str(error)[:200]}"
    if isinstance(error, MemoryError):
        return "killed: memory"
    return f"{type(error).__name__}: {str(error)[:200]}"


if __name__ == "__main__":
    main()
