"""The parent's side of a worker: a process that conducts another project's environment."""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import threading
from collections import deque
from collections.abc import Mapping
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from typing import Any

from areal_jax.tasks.errors import TaskError

PROGRAM = Path(__file__).with_name("outside_worker.py")

END_S = 10.0
"""Seconds that a worker may take to end, or to acknowledge a cancelled request; then it is killed."""

LAST_LINES = 15
"""Number of a worker's last lines on stderr that its errors show."""

INSTALL = {"verifiers": "'verifiers==0.4.*' uv", "textarena": "'textarena==0.7.*'"}
"""Kind of environment -> the packages that its interpreter needs."""


class WorkerProcess:
    """A worker, which starts at the first request, and again at the first one after it died. Thread-safe."""

    def __init__(self, kind: str, python: str, settings: Mapping[str, Any], program: Path = PROGRAM) -> None:
        """`kind`: a key of INSTALL; `python`: the interpreter's path; `settings`: the worker's, as JSON."""
        self._kind, self._python, self._settings, self._program = kind, python, settings, program
        self._guard = threading.Lock()
        self._life: _Life | None = None
        self._ended: _Life | None = None

    def ask(self, do: str, **fields: Any) -> Future[Any]:
        """Sends a request; returns the future of its result, a value of JSON.

        The future's exception is a TaskError if the environment raised an error, or the worker died. Raises
        TaskError if the worker cannot be started.
        """
        with self._guard:
            if self._life is None or self._life.is_over:
                command = [self._python, str(self._program), self._kind]
                self._life = _Life(self._kind, command)
                self._life.send({"do": "open", "settings": self._settings})
            return self._life.send({"do": do, **fields})

    def cancel(self, asked: Future[Any]) -> None:
        """Ends the request of this future; a worker that does not react within END_S seconds is killed."""
        with self._guard:
            if self._life is not None:
                self._life.cancel(asked)

    def last_lines(self) -> str:
        """Returns the end of what the worker wrote to stderr, with a newline before it; "" if nothing."""
        life = self._life or self._ended
        return "" if life is None else life.last_lines()

    def close(self, within_s: float = END_S) -> None:
        """Ends the worker and what it started; a later request starts another worker.

        What has not ended after `within_s` seconds is killed.
        """
        with self._guard:
            life, self._life, self._ended = self._life, None, self._life or self._ended
        if life is not None:
            life.end(within_s)


class _Life:
    """A worker from its start to its end."""

    def __init__(self, kind: str, command: list[str]) -> None:
        self._kind, self._command = kind, command
        try:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                start_new_session=True,  # so that killing it kills what it started
            )
        except OSError as error:
            raise TaskError(
                f"tasks.{kind}.python={command[0]} cannot be run ({error.strerror}); give the path of the "
                f"python of a virtual environment with {INSTALL[kind]}"
            ) from None
        self.is_over = False
        self._numbers: dict[Future[Any], int] = {}
        self._pending: dict[int, Future[Any]] = {}
        self._count = 0
        self._guard = threading.Lock()
        self._outgoing: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._lines: deque[str] = deque(maxlen=LAST_LINES)
        bodies = self._read_errors, self._read, self._write  # the second waits for the first's end
        self._threads = [threading.Thread(target=body, name="outside", daemon=True) for body in bodies]
        for thread in self._threads:
            thread.start()

    def send(self, request: dict[str, Any]) -> Future[Any]:
        future: Future[Any] = Future()
        future.set_running_or_notify_cancel()
        with self._guard:
            number, self._count = self._count, self._count + 1
            if self.is_over:
                future.set_exception(self._death())
                return future
            self._pending[number], self._numbers[future] = future, number
        self._outgoing.put(json.dumps({"id": number, **request}))
        return future

    def cancel(self, asked: Future[Any]) -> None:
        number = self._numbers.get(asked)
        if number is None or asked.done():
            return
        self.send({"do": "cancel", "of": number})
        watch = threading.Timer(END_S, lambda: asked.done() or self._kill())
        watch.daemon = True
        watch.start()

    def end(self, within_s: float) -> None:
        self._outgoing.put(None)
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(within_s)
        self._kill()  # what it started may have outlived it
        self._process.wait(END_S)
        for thread in self._threads:
            thread.join(END_S)

    def last_lines(self) -> str:
        return "".join(f"\n  {line}" for line in self._lines)

    def _kill(self) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)

    def _write(self) -> None:
        assert self._process.stdin is not None
        with suppress(BrokenPipeError, ValueError):
            while (line := self._outgoing.get()) is not None:
                self._process.stdin.write(line + "\n")
                self._process.stdin.flush()
            self._process.stdin.close()

    def _read_errors(self) -> None:
        assert self._process.stderr is not None
        for line in self._process.stderr:
            self._lines.append(line.rstrip()[:300])

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if not line.endswith("\n"):
                break  # the worker was killed while it wrote
            answer = json.loads(line)
            with self._guard:
                future = self._pending.pop(answer["id"])
                del self._numbers[future]
            if "error" in answer:
                future.set_exception(self._error(answer))
            else:
                future.set_result(answer["result"])
        self._process.wait()
        self._kill()  # what it started may have outlived it, and hold its stderr
        self._threads[0].join(END_S)  # the last lines on stderr say why
        with self._guard:
            self.is_over = True
            pending = list(self._pending.values())
            self._pending.clear()
            self._numbers.clear()
        for future in pending:
            future.set_exception(self._death())
        self._outgoing.put(None)

    def _error(self, answer: Mapping[str, Any]) -> TaskError:
        if (missing := answer.get("missing")) is not None:
            package = INSTALL[self._kind] if missing == self._kind else missing
            return TaskError(
                f"tasks.{self._kind}.python={self._command[0]} has no package {missing}; install it: "
                f"{self._command[0]} -m pip install {package}"
            )
        return TaskError(f"tasks.{self._kind}: {answer['error']}")

    def _death(self) -> TaskError:
        return TaskError(
            f"tasks.{self._kind}: the worker ended with status {self._process.returncode}; its last lines "
            f"on stderr:{self.last_lines() or ' none'}"
        )
