"""The interface of tokenizers, and two tokenizers that need no files."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from areal_jax.tasks.chat_messages import Message, checked
from areal_jax.tasks.errors import TaskError, TooLongError
from areal_jax.tasks.tool_calls import Notation
from areal_jax.types import Prompt

LARGE = 2**16
"""Number of characters from which a text takes more than some milliseconds to encode."""

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


class Tokenizer(Protocol):
    """The interface of a tokenizer; its ids are 0..vocab_size-1."""

    @property
    def vocab_size(self) -> int: ...

    @property
    def eos_id(self) -> int:
        """The id that ends a text."""
        ...

    @property
    def end_ids(self) -> tuple[int, ...]:
        """The ids that end a completion, `eos_id` first: each is the last of the completion's tokens.

        Special tokens are not part of its text. Chat models often end a turn and a text by different ids.
        """
        ...

    @property
    def pad_id(self) -> int: ...

    @property
    def notation(self) -> Notation:
        """How the chat template teaches the model to write tool calls."""
        ...

    def encode(self, text: str) -> list[int]:
        """Returns the ids of text; adds no special tokens. Raises TaskError if part of the text has no id."""
        ...

    def fewest(self, text: str) -> int:
        """Returns a lower bound of the number of ids of a text, without encoding it; 0 if none is known.

        `text` may be a whole chat, too, as `chat_text` returns it.
        """
        ...

    def decode(self, tokens: Sequence[int]) -> str:
        """Returns the text of ids, without special tokens. Never raises, as a policy may sample any id."""
        ...

    def token_bytes(self, token: int) -> bytes | None:
        """Returns the UTF-8 bytes that an id adds to a text; b"" for a special token.

        None: the tokenizer joins or separates neighbours, so that the bytes depend on the other ids.
        """
        ...

    def render(self, prompt: Prompt, most: int | None = None) -> list[int]:
        """Returns a prompt's ids with special tokens. Raises TaskError if the prompt cannot be encoded.

        `most`: how many ids there is room for. Raises TooLongError, before encoding, if a large text surely
        has more; one that it does not refuse may have more, too.
        """
        ...

    def chat_text(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] = (),
        arguments: Mapping[str, Any] | None = None,
        *,
        is_open: bool = True,
    ) -> str:
        """Returns messages as the text that the model reads; with `is_open`, an answer's beginning follows.

        `tools`: schemas of tools. `arguments`: further ones of the chat template, such as enable_thinking.
        Raises TaskError if the messages, tools or arguments cannot be rendered.
        """
        ...

    def encode_chat(self, text: str) -> list[int]:
        """Returns the ids of a text, or of a part of one, that `chat_text` returned."""
        ...


def plain_chat(
    messages: Sequence[Message],
    tools: Sequence[Mapping[str, Any]] = (),
    arguments: Mapping[str, Any] | None = None,
    *,
    is_open: bool = True,
) -> str:
    """Returns messages as text, for tokenizers without a chat template: one `role: content` per line.

    With `is_open` the text ends with `assistant: `, which the completion continues. Raises TaskError for a
    message without role or content, and for tools, which only a chat template can describe.
    """
    ready = checked(messages)
    if tools or arguments or any(message.get("tool_calls") for message in ready):
        raise TaskError(
            f"tools={list(tools)!r:.80}, template arguments {arguments!r:.80} and tool calls need a chat "
            "template; use a model with one, or describe the tools in a message"
        )
    lines = (f"{message['role']}: {message['content']}\n" for message in ready)
    return "".join(lines) + "assistant: " * is_open


class CharTokenizer:
    """One id per character or symbol: 0 is pad, 1 is eos, 2 is the first character of `alphabet`, and so on.

    The ids after those of the alphabet are for `symbols`, texts of several characters such as "<think>".
    """

    pad_id = 0
    eos_id = 1
    end_ids = (eos_id,)
    notation: Notation = "none"

    def __init__(self, alphabet: str, symbols: Sequence[str] = ()) -> None:
        if not alphabet or len(set(alphabet)) != len(alphabet):
            raise TaskError(
                f"the alphabet {alphabet!r} is empty or repeats a character; give every character once"
            )
        if len(set(symbols)) != len(symbols) or any(len(symbol) < 2 for symbol in symbols):
            raise TaskError(
                f"the symbols {tuple(symbols)!r} must have two or more characters each, and no symbol may be "
                "repeated; give single characters in the alphabet"
            )
        self.alphabet = alphabet
        self.symbols = tuple(symbols)
        self._texts = (*alphabet, *symbols)
        self._ids = {text: number for number, text in enumerate(self._texts, 2)}
        # The longest symbol comes first, because a regular expression takes the first alternative that fits.
        longest_first = sorted(symbols, key=len, reverse=True)
        self._parts = re.compile("|".join([*map(re.escape, longest_first), "."]), re.DOTALL)

        self._longest = max(map(len, self._texts))

    @property
    def vocab_size(self) -> int:
        return len(self._texts) + 2

    def fewest(self, text: str) -> int:
        return -(-len(text) // self._longest)

    def encode(self, text: str) -> list[int]:
        """Returns the ids of text; where several symbols begin, the longest is taken.

        Raises TaskError for a character that is neither in the alphabet nor part of a symbol.
        """
        try:
            return [self._ids[part] for part in self._parts.findall(text)]
        except KeyError as error:
            raise TaskError(
                f"the character {error.args[0]!r} of {text[:40]!r} is not in the alphabet {self.alphabet!r}; "
                "use model.tokenizer=byte, or add the character to the alphabet"
            ) from None

    def decode(self, tokens: Sequence[int]) -> str:
        special = (self.pad_id, self.eos_id)
        return "".join(
            self._texts[token - 2] if 2 <= token < self.vocab_size else REPLACEMENT
            for token in tokens
            if token not in special
        )

    def token_bytes(self, token: int) -> bytes:
        return self.decode([token]).encode()

    def render(self, prompt: Prompt, most: int | None = None) -> list[int]:
        return _render(self, prompt, most)

    chat_text = staticmethod(plain_chat)
    encode_chat = encode


class ByteTokenizer:
    """UTF-8 bytes as ids 0..255, then bos (256), then eos (257), which is also the pad id.

    A prompt begins with bos unless it is given as tokens.
    """

    vocab_size = 258
    bos_id = 256
    eos_id = 257
    end_ids = (eos_id,)
    pad_id = 257
    notation: Notation = "none"

    def fewest(self, text: str) -> int:
        return len(text)

    def encode(self, text: str) -> list[int]:
        return list(text.encode("utf-8", errors="replace"))

    def decode(self, tokens: Sequence[int]) -> str:
        return b"".join(map(self.token_bytes, tokens)).decode("utf-8", errors="replace")

    def token_bytes(self, token: int) -> bytes:
        if token in (self.bos_id, self.eos_id):
            return b""
        # UTF-8 never contains 0xff: an id beyond the bytes becomes one replacement character.
        return bytes([token if 0 <= token < 256 else 0xFF])

    def render(self, prompt: Prompt, most: int | None = None) -> list[int]:
        tokens = _render(self, prompt, most)
        return tokens if prompt.tokens is not None else [self.bos_id, *tokens]

    chat_text = staticmethod(plain_chat)
    encode_chat = encode


def require_may_fit(fewest: Callable[[str], int], text: str, most: int | None) -> None:
    """Raises TooLongError if a large text surely has more than `most` ids; `fewest`: the tokenizer's method.

    A text that is not large has to be encoded for that, so that an error can give the exact number.
    """
    if most is not None and len(text) > LARGE and (least := fewest(text)) > most:
        raise TooLongError(
            f"the text has {len(text)} characters, which are at least {least} tokens, but there is room for "
            f"{most}; shorten it, or raise generation.length",
            least,
        )


def chat_tokens(
    tokenizer: Tokenizer,
    messages: Sequence[Message],
    tools: Sequence[Mapping[str, Any]],
    arguments: Mapping[str, Any] | None,
    most: int | None = None,
) -> list[int]:
    """Returns the ids of a chat as `render` does, with further arguments of the chat template."""
    if not arguments:
        return tokenizer.render(Prompt(messages=messages, tools=tools), most)
    text = tokenizer.chat_text(messages, tools, arguments)
    require_may_fit(tokenizer.fewest, text, most)
    return tokenizer.encode_chat(text)


def _render(tokenizer: Tokenizer, prompt: Prompt, most: int | None) -> list[int]:
    if prompt.text is not None:
        require_may_fit(tokenizer.fewest, prompt.text, most)
        return tokenizer.encode(prompt.text)
    if prompt.messages is not None:
        text = tokenizer.chat_text(prompt.messages, prompt.tools)
        require_may_fit(tokenizer.fewest, text, most)
        return tokenizer.encode_chat(text)
    tokens = [int(token) for token in prompt.tokens or ()]
    for token in tokens:
        if not 0 <= token < tokenizer.vocab_size:
            raise TaskError(
                f"the prompt's token {token} is outside the vocabulary 0..{tokenizer.vocab_size - 1}; "
                "encode the prompt with the run's tokenizer"
            )
    return tokens
