"""Requests before any socket: each wrong value is an error that names it, and no bytes are worse."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from areal_jax.generation.slots import MAX_STOP_TOKENS, Penalties
from areal_jax.serving.openai_bodies import chat_asked, completion_asked
from areal_jax.serving.proto import rollout_pb2 as messages
from areal_jax.serving.requests import (
    RequestError,
    Served,
    decode_ask,
    generate_ask,
    parsed,
)
from areal_jax.serving.services import protocol
from areal_jax.tasks.tokenizers import ByteTokenizer
from areal_jax.types import Sampling
from tests.serving.served import asked

SERVED = Served(
    "tiny",
    ByteTokenizer(),
    length=64,
    max_samples=6,
    sampling=Sampling(temperature=0.7, top_p=0.9, max_tokens=20),
    decode_sampling=Sampling(temperature=0.0, max_tokens=20),
)
TOKENS = messages.TokenIds(ids=[5, 6, 7])


def by_tokens(*ids: int, **fields):
    content = protocol.DecodeRequest.TokenContent(token_ids=ids)
    return protocol.DecodeRequest(token_content=content, **fields)


def by_text(text: str, **fields):
    return protocol.DecodeRequest(text_content=protocol.DecodeRequest.TextContent(text=text), **fields)


def refused(request) -> str:
    ask = decode_ask if isinstance(request, protocol.DecodeRequest) else generate_ask
    with pytest.raises(RequestError) as caught:
        ask(request, SERVED)
    assert caught.value.code == "INVALID_ARGUMENT"
    return str(caught.value)


# --- JetStream's ------------------------------------------------------------------------------------------


def test_tokens_are_taken_as_they_are_and_text_as_the_tokenizer_renders_it():
    """The stock Driver prepends a BOS to both."""
    assert decode_ask(by_tokens(5, 6, 7), SERVED).start.prompt == (5, 6, 7)
    assert decode_ask(by_tokens(256, 5), SERVED).start.prompt == (256, 5)
    assert decode_ask(by_text("hi"), SERVED).start.prompt == (256, 104, 105)


def test_max_tokens_is_honoured_and_the_servers_own_without_one():
    assert decode_ask(by_tokens(5, max_tokens=3), SERVED).start.sampling == Sampling(0.0, max_tokens=3)
    assert decode_ask(by_tokens(5), SERVED).start.sampling == Sampling(0.0, max_tokens=20)


def test_a_prompt_is_never_cut():
    """The stock Driver drops the left of it and leaves `true_length` as it was."""
    assert len(decode_ask(by_tokens(*range(63)), SERVED).start.prompt) == 63
    said = refused(by_tokens(*range(64)))
    assert "maximum context length is 64 tokens" in said and "the prompt has 64 tokens" in said
    assert "the prompt has 5001 tokens" in refused(by_text("a" * 5000))


def test_a_prompt_that_cannot_fit_is_refused_before_it_is_encoded(monkeypatch):
    def encoded(self, text):
        raise AssertionError(f"{len(text)} characters were encoded")

    monkeypatch.setattr(ByteTokenizer, "encode", encoded)
    monkeypatch.setattr(ByteTokenizer, "encode_chat", encoded)
    long = "a" * 10**6
    said = [{"role": "user", "content": long}]
    chat = messages.Chat(messages=[messages.Message(**said[0])])
    assert "at least 1000000 tokens" in refused(by_text(long))
    assert "at least 1000000 tokens" in refused(messages.GenerateRequest(text=long))
    assert "at least 1000018 tokens" in refused(messages.GenerateRequest(chat=chat))
    for check, body in ((chat_asked, {"messages": said}), (completion_asked, {"prompt": long})):
        with pytest.raises(RequestError, match=r"at least 10000\d\d tokens"):
            check(body, SERVED)


@pytest.mark.parametrize(
    "request_, says",
    [
        (by_tokens(5, session_cache="x"), "session_cache='x': this server keeps no sessions"),
        (by_text("a", session_cache="/etc"), "session_cache='/etc'"),
        (by_tokens(), "the prompt is empty"),
        (protocol.DecodeRequest(), "no content; give text_content or token_content"),
        (by_tokens(5, -1), "token_ids has the id -1, and the tokenizer's ids are 0..257"),
        (by_tokens(5, 258), "token_ids has the id 258"),
        (by_tokens(5, 2**31 - 1), "token_ids has the id 2147483647"),
        (by_tokens(5, max_tokens=-4), "max_tokens=-4 is below 1"),
    ],
)
def test_each_wrong_decode_request_is_named(request_, says):
    assert says in refused(request_)


# --- ours -------------------------------------------------------------------------------------------------


def test_what_is_left_out_is_the_servers_own():
    ask = generate_ask(messages.GenerateRequest(tokens=TOKENS), SERVED)
    assert ask == asked((5, 6, 7), SERVED.sampling)


def test_what_is_given_is_taken():
    request = messages.GenerateRequest(
        model="tiny",
        request_id="a",
        chat=messages.Chat(messages=[messages.Message(role="user", content="hi")]),
        temperature=0,
        top_k=5,
        top_p=0.5,
        min_p=0.25,
        max_tokens=7,
        stop=["\n", "END"],
        stop_tokens=[9, 8, 9, 257],
        n=3,
        seed=0,
        repetition_penalty=1.5,
        presence_penalty=-0.5,
        logit_bias={4: 2.0},
        min_version=2,
    )
    assert generate_ask(request, SERVED) == asked(
        prompt=(256, *b"user: hi\nassistant: "),
        sampling=Sampling(0.0, 5, 0.5, 0.25, 7, ("\n", "END")),
        penalties=Penalties(1.5, -0.5, {4: 2.0}),
        stop_tokens=(8, 9),
        n=3,
        seed=0,
        min_version=2,
        request_id="a",
    )


@pytest.mark.parametrize(
    ("fields", "taken"),
    [
        ({"temperature": 1e-6}, Sampling(0.0, 0, 0.9, 0.0, 20)),
        ({"temperature": 1e-45}, Sampling(0.0, 0, 0.9, 0.0, 20)),
        ({"temperature": 0.5, "top_k": -1}, Sampling(0.5, 0, 0.9, 0.0, 20)),
    ],
)
def test_what_other_servers_take_as_greedy_or_off_is_so_here(fields, taken):
    assert generate_ask(messages.GenerateRequest(tokens=TOKENS, **fields), SERVED).start.sampling == taken


def test_penalties_that_change_nothing_are_none():
    request = messages.GenerateRequest(tokens=TOKENS, repetition_penalty=1, presence_penalty=0)
    assert generate_ask(request, SERVED).start.penalties is None


@pytest.mark.parametrize(
    "fields, says",
    [
        ({"model": "llama"}, "model='llama' is not served here; give 'tiny'"),
        ({"request_id": "a" * 257}, "request_id has 257 characters"),
        ({"temperature": math.nan}, "temperature=nan"),
        ({"temperature": -0.5}, "temperature=-0.5"),
        ({"temperature": math.inf}, "temperature=inf"),
        ({"temperature": 100.5}, "temperature=100.5 is out of range; give 0 (greedy) to 100"),
        ({"top_k": -2}, "top_k=-2 is below 0"),
        ({"top_p": 0}, "top_p=0 is out of range; give more than 0"),
        ({"top_p": 1.5}, "top_p=1.5"),
        ({"top_p": math.nan}, "top_p=nan"),
        ({"min_p": 1}, "min_p=1 is out of range"),
        ({"min_p": -0.5}, "min_p=-0.5"),
        ({"min_p": math.nan}, "min_p=nan"),
        ({"max_tokens": 0}, "max_tokens=0 is below 1"),
        ({"max_tokens": -3}, "max_tokens=-3"),
        ({"stop": ["a"] * 17}, "17 stop texts are too many; give at most 16"),
        ({"stop": [""]}, "the stop text '' has 0 characters"),
        ({"stop": ["b" * 257]}, "has 257 characters; give 1 to 256"),
        (
            {"stop_tokens": range(1, MAX_STOP_TOKENS + 1)},
            "stop_tokens besides the end tokens are too many; give at most",
        ),
        ({"stop_tokens": [-1]}, "stop_tokens has the id -1"),
        ({"n": 0}, "n=0 completions are out of range; give 1 to 6"),
        ({"n": 7}, "n=7"),
        ({"repetition_penalty": 0}, "repetition_penalty=0 is out of range; give 0.001 to 1000"),
        ({"repetition_penalty": 1e-38}, "repetition_penalty=1e-38"),
        ({"repetition_penalty": 1e38}, "repetition_penalty=1e+38"),
        ({"repetition_penalty": math.nan}, "repetition_penalty=nan"),
        ({"presence_penalty": math.inf}, "presence_penalty=inf"),
        ({"logit_bias": {258: 1.0}}, "logit_bias has the id 258"),
        ({"logit_bias": {3: math.nan}}, "logit_bias[3]=nan"),
        ({"logit_bias": {3: 101}}, "logit_bias[3]=101 is out of range; give -100 to 100"),
        ({"min_version": -1}, "min_version=-1 is below 0"),
        ({"chat": messages.Chat()}, "chat has no messages"),
        ({"chat": messages.Chat(messages=[messages.Message(content="x" * 99)])}, "the prompt has 1"),
        ({"text": "a" * 70}, "the prompt has 71 tokens"),
        ({"tokens": messages.TokenIds()}, "the prompt is empty"),
        ({"tokens": messages.TokenIds(ids=[300])}, "tokens has the id 300"),
    ],
)
def test_each_wrong_generate_request_is_named(fields, says):
    prompt = {} if {"chat", "text", "tokens"} & fields.keys() else {"tokens": TOKENS}
    assert says in refused(messages.GenerateRequest(**prompt, **fields))


def test_a_request_without_a_prompt_says_what_it_may_be():
    assert "no prompt; give text, tokens or chat" in refused(messages.GenerateRequest())


def test_more_biases_than_a_server_takes_are_refused(monkeypatch):
    monkeypatch.setattr("areal_jax.serving.requests.MAX_BIASES", 2)
    request = messages.GenerateRequest(tokens=TOKENS, logit_bias={1: 1, 2: 1, 3: 1})
    assert "logit_bias has 3 ids; give at most 2" in refused(request)


# --- bytes ------------------------------------------------------------------------------------------------

KINDS = [protocol.DecodeRequest, messages.GenerateRequest]
WELL_FORMED = [
    by_tokens(5, 6, max_tokens=3).SerializeToString(),
    by_text("hello", priority=7).SerializeToString(),
    messages.GenerateRequest(tokens=TOKENS, temperature=0.5, stop=["a"], n=2).SerializeToString(),
]


@st.composite
def damaged(draw) -> bytes:
    """A message that was sound, cut, spliced or with bytes replaced."""
    data = bytearray(draw(st.sampled_from(WELL_FORMED)))
    for _ in range(draw(st.integers(0, 4))):
        place = draw(st.integers(0, len(data)))
        data[place : place + draw(st.integers(0, 3))] = draw(st.binary(max_size=3))
    return bytes(data)


@settings(max_examples=300)
@given(st.one_of(st.binary(max_size=64), damaged()), st.sampled_from(KINDS))
def test_any_bytes_are_a_request_the_host_can_serve_or_an_error_of_the_request(data, kind):
    try:
        request = parsed(kind, data)
        ask = (decode_ask if kind is protocol.DecodeRequest else generate_ask)(request, SERVED)
    except RequestError as error:
        assert error.code == "INVALID_ARGUMENT" and str(error)
        return
    assert 1 <= len(ask.start.prompt) < SERVED.length
    assert all(0 <= token < 258 for token in (*ask.start.prompt, *ask.start.stop_tokens))
    assert 1 <= ask.n <= SERVED.max_samples
    sampling = ask.start.sampling
    assert sampling is not None and sampling.max_tokens >= 1
    assert sampling.temperature == 0 or 0.001 <= sampling.temperature <= 100
    assert 0 < sampling.top_p <= 1 and 0 <= sampling.min_p < 1 and sampling.top_k >= 0
    assert ask.start.seed is None or -(2**63) <= ask.start.seed < 2**63


def test_bytes_that_are_no_message_are_named():
    with pytest.raises(RequestError, match=r"3 bytes are not a jetstream_proto.DecodeRequest .*\.proto"):
        parsed(protocol.DecodeRequest, b"\xff\xff\xff")
