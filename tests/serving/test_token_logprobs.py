"""Log-probs in OpenAI's form: the bytes of all tokens are the text, whatever tokens a character has."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import decoders
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel

from areal_jax.models.io.gguf_tokenizer import write_tokenizer
from areal_jax.serving.text_parts import LogProbs
from areal_jax.tasks.hf_tokenizer import HFTokenizer
from areal_jax.tasks.text import TokenBytes
from areal_jax.tasks.tokenizers import ByteTokenizer, CharTokenizer, Tokenizer
from tests.tasks.test_hf_tokenizer import write

PARROT = "\N{PARROT}"  # f0 9f a6 9c


def sentencepiece(folder: Path) -> HFTokenizer:
    """Words with a mark for the space before them, and an id for each byte of other characters."""
    words = ["</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *"▁Hi,", "▁H", "▁Hi"]
    vocab = {word: place for place, word in enumerate(words)}
    backend = Backend(BPE(vocab, [("▁", "H"), ("▁H", "i")], byte_fallback=True))
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.add_special_tokens(["</s>"])
    backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "</s>"}))
    return HFTokenizer.from_folder(folder)


def gguf(folder: Path) -> HFTokenizer:
    words = ["<|endoftext|>", *sorted(ByteLevel.alphabet()), "Hi"]
    fields = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": words,
        "tokenizer.ggml.token_type": [3, *[1] * (len(words) - 1)],
        "tokenizer.ggml.merges": ["H i"],
        "tokenizer.ggml.eos_token_id": 0,
    }
    write_tokenizer(folder, lambda key, *default: fields.get(key, *default))
    return HFTokenizer.from_folder(folder)


def hugging_face(folder: Path) -> HFTokenizer:
    return HFTokenizer.from_folder(write(folder))


MADE: dict[str, tuple[Callable[[Path], Tokenizer], str, list[bytes]]] = {
    "hf": (hugging_face, f"hello{PARROT}\xe9", [b"hello"]),
    "sentencepiece": (sentencepiece, f"▁Hi,▁Hi{PARROT}\xe9", [b"Hi", b",", b" Hi"]),
    "gguf": (gguf, f"Hi{PARROT}\xe9", [b"Hi"]),
    "byte": (lambda _: ByteTokenizer(), f"Hi{PARROT}\xe9", [b"H", b"i"]),
}
"""A tokenizer, a text, and the bytes of the text's first tokens; the others have one byte each."""


@pytest.mark.parametrize("name", MADE)
def test_joined_bytes_are_the_text_and_each_token_has_its_own(tmp_path: Path, name: str):
    make, text, first = MADE[name]
    tokenizer = make(tmp_path)
    tokens = [*tokenizer.encode(text), tokenizer.eos_id]
    given = LogProbs(tokenizer).chat(tokens, [-0.5] * len(tokens))["content"]
    singles = [bytes([byte]) for byte in f"{PARROT}\xe9".encode()]
    assert [bytes(one["bytes"]) for one in given] == [*first, *singles, b""]
    assert b"".join(bytes(one["bytes"]) for one in given).decode() == tokenizer.decode(tokens)
    texts = [r"bytes:\xf0", r"bytes:\x9f", r"bytes:\xa6", r"bytes:\x9c", r"bytes:\xc3", r"bytes:\xa9"]
    assert [one["token"] for one in given] == [*(own.decode() for own in first), *texts, ""]
    assert {one["logprob"] for one in given} == {-0.5}


def test_a_token_of_text_and_a_part_of_a_character_shows_both():
    class Joined(CharTokenizer):
        def token_bytes(self, token):
            return [b" \xf0\x9f", b"\xa6\x9c!"][token]

    given = LogProbs(Joined("a")).chat([0, 1], [-1.0, -2.0])["content"]
    assert [one["token"] for one in given] == [r"bytes: \xf0\x9f", r"bytes:\xa6\x9c!"]
    given = LogProbs(Joined("a")).completion([0, 1, 0], [-1.0, -2.0, -3.0])
    assert given["text_offset"] == [0, 1, 3]
    assert given["token_logprobs"] == [-1.0, -2.0, -3.0] and given["top_logprobs"] is None


def test_each_token_of_a_completion_has_the_offset_at_which_its_text_begins():
    made = LogProbs(ByteTokenizer())
    first, second = list(f"a{PARROT}".encode()), list(b"bc")
    assert made.completion(first, [-1.0] * 5)["text_offset"] == [0, 1, 1, 1, 1]
    assert made.completion(second, [-1.0] * 2)["text_offset"] == [2, 3], "goes on where it was"


def test_bytes_that_are_no_character_count_as_the_replacement_characters_that_they_become():
    tokens = [0xF0, 0x9F, 55, 0xFF, 0xFF, 0xC3, 0xC3, 0xA9, 56, 0xEF, 0xBF, 0xBD, 57]
    text = ByteTokenizer().decode(tokens)
    assert text == "\ufffd7\ufffd\ufffd\ufffd\xe98\ufffd9"
    offsets = LogProbs(ByteTokenizer()).completion(tokens, [-1.0] * len(tokens))["text_offset"]
    assert offsets == [0, 0, 1, 2, 3, 4, 5, 5, 6, 7, 7, 7, 8]


def test_a_tokenizer_that_joins_neighbours_decodes_each_token_with_those_before():
    class Spaced(CharTokenizer):
        def decode(self, tokens):
            return " ".join(CharTokenizer.decode(self, [token]) for token in tokens)

        def token_bytes(self, token):
            return None

    made = TokenBytes(Spaced("ab"))
    assert [made.push(token) for token in (2, 3, 2)] == [b"a", b" b", b" a"]
