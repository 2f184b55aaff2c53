"""Answers of interleaved responses: found as the tokens come, sent while the response goes on, and timed."""

from __future__ import annotations

import http.client
import json
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

import grpc
import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal_jax.generation.engine import Engine
from areal_jax.models.config import model_config
from areal_jax.models.model import Model
from areal_jax.serving.answers import AnswerStream, require_tags
from areal_jax.serving.server import Server, ServeSettings
from areal_jax.tasks.blocks import BlockParser, Opened, render
from areal_jax.tasks.tokenizers import ByteTokenizer, CharTokenizer
from areal_jax.types import ArealError, Sampling, VersionedParams
from areal_jax.weights.digest import digest
from tests.serving.served import LENGTH, SIZES, SLOTS, STEPS, wait_until
from tests.serving.test_server import DEADLINE_S, by_text, by_tokens, channel, get, post, refused

from jetstream.core.proto.jetstream_pb2_grpc import OrchestratorStub  # isort: skip - as a client has it
from tests.hangs import HANG_S

QUESTION = "?"
SCRIPT = (
    *("<th", "ink>", "2+2", " is 4", "</thi", "nk><ans", "wer>", "4", "</answer", ">"),
    *("<think>", "4+", "3", "</think>", "<answer>", "7", "</answer>", "so"),
)
WHOLE = tuple(range(17))
BROKEN = (*range(10), 17, *range(10, 17))
"""The response WHOLE with the text "so" between the first answer and the second thought."""

HELD_CALL = 5
"""The decode call after the one that completes the first answer: WHOLE takes 9 calls of 2 tokens."""

HELD_S = 0.05


class Scripted(ByteTokenizer):
    """Bytes, but the first ids, which are control characters, are the tokens of a response."""

    def token_bytes(self, token):
        return SCRIPT[token].encode() if token < len(SCRIPT) else super().token_bytes(token)


@cache
def scripted_engine() -> Engine:
    model = Model(model_config("tiny", 258, **SIZES), Scripted())
    sizes = dict(slots=SLOTS, length=LENGTH, decode_steps=STEPS, page_tokens=16, prefill_chunk=16)
    return Engine(model, has_penalties=True, **sizes)  # type: ignore[arg-type]


@cache
def answering(response: tuple[int, ...]) -> VersionedParams:
    """Parameters of a model that answers QUESTION with these tokens and the EOS.

    The layers add nothing, so that a hidden state is the last token's embedding: its product with the
    column of the LM head of the token that comes next is 100, with other columns a fraction of that.
    """
    engine = scripted_engine()
    tokens = (ord(QUESTION), *response, engine.tokenizer.eos_id)
    signs = np.random.default_rng(0).choice([-1.0, 1.0], (len(tokens), SIZES["width"]))
    params = jax.tree.map(lambda leaf: 0 * leaf if leaf.ndim > 1 else leaf, engine.model.init(0))
    params["embedding"] = params["embedding"].at[np.array(tokens)].set(signs)
    heads = 100 / SIZES["width"] * signs[:-1].T
    params["head"] = params["head"].at[:, np.array(tokens[1:])].set(heads)
    params = jax.device_put(params, engine.param_shardings)
    return VersionedParams(0, params, digest(params))


@contextmanager
def running(response: tuple[int, ...] = WHOLE, *, answers_only: bool = False) -> Iterator[Server]:
    settings = ServeSettings(port=0, http_port=0, is_answers_only=answers_only)
    # Without calls ahead, the tokens of a decode call are passed on before the next call begins.
    server = Server(
        "scripted", scripted_engine(), answering(response), settings, Sampling(max_tokens=40), calls_ahead=0
    )
    server.start()
    try:
        yield server
    finally:
        server.stop()


@pytest.fixture
def is_read(monkeypatch) -> threading.Event:
    """Decode call HELD_CALL waits for this event: until a test sets it, no later token is sampled."""
    event, calls, decode = threading.Event(), iter(range(1000)), scripted_engine().generate

    def held(*args, **kwargs):
        if next(calls) == HELD_CALL:
            assert event.wait(HANG_S), "the client got no answer while the response went on"
        return decode(*args, **kwargs)

    monkeypatch.setattr(scripted_engine(), "generate", held)
    return event


def samples_of(stream) -> Iterator:
    return (sample for response in stream for sample in response.stream_content.samples)


ASKED: dict[str, Any] = {"prompt": QUESTION, "temperature": 0}


def complete(server: Server, **fields: Any) -> dict[str, Any]:
    status, found = post(server, "/v1/completions", ASKED | fields)
    assert status == 200, found
    return found


def streamed(server: Server, **fields: Any) -> Iterator[dict[str, Any]]:
    """The events of a streamed completion, as they arrive."""
    connection = http.client.HTTPConnection("127.0.0.1", server.http_port, timeout=DEADLINE_S)
    connection.request("POST", "/v1/completions", json.dumps(ASKED | {"stream": True} | fields))
    for line in connection.getresponse():
        if line.startswith(b"data: {"):
            yield json.loads(line.removeprefix(b"data: "))
    connection.close()


# --- found as the tokens come -------------------------------------------------------------------------------


def added(text: str, sizes: Sequence[int]) -> tuple[str, str]:
    """The text and the answers that an AnswerStream returns for the text's bytes, pushed in these sizes."""
    stream, tokens, found = AnswerStream(ByteTokenizer()), list(text.encode()), []
    for size in [*sizes, len(tokens)]:
        found.append(stream.push(tokens[:size]))
        tokens = tokens[size:]
    found.append(stream.finish())
    return "".join(each.text for each in found), "".join(each.answers for each in found)


CONTENT = st.text("ab é<", min_size=1).filter(str.strip)


@given(st.lists(st.tuples(CONTENT, CONTENT), max_size=3), st.lists(st.integers(0, 9), max_size=20))
def test_answers_are_the_same_however_the_tokens_come(pairs, sizes):
    text = render([block for pair in pairs for block in zip(("think", "answer"), pair, strict=True)])
    assert added(text, sizes) == (text, "".join(f"{answer}\n" for _, answer in pairs))


def test_an_answer_comes_with_its_closing_tag_verbatim():
    stream = AnswerStream(ByteTokenizer())
    pieces = ["<think>a</think><answer>", " \n", "4", "\n</answer", ">", "<think>b"]
    assert [stream.push(list(piece.encode())).answers for piece in pieces] == ["", "", "", "", " \n4\n\n", ""]


def test_an_answer_has_begun_with_its_first_content():
    stream = AnswerStream(ByteTokenizer())
    begun = []
    for piece in ["<think>a</think>", "<answer>", " \n", "4", "</answer>"]:
        stream.push(list(piece.encode()))
        begun.append(stream.has_answer)
    assert begun == [False, False, False, True, True]


@pytest.mark.parametrize(
    ("text", "answers"),
    [
        ("plain", ""),
        ("<answer>4</answer>", ""),
        ("<think>a</think><answer>4</answer> so <think>b</think><answer>7</answer>", "4\n"),
        ("<think>a</think><answer>4</answer><answer>7</answer>", "4\n"),
        ("<think>a</think><answer> </answer><think>b</think><answer>7</answer>", ""),
        ("<think>a</think><answer>4", ""),
    ],
)
def test_after_a_break_of_the_template_no_answer_is_found_and_all_text_is_decoded(text, answers):
    assert added(text, [3] * 40) == (text, answers)


@pytest.mark.parametrize("needs_text", [True, False])
def test_after_a_break_tokens_are_decoded_only_for_a_client_that_gets_text(needs_text):
    """The requests of a training run send token ids, and few of their responses have blocks."""

    decoded = set()

    class Recording(ByteTokenizer):
        def token_bytes(self, token):
            decoded.add(token)
            return super().token_bytes(token)

    stream = AnswerStream(Recording(), needs_text)
    texts = [stream.push([byte]).text for byte in b"no tags"]
    assert decoded == set(b"no tags" if needs_text else b"n")
    assert "".join(texts) == ("no tags" if needs_text else "n")
    assert stream.finish() == ("", "")


def test_a_tokenizer_without_the_tags_as_text_is_refused():
    class Special(ByteTokenizer):
        """Its tags are special tokens: rendered as such, and left out of decoded text."""

        def render(self, prompt):
            return [self.bos_id] * 4

    for tokenizer in (CharTokenizer("abc"), Special()):
        with pytest.raises(ArealError, match="--answers-only: the tokenizer of mine has no tokens with"):
            require_tags(tokenizer, "mine")
    require_tags(ByteTokenizer(), "mine")
    require_tags(CharTokenizer("ab", ["<think>", "</think>", "<answer>", "</answer>"]), "mine")


# --- sent while the response goes on ------------------------------------------------------------------------


def test_the_first_answers_content_reaches_the_client_before_the_response_ends(is_read):
    """The decode loop waits until the client has read the answer's content: nothing after it exists yet."""
    parser, at_s = BlockParser(), {}
    with running() as server:
        started_s = time.monotonic()
        for found in streamed(server):
            (choice,) = found["choices"]
            for event in parser.feed(choice["text"]):
                if isinstance(event, Opened) and event.kind == "answer" and "answer" not in at_s:
                    at_s["answer"] = time.monotonic() - started_s
                    assert server.host.statistics().live == 1
                    time.sleep(HELD_S)
                    is_read.set()
            if choice["finish_reason"]:
                at_s["end"] = time.monotonic() - started_s
    parsed = parser.finish()
    assert [block.text for block in parsed.answers] == ["4", "7"] and parsed.is_valid
    assert list(at_s) == ["answer", "end"]  # messages come in this order
    assert 0 < at_s["answer"] <= at_s["end"] - HELD_S


def test_answers_only_sends_the_first_answer_before_the_response_ends_and_no_thought(is_read):
    found = []
    with running(answers_only=True) as server, channel(server) as opened:
        for sample in samples_of(OrchestratorStub(opened).Decode(by_text(QUESTION), timeout=DEADLINE_S)):
            assert is_read.is_set() or server.host.statistics().live == 1
            found.append((sample.text, list(sample.token_ids)))
            is_read.set()
    assert found == [("4\n", []), ("7\n", [])]


def test_answers_only_generates_text_without_ids_and_log_probs():
    with running(answers_only=True) as server:
        found = [event["choices"][0] for event in streamed(server)]
        other = complete(server, prompt=[ord(QUESTION)], n=2)
        for name, value in (("logprobs", 0), ("return_token_ids", True)):
            status, error = post(server, "/v1/completions", ASKED | {name: value})
            assert (status, "logprobs and return_token_ids are not" in error["message"]) == (400, True)
    assert [choice["text"] for choice in found] == ["4\n", "7\n", ""]
    assert [choice["finish_reason"] for choice in found] == [None, None, "stop"]
    assert all(choice.keys() == {"index", "text", "logprobs", "finish_reason"} for choice in found)
    texts = [(each["index"], each["text"], each["logprobs"]) for each in other["choices"]]
    assert texts == [(0, "4\n7\n", None), (1, "4\n7\n", None)]


def test_usage_counts_the_tokens_that_were_sampled_also_of_thoughts_that_are_not_sent():
    with running(answers_only=True) as server:
        usage = complete(server, n=2)["usage"]
        *_, last = streamed(server, stream_options={"include_usage": True})
    count = len(WHOLE) + 1  # and the EOS
    assert usage == {"prompt_tokens": 2, "completion_tokens": 2 * count, "total_tokens": 2 + 2 * count}
    assert last["usage"] == {"prompt_tokens": 2, "completion_tokens": count, "total_tokens": 2 + count}


def test_after_a_break_answers_only_sends_nothing_more_and_the_request_ends_well():
    with running(BROKEN, answers_only=True) as server, channel(server) as opened:
        call = OrchestratorStub(opened).Decode(by_text(QUESTION), timeout=DEADLINE_S)
        assert [sample.text for sample in samples_of(call)] == ["4\n"]
        assert call.code() is grpc.StatusCode.OK
        assert [event["choices"][0]["text"] for event in streamed(server)] == ["4\n", ""]
    with running(BROKEN) as server:
        assert complete(server)["choices"][0]["text"].count("</answer>") == 2


def test_answers_only_refuses_a_prompt_that_is_answered_with_ids():
    says = "token_content is answered with token ids"
    with (
        running(answers_only=True) as server,
        channel(server) as opened,
        refused(grpc.StatusCode.INVALID_ARGUMENT, says),
    ):
        list(OrchestratorStub(opened).Decode(by_tokens([ord(QUESTION)]), timeout=DEADLINE_S))


# --- timed --------------------------------------------------------------------------------------------------


def figures(server: Server, name: str) -> tuple[float, float]:
    """(count, sum of seconds) of a histogram."""
    lines = dict(line.rsplit(" ", 1) for line in get(server, "/metrics")[1].splitlines() if line[0] != "#")
    return float(lines[f"{name}_count"]), float(lines[f"{name}_sum"])


def test_the_seconds_to_the_first_answer_are_counted_once_a_request(is_read):
    with running() as server, channel(server) as opened:
        stub = OrchestratorStub(opened)
        stream = stub.Decode(by_text(QUESTION), timeout=DEADLINE_S)
        wait_until(lambda: figures(server, "areal_jax_first_answer_seconds")[0] == 1, "timed")
        held_s = figures(server, "areal_jax_first_answer_seconds")[1]
        assert figures(server, "areal_jax_first_token_seconds")[1] <= held_s
        is_read.set()
        list(stream)
        list(stub.Decode(by_tokens([ord(QUESTION)]), timeout=DEADLINE_S))  # of ids, which have a text too
        complete(server, n=2)
        assert figures(server, "areal_jax_first_answer_seconds")[0] == 3
        complete(server, max_tokens=7)  # ends with the opening tag of the answer
        list(stub.Decode(by_tokens([SCRIPT.index("2+2")]), timeout=DEADLINE_S))  # the response has no <think>
        assert figures(server, "areal_jax_first_answer_seconds")[0] == 3
        assert figures(server, "areal_jax_first_token_seconds")[0] == 5
