"""The text of tokens while they are still coming."""

from __future__ import annotations

from collections.abc import Sequence

from areal_jax.tasks.tokenizers import REPLACEMENT, Tokenizer

CONTEXT_TOKENS = 8
"""How many tokens before the new ones are decoded with them: a decoder may join neighbours, or drop the space
before a first word."""

UNFINISHED_TOKENS = 3
"""The most tokens that an unfinished character is spread over: UTF-8 has at most 4 bytes."""


class TextStream:
    """`push(tokens)` says what they add to the text; the pieces of all pushes and of `finish` make it up.

    A character whose bytes are spread over several tokens comes with the last of them. Tokens that are no
    UTF-8 become replacement characters.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._context: list[int] = []
        self._pending: list[int] = []

    def push(self, tokens: Sequence[int]) -> str:
        self._pending.extend(tokens)
        for held in range(min(UNFINISHED_TOKENS, len(self._pending)) + 1):
            ready = self._pending[: len(self._pending) - held]
            text = self._added(ready)
            if not text.endswith(REPLACEMENT):
                return self._take(ready, text)
        return self.finish()

    def finish(self) -> str:
        """What was held back; a character that never became whole is a replacement character."""
        return self._take(self._pending, self._added(self._pending))

    def _added(self, tokens: Sequence[int]) -> str:
        before = self._tokenizer.decode(self._context)
        return self._tokenizer.decode([*self._context, *tokens])[len(before) :]

    def _take(self, tokens: Sequence[int], text: str) -> str:
        self._context = [*self._context, *tokens][-CONTEXT_TOKENS:]
        self._pending = self._pending[len(tokens) :]
        return text
