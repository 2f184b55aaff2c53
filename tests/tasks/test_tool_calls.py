"""Tool calls in sampled text, in both notations, and messages in OpenAI's form."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.responses import JSONResponse

from areal_jax.tasks.chat_messages import canonical, checked, same_answer
from areal_jax.tasks.errors import TaskError
from areal_jax.tasks.plain_json import MOST_LEVELS, is_plain, loads, readable
from areal_jax.tasks.tool_calls import AnswerParts, ToolCall, is_in_thought, message_of, parsed_answer
from tests.tasks.rubbish import RUBBISH, drawn

ADD = '{"name": "add", "arguments": {"a": 1, "b": [2.5, "x"]}}'
CALL = ToolCall("add", {"a": 1, "b": [2.5, "x"]})


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("7", AnswerParts("7", "", (), 0)),
        (f"<tool_call>\n{ADD}\n</tool_call>", AnswerParts("", "", (CALL,), 0)),
        (f"Well.\n<tool_call>{ADD}</tool_call>\n<tool_call>{ADD}", AnswerParts("Well.", "", (CALL, CALL), 0)),
        (f"<think>\nhm\n</think>\n\n<tool_call>{ADD}</tool_call>", AnswerParts("", "hm", (CALL,), 0)),
        ("<think>hm", AnswerParts("", "hm", (), 0)),
        ("hm</think>\n\n7\n", AnswerParts("hm</think>\n\n7\n", "", (), 0)),
        ("<tool_call>add(1)</tool_call>", AnswerParts("<tool_call>add(1)</tool_call>", "", (), 1)),
        (f"<tool_call>{ADD[:-3]}", AnswerParts(f"<tool_call>{ADD[:-3]}", "", (), 1)),
    ],
)
def test_hermes(text: str, wanted: AnswerParts):
    assert parsed_answer(text, "hermes") == wanted


def in_tags(*texts: str) -> str:
    return "".join(f"<tool_call>\n{text}\n</tool_call>\n" for text in texts)


@pytest.mark.parametrize(
    ("text", "arguments"),
    [
        ('{"name": "f", "arguments": {"text": "a </tool_call> b"}}', {"text": "a </tool_call> b"}),
        ('{"name": "f", "arguments": {"text": "<tool_call>"}}', {"text": "<tool_call>"}),
        ('{"name": "f"}', {}),
        ('{"name": "f", "arguments": null}', {}),
        ('{"name": "f", "arguments": ""}', {}),
        ('{"name": "f", "arguments": " {\\"a\\": 1} "}', {"a": 1}),
        ('{"name": "f", "parameters": {"a": 1}}', {"a": 1}),
        ('{"name": "f", "arguments": {"code": "a\nb\tc"}}', {"code": "a\nb\tc"}),
        ('{"name": "f", "arguments": {"x": "\\ud83d\\ude00"}}', {"x": "\N{GRINNING FACE}"}),
    ],
)
def test_calls_as_models_write_them(text: str, arguments: dict):
    call = ToolCall("f", arguments)
    assert parsed_answer(in_tags(text, ADD), "hermes") == AnswerParts("", "", (call, CALL), 0)
    assert parsed_answer(f"<tool_call>{text}<tool_call>{ADD}", "hermes") == AnswerParts(
        "", "", (call, CALL), 0
    )
    if "arguments" in text or "parameters" in text:
        assert parsed_answer(text, "llama") == AnswerParts("", "", (call,), 0)
    (sent,) = message_of(AnswerParts("", "", (call,), 0), ["id"])["tool_calls"]
    assert json.loads(sent["function"]["arguments"].encode()) == arguments


@pytest.mark.parametrize(
    "text",
    [
        "now()",
        '{"name": "f", "arguments": {"x": NaN}}',
        '{"name": "f", "arguments": {"x": -Infinity}}',
        '{"name": "f", "arguments": {"x": 1e400}}',
        '{"name": "f", "arguments": {"x": 1' + "0" * 5000 + "}}",
        '{"name": "f", "arguments": {"x": ' + "[" * 100_000 + "}}",
        '{"name": "f", "arguments": {"x": "\\ud83d", "\\ude00": 1}}',
        '{"name": "f", "arguments": "a"}',
        '{"name": "f", "arguments": [1]}',
        '{"name": "f", "arguments": {}}}',
        '{"name": 1, "arguments": {}}',
        '["f"]',
    ],
)
def test_a_broken_call_is_shown_as_text_and_the_others_count(text: str):
    broken = f"<tool_call>\n{text}\n</tool_call>"
    assert parsed_answer(broken, "hermes") == AnswerParts(broken, "", (), 1)
    assert parsed_answer(f"{broken}\n{in_tags(ADD)}", "hermes") == AnswerParts(broken, "", (CALL,), 1)
    assert parsed_answer(text, "llama").calls == ()


def test_an_object_with_a_name_alone_is_a_call_only_in_tags():
    assert parsed_answer('{"name": "Ada"}', "llama") == AnswerParts('{"name": "Ada"}', "", (), 1)


def test_a_prompt_may_end_inside_a_thought():
    assert is_in_thought("assistant\n<think>\n") and not is_in_thought("<think>\n\n</think>\n\n")
    assert parsed_answer("hm</think>\n\n7\n", "hermes", True) == AnswerParts("7\n", "hm", (), 0)


LLAMA = ADD.replace("arguments", "parameters")


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        (LLAMA, AnswerParts("", "", (CALL,), 0)),
        (f"<|python_tag|>{LLAMA}; {LLAMA}\n", AnswerParts("", "", (CALL, CALL), 0)),
        (f"I add: {LLAMA}", AnswerParts(f"I add: {LLAMA}", "", (), 0)),
        (LLAMA[:-2], AnswerParts(LLAMA[:-2], "", (), 1)),
        ("[1, 2]", AnswerParts("[1, 2]", "", (), 0)),
        ("7", AnswerParts("7", "", (), 0)),
    ],
)
def test_llama(text: str, wanted: AnswerParts):
    assert parsed_answer(text, "llama") == wanted


PARTS = [*'{}[]":,;<>/a1 \n', "<tool_call>", "</tool_call>", "<think>", "</think>"]


@given(st.lists(st.sampled_from(PARTS)).map("".join))
def test_no_text_is_an_error_and_what_is_no_call_stays_in_the_content(text: str):
    for notation in ("hermes", "llama", "none"):
        found = parsed_answer(text, notation)
        if not found.calls and not text.lstrip().startswith("<think>"):
            assert found.content == text


def test_deeply_nested_json_is_no_call():
    for notation in ("hermes", "llama"):
        text = "[" * 100_000
        assert parsed_answer(f"<tool_call>{text}</tool_call>", notation).calls == ()
        assert parsed_answer(text, notation).calls == ()


def test_an_answer_is_a_message():
    message = message_of(AnswerParts("", "hm", (CALL,), 0), ["call_1"])
    assert message["content"] is None and message["reasoning_content"] == "hm"
    (call,) = message["tool_calls"]
    assert (call["id"], call["type"], call["function"]["name"]) == ("call_1", "function", "add")
    assert json.loads(call["function"]["arguments"]) == CALL.arguments
    assert message_of(AnswerParts("", "", (), 0), []) == {"role": "assistant", "content": ""}


def calling(arguments: object, **fields: object) -> dict:
    function = {"name": "add", "arguments": arguments}
    call = {"id": "a", "type": "function", "function": function}
    return {"role": "assistant", "content": None, "tool_calls": [call]} | fields


def test_messages_of_equal_meaning_are_equal():
    one = calling('{"a": 1.0, "b": "\\u00e9", "c": {"x": null}}')
    for other in (
        calling({"c": {"x": None}, "b": "é", "a": 1}),
        calling('{"b":"é","c":{"x":null},"a":1}', content="", refusal=None, annotations=[]),
        calling('{"a": 1, "b": "é", "c": {"x": null}}', content=[]),
    ):
        assert canonical(one) == canonical(other) and same_answer(other, one)
    assert canonical({"role": "user", "content": "ab"}) == canonical(
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}
    )


def test_what_clients_change_in_an_answer_leaves_it_the_same():
    said = {"role": "assistant", "content": "Yes.\n", "reasoning_content": "why\n"}
    for other in (
        said
        | {"provider_specific_fields": {"refusal": None}, "id": "msg_1", "type": "message", "name": "me"},
        {"role": "assistant", "content": "Yes.", "reasoning": "why"},
        {"role": "assistant", "content": "\nYes."},
        said | {"function_call": None, "reasoning_content": None},
    ):
        assert same_answer(other, said)
    for other in (
        said | {"content": "Yes"},
        said | {"content": "Y es."},
        said | {"reasoning_content": "because"},
        said | {"reasoning_content": None, "reasoning": "because"},
        said | {"role": "user"},
        calling("{}"),
    ):
        assert not same_answer(other, said)
    assert not same_answer(calling("{}") | {"tool_calls": [{"function": {"name": "other"}}]}, calling("{}"))


def test_messages_of_other_meaning_are_not():
    one = calling('{"a": 1}')
    others = [
        calling('{"a": true}'),
        calling('{"a": "1"}'),
        calling('{"a": 1, "b": null}'),
        calling('{"a": 1'),
        calling('{"a": 1}', content="x"),
        calling('{"a": 1}', name="me"),
        one | {"role": "user"},
    ]
    renamed = calling('{"a": 1}')
    renamed["tool_calls"][0]["id"] = "b"
    for other in (*others, renamed):
        assert canonical(one) != canonical(other)


@pytest.mark.parametrize(
    "message",
    [
        {"role": "user"},
        {"content": "x"},
        {"role": 1, "content": "x"},
        {"role": "user", "content": 5},
        {"role": "user", "content": [{"type": "image_url", "image_url": "x"}]},
        {"role": "assistant", "tool_calls": ["add"]},
        {"role": "assistant", "tool_calls": [{"function": {"arguments": "{}"}}]},
        {"role": "assistant", "content": "x", "tool_calls": 5},
        {"role": "assistant", "content": "x", "tool_calls": {"a": 1}},
        {"role": "assistant", "tool_calls": [{"id": 5, "function": {"name": "f"}}]},
        {"role": "assistant", "tool_calls": [{"type": "custom", "function": {"name": "f"}}]},
        {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": 5}}]},
        {"role": "assistant", "content": "x", "function_call": {"name": "f", "arguments": "{}"}},
        {"role": "assistant", "content": "x", "audio": {"id": "a"}},
        {"role": "tool", "content": "x", "tool_call_id": 5},
        {"role": "user", "content": "x", "name": ["a"]},
        {"role": "assistant", "content": "x", "reasoning_content": {"a": 1}},
    ],
)
def test_malformed_messages_are_named(message: dict):
    with pytest.raises(TaskError, match=r"the message \{.*give "):
        checked([message])


@pytest.mark.parametrize("kind", ["image_url", "input_audio", "file", "video_url", "refusal", 5, None])
def test_a_part_that_is_no_text_is_named_and_never_dropped(kind: Any):
    for part in ({"type": kind, "text": ""}, {"type": kind, "text": "x"}, {"type": kind}):
        with pytest.raises(TaskError, match=rf"has a part of type {kind!r}, .*; give parts of type text"):
            checked([{"role": "user", "content": [{"type": "text", "text": "see"}, part]}])
    both = checked([{"role": "user", "content": [{"type": "text", "text": "a"}, {"text": "b"}]}])
    assert both[0]["content"] == "ab"


NOT_JSON = [
    '{"a": "\\ud800"}', '{"\\udc00": 1}', '{"a": NaN}', '{"a": [1e400]}', '{"a": {"b": -Infinity}}',
    '{"a": ' + "[" * 300 + "]" * 300 + "}", '{"a": ' + "[" * 100_000 + "]" * 100_000 + "}",
    '{"a": ' + "9" * 5000 + "}",
]  # fmt: skip


@pytest.mark.parametrize("given", NOT_JSON, ids=range(len(NOT_JSON)))
def test_a_call_that_is_no_json_to_others_is_text(given: str):
    """A lone surrogate in a call was an error 500, and failed the episode."""
    for text, notation in (
        (f'<tool_call>{{"name": "f", "arguments": {given}}}</tool_call>', "hermes"),
        (f'{{"name": "f", "parameters": {given}}}', "llama"),
    ):
        assert parsed_answer(text, notation) == AnswerParts(text, "", (), 1)


def readable_by_all(text: str) -> None:
    for notation in ("hermes", "llama", "none"):
        answer = parsed_answer(text, notation)
        message = message_of(answer, [f"c{place}" for place in range(len(answer.calls))])
        assert canonical(message) == canonical(message)
        if text == readable(text):
            JSONResponse(message)


@pytest.mark.parametrize("text", RUBBISH, ids=range(len(RUBBISH)))
def test_rubbish_is_an_answer(text: str):
    for form in (
        "{}",
        "<think>{}",
        "<tool_call>{}",
        '<tool_call>{{"name": "f", "arguments": {{"a": {}}}}}',
        '{{"name": {}',
    ):
        readable_by_all(form.format(text))


@given(drawn, st.recursive(st.floats() | st.text(st.characters(codec=None)), st.lists, max_leaves=9))
def test_drawn_text_is_an_answer(text: str, value: Any):
    call = json.dumps({"name": text, "arguments": {"a": value}})
    for each in (text, f"<tool_call>{text}", f"<tool_call>{call}</tool_call>", call):
        readable_by_all(each)


def test_plain_json():
    deep = "[" * MOST_LEVELS + "]" * MOST_LEVELS
    assert is_plain(loads(deep)) and loads('["\\ud83d\\ude00", 1.5, null]') == ["😀", 1.5, None]
    for text in (f"[{deep}]", "NaN", '"\\ud800"', "{", "[" * 100_000):
        with pytest.raises(ValueError):
            loads(text)
    assert readable("a\ud800b😀") == "a\ufffdb😀"
