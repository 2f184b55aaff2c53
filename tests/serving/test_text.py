"""Text in pieces: whatever way the tokens come, the pieces make up the text, and no character is torn."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal_jax.serving.text import TextStream
from areal_jax.tasks.tokenizers import ByteTokenizer


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
