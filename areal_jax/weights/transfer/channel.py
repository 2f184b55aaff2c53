"""A small request-and-answer channel over TCP: msgpack frames, a shared secret, a deadline on every step.

A frame is a length (4 bytes, big-endian) and that many bytes of msgpack; lists arrive as tuples. Both ends
prove that they know the secret before they exchange anything else: each end sends a random challenge, and
answers the other end's challenge with an HMAC-SHA256 of its own role and both challenges. The secret itself
is never sent. Later frames are neither encrypted nor signed, so connect machines only by a network that you
trust.
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
from contextlib import closing, contextmanager, suppress
from typing import Any, Protocol

import msgpack

from areal_jax.types import ArealError

FRAME_BYTES = 16 << 20
"""Longest accepted frame, in bytes. Before the peer has proved that it knows the secret, the limit is
STRANGER_BYTES.
"""
STRANGER_BYTES = 1 << 10
PROOF_S = 10.0
"""Seconds that a peer may take to prove that it knows the secret."""
MOST_PEERS = 256
"""Number of connections that a listener serves at once; it closes further connections."""
PROTOCOL = 3
"""The protocol's version, increased with every change that older programs cannot understand."""

_LENGTH = struct.Struct(">I")


class ChannelError(ArealError):
    """A peer cannot be reached, misses a deadline or has another secret, or an address cannot be used."""


class PeerSession(Protocol):
    """The listener's state for one connected peer; it answers that peer's requests."""

    def answer(self, request: dict[str, Any]) -> dict[str, Any]: ...

    def close(self) -> None: ...


def split(address: str) -> tuple[str, int]:
    """Returns the host and port of an address. Raises ChannelError if it is not `host:port`."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or int(port) > 65535:
        raise ChannelError(f"the address {address!r} is not of the form host:port, such as 127.0.0.1:7000")
    return host.strip("[]"), int(port)


def require_safe(address: str, secret: str | None) -> tuple[str, int]:
    """Returns the numeric host and the port of `address`, to listen at.

    Raises ChannelError if the address does not resolve, if it stands for every network interface (0.0.0.0),
    or if other machines can reach the address and `secret` is empty or None.
    """
    host, port = split(address)
    try:
        found = ipaddress.ip_address(socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][4][0])
    except (OSError, ValueError) as error:
        raise ChannelError(
            f"the address {address!r} cannot be resolved: {error}; check the host name"
        ) from None
    if found.is_unspecified:
        raise ChannelError(
            f"the address {address!r} stands for every network interface; give the address of the interface "
            "through which other machines reach this machine"
        )
    if not found.is_loopback and not secret:
        raise ChannelError(
            f"listening at {address!r} without a secret would let every program on the network connect: set "
            "AREAL_JAX_SECRET on every machine of the run, or listen at 127.0.0.1"
        )
    return str(found), port


# --- frames -------------------------------------------------------------------------------------------------


def _send(peer: socket.socket, message: dict[str, Any], end_s: float) -> None:
    body: bytes = msgpack.packb(message)  # type: ignore[assignment]
    if len(body) > FRAME_BYTES:
        raise ChannelError(
            f"a message has {len(body)} bytes, above the limit of {FRAME_BYTES} bytes; send it in several "
            "messages"
        )
    peer.settimeout(_left(end_s))
    peer.sendall(_LENGTH.pack(len(body)) + body)


def _receive(peer: socket.socket, end_s: float, most: int = FRAME_BYTES) -> dict[str, Any]:
    (size,) = _LENGTH.unpack(_exactly(peer, _LENGTH.size, end_s))
    if size > most:
        raise ChannelError(
            f"the peer sent a frame of {size} bytes, above the limit of {most}; check that the address is "
            "that of an areal-jax process"
        )
    try:
        found = msgpack.unpackb(_exactly(peer, size, end_s), use_list=False)
    except ValueError as error:
        raise ChannelError(
            f"the peer sent a frame that is not msgpack ({error}); check that its address is that of an "
            "areal-jax process"
        ) from None
    if not isinstance(found, dict):
        raise ChannelError(
            f"the peer sent a frame with a {type(found).__name__} instead of a map; run the same version of "
            "areal-jax everywhere"
        )
    return found


def _exactly(peer: socket.socket, size: int, end_s: float) -> bytes:
    data = bytearray()
    while len(data) < size:
        peer.settimeout(_left(end_s))
        part = peer.recv(min(size - len(data), 1 << 20))
        if not part:
            raise ConnectionResetError("the process at that address disconnected; see its log")
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
    """Runs the listener's side of the proof that listener and caller know the same secret.

    Raises ChannelError if the caller does not know the secret (the caller learns nothing but the refusal),
    and TimeoutError if the proof is not complete by `end_s`, a time of time.monotonic().
    """
    # A proof covers both challenges and the role: it cannot be replayed or sent back as the other side's.
    own = secrets.token_bytes(32)
    _send(peer, {"protocol": PROTOCOL, "challenge": own}, end_s)
    said = _receive(peer, end_s, STRANGER_BYTES)
    its, proof = said.get("challenge"), said.get("proof")
    is_known = isinstance(its, bytes) and len(its) == 32 and isinstance(proof, bytes)
    # In constant time: the duration must not reveal how many bytes of a guess are right.
    if not is_known or not hmac.compare_digest(proof, _proof(secret, "caller", own, its)):  # type: ignore[arg-type]
        _send(peer, {"refused": "the secrets differ"}, end_s)
        raise ChannelError("the caller has another secret; give both sides the same AREAL_JAX_SECRET")
    _send(peer, {"proof": _proof(secret, "listener", own, its)}, end_s)  # type: ignore[arg-type]


def _prove_to_listener(peer: socket.socket, secret: str | None, end_s: float) -> None:
    """Runs the caller's side of the proof that listener and caller know the same secret.

    Raises ChannelError if the secrets or the protocol's versions differ, and TimeoutError if the proof is not
    complete by `end_s`, a time of time.monotonic().
    """
    said, own = _receive(peer, end_s, STRANGER_BYTES), secrets.token_bytes(32)
    its = said.get("challenge")
    if said.get("protocol") != PROTOCOL or not isinstance(its, bytes) or len(its) != 32:
        raise ChannelError(
            f"the listener has version {said.get('protocol')} of the protocol, and this process {PROTOCOL}; "
            "run the same version of areal-jax everywhere"
        )
    _send(peer, {"challenge": own, "proof": _proof(secret, "caller", its, own)}, end_s)
    proof = _receive(peer, end_s, STRANGER_BYTES).get("proof")
    if not isinstance(proof, bytes) or not hmac.compare_digest(proof, _proof(secret, "listener", its, own)):
        raise ChannelError("the secrets differ: give trainer and hosts the same AREAL_JAX_SECRET")


# --- both ends ----------------------------------------------------------------------------------------------


class Listener:
    """Listens at an address until `close`, and answers the peers that prove that they know the secret.

    Each such peer has a thread and a session of its own.
    """

    def __init__(
        self, address: str, secret: str | None, begin: Callable[[], PeerSession], deadline_s: float
    ) -> None:
        """`begin()` makes a peer's session. `deadline_s`: seconds without a request until disconnection.

        Raises ChannelError if `require_safe` rejects the address, or the port cannot be opened.
        """
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
        self.host = host
        self.address = join(host, self._socket.getsockname()[1])
        """The host:port that callers use."""
        threading.Thread(target=self._accept, name=f"listening at {self.address}", daemon=True).start()

    def close(self) -> None:
        """Stops listening, and disconnects every peer."""
        with self._lock:
            self._is_closed = True
            sockets = [self._socket, *self._peers]
        for one in sockets:
            _hang_up(one)

    def _accept(self) -> None:
        # One thread per peer: one that is slow, or silent until its deadline, delays no other.
        while True:
            try:
                peer, _ = self._socket.accept()
            except OSError:  # the listener was closed
                return
            with self._lock:
                is_full = len(self._peers) >= MOST_PEERS
                if not is_full:
                    self._peers.add(peer)
            if is_full:
                logging.getLogger(__name__).warning(
                    "the listener at %s has %d connections, the maximum, and closed one more; hosts retry",
                    self.address,
                    MOST_PEERS,
                )
                _hang_up(peer)
            else:
                threading.Thread(target=self._serve, args=(peer,), name="a peer", daemon=True).start()

    def _serve(self, peer: socket.socket) -> None:
        try:
            _prove_to_caller(peer, self._secret, time.monotonic() + PROOF_S)
            with closing(self._begin()) as session:
                while True:
                    request = _receive(peer, time.monotonic() + self._deadline_s)
                    _send(peer, session.answer(request), time.monotonic() + self._deadline_s)
        except ConnectionResetError:  # the usual end: the peer closed
            pass
        except (OSError, ArealError) as error:
            if not self._is_closed:
                logging.getLogger(__name__).warning(
                    "the listener at %s closed a connection; if it was a host's, the host tries again: %s",
                    self.address,
                    error,
                )
        finally:
            with self._lock:
                self._peers.discard(peer)
            _hang_up(peer)


class Channel:
    """A caller's connection to a Listener; only one thread may use it at a time."""

    def __init__(self, address: str, secret: str | None, deadline_s: float) -> None:
        """Connects to the listener at `address` (host:port) and proves that this process knows the secret.

        `deadline_s`: seconds from now until which connecting, and all requests without an `end_s` of their
        own, must be complete. Raises ChannelError if the listener does not answer in time, or has another
        secret or another version of the protocol.
        """
        self.address, self._end_s = address, time.monotonic() + deadline_s
        with _naming(address):
            self._socket = socket.create_connection(split(address), _left(self._end_s))
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self.own_host: str = self._socket.getsockname()[0]
            try:
                _prove_to_listener(self._socket, secret, min(self._end_s, time.monotonic() + PROOF_S))
            except BaseException:
                self.close()
                raise

    def ask(self, request: dict[str, Any], end_s: float | None = None) -> dict[str, Any]:
        """Returns the listener's answer to `request`.

        Raises ChannelError if no answer arrives by `end_s`, a time of time.monotonic(); None: the
        constructor's deadline.
        """
        end_s = self._end_s if end_s is None else end_s
        with _naming(self.address):
            _send(self._socket, request, end_s)
            return _receive(self._socket, end_s)

    def close(self) -> None:
        _hang_up(self._socket)


@contextmanager
def _naming(address: str) -> Iterator[None]:
    """Raises network errors of the `with` block as ChannelError; puts `address` in front of each message."""
    try:
        yield
    except OSError as error:
        raise ChannelError(f"{address}: {error}") from error
    except ChannelError as error:
        raise ChannelError(f"{address}: {error}") from None


def join(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _hang_up(one: socket.socket) -> None:
    """Disconnects and closes a socket; a thread that waits for data of this socket returns."""
    with suppress(OSError):  # it was never connected, or the peer has closed
        one.shutdown(socket.SHUT_RDWR)
    one.close()
