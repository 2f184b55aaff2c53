from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal_jax.tasks.errors import TaskError
from areal_jax.tasks.tokenizers import ByteTokenizer, CharTokenizer
from areal_jax.types import Prompt

CHARS = CharTokenizer("abc>")
BYTES = ByteTokenizer()
SYMBOLS = CharTokenizer("abt<>", ["<t>", "ab", "<t", "</t>"])


@given(st.text(alphabet="abc>"))
def test_characters_survive_with_special_tokens_dropped(text: str):
    tokens = CHARS.encode(text)
    assert CHARS.decode([CHARS.pad_id, *tokens, CHARS.eos_id]) == text
    assert all(2 <= token < CHARS.vocab_size for token in tokens)


@given(st.lists(st.sampled_from(["a", "b", "t", "<", ">", "<t>", "ab", "<t", "</t>"])))
def test_text_with_symbols_survives_in_no_more_ids_than_parts(parts: list[str]):
    tokens = SYMBOLS.encode("".join(parts))
    assert SYMBOLS.decode(tokens) == "".join(parts)
    assert len(tokens) <= len(parts)


def test_symbols_get_the_ids_after_the_alphabet_and_the_longest_is_taken_first():
    assert SYMBOLS.vocab_size == 2 + 5 + 4
    assert SYMBOLS.encode("<t>") == [7]
    assert SYMBOLS.encode("<tab</t>b<") == [9, 8, 10, 3, 5]
    assert SYMBOLS.decode([0, 7, 8, 2, 10, 11, 1]) == "<t>aba</t>\N{REPLACEMENT CHARACTER}"
    assert SYMBOLS.token_bytes(10) == b"</t>"
    assert SYMBOLS.render(Prompt(tokens=(10,))) == [10]
    plain = CharTokenizer("abt<>")
    assert SYMBOLS.alphabet == plain.alphabet
    assert SYMBOLS.encode("bat>") == plain.encode("bat>") == [3, 2, 4, 6]


def test_a_symbol_may_be_of_characters_outside_the_alphabet():
    tags = CharTokenizer("ab", ("<think>",))
    assert tags.encode("a<think>b") == [2, 4, 3]
    with pytest.raises(TaskError, match="character '<'"):
        tags.encode("a<thin>")


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
    for symbols in (["ab", "ab"], ["a"], [""]):
        with pytest.raises(TaskError, match=r"the symbols .* two or more characters"):
            CharTokenizer("ab", symbols)
