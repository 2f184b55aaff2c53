"""Between the decode loop's thread and the event loop of the clients: requests in, tokens out.

`Streams` drives the one host in its own thread (`run`); everything else is called in the event loop. What
the host says in one step crosses over in one call. Nothing that a client does or leaves undone makes the host
wait: a stream that is not read has room for so many tokens, and is ended when it is full.
"""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections import deque
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from areal_jax.control.events import Event, SampleFailed, SampleFinished
from areal_jax.generation.commands import Command, Start, Stop, Tokens
from areal_jax.generation.host import Host
from areal_jax.generation.serving_requests import Ask, RequestError, invalid
from areal_jax.types import SampleId, Trajectory

IDLE_S = 0.5
"""How long an idle host sleeps at most before it looks for a newer version again."""

ORDINALS = 2**31

ENDED = "the generation host has ended, and its log says why; ask again once it is up"


@dataclass(frozen=True)
class Sampled:
    """What one decode call added to a member."""

    member: int
    tokens: Tokens


@dataclass(frozen=True)
class Finished:
    member: int
    stop_reason: str
    interruptions: int
    is_reproducible: bool


Item = Sampled | Finished


class Stream:
    """What one request hears: its members' tokens as they are sampled, each member's end last."""

    def __init__(self, samples: tuple[SampleId, ...], room_tokens: int) -> None:
        self.unfinished = set(samples)
        self._room_tokens, self._unread_tokens = room_tokens, 0
        self._items: deque[Item] = deque()
        self._error: RequestError | None = None
        self._news = asyncio.Event()

    async def items(self) -> AsyncIterator[Item]:
        """Until every member has ended. Raises RequestError as soon as the request has failed."""
        while True:
            if self._error is not None:
                raise self._error
            if self._items:
                item = self._items.popleft()
                if isinstance(item, Sampled):
                    self._unread_tokens -= len(item.tokens.tokens)
                yield item
            elif not self.unfinished:
                return
            else:
                self._news.clear()
                await self._news.wait()

    def has_room(self, item: Sampled) -> bool:
        return self._unread_tokens + len(item.tokens.tokens) <= self._room_tokens

    def push(self, item: Item) -> None:
        if isinstance(item, Sampled):
            self._unread_tokens += len(item.tokens.tokens)
        self._items.append(item)
        self._news.set()

    def fail(self, code: str, message: str) -> None:
        """The reader hears the error next, whatever it has not read. The first one stays."""
        self._error = self._error or RequestError(code, message)
        self._items.clear()
        self._news.set()


class Streams:
    """`queue`: samples that may wait beyond the slots; `room_tokens`: what a stream may leave unread.

    `emit` and `on_tokens` are what the host is made with; `attach` then names it.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, *, slots: int, queue: int, room_tokens: int) -> None:
        self._loop, self._slots, self._queue, self._room_tokens = loop, slots, queue, room_tokens
        self._ordinals = itertools.count()
        self._streams: dict[SampleId, Stream] = {}
        self._named: dict[str, Stream] = {}
        self._heard: list[tuple[SampleId, Item | str]] = []
        self._wake = threading.Event()
        self._host: Host | None = None
        self.is_live = True

    def attach(self, host: Host) -> None:
        self._host = host

    @property
    def host(self) -> Host:
        assert self._host is not None, "attach the host that streams are of"
        return self._host

    # --- in the host's thread -------------------------------------------------------------------------------

    def run(self) -> None:
        """Drive the host until `stop`; whatever ends it, every request in progress is told."""
        try:
            while self.host.take_commands():
                self.host.step()
                self._cross()
                if not self.host.has_work:
                    self._wake.wait(IDLE_S)
                    self._wake.clear()
        finally:
            self.is_live = False
            self._loop.call_soon_threadsafe(self._end_all)

    def on_tokens(self, sample: SampleId, tokens: Tokens) -> None:
        self._heard.append((sample, Sampled(sample.member, tokens)))

    def emit(self, event: Event, trajectory: Trajectory | None) -> None:
        if isinstance(event, SampleFailed):
            self._heard.append((event.sample, event.reason))
        elif isinstance(event, SampleFinished) and trajectory is not None:
            t = trajectory
            end = Finished(t.sample.member, t.stop_reason, t.interruptions, t.is_reproducible)
            self._heard.append((t.sample, end))

    def _cross(self) -> None:
        if self._heard:
            heard, self._heard = self._heard, []
            self._loop.call_soon_threadsafe(self._deliver, heard)

    # --- in the event loop ----------------------------------------------------------------------------------

    @contextmanager
    def submitted(self, ask: Ask) -> Iterator[Stream]:
        """The request's stream; leaving the block frees what it still holds of the host.

        Raises RequestError where the queue is full, the host has ended, or the request's name is in use.
        """
        self._require_room(ask)
        ordinal = next(self._ordinals) % ORDINALS
        samples = tuple(SampleId(ordinal, member) for member in range(ask.n))
        stream = Stream(samples, self._room_tokens)
        self._streams.update(dict.fromkeys(samples, stream))
        if ask.request_id:
            self._named[ask.request_id] = stream
        self.tell(
            Start(
                samples,
                ask.prompt,
                ask.min_version,
                sampling=ask.sampling,
                penalties=ask.penalties,
                seed=ask.seed,
                stop_tokens=ask.stop_tokens,
                drawn_as=None if ask.seed is None else 0,
            )
        )
        try:
            yield stream
        finally:
            self._release(stream)
            if ask.request_id:
                del self._named[ask.request_id]

    def cancel(self, request_id: str) -> bool:
        """End the request of that name with CANCELLED; whether there was one."""
        stream = self._named.get(request_id)
        if stream is None:
            return False
        self._fail(stream, "CANCELLED", f"request_id={request_id!r} was cancelled by its name")
        return True

    def tell(self, command: Command) -> None:
        self.host.inbox.put(command)
        self.wake()

    def wake(self) -> None:
        """An idle host looks at once whether there is something to do."""
        self._wake.set()

    @property
    def open_samples(self) -> int:
        """Asked for, and neither ended nor given up."""
        return len(self._streams)

    def _require_room(self, ask: Ask) -> None:
        if not self.is_live:
            raise RequestError("UNAVAILABLE", ENDED)
        if ask.request_id in self._named:
            raise invalid(f"request_id={ask.request_id!r} is in use; give each request its own, or none")
        room = self._slots + self._queue - self.open_samples
        if ask.n > room:
            raise RequestError(
                "RESOURCE_EXHAUSTED",
                f"{self.open_samples} samples are in {self._slots} slots and a queue of {self._queue}, which "
                f"leaves room for {room}, and {ask.n} are asked for; ask again later",
            )
        latest = self.host.statistics().version
        if ask.min_version > latest:
            raise RequestError(
                "FAILED_PRECONDITION",
                f"min_version={ask.min_version} is not served yet, {latest} is; ask again after the swap",
            )

    def _deliver(self, heard: list[tuple[SampleId, Item | str]]) -> None:
        for sample, item in heard:
            stream = self._streams.get(sample)
            if stream is None:  # its client has gone
                continue
            if isinstance(item, str):
                self._fail(stream, "RESOURCE_EXHAUSTED", item)
            elif isinstance(item, Finished):
                del self._streams[sample]
                stream.unfinished.discard(sample)
                stream.push(item)
            elif stream.has_room(item):
                stream.push(item)
            else:
                self._fail(
                    stream,
                    "RESOURCE_EXHAUSTED",
                    f"more than {self._room_tokens} tokens wait to be read; read faster, or ask for less at "
                    "once",
                )

    def _fail(self, stream: Stream, code: str, message: str) -> None:
        """The request ends with an error, and its slots are free for others before its reader knows."""
        stream.fail(code, message)
        self._release(stream)

    def _release(self, stream: Stream) -> None:
        """The host decodes no further for what the request still holds."""
        if stream.unfinished:
            for sample in stream.unfinished:
                self._streams.pop(sample, None)
            if self.is_live:
                self.tell(Stop(tuple(stream.unfinished)))
            stream.unfinished.clear()

    def _end_all(self) -> None:
        for stream in set(self._streams.values()):
            self._fail(stream, "UNAVAILABLE", ENDED)
