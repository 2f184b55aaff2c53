"""The threads of users' code: one with the event loop of all workflows, and one for each tool call."""

from __future__ import annotations

import asyncio
import ctypes
import threading
from collections.abc import Callable
from contextvars import ContextVar
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

from areal_jax.observe.threads import line_of, line_of_coroutine, reporting_thread

OWNER: ContextVar[Any | None] = ContextVar("OWNER", default=None)
"""The workflow of the code that runs (`workflow_runner`); a task that it creates belongs to the same one."""

MOST_TOOLS = 512
"""Maximum number of tools that run in threads at the same time, without those that are no longer awaited."""


class WorkflowThread:
    """An event loop in a daemon thread, which nothing that its tasks raise can end."""

    def __init__(self, fail: Callable[[BaseException], None]) -> None:
        """`fail(error)` is called if the thread ends by an error that no task raised."""
        self.loop = asyncio.new_event_loop()
        self.loop.set_task_factory(self._task)
        self.tool_slots = asyncio.Semaphore(MOST_TOOLS)
        self.gateway: Any = None
        self.blocked_s = 0.0
        """Seconds since which one task runs without awaiting anything, as counted by `look`."""
        self._owners: WeakKeyDictionary[asyncio.Task[Any], Any] = WeakKeyDictionary()
        self._asked = self._answered = 0
        self._is_over, self._fail = False, fail
        self.thread = reporting_thread("workflows", self._run, self._failed)
        self.thread.start()

    def do(self, function: Callable[..., Any], *arguments: Any) -> None:
        """Lets the thread call a function; callable from any thread."""
        self.loop.call_soon_threadsafe(function, *arguments)

    def look(self, elapsed_s: float) -> None:
        """Sets `blocked_s`; called by a thread that watches this one, `elapsed_s` after its last call."""
        if self._answered == self._asked:
            self.blocked_s, self._asked = 0.0, self._asked + 1
            self.do(self._answer)
        else:
            self.blocked_s += elapsed_s

    def blocker(self) -> Any:
        """Returns the episode of the task that runs now; None if no task runs, or one of no episode."""
        task = asyncio.current_task(self.loop)
        return self._owners.get(task) if task is not None else None

    def where(self, task: asyncio.Task[Any] | None) -> str:
        """Returns where a task waits or, if it runs now, where it is."""
        if task is None or asyncio.current_task(self.loop) is task:
            return line_of(self.thread)
        return line_of_coroutine(task.get_coro())  # pyright: ignore[reportArgumentType]

    def stop(self) -> None:
        """Ends the thread as soon as the running task awaits something."""
        self._is_over = True
        self.do(self.loop.stop)

    def abandon(self) -> None:
        """Ends the thread even within a task, by a SystemExit that Python code meets at its next line.

        Code in C meets it when it returns. Nothing that the thread does from now on may count.
        """
        self.stop()
        ident, error = ctypes.c_ulong(self.thread.ident or 0), ctypes.py_object(SystemExit)
        ctypes.pythonapi.PyThreadState_SetAsyncExc(ident, error)

    def _run(self) -> None:
        while not self._is_over:  # a task may also stop the loop
            try:
                self.loop.run_forever()
            except (SystemExit, KeyboardInterrupt):
                # asyncio gives them to the code that awaits the task, and then lets them end the loop, too.
                continue

    def _failed(self, error: BaseException) -> None:
        if not self._is_over:
            self._fail(error)

    def _answer(self) -> None:
        self._answered = self._asked

    def _task(self, loop: asyncio.AbstractEventLoop, work: Any, **own: Any) -> asyncio.Task[Any]:
        task = asyncio.Task(work, loop=loop, **own)
        if (owner := OWNER.get()) is not None:
            self._owners[task] = owner
            owner.tasks.add(task)
        return task


class ToolThreads:
    """Calls functions in daemon threads, and knows those that go on although their caller has given up.

    A process ends without waiting for such threads.
    """

    def __init__(self) -> None:
        self._running: dict[threading.Thread, asyncio.Future[Any]] = {}

    async def call(self, work: Callable[[], Any]) -> Any:
        """Returns `work()`, called in a thread, or raises what it raises."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Any] = loop.create_future()

        def run() -> None:
            found, error = None, None
            try:
                found = work()
            except StopIteration as caught:  # which no future takes
                error = RuntimeError(f"StopIteration: {caught}")
            except BaseException as caught:  # noqa: BLE001 - users' code; raised where it is awaited
                error = caught
            del self._running[threading.current_thread()]
            loop.call_soon_threadsafe(_settle, future, found, error)

        function = work.func if isinstance(work, partial) else work
        name = f"tool {getattr(function, '__qualname__', type(function).__name__)}"
        thread = threading.Thread(target=run, name=name, daemon=True)
        self._running[thread] = future
        thread.start()
        return await future

    def left(self, loop: asyncio.AbstractEventLoop) -> list[threading.Thread]:
        """Returns the threads with a result that nothing in `loop` awaits any more."""
        running = list(self._running.items())
        return [thread for thread, future in running if future.done() or future.get_loop() is not loop]


def _settle(future: asyncio.Future[Any], found: Any, error: BaseException | None) -> None:
    if future.done():  # cancelled
        return
    if error is not None:
        future.set_exception(error)
    else:
        future.set_result(found)
