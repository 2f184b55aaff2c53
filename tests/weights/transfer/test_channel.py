"""The channel between a publisher and its readers: who may speak, how long one waits, what is too long."""

from __future__ import annotations

import socket
import struct
import time
from collections.abc import Iterator
from contextlib import closing

import msgpack
import pytest

from areal_jax.weights.transfer import channel
from areal_jax.weights.transfer.channel import Channel, ChannelError, Listener, require_safe
from tests.hangs import HANG_S, ends

DEADLINE_S = HANG_S
SECRET = "between us"


class Echo:
    """Answers what it was asked, until asked to stay silent."""

    def answer(self, request: dict) -> dict:
        time.sleep(request.get("sleep_s", 0))
        return {"heard": request}

    def close(self) -> None: ...


@pytest.fixture
def listener() -> Iterator[Listener]:
    with closing(Listener("127.0.0.1:0", SECRET, Echo, DEADLINE_S)) as made:
        yield made


def test_what_is_asked_is_answered(listener: Listener):
    with closing(Channel(listener.address, SECRET, DEADLINE_S)) as one:
        assert one.ask({"a": [1, b"x", None]}) == {"heard": {"a": (1, b"x", None)}}
        with closing(Channel(listener.address, SECRET, DEADLINE_S)) as other:
            assert other.ask({"b": 2.5}) == {"heard": {"b": 2.5}}
        assert one.ask({}) == {"heard": {}}
        assert one.own_host == "127.0.0.1"


@pytest.mark.parametrize("secret", ["another", "", None])
def test_who_does_not_know_the_secret_is_turned_away(listener: Listener, secret):
    with pytest.raises(ChannelError, match=rf"{listener.address}: .*secrets differ.*AREAL_JAX_SECRET"):
        Channel(listener.address, secret, DEADLINE_S)
    with closing(Channel(listener.address, SECRET, DEADLINE_S)) as one:  # it goes on for others
        assert one.ask({"a": 1}) == {"heard": {"a": 1}}


@pytest.mark.parametrize("proof", [b"0" * 32, b"", None, "text"])
def test_a_caller_that_proves_nothing_is_answered_nothing(listener: Listener, proof):
    """One that does not look at the listener's own proof, as ours would."""
    end_s = time.monotonic() + DEADLINE_S
    with socket.create_connection(channel.split(listener.address), DEADLINE_S) as stranger:
        assert len(channel._receive(stranger, end_s)["challenge"]) == 32
        channel._send(stranger, {"challenge": b"1" * 32, "proof": proof}, end_s)
        assert channel._receive(stranger, end_s) == {"refused": "the secrets differ"}
        with pytest.raises(OSError):
            channel._send(stranger, {"a": 1}, end_s)
            channel._receive(stranger, end_s)


def test_the_secret_never_travels_and_no_proof_is_good_twice(monkeypatch, listener: Listener):
    sent = []
    send = channel._send
    monkeypatch.setattr(
        channel, "_send", lambda peer, message, end: (sent.append(message), send(peer, message, end))
    )
    for _ in range(2):
        Channel(listener.address, SECRET, DEADLINE_S).close()
    assert not [message for message in sent if SECRET.encode() in msgpack.packb(message)]
    proofs = [message["proof"] for message in sent if "proof" in message]
    assert len(proofs) == 4 and len(set(proofs)) == 4


def test_a_listener_that_does_not_know_the_secret_is_found_out():
    """It cannot pass for the publisher, even when it answers everything."""

    def pretend(peer: socket.socket, *_: object) -> None:
        end_s = time.monotonic() + DEADLINE_S
        channel._send(peer, {"protocol": channel.PROTOCOL, "challenge": b"0" * 32}, end_s)
        channel._receive(peer, end_s)
        channel._send(peer, {"proof": b"1" * 32}, end_s)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(channel, "_prove_to_caller", pretend)
        with (
            closing(Listener("127.0.0.1:0", None, Echo, DEADLINE_S)) as false,
            pytest.raises(ChannelError, match="secrets differ"),
        ):
            Channel(false.address, SECRET, DEADLINE_S)


@pytest.mark.parametrize(
    "sent",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        struct.pack(">I", 1 << 31),
        struct.pack(">I", 3) + b"\xc1\xc1\xc1",
        b"\0\0\0\1\x05",
    ],
    ids=["words", "a giant frame", "no msgpack", "no map"],
)
def test_a_stranger_is_hung_up_on(listener: Listener, sent: bytes, monkeypatch: pytest.MonkeyPatch):
    """For what it says, long before the time is over in which it may prove that it knows the secret."""
    monkeypatch.setattr(channel, "PROOF_S", 10 * HANG_S)
    with socket.create_connection(channel.split(listener.address), DEADLINE_S / 2) as stranger:
        heard = b""
        stranger.sendall(sent)
        while part := stranger.recv(4096):
            heard += part
    assert len(heard) < 200  # its challenge, and no more
    Channel(listener.address, SECRET, DEADLINE_S).close()


def test_a_peer_that_says_nothing_is_not_waited_for():
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        with pytest.raises(ChannelError, match=rf"{address}: timed out"):
            ends(lambda: Channel(address, SECRET, 0.3))


def test_an_answer_that_does_not_come_is_not_waited_for(listener: Listener):
    with (
        closing(Channel(listener.address, SECRET, DEADLINE_S)) as one,
        pytest.raises(ChannelError, match="timed out"),
    ):
        one.ask({"sleep_s": 2.0}, time.monotonic() + 0.2)


def test_a_listener_that_closes_hangs_up(listener: Listener):
    one = Channel(listener.address, SECRET, DEADLINE_S)
    listener.close()
    with pytest.raises(ChannelError, match=listener.address):
        one.ask({})
    with pytest.raises(ChannelError, match=listener.address):
        Channel(listener.address, SECRET, DEADLINE_S)


def test_a_message_beyond_the_limit_is_not_sent(listener: Listener, monkeypatch):
    monkeypatch.setattr(channel, "FRAME_BYTES", 1000)
    with (
        closing(Channel(listener.address, SECRET, DEADLINE_S)) as one,
        pytest.raises(ChannelError, match=r"a message has 20\d\d bytes, above the limit of 1000 bytes"),
    ):
        one.ask({"a": b"0" * 2000})


@pytest.mark.parametrize(
    "address, secret, said",
    [
        ("192.0.2.7:0", None, "without a secret would let every program"),
        ("192.0.2.7:0", "", "without a secret would let every program"),
        ("0.0.0.0:0", SECRET, "stands for every network interface"),
        ("[::]:0", SECRET, "stands for every network interface"),
        ("127.0.0.1", SECRET, "not of the form host:port"),
        ("127.0.0.1:99999", SECRET, "not of the form host:port"),
    ],
)
def test_addresses_that_may_not_be_listened_at(address, secret, said):
    with pytest.raises(ChannelError, match=said) as refused:
        require_safe(address, secret)
    assert repr(address) in str(refused.value)


def test_addresses_that_may():
    assert require_safe("127.0.0.1:0", None) == ("127.0.0.1", 0)
    assert require_safe("[::1]:5", None) == ("::1", 5)
    assert require_safe("192.0.2.7:17", SECRET) == ("192.0.2.7", 17)
