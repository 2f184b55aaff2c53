"""Redis for tests: one server for a session, servers that are killed, a wire that loses answers."""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import redis

from areal_jax.cluster.redis_server import RedisServer, redis_server
from tests.programs import require

SECRET = "a-secret-that-nobody-may-read"


def require_redis() -> None:
    """In CI the program's absence is a failure."""
    require("redis-server")


def client(server: RedisServer) -> Any:
    return redis.Redis(port=server.port, password=server.secret, decode_responses=True)


def url_of(server: RedisServer) -> str:
    """With the password."""
    return server.url.replace("//", f"//:{server.secret}@")


def keys_of(server: RedisServer, run: str) -> set[str]:
    """Of a run: the names behind its prefix."""
    with client(server) as asked:
        return {key.split("}:")[1] for key in asked.scan_iter(f"areal:{{{run}}}:*")}


class Killable:
    """A server on one port that the test kills and starts; it keeps no data."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._port = folder, 0
        self._stack = ExitStack()
        self.start()

    def start(self) -> None:
        one = redis_server(self._folder, self._port, secret=SECRET)
        self.server = self._stack.enter_context(one)
        self._port = self.server.port

    def kill(self) -> None:
        os.kill(self.server.process.pid, signal.SIGKILL)
        self._stack.close()

    def stop(self) -> None:
        self._stack.close()

    def __enter__(self) -> Killable:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


class Wire:
    """A port that passes on to a server, and can lose answers: the server works, the client hears nothing."""

    def __init__(self, port: int) -> None:
        self._to = port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self.loses: Callable[[bytes], bool] = lambda request: False
        self.lost = 0
        threading.Thread(target=self._accept, daemon=True).start()

    def lose_next(self, word: bytes, times: int = 1, after: int = 0) -> None:
        """The answers to the next requests that hold the word, but for the first `after` of them."""
        seen = [0]

        def loses(request: bytes) -> bool:
            seen[0] += word in request
            return word in request and after < seen[0] <= after + times

        self.loses = loses

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                here, _ = self._listener.accept()
                threading.Thread(target=self._pass_on, args=(here,), daemon=True).start()

    def _pass_on(self, here: socket.socket) -> None:
        with here, socket.create_connection(("127.0.0.1", self._to)) as there:
            threading.Thread(target=self._back, args=(here, there), daemon=True).start()
            with suppress(OSError):
                while request := here.recv(1 << 20):
                    if self.loses(request):
                        self.lost += 1
                        here.shutdown(socket.SHUT_RDWR)
                        there.sendall(request)
                        time.sleep(0.05)
                        return
                    there.sendall(request)

    def _back(self, here: socket.socket, there: socket.socket) -> None:
        with suppress(OSError):
            while answer := there.recv(1 << 20):
                here.sendall(answer)

    def __enter__(self) -> Wire:
        return self

    def __exit__(self, *_: object) -> None:
        self._listener.close()
