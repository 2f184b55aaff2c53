"""Tool calls and thoughts in a sampled text: from the model's own notation to an OpenAI message.

Two notations: Hermes, which Qwen uses too, writes a JSON object between <tool_call> and </tool_call>; Llama 3
writes JSON objects as the complete answer. Arguments are named `arguments` or `parameters`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

from areal_jax.tasks.plain_json import is_plain

Notation = Literal["hermes", "llama", "none"]

OPEN, CLOSE = "<think>", "</think>"
CALL, END = "<tool_call>", "</tool_call>"
TAG = "<|python_tag|>"


class ToolCall(NamedTuple):
    name: str
    arguments: Mapping[str, Any]


class AnswerParts(NamedTuple):
    """A sampled text in its parts."""

    content: str
    """The text outside of tool calls and thoughts, as sampled."""
    reasoning: str
    """The text of a first <think> block, which may lack its end; "" if there is none."""
    calls: tuple[ToolCall, ...]
    broken: int
    """Number of passages that begin as a tool call and are none; they stay in `content`."""


def notation_of(template: str) -> Notation:
    """Returns the notation that a chat template teaches its model."""
    if CALL in template:
        return "hermes"
    return "llama" if "ipython" in template or TAG in template else "none"


def is_in_thought(prompt: str) -> bool:
    """Whether an answer to this prompt, or to a prompt with this end, begins inside a thought."""
    return prompt.rstrip().endswith(OPEN)


def parsed_answer(text: str, notation: Notation, is_in_thought: bool = False) -> AnswerParts:
    """Returns the parts of a sampled text, without its end token; never raises, whatever was sampled.

    `is_in_thought`: the answer begins inside a thought, because the prompt ended with <think>.
    """
    reasoning, begun = "", text.lstrip()
    if is_in_thought or begun.startswith(OPEN):
        thought, _, text = begun.removeprefix(OPEN).partition(CLOSE)
        reasoning, text = thought.strip("\n"), text.lstrip("\n")
    if notation == "hermes":
        return _hermes(text, reasoning)
    if notation == "llama":
        return _llama(text, reasoning)
    return AnswerParts(text, reasoning, (), 0)


def _hermes(text: str, reasoning: str) -> AnswerParts:
    calls, broken, content, end, at = [], 0, [], 0, 0
    while (start := text.find(CALL, at)) >= 0:
        call, at = _hermes_call(text, start + len(CALL))
        if call is None:
            broken += 1
            continue
        calls.append(call)
        content.append(text[end:start])
        end = at
    content.append(text[end:])
    joined = "".join(content)
    # Between calls and around them models write line ends, which are no content.
    return AnswerParts(joined.strip("\n") if calls else joined, reasoning, tuple(calls), broken)


def _hermes_call(text: str, at: int) -> tuple[ToolCall | None, int]:
    """Returns the call that begins at `at`, after its tag, and where it ends; None if it is broken.

    The tag at its end may be missing before the next call and at the end of the text.
    """
    value, after = _decoded(text, _past(_SPACE, text, at))
    call = _call(value, is_marked=True)
    after = _past(_SPACE, text, after)
    if call is not None and text.startswith(END, after):
        return call, after + len(END)
    if call is not None and (after == len(text) or text.startswith(CALL, after)):
        return call, after
    found = text.find(END, at)
    return None, len(text) if found < 0 else found + len(END)


def _llama(text: str, reasoning: str) -> AnswerParts:
    body = text.strip().removeprefix(TAG).lstrip()
    calls, at = [], 0
    while at < len(body):
        value, after = _decoded(body, at)
        if (call := _call(value, is_marked=False)) is None:
            break
        calls.append(call)
        at = _past(_BETWEEN, body, after)
    if calls and at == len(body):
        return AnswerParts("", reasoning, tuple(calls), 0)
    return AnswerParts(text, reasoning, (), int(body.startswith('{"name"')))


def _decoded(text: str, at: int) -> tuple[Any, int]:
    """Returns the JSON value that begins at `at`, and where it ends; (None, at) if there is none."""
    try:
        value, after = _DECODER.raw_decode(text, at)
    except (ValueError, RecursionError):
        return None, at
    return (value, after) if is_plain(value) else (None, at)


def _past(pattern: re.Pattern[str], text: str, at: int) -> int:
    found = pattern.match(text, at)
    return found.end() if found else at


def _call(value: Any, *, is_marked: bool) -> ToolCall | None:
    """Returns the tool call that a JSON value is; None if it is none.

    Arguments may be written as text, and may be null or empty. If a tag marks the call, they may be missing.
    """
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return None
    key = next((key for key in ("arguments", "parameters") if key in value), None)
    if key is None and not is_marked:
        return None
    given = value.get(key) if key else None
    if isinstance(given, str):
        written = given.strip()
        given, end = _decoded(written, 0)
        if end < len(written):
            return None
    if given is None:
        given = {}
    return ToolCall(value["name"], given) if isinstance(given, dict) else None


_DECODER = json.JSONDecoder(strict=False)
"""Reads line ends in strings, as models write them."""

_SPACE, _BETWEEN = re.compile(r"\s*"), re.compile(r"[\s;]*")


def finish_reason(stop_reason: str | None, has_calls: bool) -> str | None:
    """Returns OpenAI's finish_reason: an answer that its limit cut may lack further calls, so it says so."""
    return "tool_calls" if has_calls and stop_reason == "stop" else stop_reason


def message_of(answer: AnswerParts, ids: Sequence[str]) -> dict[str, Any]:
    """Returns the answer as an assistant message in OpenAI's form; `ids[i]` names tool call i."""
    message: dict[str, Any] = {"role": "assistant", "content": answer.content or None}
    if not answer.calls:
        message["content"] = answer.content
    if answer.reasoning:
        message["reasoning_content"] = answer.reasoning
    if answer.calls:
        message["tool_calls"] = [
            {
                "id": name,
                "type": "function",
                "function": {"name": call.name, "arguments": json.dumps(call.arguments, ensure_ascii=False)},
            }
            for name, call in zip(ids, answer.calls, strict=True)
        ]
    return message
