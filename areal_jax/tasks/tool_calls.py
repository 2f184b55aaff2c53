"""Tool calls and thoughts in a sampled text: from the model's own notation to an OpenAI message.

Two notations: Hermes, which Qwen uses too, writes a JSON object between <tool_call> and </tool_call>; Llama 3
writes one JSON object, with `parameters`, as the complete answer.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

from areal_jax.tasks.plain_json import is_plain

Notation = Literal["hermes", "llama", "none"]

_HERMES = re.compile(r"<tool_call>(.*?)(?:</tool_call>|\Z)", re.DOTALL)
OPEN, CLOSE = "<think>", "</think>"
CALL = "<tool_call>"
TAG = "<|python_tag|>"
_DECODER = json.JSONDecoder()


class ToolCall(NamedTuple):
    name: str
    arguments: Mapping[str, Any]


class Answer(NamedTuple):
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


def parsed_answer(text: str, notation: Notation, is_in_thought: bool = False) -> Answer:
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
    return Answer(text, reasoning, (), 0)


def _hermes(text: str, reasoning: str) -> Answer:
    calls, broken, content, end = [], 0, [], 0
    for found in _HERMES.finditer(text):
        call = _call(_object(found[1]), "arguments")
        if call is None:
            broken += 1
            continue
        calls.append(call)
        content.append(text[end : found.start()])
        end = found.end()
    content.append(text[end:])
    joined = "".join(content)
    # Between calls and around them models write line ends, which are no content.
    return Answer(joined.strip("\n") if calls else joined, reasoning, tuple(calls), broken)


def _llama(text: str, reasoning: str) -> Answer:
    body = text.strip().removeprefix(TAG).lstrip()
    calls, at = [], 0
    while at < len(body):
        try:
            value, at = _DECODER.raw_decode(body, at)
        except (ValueError, RecursionError):
            break
        call = _call(value, "parameters") or _call(value, "arguments")
        if call is None:
            break
        calls.append(call)
        at = re.compile(r"[\s;]*").match(body, at).end()  # type: ignore[union-attr]
    if calls and at == len(body):
        return Answer("", reasoning, tuple(calls), 0)
    return Answer(text, reasoning, (), int(body.startswith('{"name"')))


def _object(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _call(value: Any, arguments: str) -> ToolCall | None:
    # A call that is no JSON to others would be an error of the client, or of the connection to it.
    if not isinstance(value, dict) or not isinstance(value.get("name"), str) or not is_plain(value):
        return None
    given = value.get(arguments)
    return ToolCall(value["name"], given) if isinstance(given, dict) else None


def message_of(answer: Answer, ids: Sequence[str]) -> dict[str, Any]:
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
