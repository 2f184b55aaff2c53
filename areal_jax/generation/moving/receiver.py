"""The target's side of a move: fetches half-decoded samples with their KV from another process."""

from __future__ import annotations

import time
import zlib
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np

from areal_jax.generation.commands import HostSample, SoFar
from areal_jax.generation.engine import Engine
from areal_jax.generation.moving.page_runs import KVPieces, assembled, used_bytes
from areal_jax.generation.moving.ticket import InFile, MoveError, OnDevices, Ticket, decode, names_of
from areal_jax.generation.slots import Prefix
from areal_jax.parallel.mesh import replicated
from areal_jax.types import ArealError
from areal_jax.weights.digest import to_plain
from areal_jax.weights.transfer.arrays import Incoming, spec_of, wait_for
from areal_jax.weights.transfer.channel import Channel
from areal_jax.weights.transfer.pieces import Box, size_of

MEASURED = 16
"""Number of fetches over which the bandwidth is averaged."""
POLL_S = 0.01


class Receiver:
    """Fetches samples for the host of `engine`; only one thread may use it at a time.

    The KV arrives on the engine's devices, in the form that TakeOver continues with.
    """

    def __init__(
        self, engine: Engine, folder: Path, secret: str | None = None, deadline_s: float = 60.0
    ) -> None:
        """`folder`: that of all hosts' StagedSenders. `secret`: that of all hosts' DirectSenders.

        `deadline_s`: longest time of one fetch, in seconds.
        """
        self._engine, self._folder, self._secret, self._deadline_s = engine, folder, secret, deadline_s
        self._fetched: deque[tuple[int, float]] = deque(maxlen=MEASURED)
        """Bytes and seconds of each of the last fetches."""

    @property
    def bytes_per_s(self) -> float | None:
        """Measured bandwidth of the last fetches, connecting included; None before the first fetch."""
        if not self._fetched:
            return None
        sizes, seconds = zip(*self._fetched, strict=True)
        return sum(sizes) / sum(seconds)

    def fetch(self, ticket: bytes) -> list[HostSample]:
        """Returns the samples of a Sender's ticket, with their KV.

        Raises MoveError if the ticket or the KV is damaged or released, or if the KV has not arrived after
        `deadline_s` seconds, as when the source is lost.
        """
        offer, started_s = decode(ticket), time.monotonic()
        wanted = [self._onto_devices(work.so_far.kv) for work in offer.works if work.so_far is not None]
        with self._naming(offer), ExitStack() as open_now:
            if isinstance(offer.place, InFile):
                arriving = self._read(offer.place, wanted, started_s + self._deadline_s)
            else:
                arriving = self._pull(open_now, offer, wanted, started_s + self._deadline_s)
            arrived = jax.block_until_ready(
                [assembled(kv, pieces) for kv, pieces in zip(wanted, arriving, strict=True)]
            )
        if wanted:
            self._fetched.append((sum(map(used_bytes, wanted)), time.monotonic() - started_s))
        kvs = iter(arrived)
        return [
            work if work.so_far is None else replace(work, so_far=SoFar(work.so_far.rows, next(kvs)))
            for work in offer.works
        ]

    def without_kv(self, ticket: bytes) -> list[HostSample]:
        """Returns the samples of a ticket without fetching KV: theirs is blank, and marked as stale.

        For samples with KV that is recomputed in less time than it moves, see `forecast.is_move_cheaper`.
        """
        return [self._recomputed(work) for work in decode(ticket).works]

    def _recomputed(self, work: HostSample) -> HostSample:
        if work.so_far is None:
            return work
        rows = work.so_far.rows
        blank = self._engine.blank_prefix(rows["tokens"])
        return replace(work, so_far=SoFar(rows, blank), is_stale=True)

    def _onto_devices(self, kv: Prefix) -> Prefix:
        """Returns the abstract prefix with the shardings with which its arrays are to arrive."""
        engine = self._engine
        # KV of another model is refused by the host; until then, any layout will do.
        is_own = kv.cache.k.shape[2] == engine.model.config.kv_heads
        onto = engine.kv_sharding if is_own else replicated(engine.mesh)
        return kv.replace(
            cache=jax.tree.map(
                lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=onto), kv.cache
            )
        )

    # --- from device to device ------------------------------------------------------------------------------

    def _pull(
        self, open_now: ExitStack, offer: Ticket, wanted: Sequence[Prefix], end_s: float
    ) -> Iterator[KVPieces]:
        """Yields the pieces of each prefix; the connections are open until `open_now` closes."""
        assert isinstance(offer.place, OnDevices)
        address, number = offer.place
        samples = [work.sample for work in offer.works if work.so_far is not None]
        if not samples:
            return
        left_s = max(0.0, end_s - time.monotonic())
        channel = open_now.enter_context(closing(Channel(address, self._secret, left_s)))
        incoming: Incoming | None = None
        for sample, kv in zip(samples, wanted, strict=True):
            said = channel.ask({"offer": number, "sample": sample}, end_s)
            if "is_released" in said:
                raise ArealError("the source has released their KV, or was started again")
            if incoming is None:
                incoming = open_now.enter_context(closing(Incoming(channel.own_host, said["transfer"])))
            leaves = to_plain(kv.cache)
            places = [(name, box) for name, boxes in said["boxes"].items() for box in boxes]
            specs = [spec_of(box, leaves[name]) for name, box in places]
            arrays = incoming.pull(said["number"], specs, end_s)
            wait_for(arrays, end_s)
            yield _by_name(places, arrays)

    # --- through files --------------------------------------------------------------------------------------

    def _read(self, place: InFile, wanted: Sequence[Prefix], end_s: float) -> Iterator[KVPieces]:
        """Yields the pieces of each prefix, after a check of the whole file."""
        data = _when_there(self._folder / place.path, end_s)
        if zlib.crc32(data) != place.checksum:
            raise ArealError(
                f"the file {self._folder / place.path} is damaged: it has {len(data)} bytes and checksum "
                f"{zlib.crc32(data):08x}, but {place.size} and {place.checksum:08x} when written; check the "
                "disk"
            )
        start = 0
        for kv, boxes in zip(wanted, place.boxes, strict=True):
            leaves = to_plain(kv.cache)
            places = [(name, box) for name, own in boxes.items() for box in own]
            arrays = []
            for name, box in places:
                spec = spec_of(box, leaves[name])
                raw = np.frombuffer(data, np.uint8, size_of(box) * spec.dtype.itemsize, start)
                start += raw.nbytes
                arrays.append(jax.device_put(raw.view(spec.dtype).reshape(spec.shape), spec.sharding))
            yield _by_name(places, arrays)

    # --- errors ---------------------------------------------------------------------------------------------

    @contextmanager
    def _naming(self, offer: Ticket) -> Iterator[None]:
        """Raises errors of the network, the files or the source in the `with` block as MoveError."""
        try:
            yield
        except (ArealError, OSError, KeyError, ValueError, jax.errors.JaxRuntimeError) as error:
            raise MoveError(
                f"the KV of {names_of(offer.works)} could not be fetched from {offer.source} within "
                f"{self._deadline_s:g} s: {(str(error) or 'no answer').splitlines()[0][:300]}; the samples "
                f"are still at {offer.source}, which can take them back; if it is lost, start them again"
            ) from error


def _by_name(places: Sequence[tuple[str, Box]], arrays: Sequence[Any]) -> dict[str, Any]:
    found: dict[str, Any] = {name: [] for name, _ in places}
    for (name, box), array in zip(places, arrays, strict=True):
        found[name].append((box, array))
    return found


def _when_there(path: Path, end_s: float) -> bytes:
    """Returns the contents of a file, which a shared file system may show a little later than written."""
    while True:
        try:
            return path.read_bytes()
        except FileNotFoundError:
            if time.monotonic() > end_s:
                raise
            time.sleep(POLL_S)
