from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal_jax.tasks.errors import TaskError
from areal_jax.tasks.tokenizers import ByteTokenizer, CharTokenizer
from areal_jax.types import Prompt

CHARS = CharTokenizer("abc>")
BYTES = ByteTokenizer()


@given(st.text(alphabet="abc>"))
def test_characters_survive_with_special_tokens_dropped(text: str):
    tokens = CHARS.encode(text)
    assert CHARS.decode([CHARS.pad_id, *tokens, CHARS.eos_id]) == text
    assert all(2 <= token < CHARS.vocab_size for token in tokens)


@given(st.text())
def test_any_text_survives_as_bytes(text: str):
    clean = text.encode("utf-8", errors="replace").decode()
    assert BYTES.decode([BYTES.bos_id, *BYTES.encode(text), BYTES.eos_id]) == clean


@given(st.lists(st.integers(-(2**31), 2**31)))
def test_decoding_never_raises_whatever_a_policy_samples(tokens: list[int]):
    for tokenizer in (CHARS, BYTES):
        assert isinstance(tokenizer.decode(tokens), str)


def test_ids_that_are_no_text_become_replacement_characters():
    assert CHARS.decode([2, 99, -1, 3]) == "a��b"
    assert BYTES.decode([97, 300, 98, 0xC3]) == "a�b�"


def test_sizes_and_special_ids_are_distinct_and_in_range():
    assert (CHARS.vocab_size, CHARS.pad_id, CHARS.eos_id) == (6, 0, 1)
    assert (BYTES.vocab_size, BYTES.bos_id, BYTES.eos_id) == (258, 256, 257)


def test_a_prompt_is_rendered_as_text_chat_or_the_exact_tokens():
    chat = Prompt(messages=[{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}])
    assert CHARS.render(Prompt("ab>")) == [2, 3, 5]
    assert BYTES.render(Prompt("a")) == [256, 97]
    assert BYTES.decode(BYTES.render(chat)) == "user: a\nassistant: b\nassistant: "
    assert BYTES.render(chat)[0] == 256
    assert BYTES.render(Prompt(tokens=(7, 257))) == [7, 257]


def test_what_cannot_be_encoded_is_named():
    with pytest.raises(TaskError, match=r"character 'z' .*model\.tokenizer=byte"):
        CHARS.encode("az")
    with pytest.raises(TaskError, match=r"token 6 is outside the vocabulary 0\.\.5"):
        CHARS.render(Prompt(tokens=(1, 6)))
    with pytest.raises(TaskError, match="token -1"):
        BYTES.render(Prompt(tokens=(-1,)))
    with pytest.raises(TaskError, match="lacks role or content"):
        BYTES.render(Prompt(messages=[{"role": "user"}]))
    with pytest.raises(TaskError, match="repeats a character"):
        CharTokenizer("aa")
