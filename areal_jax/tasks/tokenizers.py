"""The interface of tokenizers, and two tokenizers that need no files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from areal_jax.tasks.errors import TaskError
from areal_jax.types import Prompt

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


class Tokenizer(Protocol):
    """The interface of a tokenizer; its ids are 0..vocab_size-1."""

    @property
    def vocab_size(self) -> int: ...

    @property
    def eos_id(self) -> int:
        """The id that ends a completion; it is one of the completion's tokens, but not part of its text."""
        ...

    @property
    def pad_id(self) -> int: ...

    def encode(self, text: str) -> list[int]:
        """Returns the ids of text; adds no special tokens. Raises TaskError if part of the text has no id."""
        ...

    def decode(self, tokens: Sequence[int]) -> str:
        """Returns the text of ids, without special tokens. Never raises, as a policy may sample any id."""
        ...

    def render(self, prompt: Prompt) -> list[int]:
        """Returns a prompt's ids with special tokens. Raises TaskError if the prompt cannot be encoded."""
        ...


class CharTokenizer:
    """One id per character: 0 is pad, 1 is eos, 2 is the first character of `alphabet`, and so on."""

    pad_id = 0
    eos_id = 1

    def __init__(self, alphabet: str) -> None:
        if not alphabet or len(set(alphabet)) != len(alphabet):
            raise TaskError(
                f"the alphabet {alphabet!r} is empty or repeats a character; give every character once"
            )
        self.alphabet = alphabet
        self._ids = {character: number for number, character in enumerate(alphabet, 2)}

    @property
    def vocab_size(self) -> int:
        return len(self.alphabet) + 2

    def encode(self, text: str) -> list[int]:
        try:
            return [self._ids[character] for character in text]
        except KeyError as error:
            raise TaskError(
                f"the character {error.args[0]!r} of {text[:40]!r} is not in the alphabet {self.alphabet!r}; "
                "use model.tokenizer=byte, or add the character to the alphabet"
            ) from None

    def decode(self, tokens: Sequence[int]) -> str:
        special = (self.pad_id, self.eos_id)
        return "".join(
            self.alphabet[token - 2] if 2 <= token < self.vocab_size else REPLACEMENT
            for token in tokens
            if token not in special
        )

    def render(self, prompt: Prompt) -> list[int]:
        return _render(self, prompt)


class ByteTokenizer:
    """UTF-8 bytes as ids 0..255, then bos (256), then eos (257), which is also the pad id.

    A prompt begins with bos unless it is given as tokens.
    """

    vocab_size = 258
    bos_id = 256
    eos_id = 257
    pad_id = 257

    def encode(self, text: str) -> list[int]:
        return list(text.encode("utf-8", errors="replace"))

    def decode(self, tokens: Sequence[int]) -> str:
        special = (self.bos_id, self.eos_id)
        # UTF-8 never contains 0xff: an id beyond the bytes becomes one replacement character.
        raw = bytes(token if 0 <= token < 256 else 0xFF for token in tokens if token not in special)
        return raw.decode("utf-8", errors="replace")

    def render(self, prompt: Prompt) -> list[int]:
        tokens = _render(self, prompt)
        return tokens if prompt.tokens is not None else [self.bos_id, *tokens]


def plain_chat(messages: Sequence[Mapping[str, str]]) -> str:
    """Returns messages as text, for tokenizers without a chat template: one `role: content` per line.

    The text ends with `assistant: `, which the completion continues. Raises TaskError for a message without
    role or content.
    """
    for message in messages:
        if not {"role", "content"} <= message.keys():
            raise TaskError(f"the message {dict(message)!r:.80} lacks role or content; give both")
    return "".join(f"{message['role']}: {message['content']}\n" for message in messages) + "assistant: "


def _render(tokenizer: Tokenizer, prompt: Prompt) -> list[int]:
    if prompt.text is not None:
        return tokenizer.encode(prompt.text)
    if prompt.messages is not None:
        return tokenizer.encode(plain_chat(prompt.messages))
    tokens = [int(token) for token in prompt.tokens or ()]
    for token in tokens:
        if not 0 <= token < tokenizer.vocab_size:
            raise TaskError(
                f"the prompt's token {token} is outside the vocabulary 0..{tokenizer.vocab_size - 1}; "
                "encode the prompt with the run's tokenizer"
            )
    return tokens
