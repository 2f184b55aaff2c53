"""Mailboxes in Redis, through which the processes of a run on any number of machines send messages.

A mailbox is a Redis stream with one reader. A message stays in the stream until the reader calls `done`, so
delivery is at least once: a reader that restarts gets every message again for which it did not call `done`.
A mailbox is bounded: `post` waits while the mailbox is full. Delivered bodies are encoded with msgpack.
"""

from __future__ import annotations

import os
import time
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from areal_jax.cluster.redis_link import SOCKET_S, Link
from areal_jax.secret import VARIABLE
from areal_jax.trajectories.journal import JournalError, pack, unpack
from areal_jax.types import ArealError

LENGTH = 4096
"""Maximum number of messages in a mailbox, including messages that the reader took but did not mark done."""

_POLL_S = 0.02

# Values: the maximum length, then bodies. Returns how many fitted; the caller sends the others again.
_POST = """
for at = 2, #ARGV do
  if redis.call('XLEN', KEYS[1]) >= tonumber(ARGV[1]) then return at - 2 end
  redis.call('XADD', KEYS[1], '*', 'body', ARGV[at])
end
return #ARGV - 1
"""


class BrokerError(ArealError):
    """Raised if a message cannot be posted, taken or decoded, or if Redis cannot be used."""


class Delivered(NamedTuple):
    id: str
    body: Any


class Broker:
    """One process's access to the mailboxes, heartbeats and other keys of the run named `run` in Redis.

    Operations raise BrokerError if Redis cannot be used. Threads may share a broker, but only one thread may
    take messages from a mailbox.
    """

    def __init__(self, url: str, run: str, *, deadline_s: float = 60.0, length: int = LENGTH) -> None:
        """Checks `url`, the url of Redis; the first operation opens the connection. `run`: the run's name.

        The password is the one in `url`, else the environment variable AREAL_JAX_SECRET.
        `deadline_s`: seconds that Redis may be unreachable, or a mailbox full, until an operation raises.
        `length`: maximum number of messages in a mailbox.
        """
        self.link = Link(url, os.environ.get(VARIABLE), deadline_s, BrokerError)
        self._run, self.deadline_s, self._length = run, deadline_s, length
        self._held: dict[str, list[str]] = defaultdict(list)
        """Mailbox -> ids, in order, of the messages that this process took but did not mark done."""

    # --- messages -------------------------------------------------------------------------------------------

    def post(self, mailbox: str, *bodies: Any) -> None:
        """Appends one message for each of `bodies`, in order; waits while the mailbox is full.

        A body consists of values that msgpack can encode; if one body cannot be encoded, no message is sent.
        If the connection breaks during the call, messages may arrive twice. Raises BrokerError if a body
        cannot be encoded, or if the mailbox stays full, or Redis unreachable, for `deadline_s` seconds.
        """
        try:
            packed = [pack(body) for body in bodies]
        except (TypeError, ValueError, OverflowError) as error:
            raise BrokerError(
                f"a message for the mailbox {mailbox!r} cannot be encoded, and nothing was sent: {error}; "
                "send only numbers, strings, bytes, lists and dicts"
            ) from error
        end_s = time.monotonic() + self.deadline_s
        while packed:
            sent = self.link.script(_POST, [self._key(mailbox)], [self._length, *packed])
            if sent:
                del packed[:sent]
                end_s = time.monotonic() + self.deadline_s
                continue
            if time.monotonic() >= end_s:
                raise BrokerError(
                    f"the mailbox {mailbox!r} of run {self._run!r} was full ({self._length} messages) for "
                    f"{self.deadline_s:g} s because the process that reads it took none; see in that "
                    "process's log (logs/ in the run's folder) what the process waits for"
                )
            time.sleep(_POLL_S)

    def take(self, mailbox: str, timeout_s: float, most: int = 64) -> list[Delivered]:
        """Waits for messages and returns 1 to `most` of them; [] if none arrives within `timeout_s` seconds.

        Never waits longer than half of SOCKET_S, or half of the broker's deadline. Messages are in the order
        of posting. A process gets each message once; after a restart the process gets every message again
        that it had not marked done.
        """
        key, held = self._key(mailbox), self._held[mailbox]
        # From the start unless messages are held: ids of an emptied Redis may begin below earlier ones.
        after = held[-1] if held else "0"
        # Below the time after which a connection without an answer counts as lost.
        wait_s = min(timeout_s, SOCKET_S / 2, self.deadline_s / 2)
        block_ms = max(1, round(1000 * wait_s)) if wait_s > 0 else None
        answer = self.link.run(lambda client: client.xread({key: after}, most, block_ms))
        found = [self._message(mailbox, at, fields) for _, page in answer for at, fields in page]
        held += [message.id for message in found]
        return found

    def done(self, mailbox: str, messages: Iterable[Delivered]) -> None:
        """Marks messages as done, which deletes them from the mailbox: no reader gets them again."""
        if ids := [message.id for message in messages]:
            self.link.run(lambda client: client.xdel(self._key(mailbox), *ids))
            self._held[mailbox] = [each for each in self._held[mailbox] if each not in ids]

    def clear(self, mailbox: str) -> None:
        """Deletes all messages of the mailbox, including those that its reader took but did not mark done."""
        self.link.run(lambda client: client.delete(self._key(mailbox)))

    def remove(self) -> None:
        """Deletes the run's data from Redis: mailboxes, heartbeats, payloads and the record of its owner.

        Called at the end of the run, when no process posts any more. The state that the node agents share
        stays, because the agents still exchange the run's exit status through this state.
        """
        for prefix in ("mailbox:", "heartbeat:", "payload:", "posted:", "owner"):
            self.delete(self.keys(prefix))

    # --- keys -----------------------------------------------------------------------------------------------

    def key_of(self, name: str) -> str:
        return f"areal:{{{self._run}}}:{name}"

    def keys(self, prefix: str) -> list[str]:
        """Returns all keys of this run in Redis that begin with `key_of(prefix)`."""
        own = self.key_of(prefix)
        # In a pattern of SCAN these letters are wildcards.
        pattern = "".join(f"\\{letter}" if letter in "*?[]^\\" else letter for letter in own)
        found = self.link.run(lambda client: list(client.scan_iter(f"{pattern}*", count=1000)))
        return [key.decode() for key in found]

    def delete(self, keys: list[str]) -> None:
        if keys:
            self.link.run(lambda client: client.unlink(*keys))

    # --- heartbeats -----------------------------------------------------------------------------------------

    def heartbeat(self, name: str, body: Any, ttl_s: float) -> None:
        """Stores `body` for `ttl_s` seconds, as the heartbeat of the process with mailbox `name`."""
        key, ttl_ms = self.key_of(f"heartbeat:{name}"), round(1000 * ttl_s)
        self.link.run(lambda client: client.set(key, pack(body), px=ttl_ms))

    def heartbeats(self, names: Sequence[str]) -> dict[str, Any]:
        """Returns mailbox -> body of the newest heartbeat, for each mailbox in `names` that has a heartbeat.

        An expired heartbeat is left out; the clock of Redis decides whether a heartbeat is expired.
        """
        keys = [self.key_of(f"heartbeat:{name}") for name in names]
        found = self.link.run(lambda client: client.mget(keys)) if keys else []
        return {name: unpack(body) for name, body in zip(names, found, strict=True) if body is not None}

    def close(self) -> None:
        """Closes the connections. Messages that are not marked done stay in Redis."""
        self.link.close()

    def __enter__(self) -> Broker:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # --- inside ---------------------------------------------------------------------------------------------

    def _key(self, mailbox: str) -> str:
        return self.key_of(f"mailbox:{mailbox}")

    def _message(self, mailbox: str, at: bytes, fields: Any) -> Delivered:
        try:
            return Delivered(at.decode(), unpack(fields[b"body"]))
        except (KeyError, JournalError) as error:
            why = error.__cause__ or error
            raise BrokerError(
                f"message {at.decode()} of the mailbox {mailbox!r} was not written by areal-jax ({why!r}): "
                "another program writes into this Redis database. Give the run its own database: "
                "runtime.redis=redis://HOST:PORT/1"
            ) from error
