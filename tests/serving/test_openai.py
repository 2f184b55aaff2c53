"""OpenAI's interface over HTTP, with OpenAI's own client unmodified."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import openai
import pytest

from areal_jax.generation.commands import Pause, Unpause
from areal_jax.secret import Secret
from areal_jax.serving.server import Server
from areal_jax.types import Prompt, Sampling
from tests.episodes.chat_templates import tokenizer_of
from tests.hangs import HANG_S
from tests.serving.scripted import serving
from tests.serving.served import PROMPT, alone, tiny_engine, wait_until
from tests.serving.test_server import SECRET, get, is_idle, running

GREEDY: dict[str, Any] = {"model": "tiny", "temperature": 0}
IDS: dict[str, Any] = {"extra_body": {"return_token_ids": True}}
CHAT: Any = [{"role": "user", "content": "what is 2 + 2?"}]


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with running() as server:
        yield server


@pytest.fixture(autouse=True)
def nothing_is_left_over(server) -> Iterator[None]:
    yield
    server.streams.tell(Unpause())
    wait_until(lambda: is_idle(server), "slots free")


def client_of(server: Server, **settings: Any) -> openai.OpenAI:
    base = f"http://127.0.0.1:{server.http_port}/v1"
    return openai.OpenAI(**{"base_url": base, "api_key": "none", "max_retries": 0, "timeout": 60, **settings})


@pytest.fixture(scope="module")
def client(server) -> openai.OpenAI:
    return client_of(server)


# --- answers ------------------------------------------------------------------------------------------------


def test_models(client):
    assert [model.id for model in client.models.list()] == ["tiny"]
    assert client.models.retrieve("tiny").owned_by == "areal-jax"
    with pytest.raises(openai.NotFoundError, match="'other' is not served; give 'tiny'"):
        client.models.retrieve("other")


def test_a_completion_has_the_hosts_tokens_log_probs_and_versions(client):
    tokens, logp = alone(PROMPT)
    found = client.completions.create(prompt=list(PROMPT), logprobs=0, **GREEDY, **IDS)
    (choice,) = found.choices
    assert (choice.token_ids, choice.versions) == (list(tokens), [0] * len(tokens))
    assert found.prompt_token_ids == list(PROMPT)
    assert choice.text == tiny_engine().tokenizer.decode(tokens)
    assert choice.logprobs.token_logprobs == pytest.approx(list(logp), abs=1e-6)
    assert choice.finish_reason == "length"
    assert (found.usage.prompt_tokens, found.usage.completion_tokens) == (len(PROMPT), len(tokens))


def test_a_text_prompt_is_encoded_and_samples_are_those_of_their_seed(client):
    tokenizer = tiny_engine().tokenizer
    prompt = tuple(tokenizer.render(Prompt("what?")))
    found = client.completions.create(model="tiny", prompt="what?", n=3, seed=5, max_tokens=9, **IDS)
    for member, choice in enumerate(found.choices):
        wanted, _ = alone(prompt, sampling=Sampling(max_tokens=9), member=member, seed=5)
        assert (choice.index, choice.token_ids) == (member, list(wanted))


def test_a_stop_text_ends_a_completion_and_is_left_out(client):
    whole = client.completions.create(prompt=list(PROMPT), **GREEDY).choices[0].text
    stop = whole[4:6]
    for stream in (False, True):
        found = client.completions.create(prompt=list(PROMPT), stop=[stop, "never"], stream=stream, **GREEDY)
        chunks = list(found) if stream else [found]
        assert "".join(chunk.choices[0].text for chunk in chunks) == whole[: whole.index(stop)]
        assert chunks[-1].choices[0].finish_reason == "stop"


def test_log_probs_have_raw_bytes_and_offsets_also_in_a_stream(client):
    tokens, _ = alone(PROMPT)
    text = bytes(tokens).decode(errors="replace")
    assert "\N{REPLACEMENT CHARACTER}" in text, "the model writes bytes that are no characters"
    given: dict[str, Any] = dict(prompt=list(PROMPT), logprobs=0, **GREEDY)
    whole = client.completions.create(**given).choices[0]
    placed = zip(tokens, whole.logprobs.text_offset, strict=True)
    letters = [(chr(token), text[offset]) for token, offset in placed if token < 128]
    assert len(letters) > 3 and all(letter == found for letter, found in letters)
    pieces = [chunk.choices[0].logprobs for chunk in client.completions.create(**given, stream=True)]
    for name in ("text_offset", "tokens", "token_logprobs"):
        assert [one for piece in pieces for one in getattr(piece, name)] == getattr(whole.logprobs, name)
    prompt = tuple(tiny_engine().tokenizer.render(Prompt(messages=CHAT)))
    tokens, _ = alone(prompt)
    for stream in (False, True):
        found = client.chat.completions.create(messages=CHAT, logprobs=True, stream=stream, **GREEDY)
        choices = [one.choices[0] for one in (found if stream else [found])]
        own = [one.bytes for choice in choices for one in choice.logprobs.content]
        assert own == [[token] for token in tokens]


def test_a_stream_of_several_completions_has_each_of_them(client):
    asked: dict[str, Any] = dict(model="tiny", messages=CHAT, n=3, seed=2**40, max_tokens=5, **IDS)
    whole = client.chat.completions.create(**asked).choices
    assert len({tuple(choice.token_ids) for choice in whole}) == 3
    for choice in whole:
        found: dict[str, Any] = {"ids": [], "text": "", "ends": []}
        for chunk in client.chat.completions.create(**asked, stream=True):
            (one,) = chunk.choices
            if one.index == choice.index:
                found["ids"] += one.token_ids
                found["text"] += one.delta.content or ""
                found["ends"] += [one.finish_reason] if one.finish_reason else []
        assert found == {"ids": choice.token_ids, "text": choice.message.content, "ends": ["length"]}


def test_every_seed_of_64_bits_is_a_stream_of_its_own(client):
    def drawn(seed: int) -> tuple[int, ...]:
        found = client.completions.create(
            model="tiny", prompt=list(PROMPT), seed=seed, max_tokens=9, temperature=5, **IDS
        )
        return tuple(found.choices[0].token_ids)

    seeds = (5, 2**31, 2**32 + 5, 2**63, 2**64 - 2, -(2**63) + 1)
    assert len({drawn(seed) for seed in seeds}) == len(seeds)
    assert drawn(2**32 + 5) == drawn(2**32 + 5)
    assert drawn(5) == alone(PROMPT, sampling=Sampling(temperature=5, max_tokens=9), seed=5)[0]


@pytest.mark.parametrize("temperature", [1e-6, 1e-40])
def test_a_temperature_near_0_gives_the_likeliest_tokens_with_their_log_probs(client, temperature):
    tokens, logp = alone(PROMPT)
    found = client.completions.create(
        model="tiny", prompt=list(PROMPT), temperature=temperature, logprobs=0, **IDS
    )
    assert found.choices[0].token_ids == list(tokens)
    assert found.choices[0].logprobs.token_logprobs == pytest.approx(list(logp), abs=1e-6)


def test_fields_that_ask_for_nothing_are_accepted(client):
    """As other servers' clients send them; -1 is off for vLLM and SGLang."""
    tokens, _ = alone(PROMPT)
    nothing = {
        "top_k": -1, "ignore_eos": False, "min_tokens": 0, "skip_special_tokens": True, "echo": False,
        "best_of": 1, "suffix": None, "user": "x", "seed": None, "stop": [], "logit_bias": {},
        "include_stop_str_in_output": False, "frequency_penalty": 0,
    }  # fmt: skip
    found = client.completions.create(
        model="tiny", prompt=list(PROMPT), temperature=0, extra_body={"return_token_ids": True, **nothing}
    )
    assert found.choices[0].token_ids == list(tokens)
    chat = {
        "tools": [], "tool_choice": "auto", "parallel_tool_calls": True, "response_format": {"type": "text"},
        "max_tokens": None, "max_completion_tokens": 3, "top_logprobs": 0, "store": True,
        "stream_options": None, "reasoning_effort": None,
    }  # fmt: skip
    whole = client.chat.completions.create(messages=CHAT, **GREEDY, extra_body=chat)
    assert whole.usage.completion_tokens == 3


@pytest.mark.parametrize("stream", [False, True])
def test_a_prompt_beyond_the_context_has_the_code_and_words_that_clients_know(client, stream):
    said = [{"role": "user", "content": "x" * 100}]
    count = len(tiny_engine().tokenizer.render(Prompt(messages=said)))
    asks = (
        (count, lambda: client.chat.completions.create(messages=said, stream=stream, **GREEDY)),
        (101, lambda: client.completions.create(prompt="x" * 100, stream=stream, **GREEDY)),
        (64, lambda: client.completions.create(prompt=[5] * 64, stream=stream, **GREEDY)),
    )
    for tokens, ask in asks:
        with pytest.raises(openai.BadRequestError) as refused:
            ask()
        assert refused.value.code == "context_length_exceeded"
        assert "maximum context length is 64 tokens" in str(refused.value)
        assert f"has {tokens} tokens" in str(refused.value)


def test_a_stream_is_the_answer_in_pieces(client):
    whole = client.completions.create(prompt=list(PROMPT), logprobs=0, **GREEDY, **IDS).choices[0]
    options = {"include_usage": True}
    found = list(
        client.completions.create(
            prompt=list(PROMPT), logprobs=0, stream=True, stream_options=options, **GREEDY, **IDS
        )
    )
    *chunks, usage = found
    assert len(chunks) > 3 and usage.choices == [] and usage.usage.completion_tokens == len(whole.token_ids)
    pieces = [chunk.choices[0] for chunk in chunks]
    assert "".join(piece.text for piece in pieces) == whole.text
    assert [token for piece in pieces for token in piece.token_ids] == whole.token_ids
    assert [p for piece in pieces for p in piece.logprobs.token_logprobs] == whole.logprobs.token_logprobs
    assert [piece.finish_reason for piece in pieces if piece.finish_reason] == ["length"]


def test_a_chat_is_rendered_and_streamed(client):
    prompt = tuple(tiny_engine().tokenizer.render(Prompt(messages=CHAT)))
    tokens, logp = alone(prompt)
    found = client.chat.completions.create(messages=CHAT, logprobs=True, **GREEDY, **IDS)
    message = found.choices[0].message
    assert found.prompt_token_ids == list(prompt) and found.choices[0].token_ids == list(tokens)
    assert (message.role, message.content) == ("assistant", tiny_engine().tokenizer.decode(tokens))
    found_logp = [one.logprob for one in found.choices[0].logprobs.content]
    assert found_logp == pytest.approx(list(logp), abs=1e-6)
    chunks = list(client.chat.completions.create(messages=CHAT, stream=True, **GREEDY))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == message.content
    assert (chunks[0].choices[0].delta.role, chunks[-1].choices[0].finish_reason) == ("assistant", "length")


# --- tools --------------------------------------------------------------------------------------------------

TOOLS: Any = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]
WRITTEN = {
    "qwen": "<think>\nhm\n</think>\n\nI add.\n"
    '<tool_call>\n{"name": "add", "arguments": {"a": [1, 2.5]}}\n</tool_call>',
    "llama": '{"name": "add", "parameters": {"a": [1, 2.5]}}',
}


@pytest.mark.parametrize("family", WRITTEN)
def test_tool_calls_are_parsed_and_their_results_are_rendered(tmp_path: Path, family: str):
    tokenizer = tokenizer_of(tmp_path / family, family)
    with serving(tokenizer, [WRITTEN[family], WRITTEN[family], "It is 3.5."]) as (base_url, host):
        chat = openai.OpenAI(base_url=base_url, api_key="none", max_retries=0).chat.completions
        first = chat.create(model="scripted", messages=CHAT, tools=TOOLS).choices[0]
        (call,) = first.message.tool_calls
        assert (first.finish_reason, call.type, call.function.name) == ("tool_calls", "function", "add")
        assert json.loads(call.function.arguments) == {"a": [1, 2.5]}
        is_qwen = family == "qwen"
        assert first.message.content == ("I add." if is_qwen else None)
        assert getattr(first.message, "reasoning_content", None) == ("hm" if is_qwen else None)
        with chat.stream(model="scripted", messages=CHAT, tools=TOOLS) as stream:
            streamed = stream.get_final_completion().choices[0]
        assert streamed.finish_reason == "tool_calls"
        assert streamed.message.tool_calls[0].function.arguments == call.function.arguments
        assert (streamed.message.content or None) == first.message.content
        result = {"role": "tool", "tool_call_id": call.id, "content": "3.5"}
        said = [*CHAT, first.message, result]
        last = chat.create(model="scripted", messages=said, tools=TOOLS).choices[0]
        assert (last.finish_reason, last.message.content, last.message.tool_calls) == (
            "stop",
            "It is 3.5.",
            None,
        )
        prompt = tokenizer._backend.decode(list(host.starts[-1].prompt), skip_special_tokens=False)
        assert "3.5" in prompt and '"name": "add"' in prompt
        plain = chat.create(model="scripted", messages=CHAT, tools=TOOLS, tool_choice="none").choices[0]
        assert plain.message.tool_calls is None and plain.finish_reason == "stop"


def test_an_answer_that_is_cut_after_a_call_says_so(tmp_path: Path):
    tokenizer, text = tokenizer_of(tmp_path / "qwen", "qwen"), WRITTEN["qwen"]
    with serving(tokenizer, [f"{text}\nand so on"]) as (base_url, _):
        chat = openai.OpenAI(base_url=base_url, api_key="none", max_retries=0).chat.completions
        limit = len(tokenizer.encode(text)) + 2
        asked: dict[str, Any] = dict(model="scripted", messages=CHAT, tools=TOOLS, max_tokens=limit)
        cut = chat.create(**asked).choices[0]
        assert (cut.finish_reason, len(cut.message.tool_calls)) == ("length", 1)
        *_, last = chat.create(**asked, stream=True)
        assert last.choices[0].finish_reason == "length"


# --- what is refused ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"temperature": 1e9}, "temperature=1e\\+09 is out of range"),
        ({"n": 0}, "n=0 completions are out of range"),
        ({"n": 10**6}, "n=1000000 completions are out of range"),
        ({"seed": 2**64}, "seed: .* less than 18446744073709551616, but is 18446744073709551616"),
        ({"seed": -(2**63) - 1}, "seed: .* -9223372036854775808, but is -9223372036854775809"),
        ({"frequency_penalty": 0.5}, "frequency_penalty=0.5 is not supported; leave it out"),
        ({"response_format": {"type": "json_object"}}, "response_format=.* is not supported"),
        ({"top_logprobs": 3, "logprobs": True}, "top_logprobs=3 is not supported"),
        ({"tools": TOOLS, "tool_choice": "required"}, "tool_choice='required'"),
        ({"tools": TOOLS}, "need a chat template"),
        ({"messages": []}, "messages is empty"),
        ({"messages": [{"role": "user"}]}, "lacks role or content"),
        ({"messages": [{"role": "user", "content": "x" * 100}]}, "the prompt has 1\\d\\d tokens"),
        ({"extra_body": {"temperatur": 1}}, "temperatur: Extra inputs are not permitted"),
        ({"extra_body": {"chat_template_kwargs": {"is_open": False}}}, "template arguments .*is_open"),
    ],
)
def test_wrong_fields_are_named(client, fields, said):
    with pytest.raises(openai.BadRequestError, match=said) as refused:
        client.chat.completions.create(**{"model": "tiny", "messages": CHAT, **fields})
    assert refused.value.type == "invalid_request_error"


def test_another_model_and_several_prompts_are_refused(client):
    with pytest.raises(openai.NotFoundError, match="model='gpt' is not served here; give 'tiny'"):
        client.completions.create(model="gpt", prompt="x")
    with pytest.raises(openai.BadRequestError, match="prompt has 2 prompts"):
        client.completions.create(model="tiny", prompt=["a", "b"])
    with pytest.raises(openai.BadRequestError, match=r"prompt has the id 999, .* 0\.\.257"):
        client.completions.create(model="tiny", prompt=[999])
    with pytest.raises(openai.BadRequestError, match=r"logprobs=2 is not supported, .*; give 0"):
        client.completions.create(model="tiny", prompt="x", logprobs=2)


def raw(server: Server, body: bytes, line: str = "POST /v1/chat/completions") -> bytes:
    """Sends a request and returns the answer."""
    with socket.create_connection(("127.0.0.1", server.http_port), timeout=HANG_S) as sock:
        length = f"Content-Length: {len(body)}\r\nConnection: close"
        sock.sendall(f"{line} HTTP/1.1\r\nHost: x\r\n{length}\r\n\r\n".encode() + body)
        return sock.makefile("rb").read()


@pytest.mark.parametrize(
    "body", [b"", b"{", b"[1]", b"\xff\xfe", b"[" * 100_000, b'{"messages": 5}', b"null"]
)
def test_no_body_breaks_the_server(server, body):
    answer = raw(server, body)
    assert answer.startswith(b"HTTP/1.1 400") and b"invalid_request_error" in answer


def error_of(answer: bytes) -> tuple[int, dict[str, Any]]:
    """The status and the error of an answer, which has OpenAI's form."""
    head, _, body = answer.partition(b"\r\n\r\n")
    assert b"content-type: application/json" in head.lower()
    (error,) = json.loads(body).values()
    assert error.keys() == {"message", "type", "param", "code"}
    return int(head.split()[1]), error


def test_a_body_that_is_too_large_is_refused(server):
    status, error = error_of(raw(server, b" " * (16 * 2**20 + 1)))
    assert (status, error["type"], error["code"]) == (413, "invalid_request_error", "request_too_large")
    assert "more than 16777216 bytes" in error["message"]


@pytest.mark.parametrize(
    ("line", "status", "said"),
    [
        ("POST /v1/embeddings", 404, "POST '/v1/embeddings': Not Found"),
        ("POST /", 404, "POST '/': Not Found"),
        ("GET /v1/responses/%ff%00", 404, "Not Found"),
        ("GET /v1/chat/completions", 405, "GET '/v1/chat/completions': Method Not Allowed"),
        ("DELETE /v1/models", 405, "DELETE '/v1/models': Method Not Allowed"),
        ("POST /health", 405, "POST '/health': Method Not Allowed"),
        ("GET /v1/models/other", 404, "model='other' is not served; give 'tiny'"),
    ],
)
def test_unknown_paths_and_methods_are_errors_in_json(server, line, status, said):
    found, error = error_of(raw(server, b"{}", line=line))
    assert (found, status) == (status, found) and said in error["message"]
    assert error["type"] == ("not_found_error" if status == 404 else "invalid_request_error")


def test_an_error_of_the_server_is_an_error_in_json_and_counted(server, monkeypatch):
    def broken(*_: Any) -> None:
        raise RuntimeError("a secret of the server")

    monkeypatch.setattr("areal_jax.serving.openai_api.json_of", broken)
    status, error = error_of(raw(server, b"{}"))
    assert (status, error["type"], error["code"]) == (500, "server_error", "internal")
    assert "RuntimeError" in error["message"] and "secret" not in error["message"]
    assert 'areal_jax_requests_total{method="openai chat",status="UNKNOWN"} 1.0' in get(server, "/metrics")[1]


def test_a_full_queue_is_a_429_that_the_client_may_retry():
    with running(queue=1) as small, opened(small, n=4):
        with pytest.raises(
            openai.RateLimitError, match=r"4 open samples leave space for 1 .* retry"
        ) as refused:
            client_of(small).completions.create(prompt="x", n=2, **GREEDY)
        assert refused.value.response.headers["retry-after"] == "1"


def test_a_request_ends_at_its_deadline_and_gives_its_slot_back():
    with running(deadline_s=0.5) as slow:
        slow.streams.tell(Pause())
        for stream in (False, True):
            with pytest.raises(openai.APIStatusError, match=r"took longer than 0\.5 s") as refused:
                client_of(slow).completions.create(prompt="x", stream=stream, **GREEDY)
            assert refused.value.status_code == 504
        assert slow.streams.open_samples == 0


@contextmanager
def opened(server: Server, **fields: Any) -> Iterator[None]:
    """A client that asks a paused host for completions, and leaves at the end of the block."""
    server.streams.tell(Pause())
    wait_until(lambda: server.host.statistics().is_paused, "paused")
    body = json.dumps({"prompt": "x", "max_tokens": 40, **fields}).encode()
    with socket.create_connection(("127.0.0.1", server.http_port), timeout=HANG_S) as sock:
        head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
        sock.sendall(head.encode() + body)
        wait_until(lambda: server.streams.open_samples == fields["n"], "submitted")
        yield


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_gives_its_slots_back(server, stream):
    with opened(server, n=3, stream=stream):
        pass
    wait_until(lambda: server.streams.open_samples == 0, "withdrawn")


def test_the_secret_is_the_api_key():
    with running(secret=Secret(SECRET)) as guarded:
        with pytest.raises(openai.AuthenticationError, match="send the server's secret"):
            client_of(guarded).models.list()
        assert client_of(guarded, api_key=SECRET).models.retrieve("tiny").id == "tiny"
        assert client_of(guarded, api_key=SECRET).completions.create(prompt="x", **GREEDY).choices


def test_requests_are_counted(server, client):
    before = get(server, "/metrics")[1]
    client.completions.create(prompt="x", **GREEDY)

    def count(text: str) -> float:
        lines = (line for line in text.splitlines() if 'method="openai completions",status="OK"' in line)
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines if "_total" in line)

    wait_until(lambda: count(get(server, "/metrics")[1]) > count(before), "counted")  # after the answer
    assert count(get(server, "/metrics")[1]) == count(before) + 1
