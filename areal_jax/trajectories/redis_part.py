"""The part of a run's journal that is in Redis: who may write it, what it holds, what leaves it.

One process writes. Its lease keeps a second one out while it lives; a newcomer that finds the lease expired
takes the fencing token, and from then on Redis refuses whatever the other one sends, should it still live.
"""

from __future__ import annotations

import os
import secrets
import socket
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, NoReturn

from areal_jax.control.events import RewardScored, SampleFinished
from areal_jax.trajectories import redis_scripts as scripts
from areal_jax.trajectories.journal import (
    FORMAT,
    EventRecord,
    JournalError,
    PayloadRecord,
    Records,
    RewardRecord,
    unpack,
)
from areal_jax.trajectories.redis_link import Link, text_of
from areal_jax.trajectories.sqlite import Rest

LEASE_S = 6.0
"""A writer that was silent for so long counts as dead."""

CHUNK_ROWS = 256
"""Events that are read, or moved to the archive, at once."""

_RENEWALS = 3  # of a lease, before it expires

Name = tuple[int, ...]
"""(ordinal, attempt, member) of a payload, (ordinal, attempt) of a group's rewards."""


class RedisPart:
    """Safe to share between threads. Whatever cannot be done raises JournalError."""

    def __init__(self, link: Link, run: str, token: str | None = None) -> None:
        """A reader's; `make` and `claim` answer a writer's, whose token it is."""
        self._link, self._keys, self._token = link, scripts.Keys.of(run), token
        self.where = f"{link.shown} (run {run})"
        self._ended = threading.Event()
        if token is not None:
            threading.Thread(target=self._keep_lease, name="journal lease", daemon=True).start()

    @classmethod
    def make(cls, link: Link, rest: Rest, last_seq: int = 0) -> RedisPart:
        """A new journal whose next event is last_seq + 1. Raises JournalError where the run has one."""
        keys, token = scripts.Keys.of(rest.run), secrets.token_hex(8)
        values = [FORMAT, rest.identity, token, last_seq, _me(), _ms(LEASE_S)]
        answer, *found = link.script(scripts.MAKE, keys, values)
        if answer == b"exists":
            raise JournalError(
                f"{link.shown} holds {text_of(found[0])} events of another run {rest.run!r}: resume that "
                "one, choose another run.name, or, if nobody wants them, remove them with `redis-cli del "
                f"{' '.join(keys)}`"
            )
        return cls(link, rest.run, token)

    @classmethod
    def claim(cls, link: Link, rest: Rest) -> RedisPart:
        """The journal, to go on writing: waits for the lease of a writer that died, and takes its token."""
        keys, token = scripts.Keys.of(rest.run), secrets.token_hex(8)
        left_ms: int = _ms(LEASE_S)
        while True:
            answer, *found = link.script(scripts.CLAIM, keys, [rest.identity, token, _me(), _ms(LEASE_S)])
            if answer == b"claimed":
                return cls(link, rest.run, token)
            if answer == b"gone":
                raise JournalError(f"{link.shown} (run {rest.run}) was closed this moment; open it once more")
            before_ms, left_ms = left_ms, found[1]
            if left_ms > before_ms:  # it was renewed, so its holder lives
                raise JournalError(
                    f"{link.shown} (run {rest.run}) is being written by {text_of(found[0])}; wait for that "
                    "run or stop it. Reading beside it is fine: `areal-jax audit`, `inspect` and `report` do"
                )
            time.sleep(0.1)

    # --- writing --------------------------------------------------------------------------------------------

    def append(self, first: int, records: Records) -> None:
        """All at once, and once however often it had to be sent; `first` is the seq of its first event."""
        values: list[Any] = [first, *(len(part) for part in records)]
        for event in records.events:
            values += [repr(event.wall_s), event.kind, event.event, event.actions]
        for payload in records.payloads:
            values += [_text(payload[:3]), payload.payload]
        for reward in records.rewards:
            values += [_text(reward[:2]), reward.scored]
        self._write(scripts.APPEND, values)

    def trim(self, records: Sequence[EventRecord]) -> None:
        """Drop everything up to the last of these events, with what they announced."""
        payloads, rewards = _announced(records)
        names = [_text(name) for name in (*payloads, *rewards)]
        self._write(scripts.TRIM, [records[-1].seq + 1, len(payloads), *names])

    def forget(self, ordinals: Sequence[int]) -> None:
        """Delete the payloads of these groups, all attempts."""
        unwanted = {str(int(ordinal)) for ordinal in ordinals}
        held = [text_of(name) for name in self._link.run(lambda client: client.hkeys(self._keys.payloads))]
        gone = [name for name in held if name.split("/")[0] in unwanted]
        self._write(scripts.TRIM, [0, len(gone), *gone])

    def catch_up(self, seq: int) -> None:
        """Go on after event `seq`: Redis came back without what the archive has."""
        self._write(scripts.CATCH_UP, [seq])

    def renew(self, deadline_s: float | None = None) -> None:
        """Keep the lease. Raises JournalError where another process has the token."""
        self._write(scripts.RENEW, [_me(), _ms(LEASE_S)], deadline_s)

    def remove(self) -> None:
        """Delete all that Redis has of the run."""
        self._write(scripts.REMOVE)

    def release(self) -> None:
        """Let the next writer in at once; where Redis is away, it waits for the lease instead."""
        if self._ended.is_set():
            return
        self._ended.set()
        if self._token is not None:
            with suppress(JournalError):
                self._link.script(scripts.RELEASE, self._keys, [self._token], deadline_s=1)
        self._link.close()

    # --- reading --------------------------------------------------------------------------------------------

    def newest(self) -> int | None:
        """Seq of the newest event, None where Redis has nothing of the run."""
        last = self._link.run(lambda client: client.hget(self._keys.state, "last"))
        return None if last is None else int(last)

    def read(self, first: int) -> tuple[int | None, list[EventRecord]]:
        """The newest seq, None where Redis has nothing of the run, and the next events from `first` on."""
        last, found = self._link.script(scripts.READ, self._keys, [first, CHUNK_ROWS])
        return None if last is None else int(last), [_event(text_of(at), fields) for at, fields in found]

    def with_announced(self, events: Sequence[EventRecord]) -> Records:
        """The events and what they announced, as far as it is still here."""
        payloads, rewards = _announced(events)
        return Records(
            list(events),
            [PayloadRecord(o, a, m, blob) for (o, a, m), blob in self.payloads(payloads).items()],
            [RewardRecord(o, a, blob) for (o, a), blob in self.rewards(rewards).items()],
        )

    def payloads(self, names: Sequence[Name]) -> dict[Any, bytes]:
        return self._fetch(self._keys.payloads, names)

    def rewards(self, names: Sequence[Name]) -> dict[Any, bytes]:
        return self._fetch(self._keys.rewards, names)

    # --- inside ---------------------------------------------------------------------------------------------

    def _fetch(self, key: str, names: Sequence[Name]) -> dict[Any, bytes]:
        if not names:
            return {}
        blobs = self._link.run(lambda client: client.hmget(key, [_text(name) for name in names]))
        return {name: blob for name, blob in zip(names, blobs, strict=True) if blob is not None}

    def _write(self, script: str, values: Sequence[Any] = (), deadline_s: float | None = None) -> None:
        """Run a script that asks for our token first; raises where it answers anything but done."""
        if self._token is None:
            raise JournalError(f"{self.where} is open for reading; open it with readonly=False to write")
        if self._ended.is_set():
            raise JournalError(f"{self.where} is closed; open it again to write")
        answer, *found = self._link.script(script, self._keys, [self._token, *values], deadline_s)
        if answer != b"done":
            self._refuse(text_of(answer), [text_of(value) for value in found])

    def _refuse(self, answer: str, found: Sequence[str]) -> NoReturn:
        reasons = {
            "taken": "{0} took over and writes it now, so nothing of this process is written any more: end "
            "this one, and see why it was silent for so long",
            "gone": "Redis has nothing of this run any more: was it started without its append-only file, or "
            "emptied? Start it with its data and resume the run",
            "differs": "Redis ends at event {0}, before the last that it acknowledged: it came back without "
            "them (with appendfsync everysec it may lose a second). Resume the run, which goes on from there",
        }
        raise JournalError(f"{self.where}: {reasons[answer].format(*found)}")

    def _keep_lease(self) -> None:
        """Until the end. Where it cannot, the next append says why."""
        while not self._ended.wait(LEASE_S / _RENEWALS):
            with suppress(JournalError):
                self.renew(LEASE_S / _RENEWALS)


def holds(link: Link, rest: Rest) -> bool:
    """Whether Redis has this journal. Raises JournalError for another one, or one of another format."""
    version, identity = link.script(scripts.LOOK, scripts.Keys.of(rest.run))
    if identity is None:
        return False
    if text_of(identity) != rest.identity:
        raise JournalError(
            f"{link.shown} holds another run under the name {rest.run!r}, not the one of this folder (that "
            f"was at {rest.url}); name that server in runtime.redis"
        )
    if int(version) != FORMAT:
        raise JournalError(
            f"{link.shown} (run {rest.run}) has journal format {int(version)}, and this areal-jax reads "
            f"format {FORMAT}; use the version that wrote it, or start a new run"
        )
    return True


def _announced(events: Sequence[EventRecord]) -> tuple[list[Name], list[Name]]:
    """The names of the payloads and of the rewards that the events came with."""
    payloads, rewards = [], []
    for event in events:
        if event.kind == SampleFinished.__name__:
            ordinal, member, attempt = unpack(event.event)[0]
            payloads.append((ordinal, attempt, member))
        elif event.kind == RewardScored.__name__:
            rewards.append(tuple(unpack(event.event)[:2]))
    return payloads, rewards


def _event(at: str, fields: Sequence[bytes]) -> EventRecord:
    wall_s, kind, event, actions = fields[1::2]
    return EventRecord(int(at.split("-")[0]), float(wall_s), text_of(kind), event, actions)


def _text(name: Sequence[int]) -> str:
    return "/".join(str(int(number)) for number in name)


def _me() -> str:
    return f"process {os.getpid()} on {socket.gethostname()}"


def _ms(seconds: float) -> int:
    return round(1000 * seconds)
