"""Redis over TLS: a connection needs the authority's certificate and the password."""

from __future__ import annotations

import shlex
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from areal_jax.cluster.redis_link import Link
from areal_jax.types import ArealError
from tests.hangs import HANG_S
from tests.ports import reserved_ports
from tests.programs import require
from tests.redis_servers import SECRET

KEY = "-newkey rsa:2048 -nodes -days 2 -x509 -subj /CN=redis -addext subjectAltName=IP:127.0.0.1"


class Refused(ArealError):
    """The error that the link raises."""


def certificate(folder: Path, name: str) -> Path:
    """Signed by itself; its key lies beside it."""
    path = folder / f"{name}.pem"
    words = ["openssl", "req", *shlex.split(KEY), "-keyout", str(path.with_suffix(".key")), "-out", str(path)]
    subprocess.run(words, check=True, capture_output=True, timeout=HANG_S)
    return path


@pytest.fixture(scope="module")
def tls_port() -> Iterator[int]:
    with reserved_ports() as (port,):
        yield port


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, tls_port: int) -> Iterator[tuple[int, Path]]:
    """The port of a server that speaks TLS alone, and its certificate."""
    require("redis-server", "openssl")
    folder = tmp_path_factory.mktemp("tls")
    own = certificate(folder, "server")
    config = f"""
bind 127.0.0.1
port 0
tls-port {tls_port}
tls-cert-file {own}
tls-key-file {own.with_suffix(".key")}
tls-auth-clients no
requirepass {SECRET}
dir {folder}
appendonly yes
"""
    process = subprocess.Popen(
        ["redis-server", "-"], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True
    )
    assert process.stdin is not None
    with process.stdin as conf:
        conf.write(config)
    try:
        yield tls_port, own
    finally:
        process.kill()
        process.wait()


def test_a_run_reaches_it_with_certificate_and_password(server: tuple[int, Path]):
    port, own = server
    link = Link(f"rediss://127.0.0.1:{port}/0?ssl_ca_certs={own}", SECRET, 10, Refused)
    link.require_supported()
    assert (
        link.run(lambda client: client.set("tls", b"spoken"))
        and link.run(lambda c: c.get("tls")) == b"spoken"
    )
    with pytest.raises(Refused, match="refuses the connection: the password is wrong"):
        Link(f"rediss://127.0.0.1:{port}/0?ssl_ca_certs={own}", "another", 10, Refused).require_supported()


def test_another_authority_or_none_of_it_is_refused_with_the_reason(server: tuple[int, Path], tmp_path: Path):
    port, _ = server
    other = certificate(tmp_path, "other")
    with pytest.raises(Refused, match="CERTIFICATE_VERIFY_FAILED"):
        Link(f"rediss://127.0.0.1:{port}/0?ssl_ca_certs={other}", SECRET, 1, Refused).require_supported()
    with pytest.raises(Refused, match="no Redis answers"):
        Link(f"redis://127.0.0.1:{port}/0", SECRET, 1, Refused).require_supported()
