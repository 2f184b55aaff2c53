"""A Hugging Face tokenizer from a model's folder: its ids, its special tokens, its chat template.

The one file that imports transformers: for the chat template only, when the first messages are rendered (half
a second; neither torch nor jax comes with it).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import groupby, takewhile
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as Backend
from tokenizers.models import WordLevel

from areal_jax.tasks.task import TaskError
from areal_jax.tasks.tokenizers import REPLACEMENT, plain_chat
from areal_jax.types import Prompt

_SPECIAL = ("bos_token", "eos_token", "pad_token", "unk_token")
"""What a chat template may name."""


@dataclass(frozen=True)
class HFTokenizer:
    """A tokenizer as its files say it, held by content: it pickles, and equal files make equal tokenizers."""

    backend_json: str = field(repr=False)
    """tokenizer.json."""
    special: tuple[tuple[str, str], ...]
    """bos_token, eos_token, pad_token, unk_token, as far as there are any, with their text."""
    adds_bos: bool | None
    """tokenizer_config.json's add_bos_token; None leaves it to tokenizer.json's post-processor."""
    templates: tuple[tuple[str, str], ...] = field(repr=False)
    """Chat templates by name; a model with one calls it `default`."""
    folder: str = field(compare=False)
    """Where the files were read, for messages to people."""

    @staticmethod
    def from_folder(folder: Path) -> HFTokenizer:
        """Reads tokenizer.json, tokenizer_config.json and, where there is one, chat_template.jinja.

        Raises TaskError for a file that is missing or broken, and for a folder that names no end token.
        """
        folder = Path(folder)
        config = _read_config(folder / "tokenizer_config.json")
        tokenizer = HFTokenizer(
            _read(folder / "tokenizer.json"),
            tuple((name, text) for name in _SPECIAL if (text := _token_text(config.get(name))) is not None),
            config.get("add_bos_token"),
            _read_templates(folder, config),
            str(folder),
        )
        _ = tokenizer.eos_id, tokenizer.pad_id  # a broken folder is found now, not at the first sample
        return tokenizer

    @cached_property
    def vocab_size(self) -> int:
        """Largest id + 1. The model's embedding may have more rows, never fewer: see `require_fits`."""
        return max(self._known) + 1

    @cached_property
    def eos_id(self) -> int:
        return self._special_id("eos_token")

    @cached_property
    def pad_id(self) -> int:
        """Of the pad token; the end token pads where there is none."""
        return self._special_id("pad_token") if "pad_token" in dict(self.special) else self.eos_id

    def encode(self, text: str) -> list[int]:
        """The ids of text; a special token that is spelled out in it is ordinary text."""
        return self._encode(self._plain, text)

    def encode_rendered(self, text: str) -> list[int]:
        """The ids of text in which spelled out special tokens are meant: of what a chat template renders."""
        return self._encode(self._backend, text)

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of ids, special tokens dropped; an id that is no token is a replacement character."""
        runs = groupby((int(token) for token in tokens), lambda token: token in self._known)
        return "".join(
            self._backend.decode(list(run), skip_special_tokens=True)
            if is_known
            else REPLACEMENT * len(list(run))
            for is_known, run in runs
        )

    def render(self, prompt: Prompt) -> list[int]:
        """Text after bos where the tokenizer adds it; messages by the chat template; tokens as they are.

        Special tokens spelled out in a text prompt are meant: its author may have rendered it. Messages
        become `plain_chat` where the folder has no template. Raises TaskError.
        """
        if prompt.text is not None:
            return [*self._prefix, *self.encode_rendered(prompt.text)]
        if prompt.messages is not None:
            return self._render_chat(prompt.messages)
        return self._checked(prompt.tokens or ())

    # --- how ------------------------------------------------------------------------------------------

    @cached_property
    def _backend(self) -> Backend:
        return self._load()

    @cached_property
    def _plain(self) -> Backend:
        """A second one: the switch is the object's, and threads share the objects."""
        backend = self._load()
        backend.encode_special_tokens = True
        return backend

    def _load(self) -> Backend:
        try:
            backend = Backend.from_str(self.backend_json)
        except Exception as error:  # tokenizers raises nothing narrower
            raise TaskError(
                f"{self.folder}/tokenizer.json is no tokenizer that the tokenizers package reads ({error}); "
                "download it again, or save it with transformers' save_pretrained"
            ) from error
        backend.no_truncation()  # a file may carry the settings of whoever saved it
        backend.no_padding()
        return backend

    @cached_property
    def _known(self) -> frozenset[int]:
        known = frozenset(self._backend.get_vocab(with_added_tokens=True).values())
        if not known:
            raise TaskError(f"{self.folder}/tokenizer.json has an empty vocabulary; download it again")
        return known

    @cached_property
    def _prefix(self) -> list[int]:
        """What the tokenizer puts before a text."""
        if self.adds_bos is not None:
            return [self._special_id("bos_token")] if self.adds_bos else []
        probe = self._backend.encode("a", add_special_tokens=True)
        added = takewhile(lambda pair: pair[1] == 1, zip(probe.ids, probe.special_tokens_mask, strict=True))
        return [token for token, _ in added]

    @cached_property
    def _chat(self) -> Any:
        """transformers' chat rendering, over an empty vocabulary: it makes text, and our own ids follow."""
        from transformers import PreTrainedTokenizerFast  # half a second, and not every run has messages

        return PreTrainedTokenizerFast(
            tokenizer_object=Backend(WordLevel({})), chat_template=dict(self.templates), **dict(self.special)
        )

    def __getstate__(self) -> dict[str, Any]:
        """Only what the files said: what was made of it is made again."""
        return {name: self.__dict__[name] for name in self.__dataclass_fields__}

    def _special_id(self, name: str) -> int:
        text = dict(self.special).get(name)
        where = f"{self.folder}/tokenizer_config.json"
        if text is None:
            raise TaskError(f"{where} names no {name}; add it, as the model's card says")
        token = self._backend.token_to_id(text)
        if token is None:
            raise TaskError(
                f"{where} says {name}={text!r}, which is no token of {self.folder}/tokenizer.json; "
                "take both files from one model"
            )
        return token

    def _encode(self, backend: Backend, text: str) -> list[int]:
        clean = text.encode("utf-8", errors="replace").decode()  # a lone surrogate is no text
        try:
            return backend.encode(clean, add_special_tokens=False).ids
        except Exception as error:  # tokenizers raises nothing narrower
            raise TaskError(
                f"the tokenizer of {self.folder} cannot express {text[:40]!r}: {error}; its vocabulary "
                "has no unknown token: give another tokenizer, or change the text"
            ) from error

    def _render_chat(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        plain = plain_chat(messages)  # also checks that each has its role and content
        if not self.templates:
            return [*self._prefix, *self.encode(plain)]
        try:
            text = self._chat.apply_chat_template(
                [dict(message) for message in messages], add_generation_prompt=True, tokenize=False
            )
        except Exception as error:  # a template is a program of the model's, and may raise anything
            roles = ", ".join(message["role"] for message in messages) or "none"
            raise TaskError(
                f"the chat template of {self.folder} raised {type(error).__name__}: {error}; the messages' "
                f"roles were {roles}: give it what it asks for, or another chat_template.jinja"
            ) from error
        return self.encode_rendered(text)

    def _checked(self, tokens: Sequence[int]) -> list[int]:
        checked = [int(token) for token in tokens]
        for token in checked:
            if token not in self._known:
                raise TaskError(
                    f"the prompt's token {token} is none of the tokenizer of {self.folder}, whose ids are "
                    f"below {self.vocab_size}; was it encoded with another tokenizer?"
                )
        return checked


def require_fits(tokenizer: HFTokenizer, vocab_size: int) -> None:
    """Raises TaskError unless a model with `vocab_size` embeddings has one for every id of the tokenizer."""
    if tokenizer.vocab_size > vocab_size:
        raise TaskError(
            f"the tokenizer of {tokenizer.folder} has ids up to {tokenizer.vocab_size - 1}, and the model "
            f"{vocab_size} embeddings; take the tokenizer of the model itself (model.source), or resize the "
            "embeddings"
        )


def _read(path: Path) -> str:
    try:
        return path.read_text("utf-8")
    except OSError as error:
        raise TaskError(
            f"{path} cannot be read: {error.strerror}; a tokenizer's folder holds tokenizer.json and "
            "tokenizer_config.json, as transformers' save_pretrained writes them"
        ) from error
    except UnicodeDecodeError as error:
        raise TaskError(
            f"{path} is not UTF-8 ({error.reason} at byte {error.start}); download it again"
        ) from error


def _read_config(path: Path) -> dict[str, Any]:
    try:
        config = json.loads(_read(path))
    except json.JSONDecodeError as error:
        raise TaskError(
            f"{path} is not JSON ({error.msg} at line {error.lineno}); download it again"
        ) from error
    if not isinstance(config, dict):
        raise TaskError(f"{path} holds a {type(config).__name__}; it is an object with named settings")
    return config


def _token_text(value: Any) -> str | None:
    """A special token is its text, or an object with its text as `content`."""
    text = value.get("content") if isinstance(value, dict) else value
    return text if isinstance(text, str) else None


def _read_templates(folder: Path, config: Mapping[str, Any]) -> tuple[tuple[str, str], ...]:
    """chat_template.jinja, else the config's chat_template: a text, or a list of named ones."""
    file = folder / "chat_template.jinja"
    if file.exists():
        return (("default", _read(file)),)
    given = config.get("chat_template")
    if given is None:
        return ()
    if isinstance(given, str):
        return (("default", given),)
    try:
        return tuple((str(entry["name"]), str(entry["template"])) for entry in given)
    except (TypeError, KeyError) as error:
        raise TaskError(
            f"{folder}/tokenizer_config.json: chat_template is {given!r:.80}; it is a template, or a list of "
            "objects with name and template"
        ) from error
