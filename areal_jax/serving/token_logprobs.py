"""Log-probs of sampled tokens in OpenAI's form."""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import Any

from areal_jax.tasks.text import TokenBytes
from areal_jax.tasks.tokenizers import Tokenizer


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
