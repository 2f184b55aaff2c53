"""A redis-server for one run or for tests, with a password and without data files.

The server ends with the `with` block that started it; on Linux also if the program that started it ends in
any other way.
"""

from __future__ import annotations

import secrets
import shutil
import signal
import socket
import string
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from areal_jax.cluster.redis_link import Link, RedisError
from areal_jax.cluster.tied import tied
from areal_jax.secret import Secret
from areal_jax.types import ArealError

PROGRAM = "redis-server"
LOG = "redis.log"

ANSWER_S = 1.0
START_S = 10.0
"""Seconds that a server may take to answer its first request."""
_STOP_S = 10.0
_TRIES = 5  # a free port may be taken by another program before the server has it


@dataclass
class RedisServer:
    """A running redis-server that has answered a request."""

    url: str
    """The url without the password: a valid value of runtime.redis."""
    port: int
    secret: str = field(repr=False)
    """The server's password, which connecting processes need in AREAL_JAX_SECRET."""
    process: subprocess.Popen[bytes]
    _start: Callable[[int], tuple[subprocess.Popen[bytes], int]] = field(repr=False)

    def tend(self) -> None:
        """Starts the server again, at the same port, if it has ended. The data are lost; the run continues.

        Slurm's scancel, for example, ends the server before the run's processes have sent their last
        messages.
        """
        if self.process.poll() is not None:
            self.process, _ = self._start(self.port)


@contextmanager
def redis_server(
    folder: str | Path, port: int = 0, *, address: str = "127.0.0.1", secret: str | None = None
) -> Iterator[RedisServer]:
    """Runs a redis-server that listens at `address` until the block ends; its log is in `folder`.

    `port`: 0 chooses a free port. `secret`: the password; None chooses a random one. On Linux the server also
    ends when the thread that started it ends, so that thread must live as long as the block. Raises
    ArealError if redis-server is not installed, or does not answer within START_S seconds.
    """
    program = shutil.which(PROGRAM)
    if program is None:
        raise ArealError(
            f"{PROGRAM} is not installed: install it with `apt install redis-server` (or your system's "
            "package), or set runtime.redis to the url of a running server"
        )
    secret = secrets.token_hex(32) if secret is None else secret
    Secret(secret)  # raises if it is too short, or would break its line in redis.conf
    folder = Path(folder).absolute()
    folder.mkdir(parents=True, exist_ok=True)

    def start(port: int) -> tuple[subprocess.Popen[bytes], int]:
        return _started(program, folder, address, port, secret, end_s=time.monotonic() + START_S)

    process, port = start(port)  # a chosen port is kept by every later start
    server = RedisServer(f"redis://{address}:{port}/0", port, secret, process, start)
    try:
        yield server
    finally:
        _stop(server.process)


def _started(
    program: str, folder: Path, address: str, port: int, secret: str, *, end_s: float
) -> tuple[subprocess.Popen[bytes], int]:
    for left in reversed(range(1 if port else _TRIES)):
        chosen = port or free_port(address)
        process = _start(program, folder, _config(folder, address, chosen, secret))
        try:
            _await(process, folder, address, chosen, secret, end_s)
            return process, chosen
        except BaseException as error:
            _stop(process)
            if not left or "Address already in use" not in str(error):
                raise
    raise AssertionError("the last try returns or raises")


def _config(folder: Path, address: str, port: int, secret: str) -> str:
    """Returns the text of redis.conf, which the server reads from stdin.

    Therefore no file and no command-line argument contains the password.
    """
    lines = {
        "bind": address,
        "port": port,
        "requirepass": _quoted(secret),
        "dir": _quoted(str(folder)),
        "appendonly": "no",  # everything in Redis can be restored, so nothing needs a flush
        "save": '""',
        "maxmemory-policy": "noeviction",
        "daemonize": "no",
    }
    return "".join(f"{name} {value}\n" for name, value in lines.items())


def _quoted(text: str) -> str:
    """Returns the text as a quoted string of redis.conf; all but ASCII letters and digits are escaped."""
    plain = (string.ascii_letters + string.digits).encode()
    return '"' + "".join(chr(byte) if byte in plain else f"\\x{byte:02x}" for byte in text.encode()) + '"'


def _start(program: str, folder: Path, config: str) -> subprocess.Popen[bytes]:
    with (folder / LOG).open("ab") as log:
        process = subprocess.Popen(
            tied([program, "-"]), stdin=subprocess.PIPE, stdout=log, stderr=log, start_new_session=True
        )
    assert process.stdin is not None
    with suppress(BrokenPipeError), process.stdin as pipe:  # if the server ended at once, its log says why
        pipe.write(config.encode())
    return process


def _await(
    process: subprocess.Popen[bytes], folder: Path, address: str, port: int, secret: str, end_s: float
) -> None:
    """Waits until the server answers; raises ArealError if it ends, or has not answered by `end_s`.

    `end_s`: a time of time.monotonic().
    """
    link = Link(f"redis://{address}:{port}/0", secret, ANSWER_S, ArealError)
    while process.poll() is None and time.monotonic() < end_s:
        with suppress(ArealError, RedisError):
            # Another program's server may answer at this port: the process id tells them apart.
            if link.run(lambda client: client.info("server"), 0.0)["process_id"] == process.pid:
                return link.close()
        time.sleep(0.01)
    said = (folder / LOG).read_text(errors="replace").splitlines()[-5:]
    what = "ended at once" if process.poll() is not None else "did not answer in time"
    raise ArealError(
        f"{PROGRAM} on {address}:{port} {what}; correct the cause that the last lines of {folder / LOG} "
        f"name: {' / '.join(said)}"
    )


def free_port(address: str) -> int:
    with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET) as probe:
        probe.bind((address, 0))
        return probe.getsockname()[1]


def _stop(process: subprocess.Popen[bytes]) -> None:
    """Ends the server: repeats SIGTERM, which a starting server may miss; sends SIGKILL after _STOP_S."""
    end_s = time.monotonic() + _STOP_S
    while process.poll() is None and time.monotonic() < end_s:
        process.send_signal(signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            process.wait(1)
    process.kill()
    process.wait()
