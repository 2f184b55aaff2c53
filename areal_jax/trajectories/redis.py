"""The journal of a run over several machines: its newest part in Redis, the rest in a file of its folder.

An append is one Lua script, so events, actions and payloads are there together or not at all, and it is
applied once however often it had to be sent. At each snapshot everything up to it moves to the archive, a
SqliteQueue, and leaves Redis, whose memory is so bounded by what happens between two checkpoints. Whatever
ends the move half way, what has been archived is only trimmed later: readers take the archive's copy first.
"""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from areal_jax.trajectories.journal import (
    Entry,
    EventRecord,
    JournalError,
    Row,
    all_of,
    one_of,
    to_records,
    to_row,
)
from areal_jax.trajectories.redis_link import Link
from areal_jax.trajectories.redis_part import RedisPart, holds
from areal_jax.trajectories.sqlite import Rest, SqliteQueue
from areal_jax.types import SampleId, Trajectory

ARCHIVE = "journal.sqlite"
"""Its name in the run's folder, that of a journal without Redis: a finished run reads the same."""

DEADLINE_S = 60.0


class RedisQueue:
    """The journal of one run. Safe to share between the threads of a process."""

    def __init__(self, part: RedisPart, archive: SqliteQueue, last_seq: int | None) -> None:
        """Use `create` or `open`; `last_seq` is None for a reader."""
        self._part, self._archive, self._last_seq = part, archive, last_seq
        self._guard = threading.RLock()
        self._where = f"{part.where} with {archive.path}"
        self.path = archive.path
        self.header: dict[str, Any] = archive.header

    @classmethod
    def create(
        cls,
        url: str,
        run: str,
        header: dict[str, Any],
        folder: str | Path,
        *,
        secret: str | None = None,
        deadline_s: float = DEADLINE_S,
    ) -> RedisQueue:
        """A new journal; `header` holds what the run's bits depend on. Raises JournalError if it exists.

        `secret` is Redis' password where the url has none; `deadline_s`, how long Redis may be away before
        an operation fails.
        """
        path = Path(folder) / ARCHIVE
        if path.exists():
            raise JournalError(f"{path} exists; resume that run, or choose another run.dir")
        link = Link(url, secret, deadline_s, JournalError)
        link.require_durable()
        rest = Rest(link.shown, run, secrets.token_hex(8), True)
        part = RedisPart.make(link, rest)
        try:
            SqliteQueue.create(path, header, rest).close()
            return cls(part, SqliteQueue.open(path, readonly=True), 0)
        except JournalError:
            part.remove()
            part.release()
            raise

    @classmethod
    def open(
        cls,
        url: str,
        run: str,
        folder: str | Path,
        readonly: bool = False,
        *,
        secret: str | None = None,
        deadline_s: float = DEADLINE_S,
    ) -> RedisQueue:
        """An existing journal, read-only beside a live run or to go on writing. Raises JournalError.

        To write waits for the lease of a writer that died, LEASE_S at most; to read what a finished run left
        needs no Redis.
        """
        archive = SqliteQueue.open(Path(folder) / ARCHIVE, readonly=True)
        rest = archive.rest
        if rest is None:
            archive.close()
            raise JournalError(
                f"{archive.path} was written without Redis: unset runtime.redis to go on with it"
            )
        link = Link(url, secret, deadline_s, JournalError)
        rest = rest._replace(url=link.shown, run=run)
        if readonly:
            if rest.is_live and not holds(link, rest):
                raise _gone(archive, link)
            return cls(RedisPart(link, run), archive, None)
        link.require_durable()
        part = _part(link, rest, archive)
        try:
            return cls(part, archive, _join(part, archive, rest))
        except JournalError:
            part.release()
            raise

    # --- writing --------------------------------------------------------------------------------------------

    def append(self, entries: Sequence[Entry], durable: bool = False) -> int:
        """Write all entries in one transaction; the seq of the last.

        `durable` changes nothing: the server's appendfsync says what an answer is worth (docs/redis.md).
        """
        with self._guard:
            first = self.last_seq + 1
            records = to_records(entries, first, time.time())
            if records.events:
                self._part.append(first, records)
                self._last_seq = records.events[-1].seq
            return self.last_seq

    def snapshot(self, seq: int, state: dict[str, Any]) -> None:
        """Keep control's state after event `seq`, and move everything up to it to the archive."""
        with self._guard:
            self._part.renew()
            with SqliteQueue.open(self.path, is_archive=True) as archive:
                self._move(archive, seq)
                archive.snapshot(seq, state)

    def forget(self, ordinals: Sequence[int]) -> None:
        """Delete the trajectories of these groups, all attempts; their events and rewards stay."""
        with self._guard:
            self._part.forget(ordinals)
            with SqliteQueue.open(self.path, is_archive=True) as archive:
                archive.forget(ordinals)

    # --- reading --------------------------------------------------------------------------------------------

    @property
    def last_seq(self) -> int:
        """Seq of the newest event; 0 for an empty journal."""
        if self._last_seq is not None:
            with self._guard:
                return self._last_seq
        if self._is_moved():
            return self._archive.last_seq
        return max(self._part.newest() or 0, self._archive.last_seq)

    def rows(self, after_seq: int = 0) -> Iterator[Row]:
        """Every event after `after_seq`, in order. Raises JournalError for an event of a later version."""
        while chunk := self._records(after_seq):
            for record in chunk:
                yield to_row(record, self._where)
            after_seq = chunk[-1].seq

    def trajectory(self, sample: SampleId) -> Trajectory:
        """One sample's trajectory, with its reward once scored. Raises JournalError if it is not kept."""
        return self.trajectories([sample])[sample]

    def trajectories(self, samples: Sequence[SampleId]) -> dict[SampleId, Trajectory]:
        """As `trajectory`, of many: Redis is asked for payloads and rewards once each."""
        found = self._found(samples)
        return {one: one_of(*found[one.ordinal, one.attempt], one, self._where) for one in samples}

    def group(self, ordinal: int, attempt: int, size: int) -> tuple[Trajectory, ...]:
        """A group's trajectories by member, rewarded once scored. Raises JournalError if one is missing."""
        found = self._found([SampleId(ordinal, member, attempt) for member in range(size)])
        return all_of(*found[ordinal, attempt], ordinal, attempt, size, self._where)

    def latest_snapshot(self, before_seq: int | None = None) -> tuple[int, dict[str, Any]] | None:
        """The newest (seq, state), or the newest whose seq is at most `before_seq`; None if there is none."""
        return self._archive.latest_snapshot(before_seq)

    # --- the end --------------------------------------------------------------------------------------------

    def close(self) -> None:
        """A writer moves the rest to the archive and leaves Redis as if it had never been there.

        Closing twice does nothing.
        """
        with self._guard:
            try:
                if self._last_seq is not None:
                    self._move_all(self._last_seq)
            finally:
                self._release()

    def __enter__(self) -> RedisQueue:
        return self

    def __exit__(self, *error: object) -> None:
        if isinstance(error[1], JournalError):
            self._release()  # Redis is away, or another process writes: the next writer goes on from there
        else:
            self.close()

    def _release(self) -> None:
        with self._guard:
            self._last_seq = None
            self._part.release()
            self._archive.close()

    # --- from one part to the other -------------------------------------------------------------------------

    def _move(self, archive: SqliteQueue, upto: int) -> None:
        """Bring events up to `upto`, with what they announce, to the archive, and trim it."""
        while events := [event for event in self._part.read(1)[1] if event.seq <= upto]:
            archive.absorb(self._part.with_announced(events))
            self._part.trim(events)

    def _move_all(self, last_seq: int) -> None:
        self._part.renew()
        with SqliteQueue.open(self.path, is_archive=True) as archive:
            self._move(archive, last_seq)
            if archive.rest is not None:
                archive.set_rest(archive.rest._replace(is_live=False))
        self._part.remove()

    # --- both parts as one ----------------------------------------------------------------------------------

    def _is_moved(self) -> bool:
        """Whether a reader finds everything in the archive."""
        rest = self._archive.rest
        return self._last_seq is None and rest is not None and not rest.is_live

    def _records(self, after_seq: int) -> list[EventRecord]:
        """The next events. What is in neither part has just moved from one to the other, so look again."""
        for _ in range(2):
            if (chunk := self._archive.records(after_seq)) or self._is_moved():
                return chunk
            last, chunk = self._part.read(after_seq + 1)
            if chunk and chunk[0].seq == after_seq + 1:
                return chunk
            if not chunk and last is not None and last <= after_seq:
                return []
        if chunk := self._archive.records(after_seq):
            return chunk
        raise JournalError(
            f"{self._where}: event {after_seq + 1} is in neither of them; was the file or Redis restored "
            "from an older copy? Bring back the newer one"
        )

    def _found(
        self, samples: Sequence[SampleId]
    ) -> dict[tuple[int, int], tuple[dict[int, bytes], bytes | None]]:
        """By (ordinal, attempt), payloads by member, and rewards; the archive's were first, and count."""
        payloads: dict[tuple[int, int], dict[int, bytes]] = {(s.ordinal, s.attempt): {} for s in samples}
        scored: dict[tuple[int, int], bytes] = {}
        if not self._is_moved():
            held = self._part.payloads([(s.ordinal, s.attempt, s.member) for s in samples])
            for (ordinal, attempt, member), blob in held.items():
                payloads[ordinal, attempt][member] = blob
            scored = self._part.rewards(list(payloads))
        return {
            group: (blobs | self._archive.payloads(*group), self._archive.scored(*group) or scored.get(group))
            for group, blobs in payloads.items()
        }


def _part(link: Link, rest: Rest, archive: SqliteQueue) -> RedisPart:
    """Redis' part of this journal, to write; a new one where the archive has everything."""
    if holds(link, rest):
        return RedisPart.claim(link, rest)
    if rest.is_live and link.options["lost"] == "refuse":
        raise _gone(archive, link)
    return RedisPart.make(link, rest, archive.last_seq)


def _join(part: RedisPart, archive: SqliteQueue, rest: Rest) -> int:
    """Seq of the newest event. The archive now says where Redis is, and no event is missing between them."""
    archived = archive.last_seq
    newest = part.newest() or 0
    if newest < archived:
        part.catch_up(archived)
    with SqliteQueue.open(archive.path, is_archive=True) as writer:
        writer.set_rest(rest._replace(is_live=True))
    following = part.read(archived + 1)[1]
    if newest > archived and (not following or following[0].seq != archived + 1):
        raise JournalError(
            f"{part.where} goes on after event {archived}, the last of {archive.path}, with a later one: the "
            "file is an older copy; bring back the newer one"
        )
    return max(newest, archived)


def _gone(archive: SqliteQueue, link: Link) -> JournalError:
    rest = archive.rest
    return JournalError(
        f"{link.shown} has nothing of this run, whose events after {archive.last_seq} were at "
        f"{rest.url if rest else link.shown}. Start that server with its data; if they are gone for good, "
        "add ?lost=accept to runtime.redis once, to go on from the last checkpoint"
    )
