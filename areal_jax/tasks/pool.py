"""Scores groups (the completions of one prompt each) in worker processes, with a time limit per group."""

from __future__ import annotations

import os
import queue
import signal
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import CancelledError, Future
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from functools import partial

import cloudpickle
from pebble import ProcessExpired, ProcessPool

from areal_jax.control.events import RewardFailed
from areal_jax.tasks.errors import TaskError
from areal_jax.tasks.scoring import GROUP, Outcome, failed
from areal_jax.tasks.task import Task
from areal_jax.tasks.worker import EXIT_0, LOAD_DEADLINE_S, WorkerContext, portable, score_blob, start_worker
from areal_jax.types import WALL_PER_CPU, Completion, Prompt

_LAUNCHES = 3
"""Number of process pools that are tried for a group; if each pool breaks, scoring the group fails."""

_TICK_S = 0.25
_JOIN_S = 10.0


@dataclass
class _Job:
    ordinal: int
    attempt: int
    prompt: Prompt
    completions: tuple[Completion, ...]
    on_done: Callable[[Outcome], None]
    launches: int = 0


class RewardPool:
    """A pool of worker processes that score groups; a group is the completions of one prompt.

    A worker is killed and replaced if its group takes longer than the time limit; the group's result is then
    a RewardFailed with the outcome "timed_out".
    """

    def __init__(self, tasks: Mapping[str, Task], workers: int, timeout_s: float) -> None:
        """`tasks`: name -> task, where a prompt's field `task` is the name; `workers`: number of processes.

        `timeout_s`: seconds of CPU time that a worker has for one group; on a busy machine they take longer,
        so it has WALL_PER_CPU times as many seconds of wall time. Raises TaskError if a task cannot be
        pickled.
        """
        self._blob = portable(tasks)
        self._workers = workers
        self._timeout_s = timeout_s
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._pending: dict[int, _Job] = {}
        """id(job) -> job, for each job that was taken from `_jobs` and has no reported result yet."""
        self._closed = threading.Event()
        # A worker dies with the thread that made it, so this thread lives as long as the pool.
        self._owner = threading.Thread(target=self._own, name="reward-pool", daemon=True)
        self._owner.start()

    def submit(
        self,
        ordinal: int,
        attempt: int,
        prompt: Prompt,
        completions: Sequence[Completion],
        on_done: Callable[[Outcome], None],
    ) -> None:
        """Queues a group for scoring; a thread of the pool later calls `on_done(outcome)` once.

        `ordinal`: the prompt's place in the run's order; `attempt`: how often its group was sampled again.
        The outcome repeats these two numbers. `on_done` must not block, and is not called after `close`.
        Raises TaskError if the pool is already closed.
        """
        if self._closed.is_set():
            raise TaskError(
                f"group {ordinal} was submitted to a closed reward pool; close the pool only after the last "
                "group"
            )
        self._jobs.put(_Job(ordinal, attempt, prompt, tuple(completions), on_done))

    def close(self) -> None:
        """Kills the workers; `on_done` of an unscored group is not called. A second call does nothing."""
        self._closed.set()
        self._jobs.put(None)
        self._owner.join(_JOIN_S)

    def __enter__(self) -> RewardPool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # --- the pool's own thread ---------------------------------------------------------------------------

    def _own(self) -> None:
        """The thread's work until `close`: gives groups to a process pool, and replaces a broken pool."""
        pool = self._launch()
        while not self._closed.is_set():
            try:
                job = self._jobs.get(timeout=_TICK_S)
            except queue.Empty:
                job = None
            if (job is not None or self._pending) and not pool.active:
                _stop(pool)
                pool = self._launch()
                self._again(pool)
            if job is not None:
                self._pending[id(job)] = job
                self._schedule(pool, job)
        _stop(pool)

    def _launch(self) -> ProcessPool:
        pool = ProcessPool(
            max_workers=self._workers,
            initializer=start_worker,
            initargs=(os.getpid(), self._blob),
            context=WorkerContext(),
        )
        _ = pool.active  # starts the workers now, from this thread, rather than with the first group
        return pool

    def _again(self, pool: ProcessPool) -> None:
        """Gives a broken pool's unscored groups to `pool`; fails a group after _LAUNCHES (3) broken pools."""
        for job in list(self._pending.values()):
            job.launches += 1
            if job.launches < _LAUNCHES:
                self._schedule(pool, job)
                continue
            message = (
                "the reward workers end before they score a group, because loading the tasks crashes or "
                f"takes longer than {LOAD_DEADLINE_S} s; import large packages inside score"
            )
            self._report(job, failed(job.ordinal, job.attempt, GROUP, message))

    def _schedule(self, pool: ProcessPool, job: _Job) -> None:
        try:
            blob = cloudpickle.dumps((job.prompt, job.completions))  # users' own classes may be in `info`
        except Exception as error:  # noqa: BLE001 - anything may be in `info`; counted as a failed reward
            message = (
                f"{job.prompt.task}: prompt.info cannot be pickled for a reward worker ({error!r}); put only "
                "plain data in info"
            )
            self._report(job, failed(job.ordinal, job.attempt, GROUP, message))
            return
        try:
            given = job.ordinal, job.attempt, blob, self._timeout_s
            future = pool.schedule(score_blob, given, timeout=WALL_PER_CPU * self._timeout_s)
        except RuntimeError:  # the pool has just broken: the next round of `_own` replaces it
            return
        future.add_done_callback(partial(self._done, job))

    # --- pebble's threads -----------------------------------------------------------------------------

    def _done(self, job: _Job, future: Future[Outcome]) -> None:
        try:
            outcome = future.result(timeout=0)
        except TimeoutError:
            outcome = self._timed_out(job, f"{WALL_PER_CPU * self._timeout_s:g} s")
        except ProcessExpired as error:
            outcome = self._died(job, error.exitcode)
        except (BrokenProcessPool, CancelledError):
            return  # still pending: `_again` schedules it on the next pool
        except Exception as error:  # noqa: BLE001 - pebble could not send or receive; counted as failed
            message = f"no result from the reward worker: {error!r}"
            outcome = failed(job.ordinal, job.attempt, GROUP, message, "infrastructure")
        self._report(job, outcome)

    def _timed_out(self, job: _Job, limit: str) -> RewardFailed:
        message = (
            f"scoring the group took longer than {limit}; raise runtime.reward_timeout_s, or make the task's "
            "score faster"
        )
        return RewardFailed(job.ordinal, job.attempt, GROUP, "timed_out", message)

    def _died(self, job: _Job, code: int) -> RewardFailed:
        """Returns the outcome of a group with a worker that ended: by an exit status, or a signal (< 0)."""
        if code == -signal.SIGXCPU:
            return self._timed_out(job, f"{self._timeout_s:g} s of CPU time")
        message = f"the reward worker died while it scored the group: {_describe_exit(code)}"
        return failed(job.ordinal, job.attempt, GROUP, message, "infrastructure" if code < 0 else "task")

    def _report(self, job: _Job, outcome: Outcome) -> None:
        if self._pending.pop(id(job), None) is not None and not self._closed.is_set():
            job.on_done(outcome)


def _stop(pool: ProcessPool) -> None:
    pool.stop()
    pool.join()


def _describe_exit(code: int) -> str:
    if code < 0:
        return f"killed by {signal.Signals(-code).name} (a crash, or out of memory)"
    return f"it exited with status {code % EXIT_0}"
