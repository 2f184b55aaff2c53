"""A small request and answer channel over TCP: msgpack frames, a shared secret, a deadline on every step.

A frame is a length (4 bytes, big-endian) and that many bytes of msgpack. Both ends prove that they know the
secret before anything else is said: each sends a random challenge, and answers the other's with HMAC-SHA256
of its role and both challenges. The secret itself never travels. What follows is neither encrypted nor
signed: beyond one machine, the network is to be one that you trust.
"""

from __future__ import annotations

import hmac
import ipaddress
import logging
import secrets
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, Protocol

import msgpack

from areal_jax.types import ArealError

FRAME_BYTES = 16 << 20
"""Longest frame; one of a stranger is at most STRANGER_BYTES."""
STRANGER_BYTES = 1 << 10
PROOF_S = 10.0
"""How long a peer may take to prove that it knows the secret."""
MOST_PEERS = 256
"""Connections served at once."""
PROTOCOL = 1
"""Raised whenever an older program could not speak with a newer one."""

_LENGTH = struct.Struct(">I")


class ChannelError(ArealError):
    """A peer that cannot be reached, says nothing in time, or does not know the secret."""


class Session(Protocol):
    """What the listener holds for one peer."""

    def answer(self, request: dict[str, Any]) -> dict[str, Any]: ...

    def close(self) -> None: ...


def split(address: str) -> tuple[str, int]:
    """Host and port of `host:port`. Raises ChannelError."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or int(port) > 65535:
        raise ChannelError(f"the address {address!r} is not of the form host:port")
    return host.strip("[]"), int(port)


def require_safe(address: str, secret: str | None) -> tuple[str, int]:
    """The numeric host and the port to listen at.

    Raises ChannelError for one beyond this machine where there is no secret, or one that is no machine's own.
    """
    host, port = split(address)
    try:
        found = ipaddress.ip_address(socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][4][0])
    except (OSError, ValueError) as error:
        raise ChannelError(f"the address {address!r} names no machine: {error}") from None
    if found.is_unspecified:
        raise ChannelError(
            f"the address {address!r} stands for every interface; give this machine's own one, which peers "
            "are told to connect to"
        )
    if not found.is_loopback and not secret:
        raise ChannelError(
            f"listening at {address!r} without a secret would let anybody on the network in: set "
            "AREAL_JAX_SECRET on every machine of the run, or stay on 127.0.0.1"
        )
    return str(found), port


# --- frames -------------------------------------------------------------------------------------------------


def _send(peer: socket.socket, message: dict[str, Any], end_s: float) -> None:
    body: bytes = msgpack.packb(message)  # type: ignore[assignment]
    if len(body) > FRAME_BYTES:
        raise ChannelError(f"a message of {len(body)} bytes; at most {FRAME_BYTES} are sent")
    peer.settimeout(_left(end_s))
    peer.sendall(_LENGTH.pack(len(body)) + body)


def _receive(peer: socket.socket, end_s: float, most: int = FRAME_BYTES) -> dict[str, Any]:
    (size,) = _LENGTH.unpack(_exactly(peer, _LENGTH.size, end_s))
    if size > most:
        raise ChannelError(f"a frame of {size} bytes, where at most {most} are taken; who speaks there?")
    try:
        found = msgpack.unpackb(_exactly(peer, size, end_s))
    except ValueError as error:
        raise ChannelError(f"a frame that is no msgpack: {error}") from None
    if not isinstance(found, dict):
        raise ChannelError(f"a frame that holds no map but a {type(found).__name__}")
    return found


def _exactly(peer: socket.socket, size: int, end_s: float) -> bytes:
    data = bytearray()
    while len(data) < size:
        peer.settimeout(_left(end_s))
        part = peer.recv(min(size - len(data), 1 << 20))
        if not part:
            raise ConnectionResetError("the peer closed the connection")
        data += part
    return bytes(data)


def _left(end_s: float) -> float:
    left_s = end_s - time.monotonic()
    if left_s <= 0:
        raise TimeoutError("timed out")
    return left_s


# --- the proof ----------------------------------------------------------------------------------------------


def _proof(secret: str | None, role: str, listener: bytes, caller: bytes) -> bytes:
    return hmac.digest((secret or "").encode(), role.encode() + b"\0" + listener + caller, "sha256")


def _prove_to_caller(peer: socket.socket, secret: str | None, end_s: float) -> None:
    """The listener's side. A caller that does not know the secret learns nothing but that."""
    own = secrets.token_bytes(32)
    _send(peer, {"protocol": PROTOCOL, "challenge": own}, end_s)
    said = _receive(peer, end_s, STRANGER_BYTES)
    its, proof = said.get("challenge"), said.get("proof")
    is_known = isinstance(its, bytes) and len(its) == 32 and isinstance(proof, bytes)
    if not is_known or not hmac.compare_digest(proof, _proof(secret, "caller", own, its)):  # type: ignore[arg-type]
        _send(peer, {"refused": "the secrets differ"}, end_s)
        raise ChannelError("a caller without the secret")
    _send(peer, {"proof": _proof(secret, "listener", own, its)}, end_s)  # type: ignore[arg-type]


def _prove_to_listener(peer: socket.socket, secret: str | None, end_s: float) -> None:
    """The caller's side."""
    said, own = _receive(peer, end_s, STRANGER_BYTES), secrets.token_bytes(32)
    its = said.get("challenge")
    if said.get("protocol") != PROTOCOL or not isinstance(its, bytes) or len(its) != 32:
        raise ChannelError(f"it speaks protocol {said.get('protocol')}, not {PROTOCOL}; run one release")
    _send(peer, {"challenge": own, "proof": _proof(secret, "caller", its, own)}, end_s)
    proof = _receive(peer, end_s, STRANGER_BYTES).get("proof")
    if not isinstance(proof, bytes) or not hmac.compare_digest(proof, _proof(secret, "listener", its, own)):
        raise ChannelError("the secrets differ: give both the same AREAL_JAX_SECRET")


# --- both ends ----------------------------------------------------------------------------------------------


class Listener:
    """Serves each peer in a thread of its own; `begin()` makes what answers it. Listens once made."""

    def __init__(
        self, address: str, secret: str | None, begin: Callable[[], Session], deadline_s: float
    ) -> None:
        """`deadline_s`: how long a peer may be silent. Raises ChannelError where it may or can not listen."""
        host, port = require_safe(address, secret)
        self._secret, self._begin, self._deadline_s = secret, begin, deadline_s
        self._peers: set[socket.socket] = set()
        self._lock = threading.Lock()
        self._is_closed = False
        try:
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            self._socket = socket.create_server((host, port), family=family)
        except OSError as error:
            raise ChannelError(f"could not listen at {address}: {error}; choose another port") from error
        self.host, self.port = host, self._socket.getsockname()[1]
        threading.Thread(target=self._accept, name=f"listening at {self.port}", daemon=True).start()

    @property
    def address(self) -> str:
        """host:port as callers reach it."""
        return join(self.host, self.port)

    def close(self) -> None:
        """Listen no more, and hang up on everybody."""
        with self._lock:
            self._is_closed = True
            everybody = [self._socket, *self._peers]
        for one in everybody:
            _hang_up(one)

    def _accept(self) -> None:
        while True:
            try:
                peer, _ = self._socket.accept()
            except OSError:  # closed
                return
            with self._lock:
                is_full = len(self._peers) >= MOST_PEERS
                if not is_full:
                    self._peers.add(peer)
            if is_full:
                _log().warning("turned a peer away: %d are connected", MOST_PEERS)
                _hang_up(peer)
            else:
                threading.Thread(target=self._serve, args=(peer,), name="a peer", daemon=True).start()

    def _serve(self, peer: socket.socket) -> None:
        session = None
        try:
            _prove_to_caller(peer, self._secret, time.monotonic() + PROOF_S)
            session = self._begin()
            while True:
                request = _receive(peer, time.monotonic() + self._deadline_s)
                _send(peer, session.answer(request), time.monotonic() + self._deadline_s)
        except ConnectionResetError:  # the usual end
            pass
        except (OSError, ArealError) as error:
            if not self._is_closed:
                _log().warning("a peer of %s was hung up on: %s", self.address, error)
        finally:
            with self._lock:
                self._peers.discard(peer)
            _hang_up(peer)
            if session is not None:
                session.close()


class Channel:
    """The calling end; not for two threads at once."""

    def __init__(self, address: str, secret: str | None, deadline_s: float) -> None:
        """Raises ChannelError."""
        self.address, self._end_s = address, time.monotonic() + deadline_s
        with _told(address):
            self._socket = socket.create_connection(split(address), _left(self._end_s))
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self.host: str = self._socket.getpeername()[0]
            self.own_host: str = self._socket.getsockname()[0]
            try:
                _prove_to_listener(self._socket, secret, min(self._end_s, time.monotonic() + PROOF_S))
            except BaseException:
                self.close()
                raise

    def ask(self, request: dict[str, Any], end_s: float | None = None) -> dict[str, Any]:
        """The answer, by `end_s` of time.monotonic(), else by the deadline given at first."""
        end_s = self._end_s if end_s is None else end_s
        with _told(self.address):
            _send(self._socket, request, end_s)
            return _receive(self._socket, end_s)

    def close(self) -> None:
        _hang_up(self._socket)


@contextmanager
def _told(address: str) -> Iterator[None]:
    """What goes wrong inside is told as ChannelError, with the address."""
    try:
        yield
    except OSError as error:
        raise ChannelError(f"{address}: {error}") from error
    except ChannelError as error:
        raise ChannelError(f"{address}: {error}") from None


def join(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _hang_up(one: socket.socket) -> None:
    """A thread that waits in it wakes up."""
    with suppress(OSError):  # it was never connected, or is not any more
        one.shutdown(socket.SHUT_RDWR)
    one.close()


def _log() -> logging.Logger:
    return logging.getLogger(__name__)
