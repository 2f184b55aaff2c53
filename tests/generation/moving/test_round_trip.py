"""What a Sender offers is what a Receiver fetches, to the bit; what cannot be fetched is a clear error."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from dataclasses import fields, replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import NamedSharding, PartitionSpec

from areal_jax.generation.admission import reason_against_kv
from areal_jax.generation.commands import HostSample, SoFar, Start
from areal_jax.generation.live_slots import record_dtype
from areal_jax.generation.moving import sender as sending
from areal_jax.generation.moving.page_runs import pieces_of, runs, used_bytes
from areal_jax.generation.moving.receiver import Receiver
from areal_jax.generation.moving.sender import DirectSender, Sender, StagedSender, make_sender
from areal_jax.generation.moving.ticket import MoveError, OnDevices, Ticket, encode
from areal_jax.generation.slots import Penalties, Prefix
from areal_jax.models.kv_pages import KVPages
from areal_jax.parallel.mesh import make_mesh
from areal_jax.types import SampleId, Sampling, VersionedParams
from tests.generation.conftest import LENGTH, make_engine
from tests.hangs import HANG_S, ends

NAME = "generate-1"
LAYERS, BUCKET, HEADS, PAGE, DIM = 2, 4, 2, 8, 8
DTYPES = "float32", "bfloat16", "uint16", "int8"
"""bfloat16 on an accelerator is uint16 on a CPU; int8 has scales."""
WAYS = pytest.mark.parametrize("way", ["direct", "staged"])


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Callable[..., Sender]]:
    """`make("direct" or "staged")`: a sender, closed in the end."""
    with ExitStack() as open_now:
        yield lambda way, **settings: open_now.enter_context(
            closing(make_sender(NAME, tmp_path, is_direct=way == "direct", **settings))
        )


@pytest.fixture
def receiver(engine, tmp_path: Path) -> Receiver:
    return Receiver(engine, tmp_path, deadline_s=HANG_S)


def random_bits(numbers: np.random.Generator, shape: tuple[int, ...], dtype: str) -> np.ndarray:
    """Every bit pattern may occur, those of infinities and NaN too; of bfloat16's NaN patterns only one.

    XLA's CPU backend copies bfloat16 as float32, which keeps all numbers, but not the bits of a NaN.
    """
    kind = np.dtype(jnp.dtype(dtype))
    found = numbers.integers(0, 256, (*shape[:-1], shape[-1] * kind.itemsize), np.uint8).view(kind)
    if dtype == "bfloat16":
        with np.errstate(invalid="ignore"):
            found[np.isnan(found)] = np.nan
    return found


def half_decoded(
    member: int = 0, tokens: int = 20, dtype: str = "float32", sharding: object = None, is_host: bool = False
) -> HostSample:
    numbers = np.random.default_rng(member)
    shape = (LAYERS, 1 + BUCKET, HEADS, PAGE, DIM)
    leaves = [random_bits(numbers, shape, dtype) for _ in range(2)]
    if dtype == "int8":
        leaves += [random_bits(numbers, (*shape[:-1], 1), "float32") for _ in range(2)]
    rows = np.zeros(tokens, record_dtype(3))
    rows["tokens"], rows["logp"] = numbers.integers(0, 17, tokens), numbers.normal(size=tokens)
    rows["versions"], rows["support"] = 6, numbers.integers(-1, 17, (tokens, 3))
    padded = np.zeros(LENGTH, np.int32)
    padded[:tokens] = rows["tokens"]
    cache = KVPages(*(leaves if is_host else jax.device_put(leaves, sharding)))
    work = HostSample(
        SampleId(4, member, 1), START, Sampling(0.7, 5, 0.9, 0.01, 64, ("so", "stop")), 11, (1, 2)
    )
    return replace(
        work,
        so_far=SoFar(rows, Prefix(cache, padded, np.asarray(tokens, np.int32))),
        version=6,
        digest="d1",
        prompt_version=5,
        interruptions=2,
        is_stale=member == 1,
    )


START = Start(
    tuple(SampleId(4, member, 1) for member in range(3)),
    (3, 1, 2),
    5,
    penalties=Penalties(1.5, 0.25, {7: -2.0}),
    stop_tokens=(9,),
    drawn_as=8,
)


def bits(leaf: object) -> bytes:
    return np.ascontiguousarray(np.asarray(leaf)).tobytes()


def assert_same_kv(found: HostSample, sent: HostSample) -> None:
    """Used pages to the bit, and zeros elsewhere."""
    assert found.so_far is not None and sent.so_far is not None
    here, there = found.so_far.kv, sent.so_far.kv
    used = -(-(int(there.true_length) - 1) // PAGE)
    for mine, its in zip(jax.tree.leaves(here.cache), jax.tree.leaves(there.cache), strict=True):
        assert (mine.shape, mine.dtype) == (its.shape, its.dtype)
        assert bits(mine[:, 1 : 1 + used]) == bits(np.asarray(its)[:, 1 : 1 + used])
        assert not any(bits(mine[:, :1])) and not any(bits(mine[:, 1 + used :]))
    np.testing.assert_array_equal(here.tokens, there.tokens)
    assert int(here.true_length) == int(there.true_length)
    assert found.so_far.rows.dtype == sent.so_far.rows.dtype
    assert bits(found.so_far.rows) == bits(sent.so_far.rows)


# --- what arrives -------------------------------------------------------------------------------------------


@WAYS
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("is_host", [False, True], ids=["on a device", "in host memory"])
def test_kv_of_every_dtype_arrives_to_the_bit(make, receiver, way, dtype, is_host):
    sent = half_decoded(dtype=dtype, is_host=is_host)
    (found,) = receiver.fetch(make(way).offer([sent]))
    assert_same_kv(found, sent)
    assert receiver.bytes_per_s is not None and receiver.bytes_per_s > 0


@WAYS
@pytest.mark.parametrize("tokens", [2, 9, 10, 25, 32])
def test_only_pages_in_use_move(make, receiver, tmp_path, way, tokens):
    """Of a cache of 4 pages and a scratch page: 1, 1, 2, 3 and 4 pages."""
    sent = half_decoded(tokens=tokens)
    pages = {2: 1, 9: 1, 10: 2, 25: 3, 32: 4}[tokens]
    size = pages * 2 * LAYERS * HEADS * PAGE * DIM * 4
    (found,) = receiver.fetch(make(way).offer([sent]))
    assert_same_kv(found, sent)
    moved = sum(piece.nbytes for one in pieces_of(sent.so_far.kv).values() for _, piece in one)
    files = [path.stat().st_size for path in tmp_path.rglob("*.kv")]
    assert moved == used_bytes(sent.so_far.kv) == size
    assert files == ([size] if way == "staged" else [])


@WAYS
def test_every_field_of_a_groups_samples_arrives(make, receiver, way):
    """With one that has no token yet, and so no KV."""
    unbegun = replace(half_decoded(2), so_far=None, version=-1, digest="", prompt_version=-1)
    sent = [half_decoded(0), unbegun, half_decoded(1, tokens=9)]
    ticket = make(way).offer(sent)
    assert len(ticket) < 4096
    found = receiver.fetch(ticket)
    for mine, its in zip(found, sent, strict=True):
        for field in fields(HostSample):
            if field.name != "so_far":
                assert getattr(mine, field.name) == getattr(its, field.name), field.name
    assert found[1].so_far is None and found[0].start is found[1].start
    for place in 0, 2:
        assert_same_kv(found[place], sent[place])


@WAYS
@pytest.mark.parametrize("devices", [(2, 1), (1, 2), (2, 2)], ids=str)
def test_kv_moves_between_meshes_that_split_its_heads_differently(make, model, tmp_path, way, devices):
    source, target = (make_mesh({"tensor": count}, jax.devices(), "a host") for count in devices)
    spec = PartitionSpec(None, None, "tensor")
    sent = half_decoded(dtype="int8", sharding=NamedSharding(source, spec))
    engine = make_engine(model, mesh=target, kv_dtype="int8")
    (found,) = Receiver(engine, tmp_path).fetch(make(way).offer([sent]))
    assert_same_kv(found, sent)
    assert all(leaf.sharding == engine.kv_sharding for leaf in jax.tree.leaves(found.so_far.kv.cache))


def test_other_pages_and_other_records_are_refused_with_the_ticket_alone(engine, model, make):
    held = {6: VersionedParams(6, {}, "d1")}
    offered = half_decoded()
    plain = replace(offered, so_far=replace(offered.so_far, rows=np.zeros(20, record_dtype(0))))
    for work, changes in (plain, {"page_tokens": 4}), (plain, {"kv_dtype": "int8"}), (offered, {}):
        reason = reason_against_kv(make_engine(model, **changes), work, held, "host-2")
        assert "another layout than those of host-2; start both hosts with the same generation" in reason
    assert reason_against_kv(engine, plain, held, "host-2") == ""


@given(st.integers(0, 5000))
def test_runs_cover_each_page_in_use_once_and_are_few(pages):
    found = runs(pages)
    assert [page for start, stop in found for page in range(start, stop)] == list(range(1, pages + 1))
    sizes = [stop - start for start, stop in found]
    assert all(size & (size - 1) == 0 for size in sizes) and len(set(sizes)) == len(sizes)


# --- what is released ---------------------------------------------------------------------------------------


@WAYS
def test_a_released_sample_cannot_be_fetched_and_releasing_twice_is_harmless(
    make, receiver, engine, tmp_path, way
):
    sender, hasty = make(way), Receiver(engine, tmp_path, deadline_s=0.3)
    sent = [half_decoded(0), half_decoded(1)]
    ticket, other = sender.offer(sent), sender.offer([half_decoded(2)])
    for _ in range(2):
        sender.release([SampleId(99, 0)])  # of no offer
        sender.release(work.sample for work in sent)
    with pytest.raises(MoveError, match=r"samples 4/0\.1, 4/1\.1 could not be fetched from generate-1"):
        hasty.fetch(ticket)
    assert_same_kv(receiver.fetch(other)[0], half_decoded(2))
    sender.release([half_decoded(2).sample])
    assert list(tmp_path.rglob("*.kv")) == []


def test_files_of_a_killed_process_are_deleted_when_its_successor_starts(tmp_path):
    StagedSender(NAME, tmp_path).offer([half_decoded()])
    StagedSender("generate-11", tmp_path).offer([half_decoded()])
    assert len(list(tmp_path.rglob("*.kv"))) == 2
    StagedSender(NAME, tmp_path)
    assert [path.parent.name for path in tmp_path.rglob("*.kv")] == ["generate-11"]


# --- what fails ---------------------------------------------------------------------------------------------

REMEDY = r"the samples are still at generate-1, which can take them back; if it is lost, start them again"


@pytest.mark.parametrize("harm", ["cut", "changed"])
def test_a_damaged_file_is_refused(make, receiver, tmp_path, harm):
    ticket = make("staged").offer([half_decoded()])
    (path,) = tmp_path.rglob("*.kv")
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data if harm == "changed" else data[:-1])
    with pytest.raises(MoveError, match=rf"sample 4/0\.1 .* {path} is damaged: .* check the disk; {REMEDY}"):
        receiver.fetch(ticket)


def test_kv_that_cannot_be_written_is_an_error(make, tmp_path):
    sender = make("staged")
    (tmp_path / NAME).write_text("in the way of the folder")
    with pytest.raises(MoveError, match=r"generate-1 could not write the KV of sample 4/0\.1 to .*free spa"):
        sender.offer([half_decoded()])


def test_a_half_written_file_is_deleted(make, tmp_path, monkeypatch):
    def full(data: object, value: int = 0) -> int:
        raise OSError("No space left on device")

    monkeypatch.setattr(sending.zlib, "crc32", full)
    with pytest.raises(MoveError, match="No space left on device"):
        make("staged").offer([half_decoded()])
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


@pytest.mark.parametrize("harm", ["closed", "silent", "hangs in mid pull"])
def test_a_lost_source_is_an_error_within_the_deadline(make, engine, tmp_path, monkeypatch, harm):
    sender, receiver = make("direct"), Receiver(engine, tmp_path, deadline_s=0.5)
    ticket = sender.offer([half_decoded()])
    with socket.create_server(("127.0.0.1", 0)) as silent:
        if harm == "closed":
            sender.close()
        elif harm == "silent":
            place = OnDevices(f"127.0.0.1:{silent.getsockname()[1]}", 1)
            ticket = encode(Ticket(NAME, place, (half_decoded(),)))
        else:
            monkeypatch.setattr(sending.Offers, "add", lambda self, arrays: 12345)
        with pytest.raises(MoveError, match=rf"4/0\.1 could not be fetched from generate-1 .*{REMEDY}"):
            ends(lambda: receiver.fetch(ticket))


def test_only_hosts_with_the_secret_fetch(make, engine, tmp_path):
    ticket = make("direct", secret="ours").offer([half_decoded()])
    with pytest.raises(MoveError, match="the secrets differ"):
        Receiver(engine, tmp_path, "theirs").fetch(ticket)
    assert_same_kv(Receiver(engine, tmp_path, "ours").fetch(ticket)[0], half_decoded())


@pytest.mark.parametrize("harm", [lambda t: t[:-1], lambda t: b"AJT3" + t[4:], lambda t: b""])
def test_a_damaged_ticket_is_refused(make, receiver, harm):
    ticket = make("direct").offer([half_decoded()])
    with pytest.raises(MoveError, match="are not the complete ticket of a move"):
        receiver.fetch(harm(ticket))


def test_a_platform_without_transfers_moves_samples_through_files(monkeypatch, tmp_path, caplog):
    def unsupported(host: str) -> None:
        raise jax.errors.JaxRuntimeError("UNIMPLEMENTED: no transfers here")

    assert isinstance(make_sender(NAME, tmp_path, is_direct=True), DirectSender)
    monkeypatch.setattr(sending, "start_server", unsupported)
    assert isinstance(make_sender(NAME, tmp_path, is_direct=True), StagedSender)
    assert "samples move through files" in caplog.text
