"""The code that a reward worker process runs, and the code by which the parent starts and kills a worker.

A worker imports this file and what the tasks import, but neither jax nor the parent's main module.
"""

from __future__ import annotations

import ctypes
import importlib.machinery
import math
import os
import resource
import signal
import sys
import threading
from collections.abc import Mapping
from multiprocessing import spawn
from multiprocessing.context import SpawnContext, SpawnProcess
from typing import Any

import cloudpickle

from areal_jax.tasks.errors import TaskError
from areal_jax.tasks.scoring import GROUP, Outcome, failed, score_group
from areal_jax.tasks.task import Task

LOAD_DEADLINE_S = 60
"""A new worker that has not loaded the tasks after this many seconds is killed."""

EXIT_0 = 1 << 16
"""Reported in place of a worker's exit status 0, after which pebble's pool would wait for a result."""

_PR_SET_PDEATHSIG = 1
_SPAWNING = threading.Lock()

_WORKER: dict[str, Any] = {}
"""In a worker process, set by `start_worker`: "tasks" -> the tasks, or "problem" -> why loading failed."""


# --- in the worker ------------------------------------------------------------------------------------


def start_worker(parent: int, blob: bytes) -> None:
    """Prepares a new worker: makes it end when its parent ends and ignore Ctrl-C, and loads the tasks.

    `parent`: the parent's process id; `blob`: the tasks as `portable` pickles them. If the tasks cannot be
    loaded, the worker stays alive, and every group given to it fails with the error of loading.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)  # the parent died before the line above
    os.setsid()  # killing the session kills child processes too, and Ctrl-C reaches the parent alone
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    os.dup2(2, 1)  # a score may print, and the parent's stdout may be JSON
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.alarm(LOAD_DEADLINE_S)
    try:
        _WORKER["tasks"] = cloudpickle.loads(blob)
    except Exception as error:  # noqa: BLE001 - the user's imports may fail; every group then reports it
        _WORKER["problem"] = f"a reward worker cannot load the tasks: {error!r}"
    signal.alarm(0)


def score_blob(ordinal: int, attempt: int, blob: bytes, limit_cpu_s: float) -> Outcome:
    """Scores `blob`, a cloudpickled (prompt, completions), with this worker's tasks; returns the outcome.

    SIGXCPU ends the worker if it takes more than `limit_cpu_s` seconds of CPU time. The outcome repeats
    `ordinal`, the prompt's place in the run's order, and `attempt`, the number of times that its group was
    sampled again.
    """
    used = resource.getrusage(resource.RUSAGE_SELF)
    _, hard = resource.getrlimit(resource.RLIMIT_CPU)
    limit_s = math.ceil(used.ru_utime + used.ru_stime + limit_cpu_s)
    resource.setrlimit(resource.RLIMIT_CPU, (limit_s if hard < 0 else min(limit_s, hard), hard))
    if "problem" in _WORKER:
        return failed(ordinal, attempt, GROUP, _WORKER["problem"])
    try:
        prompt, completions = cloudpickle.loads(blob)
    except Exception as error:  # noqa: BLE001 - users' own classes in `info`; counted as a failed reward
        return failed(ordinal, attempt, GROUP, f"a reward worker cannot unpickle the prompt: {error!r}")
    return score_group(_WORKER["tasks"][prompt.task], prompt, completions, ordinal, attempt)


# --- in the parent ------------------------------------------------------------------------------------


def portable(tasks: Mapping[str, Task]) -> bytes:
    """Returns the tasks, pickled so that a worker can load them even if a script defines their classes.

    Raises TaskError if a task cannot be pickled.
    """
    for name, task in tasks.items():
        module = sys.modules.get(type(task).__module__)
        if module is not None and not _is_importable(module.__name__):
            cloudpickle.register_pickle_by_value(module)
        try:
            cloudpickle.dumps(task)
        except Exception as error:
            raise TaskError(
                f"tasks.{name} cannot be pickled for a reward worker ({error!r}); create files, locks and "
                "connections in score rather than in the constructor"
            ) from error
    return cloudpickle.dumps(dict(tasks))


def _is_importable(module: str) -> bool:
    """Whether a new process with the same sys.path finds `module` on disk."""
    path = None
    for part in module.split("."):
        spec = importlib.machinery.PathFinder.find_spec(part, path)
        if spec is None:
            return False
        path = spec.submodule_search_locations
    return True


class _Process(SpawnProcess):
    """A worker process: it does not run the parent's main module; killing it also kills its children."""

    @staticmethod
    def _Popen(process_obj: Any) -> Any:
        """Starts the worker so that it does not import the parent's main script again.

        The module `__main__` stays as it is, because the script's threads may read `__main__.__file__`.
        """
        spawning = threading.get_ident()

        def preparation_data(name: str) -> dict[str, Any]:
            data = inherited(name)
            if threading.get_ident() == spawning:
                data.pop("init_main_from_name", None)
                data.pop("init_main_from_path", None)
            return data

        with _SPAWNING:
            inherited = spawn.get_preparation_data
            spawn.get_preparation_data = preparation_data
            try:
                return SpawnProcess._Popen(process_obj)  # pyright: ignore[reportAttributeAccessIssue]
            finally:
                spawn.get_preparation_data = inherited

    def terminate(self) -> None:
        """Sends SIGKILL to the worker and its child processes, since C code in a score may block SIGTERM."""
        if not self.is_alive() or self.pid is None:
            return
        try:
            os.killpg(self.pid, signal.SIGKILL)
        except ProcessLookupError:  # it has no session of its own yet
            self.kill()

    @property
    def exitcode(self) -> int | None:
        """The exit code; EXIT_0 instead of 0, because after a 0 pebble would wait forever for a result."""
        code = super().exitcode
        return EXIT_0 if code == 0 else code


class WorkerContext(SpawnContext):
    """multiprocessing's spawn context, except that each process it starts is a `_Process`."""

    Process = _Process
