"""Text in pieces: however it is cut, the parts together are those of the complete text."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from areal_jax.serving.text_parts import BeforeStop, MessageParts, held
from areal_jax.tasks.tool_calls import parsed_answer

ADD = '{"name": "add", "arguments": {"a": 1}}'
PIECES = st.lists(
    st.sampled_from(
        [
            "<think>",
            "</think>",
            "<tool_call>",
            "</tool_call>",
            ADD,
            ADD.replace("arguments", "parameters"),
            "\n",
            "<",
            "a b",
            "{",
            "<|python_tag|>",
            " ",
        ]
    ),
    max_size=8,
)


def cut(text: str, places: list[int]) -> list[str]:
    edges = sorted({place % (len(text) + 1) for place in places} | {0, len(text)})
    return [text[start:end] for start, end in pairwise(edges)]


@given(
    PIECES.map("".join),
    st.lists(st.integers(0, 300)),
    st.sampled_from(["hermes", "llama", "none"]),
    st.booleans(),
)
def test_a_message_in_pieces_is_the_message(text, places, notation, is_in_thought):
    parts = MessageParts(notation, is_in_thought)
    found = [parts.push(piece) for piece in cut(text, places)]
    rest, answer = parts.finish()
    assert answer == parsed_answer(text, notation, is_in_thought)
    assert "".join(part.content for part in [*found, rest]) == answer.content
    assert "".join(part.reasoning for part in [*found, rest]) == answer.reasoning


def test_content_is_passed_on_at_once_and_what_may_be_a_call_waits():
    parts = MessageParts("hermes", False)
    assert parts.push("I add <").content == "I add "
    assert parts.push("b> <tool").content == "<b> "
    assert parts.push("_call>").content == ""
    thoughts = MessageParts("none", True)
    assert [thoughts.push(piece).reasoning for piece in ("hm", " m</th")] == ["hm", " m"]
    assert thoughts.push("ink>\n7").content == "7"


@given(
    st.text("ab", max_size=12),
    st.lists(st.text("ab", min_size=1, max_size=3), max_size=3),
    st.lists(st.integers(0, 12)),
)
def test_a_text_ends_before_its_first_stop_text(text, stops, places):
    before = BeforeStop(stops)
    pieces = cut(text, places)
    found = "".join(before.push(piece) for piece in pieces) + before.push("", is_last=True)
    ends = [place for stop in stops if (place := text.find(stop)) >= 0]
    # A stop text that begins first may be complete after another one, which then has ended the text.
    first_seen = min((text.find(stop) + len(stop) for stop in stops if stop in text), default=None)
    if first_seen is None:
        assert found == text
    else:
        assert min(ends) <= len(found) < first_seen and text.startswith(found)


def test_the_beginning_of_a_mark_is_held():
    assert [held(text, ["abc", "bd"]) for text in ("xab", "xb", "x", "abx", "")] == [2, 1, 0, 0, 0]
