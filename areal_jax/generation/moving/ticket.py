"""The ticket of half-decoded samples that move: their records, and how the receiver fetches their KV.

A ticket is bytes: a magic number, a checksum and msgpack. It contains all fields of each HostSample and its
tokens' records, but of the KV only shapes and dtypes.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import astuple, fields, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import msgpack
import numpy as np

from areal_jax.generation.commands import HostSample, SoFar, Start
from areal_jax.generation.live_slots import record_dtype
from areal_jax.generation.slots import Penalties, Prefix
from areal_jax.models.kv_pages import KVPages
from areal_jax.types import ArealError, SampleId, Sampling
from areal_jax.weights.digest import to_plain
from areal_jax.weights.transfer.pieces import Box

MAGIC = b"AJM1"
"""The first bytes of every ticket; the digit is the format's number."""

_HEAD_BYTES = len(MAGIC) + 4


class MoveError(ArealError):
    """Half-decoded samples cannot be handed over; the message names the source host and the samples."""


class OnDevices(NamedTuple):
    """The KV is on the devices of the process that listens at `address`, as its offer `number`."""

    address: str
    number: int


class InFile(NamedTuple):
    """The KV is in the file `path`, below the folder of moves, of `size` bytes with CRC-32 `checksum`.

    `boxes`: for each sample with KV, in order, leaf name -> position of each piece. The pieces' bytes follow
    each other in this order.
    """

    path: str
    size: int
    checksum: int
    boxes: tuple[dict[str, tuple[Box, ...]], ...]


class Ticket(NamedTuple):
    """A decoded ticket. The KV of `works` consists of jax.ShapeDtypeStructs, enough to refuse a work by."""

    source: str
    """Name of the host that offers the samples."""
    place: OnDevices | InFile
    works: tuple[HostSample, ...]


def names_of(works: Sequence[HostSample]) -> str:
    """Returns the samples as text, for errors: ordinal/member.attempt of each."""
    samples = ", ".join(f"{o}/{member}.{attempt}" for o, member, attempt in (work.sample for work in works))
    return f"samples {samples}" if len(works) > 1 else f"sample {samples}"


def encode(ticket: Ticket) -> bytes:
    """Returns the ticket as bytes; `works` may have their KV, of which only shapes and dtypes are encoded."""
    # Samples of one group share their Start, which has the prompt.
    starts = list({id(work.start): work.start for work in ticket.works}.values())
    at = {id(start): number for number, start in enumerate(starts)}
    body = [
        ticket.source,
        type(ticket.place).__name__,
        list(ticket.place),
        [astuple(start) for start in starts],
        [(at[id(work.start)], _plain(work), _plain_so_far(work.so_far)) for work in ticket.works],
    ]
    packed: bytes = msgpack.packb(body, default=lambda number: number.item())  # type: ignore[assignment]
    return MAGIC + zlib.crc32(packed).to_bytes(4, "little") + packed


def decode(blob: bytes) -> Ticket:
    """Returns the ticket that `encode` turned into `blob`. Raises MoveError if the bytes are damaged."""
    body = memoryview(blob)[_HEAD_BYTES:]
    if blob[: len(MAGIC)] != MAGIC or blob[len(MAGIC) : _HEAD_BYTES] != zlib.crc32(body).to_bytes(
        4, "little"
    ):
        raise MoveError(
            f"{len(blob)} bytes that begin with {bytes(blob[:4])!r} are not the complete ticket of a move, "
            f"which begins with {MAGIC!r} and has a checksum; run the same version of areal-jax everywhere, "
            "and let the source host take the samples back"
        )
    try:
        source, kind, values, starts, works = msgpack.unpackb(body, use_list=False, strict_map_key=False)
        place = {"OnDevices": OnDevices, "InFile": InFile}[kind](*values)
        commands = [_start(one) for one in starts]
        return Ticket(source, place, tuple(_work(commands[at], *plain) for at, *plain in works))
    except (ValueError, TypeError, KeyError, IndexError) as error:
        raise MoveError(
            f"the ticket of a move has an unknown form ({error!r}); run the same version of areal-jax on "
            "every machine, and let the source host take the samples back"
        ) from error


# --- parts --------------------------------------------------------------------------------------------------

_PLAIN = tuple(
    field.name for field in fields(HostSample) if field.name not in ("start", "sampling", "so_far")
)
_STARTS = tuple(field.name for field in fields(Start))


def _plain(work: HostSample) -> list[Any]:
    return [astuple(work.sampling), *(getattr(work, name) for name in _PLAIN)]


def _work(start: Start, plain: Sequence[Any], so_far: Sequence[Any] | None) -> HostSample:
    named = dict(zip(_PLAIN, plain[1:], strict=True))
    named["sample"], named["rebuilds"] = SampleId(*named["sample"]), tuple(named["rebuilds"])
    return HostSample(start=start, sampling=Sampling(*plain[0]), so_far=_so_far(so_far), **named)


def _start(values: Sequence[Any]) -> Start:
    start = Start(**dict(zip(_STARTS, values, strict=True)))
    sampling, penalties = start.sampling, start.penalties
    return replace(
        start,
        samples=tuple(SampleId(*sample) for sample in start.samples),
        sampling=None if sampling is None else Sampling(*sampling),  # type: ignore[misc]
        penalties=None if penalties is None else Penalties(*penalties),  # type: ignore[misc]
    )


def _plain_so_far(so_far: SoFar | None) -> list[Any] | None:
    if so_far is None:
        return None
    kv = so_far.kv
    leaves = {name: [str(leaf.dtype), leaf.shape] for name, leaf in to_plain(kv.cache).items()}
    return [so_far.rows.tobytes(), so_far.rows["support"].shape[1], len(kv.tokens), leaves]


def _so_far(plain: Sequence[Any] | None) -> SoFar | None:
    if plain is None:
        return None
    raw, support_size, length, leaves = plain
    rows = np.frombuffer(raw, record_dtype(support_size))
    tokens = np.zeros(length, np.int32)
    tokens[: len(rows)] = rows["tokens"]
    named = {name: jax.ShapeDtypeStruct(shape, jnp.dtype(dtype)) for name, (dtype, shape) in leaves.items()}
    return SoFar(rows, Prefix(KVPages(**named), tokens, np.asarray(len(rows), np.int32)))  # type: ignore[arg-type]
