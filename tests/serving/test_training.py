"""Requests to the hosts of a training run: answered while it learns, without a trace in what it learns."""

from __future__ import annotations

import io
import json
import threading
from collections.abc import Iterator
from http.client import HTTPConnection, HTTPException
from typing import Any

import grpc
import openai
import pytest

from areal_jax.assembly.run_folder import open_journal
from areal_jax.config.loading import ConfigError
from areal_jax.control.events import SampleFinished, VersionCommitted
from areal_jax.jobs.local import run
from areal_jax.replay.folder_audit import audit_run
from areal_jax.secret import Secret
from areal_jax.serving.endpoint import TrainingEndpoint
from areal_jax.serving.jetstream_service import protocol
from areal_jax.trainer.learner import Learner
from areal_jax.types import ArealError
from tests.hangs import HANG_S
from tests.ports import reserved_ports
from tests.serving.served import tiny_engine
from tests.small_run import small

from jetstream.core.proto.jetstream_pb2_grpc import OrchestratorStub  # isort: skip - as a client has it

STEPS = 60
WORDS = ("control.max_staleness=0", f"run.steps={STEPS}")


def digests(folder) -> list[str]:
    with open_journal(folder) as journal:
        events = [row.event for row in journal.rows()]
    assert all(event.sample.ordinal >= 0 for event in events if isinstance(event, SampleFinished))
    return [event.digest for event in events if isinstance(event, VersionCommitted)]


def completed(http_port: int) -> set[int]:
    """The versions of the tokens that OpenAI's client gets; empty once the run has ended."""
    base_url = f"http://127.0.0.1:{http_port}/v1"
    client = openai.OpenAI(base_url=base_url, api_key="none", max_retries=0, timeout=HANG_S)
    fields: dict[str, Any] = {"max_tokens": 3, "extra_body": {"return_token_ids": True}}
    try:
        (choice,) = client.completions.create(model="", prompt=[2, 3], **fields).choices
    except (openai.APIConnectionError, openai.InternalServerError):
        return set()
    assert 1 <= len(choice.token_ids) == len(choice.versions) <= 3
    return set(choice.versions)


def http(port: int, method: str, path: str, body: Any = None) -> tuple[int, Any]:
    connection = HTTPConnection("127.0.0.1", port, timeout=HANG_S)
    connection.request(method, path, None if body is None else json.dumps(body))
    answer = connection.getresponse()
    found = answer.status, json.load(answer)
    connection.close()
    return found


class Answers:
    """The requests that were answered, and the trainer's wait for the next of them."""

    def __init__(self) -> None:
        self.count, self._awaited, self._has_ended = 0, 0, False
        self._changed = threading.Condition()

    def add(self) -> None:
        with self._changed:
            self.count += 1
            self._changed.notify_all()

    def end(self) -> None:
        """No request follows, and no update waits any longer."""
        with self._changed:
            self._has_ended = True
            self._changed.notify_all()

    def await_another(self) -> None:
        with self._changed:
            found = self._changed.wait_for(lambda: self.count > self._awaited or self._has_ended, HANG_S)
            assert found, "no answer while the trainer waits"
            self._awaited = self.count


def asked_while(
    thread: threading.Thread, port: int, http_port: int, answers: Answers
) -> tuple[set[int], list[grpc.StatusCode]]:
    """The versions that answered, and the errors of requests that were not."""
    content = protocol.DecodeRequest.TokenContent(token_ids=(2, 3))
    versions, errors = set(), []
    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        grpc.channel_ready_future(channel).result(HANG_S)
        stub = OrchestratorStub(channel)
        for path, body in (("/pause", {}), ("/resume", {}), ("/swap", {"path": "/"})):
            status, answer = http(http_port, "POST", path, body)
            assert (status, "belongs to a training run" in answer["error"]["message"]) == (409, True)
        status, answer = http(http_port, "POST", "/v1/completions", {"prompt": "ab", "presence_penalty": 1})
        assert (status, "does not support penalties" in answer["error"]["message"]) == (400, True)
        while thread.is_alive():
            try:
                found = [
                    token
                    for response in stub.Decode(
                        protocol.DecodeRequest(token_content=content, max_tokens=3), timeout=HANG_S
                    )
                    for sample in response.stream_content.samples
                    for token in sample.token_ids
                ]
                over_http = completed(http_port)
                assert not over_http or max(over_http) >= max(versions, default=0), "versions only grow"
                versions |= over_http
                versions.add(http(http_port, "GET", "/health")[1]["version"])
            except grpc.RpcError as error:
                errors.append(error.code())
                thread.join(0.05)
            except (OSError, HTTPException):  # the run has ended since the answer
                thread.join(0.05)
            else:
                assert 1 <= len(found) <= 3
                answers.add()
    return versions, errors


@pytest.fixture
def ports() -> Iterator[list[int]]:
    with reserved_ports(2) as ports:
        yield ports


@pytest.mark.slow
def test_a_live_run_answers_requests_across_versions_and_learns_the_same(
    tmp_path, ports: list[int], monkeypatch: pytest.MonkeyPatch
):
    """Each update awaits an answer, so that none is trained without one before it."""
    run(small(tmp_path / "alone", *WORDS), stream=io.StringIO())
    port, http_port = ports
    words = f"generation.serve_port={port}", f"generation.serve_http_port={http_port}"
    config = small(tmp_path / "asked", *WORDS, *words)
    failures: list[BaseException] = []
    answers, update = Answers(), Learner.update

    def after_an_answer(*given: Any) -> Any:
        answers.await_another()
        return update(*given)

    monkeypatch.setattr(Learner, "update", after_an_answer)

    def train() -> None:
        try:
            run(config, stream=io.StringIO())
        except BaseException as error:  # noqa: BLE001 - raised below
            failures.append(error)

    thread = threading.Thread(target=train)
    thread.start()
    try:
        versions, errors = asked_while(thread, port, http_port, answers)
    finally:
        answers.end()
        thread.join(HANG_S)
    assert not thread.is_alive() and not failures, failures
    assert answers.count >= STEPS and len(versions) >= STEPS // 2, (answers.count, versions)
    assert set(errors) <= {grpc.StatusCode.UNAVAILABLE}
    assert digests(tmp_path / "asked") == digests(tmp_path / "alone")
    audit_run(tmp_path / "asked")


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("generation.serve_slots=4",), "leaves no slot for rollouts"),
        (("generation.kv_tokens=24",), "and serve_slots; set"),
        (
            ("generation.serve_port=null", "generation.serve_http_port=9"),
            "needs generation.serve_port, the port",
        ),
        (("algorithm.preset=sft",), "hosts answer no requests with algorithm.samples=reference"),
    ],
)
def test_settings_without_room_for_rollouts_are_refused(tmp_path, words, says):
    with pytest.raises(ConfigError, match=says):
        small(tmp_path, "generation.serve_port=9000", *words)


def test_host_i_has_the_ports_plus_i_and_a_queue_of_64(tmp_path):
    words = "generation.serve_port=9100", "generation.serve_http_port=9200"
    config = small(tmp_path / "run", *words)
    endpoint = TrainingEndpoint(config, 3, tiny_engine(), None)
    found, served = endpoint._address, endpoint.served
    assert (found.host, found.port, found.http_port) == ("127.0.0.1", 9103, 9203)
    assert (served.name, served.max_samples) == (config.run.name, 64)
    assert (served.is_answers_only, served.has_penalties) == (False, False)


def test_an_address_that_others_reach_needs_the_runs_secret(tmp_path, monkeypatch):
    monkeypatch.delenv("AREAL_JAX_SECRET", raising=False)
    words = "generation.serve_port=9000", "generation.serve_address=0.0.0.0"
    config = small(tmp_path / "run", *words)
    with pytest.raises(ArealError, match="serve_is_open=true"):
        run(config, stream=io.StringIO())
    secret = Secret("correct-horse-battery-staple")
    assert TrainingEndpoint(config, 0, tiny_engine(), secret)._address.secret is secret
    config = small(tmp_path / "open", *words, "generation.serve_is_open=true")
    assert TrainingEndpoint(config, 0, tiny_engine(), secret)._address.secret is None
