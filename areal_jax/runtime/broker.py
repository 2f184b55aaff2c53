"""Boxes of messages in Redis: how the processes of a run, on any number of machines, speak to each other.

A box is a stream with one consumer group. A message stays until who took it says done, so it is delivered at
least once: again to the same reader after a restart, to another where several share the box and one died.
A box is bounded, so whoever posts waits for readers that are behind. Bodies are msgpack.
"""

from __future__ import annotations

import os
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

import msgpack

from areal_jax.generation.serving_secret import VARIABLE
from areal_jax.trajectories.journal import pack, unpack
from areal_jax.trajectories.redis_link import Link, ResponseError, text_of
from areal_jax.types import ArealError

T = TypeVar("T")

LENGTH = 4096
"""Messages that a box holds, taken ones included, until `done` removes them."""

_GROUP = "readers"
_BLOCK_S = 2.0  # one answer's longest wait, well below what counts as a lost connection
_POLL_S = 0.02

_POST = """
for at = 2, #ARGV do
  if redis.call('XLEN', KEYS[1]) >= tonumber(ARGV[1]) then return at - 2 end
  redis.call('XADD', KEYS[1], '*', 'body', ARGV[at])
end
return #ARGV - 1
"""

_DONE = """
redis.call('XACK', KEYS[1], ARGV[1], unpack(ARGV, 2))
redis.call('XDEL', KEYS[1], unpack(ARGV, 2))
"""

_NOW = """
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
"""

_BEAT = (
    _NOW
    + """
redis.call('HSET', KEYS[1], ARGV[1], string.format('%.0f', now + ARGV[2]) .. ' ' .. ARGV[3])
"""
)

_BEATS = (
    _NOW
    + """
local found, alive = redis.call('HGETALL', KEYS[1]), {}
for at = 1, #found, 2 do
  local space = string.find(found[at + 1], ' ', 1, true)
  if tonumber(string.sub(found[at + 1], 1, space - 1)) < now then
    redis.call('HDEL', KEYS[1], found[at])
  else
    alive[#alive + 1] = found[at]
    alive[#alive + 1] = string.sub(found[at + 1], space + 1)
  end
end
return alive
"""
)


class BrokerError(ArealError):
    """A message that cannot be posted, taken or read; the text names the box and the remedy."""


class Message(NamedTuple):
    id: str
    body: Any


@dataclass
class _Reading:
    """What this process knows of one reader of one box."""

    held: set[str] = field(default_factory=set)
    """Ids that were handed out and are not done."""
    is_sure: bool = False
    """Nothing that the reader took is left over from a process before, or from a lost answer."""
    claimed_s: float = -float("inf")
    guard: threading.Lock = field(default_factory=threading.Lock)


class Broker:
    """One process' way to the boxes of a run. Safe to share between threads. Raises BrokerError."""

    def __init__(
        self, url: str, run: str, *, deadline_s: float = 60.0, length: int = LENGTH, secret: str | None = None
    ) -> None:
        """The password is the url's, else `secret`, else that of the environment (AREAL_JAX_SECRET).

        `deadline_s`: how long Redis may be away, or a box full, before an operation fails.
        """
        self._link = Link(url, secret or os.environ.get(VARIABLE), deadline_s, BrokerError)
        self._run, self._deadline_s, self._length = run, deadline_s, length
        self._readings: dict[tuple[str, str], _Reading] = defaultdict(_Reading)
        self._guard = threading.Lock()

    def __repr__(self) -> str:
        return f"Broker({self._link.shown}, {self._run!r})"

    # --- messages -------------------------------------------------------------------------------------------

    def post(self, box: str, *bodies: Any) -> None:
        """Put messages of plain values into the box, in order and in one round trip; waits while it is full.

        Where the connection is lost in the middle they may be there twice. None is sent where one cannot be.
        """
        try:
            packed = [pack(body) for body in bodies]
        except (TypeError, ValueError, OverflowError) as error:
            raise BrokerError(f"a message for the box {box!r} cannot be sent: {error}") from error
        end_s = time.monotonic() + self._deadline_s
        while packed:
            sent = self._link.script(_POST, [self._key(box)], [self._length, *packed])
            if sent:
                del packed[:sent]
                end_s = time.monotonic() + self._deadline_s
                continue
            if time.monotonic() >= end_s:
                raise BrokerError(
                    f"the box {box!r} of run {self._run!r} held {self._length} messages for "
                    f"{self._deadline_s:g} s: see whether its reader still runs, and what it waits for"
                )
            time.sleep(_POLL_S)

    def take(
        self, box: str, reader: str, timeout_s: float, most: int = 64, claim_idle_s: float | None = None
    ) -> list[Message]:
        """Up to `most` messages, as soon as there is one; none after `timeout_s`.

        First what the reader took in an earlier life and never said done to, then new ones, in the order in
        which they were posted. `claim_idle_s`, for a box that several readers share, also takes what another
        reader has had for so long: it has to be longer than a message takes. Within one process each message
        is handed to a reader once.
        """
        reading = self._reading(box, reader)
        end_s = time.monotonic() + timeout_s
        with reading.guard:
            while True:
                found = self._left_over(box, reader, reading, most) or self._of_the_dead(
                    box, reader, reading, most, claim_idle_s
                )
                if not found:
                    waits_s = [end_s - time.monotonic(), _BLOCK_S, self._deadline_s / 2]
                    waits_s += [] if claim_idle_s is None else [max(claim_idle_s / 2, _POLL_S)]
                    found = self._read(box, reader, reading, ">", most, min(waits_s))
                    if not reading.is_sure:
                        continue  # an answer was lost; what it held and these are now left over, in order
                if found or time.monotonic() >= end_s:
                    break
            messages = [self._message(box, at, fields) for at, fields in found]
            reading.held.update(message.id for message in messages)
            return messages

    def done(self, box: str, messages: Iterable[Message]) -> None:
        """These are dealt with: nobody gets them again."""
        ids = [message.id for message in messages]
        if not ids:
            return
        self._link.script(_DONE, [self._key(box)], [_GROUP, *ids])
        with self._guard:
            for (name, _), reading in self._readings.items():
                if name == box:
                    reading.held.difference_update(ids)

    def clear(self, box: str) -> None:
        """Delete all messages of the box, also those that somebody took."""
        self._link.run(lambda client: client.delete(self._key(box)))

    def remove(self) -> None:
        """Delete all boxes of the run and its beats: for the end, when nobody posts any more."""
        pattern = "".join(f"\\{letter}" if letter in "*?[]^\\" else letter for letter in self._key_of(""))
        prefixes = (self._key(""), self._key_of("beats"))

        def delete(client: Any) -> None:
            for key in client.scan_iter(f"{pattern}*", count=1000):
                if text_of(key).startswith(prefixes):
                    client.delete(key)

        self._link.run(delete)

    # --- signs of life --------------------------------------------------------------------------------------

    def beat(self, name: str, body: Any, ttl_s: float) -> None:
        """Say that `name` lives, with plain values about it; forgotten after `ttl_s` without another beat."""
        self._link.script(_BEAT, [self._key_of("beats")], [name, round(1000 * ttl_s), pack(body)])

    def beats(self) -> dict[str, Any]:
        """Who lives, by Redis' own clock, and what each last said."""
        found = self._link.script(_BEATS, [self._key_of("beats")])
        return {text_of(found[at]): unpack(found[at + 1]) for at in range(0, len(found), 2)}

    def close(self) -> None:
        """End the connections. What was taken and not done goes to the same reader again."""
        self._link.close()

    def __enter__(self) -> Broker:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # --- inside ---------------------------------------------------------------------------------------------

    def _key_of(self, name: str) -> str:
        return f"areal:{{{self._run}}}:{name}"

    def _key(self, box: str) -> str:
        return self._key_of(f"box:{box}")

    def _reading(self, box: str, reader: str) -> _Reading:
        with self._guard:
            return self._readings[box, reader]

    def _asked(self, box: str, reading: _Reading, ask: Callable[[Any], T]) -> T:
        """`ask(client)`, in a box that is made where there is none.

        Where an answer is lost, Redis may hold messages for this reader that nobody has seen: from then on
        `reading.is_sure` is False.
        """

        def once(client: Any) -> T:
            is_sure, reading.is_sure = reading.is_sure, False
            try:
                answer = ask(client)
            except ResponseError as error:
                if not str(error).startswith(("NOGROUP", "UNBLOCKED")):
                    raise
                _make(client, self._key(box))
                answer = ask(client)
            reading.is_sure = is_sure
            return answer

        return self._link.run(once)

    def _left_over(self, box: str, reader: str, reading: _Reading, most: int) -> list[Any]:
        """What Redis holds for the reader and this process did not hand out."""
        found: list[Any] = []
        after = "0"
        while not reading.is_sure and len(found) < most:
            known = set(reading.held)
            page = self._read(box, reader, reading, after, most)
            found += [one for one in page if text_of(one[0]) not in known]
            reading.is_sure = len(page) < most and len(found) <= most
            after = text_of(page[-1][0]) if page else after
        return found[:most]

    def _of_the_dead(
        self, box: str, reader: str, reading: _Reading, most: int, claim_idle_s: float | None
    ) -> list[Any]:
        """What other readers have had for too long; asked twice in that time."""
        if claim_idle_s is None or time.monotonic() < reading.claimed_s + claim_idle_s / 2:
            return []
        reading.claimed_s = time.monotonic()
        key, idle_ms, known = self._key(box), round(1000 * claim_idle_s), set(reading.held)
        found = self._asked(
            box, reading, lambda client: client.xautoclaim(key, _GROUP, reader, idle_ms, count=most)
        )
        return [one for one in found[1] if text_of(one[0]) not in known]

    def _read(
        self, box: str, reader: str, reading: _Reading, after: str, most: int, wait_s: float = 0.0
    ) -> list[Any]:
        key, block_ms = self._key(box), max(1, round(1000 * wait_s)) if wait_s > 0 else None
        answer = self._asked(
            box, reading, lambda client: client.xreadgroup(_GROUP, reader, {key: after}, most, block_ms)
        )
        return answer[0][1] if answer else []

    def _message(self, box: str, at: bytes, fields: Any) -> Message:
        try:
            return Message(text_of(at), unpack(fields[b"body"]))
        except (KeyError, TypeError, ValueError, msgpack.UnpackException) as error:
            raise BrokerError(
                f"message {text_of(at)} of the box {box!r} is none of ours ({error!r}); does another program "
                "write into this Redis? Give the run a database of its own, as in redis://HOST:PORT/1"
            ) from error


def _make(client: Any, key: str) -> None:
    try:
        client.xgroup_create(key, _GROUP, "0", mkstream=True)
    except ResponseError as error:
        if not str(error).startswith("BUSYGROUP"):
            raise
