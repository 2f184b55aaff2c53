"""The text that each token of a completion adds, as the tokens arrive or for all tokens at once."""

from __future__ import annotations

import codecs
from collections.abc import Sequence

from areal_jax.tasks.tokenizers import REPLACEMENT, Tokenizer

CONTEXT_TOKENS = 8
"""Number of earlier tokens that are decoded together with new tokens.

A token's text may depend on the tokens before it, because a tokenizer may join neighbours, or drop the space
before the first word.
"""

UNFINISHED_TOKENS = 3
"""Maximum number of tokens held back until a character is complete; a UTF-8 character has 1 to 4 bytes."""


class TextStream:
    """Decodes one sample's tokens as they arrive: `push(tokens)` returns the text that these tokens add.

    The results of all pushes and of `finish`, joined, are the sample's text. If a character's bytes are
    spread over several tokens, the push with the last of these tokens returns the character. Bytes that are
    not valid UTF-8 become replacement characters.
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
        """Returns the rest of the text after the last token; an incomplete character becomes U+FFFD."""
        return self._take(self._pending, self._added(self._pending))

    def _added(self, tokens: Sequence[int]) -> str:
        before = self._tokenizer.decode(self._context)
        return self._tokenizer.decode([*self._context, *tokens])[len(before) :]

    def _take(self, tokens: Sequence[int], text: str) -> str:
        self._context = [*self._context, *tokens][-CONTEXT_TOKENS:]
        self._pending = self._pending[len(tokens) :]
        return text


class TokenBytes:
    """The bytes that each token of a sample adds: `push(token)` returns those of the sample's next token.

    Joined, they are the sample's text in UTF-8; a token may have some bytes of a character.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._context: list[int] = []

    def push(self, token: int) -> bytes:
        own, before = self._tokenizer.token_bytes(token), self._context
        with_it = [*before, token]
        self._context = with_it[-CONTEXT_TOKENS:]
        if own is not None:
            return own
        return self._tokenizer.decode(with_it)[len(self._tokenizer.decode(before)) :].encode()


def token_pieces(tokens: Sequence[int], tokenizer: Tokenizer) -> list[str]:
    """Returns for each token the text that it adds; joined, these are the text of all tokens.

    If a character consists of several tokens, the last one adds the character, and the others add "".
    """
    # Where each token has bytes of its own, this is 50 times as fast as decoding each token with its
    # neighbours: a batch of long completions would otherwise hold up the control plane for seconds.
    raw = [tokenizer.token_bytes(token) for token in tokens]
    if None in raw:
        stream = TextStream(tokenizer)
        pieces = [stream.push([token]) for token in tokens]
        rest = stream.finish()
    else:
        decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        pieces = [decoder.decode(each or b"") for each in raw]
        rest = decoder.decode(b"", final=True)
    if pieces:
        pieces[-1] += rest
    return pieces
