"""Chat messages in OpenAI's form: their check, and the form in which two of them are compared."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from areal_jax.tasks.errors import TaskError
from areal_jax.tasks.plain_json import loads

Message = Mapping[str, Any]
"""A chat message: `role`, `content`, and for tool calls `tool_calls` or `tool_call_id`."""

_IGNORED = frozenset({"role", "content", "tool_calls", "reasoning_content"})
"""Fields that `canonical` treats by rules of their own."""

_TEXTS = ("name", "tool_call_id", "reasoning_content")
"""Fields that are texts where they are given."""

_LOST = ("function_call", "audio")
"""Fields of OpenAI's messages that no chat template reads."""

Canonical = tuple[Any, ...]
"""A hashable value; equal for two messages of equal meaning."""


def checked(messages: Sequence[Message]) -> tuple[dict[str, Any], ...]:
    """Returns copies of the messages with content as text and with parsed arguments of tool calls.

    Chat templates get this form: `content` is a string, "" where a message has tool calls alone, and each
    call's `arguments` are an object if they can be parsed. Raises TaskError for a message without a role,
    without both content and tool calls, with content other than text, with a malformed tool call, or with
    another field that is malformed or would be lost.
    """
    return tuple(_checked(message) for message in messages)


def _checked(message: Message) -> dict[str, Any]:
    shown = f"{dict(message)!r:.120}"
    calls = message.get("tool_calls") or ()
    if not isinstance(calls, list | tuple):
        raise TaskError(f"the message {shown} has tool_calls={calls!r:.80}; give a list of tool calls")
    for name in _TEXTS:
        if not isinstance(message.get(name, ""), str | None):
            raise TaskError(f"the message {shown} has {name}={message[name]!r:.80}; give a text")
    for name in _LOST:
        if message.get(name) is not None:
            raise TaskError(
                f"the message {shown} has {name}={message[name]!r:.80}, which the model cannot read; leave "
                "it out, and give tool calls as tool_calls"
            )
    if not isinstance(message.get("role"), str) or (message.get("content") is None and not calls):
        raise TaskError(
            f"the message {shown} lacks role or content; give both, or tool_calls in place of content"
        )
    kept = {name: value for name, value in message.items() if value is not None and name != "tool_calls"}
    kept["content"] = _text(message.get("content"), shown)
    if calls:
        kept["tool_calls"] = [_call(call, shown) for call in calls]
    return kept


def _text(content: Any, shown: str) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    parts = content if isinstance(content, list | tuple) else [content]
    for part in parts:
        if isinstance(part, Mapping) and part.get("type", "text") != "text":
            raise TaskError(
                f"the message {shown} has a part of type {part['type']!r:.80}, which the model cannot read; "
                "give parts of type text alone"
            )
    if not all(isinstance(part, Mapping) and isinstance(part.get("text"), str) for part in parts):
        raise TaskError(
            f"the message {shown} has content that is not text; give a text, or parts of type text"
        )
    return "".join(part["text"] for part in parts)


def _call(call: Any, shown: str) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise TaskError(
            f"the message {shown} has the tool call {call!r:.80}; give an object with type=function and "
            "function={name, arguments}"
        )
    if not isinstance(call.get("id"), str | None) or call.get("type", "function") != "function":
        raise TaskError(
            f"the message {shown} has a tool call with id={call.get('id')!r:.80} and "
            f"type={call.get('type', 'function')!r:.80}; give a text as id, and type=function"
        )
    arguments = function.get("arguments", {})
    if not isinstance(arguments, str | Mapping | None):
        raise TaskError(
            f"the message {shown} has a tool call with arguments={arguments!r:.80}; give an object, or its "
            "JSON as a text"
        )
    parsed = parsed_arguments(arguments)
    kept = {"type": "function", "function": {"name": function["name"], "arguments": parsed}}
    return ({"id": call["id"]} if call.get("id") is not None else {}) | kept


def parsed_arguments(arguments: Any) -> Any:
    """Returns a tool call's arguments as an object; a text that is not a JSON object is returned as it is."""
    if not isinstance(arguments, str):
        return arguments
    try:
        value = loads(arguments)
    except ValueError:
        return arguments
    return value if isinstance(value, dict) else arguments


def canonical(message: Message) -> Canonical:
    """Returns what two messages have in common if they mean the same.

    `content` of None and "" are equal, also as a list of parts of text; a tool call counts by its id, its
    name and its parsed arguments; a field of None counts as absent. `reasoning_content` is left out: see
    `same_answer`. Raises TaskError as `checked` does.
    """
    one = _checked(message)
    calls = tuple(
        (call.get("id"), call["function"]["name"], frozen(call["function"]["arguments"]))
        for call in one.get("tool_calls", ())
    )
    rest = {name: value for name, value in one.items() if name not in _IGNORED and not _is_empty(value)}
    return (one["role"], one["content"], calls, frozen(rest))


def same_answer(given: Message, sampled: Message) -> bool:
    """Whether a client's assistant message is the one that was sampled.

    Clients add fields of their own, rename `reasoning_content` and strip texts. So only content, tool calls
    and, if the client sends it back, reasoning count, without white space around them.
    """
    reasoning = given.get("reasoning_content") or given.get("reasoning")
    thought = sampled.get("reasoning_content") or ""
    if isinstance(reasoning, str) and reasoning.strip() not in ("", thought.strip()):
        return False
    (role, text, calls, _), (own, said, called, _) = canonical(given), canonical(sampled)
    return (role, text.strip(), calls) == (own, said.strip(), called)


def frozen(value: Any) -> Any:
    """Returns a hashable form of a JSON value: equal for objects with their keys in another order.

    1 and 1.0 are equal, as clients in other languages write the one for the other; 1 and true are not.
    """
    if isinstance(value, Mapping):
        return ("object", frozenset((str(name), frozen(item)) for name, item in value.items()))
    if isinstance(value, list | tuple):
        return ("list", *map(frozen, value))
    return ("bool", value) if isinstance(value, bool) else value


def _is_empty(value: Any) -> bool:
    return value is None or value in ([], {}, ())
