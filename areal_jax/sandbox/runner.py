"""Runs untrusted Python in bubblewrap: without network or the user's files, and with nothing left running.

    require_sandbox()                                     # once, when a task that needs it is made
    run_python("print(input())", stdin="7").stdout        # "7\\n"

The sandbox has the interpreter with its standard library, /usr read-only, and an empty /tmp of limited size.
It has no network, no /proc and none of the caller's environment variables; it sees no process outside, and
cannot make new namespaces (seccomp.py). The program runs as an unprivileged user, with limits on CPU time,
memory, processes and files. The sandbox's first process, process 1 (child.py), ends when the program or the
calling process ends; the kernel then kills all other processes in the sandbox.

Memory is limited for each process, so `Limits.memory_bytes * Limits.processes` bounds the whole sandbox.
Memory that the kernel needs for empty files is limited only by the run's time: 0.7 GB after 3 s of creating
files, freed when the run ends.
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

from areal_jax.sandbox import child as sandboxed
from areal_jax.sandbox.errors import SandboxError
from areal_jax.sandbox.seccomp import seccomp_filter
from areal_jax.types import WALL_PER_CPU

RunOutcome = Literal["ok", "error", "timed_out", "out_of_memory", "too_much_output"]

_NOBODY = 65534
_TRANSIENT_UIDS = range(61184, 65520)
"""systemd's range of temporary user ids. Each run gets a random id, because RLIMIT_NPROC counts per user."""

_SYSTEM = ("/bin", "/lib", "/lib32", "/lib64", "/libx32", "/sbin")
_DEVICES = ("/dev/null", "/dev/zero", "/dev/urandom")
_CHUNK_BYTES = 1 << 16
_GRACE_S = 5.0
"""Time limit, in seconds, for a killed sandbox to end."""

_GET = "install bubblewrap: apt-get install bubblewrap, or dnf install bubblewrap"
_NAMESPACES = (
    "code tasks need user namespaces, or root with CAP_SYS_ADMIN: sysctl user.max_user_namespaces above 0, "
    "kernel.unprivileged_userns_clone=1, kernel.apparmor_restrict_unprivileged_userns=0; for a container, "
    "set these on its host"
)


@dataclass(frozen=True)
class SandboxLimits:
    """Limits of one run of a program in the sandbox."""

    seconds: float = 4.0
    """Limit on the CPU time of a process, rounded up; WALL_PER_CPU times as much is that on wall time."""
    memory_bytes: int = 512 << 20
    """Maximum address space of each process."""
    processes: int = 16
    """Maximum number of processes and threads at one time, of which the sandbox itself needs two."""
    disk_bytes: int = 32 << 20
    """Size of /tmp; also the maximum size of one file."""
    output_bytes: int = 1 << 20
    """Maximum size of stdout, and of stderr; an output larger by more than a few bytes ends the run."""
    open_files: int = 64


@dataclass(frozen=True)
class Ran:
    """Result of a run. `outcome` is ok only if the program exited with status 0."""

    outcome: RunOutcome
    exit_code: int | None
    """The exit status; 128 + n if signal n ended the program, None if a limit (see `outcome`) ended it."""
    stdout: str
    stderr: str


@cache
def require_sandbox() -> None:
    """Checks, once per process, that the sandbox works on this machine, by running one line in it.

    Raises SandboxError if the sandbox does not work; the message names what is missing and the remedy.
    """
    ran = run_python("import os; os.fork(); print('alive')", limits=SandboxLimits(seconds=30.0))
    if ran.outcome != "ok" or ran.stdout != "alive\n" * 2:
        raise SandboxError(
            f"code in the sandbox cannot start a second process: {ran.stderr[-300:]!r}; "
            "raise the limit on processes of this user or container"
        )


def run_python(source: str, *, stdin: str = "", limits: SandboxLimits | None = None) -> Ran:
    """Runs the program `source` with the input `stdin`; returns the result, even if the program fails.

    `limits`: None means the defaults, `Limits()`. Raises SandboxError only if the sandbox itself fails.
    """
    return _run(source, stdin, limits or SandboxLimits(), has_tests=False)


def run_tests(source: str, tests: Sequence[Mapping[str, Any]], limits: SandboxLimits | None = None) -> Ran:
    """Runs `tests` on the answer, the Python module with the text `source`, in the sandbox.

    A test is a call, {"function": name, "args": [...]}, or Python code with assertions, {"code": text}. The
    result's stdout has one JSON line for each test that ran, in order: {"value": ...} for a call (see
    `child.decode`), {} for code that raised nothing, {"problem": text} otherwise. The answer runs in another
    process than the tests, so the answer sees the arguments of calls, but not the values that tests expect.
    Raises SandboxError only if the sandbox itself fails.
    """
    return _run(source, json.dumps(list(tests)), limits or SandboxLimits(), has_tests=True)


def _run(source: str, stdin: str, limits: SandboxLimits, *, has_tests: bool) -> Ran:
    start_s = time.monotonic()
    with contextlib.ExitStack() as stack:
        input_fd, source_fd = (stack.enter_context(_memory_file(text)) for text in (stdin, source))
        filter_fd = stack.enter_context(_memory_file(seccomp_filter()))
        (info_read, info_write), (lifeline_read, lifeline_write) = os.pipe(), os.pipe()
        os.set_blocking(info_read, False)
        for fd in (info_read, lifeline_write):
            stack.callback(os.close, fd)
        interpreter = os.path.realpath(sys.executable)  # outside of any virtual environment
        command = [
            *_bubblewrap(limits),
            *("--seccomp", str(filter_fd), "--info-fd", str(info_write)),
            *("--", interpreter, "-S", "-s", "-P", "-B", "-X", "utf8", "-c", _inside()),
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
                deadline_s = start_s + WALL_PER_CPU * limits.seconds
                verdict, out, err = _watch(process, deadline_s, limits.output_bytes)
            finally:
                _end(process, info_read)
    return _result(process.returncode, verdict, out, err, time.monotonic() - start_s)


# --- the sandbox's command ----------------------------------------------------------------------------


def _bubblewrap(limits: SandboxLimits) -> list[str]:
    """Returns the bwrap command with the sandbox's options; raises SandboxError if bwrap is not on PATH."""
    found = shutil.which("bwrap")
    if found is None:
        raise SandboxError(
            f"code tasks run answers in bubblewrap, but the program bwrap is not on PATH; {_GET}"
        )
    apart = ["--unshare-ipc", "--unshare-pid", "--unshare-net", "--unshare-uts", "--unshare-cgroup-try"]
    if os.geteuid() == 0:
        # RLIMIT_NPROC does not bind root, even under another id in a user namespace. So there is no such
        # namespace here, and process 1 changes to another user of the system.
        apart += ["--cap-drop", "ALL", "--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID"]
    else:
        apart += ["--unshare-user", "--uid", str(_NOBODY), "--gid", str(_NOBODY), "--cap-drop", "ALL"]
    return [
        found,
        *apart,
        *("--die-with-parent", "--new-session", "--as-pid-1", "--hostname", "sandbox"),
        *("--clearenv", "--setenv", "PATH", "/usr/bin:/bin", "--setenv", "HOME", "/tmp"),
        *("--setenv", "LANG", "C.UTF-8", "--setenv", "PYTHONHASHSEED", "0"),  # scores must be repeatable
        *_read_only(),
        *("--size", str(limits.disk_bytes), "--perms", "1777", "--tmpfs", "/tmp"),
        *("--perms", "0755", "--dir", "/dev"),
        *(word for device in _DEVICES for word in ("--dev-bind", device, device)),
        *("--remount-ro", "/", "--chdir", "/tmp"),
    ]


@cache
def _read_only() -> tuple[str, ...]:
    """Returns bwrap's options to mount the system's programs and libraries and the interpreter, read-only."""
    words = [
        *("--ro-bind", "/usr", "/usr"),
        *("--perms", "0755", "--dir", "/etc"),
        *("--ro-bind-try", "/etc/ld.so.cache", "/etc/ld.so.cache"),
    ]
    for name in _SYSTEM:
        path = Path(name)
        if path.is_symlink():
            words += ["--symlink", os.readlink(path), name]
        elif path.is_dir():
            words += ["--ro-bind", name, name]
    for prefix in sorted({Path(sys.base_prefix).resolve(), Path(sys.base_exec_prefix).resolve()}):
        if not prefix.is_relative_to("/usr"):
            for parent in reversed(prefix.parents[:-1]):  # bubblewrap would make them unreadable
                words += ["--perms", "0755", "--dir", str(parent)]
            words += ["--ro-bind", str(prefix), str(prefix)]
    return tuple(words)


@cache
def _inside() -> str:
    return Path(sandboxed.__file__).read_text("utf-8")


def _job(limits: SandboxLimits, source_fd: int, lifeline_fd: int, has_tests: bool) -> dict[str, Any]:
    return {
        "source_fd": source_fd,
        "lifeline_fd": lifeline_fd,
        "has_tests": has_tests,
        "uid": random.SystemRandom().choice(_TRANSIENT_UIDS),
        "alarm": math.ceil(WALL_PER_CPU * limits.seconds + _GRACE_S),
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
    """Yields the descriptor of an unnamed file in memory that contains `content`."""
    data = content.encode("utf-8", errors="replace") if isinstance(content, str) else content
    with open(os.memfd_create("sandbox"), "w+b") as file:
        file.write(data)
        file.seek(0)
        yield file.fileno()


# --- running it ---------------------------------------------------------------------------------------


def _watch(
    process: subprocess.Popen[bytes], deadline_s: float, output_bytes: int
) -> tuple[RunOutcome | None, bytes, bytes]:
    """Reads the output of `process` until the process ends or a limit is exceeded.

    Returns (outcome, stdout, stderr); the outcome is timed_out, too_much_output, or None if the process ended
    by itself. `deadline_s`: a time of time.monotonic(); `output_bytes`: maximum size of stdout and stderr.
    """
    assert process.stdout is not None and process.stderr is not None
    outputs = {process.stdout: bytearray(), process.stderr: bytearray()}
    verdict: RunOutcome | None = None
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
    """Kills the sandbox if it still runs, and waits until all processes of the sandbox have ended.

    `process`: bubblewrap; `info_fd`: the pipe on which bubblewrap reports the id of process 1, the sandbox's
    first process, which is the one to kill.
    """
    # Process 1 is killed, not bubblewrap: bubblewrap ends after process 1, and by then the kernel has killed
    # all other processes of the sandbox.
    if process.poll() is None:
        with contextlib.suppress(BlockingIOError, ProcessLookupError, subprocess.TimeoutExpired):
            if info := os.read(info_fd, 4096):  # written before process 1 runs
                os.kill(json.loads(info)["child-pid"], signal.SIGKILL)
                process.wait(_GRACE_S)
    if process.poll() is None:
        process.kill()
        process.wait(_GRACE_S)


def _result(code: int, verdict: RunOutcome | None, out: bytes, err: bytes, seconds: float) -> Ran:
    before, started, after = err.partition(sandboxed.STARTED)
    if not started:
        _explain(before.decode("utf-8", "replace").strip(), verdict, seconds)
    if verdict is None and code == 128 + signal.SIGXCPU:
        verdict = "timed_out"
    if verdict is None and code == sandboxed.OUT_OF_MEMORY:
        verdict = "out_of_memory"
    ended: RunOutcome = "ok" if code == 0 else "error"
    return Ran(
        verdict or ended,
        code if verdict is None else None,
        out.decode("utf-8", "replace"),
        after.decode("utf-8", "replace"),
    )


def _explain(message: str, verdict: RunOutcome | None, seconds: float) -> None:
    """Raises SandboxError with the reason why the sandbox did not start, and the remedy.

    `message`: bubblewrap's stderr; `verdict`: the outcome that `_watch` returned; `seconds`: the time
    from the start until bubblewrap ended.
    """
    if verdict == "timed_out":
        raise SandboxError(
            f"the code sandbox did not start within {seconds:.1f} s; raise tasks.code.test_timeout_s, or "
            "run fewer processes on this machine"
        )
    lowered = message.lower()
    is_refused = any(word in lowered for word in ("namespace", "uid map", "not permitted", "denied"))
    raise SandboxError(
        f"the code sandbox does not start ({message[-300:] or 'no message'}); "
        f"{_NAMESPACES if is_refused else 'install bubblewrap 0.5 or later'}"
    )
