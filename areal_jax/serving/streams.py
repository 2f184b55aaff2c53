"""Connects the decode loop's thread with the clients' event loop: requests in, tokens out.

In `areal-jax serve`, a thread runs the host's decode loop by `Streams.run`; in a training run, the run drives
the host and `Streams.beside` receives the events of clients' samples. Requests are submitted and cancelled in
the event loop. No client can make the host wait: a stream buffers a limited number of unread tokens, and ends
with an error when the buffer is full.
"""

from __future__ import annotations

import asyncio
import itertools
from collections import deque
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from dataclasses import replace

from areal_jax.control.events import Event, SampleFailed
from areal_jax.generation.admission import UNCOMPILED
from areal_jax.generation.commands import InboxCommand, Stop, Tokens
from areal_jax.generation.host import Emit, Host
from areal_jax.serving.requests import Ask, RequestError, invalid
from areal_jax.types import SampleId, Trajectory

ORDINALS = 2**31

ENDED = "the generation host has ended (its log has the reason); retry once it is restarted"


Item = tuple[int, Tokens | Trajectory]
"""(number of the completion in the request, from 0; new tokens, or the trajectory of an ended completion)"""


class Stream:
    """The output of one request: items with new tokens and, for each ended completion, its trajectory.

    `samples`: the ids of the request's completions; `room_tokens`: maximum number of tokens that the client
    has not read yet.
    """

    def __init__(self, samples: tuple[SampleId, ...], room_tokens: int) -> None:
        self.unfinished = set(samples)
        self._room_tokens, self._unread_tokens = room_tokens, 0
        self._items: asyncio.Queue[Item | RequestError] = asyncio.Queue()

    async def items(self) -> AsyncIterator[Item]:
        """Yields items until every completion has ended. Raises RequestError once the request has failed."""
        while self.unfinished or not self._items.empty():
            item = await self._items.get()
            if isinstance(item, RequestError):
                raise item
            if isinstance(item[1], Tokens):
                self._unread_tokens -= len(item[1].tokens)
            yield item

    def has_room(self, tokens: Tokens) -> bool:
        return self._unread_tokens + len(tokens.tokens) <= self._room_tokens

    def push(self, member: int, output: Tokens | Trajectory) -> None:
        if isinstance(output, Tokens):
            self._unread_tokens += len(output.tokens)
        self._items.put_nowait((member, output))

    def fail(self, code: str, message: str) -> None:
        """Drops unread items, and makes the next read raise RequestError(code, message).

        If `fail` was called before, the error of the first call is raised.
        """
        error = RequestError(code, message)
        while not self._items.empty():
            unread = self._items.get_nowait()
            error = unread if isinstance(unread, RequestError) else error
        self._items.put_nowait(error)


class Streams:
    """The streams of all open requests to one generation host.

    `loop`: the clients' event loop; `slots`: how many samples of requests the host decodes at once; `queue`:
    maximum number of samples that wait for a slot; `room_tokens`: maximum number of unread tokens of a
    request. Construct the host with the methods `emit` (or `beside`) and `hear` of this object as callbacks,
    then assign the host to `host`.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, *, slots: int, queue: int, room_tokens: int) -> None:
        self._loop, self._slots, self._queue, self._room_tokens = loop, slots, queue, room_tokens
        self._ordinals = itertools.count()
        self._streams: dict[SampleId, Stream] = {}
        self._named: dict[str, Stream] = {}
        self._heard: deque[tuple[SampleId, Tokens | Trajectory | str]] = deque()
        self.host: Host
        self.is_live = True

    # --- in the host's thread -------------------------------------------------------------------------------

    def run(self) -> None:
        """Runs the host's decode loop until an exception, or a Stop without samples, ends it; calls `end`."""
        try:
            self.host.run(is_idle_bounded=False)
        finally:
            self.end()

    def end(self) -> None:
        """Ends every request in progress with status UNAVAILABLE, and refuses later requests."""
        self.is_live = False
        self._loop.call_soon_threadsafe(self._end_all)

    def beside(self, emit: Emit) -> Emit:
        """Returns the event callback for the host of a training run that also serves clients.

        The callback passes events of clients' samples to this object, and all other events to `emit`, the
        run's callback.
        """

        def emit_both(event: Event, trajectory: Trajectory | None) -> None:
            sample = getattr(event, "sample", None)
            is_request = sample is not None and sample.ordinal < 0
            (self.emit if is_request else emit)(event, trajectory)

        return emit_both

    def emit(self, event: Event, trajectory: Trajectory | None) -> None:
        if isinstance(event, SampleFailed):
            self.hear(event.sample, event.reason)
        elif trajectory is not None:
            self.hear(trajectory.sample, trajectory)

    def hear(self, sample: SampleId, output: Tokens | Trajectory | str) -> None:
        """Passes a sample's new tokens, final trajectory or reason of failure to the request's stream."""
        self._heard.append((sample, output))
        # A delivery takes all that was heard before it, so one that has not begun yet takes this too.
        if len(self._heard) == 1:
            self._loop.call_soon_threadsafe(self._deliver)

    # --- in the event loop ----------------------------------------------------------------------------------

    @contextmanager
    def submitted(self, ask: Ask) -> Iterator[Stream]:
        """Context manager that submits a request and yields its stream; at exit, stops unfinished samples.

        Raises RequestError if the queue has too little space, the host has ended, the request_id is in use,
        or the request's min_version is newer than the served version.
        """
        self._require_room(ask)
        ordinal = -1 - next(self._ordinals) % ORDINALS  # negative: a run's prompts count from 0
        samples = tuple(SampleId(ordinal, member) for member in range(ask.n))
        stream = Stream(samples, self._room_tokens)
        self._streams.update(dict.fromkeys(samples, stream))
        if ask.request_id:
            self._named[ask.request_id] = stream
        self.tell(replace(ask.start, samples=samples))
        try:
            yield stream
        finally:
            self._release(stream)
            if ask.request_id:
                del self._named[ask.request_id]

    def cancel(self, request_id: str) -> bool:
        """Ends the open request `request_id` with status CANCELLED; returns whether it was open."""
        stream = self._named.get(request_id)
        if stream is None:
            return False
        self._fail(stream, "CANCELLED", f"request_id={request_id!r} was cancelled by a request to /cancel")
        return True

    def tell(self, command: InboxCommand) -> None:
        self.host.inbox.put(command)

    @property
    def open_samples(self) -> int:
        """Number of requested samples that have neither ended nor been cancelled."""
        return len(self._streams)

    def _require_room(self, ask: Ask) -> None:
        if not self.is_live:
            raise RequestError("UNAVAILABLE", ENDED)
        if ask.request_id in self._named:
            raise invalid(f"request_id={ask.request_id!r} is in use; give each request its own id, or none")
        room = self._slots + self._queue - self.open_samples
        if ask.n > room:
            raise RequestError(
                "RESOURCE_EXHAUSTED",
                f"{self.open_samples} open samples leave space for {room} in {self._slots} slots and a queue "
                f"of {self._queue}, but {ask.n} were requested; retry later",
            )
        latest = self.host.statistics().version
        # Before the host has its first version a request waits for it, as rollouts do.
        if ask.start.min_version > max(latest, 0):
            raise RequestError(
                "FAILED_PRECONDITION",
                f"min_version={ask.start.min_version} is not served yet, because the host has version "
                f"{latest}; retry once it has the newer version",
            )

    def _deliver(self) -> None:
        while self._heard:
            sample, output = self._heard.popleft()
            stream = self._streams.get(sample)
            if stream is None:  # its request has already ended
                continue
            if isinstance(output, str):
                is_final = output.startswith(UNCOMPILED)
                self._fail(stream, "INTERNAL" if is_final else "RESOURCE_EXHAUSTED", output)
            elif isinstance(output, Trajectory):
                del self._streams[sample]
                stream.unfinished.discard(sample)
                stream.push(sample.member, output)
            elif stream.has_room(output):
                stream.push(sample.member, output)
            else:
                self._fail(
                    stream,
                    "RESOURCE_EXHAUSTED",
                    f"the request ends, because more than {self._room_tokens} of its tokens were unread; "
                    "read the stream faster, or request fewer completions at once",
                )

    def _fail(self, stream: Stream, code: str, message: str) -> None:
        """Ends `stream`'s request with status `code`, and frees the request's slots.

        The host gets the command to free the slots before the client reads the status.
        """
        stream.fail(code, message)
        self._release(stream)

    def _release(self, stream: Stream) -> None:
        """Makes the host stop decoding the unfinished samples of `stream`'s request."""
        if stream.unfinished:
            for sample in stream.unfinished:
                self._streams.pop(sample, None)
            if self.is_live:
                self.tell(Stop(tuple(stream.unfinished)))
            stream.unfinished.clear()

    def _end_all(self) -> None:
        for stream in set(self._streams.values()):
            self._fail(stream, "UNAVAILABLE", ENDED)
