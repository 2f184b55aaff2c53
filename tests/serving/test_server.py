"""The server over real sockets: JetStream's own stub unmodified, HTTP, and hostile clients."""

from __future__ import annotations

import asyncio
import json
import random
import socket
import threading
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import grpc
import jax
import pytest

from areal_jax.algorithms.sampling import Truncation
from areal_jax.generation.commands import Pause, Unpause
from areal_jax.generation.programs import Jitted
from areal_jax.models.io.huggingface import export_folder
from areal_jax.secret import Secret, read_secret, require_secret
from areal_jax.serving import server as serve
from areal_jax.serving.jetstream_service import protocol
from areal_jax.serving.server import Server, ServeSettings
from areal_jax.types import ArealError, Sampling
from areal_jax.weights.orbax import OrbaxStore
from areal_jax.weights.publishing import PublisherSettings
from tests.models.golden import GOLDEN
from tests.serving.served import PROMPT, SLOTS, alone, tiny_engine, tiny_params, wait_until

from jetstream.core.proto.jetstream_pb2_grpc import OrchestratorStub  # isort: skip - as a client has it
from tests.hangs import HANG_S

QUEUE = 1024
DEADLINE_S = HANG_S
SECRET = "correct-horse-battery-staple"
TEXT = "what is 2 + 2?"


def make(**settings) -> Server:
    settings = {"port": 0, "http_port": 0, "queue": QUEUE, **settings}
    sampling = Sampling(max_tokens=20)
    server = Server("tiny", tiny_engine(), tiny_params(0), ServeSettings(**settings), sampling)
    server.start()
    return server


@contextmanager
def running(**settings) -> Iterator[Server]:
    server = make(**settings)
    try:
        yield server
    finally:
        server.stop()


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with running() as server:
        yield server


@pytest.fixture(autouse=True)
def nothing_is_left_over(request) -> Iterator[None]:
    """Whatever a test's clients did: no slot is taken, nobody waits, and a sound request is answered."""
    yield
    if "server" in request.fixturenames:
        server = request.getfixturevalue("server")
        server.streams.tell(Unpause())
        wait_until(lambda: is_idle(server), "slots free")
        assert decoded(server, by_tokens(PROMPT)) == (list(alone(PROMPT)[0]), "")


@contextmanager
def channel(server: Server, *options) -> Iterator[grpc.Channel]:
    with grpc.insecure_channel(f"127.0.0.1:{server.port}", options) as opened:
        yield opened


def is_idle(server: Server) -> bool:
    now = server.host.statistics()
    return (now.live, now.waiting, server.streams.open_samples) == (0, 0, 0)


def by_tokens(ids, **fields):
    content = protocol.DecodeRequest.TokenContent(token_ids=ids)
    return protocol.DecodeRequest(token_content=content, **fields)


def by_text(text: str, **fields):
    return protocol.DecodeRequest(text_content=protocol.DecodeRequest.TextContent(text=text), **fields)


def generate(server: Server, **fields) -> tuple[int, Any]:
    return post(server, "/v1/completions", {"prompt": PROMPT, "return_token_ids": True, **fields})


def decoded(server: Server, request) -> tuple[list[int], str]:
    with channel(server) as opened:
        stream = OrchestratorStub(opened).Decode(request, timeout=DEADLINE_S)
        samples = [sample for response in stream for sample in response.stream_content.samples]
    ids = [token for sample in samples for token in sample.token_ids]
    return ids, "".join(sample.text for sample in samples)


@contextmanager
def refused(code: grpc.StatusCode, says: str):
    with pytest.raises(grpc.RpcError) as caught:
        yield
    assert caught.value.code() is code
    assert says in caught.value.details()


def post(server: Server, path: str, body: Any = None, **headers: str) -> tuple[int, Any]:
    """The status, and the answer or the error."""
    sent = b"" if body is None else json.dumps(body).encode()
    status, answer = get(server, path, sent, **headers)
    found = json.loads(answer)
    return status, found.get("error", found)


def get(server: Server, path: str, body: bytes | None = None, **headers: str) -> tuple[int, str]:
    request = urllib.request.Request(f"http://127.0.0.1:{server.http_port}{path}", body, headers=headers)
    try:
        with urllib.request.urlopen(request, timeout=DEADLINE_S) as response:
            return response.status, response.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def pause(server: Server) -> None:
    server.streams.tell(Pause())
    wait_until(lambda: server.host.statistics().is_paused, "paused")


# --- JetStream's service, by its own stub -------------------------------------------------------------------


def test_tokens_are_answered_with_tokens(server):
    assert decoded(server, by_tokens(PROMPT)) == (list(alone(PROMPT)[0]), "")


def test_text_is_answered_with_text_and_tokens_and_begins_with_one_bos(server):
    tokenizer = tiny_engine().tokenizer
    expected, _ = alone((tokenizer.bos_id, *TEXT.encode()))
    assert decoded(server, by_text(TEXT)) == (list(expected), tokenizer.decode(expected))


def test_the_time_to_the_first_token_counts_jetstreams_requests_too(server):
    def count() -> float:
        lines = get(server, "/metrics")[1].splitlines()
        return next(
            float(line.split()[1]) for line in lines if line.startswith("areal_jax_first_token_seconds_c")
        )

    before = count()
    decoded(server, by_tokens(PROMPT))
    assert count() == before + 1
    assert generate(server, prompt=TEXT)[0] == 200
    assert count() == before + 2


def test_max_tokens_is_honoured(server):
    expected, _ = alone(PROMPT)
    for count in (1, 2, 3, 11):
        assert decoded(server, by_tokens(PROMPT, max_tokens=count))[0] == list(expected[:count])


def test_tokens_are_streamed_as_they_are_sampled(server):
    with channel(server) as opened:
        responses = list(OrchestratorStub(opened).Decode(by_tokens(PROMPT), timeout=DEADLINE_S))
    assert len(responses) == 10  # 20 tokens, two a call


def test_eos_is_delivered_and_ends_the_answer(server, monkeypatch):
    expected, _ = alone(PROMPT)
    monkeypatch.setattr(server.host, "_stops", (expected[4],))
    upto = list(expected[: expected.index(expected[4]) + 1])
    assert decoded(server, by_tokens(PROMPT))[0] == upto


def test_health_stays_true_while_paused_and_statistics_say_so(server):
    with channel(server) as opened:
        health = OrchestratorStub(opened).HealthCheck
        assert health(protocol.HealthCheckRequest(), timeout=DEADLINE_S).is_live
        status, now = post(server, "/pause")
        assert (status, now["is_paused"]) == (200, True)
        assert health(protocol.HealthCheckRequest(), timeout=DEADLINE_S).is_live
        assert '"is_paused":true' in get(server, "/health")[1]
        status, now = post(server, "/resume", {})
        assert (status, now["is_paused"]) == (200, False)
        now = json.loads(get(server, "/health")[1])
    assert (now["model"], now["slots"]) == ("tiny", SLOTS)
    assert now["generated_tokens"] > 0 and now.keys() >= {
        *("version", "digest", "live", "waiting", "pages", "free_pages", "interruptions"),
        *("recomputed_tokens", "swaps", "swap_s", "evictions", "prefills"),
    }


def test_decode_requests_are_sampled_as_the_config_says_if_so_asked():
    sampling, settings = Sampling(temperature=0.5, top_p=0.9, max_tokens=20), ServeSettings(is_sampled=True)
    found = Server("tiny", tiny_engine(), tiny_params(0), settings, sampling)
    assert found.served.decode_sampling == sampling


@pytest.mark.parametrize(
    "request_, says",
    [
        (by_tokens(PROMPT, session_cache="x"), "session_cache='x'"),
        (by_tokens(()), "the prompt is empty"),
        (by_tokens((5, 999)), "token_ids has the id 999"),
        (by_tokens((5,) * 64), "the prompt has 64 tokens"),
        (by_tokens(PROMPT, max_tokens=-1), "max_tokens=-1"),
    ],
)
def test_wrong_requests_are_errors_of_their_own(server, request_, says):
    with refused(grpc.StatusCode.INVALID_ARGUMENT, says):
        decoded(server, request_)


# --- HTTP ---------------------------------------------------------------------------------------------------


def test_a_completion_has_prompt_tokens_log_probs_versions_and_ends(server):
    tokens, logp = alone(PROMPT)
    status, found = generate(server, temperature=0, logprobs=0)
    (choice,) = found["choices"]
    assert (status, found["prompt_token_ids"]) == (200, list(PROMPT))
    assert choice["token_ids"] == list(tokens)
    assert choice["logprobs"]["token_logprobs"] == list(logp)  # float32 throughout
    assert set(choice["versions"]) == {0}
    assert choice["text"] == tiny_engine().tokenizer.decode(tokens)
    assert (choice["finish_reason"], choice["is_reproducible"], choice["interruptions"]) == (
        "length",
        True,
        0,
    )


def test_chat_is_rendered_by_the_tokenizers_template(server):
    chat = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2, "return_token_ids": True}
    _, found = post(server, "/v1/chat/completions", chat)
    assert bytes(found["prompt_token_ids"][1:]) == b"user: hi\nassistant: "


def test_a_seed_makes_samples_repeatable_and_members_differ(server):
    def sampled() -> dict[int, list[int]]:
        _, found = generate(server, temperature=1, n=3, seed=11, max_tokens=8)
        return {choice["index"]: choice["token_ids"] for choice in found["choices"]}

    first = sampled()
    drawn = Sampling(temperature=1.0, max_tokens=8)
    assert first == sampled() == {m: list(alone(PROMPT, 0, drawn, m, 11)[0]) for m in range(3)}


def test_biases_and_stop_texts_are_obeyed(server):
    _, found = generate(server, logit_bias={ord("!"): 100}, stop=["!!!"], logprobs=0)
    (choice,) = found["choices"]
    assert bytes(choice["token_ids"]) == b"!!!"
    assert max(map(abs, choice["logprobs"]["token_logprobs"])) < 1e-6, "log-probs include biases"
    assert (choice["text"], choice["finish_reason"]) == ("", "stop")


def test_presence_penalizes_ids_of_the_completion_and_not_of_the_prompt(server):
    """The bias makes an id of the prompt the likeliest as long as it has no penalty."""
    _, found = generate(server, temperature=0, logit_bias={PROMPT[0]: 50}, presence_penalty=100)
    first, *others = found["choices"][0]["token_ids"]
    assert first == PROMPT[0] and PROMPT[0] not in others


def test_a_wrong_request_is_named(server):
    status, error = generate(server, temperature=float("nan"))
    assert (status, error["code"]) == (400, "invalid_argument") and "beyond those of JSON" in error["message"]
    status, error = generate(server, model="gpt")
    assert (status, error["message"]) == (404, "model='gpt' is not served here; give 'tiny'")


def test_a_program_that_cannot_be_compiled_is_an_error_of_the_server_with_its_reason(server, monkeypatch):
    def compiler(*_: Any) -> Callable[[], None]:
        def fail() -> None:
            raise MemoryError("no memory for the program")

        return fail

    monkeypatch.setattr(Jitted, "compiler", compiler)
    monkeypatch.setattr(tiny_engine().jitted, "compiled", {Truncation(): None})
    status, error = generate(server, top_p=0.5)
    assert (status, error["type"], error["code"]) == (500, "server_error", "internal")
    assert "could not be compiled: no memory for the program" in error["message"]
    assert generate(server)[0] == 200


@pytest.mark.parametrize(
    ("path", "body", "param", "said"),
    [
        ("/cancel", None, "request_id", "request_id: Field required; see docs/serving.md"),
        ("/cancel", {"request_id": ""}, "request_id", "at least 1 character, but is ''"),
        ("/cancel", [1], None, "the body is [1], but must be a JSON object"),
        ("/swap", {"path": 5}, "path", "path: Input should be a valid string, but is 5"),
        ("/pause", {"until": 5}, "until", "until: Extra inputs are not permitted, but is 5"),
    ],
)
def test_a_wrong_command_is_named(server, path, body, param, said):
    status, error = post(server, path, body)
    assert (status, error["type"], error["param"]) == (400, "invalid_request_error", param)
    assert said in error["message"]


@pytest.mark.parametrize("path", ["/cancel", "/pause", "/resume", "/swap"])
def test_a_web_page_that_a_user_of_this_machine_opens_controls_no_host(server, path):
    """A browser sends its requests to loopback, too, always with the header Origin."""
    status, error = post(server, path, {}, Origin="https://example.org")
    assert (status, error["type"]) == (403, "permission_error")
    assert "Origin: https://example.org" in error["message"]
    assert not server.host.statistics().is_paused


def test_cancel_by_name_ends_the_request(server):
    pause(server)
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(generate, server, request_id="mine", n=2)
        wait_until(lambda: server.streams.open_samples == 2, "asked for")
        status, error = generate(server, request_id="mine")
        assert (status, "request_id='mine' is in use" in error["message"]) == (400, True)
        assert post(server, "/cancel", {"request_id": "yours"}) == (200, {"was_found": False})
        assert post(server, "/cancel", {"request_id": "mine"}) == (200, {"was_found": True})
        status, error = asked.result(HANG_S)
    assert (status, error["code"]) == (499, "cancelled") and "'mine' was cancelled" in error["message"]


def test_swapped_parameters_are_served_and_stamped(tmp_path):
    """The stock Driver keeps serving the list entry that it read at its start."""
    folder = tmp_path / "runs" / "weights"
    store = OrbaxStore(folder, PublisherSettings(tiny_engine().canary))
    with running(weights=(tmp_path / "runs",)) as server:

        def refusal(path: str) -> tuple[int, str]:
            status, error = post(server, "/swap", {"path": path})
            return status, error["message"]

        status, said = refusal(str(folder))
        assert (status, "neither versions nor a Hugging Face model" in said) == (400, True)
        status, error = generate(server, min_version=7)
        assert status == 409 and "min_version=7 is not served yet" in error["message"]
        store.publish(tiny_params(7))
        store.wait(DEADLINE_S)
        status, found = post(server, "/swap", {"path": str(folder)})
        assert (status, found["version"], found["digest"]) == (200, 7, tiny_params(7).digest)
        assert decoded(server, by_tokens(PROMPT))[0] == list(alone(PROMPT, 7)[0])
        _, found = generate(server, temperature=0, min_version=7)
        assert set(found["choices"][0]["versions"]) == {7}
        status, said = refusal(str(folder))
        assert (status, "versions up to 7, but version 7 is served already" in said) == (409, True)
        for path in (str(tmp_path), f"{folder}/../../..", "/etc", ""):
            status, said = refusal(path)
            assert (status, "in no folder that this server may read" in said) == (403, True)
        status, said = refusal("a\0b")
        assert (status, "is not a path (embedded null byte)" in said) == (400, True)
        store.close(DEADLINE_S)


def test_a_swap_takes_a_hugging_face_folder_of_the_same_shapes(tmp_path):
    folder = tmp_path / "model"
    export_folder(folder, tiny_engine().model.config, tiny_params(3).params)
    with running(weights=(tmp_path, GOLDEN)) as server:
        for version in (1, 2):
            status, found = post(server, "/swap", {"path": str(folder)})
            assert (status, found["version"], found["digest"]) == (200, version, tiny_params(3).digest)
        assert decoded(server, by_tokens(PROMPT))[0] == list(alone(PROMPT, 3)[0])
        status, error = post(server, "/swap", {"path": str(GOLDEN / "llama-tied")})
        assert (status, error["type"]) == (409, "conflict_error")
        assert "have other shapes than those of tiny" in error["message"]


def test_a_swap_in_the_middle_of_a_sample_is_an_interruption_of_it(tmp_path, monkeypatch):
    """The third decode call waits until the version is published."""
    calls, decode = iter(range(1000)), tiny_engine().generate
    is_held, is_published = threading.Event(), threading.Event()

    def held(*args: Any, **kwargs: Any) -> Any:
        if next(calls) == 2:
            is_held.set()
            assert is_published.wait(HANG_S)
        return decode(*args, **kwargs)

    monkeypatch.setattr(tiny_engine(), "generate", held)
    store = OrbaxStore(tmp_path, PublisherSettings(tiny_engine().canary))
    store.publish(tiny_params(1))
    store.close(DEADLINE_S)
    with running(weights=(tmp_path,)) as server, ThreadPoolExecutor(2) as pool:
        asked = pool.submit(generate, server, temperature=0, max_tokens=40)
        assert is_held.wait(HANG_S)
        swapped = pool.submit(post, server, "/swap", {"path": str(tmp_path)})
        wait_until(lambda: server._store.latest() == 1, "published")
        is_published.set()
        assert swapped.result(HANG_S)[1]["version"] == 1
        (choice,) = asked.result(HANG_S)[1]["choices"]
    first = choice["versions"].count(0)
    assert choice["versions"] == [0] * first + [1] * (40 - first) and first >= 4
    assert (choice["interruptions"], choice["is_reproducible"]) == (1, True)


def test_a_swap_while_paused_is_in_force_at_once_and_live_samples_go_on_under_it(tmp_path):
    with running(weights=(tmp_path,)) as server, ThreadPoolExecutor(1) as pool:
        pause(server)
        asked = pool.submit(generate, server, temperature=0, max_tokens=60)
        wait_until(lambda: server.streams.open_samples == 1, "asked for")
        store = OrbaxStore(tmp_path, PublisherSettings(tiny_engine().canary))
        store.publish(tiny_params(1))
        store.close(DEADLINE_S)
        assert post(server, "/swap", {"path": str(tmp_path)})[1]["version"] == 1
        post(server, "/resume")
        assert set(asked.result(HANG_S)[1]["choices"][0]["versions"]) == {1}


def test_health_and_metrics(server):
    decoded(server, by_tokens(PROMPT))
    status, health = get(server, "/health")
    assert status == 200
    for part in ('"status":"ok"', '"model":"tiny"', '"version":0', f'"slots":{SLOTS}', '"is_paused":false'):
        assert part in health
    status, metrics = get(server, "/metrics")
    assert status == 200
    assert f"areal_jax_slots {SLOTS}.0" in metrics
    assert 'areal_jax_requests_total{method="Decode",status="OK"}' in metrics
    for of in ("first_token", "first_answer"):
        assert f"# HELP areal_jax_{of}_seconds Seconds from the arrival of a request" in metrics
    assert get(server, "/other")[0] == 404


# --- clients that misbehave ---------------------------------------------------------------------------------


def test_a_client_that_goes_frees_its_slot_at_once(server):
    pause(server)  # its sample can never end by itself
    with channel(server) as opened:
        streams = [OrchestratorStub(opened).Decode(by_tokens(PROMPT)) for _ in range(SLOTS + 3)]
        wait_until(lambda: server.streams.open_samples == SLOTS + 3, "asked for")
        for stream in streams:
            stream.cancel()
        wait_until(lambda: is_idle(server), "slots free while paused")


def test_clients_whose_connection_breaks_free_their_slots(server):
    pause(server)
    opened = grpc.insecure_channel(f"127.0.0.1:{server.port}")
    stream = OrchestratorStub(opened).Decode(by_tokens(PROMPT))
    wait_until(lambda: server.streams.open_samples == 1, "asked for")
    opened.close()
    wait_until(lambda: is_idle(server), "slots free while paused")
    assert stream.done()


def test_a_deadline_ends_the_request_and_frees_its_slot(server):
    pause(server)
    with channel(server) as opened, refused(grpc.StatusCode.DEADLINE_EXCEEDED, "Deadline"):
        list(OrchestratorStub(opened).Decode(by_tokens(PROMPT), timeout=0.3))
    wait_until(lambda: is_idle(server), "slots free while paused")


def test_a_full_queue_is_said_at_once():
    with running(queue=1) as server, channel(server) as opened:
        pause(server)
        stub = OrchestratorStub(opened)
        streams = [stub.Decode(by_tokens(PROMPT), timeout=DEADLINE_S) for _ in range(SLOTS + 1)]
        wait_until(lambda: server.streams.open_samples == SLOTS + 1, "asked for")
        with refused(grpc.StatusCode.RESOURCE_EXHAUSTED, f"space for 0 in {SLOTS} slots and a queue of 1"):
            list(stub.Decode(by_tokens(PROMPT), timeout=DEADLINE_S))
        server.streams.tell(Unpause())
        assert [len(list(stream)) for stream in streams] == [10] * (SLOTS + 1)


def test_a_reader_that_stands_still_is_cut_off_and_others_are_answered():
    """Flow control lets the server send what the client's window holds; the rest waits, up to `unread`."""
    asked = {"prompt": PROMPT, "temperature": 0, "max_tokens": 60, "n": 900, "stream": True}
    body = json.dumps(asked).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-length: {len(body)}"
    with running(unread=8) as server, socket.socket() as slow:
        slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        slow.settimeout(DEADLINE_S)
        slow.connect(("127.0.0.1", server.http_port))
        slow.sendall(head.encode() + b"\r\n\r\n" + body)
        wait_until(lambda: is_idle(server) and server.host.statistics().prefills > 0, "cut off", DEADLINE_S)
        # As long as there is room for: on a busy machine every reader may fall behind.
        assert decoded(server, by_tokens(PROMPT, max_tokens=8))[0] == list(alone(PROMPT)[0])[:8]
        answer = slow.makefile("rb").read().replace(b'": "', b'":"')
        # 429 where the busy server had not begun to answer.
        assert answer.startswith((b"HTTP/1.1 200", b"HTTP/1.1 429"))
        assert b"more than 8 of its tokens were unread" in answer
        assert b'"code":"resource_exhausted"' in answer and b"[DONE]" not in answer


def test_a_grpc_message_of_more_than_4_mib_is_refused(server):
    with refused(grpc.StatusCode.RESOURCE_EXHAUSTED, "larger than max"):
        decoded(server, by_text("a" * (4 * 2**20 + 1)))


def test_bytes_that_are_no_http_are_answered_with_text(server):
    with socket.create_connection(("127.0.0.1", server.http_port), timeout=DEADLINE_S) as client:
        client.sendall(b"\x16\x03\x01 hello\r\n\r\n")
        head, _, body = client.makefile("rb").read().partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 400") and b"content-type: text/plain" in head.lower()
    assert body == b"Invalid HTTP request received."


SOUND = [
    by_tokens(PROMPT, max_tokens=1).SerializeToString(),
    by_text("hello", max_tokens=1, priority=3).SerializeToString(),
]
METHODS = {
    "/jetstream_proto.Orchestrator/Decode": True,
    "/jetstream_proto.Orchestrator/HealthCheck": False,
    "/jetstream_proto.Orchestrator/NoSuchMethod": False,
}
EXPECTED = {grpc.StatusCode.OK, grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.UNIMPLEMENTED}

SOUND_BODIES = [
    json.dumps(body).encode()
    for body in (
        {"prompt": PROMPT, "max_tokens": 1, "temperature": 0.5, "stop": ["a"], "seed": 3},
        {"prompt": "hello", "max_tokens": 1, "request_id": "x", "logit_bias": {"5": 1.5}},
        {"request_id": "x"},
        {"path": "x"},
    )
]
PATHS = ("/v1/completions", "/v1/chat/completions", "/cancel", "/swap", "/no_such_path")


def odd_bytes(random_: random.Random, sound: list[bytes]) -> bytes:
    """Noise, or a sound message cut, spliced and overwritten."""
    if random_.random() < 0.3:
        return random_.randbytes(random_.randrange(80))
    data = bytearray(random_.choice(sound))
    for _ in range(random_.randrange(5)):
        place = random_.randrange(len(data) + 1)
        data[place : place + random_.randrange(4)] = random_.randbytes(random_.randrange(4))
    return bytes(data)


async def fuzz(port: int, count: int, seed: int) -> dict[grpc.StatusCode, int]:
    """How `count` odd calls ended, at most 64 at once."""
    random_, ended = random.Random(seed), {}
    room = asyncio.Semaphore(64)

    async def one(opened: grpc.aio.Channel, path: str, data: bytes) -> None:
        async with room:
            try:
                if METHODS[path]:
                    async for _ in opened.unary_stream(path)(data, timeout=DEADLINE_S):
                        pass
                else:
                    await opened.unary_unary(path)(data, timeout=DEADLINE_S)
                code = grpc.StatusCode.OK
            except grpc.aio.AioRpcError as error:
                code = error.code()
            ended[code] = ended.get(code, 0) + 1

    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as opened:
        calls = [(random_.choice(list(METHODS)), odd_bytes(random_, SOUND)) for _ in range(count)]
        await asyncio.gather(*(one(opened, path, data) for path, data in calls))
    return ended


@pytest.mark.parametrize(
    "count", [200, pytest.param(10_000, marks=pytest.mark.soak)], ids=["few", "ten thousand"]
)
def test_odd_bytes_are_errors_of_their_request(server, count):
    ended = asyncio.run(fuzz(server.port, count, seed=count))
    assert sum(ended.values()) == count
    assert set(ended) <= EXPECTED, ended
    assert ended[grpc.StatusCode.INVALID_ARGUMENT] > count // 5
    assert ended[grpc.StatusCode.OK] > count // 20


@pytest.mark.parametrize(
    "count", [200, pytest.param(10_000, marks=pytest.mark.soak)], ids=["few", "ten thousand"]
)
def test_odd_bodies_are_errors_of_their_request(server, count):
    random_ = random.Random(count)
    odd = [(random_.choice(PATHS), odd_bytes(random_, SOUND_BODIES)) for _ in range(count)]
    with ThreadPoolExecutor(8) as pool:
        ended = Counter(status for status, _ in pool.map(lambda one: get(server, *one), odd))
    # 499: one that another client's /cancel named.
    assert {200, 400, 403, 404} <= ended.keys() <= {200, 400, 403, 404, 499}, ended
    assert ended[400] > count // 4 and ended[200] > count // 100


async def ask_and_vanish(port: int, seed: int) -> None:
    """Calls that are cancelled at every moment of their lives."""
    random_ = random.Random(seed)
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as opened:
        decode = opened.unary_stream("/jetstream_proto.Orchestrator/Decode")
        for _ in range(40):
            call = decode(by_tokens(PROMPT, max_tokens=40).SerializeToString())
            for _ in range(random_.randrange(4)):
                await call.read()
            await asyncio.sleep(random_.random() * 0.01)
            call.cancel()


def test_clients_that_vanish_mid_stream_disturb_nobody(server):
    expected = list(alone(PROMPT)[0])
    with ThreadPoolExecutor(4) as pool:
        gone = [pool.submit(asyncio.run, ask_and_vanish(server.port, seed)) for seed in range(3)]
        while not all(one.done() for one in gone):
            assert decoded(server, by_tokens(PROMPT))[0] == expected
        assert [one.result() for one in gone] == [None] * 3


@pytest.mark.slow
def test_a_thousand_clients_at_once_are_all_answered_alike(server):
    async def all_at_once() -> list[list[int]]:
        async def one(prompt: tuple[int, ...]) -> list[int]:
            # a connection each: channels of equal arguments share one otherwise
            options = [("grpc.use_local_subchannel_pool", 1)]
            async with grpc.aio.insecure_channel(f"127.0.0.1:{server.port}", options) as opened:
                stream = OrchestratorStub(opened).Decode(by_tokens(prompt), timeout=300)
                return [t async for r in stream for s in r.stream_content.samples for t in s.token_ids]

        return await asyncio.gather(*(one(prompt) for prompt in prompts))

    prompts = [(1 + i % 50, 90, 41) for i in range(1000)]
    found = asyncio.run(all_at_once())
    assert found == [list(alone(prompt)[0]) for prompt in prompts]


# --- the secret ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("header", [None, "", SECRET, f"Bearer {SECRET}x", f"bearer {SECRET}", "Bearer "])
def test_without_the_secret_nothing_is_answered(header):
    with running(secret=Secret(SECRET)) as server, channel(server) as opened:
        metadata = () if header is None else (("authorization", header),)
        with refused(grpc.StatusCode.UNAUTHENTICATED, "authorization: Bearer"):
            list(OrchestratorStub(opened).Decode(by_tokens(PROMPT), metadata=metadata, timeout=DEADLINE_S))
        with refused(grpc.StatusCode.UNAUTHENTICATED, "authorization: Bearer"):
            OrchestratorStub(opened).HealthCheck(protocol.HealthCheckRequest(), metadata=metadata)
        headers = {} if header is None else {"Authorization": header}
        for path in ("/v1/completions", "/cancel", "/pause", "/resume", "/swap"):
            status, error = post(server, path, {"prompt": "x"}, **headers)
            assert (status, error["type"]) == (401, "authentication_error")
            assert "authorization: Bearer" in error["message"]
        assert get(server, "/health", **headers)[0] == 401
        assert not server.host.statistics().is_paused
        assert server.host.statistics().prefills == 0


def test_with_the_secret_everything_is():
    with running(secret=Secret(SECRET)) as server, channel(server) as opened:
        metadata = (("authorization", f"Bearer {SECRET}"),)
        stream = OrchestratorStub(opened).Decode(by_tokens(PROMPT), metadata=metadata, timeout=DEADLINE_S)
        assert len(list(stream)) == 10
        assert get(server, "/metrics", Authorization=f"Bearer {SECRET}")[0] == 200
        assert post(server, "/pause", Authorization=f"Bearer {SECRET}")[1]["is_paused"]


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.1.5", "example.org", ""])
def test_beyond_loopback_a_secret_is_required(host):
    with pytest.raises(ArealError, match=r"AREAL_JAX_SECRET or give --secret-file, or bind 127\.0\.0\.1"):
        require_secret(host, None)
    require_secret(host, Secret(SECRET))


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "localhost", "127.8.8.8"])
def test_on_loopback_it_is_not(host):
    require_secret(host, None)


def test_the_secret_is_read_from_a_file_or_the_environment(tmp_path, monkeypatch):
    monkeypatch.delenv("AREAL_JAX_SECRET", raising=False)
    assert read_secret(None) is None
    monkeypatch.setenv("AREAL_JAX_SECRET", SECRET)
    found = read_secret(None)
    assert found is not None and found.is_in(f"Bearer {SECRET}")
    (tmp_path / "secret").write_text("another-secret-entirely\n")
    found = read_secret(tmp_path / "secret")
    assert found is not None and found.is_in("Bearer another-secret-entirely")
    assert not found.is_in(f"Bearer {SECRET}")
    with pytest.raises(ArealError, match="cannot be read"):
        read_secret(tmp_path / "none")
    for short in ("", "short", "with a space in the middle of it"):
        with pytest.raises(ArealError, match="give at least 16, printable ASCII"):
            Secret(short)


# --- starting and ending ------------------------------------------------------------------------------------


@pytest.mark.parametrize("option", ["port", "http_port"])
def test_a_busy_port_is_an_error_that_names_it(option):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        number = taken.getsockname()[1]
        with pytest.raises(ArealError, match=rf"--{option.replace('_', '-')} {number} .*another port, or 0"):
            make(**{option: number})


def test_two_servers_never_share_a_port(server):
    with pytest.raises(ArealError, match="cannot be bound"):
        make(port=server.port)


def test_stopping_ends_requests_in_progress():
    server = make()
    pause(server)
    with channel(server) as opened:
        stream = OrchestratorStub(opened).Decode(by_tokens(PROMPT), timeout=DEADLINE_S)
        with ThreadPoolExecutor(1) as pool:
            over_http = pool.submit(generate, server)
            wait_until(lambda: server.streams.open_samples == 2, "asked for")
            server.stop()
            status, error = over_http.result(HANG_S)
        assert (status, "the generation host has ended" in error["message"]) == (503, True)
        with refused(grpc.StatusCode.UNAVAILABLE, "the generation host has ended"):
            list(stream)
    server.wait()  # nothing failed
    assert not server._endpoint._thread.is_alive()


def test_a_host_that_fails_is_said_to_clients_and_raised_to_whoever_waits(monkeypatch):
    with running() as server, channel(server) as opened:

        def broken(*_):
            raise RuntimeError("the device is gone")

        monkeypatch.setattr(tiny_engine(), "generate", broken)
        with refused(grpc.StatusCode.UNAVAILABLE, "the generation host has ended"):
            list(OrchestratorStub(opened).Decode(by_tokens(PROMPT), timeout=DEADLINE_S))
        with pytest.raises(RuntimeError, match="the device is gone"):
            server.wait()
        health = OrchestratorStub(opened).HealthCheck(protocol.HealthCheckRequest(), timeout=DEADLINE_S)
        assert not health.is_live
        status, health = get(server, "/health")
        assert (status, json.loads(health)["status"]) == (503, "ended")
        for path, body in (("/v1/completions", {"prompt": "x"}), ("/pause", {}), ("/resume", {})):
            status, error = post(server, path, body)
            assert (status, error["type"]) == (503, "unavailable_error") and "ended" in error["message"]


def test_an_unknown_model_is_named():
    with pytest.raises(ArealError, match=r"no model or run no-such-model; choose one of random, smollm2"):
        serve.make_server("no-such-model", (), ServeSettings())


@pytest.mark.soak
def test_smollm2_answers_a_chat_prompt_through_jetstreams_stub():
    words = ("generation.slots=2", "generation.length=128", "generation.max_tokens=32")
    server = serve.make_server("smollm2", words, ServeSettings(port=0, http_port=0))
    server.start()
    try:
        chat = "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n"
        ids, text = decoded(server, by_text(chat))
    finally:
        server.stop()
    assert text == "The capital of France is Paris."
    assert ids[-1] == server.served.tokenizer.eos_id


@pytest.mark.slow
def test_a_bfloat16_model_is_served_from_bfloat16_weights():
    """Widened to float32, they would take twice the memory and be cast at every step."""
    words = ("model.dtype=bfloat16", "generation.length=32", "generation.slots=2")
    server = serve.make_server("tiny", words, ServeSettings())
    published = server._store.load(0, server._engine.param_shardings).params
    assert {leaf.dtype for leaf in jax.tree.leaves(published)} == {jax.numpy.dtype("bfloat16")}


@pytest.mark.slow
def test_a_shorter_length_alone_is_enough_to_serve_shorter_samples():
    server = serve.make_server("tiny", ("generation.length=32", "generation.slots=2"), ServeSettings())
    assert (server.served.length, server.served.sampling.max_tokens) == (32, 16)
    assert server.served.decode_sampling.max_tokens == 16
