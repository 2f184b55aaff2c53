"""Requests before any socket: each wrong value is an error that names it, and no bytes are worse."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from areal_jax.generation.slots import MAX_STOP_TOKENS, Penalties
from areal_jax.serving.jetstream_service import decode_ask, parsed, protocol
from areal_jax.serving.openai_bodies import chat_asked, completion_asked
from areal_jax.serving.requests import Ask, RequestError, Served
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
TOKENS = [5, 6, 7]


def by_tokens(*ids: int, **fields):
    content = protocol.DecodeRequest.TokenContent(token_ids=ids)
    return protocol.DecodeRequest(token_content=content, **fields)


def by_text(text: str, **fields):
    return protocol.DecodeRequest(text_content=protocol.DecodeRequest.TextContent(text=text), **fields)


def completion(**fields: Any) -> Ask:
    return completion_asked({"prompt": TOKENS} | fields, SERVED).ask


def refusal(ask: Callable[[], Any], code: str = "INVALID_ARGUMENT") -> str:
    with pytest.raises(RequestError) as caught:
        ask()
    assert caught.value.code == code
    return str(caught.value)


def refused(request: Any) -> str:
    return refusal(lambda: decode_ask(request, SERVED))


# --- JetStream's ------------------------------------------------------------------------------------------


def test_tokens_are_taken_as_they_are_and_text_as_the_tokenizer_renders_it():
    """The stock Driver prepends a BOS to both."""
    assert decode_ask(by_tokens(5, 6, 7), SERVED).start.prompt == (5, 6, 7)
    assert decode_ask(by_tokens(256, 5), SERVED).start.prompt == (256, 5)
    assert decode_ask(by_text("hi"), SERVED).start.prompt == (256, 104, 105)


def test_max_tokens_is_honoured_and_the_servers_own_without_one():
    assert decode_ask(by_tokens(5, max_tokens=3), SERVED).start.sampling == Sampling(0.0, max_tokens=3)
    assert decode_ask(by_tokens(5), SERVED).start.sampling == Sampling(0.0, max_tokens=20)
    assert decode_ask(by_tokens(5, priority=3), SERVED) == decode_ask(by_tokens(5), SERVED)


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
    assert "at least 1000000 tokens" in refused(by_text(long))
    assert "at least 1000000 tokens" in refusal(lambda: completion(prompt=long))
    assert "at least 1000018 tokens" in refusal(lambda: chat_asked({"messages": said}, SERVED))


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


# --- HTTP's -----------------------------------------------------------------------------------------------


def test_what_is_left_out_is_the_servers_own():
    assert completion() == asked((5, 6, 7), SERVED.sampling)


def test_what_is_given_is_taken():
    body = {
        "model": "tiny",
        "request_id": "a",
        "messages": [{"role": "user", "content": "hi"}],
        "temperature": 0,
        "top_k": 5,
        "top_p": 0.5,
        "min_p": 0.25,
        "max_tokens": 7,
        "stop": ["\n", "END"],
        "stop_token_ids": [9, 8, 9, 257],
        "n": 3,
        "seed": 0,
        "repetition_penalty": 1.5,
        "presence_penalty": -0.5,
        "logit_bias": {"4": 2.0},
        "min_version": 2,
    }
    assert chat_asked(body, SERVED).ask == asked(
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
    assert completion(**fields).start.sampling == taken


def test_numbers_are_those_of_float32_in_which_the_engine_computes():
    ask = completion(temperature=0.1, top_p=1 - 1e-12, presence_penalty=0.1)
    tenth = 13421773 / 2**27
    assert ask.start.sampling == Sampling(tenth, 0, 1.0, 0.0, 20)
    assert ask.start.penalties == Penalties(presence=tenth)
    assert "top_p=0 is out of range" in refusal(lambda: completion(top_p=1e-60))


def test_penalties_that_change_nothing_are_none():
    assert completion(repetition_penalty=1, presence_penalty=0).start.penalties is None


@pytest.mark.parametrize(
    "fields, says",
    [
        ({"request_id": "a" * 257}, "request_id: String should have at most 256 characters"),
        ({"temperature": math.nan}, "temperature=nan"),
        ({"temperature": -0.5}, "temperature=-0.5"),
        ({"temperature": math.inf}, "temperature=inf"),
        ({"temperature": 1e300}, "temperature=inf"),
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
        ({"stop": [""]}, "stop.0: String should have at least 1 character, but is ''"),
        ({"stop": ["b" * 257]}, "has 257 characters; give 1 to 256"),
        (
            {"stop_token_ids": list(range(1, MAX_STOP_TOKENS + 1))},
            "stop_token_ids besides the end tokens are too many; give at most",
        ),
        ({"stop_token_ids": [-1]}, "stop_token_ids has the id -1"),
        ({"n": 0}, "n=0 completions are out of range; give 1 to 6"),
        ({"n": 7}, "n=7"),
        ({"repetition_penalty": 0}, "repetition_penalty=0 is out of range; give 0.001 to 1000"),
        ({"repetition_penalty": 1e-38}, "repetition_penalty=1e-38"),
        ({"repetition_penalty": 1e38}, "repetition_penalty=1e+38"),
        ({"repetition_penalty": math.nan}, "repetition_penalty=nan"),
        ({"presence_penalty": math.inf}, "presence_penalty=inf"),
        ({"logit_bias": {"258": 1.0}}, "logit_bias has the id 258"),
        ({"logit_bias": {"3": math.nan}}, "logit_bias[3]=nan"),
        ({"logit_bias": {"3": 101}}, "logit_bias[3]=101 is out of range; give -100 to 100"),
        ({"min_version": -1}, "min_version=-1 is below 0"),
        ({"prompt": "a" * 70}, "the prompt has 71 tokens"),
        ({"prompt": []}, "the prompt is empty"),
        ({"prompt": [300]}, "prompt has the id 300"),
    ],
)
def test_each_wrong_field_is_named(fields, says):
    assert says in refusal(lambda: completion(**fields))


def test_an_unknown_model_and_a_chat_without_room_or_messages_are_named():
    said = refusal(lambda: completion(model="llama"), "NOT_FOUND")
    assert said == "model='llama' is not served here; give 'tiny'"
    assert "messages is empty" in refusal(lambda: chat_asked({"messages": []}, SERVED))
    long = {"messages": [{"role": "user", "content": "x" * 99}]}
    assert "the prompt has 1" in refusal(lambda: chat_asked(long, SERVED))


def test_a_request_without_a_prompt_says_so():
    assert "prompt: Field required" in refusal(lambda: completion_asked({}, SERVED))
    assert "messages: Field required" in refusal(lambda: chat_asked({}, SERVED))


def test_more_biases_than_a_server_takes_are_refused(monkeypatch):
    monkeypatch.setattr("areal_jax.serving.openai_bodies.MAX_BIASES", 2)
    said = refusal(lambda: completion(logit_bias={"1": 1, "2": 1, "3": 1}))
    assert "logit_bias has 3 ids; give at most 2" in said


# --- bytes ------------------------------------------------------------------------------------------------

WELL_FORMED = [
    by_tokens(5, 6, max_tokens=3).SerializeToString(),
    by_text("hello", priority=7).SerializeToString(),
]


@st.composite
def damaged(draw) -> bytes:
    """A message that was sound, cut, spliced or with bytes replaced."""
    data = bytearray(draw(st.sampled_from(WELL_FORMED)))
    for _ in range(draw(st.integers(0, 4))):
        place = draw(st.integers(0, len(data)))
        data[place : place + draw(st.integers(0, 3))] = draw(st.binary(max_size=3))
    return bytes(data)


@settings(max_examples=200)
@given(st.one_of(st.binary(max_size=64), damaged()))
def test_any_bytes_are_a_request_the_host_can_serve_or_an_error_of_the_request(data):
    try:
        ask = decode_ask(parsed(protocol.DecodeRequest, data), SERVED)
    except RequestError as error:
        assert error.code == "INVALID_ARGUMENT" and str(error)
        return
    assert 1 <= len(ask.start.prompt) < SERVED.length
    assert all(0 <= token < 258 for token in ask.start.prompt)
    assert ask.n == 1
    assert ask.start.sampling is not None and ask.start.sampling.max_tokens >= 1


def test_bytes_that_are_no_message_are_named():
    with pytest.raises(RequestError, match=r"3 bytes are not a jetstream_proto.DecodeRequest .*\.proto"):
        parsed(protocol.DecodeRequest, b"\xff\xff\xff")
