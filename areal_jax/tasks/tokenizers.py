"""Text to token ids and back: what a tokenizer is, and two that need no files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from areal_jax.tasks.task import TaskError
from areal_jax.types import Prompt

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


class Tokenizer(Protocol):
    """What the framework asks of a tokenizer; ids are 0..vocab_size-1."""

    @property
    def vocab_size(self) -> int: ...

    @property
    def eos_id(self) -> int:
        """Ends a completion; part of it, but not of its text."""
        ...

    @property
    def pad_id(self) -> int: ...

    def encode(self, text: str) -> list[int]:
        """The ids of text, without special tokens. Raises TaskError for text that it cannot express."""
        ...

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of ids, special tokens dropped. Never raises: a policy may sample anything."""
        ...

    def render(self, prompt: Prompt) -> list[int]:
        """The exact tokens that the policy is given. Raises TaskError."""
        ...


class CharTokenizer:
    """One id a character of `alphabet`, after pad (0) and eos (1)."""

    pad_id = 0
    eos_id = 1

    def __init__(self, alphabet: str) -> None:
        if not alphabet or len(set(alphabet)) != len(alphabet):
            raise TaskError(f"the alphabet {alphabet!r} is empty or repeats a character; give each once")
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
                "use model.tokenizer=byte, or add it"
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
    """UTF-8 bytes as ids 0..255, then bos (256) and eos (257), which also pads. A prompt begins with bos."""

    vocab_size = 258
    bos_id = 256
    eos_id = 257
    pad_id = 257

    def encode(self, text: str) -> list[int]:
        return list(text.encode("utf-8", errors="replace"))

    def decode(self, tokens: Sequence[int]) -> str:
        special = (self.bos_id, self.eos_id)
        # 0xff is in no UTF-8 text, so an id that is no byte becomes one replacement character.
        raw = bytes(token if 0 <= token < 256 else 0xFF for token in tokens if token not in special)
        return raw.decode("utf-8", errors="replace")

    def render(self, prompt: Prompt) -> list[int]:
        tokens = _render(self, prompt)
        return tokens if prompt.tokens is not None else [self.bos_id, *tokens]


def plain_chat(messages: Sequence[Mapping[str, str]]) -> str:
    """Messages as text, for tokenizers without a chat template of their own: one `role: content` a line."""
    for message in messages:
        if not {"role", "content"} <= message.keys():
            raise TaskError(f"the message {dict(message)!r:.80} lacks role or content; give it both")
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
                f"the prompt's token {token} is none of 0..{tokenizer.vocab_size - 1}; was it encoded with "
                "another tokenizer?"
            )
    return tokens
