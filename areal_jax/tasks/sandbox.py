"""Runs Python that nobody has read: in bubblewrap, without network, files of ours, or a way to stay.

    require_sandbox()                                     # once, when a task that needs it is made
    run_python("print(input())", stdin="7").stdout        # "7\\n"

Inside there are the interpreter with its standard library, /usr read-only, and an empty /tmp of limited size;
no network, no environment, no /proc, no other process, no new namespaces (seccomp.py). An unprivileged user
runs it, with limits on processor time, memory, processes and files. The sandbox's own process 1
(sandboxed.py) ends with the answer, or with us, and the kernel then kills whatever else runs in there.

Memory is limited for each process, so all of it by `Limits.memory_bytes * Limits.processes`. What the kernel
itself keeps for empty files is limited by time alone: 0.7 GB measured after 3 s of making them, gone with the
run.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import random
import selectors
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

from areal_jax.tasks import sandboxed
from areal_jax.tasks.seccomp import seccomp_filter
from areal_jax.tasks.task import TaskError

Outcome = Literal["ok", "error", "timed_out", "out_of_memory", "too_much_output"]

_NOBODY = 65534
_TRANSIENT_UIDS = range(61184, 65520)
"""What systemd keeps for users that live as long as one service. RLIMIT_NPROC counts by user."""

_SYSTEM = ("/bin", "/lib", "/lib32", "/lib64", "/libx32", "/sbin")
_DEVICES = ("/dev/null", "/dev/zero", "/dev/urandom")
_CHUNK_BYTES = 1 << 16
_GRACE_S = 5.0
"""Longest that a killed sandbox may take to be gone."""

_GET = "install bubblewrap: apt-get install bubblewrap, dnf install bubblewrap"
_NAMESPACES = (
    "code tasks need user namespaces, or root with CAP_SYS_ADMIN: sysctl user.max_user_namespaces above 0, "
    "kernel.unprivileged_userns_clone=1, kernel.apparmor_restrict_unprivileged_userns=0; a container needs "
    "them from its host"
)


@dataclass(frozen=True)
class Limits:
    """What one run may use."""

    seconds: float = 4.0
    """By the clock, start of the sandbox included; the same, rounded up, of processor time a process."""
    memory_bytes: int = 512 << 20
    """Address space of each process."""
    processes: int = 16
    """Processes and threads at once, the two threads of process 1 included."""
    disk_bytes: int = 32 << 20
    """All of /tmp, and the longest file."""
    output_bytes: int = 1 << 20
    """Of stdout, and of stderr; one byte more ends the run."""
    open_files: int = 64


@dataclass(frozen=True)
class Ran:
    """How a run ended. Only `ok` ended by itself with status 0."""

    outcome: Outcome
    exit_code: int | None
    """128 + n where signal n ended it; None where we did."""
    stdout: str
    stderr: str
    seconds: float


@cache
def require_sandbox() -> None:
    """Run one line in the sandbox. Raises TaskError that says what is missing and how to get it."""
    ran = run_python("import os; os.fork(); print('alive')", limits=Limits(seconds=30.0))
    if ran.outcome != "ok" or ran.stdout != "alive\n" * 2:
        raise TaskError(f"the code sandbox cannot run two processes: {ran.stderr[-300:]!r}")


def run_python(source: str, *, stdin: str = "", limits: Limits | None = None) -> Ran:
    """Run a program. Raises TaskError where the sandbox itself fails, never for what the program does."""
    return _run(source, stdin, limits or Limits(), has_tests=False)


def run_tests(source: str, tests: Sequence[Mapping[str, Any]], limits: Limits | None = None) -> Ran:
    """Run tests of an answer: `{"function": name, "args": [...]}` or `{"code": assertions}`.

    Its stdout has a JSON line for each test that was reached, in order: {"value": ...} of a call (see
    `sandboxed.decode`), {} of code that raised nothing, {"problem": text}. The answer runs in a process apart
    from the tests, so it sees their arguments, but not what they expect. Raises TaskError as `run_python`.
    """
    return _run(source, json.dumps(list(tests)), limits or Limits(), has_tests=True)


def _run(source: str, stdin: str, limits: Limits, *, has_tests: bool) -> Ran:
    start_s = time.monotonic()
    with contextlib.ExitStack() as stack:
        input_fd, source_fd = (stack.enter_context(_memory_file(text)) for text in (stdin, source))
        filter_fd = stack.enter_context(_memory_file(seccomp_filter()))
        (info_read, info_write), (lifeline_read, lifeline_write) = os.pipe(), os.pipe()
        os.set_blocking(info_read, False)
        for fd in (info_read, lifeline_write):
            stack.callback(os.close, fd)
        command = [
            *_bubblewrap(limits),
            *("--seccomp", str(filter_fd), "--info-fd", str(info_write)),
            *("--", _interpreter(), "-S", "-s", "-P", "-B", "-X", "utf8", "-c", _inside()),
            json.dumps(_job(limits, source_fd, lifeline_read, has_tests)),
        ]
        try:
            process = subprocess.Popen(
                command,
                stdin=input_fd,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                pass_fds=(source_fd, filter_fd, info_write, lifeline_read),
                env={},
            )
        finally:
            os.close(info_write)
            os.close(lifeline_read)
        with process:
            try:
                verdict, out, err = _watch(process, start_s + limits.seconds, limits.output_bytes)
            finally:
                _end(process, info_read)
    return _judge(process.returncode, verdict, out, err, time.monotonic() - start_s)


# --- what the sandbox is made of ----------------------------------------------------------------------


def _bubblewrap(limits: Limits) -> list[str]:
    """The command that makes the sandbox; the program follows."""
    found = shutil.which("bwrap")
    if found is None:
        raise TaskError(f"code tasks run answers in bubblewrap, and there is no bwrap here; {_GET}")
    apart = ["--unshare-ipc", "--unshare-pid", "--unshare-net", "--unshare-uts", "--unshare-cgroup-try"]
    if os.geteuid() == 0:
        # Limits on processes do not bind root, not even as somebody else in a user namespace of its own: so
        # without one, and process 1 really becomes another user.
        apart += ["--cap-drop", "ALL", "--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID"]
    else:
        apart += ["--unshare-user", "--uid", str(_NOBODY), "--gid", str(_NOBODY), "--cap-drop", "ALL"]
    return [
        found,
        *apart,
        *("--die-with-parent", "--new-session", "--as-pid-1", "--hostname", "sandbox"),
        *("--clearenv", "--setenv", "PATH", "/usr/bin:/bin", "--setenv", "HOME", "/tmp"),
        *("--setenv", "LANG", "C.UTF-8", "--setenv", "PYTHONHASHSEED", "0"),  # a score has to be repeatable
        *_read_only(),
        *("--size", str(limits.disk_bytes), "--perms", "1777", "--tmpfs", "/tmp"),
        *("--perms", "0755", "--dir", "/dev"),
        *(word for device in _DEVICES for word in ("--dev-bind", device, device)),
        *("--remount-ro", "/", "--chdir", "/tmp"),
    ]


@cache
def _read_only() -> tuple[str, ...]:
    """The system's programs and libraries, and the interpreter's own folder where that is elsewhere."""
    words = [
        "--ro-bind",
        "/usr",
        "/usr",
        "--perms",
        "0755",
        "--dir",
        "/etc",
        "--ro-bind-try",
        "/etc/ld.so.cache",
        "/etc/ld.so.cache",
    ]
    for name in _SYSTEM:
        path = Path(name)
        if path.is_symlink():
            words += ["--symlink", os.readlink(path), name]
        elif path.is_dir():
            words += ["--ro-bind", name, name]
    for prefix in sorted({Path(sys.base_prefix).resolve(), Path(sys.base_exec_prefix).resolve()}):
        if not prefix.is_relative_to("/usr"):
            for parent in reversed(prefix.parents[:-1]):  # else bubblewrap makes them as private as they are
                words += ["--perms", "0755", "--dir", str(parent)]
            words += ["--ro-bind", str(prefix), str(prefix)]
    return tuple(words)


@cache
def _interpreter() -> str:
    """The one that runs us, outside of any virtual environment."""
    return os.path.realpath(sys.executable)


@cache
def _inside() -> str:
    return Path(sandboxed.__file__).read_text("utf-8")


def _job(limits: Limits, source_fd: int, lifeline_fd: int, has_tests: bool) -> dict[str, Any]:
    return {
        "source_fd": source_fd,
        "lifeline_fd": lifeline_fd,
        "has_tests": has_tests,
        "uid": random.SystemRandom().choice(_TRANSIENT_UIDS),
        "alarm": math.ceil(limits.seconds + _GRACE_S),
        "limits": {
            "RLIMIT_CPU": math.ceil(limits.seconds),
            "RLIMIT_AS": limits.memory_bytes,
            "RLIMIT_NPROC": limits.processes,
            "RLIMIT_FSIZE": limits.disk_bytes,
            "RLIMIT_NOFILE": limits.open_files,
            "RLIMIT_CORE": 0,
        },
    }


@contextlib.contextmanager
def _memory_file(content: str | bytes) -> Iterator[int]:
    """A file descriptor from which `content` is read."""
    data = content.encode("utf-8", errors="replace") if isinstance(content, str) else content
    with open(os.memfd_create("sandbox"), "w+b") as file:
        file.write(data)
        file.seek(0)
        yield file.fileno()


# --- watching it --------------------------------------------------------------------------------------


def _watch(
    process: subprocess.Popen[bytes], deadline_s: float, output_bytes: int
) -> tuple[Outcome | None, bytes, bytes]:
    """Read until both outputs end; a verdict where the deadline or the output's limit came first."""
    assert process.stdout is not None and process.stderr is not None
    outputs = {process.stdout: bytearray(), process.stderr: bytearray()}
    verdict: Outcome | None = None
    with selectors.DefaultSelector() as selector:
        for stream in outputs:
            selector.register(stream, selectors.EVENT_READ)
        while verdict is None and selector.get_map():
            left_s = deadline_s - time.monotonic()
            if left_s <= 0:
                verdict = "timed_out"
                break
            for key, _ in selector.select(left_s):
                stream: Any = key.fileobj
                chunk = os.read(stream.fileno(), _CHUNK_BYTES)
                outputs[stream] += chunk
                if not chunk:
                    selector.unregister(stream)
                elif len(outputs[stream]) > output_bytes + len(sandboxed.STARTED):
                    verdict = "too_much_output"
    if verdict is None:
        try:
            process.wait(max(0.0, deadline_s - time.monotonic()))
        except subprocess.TimeoutExpired:
            verdict = "timed_out"
    out, err = (bytes(output) for output in outputs.values())
    return verdict, out, err


def _end(process: subprocess.Popen[bytes], info_fd: int) -> None:
    """Kill what still runs, and wait until all of it is gone.

    Killing process 1 rather than bubblewrap: bubblewrap ends when process 1 is gone, and that is when the
    kernel has seen all others out.
    """
    if process.poll() is None:
        with contextlib.suppress(BlockingIOError, ProcessLookupError, subprocess.TimeoutExpired):
            if info := os.read(info_fd, 4096):  # written before process 1 runs
                os.kill(json.loads(info)["child-pid"], signal.SIGKILL)
                process.wait(_GRACE_S)
    if process.poll() is None:
        process.kill()
        process.wait(_GRACE_S)


def _judge(code: int, verdict: Outcome | None, out: bytes, err: bytes, seconds: float) -> Ran:
    before, started, after = err.partition(sandboxed.STARTED)
    if not started:
        _explain(before.decode("utf-8", "replace").strip(), verdict, seconds)
    if verdict is None and code == 128 + signal.SIGXCPU:
        verdict = "timed_out"
    if verdict is None and code == sandboxed.OUT_OF_MEMORY:
        verdict = "out_of_memory"
    ended: Outcome = "ok" if code == 0 else "error"
    return Ran(
        verdict or ended,
        code if verdict is None else None,
        out.decode("utf-8", "replace"),
        after.decode("utf-8", "replace"),
        seconds,
    )


def _explain(said: str, verdict: Outcome | None, seconds: float) -> None:
    """Raises the TaskError of a sandbox that did not start."""
    if verdict == "timed_out":
        raise TaskError(
            f"the code sandbox did not start within {seconds:.1f} s; give the tests more time, or the "
            "machine less to do"
        )
    lowered = said.lower()
    is_refused = any(word in lowered for word in ("namespace", "uid map", "not permitted", "denied"))
    raise TaskError(
        f"the code sandbox does not start ({said[-300:] or 'it said nothing'}); "
        f"{_NAMESPACES if is_refused else 'try the same with a newer bubblewrap (0.5 or later)'}"
    )
