"""The exact tokens that follow a sampled answer: what a chat template writes up to the next answer.

Tokens of earlier turns are never computed again from text. A template renders a fixed short conversation,
the stub, which ends with a marker as an answer, and then the new messages; what it writes after the marker
follows the real answer. So a template that drops earlier thoughts from a conversation, as that of Qwen3
does, cannot change tokens that were sampled. `FollowUps` checks that this text does not depend on the stub.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import cache, lru_cache
from itertools import takewhile
from typing import Any

from areal_jax.tasks.chat_messages import Message
from areal_jax.tasks.errors import TaskError
from areal_jax.tasks.tokenizers import Tokenizer, require_may_fit

REMEDY = "set episode.history=template, which renders the complete conversation for each turn"

MARKER = "the answer before"
"""The last answer of a stub; of letters and spaces alone, so that no template changes it."""

STUBS: tuple[tuple[Message, ...], ...] = (
    ({"role": "user", "content": "Begin."}, {"role": "assistant", "content": MARKER}),
    (
        {"role": "user", "content": "One."},
        {"role": "assistant", "content": "Two."},
        {"role": "user", "content": "Three."},
        {"role": "assistant", "content": MARKER},
    ),
)
"""Conversations before new messages; the first is used, the second tells whether it matters."""

_USER: Message = {"role": "user", "content": "Go on."}
_TOOL: Message = {"role": "tool", "content": "7", "tool_call_id": "call00000"}
_ANSWER: Message = {"role": "assistant", "content": "Yes."}

PROBES: Mapping[str, tuple[tuple[Message, ...], ...]] = {
    "user": ((_USER,), (_USER, _ANSWER, _USER)),
    "tool": ((_TOOL,), (_TOOL, _TOOL)),
}
"""Role of the first new message -> new messages for which the text must not depend on the stub."""


def follow_ups_of(
    tokenizer: Tokenizer,
    tools: Sequence[Mapping[str, Any]] = (),
    arguments: Mapping[str, Any] | None = None,
) -> FollowUps:
    """Returns the FollowUps of these values of JSON, made and checked once for all episodes of a process."""
    return _made(tokenizer, json.dumps([list(tools), arguments]))


@lru_cache(maxsize=256)
def _made(tokenizer: Tokenizer, plain: str) -> FollowUps:
    return FollowUps(tokenizer, *json.loads(plain))


class FollowUps:
    """Computes what follows an answer, for one tokenizer, set of tools and arguments of the chat template."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        tools: Sequence[Mapping[str, Any]] = (),
        arguments: Mapping[str, Any] | None = None,
    ) -> None:
        """Raises TaskError if the text after an answer depends on what was said before it."""
        self._tokenizer, self._tools, self._arguments = tokenizer, tools, arguments
        ended, continued = (
            tokenizer.encode_chat(text)
            for text in (self._after(STUBS[0], is_open=False), self._after(STUBS[0], _USER))
        )
        same = takewhile(lambda pair: pair[0] == pair[1], zip(ended, continued, strict=False))
        self.closing = tuple(token for token, _ in same)
        """The tokens that end an answer; a sampled answer may end with the first of them."""
        if ended and not self.closing:
            raise TaskError(
                "the chat template ends the last answer of a conversation with other tokens, "
                f"{ended[:4]}, than one that is continued, {continued[:4]}; {REMEDY}"
            )
        self._check = cache(self._checked)
        self._check("user")

    def tokens(
        self, messages: Sequence[Message], answer: Sequence[int], most: int | None = None
    ) -> list[int]:
        """Returns the tokens from the end of `answer` to the beginning of the next one.

        `messages` are what was said in between, at least one; `answer` are the sampled tokens. Tokens of the
        answer's end that were sampled are not repeated. Raises TaskError if the template cannot render the
        messages, or depends on what was said before; TooLongError, before encoding, if there are surely more
        than `most` tokens.
        """
        self._check("tool" if messages[0].get("role") == "tool" else "user")
        text = self._after(STUBS[0], *messages)
        require_may_fit(self._tokenizer.fewest, text, None if most is None else most + len(self.closing))
        tokens = self._tokenizer.encode_chat(text)
        return tokens[self._sampled_end(answer, tokens) :]

    def _sampled_end(self, answer: Sequence[int], tokens: Sequence[int]) -> int:
        """Number of the first `tokens` with which the answer ends already."""
        lengths = range(min(len(self.closing), len(answer)), 0, -1)
        # Some models end an answer with the token that begins the next message.
        if answer and answer[-1] == tokens[0] and tokens[0] in self._tokenizer.end_ids:
            return 1
        return next((n for n in lengths if tuple(answer[-n:]) == self.closing[:n]), 0)

    def _after(self, stub: Sequence[Message], *messages: Message, is_open: bool = True) -> str:
        """Returns what the template writes after the stub's last answer if the messages follow it."""
        text = self._tokenizer.chat_text((*stub, *messages), self._tools, self._arguments, is_open=is_open)
        _, marker, after = text.partition(MARKER)
        if not marker:
            raise TaskError(
                f"the chat template leaves out an answer, {MARKER!r}, of a conversation; {REMEDY}"
            )
        return after

    def _checked(self, role: str) -> None:
        for probe in PROBES[role]:
            one, other = (self._after(stub, *probe) for stub in STUBS)
            begin = self._tokenizer.encode_chat(one)[: len(self.closing)]
            if one != other or tuple(begin) != self.closing:
                raise TaskError(
                    f"the chat template does not write the same text after every answer: {one!r:.80} in a "
                    f"short conversation, {other!r:.80} in a longer one; {REMEDY}"
                )
