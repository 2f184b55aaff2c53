from __future__ import annotations

import dataclasses
import zlib

import msgpack
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal_jax.trajectories.codec import CodecError, decode, encode
from areal_jax.types import ArealError, SampleId, Trajectory
from tests.trajectories.samples import assert_same, trajectories, trajectory


@given(trajectories())
def test_decoding_gives_back_every_bit(one: Trajectory):
    assert_same(decode(encode(one)), one)


@given(trajectories(), st.data())
def test_a_blob_cut_anywhere_is_refused(one: Trajectory, data: st.DataObject):
    blob = encode(one)
    with pytest.raises(CodecError):
        decode(blob[: data.draw(st.integers(0, len(blob) - 1))])


@given(trajectories(), st.data())
def test_a_blob_with_a_flipped_bit_is_refused(one: Trajectory, data: st.DataObject):
    blob = bytearray(encode(one))
    blob[data.draw(st.integers(0, len(blob) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    with pytest.raises(CodecError):
        decode(bytes(blob))


@given(st.binary(max_size=64))
def test_foreign_bytes_are_refused(blob: bytes):
    with pytest.raises(ArealError):
        decode(blob)


def test_a_blob_of_another_form_is_refused_with_the_reason():
    whole = encode(trajectory(SampleId(1, 2)))
    fields = msgpack.unpackb(whole[8:])
    for broken in (fields[:-1], [*fields, 1], [fields[0], fields[1][:-1], *fields[2:]], 7):
        body = msgpack.packb(broken)
        with pytest.raises(CodecError, match="has an unknown form"):
            decode(b"AJT3" + zlib.crc32(body).to_bytes(4, "little") + body)


def test_arrays_are_little_endian_whatever_they_were():
    one = trajectory(SampleId(3, 0))
    swapped = dataclasses.replace(one, tokens=one.tokens.astype(">i4"))
    assert encode(swapped) == encode(one)


def test_decoded_arrays_cannot_be_written():
    with pytest.raises(ValueError, match="read-only"):
        decode(encode(trajectory(SampleId(0, 0)))).tokens[0] = 1


def test_a_dtype_that_trajectories_do_not_have_is_named():
    one = dataclasses.replace(trajectory(SampleId(0, 0)), behavior_logp=np.zeros(6))
    with pytest.raises(CodecError, match="behavior_logp is float64"):
        encode(one)
