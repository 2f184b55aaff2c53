"""A lower bound of the number of ids of a text, found without encoding it.

Encoding takes seconds for each megabyte. A text that has too many ids for certain is refused at once instead.
"""

from __future__ import annotations

import json
import unicodedata
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from tokenizers import Tokenizer as Backend

from areal_jax.tasks.byte_level import byte_letters

_KEEPS_ALL = frozenset({"ByteLevel", "Digits", "Metaspace", "Punctuation", "Split"})
"""Pre-tokenizers that only divide a text, unless their behavior is Removed."""


class Measure(NamedTuple):
    """How much of a text one id stands for, at most."""

    longest: int
    lost: bytes | None
    """Bytes that have no id and are left out, if `longest` counts UTF-8 bytes; None: it counts characters."""
    is_composed: bool
    """Whether the tokenizer composes characters (NFC), which makes a text shorter."""

    def fewest(self, text: str) -> int:
        """Returns a lower bound of the number of token ids into which the text is encoded."""
        if self.is_composed and not text.isascii():
            text = unicodedata.normalize("NFC", text)
        counted = text
        if self.lost is not None:
            counted = text.encode("utf-8", errors="replace").translate(None, self.lost)
        return -(-len(counted) // self.longest)


def measure_of(backend: Backend, backend_json: str) -> Measure | None:
    """Returns the measure of a BPE tokenizer that leaves out nothing but bytes without an id; else None."""
    parts = json.loads(backend_json)
    model, vocab = parts["model"], backend.get_vocab(with_added_tokens=False)
    added = [one.content for one in backend.get_added_tokens_decoder().values()]
    normalizers = list(_each(parts.get("normalizer"), "normalizers"))
    dividers = list(_each(parts.get("pre_tokenizer"), "pretokenizers"))
    leaves_out = (
        model.get("type") != "BPE"
        or any(one["lstrip"] or one["rstrip"] for one in parts.get("added_tokens") or ())
        or any(model.get(name) for name in ("dropout", "continuing_subword_prefix", "end_of_word_suffix"))
        or not all(one["type"] in _KEEPS_ALL and one.get("behavior") != "Removed" for one in dividers)
        or not all(map(_keeps_all, normalizers))
    )
    if leaves_out:
        return None
    is_composed = any(one["type"] == "NFC" for one in normalizers)
    if any(one["type"] == "ByteLevel" for one in dividers):
        # Each letter of such a vocabulary is one byte; SmolLM2, for example, lacks some.
        lengths = [*map(len, vocab), *(len(text.encode()) for text in added)]
        lost = bytes(byte for letter, byte in byte_letters().items() if letter not in vocab)
        return Measure(max(lengths), lost, is_composed)
    if model.get("byte_fallback") and all(f"<0x{byte:02X}>" in vocab for byte in range(256)):
        return Measure(max(map(len, [*vocab, *added])), None, is_composed)
    return None


def _each(part: Mapping[str, Any] | None, name: str) -> Iterable[Mapping[str, Any]]:
    """Yields a part of a tokenizer or, if it is a sequence, those of which it consists."""
    if part is None:
        return
    if part["type"] != "Sequence":
        yield part
        return
    for one in part[name]:
        yield from _each(one, name)


def _keeps_all(normalizer: Mapping[str, Any]) -> bool:
    """Whether the normalizer does not shorten a text, but for NFC."""
    if normalizer["type"] == "Replace":
        old = normalizer["pattern"].get("String")
        return old is not None and len(old) <= len(normalizer["content"])
    return normalizer["type"] in ("NFC", "Prepend")
