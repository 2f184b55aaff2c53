"""Bodies of chats and completions before any socket: each wrong field is named, and no body is worse."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from areal_jax.serving.openai_bodies import Asked, chat_asked, completion_asked
from areal_jax.serving.requests import RequestError, Served, json_of
from areal_jax.tasks.tokenizers import ByteTokenizer, Tokenizer
from areal_jax.types import Sampling
from tests.episodes.chat_templates import TEMPLATES, tokenizer_of

CHAT = [{"role": "user", "content": "hi"}]
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}


def served(tokenizer: Tokenizer) -> Served:
    sampling = Sampling(max_tokens=20)
    return Served("tiny", tokenizer, length=4000, max_samples=6, sampling=sampling, decode_sampling=sampling)


BYTES = served(ByteTokenizer())


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> Served:
    return served(tokenizer_of(tmp_path_factory.mktemp("qwen"), "qwen"))


@pytest.fixture(scope="module")
def families(tmp_path_factory: pytest.TempPathFactory) -> list[Served]:
    folder = tmp_path_factory.mktemp("families")
    return [BYTES, *(served(tokenizer_of(folder / family, family)) for family in TEMPLATES)]


def asked(body: Any, of: Served = BYTES) -> Asked:
    check = completion_asked if "prompt" in body else chat_asked
    return check(json_of(json.dumps(body).encode()), of)


def refusal(body: Any, of: Served = BYTES) -> RequestError:
    with pytest.raises(RequestError) as refused:
        asked(body, of)
    assert refused.value.code == "INVALID_ARGUMENT"
    return refused.value


@pytest.mark.parametrize(
    ("fields", "param", "said"),
    [
        ({"stop": 5}, "stop", "valid list, but is 5"),
        ({"stop": ["a", 5]}, "stop.1", "but is 5"),
        ({"stop": {"a": 1}}, "stop", "but is {'a': 1}"),
        ({"stop": ""}, "stop.0", "at least 1 character"),
        ({"stream": "never"}, "stream", "but is 'never'"),
        ({"stream_options": 5}, "stream_options", "but is 5"),
        ({"stream_options": {"include_usage": []}}, "stream_options.include_usage", "but is []"),
        ({"temperature": "hot"}, "temperature", "but is 'hot'"),
        ({"n": 1.5}, "n", "but is 1.5"),
        ({"n": 2**31}, "n", "but is 2147483648"),
        ({"max_tokens": 2**31}, "max_tokens", "but is 2147483648"),
        ({"max_tokens": []}, "max_tokens", "but is []"),
        ({"max_completion_tokens": "x"}, "max_completion_tokens", "but is 'x'"),
        ({"stop_token_ids": [2**31]}, "stop_token_ids.0", "but is 2147483648"),
        ({"stop_token_ids": "1"}, "stop_token_ids", "but is '1'"),
        ({"logit_bias": {"x": 1}}, "logit_bias.x.[key]", "but is 'x'"),
        ({"logit_bias": {"4294967296": 1}}, "logit_bias.4294967296.[key]", "but is '4294967296'"),
        ({"logit_bias": {"5": "x"}}, "logit_bias.5", "but is 'x'"),
        ({"logprobs": 5}, "logprobs", "but is 5"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", "top_logprobs=21 is not supported"),
        ({"top_logprobs": "x"}, "top_logprobs", "top_logprobs='x' is not supported"),
        ({"response_format": {"type": "json_schema"}}, "response_format", "is not supported; leave it out"),
        ({"response_format": 5}, "response_format", "response_format=5 is not supported"),
        ({"parallel_tool_calls": False}, "parallel_tool_calls", "is not supported"),
        ({"ignore_eos": True}, "ignore_eos", "is not supported"),
        ({"modalities": ["audio"]}, "modalities", "is not supported"),
        ({"reasoning_effort": "low"}, "reasoning_effort", "Extra inputs are not permitted"),
        ({"tools": 5}, "tools", "but is 5"),
        ({"tools": [5]}, "tools.0", "but is 5"),
        ({"tools": [{"type": "function"}]}, "tools.0.function", "Field required"),
        ({"tools": [{"type": "web_search", "function": {"name": "f"}}]}, "tools.0.type", "'web_search'"),
        ({"tools": [{"function": {"name": 5}}]}, "tools.0.function.name", "but is 5"),
        ({"tools": [{"function": {"name": "f", "parameters": 5}}]}, "tools.0.function.parameters", "is 5"),
        ({"tools": [TOOL], "tool_choice": 5}, "tool_choice", "tool_choice=5: a model cannot be made"),
        ({"tool_choice": {"type": "function"}}, "tool_choice", "give auto or none"),
        ({"messages": 5}, "messages", "but is 5"),
        ({"messages": [5]}, "messages.0", "but is 5"),
        ({"messages": []}, "messages", "give at least one message"),
        ({"messages": None}, "messages", "Field required"),
        ({"chat_template_kwargs": 5}, "chat_template_kwargs", "but is 5"),
        ({"model": 5}, "model", "but is 5"),
        ({"messages": [*CHAT, {"role": "assistant", "content": "x", "tool_calls": 5}]}, None, "tool_calls=5"),
        ({"messages": [{"role": "user", "content": [{"type": "file", "text": ""}]}]}, None, "type 'file'"),
    ],
)
def test_wrong_fields_of_a_chat_are_named(fields, param, said):
    error = refusal({"messages": CHAT, **fields})
    assert error.param == param and said in str(error)
    assert param is None or str(error).startswith(param)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"prompt": 5}, "prompt=5: give a text, or a list of token ids"),
        ({"prompt": {}}, "prompt={}: give"),
        ({"prompt": [1, "a"]}, "prompt=[1, 'a']: give"),
        ({"prompt": [True]}, "prompt=[True]: give"),
        ({"prompt": ["a", 1]}, "prompt has 2 prompts"),
        ({"prompt": [[1.5]]}, "prompt=[1.5]: give"),
        ({"prompt": [2**70]}, "prompt has the id 1180591620717411303424"),
        ({"prompt": []}, "the prompt is empty"),
        ({"prompt": [[]]}, "the prompt is empty"),
        ({"prompt": "x", "logprobs": 1}, "logprobs=1 is not supported, "),
        ({"prompt": "x", "logprobs": -1}, "logprobs=-1 is not supported, "),
        ({"prompt": "x", "echo": True}, "echo=True is not supported"),
        ({"prompt": "x", "suffix": "b"}, "suffix='b' is not supported"),
        ({"prompt": "x", "best_of": 2}, "best_of=2 is not supported"),
        ({"prompt": "x", "max_tokens": 0}, "max_tokens=0 is below 1"),
        ({"prompt": "x", "max_tokens": -1}, "max_tokens=-1 is below 1"),
        ({"prompt": "x", "top_k": -2}, "top_k=-2 is below 0"),
    ],
)
def test_wrong_fields_of_a_completion_are_named(fields, said):
    assert said in str(refusal(fields))


def test_tools_are_rendered_as_they_were_sent(qwen):
    """A template writes their JSON: in another order, the model would read other tokens."""
    tool = {"function": {"strict": True, "parameters": {"b": 1, "a": 2}, "name": "f"}, "type": "function"}
    prompt = asked({"messages": CHAT, "tools": [tool]}, qwen).ask.start.prompt
    assert json.dumps(tool) in qwen.tokenizer.decode(prompt)
    assert asked({"messages": CHAT, "tools": [tool]}, qwen).notation == "hermes"
    assert asked({"messages": CHAT, "tools": []}, qwen).notation == "none"


@pytest.mark.parametrize(
    ("seed", "bits"),
    [
        (0, 0),
        (2**31, 2**31),
        (2**32, 2**32),
        (2**63 - 1, 2**63 - 1),
        (2**63, -(2**63)),
        (2**64 - 1, -1),
        (-1, -1),
        (-(2**63), -(2**63)),
        (None, None),
    ],
)
def test_a_seed_has_64_bits_with_or_without_a_sign(seed, bits):
    assert asked({"prompt": "x", "seed": seed}).ask.start.seed == bits


@pytest.mark.parametrize("seed", [2**64, -(2**63) - 1, 10**30, 1.5, "x"])
def test_another_seed_is_refused_with_its_value(seed):
    error = refusal({"prompt": "x", "seed": seed})
    assert error.param == "seed" and f"but is {seed!r}" in str(error)


@pytest.mark.parametrize(
    "body",
    [
        b'{"model": "\\ud83d", "messages": [{"role": "user", "content": "hi"}]}',
        b'{"messages": [{"role": "user", "content": "a \\uDC00"}]}',
        b'{"messages": [{"role": "user", "content": "hi"}], "stop": "\\udfff\\ud83d"}',
        b'{"\\ud800": 1, "messages": []}',
        b'{"model": "\xed\xa0\xbd"}',
    ],
)
def test_a_lone_surrogate_is_named(body):
    with pytest.raises(RequestError, match=r"has the lone surrogate '\\ud\w{3}', half of a character"):
        json_of(body)
    whole = json_of(b'{"a": "\\ud83e\\udd9c \\\\ud83d"}')
    assert whole == {"a": "\N{PARROT} \\ud83d"}, "a pair, and a backslash before plain text"


# --- drawn --------------------------------------------------------------------------------------------------

# fmt: off
FIELDS = (
    "model", "temperature", "top_p", "top_k", "min_p", "n", "seed", "max_tokens", "stop", "stop_token_ids",
    "presence_penalty", "repetition_penalty", "logit_bias", "logprobs", "top_logprobs", "stream",
    "stream_options", "return_token_ids", "min_version", "request_id", "tools", "tool_choice",
    "max_completion_tokens", "chat_template_kwargs", "response_format", "best_of", "echo", "user", "zzz",
)
OF_MESSAGES = ("tool_calls", "tool_call_id", "name", "reasoning_content", "function_call", "audio", "refusal")
WORDS = (
    "role", "content", "user", "assistant", "tool", "system", "type", "text", "name", "function", "arguments",
    "id", "tool_calls", "tool_call_id", "parameters", "image_url", "audio", "{}", "null", "5", "<think>", "f",
)
# fmt: on

scalar = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 3),
    st.sampled_from([2**31, 2**32, -(2**31) - 1, 2**63, 2**64, 10**30, 1e38, 1e-40, -0.0, 1e308]),
    st.floats(allow_nan=False, allow_infinity=False),
    st.sampled_from(WORDS),
    st.text(max_size=5),
)
value = st.recursive(
    scalar,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(WORDS), inner, max_size=4),
    max_leaves=8,
)
message = st.fixed_dictionaries(
    {"role": st.sampled_from(["user", "assistant", "tool", "system"]), "content": st.just("x") | value},
    optional=dict.fromkeys(OF_MESSAGES, value),
)
chat = st.fixed_dictionaries(
    {"messages": st.lists(message, max_size=3) | value}, optional=dict.fromkeys(FIELDS, value)
)
completion = st.fixed_dictionaries({"prompt": value}, optional=dict.fromkeys(FIELDS, value))
sound = {"role": "assistant", "content": "x"}
one_wrong = st.one_of(
    st.builds(lambda name, one: {"messages": CHAT, name: one}, st.sampled_from(FIELDS), value),
    st.builds(lambda name, one: {"prompt": "x", name: one}, st.sampled_from(FIELDS), value),
    st.builds(lambda tool: {"messages": CHAT, "tools": [tool]}, value),
    st.builds(lambda name, one: {"messages": [sound | {name: one}]}, st.sampled_from(OF_MESSAGES), value),
    st.builds(lambda one: {"messages": [sound | {"tool_calls": one}]}, value),
)


@settings(max_examples=200)
@given(st.one_of(one_wrong, chat, completion), st.integers(0, len(TEMPLATES)))
def test_any_body_is_a_request_that_the_host_can_serve_or_an_error_of_the_request(families, body, place):
    of = families[place]
    try:
        found = asked(body, of)
    except RequestError as error:
        assert error.code in ("INVALID_ARGUMENT", "NOT_FOUND") and str(error)
        assert json.dumps(str(error)).isascii()
        return
    start = found.ask.start
    assert 1 <= len(start.prompt) < of.length and 1 <= found.ask.n <= of.max_samples
    assert start.seed is None or -(2**63) <= start.seed < 2**63
    assert all(0 <= token < of.tokenizer.vocab_size for token in (*start.prompt, *start.stop_tokens))
    sampling = start.sampling
    assert sampling is not None and sampling.max_tokens >= 1 and all(found.stops)
    assert sampling.temperature == 0 or 0.001 <= sampling.temperature <= 100
    assert 0 < sampling.top_p <= 1 and 0 <= sampling.min_p < 1 and sampling.top_k >= 0
