"""The byte form of a trajectory: raw little-endian arrays in msgpack, after a magic number and a checksum."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from hashlib import blake2b
from typing import Any, cast

import msgpack
import numpy as np

from areal_jax.trajectories.paths import paths_of
from areal_jax.types import ArealError, SampleId, Sampling, Trajectory

MAGIC = b"AJT3"
"""The first bytes of every encoded trajectory; the digit is the format's number."""

ARRAYS = ("tokens", "loss_mask", "behavior_logp", "versions", "turn_ids", "support")
OPTIONAL = ("experts",)
"""Arrays that are left out where there are none, so that older programs read what they know."""
PRODUCED = ("tokens", "behavior_logp", "versions", "support")
"""The arrays that a host produces, the prompt's part included, and the OPTIONAL ones; the other ones follow
from the prompt.
"""

DTYPES = {"int32": "<i4", "bool": "|b1", "float32": "<f4", "uint8": "|u1"}
NAMES = {np.dtype(name): name for name in DTYPES}  # by dtype, since numpy computes a dtype's name slowly

_HEAD_BYTES = len(MAGIC) + 4
_FIELDS = 9  # of a trajectory without branches


class CodecError(ArealError):
    """Bytes are not a complete trajectory of this format, or a trajectory cannot be encoded."""


def encode(trajectory: Trajectory) -> bytes:
    """Returns a trajectory as bytes. Raises CodecError for an array of another dtype than DTYPES has."""
    body = cast(bytes, msgpack.packb(_fields(trajectory)))
    return b"".join((MAGIC, zlib.crc32(body).to_bytes(4, "little"), body))


def _fields(trajectory: Trajectory) -> list[Any]:
    s = trajectory.sampling
    fields = [
        [int(part) for part in trajectory.sample],
        _encode_arrays(trajectory, ARRAYS),
        [float(s.temperature), int(s.top_k), float(s.top_p), float(s.min_p), int(s.max_tokens), list(s.stop)],
        trajectory.stop_reason,
        None if trajectory.reward is None else float(trajectory.reward),
        {str(name): float(value) for name, value in trajectory.reward_parts.items()},
        trajectory.reward_note,
        int(trajectory.interruptions),
        trajectory.on_update,
    ]
    # Left out where there are none, so that older programs read what they know.
    return [*fields, list(map(_fields, trajectory.branches))] if trajectory.branches else fields


def digest_of(trajectory: Trajectory) -> str:
    """Returns a hash of what hosts produced: tokens, log-probs, versions and supports, bit for bit."""
    arrays = [array for path in paths_of(trajectory) for array in _encode_arrays(path, PRODUCED)]
    return blake2b(cast(bytes, msgpack.packb(arrays)), digest_size=8).hexdigest()


def decode(blob: bytes) -> Trajectory:
    """Returns the trajectory that `encode` turned into the bytes `blob`; its arrays are read-only.

    Raises CodecError if the bytes are damaged or are not a trajectory.
    """
    if blob[: len(MAGIC)] != MAGIC:
        raise CodecError(
            f"{len(blob)} bytes that begin with {bytes(blob[:4])!r} are not a trajectory, which begins with "
            f"{MAGIC!r}; if another version of areal-jax wrote the journal, use that version"
        )
    body = memoryview(blob)[_HEAD_BYTES:]
    if int.from_bytes(blob[len(MAGIC) : _HEAD_BYTES], "little") != zlib.crc32(body):
        raise CodecError(
            f"a trajectory of {len(blob)} bytes is cut short or damaged: its checksum differs; the disk or "
            "the copy of the journal is at fault, so restore the journal from a backup"
        )
    try:
        return _trajectory(msgpack.unpackb(body))
    except (ValueError, TypeError, KeyError, msgpack.UnpackException) as error:
        raise CodecError(
            f"a trajectory of {len(blob)} bytes has an unknown form ({error}); use the areal-jax version "
            "that wrote it"
        ) from error


def _trajectory(fields: Sequence[Any]) -> Trajectory:
    """Returns the trajectory of which `_fields` made these values."""
    whole = fields if len(fields) == _FIELDS + 1 else [*fields, ()]
    sample, arrays, sampling, stop_reason, reward, parts, note, interruptions, on_update, branches = whole
    names = (*ARRAYS, *OPTIONAL)[: max(len(ARRAYS), len(arrays))]
    named = {name: _decode_array(packed) for name, packed in zip(names, arrays, strict=True)}
    return Trajectory(
        sample=SampleId(*sample),
        sampling=Sampling(*sampling[:-1], stop=tuple(sampling[-1])),
        stop_reason=stop_reason,
        reward=reward,
        reward_parts=parts,
        reward_note=note,
        interruptions=interruptions,
        on_update=on_update,
        branches=tuple(map(_trajectory, branches)),
        **named,
    )


def _encode_arrays(trajectory: Trajectory, names: Sequence[str]) -> list[Any]:
    given = [name for name in OPTIONAL if getattr(trajectory, name) is not None]
    return [_encode_array(name, getattr(trajectory, name)) for name in (*names, *given)]


def _encode_array(name: str, array: Any) -> list[Any] | None:
    if array is None:
        return None
    array = np.asarray(array)
    kind = NAMES.get(array.dtype.newbyteorder("="))
    if kind is None:
        raise CodecError(
            f"Trajectory.{name} is {array.dtype}, but must be one of {', '.join(DTYPES)}: cast it with astype"
        )
    return [kind, array.shape, array.astype(DTYPES[kind], copy=False).tobytes()]


def _decode_array(packed: list[Any] | None) -> Any:
    if packed is None:
        return None
    name, shape, raw = packed
    return np.frombuffer(raw, DTYPES[name]).reshape(shape).astype(name, copy=False)
