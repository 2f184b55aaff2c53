"""A redis-server of our own, for a run on one machine and for tests, with a password and an append-only file.

It has no other life than the program that started it: when that ends, however it ends, the server gets
SIGTERM, writes what it has and goes. Its data stay in the folder, and the next server there begins with them.
"""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import socket
import string
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from areal_jax.generation.serving_secret import Secret
from areal_jax.types import ArealError

PROGRAM = "redis-server"
LOG = "redis.log"
FSYNC = ("always", "everysec")

_STOP_S = 10.0
_TRIES = 5  # a free port may be taken by another program before the server has it

# Runs before the server takes the process over: a signal when its parent dies, also where that was just now.
_TIED = """
import ctypes, os, signal, sys
if sys.platform == "linux":
    ctypes.CDLL(None).prctl(1, signal.SIGTERM)
if os.getppid() != int(sys.argv[1]):
    sys.exit(1)
os.execv(sys.argv[2], sys.argv[2:])
"""


@dataclass(frozen=True)
class RedisServer:
    """A server that answers."""

    url: str
    """Without the password, fit for runtime.redis."""
    port: int
    pid: int
    secret: str = field(repr=False)
    """Its password, for AREAL_JAX_SECRET of every process that is to reach it."""


@contextmanager
def redis_server(
    folder: str | Path,
    port: int = 0,
    *,
    address: str = "127.0.0.1",
    secret: str | None = None,
    fsync: str = "always",
    deadline_s: float = 10.0,
) -> Iterator[RedisServer]:
    """A server with its files in `folder`, until the block ends. Port 0: a free one; no `secret`: a new one.

    `fsync`: `always` loses nothing that was acknowledged; `everysec` is faster on a slow disk, and loses up
    to a second when the machine dies. To be entered by a thread that lives as long as the server should.
    Raises ArealError where redis-server is not installed, or does not answer by the deadline.
    """
    program = shutil.which(PROGRAM)
    if program is None:
        raise ArealError(
            f"{PROGRAM} is not installed: `apt install redis-server` (or your system's package) brings it; "
            "or name a server that runs elsewhere in runtime.redis"
        )
    if fsync not in FSYNC:
        raise ArealError(f"fsync={fsync!r} is not one of {', '.join(FSYNC)}")
    secret = secrets.token_hex(32) if secret is None else secret
    Secret(secret)  # raises for one that is short, or that would end the line it stands in
    folder = Path(folder).absolute()
    folder.mkdir(parents=True, exist_ok=True)
    process, port = _started(program, folder, address, port, secret, fsync, time.monotonic() + deadline_s)
    try:
        yield RedisServer(f"redis://{address}:{port}/0", port, process.pid, secret)
    finally:
        _stop(process)


def _started(
    program: str, folder: Path, address: str, port: int, secret: str, fsync: str, end_s: float
) -> tuple[subprocess.Popen[bytes], int]:
    for left in reversed(range(_TRIES)):
        chosen = port or _free_port(address)
        process = _start(program, folder, _config(folder, address, chosen, secret, fsync))
        try:
            _await(process, folder, address, chosen, secret, end_s)
        except ArealError as error:
            _stop(process)
            if port or not left or "Address already in use" not in str(error):
                raise
        except BaseException:
            _stop(process)
            raise
        else:
            return process, chosen
    raise AssertionError("the last try returns or raises")


def _config(folder: Path, address: str, port: int, secret: str, fsync: str) -> str:
    """redis.conf, which goes to the server's standard input: the password is in no file and no argument."""
    lines = {
        "bind": address,
        "port": port,
        "requirepass": _quoted(secret),
        "dir": _quoted(str(folder)),
        "appendonly": "yes",
        "appendfsync": fsync,
        "save": '""',  # the append-only file is all there is
        "maxmemory-policy": "noeviction",
        "daemonize": "no",
    }
    return "".join(f"{name} {value}\n" for name, value in lines.items())


def _quoted(text: str) -> str:
    """For redis.conf and the protocol's one-line form: everything but letters and digits by its code."""
    plain = (string.ascii_letters + string.digits).encode()
    return '"' + "".join(chr(byte) if byte in plain else f"\\x{byte:02x}" for byte in text.encode()) + '"'


def _start(program: str, folder: Path, config: str) -> subprocess.Popen[bytes]:
    words = [sys.executable, "-I", "-S", "-c", _TIED, str(os.getpid()), program, "-"]
    with (folder / LOG).open("ab") as log:
        process = subprocess.Popen(
            words, stdin=subprocess.PIPE, stdout=log, stderr=log, start_new_session=True
        )
    assert process.stdin is not None
    with suppress(BrokenPipeError), process.stdin as pipe:  # one that ended at once says why in its log
        pipe.write(config.encode())
    return process


def _await(
    process: subprocess.Popen[bytes], folder: Path, address: str, port: int, secret: str, end_s: float
) -> None:
    """Until the server answers with its data loaded."""
    while process.poll() is None and time.monotonic() < end_s:
        answer = _answer(address, port, secret)
        if b"+PONG\r\n" in answer and f"process_id:{process.pid}\r\n".encode() in answer:
            return
        time.sleep(0.01)
    said = (folder / LOG).read_text(errors="replace").splitlines()[-5:]
    what = "ended at once" if process.poll() is not None else "did not answer in time"
    raise ArealError(f"{PROGRAM} on {address}:{port} {what}; the end of {folder / LOG}: {' / '.join(said)}")


def _answer(address: str, port: int, secret: str) -> bytes:
    """To PING, which waits for the data, and who it is; less where the server is not there yet."""
    answer = b""
    with suppress(OSError), socket.create_connection((address, port), timeout=1) as connection:
        connection.sendall(f"AUTH {_quoted(secret)}\r\nPING\r\nINFO server\r\nQUIT\r\n".encode())
        while part := connection.recv(4096):
            answer += part
    return answer


def _free_port(address: str) -> int:
    with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET) as probe:
        probe.bind((address, 0))
        return probe.getsockname()[1]


def _stop(process: subprocess.Popen[bytes]) -> None:
    """Asked again and again: a server that begins its append-only file refuses to go."""
    end_s = time.monotonic() + _STOP_S
    while process.poll() is None and time.monotonic() < end_s:
        process.send_signal(signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            process.wait(1)
    process.kill()
    process.wait()
