"""Runs the workflows of a process: thousands of coroutines in one thread, and their tools in others."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Hashable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol

from areal_jax.control.events import EpisodeEnded, EpisodeFailed, Event
from areal_jax.episodes.conversation import Conversation
from areal_jax.episodes.episode import Episode
from areal_jax.episodes.errors import EpisodeError
from areal_jax.episodes.limits import Limits
from areal_jax.tasks.plain_json import readable
from areal_jax.tasks.scoring import checked
from areal_jax.tasks.task import Workflow
from areal_jax.tasks.tokenizers import Tokenizer
from areal_jax.types import Prompt, SampleId


class Gateway(Protocol):
    """What serves the chats of agents (`serving.episode_gateway`)."""

    def open(self, episode: Episode) -> tuple[str, Callable[[], None]]: ...

    async def stop(self) -> None: ...


MOST_TOOLS = 512
"""Maximum number of tools that run in threads at the same time."""
_STOP_S = 10.0
_GRACE_S = 1.0
"""Seconds that cancelled workflows have to end, at a close."""


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
    ) -> None:
        """`emit(event)` receives the workflows' events, in the order in which they happen.

        `make_gateway()`, called in the workflows' event loop, returns what serves the chats of agents; None:
        none are served.
        """
        self._make_gateway, self._gateway = make_gateway, None
        self._workflows, self._tokenizer, self._limits = workflows, tokenizer, limits
        self._emit, self._seed = emit, seed
        self._live: dict[SampleId, _Live] = {}
        self._loop = asyncio.new_event_loop()
        self._tools = ThreadPoolExecutor(MOST_TOOLS, thread_name_prefix="tool")
        self._thread = threading.Thread(target=self._loop.run_forever, name="workflows", daemon=True)
        self._thread.start()

    def begin(self, sample: SampleId, prompt: Prompt, conversation: Conversation) -> None:
        """Starts the sample's workflow, or does nothing if it runs; `conversation`: what it did before."""
        self._loop.call_soon_threadsafe(self._begin, sample, prompt, conversation)

    def answer(self, sample: SampleId, turn: int, conversation: Conversation) -> None:
        self._loop.call_soon_threadsafe(self._let, sample, ("turn", turn))

    def call(self, sample: SampleId, call: int) -> None:
        self._loop.call_soon_threadsafe(self._let, sample, ("call", call))

    def end(self, ordinal: int) -> None:
        """Cancels the workflows of a group; they emit nothing any more."""
        self._loop.call_soon_threadsafe(self._end, ordinal)

    def end_all(self) -> None:
        """Cancels all workflows, and returns once none of them emits anything any more."""
        done = asyncio.run_coroutine_threadsafe(self._ended_all(), self._loop)
        done.result(_STOP_S)

    def close(self) -> None:
        """Cancels all workflows and ends the thread; a tool that still runs in a thread is not waited for."""
        if self._thread.is_alive():
            asyncio.run_coroutine_threadsafe(self._stop(), self._loop)
            self._thread.join(_STOP_S)
        self._tools.shutdown(wait=False, cancel_futures=True)

    # --- in the thread of the workflows ---------------------------------------------------------------------

    def _begin(self, sample: SampleId, prompt: Prompt, conversation: Conversation) -> None:
        if sample not in self._live:
            of = self._loop, self._tools, self._emit, self._limits.timeout_s
            self._live[sample] = live = _Live(*of, self._opened)
            own: dict[str, Any] = dict(tokenizer=self._tokenizer, limits=self._limits, seed=self._seed)
            episode = Episode(sample, prompt, conversation, port=live, **own)
            live.task = self._loop.create_task(self._conduct(sample, episode, live))

    def _opened(self, episode: Episode) -> tuple[str, Callable[[], None]]:
        if self._gateway is None:
            if self._make_gateway is None:
                raise EpisodeError("agents with a base_url are served in runs and by `areal-jax eval` only")
            self._gateway = self._make_gateway()
        return self._gateway.open(episode)

    def _let(self, sample: SampleId, key: Hashable) -> None:
        if (live := self._live.get(sample)) is not None:
            live.let(key)

    def _end(self, ordinal: int) -> None:
        for sample in [sample for sample in self._live if sample.ordinal == ordinal]:
            self._live.pop(sample).cancel()

    async def _ended_all(self) -> None:
        for sample in list(self._live):
            self._live.pop(sample).cancel()

    async def _stop(self) -> None:
        tasks = [live.task for live in self._live.values() if live.task is not None]
        await self._ended_all()
        if tasks:  # a workflow may need several rounds of the loop to end
            await asyncio.wait(tasks, timeout=_GRACE_S)
        if self._gateway is not None:
            await self._gateway.stop()
        self._loop.call_soon(self._loop.stop)

    async def _conduct(self, sample: SampleId, episode: Episode, live: _Live) -> None:
        """Runs one workflow to its end, and emits what came of it."""
        prompt = episode.prompt
        try:
            async with live.timeout:
                reward = await self._workflows[prompt.task](prompt, episode)
            ended = _ended(episode, reward)
            await live.settled(episode)
        except asyncio.CancelledError:
            if live.is_over:
                return
            ended = EpisodeFailed(sample, "failed_episode", "the workflow cancelled itself")
        except EpisodeError as error:
            ended = EpisodeFailed(sample, error.reason, str(error))
        except BaseException as error:  # noqa: BLE001 - users' code, and it may exit: counted as failed
            message = readable(f"the workflow raised {type(error).__name__}: {error}")
            if live.timeout.expired():
                message = (
                    f"the workflow took longer than {self._limits.timeout_s:g} s between two turns; raise "
                    "episode.timeout_s, or make it faster"
                )
            ended = EpisodeFailed(sample, "failed_episode", message)
        live.end()
        if self._live.pop(sample, None) is live:
            self._emit(ended)


class _Live:
    """One running workflow: the events for which it waits, and the time that it has taken since."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        tools: ThreadPoolExecutor,
        emit: Callable[[Event], None],
        timeout_s: float,
        opened: Callable[[Episode], tuple[str, Callable[[], None]]],
    ) -> None:
        self._opened, self._url, self._end_chats = opened, "", lambda: None
        self._loop, self._tools, self._emit, self._timeout_s = loop, tools, emit, timeout_s
        self.task: asyncio.Task[None] | None = None
        self.is_over = self._is_returned = False
        self._let: dict[Hashable, asyncio.Event] = {}
        self.timeout = asyncio.timeout(timeout_s)

    def emit(self, event: Event) -> None:
        if not self.is_over:  # a workflow may go on although it was cancelled
            self._emit(event)

    def let(self, key: Hashable) -> None:
        self._let.setdefault(key, asyncio.Event()).set()

    def base_url(self, episode: Episode) -> str:
        if not self._url:
            self._url, self._end_chats = self._opened(episode)
        return self._url

    def end(self) -> None:
        """Nothing that the workflow or its agent does from now on counts."""
        self.is_over = True
        self._end_chats()

    async def settled(self, episode: Episode) -> None:
        """Ends the chats, and waits for a turn that a host still samples, as of a client that has left."""
        self._is_returned = True
        self._end_chats()
        if episode.open_turn is not None:
            await self._wait(("turn", episode.open_turn))

    def cancel(self) -> None:
        self.end()
        if self.task is not None:
            self.task.cancel()

    async def turn_over(self, turn: int) -> None:
        # A host's time is not the workflow's, and has deadlines of its own.
        self.timeout.reschedule(None)
        await self._wait(("turn", turn))
        if not self._is_returned:  # else a task that the workflow left behind
            self.timeout.reschedule(self._loop.time() + self._timeout_s)

    async def call_allowed(self, call: int) -> None:
        await self._wait(("call", call))

    async def in_thread(self, work: Callable[[], Any]) -> Any:
        return await self._loop.run_in_executor(self._tools, work)

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
    of = value.value, tuple(value.parts.items()), value.note
    return EpisodeEnded(episode.sample, *of, "length" if episode.is_cut else "stop")
