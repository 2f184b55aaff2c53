"""Clients talk to the hosts of a launched run: it learns the same, also when a host is killed on the way."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path

import grpc
import pytest

from tests.cluster.test_kill import await_rows, ended_well, launching, processes, rows
from tests.serving.test_training import digests

from jetstream.core.proto import jetstream_pb2 as protocol  # isort: skip - as a client has it
from jetstream.core.proto.jetstream_pb2_grpc import OrchestratorStub  # isort: skip
from tests.hangs import HANG_S

pytestmark = pytest.mark.soak

STEPS = 60
WORDS = (f"run.steps={STEPS}", "control.max_staleness=0", "trainer.supervised.steps=2")


class Client:
    """Asks for completions until it is closed."""

    def __init__(self, port: int, run: Path) -> None:
        self.answered, self._run = 0, run
        self.steps: set[int] = set()
        """Trained steps, and so versions, at the times of the answers."""
        self.errors: set[grpc.StatusCode] = set()
        self._is_closed = threading.Event()
        # The host is away at first, and after it was killed: by default gRPC would try again after minutes.
        options = [("grpc.initial_reconnect_backoff_ms", 100), ("grpc.max_reconnect_backoff_ms", 200)]
        self._channel = grpc.insecure_channel(f"127.0.0.1:{port}", options)
        self._thread = threading.Thread(target=self._ask, daemon=True)
        self._thread.start()

    def _ask(self) -> None:
        content = protocol.DecodeRequest.TokenContent(token_ids=(2, 3))
        request = protocol.DecodeRequest(token_content=content, max_tokens=3)
        stub = OrchestratorStub(self._channel)
        while not self._is_closed.is_set():
            try:
                responses = list(stub.Decode(request, timeout=HANG_S))
            except grpc.RpcError as error:
                self.errors.add(error.code())
                self._is_closed.wait(0.1)
            else:
                assert responses
                self.answered += 1
                self.steps.add(rows(self._run))

    def close(self) -> None:
        self._is_closed.set()
        self._thread.join(HANG_S)
        self._channel.close()


def test_a_launched_run_that_answers_clients_learns_the_same_although_a_host_is_killed(
    tmp_path: Path, port: int
):
    with launching(tmp_path / "alone", *WORDS) as launched:
        assert ended_well(tmp_path / "alone", launched)["ok"]
    run = tmp_path / "asked"
    with launching(run, *WORDS, f"generation.serve_port={port}") as launched:
        client = Client(port, run)
        try:
            await_rows(run, STEPS // 3, launched)
            before, (victim,) = client.answered, processes(run, "generate")
            os.kill(victim, signal.SIGKILL)
            figures = ended_well(run, launched)
        finally:
            client.close()
    assert figures["ok"] and figures["trained"] == 16 * STEPS
    assert client.answered >= 50 and client.answered > before > 0 and len(client.steps) >= 10
    assert client.errors <= {grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED}
    assert digests(run) == digests(tmp_path / "alone")
