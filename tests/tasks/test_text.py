"""The text of each token: joined it is the text of all, whatever a policy samples."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal_jax.tasks.hf_tokenizer import HFTokenizer
from areal_jax.tasks.text import token_pieces
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
