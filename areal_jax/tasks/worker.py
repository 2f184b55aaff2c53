"""A reward worker: how it starts, what it does, how it dies.

It imports this file and what the tasks need: no jax, and not the program that started it.
"""

from __future__ import annotations

import ctypes
import importlib.machinery
import os
import resource
import signal
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from multiprocessing.context import SpawnContext, SpawnProcess
from typing import Any

import cloudpickle

from areal_jax.tasks.scoring import GROUP, Outcome, failed, score_group
from areal_jax.tasks.task import Task, TaskError

LOAD_DEADLINE_S = 60
"""Longest that a new worker may take to load the tasks before it is killed."""

EXIT_0 = 1 << 16
"""What a worker that ended by itself with status 0 reports."""

_PR_SET_PDEATHSIG = 1
_SPAWNING = threading.Lock()

_WORKER: dict[str, Any] = {}
"""A worker's tasks, or the reason why there are none. Filled in once by `start_worker`, only in a worker."""


# --- in the worker ------------------------------------------------------------------------------------


def start_worker(parent: int, blob: bytes) -> None:
    """Tie this process to its parent, part it from the terminal, load the tasks."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)  # the parent died before the line above
    os.setsid()  # so that killing it kills what it started, and Ctrl-C is the parent's business
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    os.dup2(2, 1)  # what a score prints is for people, and stdout may be somebody's JSON
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.alarm(LOAD_DEADLINE_S)
    try:
        _WORKER["tasks"] = cloudpickle.loads(blob)
    except Exception as error:  # noqa: BLE001 - an import of the user's may fail; every group then reports it
        _WORKER["problem"] = f"a reward worker cannot load the tasks: {error!r}"
    signal.alarm(0)


def score_blob(ordinal: int, attempt: int, blob: bytes) -> Outcome:
    """Score the cloudpickled (prompt, completions) with this worker's tasks."""
    if "problem" in _WORKER:
        return failed(ordinal, attempt, GROUP, _WORKER["problem"])
    try:
        prompt, completions = cloudpickle.loads(blob)
    except Exception as error:  # noqa: BLE001 - users' own classes in `info`; counted as a failed reward
        return failed(ordinal, attempt, GROUP, f"a reward worker cannot read the prompt: {error!r}")
    tasks: dict[str, Task] = _WORKER["tasks"]
    task = tasks.get(prompt.task)
    if task is None:
        known = ", ".join(tasks)
        return failed(ordinal, attempt, GROUP, f"no task {prompt.task!r}; the reward pool has {known}")
    return score_group(task, prompt, completions, ordinal, attempt)


# --- in the parent ------------------------------------------------------------------------------------


def portable(tasks: Mapping[str, Task]) -> bytes:
    """The tasks as bytes that a fresh process can load, also those of a script. Raises TaskError."""
    for name, task in tasks.items():
        module = sys.modules.get(type(task).__module__)
        if module is not None and not _is_importable(module.__name__):
            cloudpickle.register_pickle_by_value(module)
        try:
            cloudpickle.dumps(task)
        except Exception as error:
            raise TaskError(
                f"tasks.{name} cannot be sent to a reward worker ({error!r}); open files, locks and "
                "connections in score rather than in the constructor"
            ) from error
    return cloudpickle.dumps(dict(tasks))


def _is_importable(module: str) -> bool:
    """Whether another process with our sys.path finds `module`; asks the disk, not what is loaded here."""
    path = None
    for part in module.split("."):
        spec = importlib.machinery.PathFinder.find_spec(part, path)
        if spec is None:
            return False
        path = spec.submodule_search_locations
    return True


class _Process(SpawnProcess):
    """A worker process: starts without the parent's main module, dies at once and with what it started."""

    @staticmethod
    def _Popen(process_obj: Any) -> Any:
        with _SPAWNING, _without_main():
            return SpawnProcess._Popen(process_obj)  # pyright: ignore[reportAttributeAccessIssue]

    def terminate(self) -> None:
        """SIGKILL to the worker's whole session: a score may be deep in C code, or have children."""
        if not self.is_alive() or self.pid is None:
            return
        try:
            os.killpg(self.pid, signal.SIGKILL)
        except ProcessLookupError:  # it has no session of its own yet
            self.kill()

    @property
    def exitcode(self) -> int | None:
        """As the process said, but never 0: pebble takes 0 for intended, and waits for the group's result."""
        code = super().exitcode
        return EXIT_0 if code == 0 else code


class WorkerContext(SpawnContext):
    """multiprocessing's spawn, with our workers."""

    Process = _Process


@contextmanager
def _without_main() -> Iterator[None]:
    """Hide where `__main__` came from, so that a worker does not run the user's script again."""
    main = sys.modules["__main__"]
    hidden = {name: getattr(main, name) for name in ("__file__", "__spec__") if hasattr(main, name)}
    try:
        for name in hidden:
            setattr(main, name, None)
        yield
    finally:
        for name, value in hidden.items():
            setattr(main, name, value)
