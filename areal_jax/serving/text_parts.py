"""Text and log-probs that arrive in pieces: what a client gets at once, and what must wait for more."""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import Any, NamedTuple

from areal_jax.tasks.text import TokenBytes
from areal_jax.tasks.tokenizers import Tokenizer
from areal_jax.tasks.tool_calls import CALL, CLOSE, OPEN, TAG, AnswerParts, Notation, parsed_answer


class LogProbs:
    """The log-probs of one completion's tokens, as they arrive; joined, the tokens' bytes are its text."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._bytes = TokenBytes(tokenizer)
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._offset = 0

    def chat(self, tokens: Sequence[int], logp: Sequence[float]) -> dict[str, Any]:
        """Returns the log-probs of the next tokens as a chat completion has them."""
        content = [
            {"token": _shown(own), "logprob": value, "bytes": list(own), "top_logprobs": []}
            for own, value in zip(map(self._bytes.push, tokens), logp, strict=True)
        ]
        return {"content": content, "refusal": None}

    def completion(self, tokens: Sequence[int], logp: Sequence[float]) -> dict[str, Any]:
        """Returns the log-probs of the next tokens as a completion has them.

        A token's offset is that of the character to which its first byte belongs.
        """
        texts, offsets = [], []
        for own in map(self._bytes.push, tokens):
            texts.append(_shown(own))
            first = self._decoder.decode(own[:1])
            is_unfinished = bool(self._decoder.getstate()[0])
            offsets.append(max(self._offset, self._offset + len(first) + is_unfinished - 1))
            self._offset += len(first + self._decoder.decode(own[1:]))
        return {
            "tokens": texts,
            "token_logprobs": list(logp),
            "top_logprobs": None,
            "text_offset": offsets,
        }


def _shown(own: bytes) -> str:
    """Returns a token's text; of one with parts of a character its bytes, as in bytes:\\xf0\\x9f."""
    try:
        return own.decode()
    except UnicodeDecodeError:
        return f"bytes:{own.decode(errors='backslashreplace')}"


def held(text: str, marks: Sequence[str]) -> int:
    """Number of characters at the end of `text` that may be the beginning of one of `marks`."""
    longest = max(map(len, marks), default=0) - 1
    ends = range(min(longest, len(text)), 0, -1)
    return next((n for n in ends if any(mark.startswith(text[-n:]) for mark in marks)), 0)


class BeforeStop:
    """Passes a completion's text on up to its first stop text, which OpenAI's interface leaves out."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops, self._waiting, self._is_over = stops, "", False

    def push(self, text: str, is_last: bool = False) -> str:
        """Returns the text that can be passed on; all that is left if `is_last`."""
        if self._is_over:
            return ""
        self._waiting += text
        places = [place for stop in self._stops if (place := self._waiting.find(stop)) >= 0]
        if places:
            self._is_over = True
            return self._waiting[: min(places)]
        keep = 0 if is_last else held(self._waiting, self._stops)
        ready, self._waiting = (
            self._waiting[: len(self._waiting) - keep],
            self._waiting[len(self._waiting) - keep :],
        )
        return ready


class Part(NamedTuple):
    """What new text adds to a message."""

    content: str
    reasoning: str


class MessageParts:
    """Divides a chat completion, as it arrives, into reasoning, content and tool calls.

    All parts together are those of `parsed_answer`, so a stream gives the message that one answer would give.
    """

    def __init__(self, notation: Notation, is_in_thought: bool) -> None:
        self._notation: Notation = notation
        self._is_in_thought = is_in_thought
        self._text, self._content, self._reasoning = "", "", ""

    def push(self, text: str) -> Part:
        """Returns what can be passed on after `text`."""
        self._text += text
        content, reasoning = self._certain()
        return self._added(content, reasoning)

    def finish(self) -> tuple[Part, AnswerParts]:
        """Returns what is left, and the complete answer."""
        answer = parsed_answer(self._text, self._notation, self._is_in_thought)
        return self._added(answer.content, answer.reasoning), answer

    def _added(self, content: str, reasoning: str) -> Part:
        part = Part(content[len(self._content) :], reasoning[len(self._reasoning) :])
        self._content, self._reasoning = content, reasoning
        return part

    def _certain(self) -> tuple[str, str]:
        """The beginning of content and reasoning that no further text can change."""
        begun = self._text.lstrip()
        if OPEN.startswith(begun):
            return "", ""
        if self._is_in_thought or begun.startswith(OPEN):
            thought, end, rest = begun.removeprefix(OPEN).partition(CLOSE)
            if not end:
                certain = thought[: len(thought) - held(thought, [CLOSE])]
                return "", certain.lstrip("\n").rstrip("\n")
            return self._certain_content(rest.lstrip("\n")), thought.strip("\n")
        return self._certain_content(self._text), ""

    def _certain_content(self, text: str) -> str:
        if self._notation == "hermes":
            before, call, _ = text.partition(CALL)
            before = before if call else before[: len(before) - held(before, [CALL])]
            # Line ends around calls are left out, those of an answer without a call are not.
            return "" if not before.strip("\n") or before.startswith("\n") else before.rstrip("\n")
        begun = text.lstrip()
        may_be_call = begun.startswith("{") or TAG.startswith(begun[: len(TAG)])
        return "" if self._notation == "llama" and may_be_call else text
