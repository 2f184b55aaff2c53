"""The source's side of a move: offers half-decoded samples with their KV to another process.

The KV stays on the source's devices, and the receiver pulls it over jax.experimental.transfer
(`DirectSender`); or the source writes it to a file that both processes can read (`StagedSender`).
"""

from __future__ import annotations

import logging
import secrets
import shutil
import threading
import zlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

import jax
import numpy as np

from areal_jax.generation.commands import HostSample
from areal_jax.generation.moving.page_runs import KVPieces, pieces_of
from areal_jax.generation.moving.ticket import InFile, MoveError, OnDevices, Ticket, encode, names_of
from areal_jax.generation.slots import Prefix
from areal_jax.types import SampleId
from areal_jax.weights.transfer.arrays import Offers, start_server
from areal_jax.weights.transfer.channel import ChannelError, Listener


class Sender(Protocol):
    """Offers samples of this process to other processes, each of which has a Receiver."""

    address: str
    """The host:port at which receivers fetch KV; empty if they fetch it from files."""

    def offer(self, works: Sequence[HostSample]) -> bytes:
        """Returns a ticket, with which a Receiver can fetch the samples with their KV until `release`.

        Does not change `works`, with which this process may continue if the move fails. Raises MoveError if
        a file cannot be written.
        """
        ...

    def release(self, samples: Iterable[SampleId]) -> None:
        """Forgets the KV of these samples; receivers can no longer fetch it. Unknown samples are ignored."""
        ...

    def close(self) -> None:
        """Forgets all KV, and disconnects receivers."""
        ...


def make_sender(
    name: str, folder: Path, *, is_direct: bool, address: str = "127.0.0.1:0", secret: str | None = None
) -> Sender:
    """Returns the sender of the host `name`: a DirectSender if `is_direct` and this platform can transfer.

    Otherwise a StagedSender, which writes below `folder`, on a file system that all hosts share.
    """
    if is_direct:
        try:
            start_server("127.0.0.1")
            return DirectSender(name, address, secret)
        except (jax.errors.JaxRuntimeError, NotImplementedError) as error:
            logging.getLogger(__name__).warning(
                "%s cannot send KV from device to device on this platform, so samples move through files in "
                "%s: %s",
                name,
                folder,
                error,
            )
    return StagedSender(name, folder)


# --- from device to device ----------------------------------------------------------------------------------

IDLE_S = 600.0
"""Seconds without a request after which a receiver is disconnected."""


class DirectSender:
    """A Sender that leaves KV where it is, until a receiver pulls the pages in use from this process."""

    def __init__(self, name: str, address: str = "127.0.0.1:0", secret: str | None = None) -> None:
        """`address`: host:port to listen at; port 0 = any free port. `secret`: what receivers must know.

        A host other than loopback requires a secret. Raises ChannelError if the secret is missing, or if the
        address cannot be used.
        """
        self._name = name
        self._offered: dict[int, dict[SampleId, Prefix]] = {}
        """Offer's number -> sample -> the sample's KV."""
        self._lock = threading.Lock()
        self._listener = Listener(
            address, secret, lambda: _ReceiverSession(self, self._listener.host), IDLE_S
        )
        self.address = self._listener.address

    def offer(self, works: Sequence[HostSample]) -> bytes:
        number = secrets.randbits(63)
        held = {work.sample: work.so_far.kv for work in works if work.so_far is not None}
        with self._lock:
            self._offered[number] = held
        return encode(Ticket(self._name, OnDevices(self.address, number), tuple(works)))

    def find(self, number: int, sample: SampleId) -> Prefix | None:
        """Returns a sample's KV in the offer `number`; None once it is released."""
        with self._lock:
            return self._offered.get(number, {}).get(sample)

    def release(self, samples: Iterable[SampleId]) -> None:
        gone = set(samples)
        with self._lock:
            kept = {
                number: {sample: kv for sample, kv in held.items() if sample not in gone}
                for number, held in self._offered.items()
            }
            self._offered = {number: held for number, held in kept.items() if held}

    def close(self) -> None:
        self._listener.close()
        with self._lock:
            self._offered.clear()


class _ReceiverSession:
    """Answers the requests of one receiver. A request names an offer and a sample, which is then pulled."""

    def __init__(self, sender: DirectSender, host: str) -> None:
        self._sender, self._host = sender, host
        self._offers: Offers | None = None

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        try:
            kv = self._sender.find(request["offer"], SampleId(*request["sample"]))
        except (KeyError, TypeError) as error:
            raise ChannelError(
                f"a host requested KV with the fields {sorted(request)}, but {error} is missing or wrong; "
                "run the same version of areal-jax everywhere"
            ) from None
        if kv is None:
            return {"is_released": True}
        self._offers = self._offers or Offers(self._host)
        pieces = pieces_of(kv)
        arrays = [data for _, data in _in_order(pieces)]
        # KV of an evicted sample is in host memory.
        number = self._offers.add([a if isinstance(a, jax.Array) else jax.device_put(a) for a in arrays])
        return {"number": number, "transfer": self._offers.address, "boxes": _boxes(pieces)}

    def close(self) -> None:
        if self._offers is not None:
            self._offers.close()


# --- through files ------------------------------------------------------------------------------------------


class StagedSender:
    """A Sender that writes the KV of each offer to a file in a folder of its own below `folder`.

    Files that a killed process of the same name left behind are deleted at the start.
    """

    address = ""

    def __init__(self, name: str, folder: Path) -> None:
        self._name, self._folder = name, folder / name
        self._files: dict[Path, set[SampleId]] = {}
        """File -> the samples in it that are not released."""
        self._lock = threading.Lock()
        shutil.rmtree(self._folder, ignore_errors=True)

    def offer(self, works: Sequence[HostSample]) -> bytes:
        path = self._folder / f"{secrets.token_hex(8)}.kv"
        kvs = [pieces_of(work.so_far.kv) for work in works if work.so_far is not None]
        try:
            size, checksum = _write(path, kvs)
        except OSError as error:
            with suppress(OSError):  # there may be no file, and no folder
                path.with_suffix(".part").unlink()
            raise MoveError(
                f"{self._name} could not write the KV of {names_of(works)} to {path}: {error}; free space "
                "there. The samples go on where they are"
            ) from error
        with self._lock:
            self._files[path] = {work.sample for work in works}
        place = InFile(f"{self._name}/{path.name}", size, checksum, tuple(_boxes(kv) for kv in kvs))
        return encode(Ticket(self._name, place, tuple(works)))

    def release(self, samples: Iterable[SampleId]) -> None:
        gone = set(samples)
        with self._lock:
            left = {path: held - gone for path, held in self._files.items()}
            self._files = {path: held for path, held in left.items() if held}
        for path in left.keys() - self._files.keys():
            path.unlink(missing_ok=True)

    def close(self) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)
        with self._lock:
            self._files.clear()


def _write(path: Path, kvs: Sequence[KVPieces]) -> tuple[int, int]:
    """Writes all pieces to `path`, which appears when it is complete; returns its size and CRC-32."""
    path.parent.mkdir(parents=True, exist_ok=True)
    staged, size, checksum = path.with_suffix(".part"), 0, 0
    with staged.open("wb", buffering=0) as file:
        for _, data in (piece for kv in kvs for piece in _in_order(kv)):
            # As bytes, because bfloat16 arrays have no buffer that `write` takes.
            raw = np.ascontiguousarray(data).reshape(-1).view(np.uint8).data
            checksum, size = zlib.crc32(raw, checksum), size + raw.nbytes
            while raw:  # an unbuffered write may write only a part
                raw = raw[file.write(raw) :]
    staged.rename(path)
    return size, checksum


def _in_order(pieces: KVPieces) -> Iterator[tuple[Any, Any]]:
    """Yields the pieces in the order in which they are sent: that of `_boxes`."""
    for one in pieces.values():
        yield from one


def _boxes(pieces: KVPieces) -> dict[str, Any]:
    return {name: tuple(box for box, _ in one) for name, one in pieces.items()}
