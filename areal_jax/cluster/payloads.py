"""Payloads in Redis: encoded trajectories by sample, from the host's post until their batch is trained.

A host posts a payload before the event that announces it, under a key that names the sample, the host and the
event: two hosts may finish the same sample if one of them was declared lost, and one host may finish it twice
if Redis lost its data in between. When the event is journaled, the controller renames the key of the accepted
payload to the sample's key, from which the trainer's processes fetch it. Once the batch is journaled as
trained, the controller deletes the payload. SQLite stores every payload too, so Redis may lose payloads: the
controller puts back those that a batch needs.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

from areal_jax.cluster.broker import Broker, BrokerError
from areal_jax.trajectories.codec import encode
from areal_jax.types import Group, SampleId

CHUNK_BYTES = 16 * 2**20
"""Maximum size of one request or answer, in bytes; a larger payload is sent alone."""

POLL_S = 0.05

K = TypeVar("K", bound=Hashable)

# Values: the owner's token, the number of accepted payloads, their keys as pairs (posted, sample's), then the
# keys to delete. A controller that was replaced changes nothing.
_SETTLE = """
if redis.call('HGET', KEYS[1], 'token') ~= ARGV[1] then return end
local last = 2 + 2 * tonumber(ARGV[2])
for at = 3, last, 2 do
  if redis.call('EXISTS', ARGV[at]) == 1 then redis.call('RENAME', ARGV[at], ARGV[at + 1]) end
end
for at = last + 1, #ARGV do redis.call('UNLINK', ARGV[at]) end
"""


class Posted(NamedTuple):
    """A payload that a host posted, and the event that announces it."""

    sample: SampleId
    mailbox: str
    """The host's mailbox, which differs for each process that had the host's name."""
    number: int
    """The event's number (`messages.EventReport.number`)."""


class Payloads:
    """Access to a run's payloads (encoded trajectories) in Redis; several threads may use one object.

    Operations raise BrokerError if Redis cannot be used.
    """

    def __init__(self, broker: Broker) -> None:
        self._broker = broker

    # --- hosts ----------------------------------------------------------------------------------------------

    def post(self, blobs: Mapping[Posted, bytes]) -> None:
        """Stores encoded trajectories of a host.

        The host must send the events that announce these trajectories after this call.
        """
        self._set({self._posted(one): blob for one, blob in blobs.items()})

    # --- trainers -------------------------------------------------------------------------------------------

    def wait_for(self, samples: Sequence[SampleId]) -> dict[SampleId, bytes]:
        """Returns the samples' encoded trajectories; waits until the controller has put back missing ones.

        Raises BrokerError if some are still missing after the broker's `deadline_s`.
        """
        found: dict[SampleId, bytes] = {}
        end_s = time.monotonic() + self._broker.deadline_s
        while missing := [sample for sample in samples if sample not in found]:
            before = len(found)
            found |= self._fetch(missing, self._named)
            if len(found) == before and time.monotonic() > end_s:
                raise BrokerError(
                    f"the payloads of {missing[0]} and {len(missing) - 1} other samples are missing in "
                    "Redis, and the controller did not put them back within "
                    f"{self._broker.deadline_s:g} s; see logs/controller.log in the run's folder"
                )
            if len(found) < len(samples):
                time.sleep(POLL_S)
        return found

    # --- inside ---------------------------------------------------------------------------------------------

    def _posted(self, one: Posted) -> str:
        return self._broker.key_of(f"posted:{_name(one.sample)}/{one.number}@{one.mailbox}")

    def _named(self, sample: SampleId) -> str:
        return self._broker.key_of(f"payload:{_name(sample)}")

    def _set(self, blobs: Mapping[str, bytes]) -> None:
        for chunk in chunks(list(blobs), [len(blob) for blob in blobs.values()]):
            values = {key: blobs[key] for key in chunk}
            self._broker.link.run(lambda client, values=values: client.mset(values))

    def _fetch(self, names: Sequence[K], key_of: Callable[[K], str]) -> dict[K, bytes]:
        """Returns name -> payload; omits names without a payload. `key_of(name)`: the payload's Redis key."""
        keys = {name: key_of(name) for name in names}
        found: dict[K, bytes] = {}

        def sizes(client: Any) -> list[int]:
            pipeline = client.pipeline(transaction=False)
            for key in keys.values():
                pipeline.strlen(key)
            return pipeline.execute()

        for chunk in chunks(list(keys), self._broker.link.run(sizes) if keys else []):
            # None for a payload that was deleted since its size was read.
            blobs = self._broker.link.run(
                lambda client, chunk=chunk: client.mget([keys[name] for name in chunk])
            )
            found |= {name: blob for name, blob in zip(chunk, blobs, strict=True) if blob is not None}
        return found


def chunks(names: Sequence[K], sizes: Sequence[int]) -> Iterator[list[K]]:
    """Yields the names in order, in lists with at most CHUNK_BYTES of payload each.

    A larger payload's name is alone in its list. `sizes`: the size of each name's payload, in bytes.
    """
    piece: list[K] = []
    total = 0
    for name, size in zip(names, sizes, strict=True):
        if piece and total + size > CHUNK_BYTES:
            yield piece
            piece, total = [], 0
        piece.append(name)
        total += size
    if piece:
        yield piece


def _name(sample: SampleId) -> str:
    return "/".join(str(int(number)) for number in (sample.ordinal, sample.attempt, sample.member))


def _sample(name: str) -> SampleId:
    ordinal, attempt, member = map(int, name.split("/"))
    return SampleId(ordinal, member, attempt)


class Held(Payloads):
    """The controller's access to the payloads in Redis; records which payloads exist or can go."""

    def __init__(self, broker: Broker, token: str) -> None:
        """`token`: the token of the run's owner (`RunOwner.token`)."""
        super().__init__(broker)
        self._token = token
        self._names: set[SampleId] = set()
        """The samples with an accepted payload in Redis, which trainer processes can fetch."""
        self._accepted: list[Posted] = []
        """The accepted payloads that `settle` has not moved yet."""
        self._void: list[Posted] = []
        """The refused payloads that `settle` has not deleted yet."""

    def read(self) -> None:
        """Deletes posted payloads that were not accepted, and records again which payloads Redis holds."""
        self._accepted, self._void = [], []
        self.delete_posted()
        self._names = {_sample(key.rpartition(":")[2]) for key in self._broker.keys("payload:")}

    def posted(self, announced: Sequence[Posted]) -> dict[Posted, bytes]:
        """Returns these payloads; omits those that Redis does not hold."""
        return self._fetch(announced, self._posted)

    def accept(self, one: Posted) -> None:
        """Records that the event with this payload is accepted.

        Once the event is journaled, the next `settle` moves the payload to the sample's key, from which
        trainer processes fetch it.
        """
        self._accepted.append(one)
        self._names.add(one.sample)

    def refuse(self, one: Posted) -> None:
        """Records that the payload is not needed; the next `settle` deletes the payload.

        It is not needed because its sample went to another host, or is finished already.
        """
        self._void.append(one)

    def put_back(self, groups: Iterable[Group]) -> None:
        """Stores in Redis every trajectory of these groups that has no payload there."""
        missing = {t.sample: t for group in groups for t in group.trajectories if t.sample not in self._names}
        self._set({self._named(sample): encode(trajectory) for sample, trajectory in missing.items()})
        self._names |= missing.keys()

    def settle(self, needed: Collection[int]) -> None:
        """Moves accepted payloads to their samples' keys; deletes refused and unneeded ones.

        Called after the events of a turn are journaled. `needed`: ordinals of the groups that are neither
        trained nor dropped, or that are trained again; the payloads of other groups are unneeded. Does
        nothing in Redis if another controller owns the run.
        """
        done = {one for one in self._names if one.ordinal not in needed}
        pairs = [(self._posted(one), self._named(one.sample)) for one in self._accepted]
        deleted = [*map(self._posted, self._void), *map(self._named, done)]
        if pairs or deleted:
            values = [self._token, len(pairs), *(key for pair in pairs for key in pair), *deleted]
            self._broker.link.script(_SETTLE, [self._broker.key_of("owner")], values)
        self._names -= done
        self._accepted, self._void = [], []

    def delete_posted(self, mailbox: str = "") -> None:
        """Deletes payloads (encoded trajectories) that a host posted and whose events were not accepted.

        `mailbox`: the host's mailbox; "": deletes such payloads of all hosts.
        """
        accepted = {self._posted(one) for one in self._accepted}
        keys = set(self._broker.keys("posted:")) - accepted
        self._broker.delete([key for key in keys if not mailbox or key.endswith(f"@{mailbox}")])
