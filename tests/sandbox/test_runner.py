"""Attacks on the sandbox, each with what it must not reach, and what is left of it afterwards: nothing."""

from __future__ import annotations

import os
import queue
import random
import socket
import time
from dataclasses import replace
from pathlib import Path

import pytest

from areal_jax.sandbox import runner
from areal_jax.sandbox.errors import SandboxError
from areal_jax.sandbox.runner import SandboxLimits, require_sandbox, run_python, run_tests
from areal_jax.tasks.pool import RewardPool
from areal_jax.tasks.task import Task
from areal_jax.types import Completion, Prompt
from tests.hangs import HANG_S, wait_for

pytestmark = pytest.mark.usefixtures("sandbox")

ROOT = Path(__file__).parents[2]
PATIENT = SandboxLimits(seconds=120.0)
"""For programs that end by themselves or by another limit, also on a slow and busy machine."""


def marked(seconds: float = PATIENT.seconds) -> tuple[SandboxLimits, str]:
    """Limits, and the text by which every process of a run with them is known."""
    disk_bytes = (16 << 20) + random.SystemRandom().randrange(1 << 20)
    return SandboxLimits(seconds=seconds, disk_bytes=disk_bytes), f'"RLIMIT_FSIZE": {disk_bytes}'


def alive(marker: str) -> list[int]:
    """Processes of the whole machine with `marker` on their command line."""
    found = []
    for folder in Path("/proc").iterdir():
        try:
            if folder.name.isdigit() and marker.encode() in (folder / "cmdline").read_bytes():
                found.append(int(folder.name))
        except (FileNotFoundError, ProcessLookupError):
            continue
    return found


def printed(source: str, **limits: float) -> str:
    """What a program prints that is expected to end by itself."""
    ran = run_python(source, limits=replace(PATIENT, **limits))  # pyright: ignore
    assert (ran.outcome, ran.stderr) == ("ok", "")
    return ran.stdout


def refused(source: str) -> str:
    """The error that a program meets."""
    ran = run_python(source, limits=PATIENT)
    assert ran.outcome == "error", ran
    return ran.stderr.strip().splitlines()[-1]


# --- what ordinary programs find -----------------------------------------------------------------------


def test_a_program_reads_stdin_writes_stdout_and_its_status_is_known():
    assert run_python("print(int(input()) + 1)", stdin="41\n", limits=PATIENT).stdout == "42\n"
    assert run_python("import sys; sys.exit(3)", limits=PATIENT).exit_code == 3
    assert run_python("exit()", limits=PATIENT).outcome == "ok"
    ran = run_python("x = 1\ny = x / 0", limits=PATIENT)
    assert (ran.outcome, ran.exit_code, ran.stdout) == ("error", 1, "")
    assert ran.stderr == (
        'Traceback (most recent call last):\n  File "answer.py", line 2, in <module>\n'
        "ZeroDivisionError: division by zero\n"
    )
    assert run_python("print(1", limits=PATIENT).stderr.endswith("SyntaxError: '(' was never closed\n")


def test_large_input_and_unicode_pass_and_sets_are_always_in_one_order():
    text = "ä\N{SNOWMAN}" * 100_000
    assert printed(f"print(len({text!r}))") == "200000\n"
    ran = run_python("import sys; print(len(sys.stdin.read()))", stdin=text, limits=PATIENT)
    assert ran.stdout == "200000\n"
    assert len({printed("print({'a', 'b', 'c', 'd', 'e'}, hash('x'))") for _ in range(3)}) == 1


def test_main_guards_dataclasses_and_threads_work():
    source = (
        "from __future__ import annotations\nimport threading, dataclasses\n"
        "@dataclasses.dataclass\nclass A:\n    x: int\n"
        "def main(): print(A(3))\n"
        "if __name__ == '__main__':\n    t = threading.Thread(target=main); t.start(); t.join()\n"
    )
    assert printed(source) == "A(x=3)\n"


# --- what it must not reach ----------------------------------------------------------------------------


def test_files_of_the_machine_are_not_there(tmp_path: Path):
    secret = tmp_path / "secret"
    secret.write_text("4711")
    secret.chmod(0o666)
    for path in ("/etc/passwd", secret, ROOT / "pyproject.toml", "/proc/self/status", "/sys/kernel"):
        assert refused(f"open({str(path)!r})").startswith("FileNotFoundError"), path
    seen = "import os\nfor top, _, files in os.walk({!r}): print(*files, sep='\\n')"
    home = Path.home()
    assert ".bashrc" not in printed(
        f"import os; print(os.listdir({str(home)!r}) if os.path.exists({str(home)!r}) else [])"
    )
    assert printed(seen.format("/tmp")).strip() == ""
    assert printed(seen.format("/etc")).split() in ([], ["ld.so.cache"])


def test_nothing_but_tmp_can_be_written():
    for path in ("/x", "/usr/x", "/dev/x", "/dev/shm/x", "/etc/x", "/usr/lib/x"):
        error = refused(f"open({path!r}, 'w')")
        assert error.startswith(("OSError: [Errno 30]", "PermissionError", "FileNotFoundError")), error
    assert refused("import os; os.remove('/usr/bin/env')").startswith(("OSError: [Errno 30]", "PermissionE"))
    assert printed("open('x', 'w').write('ab'); print(open('x').read())") == "ab\n"
    assert printed("import os; print(os.listdir('/tmp'))") == "[]\n", "and it is another one for each run"


def test_the_environment_and_other_descriptors_are_not_inherited(monkeypatch: pytest.MonkeyPatch, tmp_path):
    monkeypatch.setenv("AREAL_TEST_SECRET", "4711")
    names = set(printed("import os; print(*os.environ)").split())
    assert names <= {"PATH", "HOME", "LANG", "PYTHONHASHSEED", "PWD", "LC_CTYPE"}
    (tmp_path / "secret").write_text("4711")
    with (tmp_path / "secret").open() as file:
        os.set_inheritable(file.fileno(), True)
        source = (
            "import os\n"
            "for fd in range(3, 256):\n"
            "    try: print(fd, os.fstat(fd))\n"
            "    except OSError: pass\n"
        )
        assert printed(source) == ""


def test_there_is_no_network_not_even_to_this_machine():
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(0.2)
        port = server.getsockname()[1]
        error = refused(f"import socket; socket.create_connection(('127.0.0.1', {port}), 1)")
        assert error.startswith("OSError: [Errno 101]") or "refused" in error
        with pytest.raises(TimeoutError):
            server.accept()
        socket.create_connection(("127.0.0.1", port), 1).close()
        server.accept()[0].close()  # it does listen
    assert "gaierror" in refused("import socket; socket.getaddrinfo('localhost.example', 80)")


def test_the_sandbox_runs_as_another_user_and_sees_no_outside_process():
    uid, gid, groups, parent = printed(
        "import os; print(os.getuid(), os.getgid(), len(set(os.getgroups()) - {65534}), os.getppid())"
    ).split()
    assert int(uid) >= 61184 and int(gid) >= 61184 and groups == "0"
    assert parent == "1", "process 1 is the sandbox's own"
    assert refused(f"import os; os.kill({os.getpid()}, 0)").startswith("ProcessLookupError")
    assert refused("import os; os.setuid(0)").startswith(("PermissionError", "OSError: [Errno 22]"))


def test_calls_that_would_undo_the_limits_are_refused():
    """By libc's own names, so that our table of numbers is checked against libc's."""
    source = """
import ctypes, errno
libc = ctypes.CDLL(None, use_errno=True)
calls = dict(
    unshare=(0x10000000,), setns=(0, 0), mount=(None, b"/tmp", b"tmpfs", 0, None), ptrace=(16, 1, None, None),
    shmget=(0, 4096, 0o1600), semget=(0, 1, 0o1600), msgget=(0, 0o1600), mq_open=(b"/q", 0o102, 0o600, None),
    memfd_create=(b"m", 0), process_vm_readv=(1, None, 0, None, 0, 0),
    process_vm_writev=(1, None, 0, None, 0, 0),
)
for name, arguments in calls.items():
    if hasattr(libc, name):
        print(name, getattr(libc, name)(*arguments), errno.errorcode.get(ctypes.get_errno()))
print("clone", libc.syscall({clone}, 0x10000011, 0, 0, 0, 0), errno.errorcode.get(ctypes.get_errno()))
print("clone3", libc.syscall(435, 0, 0), errno.errorcode.get(ctypes.get_errno()))
""".replace("{clone}", "56 if __import__('os').uname().machine == 'x86_64' else 220")
    lines = dict(line.split(" ", 1) for line in printed(source).splitlines())
    assert lines.pop("clone3") == "-1 ENOSYS"
    assert len(lines) >= 10 and set(lines.values()) == {"-1 EPERM"}, lines


def test_process_one_can_be_neither_killed_nor_read():
    source = (
        "import os, signal\n"
        "for name in (signal.SIGKILL, signal.SIGSTOP, signal.SIGTERM): os.kill(1, name)\n"
        "print('on', os.getppid())\n"
    )
    assert printed(source) == "on 1\n"
    assert refused("open('/proc/1/mem', 'rb')").startswith("FileNotFoundError")


# --- what it must not use up ---------------------------------------------------------------------------


def test_memory_is_limited():
    """The limit on memory ends the program: that on time is far away."""
    for source in ("x = bytearray(8 << 30)", "x = []\nwhile True: x.append(' ' * (1 << 20) + str(len(x)))"):
        assert run_python(source, limits=PATIENT).outcome == "out_of_memory"
    assert printed("x = bytearray(100 << 20); print(len(x))") == f"{100 << 20}\n"


@pytest.mark.slow
def test_huge_recursion_ends():
    source = "import sys\nsys.setrecursionlimit(10**9)\ndef f(n): return f(n + 1) + 1\nf(0)"
    ran = run_python(source, limits=replace(PATIENT, memory_bytes=64 << 20))
    assert ran.outcome in ("out_of_memory", "error")
    assert refused("def f(): f()\nf()").startswith("RecursionError")


def test_the_disk_is_limited_by_file_and_in_all():
    one = (
        "import signal; signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "f = open('a', 'wb', 0)\ntotal = 0\n"
        "try:\n"
        "    while True: total += f.write(b'x' * 65536)\n"
        "except OSError as error: print(total, error.errno)\n"
    )
    assert printed(one, disk_bytes=1 << 20).split() in ([str(1 << 20), "27"], [str(1 << 20), "28"])
    many = (
        "total = 0\ntry:\n"
        "    for n in range(99): total += open(f'/tmp/{n}', 'wb', 0).write(b'x' * (1 << 18))\n"
        "except OSError as error: print(total <= 1 << 20, error.errno)\n"
    )
    assert printed(many, disk_bytes=1 << 20) == "True 28\n"


@pytest.mark.parametrize(
    "source",
    [
        "print('x' * 100_000_000)",
        "while True: print('x' * 100)",
        "import sys\nwhile True: sys.stderr.write('x' * 100)",
        "import os\nif os.fork(): os.wait()\nwhile True: os.write(1, b'x' * 4096)",
    ],
)
def test_output_is_cut_and_the_program_killed(source: str):
    """At once, not when its time is over."""
    limits, marker = marked()
    start_s = time.monotonic()
    ran = run_python(source, limits=limits)
    assert ran.outcome == "too_much_output" and time.monotonic() - start_s < limits.seconds
    assert limits.output_bytes < len(ran.stdout) + len(ran.stderr) < limits.output_bytes + (1 << 18)
    assert alive(marker) == []


@pytest.mark.parametrize(
    "source",
    [
        pytest.param("while True: pass", id="loop"),
        pytest.param("import os\nwhile True:\n    try: os.fork()\n    except OSError: pass", id="fork bomb"),
        pytest.param("import time; time.sleep(1000)", id="sleep", marks=pytest.mark.slow),
        pytest.param(
            "import signal, time\nfor n in range(1, 65):\n    try: signal.signal(n, signal.SIG_IGN)\n"
            "    except (OSError, ValueError): pass\nwhile True: time.sleep(1)",
            id="ignores signals",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "import os, time\nos.close(0); os.close(1); os.close(2)\ntime.sleep(1000)",
            id="closes its output",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "import os, signal; os.kill(os.getpid(), signal.SIGSTOP)",
            id="stops itself",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_program_that_does_not_end_is_killed_with_all_that_it_started(
    source: str, monkeypatch: pytest.MonkeyPatch
):
    """By its time limit, long before process 1's own alarm and the kill of bubblewrap would end it."""
    monkeypatch.setattr(runner, "_GRACE_S", PATIENT.seconds)
    for seconds in (1.0, 4.0, 16.0):
        limits, marker = marked(seconds)
        start_s = time.monotonic()
        try:
            ran = run_python(source, limits=limits)
        except SandboxError as error:
            assert "did not start within" in str(error)
            continue
        break
    assert ran.outcome == "timed_out"
    assert limits.seconds <= time.monotonic() - start_s < runner._GRACE_S
    assert alive(marker) == []


def test_the_number_of_processes_is_limited():
    source = (
        "import os, time\ncount = 0\n"
        "try:\n"
        "    while True:\n"
        "        if os.fork() == 0: time.sleep(1000)\n"
        "        count += 1\n"
        "except OSError as error: print(count, error.errno)\n"
    )
    assert printed(source, processes=8) == "5 11\n", (
        "process 1 and its thread, the program, five more: EAGAIN"
    )


def test_a_daemon_does_not_survive_its_program():
    """The run ends with the program, though the daemon would go on."""
    limits, marker = marked()
    source = (
        "import os, time\n"
        "if os.fork() == 0:\n"
        "    os.setsid()\n"
        "    if os.fork() == 0:\n"
        "        os.closerange(0, 3); time.sleep(1000)\n"
        "    os._exit(0)\n"
        "os.wait(); print('done')\n"
    )
    ran = run_python(source, limits=limits)
    assert (ran.outcome, ran.stdout) == ("ok", "done\n")
    assert alive(marker) == []


def test_processor_time_is_limited_where_the_clock_is_not_yet_over():
    source = "import resource; print(*resource.getrlimit(resource.RLIMIT_CPU))"
    assert printed(source, seconds=PATIENT.seconds + 0.5) == "121 122\n"


def test_a_program_that_only_waits_has_more_time_than_one_that_computes():
    """As on a busy machine, where a right answer takes longer; the limit is one on CPU time."""
    ran = run_python("import time; time.sleep(1.5); print('done')", limits=SandboxLimits(seconds=1.0))
    assert (ran.outcome, ran.stdout) == ("ok", "done\n")


@pytest.mark.parametrize("where", ["answer", "test"])
def test_computing_without_end_in_tests_is_timed_out_too(where: str):
    source, code = ("def f():\n while True: pass", "f()") if where == "answer" else ("", "while True: pass")
    ran = run_tests(source, [{"code": "1"}, {"code": code}], SandboxLimits(seconds=1.0))
    assert (ran.outcome, ran.stdout) == ("timed_out", "{}\n")


class Stuck(Task):
    """Its score runs a program that outlives every patience."""

    def score(self, prompt: Prompt, completion: Completion) -> float:
        limits = SandboxLimits(seconds=1000.0, disk_bytes=prompt.info["disk_bytes"])
        run_python("import time\nwhile True: time.sleep(1)", limits=limits)
        return 1.0


def test_killing_the_reward_worker_kills_the_sandbox_and_all_inside():
    limits, marker = marked()
    answers: queue.SimpleQueue = queue.SimpleQueue()
    prompt = Prompt("", info={"disk_bytes": limits.disk_bytes}, task="stuck")
    seen: list[int] = []
    for timeout_s in (1.5, 6.0, 24.0):  # until the sandbox has started before the worker is killed
        with RewardPool({"stuck": Stuck()}, workers=1, timeout_s=timeout_s) as pool:
            pool.submit(0, 0, prompt, [Completion("", (1,), "stop")], answers.put)
            while len(seen) < 3 and answers.empty():
                seen = alive(marker)
                time.sleep(0.01)
            assert answers.get(timeout=HANG_S).outcome == "timed_out"
            wait_for(lambda: alive(marker) == [])
        if len(seen) >= 3:
            break
    assert len(seen) >= 3, "bubblewrap, process 1 and the program were there"


# --- where there is no sandbox -------------------------------------------------------------------------


def fake_bubblewrap(folder: Path, script: str) -> None:
    file = folder / "bwrap"
    file.write_text(f"#!/bin/sh\n{script}\n")
    file.chmod(0o755)


def test_a_missing_or_forbidden_bubblewrap_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    probe = require_sandbox.__wrapped__
    with pytest.raises(
        SandboxError, match="the program bwrap is not on PATH; install bubblewrap: apt-get install"
    ):
        probe()
    fake_bubblewrap(
        tmp_path, "echo 'bwrap: Creating new namespace failed: Operation not permitted' >&2; exit 1"
    )
    with pytest.raises(SandboxError, match=r"failed: Operation not permitted\); code tasks need user"):
        probe()
    fake_bubblewrap(tmp_path, "echo 'bwrap: Unknown option --perms' >&2; exit 1")
    with pytest.raises(SandboxError, match=r"Unknown option --perms\); install bubblewrap 0.5"):
        probe()
    fake_bubblewrap(tmp_path, "exec /bin/sleep 60")
    with pytest.raises(SandboxError, match="did not start within"):
        run_python("print(1)", limits=SandboxLimits(seconds=0.3))
