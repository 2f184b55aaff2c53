"""Compares answers with math-verify in a process of its own, whatever the policy wrote.

Algebra may raise anything, recurse without end, or compute 9^(9^(9^9)) in code that no signal interrupts. So
each comparison runs in a fork of a process that has loaded math-verify, under limits on CPU time and memory
that the kernel enforces. Limits on CPU time do not depend on how busy the machine is.
"""

from __future__ import annotations

import json
import os
import selectors
import subprocess
import sys
import threading
import time
from functools import cache
from pathlib import Path
from typing import Any

from areal_jax.tasks.errors import VerifierError

PROGRAM = Path(__file__).with_name("math_program.py")

WAIT_S = 300.0
"""Longest time that a comparison may take with all waiting, in seconds of wall time."""

_STARTS = 2
"""Number of processes that are tried for a comparison, if one ends while it compares."""


class MathProcess:
    """A process that compares answers; it starts at the first question, and again if it has ended."""

    def __init__(self) -> None:
        self._guard = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None

    def ask(self, gold: str, answer: str, cpu_s: int) -> dict[str, Any]:
        """Returns what math-verify says of an answer: see math_program.py. Thread-safe.

        `cpu_s`: limit on CPU time. Raises VerifierError if the process ends by itself, or stays silent.
        """
        line = json.dumps([gold, answer, cpu_s]).encode() + b"\n"
        with self._guard:
            for _ in range(_STARTS):
                try:
                    if reply := self._asked(line):
                        return json.loads(reply)
                except BaseException:
                    self._end()  # a late reply would be taken for that to the next question
                    raise
                self._end()
        raise VerifierError(
            f"the process that compares answers ended while it compared {answer!r:.80} with {gold!r:.80}; "
            "the machine may have too little memory"
        )

    def _asked(self, line: bytes) -> bytes:
        """Returns the reply; b"" if the process ends before it replies."""
        if self._process is None:
            command, pipe = [sys.executable, str(PROGRAM), json.dumps(sys.path)], subprocess.PIPE
            self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe, bufsize=0)
        process, reply, end_s = self._process, b"", time.monotonic() + WAIT_S
        assert process.stdin is not None and process.stdout is not None
        try:
            process.stdin.write(line)
        except BrokenPipeError:
            return b""
        with selectors.DefaultSelector() as selector:
            selector.register(process.stdout, selectors.EVENT_READ)
            while not reply.endswith(b"\n"):
                if not selector.select(max(0.0, end_s - time.monotonic())):
                    raise VerifierError(
                        f"math-verify gave no answer for {WAIT_S:g} s; run fewer processes on this machine"
                    )
                if not (chunk := process.stdout.read(1 << 16)):
                    return b""
                reply += chunk
        return reply

    def _end(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.communicate()


def compared(gold: str, answer: str, cpu_s: int) -> dict[str, Any]:
    """Returns what math-verify says of an answer, by this process's `MathProcess`."""
    return _of_process(os.getpid()).ask(gold, answer, cpu_s)


@cache
def _of_process(_pid: int) -> MathProcess:
    """Returns the MathProcess of a process; a forked process has another id, and must not share pipes."""
    return MathProcess()
