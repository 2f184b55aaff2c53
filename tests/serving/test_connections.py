"""HTTP connections that bring no request, half of one, or are too many."""

from __future__ import annotations

import http.client
import json
import socket
from contextlib import suppress
from typing import Any

import grpc
import pytest
import uvicorn

from areal_jax.generation.commands import Pause, Unpause
from areal_jax.serving.connections import REFUSED_S, SPARE, Connection
from areal_jax.serving.jetstream_service import protocol
from tests.serving.served import PROMPT, alone, wait_until
from tests.serving.test_server import by_tokens, channel, is_idle, refused, running

from jetstream.core.proto.jetstream_pb2_grpc import OrchestratorStub  # isort: skip - as a client has it
from tests.hangs import HANG_S

IDLE_S = 10.0
HEAD = b"POST /v1/x HTTP/1.1\r\nhost: x\r\ncontent-length: 6\r\n\r\n"


class Loop:
    """An event loop with a clock of its own; `advance` calls what is due."""

    def __init__(self) -> None:
        self.now_s, self.calls, self.tasks = 0.0, [], []

    def time(self) -> float:
        return self.now_s

    def call_later(self, seconds: float, call: Any) -> Any:
        handle = Handle(self.now_s + seconds, call)
        self.calls.append(handle)
        return handle

    def create_task(self, work: Any, **_: Any) -> Any:
        self.tasks.append(work)
        return Task()

    def advance(self, seconds: float) -> None:
        end_s = self.now_s + seconds
        while due := [one for one in self.calls if one.at_s <= end_s and not one.is_cancelled]:
            first = min(due, key=lambda one: one.at_s)
            self.calls.remove(first)
            self.now_s = first.at_s
            first.call()
        self.now_s = end_s


class Handle:
    def __init__(self, at_s: float, call: Any) -> None:
        self.at_s, self.call, self.is_cancelled = at_s, call, False

    def cancel(self) -> None:
        self.is_cancelled = True


class Task:
    def add_done_callback(self, _: Any) -> None: ...


class Transport:
    def __init__(self) -> None:
        self.is_over, self.written = False, b""

    def abort(self) -> None:
        self.is_over = True

    close = abort

    def is_closing(self) -> bool:
        return self.is_over

    def write(self, data: bytes) -> None:
        self.written += data

    def get_extra_info(self, _: str) -> None: ...
    def pause_reading(self) -> None: ...
    def resume_reading(self) -> None: ...


async def app(scope: Any, receive: Any, send: Any) -> None: ...


def opened(state: Any = None, most: int = 9) -> tuple[Connection, Loop, Transport]:
    config = uvicorn.Config(app, log_config=None, lifespan="off", ws="none", timeout_keep_alive=99)
    loop, transport = Loop(), Transport()
    state = state or uvicorn.server.ServerState()
    own: Any = dict(server_state=state, app_state={}, _loop=loop)
    connection = Connection(config, **own, idle_s=IDLE_S, most=most)
    connection.connection_made(transport)
    return connection, loop, transport


@pytest.fixture(autouse=True)
def no_work_is_left(monkeypatch):
    """The application's coroutines, which no loop of these tests runs, are closed."""
    made: list[Any] = []
    create = Loop.create_task
    monkeypatch.setattr(
        Loop, "create_task", lambda self, work, **_: (made.append(work), create(self, work))[1]
    )
    yield
    for work in made:
        work.close()


@pytest.mark.parametrize("begun", [b"", b"POST /v1/x HTTP/1.1\r\nhost", HEAD + b"abc"])
def test_a_connection_that_goes_silent_is_closed(begun):
    connection, loop, transport = opened()
    if begun:
        connection.data_received(begun)
    loop.advance(IDLE_S - 0.1)
    assert not transport.is_over
    loop.advance(0.2)
    assert transport.is_over


def test_bytes_of_a_head_do_not_prolong_it():
    connection, loop, transport = opened()
    connection.data_received(b"POST /v1/x HTTP/1.1\r\n")
    for _ in range(11):
        loop.advance(1.0)
        connection.data_received(b"x: y\r\n")
    assert transport.is_over


def test_a_body_may_come_slowly_but_not_for_ever():
    connection, loop, transport = opened()
    connection.data_received(HEAD.replace(b"6", b"999"))
    for _ in range(12):
        loop.advance(IDLE_S - 1)
        if transport.is_over:
            break
        connection.data_received(b"x")
        connection.cycle.body.clear()
    assert transport.is_over and 10 * IDLE_S <= loop.now_s < 11 * IDLE_S


def test_an_answer_may_take_any_time_and_the_next_request_has_its_own():
    connection, loop, transport = opened()
    connection.data_received(HEAD + b"abcdef")
    loop.advance(1000 * IDLE_S)
    assert not transport.is_over
    connection.cycle.response_complete = True
    connection.on_response_complete()
    loop.advance(IDLE_S - 0.1)
    assert not transport.is_over
    loop.advance(0.2)
    assert transport.is_over


def test_beyond_the_limit_a_connection_has_less_time_and_far_beyond_none():
    state = uvicorn.server.ServerState()
    fitting = [opened(state, most=2) for _ in range(2)]
    _, loop, transport = opened(state, most=2)
    loop.advance(REFUSED_S - 0.1)
    assert not transport.is_over
    loop.advance(0.2)
    assert transport.is_over
    others = [opened(state, most=2) for _ in range(SPARE)]
    assert [t.is_over for _, _, t in (*fitting, *others)] == [False] * (SPARE + 1) + [True]


# --- over sockets -------------------------------------------------------------------------------------------


def dial(port: int, sent: bytes) -> socket.socket:
    found = socket.create_connection(("127.0.0.1", port), timeout=HANG_S)
    found.sendall(sent)
    return found


def test_silent_clients_are_closed_while_an_answer_takes_its_time():
    with running(idle_s=0.5) as server:
        server.streams.tell(Pause())
        body = json.dumps({"prompt": list(PROMPT), "temperature": 0, "return_token_ids": True}).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n"
        waiting = http.client.HTTPConnection("127.0.0.1", server.http_port, timeout=HANG_S)
        waiting.request("POST", "/v1/completions", body, {"content-type": "application/json"})
        wait_until(lambda: server.streams.open_samples == 1, "the request is there")
        for begun in (b"", b"GET /health HTT", head.encode(), head.encode() + body[:5]):
            with dial(server.http_port, begun) as silent, suppress(ConnectionResetError):
                assert silent.recv(1) == b"", "closed without an answer"
        assert server.streams.open_samples == 1
        server.streams.tell(Unpause())
        answer = json.load(waiting.getresponse())
        assert answer["choices"][0]["token_ids"] == list(alone(PROMPT)[0])
        waiting.close()
        wait_until(lambda: is_idle(server), "slots free")


def test_idle_grpc_connections_are_closed_and_opened_again_by_the_client():
    states: list[grpc.ChannelConnectivity] = []
    with running(idle_s=0.5) as server, channel(server) as opened:
        health = OrchestratorStub(opened).HealthCheck
        assert health(protocol.HealthCheckRequest(), timeout=HANG_S).is_live
        opened.subscribe(states.append)
        wait_until(lambda: states[-1:] == [grpc.ChannelConnectivity.IDLE], "the connection is closed")
        assert health(protocol.HealthCheckRequest(), timeout=HANG_S).is_live


def test_more_grpc_calls_than_the_limit_are_refused():
    with running(connections=1) as server, channel(server) as opened:
        server.streams.tell(Pause())
        stub = OrchestratorStub(opened)
        first = stub.Decode(by_tokens(PROMPT), timeout=HANG_S)
        wait_until(lambda: server.streams.open_samples == 1, "the call is there")
        with refused(grpc.StatusCode.RESOURCE_EXHAUSTED, "limit"):
            stub.HealthCheck(protocol.HealthCheckRequest(), timeout=HANG_S)
        server.streams.tell(Unpause())
        assert len(list(first)) == 10  # 20 tokens, two a call


def test_more_connections_than_the_limit_are_refused_but_for_health():
    def asked(path: str) -> tuple[int, Any, dict]:
        one = http.client.HTTPConnection("127.0.0.1", server.http_port, timeout=HANG_S)
        one.request("GET", path)
        answer = one.getresponse()
        found = answer.status, answer.getheader("retry-after"), json.load(answer)
        one.close()
        return found

    with running(connections=2) as server:
        count = lambda: len(server._endpoint._http[0].server_state.connections)  # noqa: E731
        with dial(server.http_port, b"GET"), dial(server.http_port, b""):
            wait_until(lambda: count() == 2, "both are there")
            status, retry_after, answer = asked("/v1/models")
            assert (status, retry_after, answer["error"]["code"]) == (503, "1", "unavailable")
            assert answer["error"]["message"].startswith("2 connections are open")
            assert asked("/health")[0] == 200
        wait_until(lambda: count() == 0, "both are gone")
        assert asked("/v1/models")[0] == 200
