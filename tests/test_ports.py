"""A reserved port is free for the server that it is meant for, and for no other."""

from __future__ import annotations

import secrets
import socket

import pytest

from areal_jax.serving.connections import listening
from tests.ports import reserved_ports


def test_a_server_binds_a_reserved_port_and_is_reached():
    with reserved_ports(2) as ports:
        assert ports[1] == ports[0] + 1
        with listening("127.0.0.1", ports[1]) as server, socket.create_connection(("127.0.0.1", ports[1])):
            server.accept()[0].close()
            with pytest.raises(OSError, match="in use"):
                listening("127.0.0.1", ports[1])


def test_two_reservations_never_share_a_port(monkeypatch: pytest.MonkeyPatch):
    randbelow = secrets.randbelow
    with reserved_ports() as (taken,):
        drawn = [taken - 10_000, taken - 10_001]
        monkeypatch.setattr(secrets, "randbelow", lambda below: drawn.pop() if drawn else randbelow(below))
        with reserved_ports(2) as others:
            assert drawn == [] and taken not in others


def test_a_reserved_port_is_free_afterwards():
    with reserved_ports() as (port,):
        pass
    with socket.socket() as other:
        other.bind(("127.0.0.1", port))


def test_the_kernel_ends_connections_of_clients_that_are_gone():
    with listening("127.0.0.1", 0) as server, socket.create_connection(server.getsockname()):
        accepted, _ = server.accept()
        with accepted:
            assert accepted.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
            names = ("TCP_KEEPIDLE", "TCP_KEEPINTVL", "TCP_KEEPCNT", "TCP_USER_TIMEOUT")
            numbers = [accepted.getsockopt(socket.IPPROTO_TCP, getattr(socket, name)) for name in names]
    assert numbers == [60, 10, 6, 120_000]
