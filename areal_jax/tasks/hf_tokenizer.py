"""A Hugging Face tokenizer, read from a model's folder, with its special tokens and its chat template.

Only this file imports transformers, and only when the first chat messages are rendered: the import takes half
a second, and loads neither torch nor jax.
"""

from __future__ import annotations

import inspect
import json
import re
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain, groupby, takewhile
from pathlib import Path
from typing import Any, Literal

from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend
from tokenizers.models import WordLevel

from areal_jax.tasks.byte_level import byte_ids, byte_table
from areal_jax.tasks.chat_messages import Message, checked
from areal_jax.tasks.errors import TaskError
from areal_jax.tasks.fewest_ids import Measure, measure_of
from areal_jax.tasks.tokenizers import REPLACEMENT, plain_chat, require_may_fit
from areal_jax.tasks.tool_calls import Notation, notation_of
from areal_jax.types import Prompt

_SPECIAL = ("bos_token", "eos_token", "pad_token", "unk_token", "sep_token", "cls_token", "mask_token")
"""Keys in tokenizer_config.json of the special tokens that a chat template may use; there may be more in its
object extra_special_tokens."""

ADDITIONAL_TEMPLATES = "additional_chat_templates"
"""Folder of the chat templates beside chat_template.jinja, such as tool_use.jinja for chats with tools."""

_SPACING = ("lstrip", "rstrip", "single_word")
_TOKEN_OPTIONS = ("special", "normalized", *_SPACING)

SpecialText = Literal["text", "token"]

MARK = "\udc00"
"""Stands before the text of a special token that a message contains.

As a lone surrogate it is in no other text: `_encodable` replaces those.
"""

LONGEST_ARGUMENTS = 2**16
"""Maximum number of characters of a template's further arguments, as JSON: a template may loop over them."""

_MODEL_FILES = ("config.json", "generation_config.json")


@dataclass(frozen=True)
class HFTokenizer:
    """A Hugging Face tokenizer, stored as its files' contents so that it can be pickled and compared."""

    backend_json: str = field(repr=False)
    """The contents of tokenizer.json."""
    special: tuple[tuple[str, str], ...]
    """(name, text) of the special tokens that tokenizer_config.json names."""
    adds_bos: bool | None
    """Whether bos is put before text (add_bos_token); None: tokenizer.json's post-processor decides."""
    templates: tuple[tuple[str, str], ...] = field(repr=False)
    """(name, template) of each chat template; a template without a name gets the name `default`."""
    also_end: tuple[int, ...]
    """Ids that end a completion as eos_token does: eos_token_id of config.json and generation_config.json."""
    folder: str = field(compare=False)
    """The folder of the files, for error messages."""
    special_text: SpecialText = "text"
    """What the text of a special token in a message becomes, as model.special_text."""

    @staticmethod
    def from_folder(folder: Path, special_text: SpecialText = "text") -> HFTokenizer:
        """Reads tokenizer.json, tokenizer_config.json and the folder's chat templates; returns the tokenizer.

        The model's config.json and generation_config.json, if there, name further end tokens.

        Raises TaskError if tokenizer.json or tokenizer_config.json is missing, a file is broken, or
        tokenizer_config.json names no end token (eos_token), or a token with another id than tokenizer.json.
        """
        config = _read_config(folder / "tokenizer_config.json")
        extra = config.get("extra_special_tokens")
        named = {name: config.get(name) for name in _SPECIAL} | (extra if isinstance(extra, dict) else {})
        tokenizer = HFTokenizer(
            _with_added_tokens(folder, _read(folder / "tokenizer.json"), config.get("added_tokens_decoder")),
            tuple((name, text) for name, one in named.items() if (text := _token_text(one)) is not None),
            config.get("add_bos_token"),
            _read_templates(folder, config),
            tuple(dict.fromkeys(chain(*(_named_ends(folder / name) for name in _MODEL_FILES)))),
            str(folder),
            special_text,
        )
        _ = tokenizer.eos_id, tokenizer.pad_id  # a broken folder fails now, not at the first sample
        return tokenizer

    @cached_property
    def vocab_size(self) -> int:
        """The largest id plus 1. The model needs at least as many embeddings: see `require_fits`."""
        return max(self._known) + 1

    @cached_property
    def eos_id(self) -> int:
        return self._special_id("eos_token")

    @cached_property
    def end_ids(self) -> tuple[int, ...]:
        """The ids that end a completion, `eos_id` first."""
        return tuple(dict.fromkeys((self.eos_id, *self.also_end)))

    @cached_property
    def pad_id(self) -> int:
        """The id of the pad token or, if the tokenizer has none, of the end token (eos)."""
        return self._special_id("pad_token") if "pad_token" in dict(self.special) else self.eos_id

    @cached_property
    def notation(self) -> Notation:
        """How the chat template teaches the model to write tool calls."""
        return notation_of("".join(template for _, template in self.templates))

    def encode(self, text: str) -> list[int]:
        """Returns the ids of text; the text of a special token, such as <|im_end|>, is ordinary text."""
        return self._encode(self._plain, text)

    def encode_rendered(self, text: str) -> list[int]:
        """Returns the ids of a rendered prompt; the text of a special token becomes that token's id."""
        return self._encode(self._backend, text)

    def decode(self, tokens: Sequence[int]) -> str:
        """Returns the text of ids, without special tokens; each unknown id becomes the character U+FFFD."""
        runs = groupby((int(token) for token in tokens), lambda token: token in self._known)
        return "".join(
            self._backend.decode(list(run), skip_special_tokens=True)
            if is_known
            else REPLACEMENT * len(list(run))
            for is_known, run in runs
        )

    def token_bytes(self, token: int) -> bytes | None:
        """Returns the bytes that an id adds to a text; None if they depend on the ids around it.

        They do unless the tokenizer is byte-level, or the id is that of one byte (such as <0xF0>).
        """
        if not self._is_byte_level:
            return self._bytes.get(int(token))
        return self._bytes.get(int(token), REPLACEMENT.encode())

    def fewest(self, text: str) -> int:
        return 0 if self._measure is None else self._measure.fewest(text.replace(MARK, ""))

    def render(self, prompt: Prompt, most: int | None = None) -> list[int]:
        """Returns the ids of a prompt, which is given as text, as messages or as tokens.

        The chat template renders messages; without a template, messages are encoded as lines `role: content`.
        In messages the text of a special token is ordinary text, unless `special_text` is "token". Text is
        encoded with bos before it, if the tokenizer adds bos and the text does not begin with it; the text of
        a special token becomes that token's id, because the text may be a rendered prompt. Tokens are
        returned as they are. Raises TaskError if the template fails, the text cannot be encoded, or a token
        is unknown; TooLongError for a text that surely has more than `most` ids.
        """
        if prompt.text is not None:
            require_may_fit(self.fewest, prompt.text, most)
            tokens, prefix = self.encode_rendered(prompt.text), self._prefix
            return tokens if tokens[: len(prefix)] == prefix else [*prefix, *tokens]
        if prompt.messages is not None:
            text = self.chat_text(prompt.messages, prompt.tools)
            require_may_fit(self.fewest, text, most)
            return [*([] if self.templates else self._prefix), *self.encode_chat(text)]
        return self._checked(prompt.tokens or ())

    def chat_text(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] = (),
        arguments: Mapping[str, Any] | None = None,
        *,
        is_open: bool = True,
    ) -> str:
        """Returns the messages as the chat template renders them; see `Tokenizer.chat_text`.

        MARK stands before the text of each special token that the messages, tools or arguments contain, if
        that is to be ordinary text. `arguments` go to the template. Raises TaskError if the template raises
        an error, has no tools, or reads no argument of such a name.
        """
        if not self.templates:
            return plain_chat(messages, tools, arguments, is_open=is_open)
        self._require_read(arguments or {})
        ready, tools = self._marked(checked(messages)), self._marked(tools)
        if tools and not any("tools" in template for _, template in self.templates):
            raise TaskError(
                f"the chat template of {self.folder} leaves tools out, so the model would not know of them; "
                "describe the tools in a message, or replace chat_template.jinja"
            )
        try:
            return self._chat.apply_chat_template(
                ready,
                tools=tools or None,
                add_generation_prompt=is_open,
                tokenize=False,
                **{name: text for name, text in self.special if name not in _SPECIAL},
                **self._marked(arguments or {}),
            )
        except Exception as error:  # a template is the model's own program and may raise anything
            roles = ", ".join(message["role"] for message in ready) or "none"
            text = (
                f"the chat template of {self.folder} raised {type(error).__name__}: {error}; the messages' "
                f"roles were {roles}: change the messages, or replace chat_template.jinja"
            )
            raise TaskError(text.replace(MARK, "")) from error

    def _require_read(self, arguments: Mapping[str, Any]) -> None:
        """Raises TaskError for an argument that no template reads, or that would replace what renders it.

        Also if the arguments are too long.
        """
        if arguments and (length := len(json.dumps(arguments))) > LONGEST_ARGUMENTS:
            raise TaskError(
                f"the arguments of the chat template have {length} characters as JSON; give at most "
                f"{LONGEST_ARGUMENTS}"
            )
        own = inspect.signature(self._chat.apply_chat_template).parameters  # such as chat_template
        for name in arguments:
            read = rf"\b{re.escape(name)}\b"
            if name in own or not any(re.search(read, template) for _, template in self.templates):
                raise TaskError(
                    f"the chat template of {self.folder} takes no argument {name!r:.80}; leave it out, or "
                    "give one that the template reads"
                )

    def encode_chat(self, text: str) -> list[int]:
        """Returns the ids of a text of `chat_text`; special tokens are only in one that a template made."""
        if not self.templates:
            return self.encode(text)
        if MARK not in text:
            return self.encode_rendered(text)
        text = self._unmarked_special.sub(lambda found: self._names[found[0]], text).replace(MARK, "")
        tokens = self._encode(self._plain, text)
        if leaked := self._special_tokens.keys() & tokens:
            special = self._special_tokens[min(leaked)].content
            raise TaskError(
                f"the tokenizer of {self.folder} makes the special token {special!r} of ordinary text, so a "
                "message must not contain it; leave it out, or set model.special_text=token"
            )
        return [self._named.get(token, token) for token in tokens]

    # --- how ------------------------------------------------------------------------------------------

    @cached_property
    def _backend(self) -> Backend:
        return self._load()

    @cached_property
    def _plain(self) -> Backend:
        """A second backend (tokenizers.Tokenizer), which encodes the text of special tokens as ordinary text.

        One backend cannot encode both ways, because the choice is a setting of the backend, and threads that
        share a backend must not change its settings. This one knows the special tokens by other names
        (`_names`), as further tokens.
        """
        backend = self._load()
        backend.encode_special_tokens = True
        further = [
            AddedToken(
                self._names[one.content],
                special=False,
                normalized=False,
                **{name: getattr(one, name) for name in _SPACING},
            )
            for one in self._special_tokens.values()
        ]
        backend.add_tokens(further)
        return backend

    @cached_property
    def _special_tokens(self) -> dict[int, AddedToken]:
        every = self._backend.get_added_tokens_decoder()
        return {token: one for token, one in every.items() if one.special}

    @cached_property
    def _names(self) -> dict[str, str]:
        """Text of a special token -> its name in `_plain`, which is random so that no text contains it."""
        key = secrets.token_hex(16)
        return {one.content: f"<{key}:{token}>" for token, one in self._special_tokens.items()}

    @cached_property
    def _named(self) -> dict[int, int]:
        """Id of a name in `_plain` -> id of the special token."""
        named = self._plain.get_vocab(with_added_tokens=True)
        return {named[self._names[one.content]]: token for token, one in self._special_tokens.items()}

    @cached_property
    def _special(self) -> str:
        """A regular expression for the text of a special token, the longest first."""
        return "|".join(map(re.escape, sorted(self._names, key=len, reverse=True))) or "(?!)"

    @cached_property
    def _unmarked_special(self) -> re.Pattern[str]:
        return re.compile(f"(?<!{MARK})(?:{self._special})")

    def _marked(self, value: Any) -> Any:
        """Returns a value of JSON with MARK before the text of each special token, unless it is to be one."""
        if isinstance(value, str):
            clean = _encodable(value)
            if self.special_text == "token" or not re.search(self._special, clean):
                return clean
            # Also where one such text begins inside another.
            return re.sub(f"(?={self._special})", MARK, clean)
        if isinstance(value, Mapping):
            return {self._marked(name): self._marked(item) for name, item in value.items()}
        if isinstance(value, list | tuple):
            return [self._marked(item) for item in value]
        return value

    @cached_property
    def _measure(self) -> Measure | None:
        return measure_of(self._backend, self.backend_json)

    def _load(self) -> Backend:
        backend = _backend_of(self.folder, self.backend_json)
        backend.no_truncation()  # the file may hold settings of its author
        backend.no_padding()
        return backend

    @cached_property
    def _known(self) -> frozenset[int]:
        return frozenset(self._backend.get_vocab(with_added_tokens=True).values())

    @cached_property
    def _decoders(self) -> tuple[str, ...]:
        """The types of the decoders, in the order in which the tokenizer applies them."""
        one = json.loads(self.backend_json).get("decoder") or {}
        return tuple(each.get("type") for each in one.get("decoders", [one]))

    @cached_property
    def _is_byte_level(self) -> bool:
        return self._decoders == ("ByteLevel",)

    @cached_property
    def _bytes(self) -> dict[int, bytes]:
        """Id -> the bytes that it adds to a text whatever ids are around it."""
        if self._is_byte_level:
            return byte_table(self._backend)
        return byte_ids(self._backend) if "ByteFallback" in self._decoders else {}

    @cached_property
    def _prefix(self) -> list[int]:
        """Ids of the special tokens that the tokenizer puts before every text, such as bos; may be empty."""
        if self.adds_bos is not None:
            return [self._special_id("bos_token")] if self.adds_bos else []
        # The post-processor puts the same special tokens before every text: encoding a short one shows which.
        probe = self._backend.encode("a", add_special_tokens=True)
        added = takewhile(lambda pair: pair[1] == 1, zip(probe.ids, probe.special_tokens_mask, strict=True))
        return [token for token, _ in added]

    @cached_property
    def _chat(self) -> Any:
        """A transformers tokenizer without a vocabulary, which only renders messages to text."""
        from transformers import PreTrainedTokenizerFast  # takes half a second; not every run has messages

        return PreTrainedTokenizerFast(
            tokenizer_object=Backend(WordLevel({})),
            chat_template=dict(self.templates),
            **{name: text for name, text in self.special if name in _SPECIAL},
        )

    def __getstate__(self) -> dict[str, Any]:
        """Returns only the dataclass fields: an unpickled copy computes the cached properties again."""
        return {name: self.__dict__[name] for name in self.__dataclass_fields__}

    def _special_id(self, name: str) -> int:
        text = dict(self.special).get(name)
        where = f"{self.folder}/tokenizer_config.json"
        if text is None:
            raise TaskError(f"{where} has no {name}; add the one that the model's card names")
        token = self._backend.token_to_id(text)
        if token is None:
            raise TaskError(
                f"{where} has {name}={text!r}, which is not a token of {self.folder}/tokenizer.json; "
                "take both files from the same model"
            )
        return token

    def _encode(self, backend: Backend, text: str) -> list[int]:
        try:
            # `encode` would stop all threads for seconds where a text has megabytes: it holds Python's lock.
            return backend.encode_batch([_encodable(text)], add_special_tokens=False)[0].ids
        except Exception as error:  # tokenizers raises nothing narrower
            raise TaskError(
                f"the tokenizer of {self.folder} cannot encode {text[:40]!r}: {error}; its vocabulary "
                "has no unknown token: use another tokenizer, or change the text"
            ) from error

    def _checked(self, tokens: Sequence[int]) -> list[int]:
        checked = [int(token) for token in tokens]
        for token in checked:
            if token not in self._known:
                raise TaskError(
                    f"the prompt contains the id {token}, but the tokenizer of {self.folder} has no token "
                    f"with this id (its largest is {self.vocab_size - 1}); encode the prompt with this "
                    "tokenizer"
                )
        return checked


def _encodable(text: str) -> str:
    """Returns the text with `?` in place of lone surrogates, which tokenizers reject."""
    return text if text.isascii() else text.encode("utf-8", errors="replace").decode()


def require_fits(tokenizer: HFTokenizer, vocab_size: int) -> None:
    """Raises TaskError if the tokenizer has more ids than `vocab_size`, the model's number of embeddings."""
    if tokenizer.vocab_size > vocab_size:
        raise TaskError(
            f"the tokenizer of {tokenizer.folder} has ids up to {tokenizer.vocab_size - 1}, but the model "
            f"has only {vocab_size} embeddings; use the model's own tokenizer (model.source), or resize the "
            "embeddings"
        )


def _read(path: Path) -> str:
    try:
        return path.read_text("utf-8")
    except OSError as error:
        raise TaskError(
            f"{path} cannot be read: {error.strerror}; a tokenizer's folder must contain tokenizer.json and "
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
        raise TaskError(f"{path} is a {type(config).__name__}, but must be a JSON object; download it again")
    return config


def _named_ends(path: Path) -> list[int]:
    """Returns the end ids that a model's file names: eos_token_id, one id or a list; [] without the file."""
    given = _read_config(path).get("eos_token_id") if path.exists() else None
    ids = given if isinstance(given, list) else [] if given is None else [given]
    for one in ids:
        if isinstance(one, bool) or not isinstance(one, int) or one < 0:
            raise TaskError(f"{path}: eos_token_id={given!r:.80} must be a token id, or a list of token ids")
    return ids


def _backend_of(folder: Path | str, text: str) -> Backend:
    try:
        return Backend.from_str(text)
    except Exception as error:  # tokenizers raises nothing narrower
        raise TaskError(
            f"{folder}/tokenizer.json is not a tokenizer that the tokenizers package can read ({error}); "
            "download it again, or save it with transformers' save_pretrained"
        ) from error


def _with_added_tokens(folder: Path, text: str, added: Any) -> str:
    """Returns the contents of tokenizer.json with the tokens that only tokenizer_config.json has.

    `added`: the entry added_tokens_decoder, id -> token, or None. Raises TaskError if a token has another id
    than that in tokenizer.json, or would get one.
    """
    wanted = {
        int(number): AddedToken(**{key: one[key] for key in ("content", *_TOKEN_OPTIONS) if key in one})
        for number, one in (added.items() if isinstance(added, dict) else ())
        if number.isdecimal() and isinstance(one, dict) and isinstance(one.get("content"), str)
    }
    backend = _backend_of(folder, text) if wanted else None
    if backend is None:
        return text
    missing = [one for _, one in sorted(wanted.items()) if backend.token_to_id(one.content) is None]
    backend.add_tokens(missing)
    for number, one in wanted.items():
        if (found := backend.token_to_id(one.content)) != number:
            raise TaskError(
                f"{folder}/tokenizer_config.json has the token {one.content!r} as id {number}, but with "
                f"tokenizer.json it has id {found}; take both files from the same model"
            )
    return backend.to_str() if missing else text


def _token_text(value: Any) -> str | None:
    """Returns the text of a special token; `value` is the token's entry in tokenizer_config.json.

    The entry is the text itself, or an object with the text as `content`; for any other entry, returns None.
    """
    text = value.get("content") if isinstance(value, dict) else value
    return text if isinstance(text, str) else None


def _read_templates(folder: Path, config: Mapping[str, Any]) -> tuple[tuple[str, str], ...]:
    """Returns (name, template) of every chat template; an empty tuple if there is no template.

    The templates are in chat_template.jinja and in additional_chat_templates/NAME.jinja or, without the first
    file, in the entry chat_template of `config` (tokenizer_config.json), which is one template, or a list of
    objects with name and template.
    """
    file = folder / "chat_template.jinja"
    if file.exists():
        others = sorted((folder / ADDITIONAL_TEMPLATES).glob("*.jinja"))
        return (("default", _read(file)), *((other.stem, _read(other)) for other in others))
    given = config.get("chat_template")
    if given is None:
        return ()
    if isinstance(given, str):
        return (("default", given),)
    try:
        return tuple((str(entry["name"]), str(entry["template"])) for entry in given)
    except (TypeError, KeyError) as error:
        raise TaskError(
            f"{folder}/tokenizer_config.json: chat_template is {given!r:.80}, but must be a template, or a "
            "list of objects with name and template"
        ) from error
