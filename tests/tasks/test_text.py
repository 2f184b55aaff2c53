"""Text in pieces: however the tokens come, joined they are the text, and no character is torn."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal_jax.tasks.hf_tokenizer import HFTokenizer
from areal_jax.tasks.text import TextStream, token_pieces
from areal_jax.tasks.tokenizers import ByteTokenizer, CharTokenizer
from tests.tasks.test_hf_tokenizer import END, VOCAB, write


@pytest.fixture(scope="module")
def byte_level(tmp_path_factory: pytest.TempPathFactory) -> HFTokenizer:
    return HFTokenizer.from_folder(write(tmp_path_factory.mktemp("tokenizer")))


def test_each_token_of_a_char_tokenizer_adds_its_character():
    tokenizer = CharTokenizer("abc")
    assert token_pieces([2, 4, tokenizer.eos_id, 99], tokenizer) == ["a", "c", "", "\ufffd"]


def test_the_last_byte_of_a_character_adds_it():
    snowman = list("\N{SNOWMAN}".encode())
    assert token_pieces([97, *snowman, 98], ByteTokenizer()) == ["a", "", "", "\N{SNOWMAN}", "b"]
    assert token_pieces([97, *snowman[:2]], ByteTokenizer()) == ["a", "", "\ufffd"]


def test_a_byte_level_tokenizers_tokens_add_their_merged_bytes(byte_level: HFTokenizer):
    tokens = byte_level.encode("hello \N{SNOWMAN}")
    assert token_pieces([*tokens, END], byte_level) == ["hello", " ", "", "", "\N{SNOWMAN}", ""]


@given(st.lists(st.integers(0, VOCAB + 3)))
def test_joined_pieces_are_the_decoded_text(byte_level: HFTokenizer, tokens: list[int]):
    pieces = token_pieces(tokens, byte_level)
    assert len(pieces) == len(tokens)
    assert "".join(pieces) == byte_level.decode(tokens)


@given(st.lists(st.integers(0, 259)))
def test_joined_pieces_of_bytes_are_the_decoded_text(tokens: list[int]):
    assert "".join(token_pieces(tokens, ByteTokenizer())) == ByteTokenizer().decode(tokens)


def test_a_tokenizer_that_joins_neighbours_decodes_each_token_with_those_before():
    class Spaced(CharTokenizer):
        """Puts a space between words, as SentencePiece does: an id alone does not say its text."""

        def decode(self, tokens):
            return " ".join(CharTokenizer.decode(self, [token]) for token in tokens)

        def token_bytes(self, token):
            return None

    assert token_pieces([2, 3, 2], Spaced("ab")) == ["a", " b", " a"]


# --- as the tokens arrive -----------------------------------------------------------------------------------


def in_pieces(tokens: list[int], sizes: list[int]) -> list[str]:
    stream, pieces = TextStream(ByteTokenizer()), []
    for size in [*sizes, len(tokens)]:
        pieces.append(stream.push(tokens[:size]))
        tokens = tokens[size:]
    return [*pieces, stream.finish()]


@given(st.text(st.characters(exclude_categories=["Cs"])), st.lists(st.integers(0, 5), max_size=20))
def test_the_pieces_make_up_the_text(text, sizes):
    assert "".join(in_pieces(list(text.encode()), sizes)) == text


@given(st.lists(st.integers(0, 257), max_size=40), st.lists(st.integers(0, 5), max_size=10))
def test_any_ids_at_all_have_a_text_that_ends(tokens, sizes):
    pieces = in_pieces(tokens, sizes)
    if bytes(token for token in tokens if token < 256).isascii():
        assert "".join(pieces) == ByteTokenizer().decode(tokens)
    stream = TextStream(ByteTokenizer())
    stream.push(tokens)
    stream.finish()
    assert stream.push(list(b"ok")).endswith("ok")


@pytest.mark.parametrize("size", [1, 2, 3])
def test_a_character_comes_whole_with_its_last_byte(size):
    pieces = in_pieces(list("aé€😀".encode()), [size] * 12)
    assert "".join(pieces) == "aé€😀"
    assert not any("\N{REPLACEMENT CHARACTER}" in piece for piece in pieces)


def test_a_character_that_never_becomes_whole_is_one_replacement():
    stream = TextStream(ByteTokenizer())
    assert stream.push(list("€".encode())[:2]) == ""
    assert stream.finish() == "\N{REPLACEMENT CHARACTER}"


def test_an_eos_adds_nothing_and_flushes_nothing():
    stream = TextStream(ByteTokenizer())
    assert stream.push([104, 257]) == "h"
    assert stream.finish() == ""
