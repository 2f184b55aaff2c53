"""Runs the workflows of a process: thousands of coroutines in one thread, and their tools in others.

Workflows are users' code, which may raise anything, refuse to be cancelled, or block the thread of all. A
second thread watches: an episode ends at its deadline whatever its workflow does, and a thread that is still
blocked then is left to the workflow that blocks it, while the others run again in a new thread.
"""

from __future__ import annotations

import asyncio
import sys
import threading
import time
from collections.abc import Callable, Hashable, Mapping
from contextvars import Context
from typing import Any, Protocol
from weakref import WeakSet

from areal_jax.control.events import EpisodeEnded, EpisodeFailed, Event
from areal_jax.episodes.conversation import Conversation
from areal_jax.episodes.episode import Episode
from areal_jax.episodes.errors import EpisodeError
from areal_jax.episodes.limits import Limits
from areal_jax.episodes.workflow_threads import OWNER, ToolThreads, WorkflowThread
from areal_jax.observe.threads import line_of, reporting_thread
from areal_jax.tasks.plain_json import readable
from areal_jax.tasks.scoring import checked
from areal_jax.tasks.task import Workflow
from areal_jax.tasks.tokenizers import Tokenizer
from areal_jax.types import Prompt, SampleId


class Gateway(Protocol):
    """What serves the chats of agents (`serving.episode_gateway`)."""

    def open(self, episode: Episode) -> tuple[str, Callable[[], None]]: ...

    async def stop(self) -> None: ...


MOST_LEFT = 64
"""Maximum number of workflows, tools and blocked threads that go on although their time is over."""

NOTED_S = 5.0
"""A workflow that blocks the thread of all for this many seconds is reported."""

TICK_S = 1.0
"""Seconds between two looks at the workflows, at most."""

_STOP_S = 10.0
_GRACE_S = 1.0
"""Seconds that cancelled workflows have to end."""


def _raise(error: BaseException) -> None:
    raise error


def _print(text: str) -> None:
    sys.stderr.write(f"{text}\n")


class WorkflowRunner:
    """Conducts the episodes of one process; its methods may be called from any thread, and return at once."""

    def __init__(
        self,
        workflows: Mapping[str, Workflow],
        tokenizer: Tokenizer,
        limits: Limits,
        emit: Callable[[Event], None],
        seed: int,
        *,
        make_gateway: Callable[[], Gateway] | None = None,
        fail: Callable[[BaseException], None] = _raise,
        note: Callable[[str], None] = _print,
    ) -> None:
        """`emit(event)` receives the workflows' events, in the order in which they happen.

        `make_gateway()`, called in the workflows' event loop, returns what serves the chats of agents; None:
        none are served. `fail(error)` is called if no further episode can be conducted: a thread ended by an
        error, or more than MOST_LEFT workflows and tools cannot be ended. `note(text)` gets a line on each
        workflow or tool that blocks or cannot be ended. Both are called in other threads.
        """
        self._make_gateway, self._fail, self._note = make_gateway, fail, note
        self._workflows, self._tokenizer, self.limits = workflows, tokenizer, limits
        self._emit, self._seed = emit, seed
        self._lock = threading.RLock()
        """Guards `_live` and `_thread`; held while an event is emitted, so that none follows an end."""
        self._live: dict[SampleId, _Live] = {}
        self.tools = ToolThreads()
        self._thread = WorkflowThread(fail)
        self._over: list[tuple[asyncio.Task[Any], _Live, float]] = []
        """Cancelled tasks, with their episodes and since when."""
        self._blocked: list[WorkflowThread] = []
        """Threads that were left to a workflow that blocks."""
        self._noted: set[object] = set()
        self._closed = threading.Event()
        self._watcher = reporting_thread("workflow-watch", self._watch, fail)
        self._watcher.start()

    def begin(self, sample: SampleId, prompt: Prompt, conversation: Conversation) -> None:
        """Starts the sample's workflow, or does nothing if it runs; `conversation`: what it did before."""
        with self._lock:
            if sample not in self._live:
                self._begin(sample, prompt, conversation)

    def answer(self, sample: SampleId, turn: int, conversation: Conversation) -> None:
        self._let(sample, ("turn", turn))

    def call(self, sample: SampleId, call: int) -> None:
        self._let(sample, ("call", call))

    def end(self, ordinal: int) -> None:
        """Cancels the workflows of a group; they emit nothing any more."""
        with self._lock:
            self._end([live for live in self._live.values() if live.sample.ordinal == ordinal])

    def end_all(self) -> None:
        """Cancels all workflows; none of them emits anything any more."""
        with self._lock:
            self._end(list(self._live.values()))

    def close(self) -> None:
        """Cancels all workflows and ends the thread; a tool that still runs in a thread is not waited for."""
        self._closed.set()
        with self._lock:
            lives = list(self._live.values())
            self._end(lives)
        thread = self._thread
        if thread.thread.is_alive():
            thread.do(lambda: thread.loop.create_task(self._stop(thread, lives)))
            thread.thread.join(_STOP_S)
            if thread.thread.is_alive():
                self._note(f"a workflow still blocks its thread at {line_of(thread.thread)}; it is left")
        self._watcher.join(_STOP_S)

    # --- with the lock held ---------------------------------------------------------------------------------

    def _begin(self, sample: SampleId, prompt: Prompt, conversation: Conversation) -> None:
        self._live[sample] = live = _Live(self, sample, prompt, conversation, self._thread)
        self._thread.do(self._launch, live)

    def _end(self, lives: list[_Live]) -> None:
        for live in lives:
            live.is_over = True
            del self._live[live.sample]
            live.thread.do(self._cancel, live)

    def _let(self, sample: SampleId, key: Hashable) -> None:
        with self._lock:
            if (live := self._live.get(sample)) is not None:
                live.thread.do(live.let, key)

    # --- in the thread of the workflows ---------------------------------------------------------------------

    def _launch(self, live: _Live) -> None:
        if not live.is_over:
            live.rest()
            OWNER.set(live)  # in the context of this call alone, which the task inherits
            live.task = live.thread.loop.create_task(self._conduct(live))

    def opened(self, thread: WorkflowThread, episode: Episode) -> tuple[str, Callable[[], None]]:
        if thread.gateway is None:
            if self._make_gateway is None:
                raise EpisodeError("agents with a base_url are served in runs and by `areal-jax eval` only")
            # In a context of its own, since its tasks are of no episode.
            thread.gateway = Context().run(self._make_gateway)
        return thread.gateway.open(episode)

    def emitted(self, live: _Live, event: Event) -> None:
        with self._lock:
            if not live.is_over:  # a workflow may go on although it was cancelled
                self._emit(event)

    def _finish(self, live: _Live, event: Event) -> None:
        """Emits the end of an episode, unless it has ended, and cancels what is left of it."""
        with self._lock:
            if not live.is_over:
                live.is_over = True
                del self._live[live.sample]
                self._emit(event)
                live.thread.do(self._cancel, live)

    def _cancel(self, live: _Live) -> None:
        live.end_chats()
        for task in [task for task in live.tasks if not task.done()]:
            task.cancel()
            self._over.append((task, live, time.monotonic()))

    async def _stop(self, thread: WorkflowThread, lives: list[_Live]) -> None:
        tasks = [live.task for live in lives if live.task is not None and live.thread is thread]
        try:
            if tasks:  # a workflow may need several rounds of the loop to end
                await asyncio.wait(tasks, timeout=_GRACE_S)
            if thread.gateway is not None:
                await thread.gateway.stop()
        finally:
            thread.stop()

    async def _conduct(self, live: _Live) -> None:
        """Runs one workflow to its end, and emits what came of it."""
        sample, prompt = live.sample, live.prompt
        try:
            episode = Episode(
                sample,
                prompt,
                live.conversation,
                tokenizer=self._tokenizer,
                limits=self.limits,
                port=live,
                seed=self._seed,
            )
            reward = await self._workflows[prompt.task](prompt, episode)
            ended = _ended(episode, reward)
            await live.settled(episode)
        except asyncio.CancelledError:
            ended = EpisodeFailed(sample, "failed_episode", "the workflow cancelled itself")
        except EpisodeError as error:
            ended = EpisodeFailed(sample, error.reason, str(error))
        except BaseException as error:  # noqa: BLE001 - users' code, and it may exit: counted as failed
            message = readable(f"the workflow raised {type(error).__name__}: {error}")
            ended = EpisodeFailed(sample, "failed_episode", message)
        self._finish(live, ended)

    # --- in the thread that watches -------------------------------------------------------------------------

    def _watch(self) -> None:
        tick_s = min(TICK_S, self.limits.timeout_s / 4)
        last_s = time.monotonic()
        while not self._closed.wait(tick_s):
            now_s = time.monotonic()
            elapsed_s, last_s = now_s - last_s, now_s
            # If this thread is late, the machine or the process paused, and the workflows could do nothing.
            self._postpone(max(0.0, elapsed_s - 2 * tick_s))
            self._look(min(elapsed_s, 2 * tick_s))
            self._count()

    def _look(self, elapsed_s: float) -> None:
        """Ends the episodes with a deadline that is over, even if one of them blocks the thread."""
        thread = self._thread
        thread.look(elapsed_s)
        if not thread.blocked_s:
            self._noted.discard(thread)
            with self._lock:
                for live in [live for live in self._live.values() if live.is_late]:
                    self._finish(live, self._late(live, thread.where(live.task)))
            return
        blocker, where = thread.blocker(), line_of(thread.thread)
        self._postpone(elapsed_s, blocker)
        said = f"{_named(blocker)} has blocked the thread of all workflows for {thread.blocked_s:.0f} s at"
        if thread.blocked_s >= NOTED_S and thread not in self._noted:
            self._noted.add(thread)
            self._note(f"{said} {where}; let episode.tool or episode.in_thread call what takes long")
        is_late = isinstance(blocker, _Live) and not blocker.is_over and blocker.is_late
        if is_late or thread.blocked_s > max(self.limits.timeout_s, NOTED_S):
            self._leave(thread, blocker, where)
            self._note(f"{said} {where}; it is left there, and the other workflows run again")

    def _postpone(self, seconds: float, but: _Live | None = None) -> None:
        """Moves the deadlines of all episodes that could do nothing for so many seconds."""
        with self._lock:
            for live in self._live.values():
                if live is not but and live.deadline_s is not None:
                    live.deadline_s += seconds

    def _leave(self, thread: WorkflowThread, blocker: _Live | None, where: str) -> None:
        """Fails the episode that blocks the thread, and runs the others again in a new one."""
        with self._lock:
            lives = list(self._live.values())
            if blocker is not None and self._live.get(blocker.sample) is blocker:
                self._emit(self._late(blocker, where))
            for live in lives:
                live.is_over = True
            self._live.clear()
            self._blocked.append(thread)
            self._thread = WorkflowThread(self._fail)
            for live in lives:
                if live is not blocker:
                    self._begin(live.sample, live.prompt, live.conversation)
        thread.abandon()

    def _late(self, live: _Live, where: str) -> EpisodeFailed:
        message = (
            f"the workflow took longer than {self.limits.timeout_s:g} s between two turns; raise "
            f"episode.timeout_s, or make it faster. It was at {where}"
        )
        return EpisodeFailed(live.sample, "failed_episode", message)

    def _count(self) -> None:
        """Reports what goes on although its time is over; raises EpisodeError if that is too much."""
        now_s, thread = time.monotonic(), self._thread
        count = len(self._over)  # other threads append
        over = [one for one in self._over[:count] if not one[0].done() and one[1].thread is thread]
        self._over[:count] = over
        left: dict[object, Callable[[], str]] = {
            task: lambda task=task, live=live: f"{_named(live)}, at {thread.where(task)}"
            for task, live, since_s in over
            if now_s - since_s > _GRACE_S
        }
        for tool in self.tools.left(thread.loop):
            left[tool] = lambda tool=tool: f"the {tool.name}, at {line_of(tool)}"
        self._blocked = [one for one in self._blocked if one.thread.is_alive()]
        for one in self._blocked:
            left[one] = lambda one=one: f"a blocked thread, at {line_of(one.thread)}"
        new = [said() for key, said in left.items() if key not in self._noted]
        self._noted = {key for key in self._noted if key in left or key is thread} | set(left)
        if new:
            self._note(
                f"cannot be ended, and goes on although its time is over: {'; '.join(new[:3])}. "
                f"{len(left)} of at most {MOST_LEFT} workflows and tools of this process"
            )
        if len(left) > MOST_LEFT:
            raise EpisodeError(
                f"{len(left)} workflows and tools of this process go on although their time is over, more "
                f"than {MOST_LEFT}, such as {'; '.join(said() for said in list(left.values())[-3:])}; let "
                "them end when they are cancelled, or give what they wait for a time limit"
            )


def _named(live: _Live | None) -> str:
    if live is None:
        return "code of no single workflow"
    return f"the workflow of sample {'/'.join(map(str, live.sample))} (task {live.prompt.task})"


class _Live:
    """One running workflow: the events for which it waits, and until when it has to go on."""

    def __init__(
        self,
        runner: WorkflowRunner,
        sample: SampleId,
        prompt: Prompt,
        conversation: Conversation,
        thread: WorkflowThread,
    ) -> None:
        self.sample, self.prompt, self.conversation, self.thread = sample, prompt, conversation, thread
        self._runner, self._url, self.end_chats = runner, "", lambda: None
        self.task: asyncio.Task[None] | None = None
        self.tasks: WeakSet[asyncio.Task[Any]] = WeakSet()
        """`task`, and those that the workflow has begun."""
        self.is_over = self._is_returned = False
        """Whether nothing that the workflow or its agent does from now on counts."""
        self.deadline_s: float | None = None
        """Time at which the episode fails; None while a host, which has deadlines of its own, samples."""
        self._let: dict[Hashable, asyncio.Event] = {}

    @property
    def is_late(self) -> bool:
        return self.deadline_s is not None and time.monotonic() > self.deadline_s

    def rest(self) -> None:
        """Gives the workflow all its time again."""
        self.deadline_s = time.monotonic() + self._runner.limits.timeout_s

    def emit(self, event: Event) -> None:
        self._runner.emitted(self, event)

    def let(self, key: Hashable) -> None:
        self._let.setdefault(key, asyncio.Event()).set()

    def base_url(self, episode: Episode) -> str:
        if not self._url:
            self._url, self.end_chats = self._runner.opened(self.thread, episode)
        return self._url

    async def settled(self, episode: Episode) -> None:
        """Ends the chats, and waits for a turn that a host still samples, as of a client that has left."""
        self._is_returned, self.deadline_s = True, None
        self.end_chats()
        if episode.open_turn is not None:
            await self._wait(("turn", episode.open_turn))

    async def turn_over(self, turn: int) -> None:
        self.deadline_s = None
        await self._wait(("turn", turn))
        if not self._is_returned:  # else a task that the workflow left behind
            self.rest()

    async def call_allowed(self, call: int) -> None:
        await self._wait(("call", call))

    async def in_thread(self, work: Callable[[], Any]) -> Any:
        async with self.thread.tool_slots:
            return await self._runner.tools.call(work)

    async def _wait(self, key: Hashable) -> None:
        await self._let.setdefault(key, asyncio.Event()).wait()
        self._let.pop(key, None)


def _ended(episode: Episode, reward: Any) -> EpisodeEnded:
    """Returns the end of the episode, for which the workflow returned `reward`; checks the reward."""
    if reward is None:
        return EpisodeEnded(episode.sample, None)
    if not episode.turns:
        raise EpisodeError("the workflow returned a reward before its first turn; call episode.generate")
    value = checked(reward)
    return EpisodeEnded(
        episode.sample,
        reward=value.value,
        parts=tuple(value.parts.items()),
        note=value.note,
        stop_reason="length" if episode.is_cut else "stop",
    )
