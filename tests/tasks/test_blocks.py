"""The parser against references that read the whole text: regular expressions and character offsets."""

from __future__ import annotations

import re
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal_jax.tasks.blocks import (
    ANSWER,
    TEMPLATES,
    THINK,
    BlockParser,
    Closed,
    Opened,
    Parsed,
    ParsedBlock,
    parse,
    render,
    ttft_share,
)
from areal_jax.tasks.errors import TaskError

TAGS = ("<think>", "</think>", "<answer>", "</answer>")
CONTENT = r"(?:(?!</?(?:think|answer)>).)*"
PAIR = rf"\s*<think>{CONTENT}</think>\s*<answer>(?!\s*</answer>){CONTENT}</answer>"
ANSWERS = rf"(?:\s*<answer>(?!\s*</answer>){CONTENT}</answer>)+"
VALID = {
    "interleave": rf"(?:{PAIR})+\s*",
    "think_answer": rf"{PAIR}\s*",
    "delayed": rf"\s*<think>{CONTENT}</think>{ANSWERS}\s*",
}
"""What a complete response looks like in each template."""

ORDERS = {"interleave": "(ta)*t?", "think_answer": "t?|ta", "delayed": "t?|ta*"}
"""The orders of complete blocks, t and a, that may begin a response of each template."""

junk = st.sampled_from(
    [*TAGS, "<thinking>", "<", "</", "<th", "ink>", "</ans", "wer>", ">", "a", "3", " ", "\n"]
)
inner = st.lists(st.sampled_from(["<b>", "<", "</", "a", "12", " ", "\n", "é", "<thinking>", ">"])).map(
    "".join
)
shown = inner.filter(str.strip)
space = st.sampled_from(["", " ", "\n\n"])
block = st.one_of(inner.map(lambda t: f"<think>{t}</think>"), shown.map(lambda t: f"<answer>{t}</answer>"))
spaced = st.lists(st.one_of(block, space, junk), max_size=8).map("".join)
pair = st.tuples(inner, space, shown, space).map(
    lambda p: f"<think>{p[0]}</think>{p[1]}<answer>{p[2]}</answer>{p[3]}"
)
texts = st.one_of(
    st.lists(junk, max_size=14).map("".join),
    spaced,
    st.lists(pair, min_size=1, max_size=3).map("".join),
    st.tuples(st.lists(pair, max_size=2).map("".join), junk, spaced).map("".join),
)


@st.composite
def cut_texts(draw: st.DrawFn) -> list[str]:
    """A response's text, cut into pieces of any length, some of them empty."""
    text = draw(texts)
    cuts = sorted(draw(st.lists(st.integers(0, len(text)), max_size=12)))
    return [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]


def leading_blocks(text: str, template: str) -> tuple[list[re.Match[str]], int]:
    """The blocks that begin the text in an order of the template, and the offset at which they end."""
    found, at = [], 0
    while match := re.compile(rf"\s*<(think|answer)>({CONTENT})</\1>", re.DOTALL).match(text, at):
        order = "".join(one[1][0] for one in (*found, match))
        if not re.fullmatch(ORDERS[template], order) or (match[1] == ANSWER and not match[2].strip()):
            break
        found.append(match)
        at = match.end()
    return found, at


def as_blocks(matches: list[re.Match[str]], pieces: list[str]) -> list[ParsedBlock]:
    """The blocks of `matches`, with the tokens that hold the characters at their offsets."""
    token = [number for number, piece in enumerate(pieces) for _ in piece]
    blocks = []
    for match in matches:
        tag, closing = match.start(2) - 1, match.end(2)
        content = next((i for i in range(*match.span(2)) if not match.string[i].isspace()), closing)
        blocks.append(ParsedBlock(match[1], match[2], token[tag], token[content], token[match.end() - 1]))
    return blocks


def visible(text: str) -> str:
    """The text without an end that may still become a tag."""
    lengths = (n for tag in TAGS for n in range(1, len(tag)) if text.endswith(tag[:n]))
    return text[: len(text) - max(lengths, default=0)]


@given(cut_texts(), st.sampled_from(TEMPLATES))
def test_any_cut_of_any_text_gives_the_blocks_of_a_regular_expression(pieces: list[str], template: str):
    text = "".join(pieces)
    parsed = parse(pieces, template)
    assert parsed.is_valid == bool(re.fullmatch(VALID[template], text, re.DOTALL))
    assert list(parsed.blocks) == as_blocks(leading_blocks(text, template)[0], pieces)
    assert parsed.error == parse([text], template).error == parse(text, template).error
    assert parsed.answers == tuple(one for one in parsed.blocks if one.kind == ANSWER)
    assert parsed.final == (parsed.answers[-1] if parsed.is_valid else None)


@given(cut_texts(), st.sampled_from(TEMPLATES))
def test_events_come_with_the_first_token_that_decides_them(pieces: list[str], template: str):
    parser = BlockParser(template)
    opened: list[tuple[str, int]] = []
    closed: list[ParsedBlock] = []
    for number, piece in enumerate(pieces):
        for event in parser.feed(piece):
            if isinstance(event, Opened):
                opened.append((event.kind, event.token))
            else:
                assert isinstance(event, Closed)
                closed.append(event.block)
        text = "".join(pieces[: number + 1])
        found, end = leading_blocks(text, template)
        assert closed == as_blocks(found, pieces)
        wanted = [(one.kind, one.first) for one in closed if one.text.strip()]
        rest = re.compile(rf"\s*<(think|answer)>\s*({CONTENT})", re.DOTALL).match(visible(text), end)
        order = "".join(one[1][0] for one in (*found, *([rest] if rest else [])))
        if rest and rest[2] and re.fullmatch(ORDERS[template], order):
            token = [i for i, each in enumerate(pieces) for _ in each]
            wanted.append((rest[1], token[rest.start(2)]))
        assert opened == wanted
    assert list(parser.finish().blocks) == closed


@given(st.lists(st.tuples(inner, shown), min_size=1, max_size=4))
def test_rendered_blocks_are_parsed_again(pairs: list[tuple[str, str]]):
    blocks = [one for thought, answer in pairs for one in ((THINK, thought), (ANSWER, answer))]
    parsed = parse([render(blocks)])
    assert parsed.is_valid
    assert [(one.kind, one.text) for one in parsed.blocks] == blocks


@given(texts, st.sampled_from(TEMPLATES))
def test_a_valid_text_is_rendered_without_the_whitespace_between_its_blocks(text: str, template: str):
    parsed = parse([text], template)
    if parsed.is_valid:
        bare = re.sub(r"(</(?:think|answer)>|^)\s+(?=<(?:think|answer)>|$)", r"\1", text)
        # Whitespace before a block ends at its opening tag, so none of a block's content is touched.
        assert render(parsed.blocks) == bare


REJECTED = [
    ("", "the response is empty"),
    (" \n", "the response is empty"),
    ("<think>a</think>", "the response has no final answer"),
    ("<think>a", "block 1, <think>, is not closed"),
    ("<think>a</think><answer>b", "block 2, <answer>, is not closed"),
    ("<think>a</think><answer>b</answer", "block 2, <answer>, is not closed"),
    ("<think>a<think>b</think></think><answer>c</answer>", "block 1, <think>, contains the tag <think>"),
    ("<think>a<answer>b</answer></think>", "block 1, <think>, contains the tag <answer>"),
    ("<think>a</answer>", "block 1, <think>, contains the tag </answer>"),
    ("</think>", "the tag </think> after block 0 closes nothing: no block is open"),
    ("<think>a</think></think>", "the tag </think> after block 1 closes nothing: no block is open"),
    ("so <think>a</think><answer>b</answer>", "there is text outside of blocks, after block 0"),
    ("<think>a</think>so<answer>b</answer>", "there is text outside of blocks, after block 1"),
    ("<think>a</think><answer>b</answer>.", "there is text outside of blocks, after block 2"),
    ("<think>a</think><answer>b</answer> <thi", "there is text outside of blocks, after block 2"),
    ("<think>a</think><answer>b</answer><thinking>", "there is text outside of blocks, after block 2"),
    ("<think>a</think><answer></answer>", "block 2, <answer>, is blank"),
    ("<think>a</think><answer> \n</answer>", "block 2, <answer>, is blank"),
    ("<answer>a</answer>", "block 1 is <answer>, but the template {} requires <think> there"),
    ("<Think>a</Think><answer>b</answer>", "there is text outside of blocks, after block 0"),
]


@pytest.mark.parametrize("template", TEMPLATES)
@pytest.mark.parametrize(("text", "error"), REJECTED)
def test_every_template_rejects_a_broken_response(text: str, error: str, template: str):
    parsed = parse([text], template)
    assert (parsed.error, parsed.is_valid) == (error.format(template), False)
    assert parsed.final is None


ONE = "<think>t</think><answer>a</answer>"
ACCEPTED = {
    ONE: {"interleave", "think_answer", "delayed"},
    f" {ONE}\n": {"interleave", "think_answer", "delayed"},
    "<think></think><answer>a</answer>": {"interleave", "think_answer", "delayed"},
    "<think>1 < 2</b></think><answer><thinking></answer>": {"interleave", "think_answer", "delayed"},
    ONE + ONE: {"interleave"},
    f"{ONE}\n{ONE}\n{ONE}": {"interleave"},
    f"{ONE}<answer>b</answer>": {"delayed"},
    f"{ONE}<answer>b</answer><answer>c</answer>": {"delayed"},
    f"<think>s</think>{ONE}": set(),
    f"{ONE}<think>u</think>": set(),
    f"{ONE}<answer>b</answer>{ONE}": set(),
}


@pytest.mark.parametrize("text", ACCEPTED)
def test_each_template_accepts_its_own_order(text: str):
    assert {name for name in TEMPLATES if parse([text], name).is_valid} == ACCEPTED[text]


def test_a_template_says_what_it_wanted():
    assert parse([ONE + ONE], "think_answer").error == (
        "block 3 is <think>, but the template think_answer ends with block 2"
    )
    assert parse([ONE + ONE], "delayed").error == (
        "block 3 is <think>, but the template delayed requires <answer> there"
    )
    with pytest.raises(TaskError, match=r"template='interleaved' is unknown; use one of interleave, think_a"):
        parse([], "interleaved")


def test_tokens_are_those_that_hold_the_characters():
    """Token:  0      1      2     3    4        5      6     7     8   9         10     11  12."""
    pieces = ["<thi", "nk>", " \n", "go", "</", "think><", "answer", "> ", "", "4", "2</answ", "er", ">"]
    parsed = parse(pieces)
    assert parsed.blocks == (ParsedBlock(THINK, " \ngo", 1, 3, 5), ParsedBlock(ANSWER, " 42", 7, 9, 12))
    assert ttft_share(parsed, len(pieces)) == 9 / 13


def test_content_that_begins_like_a_tag_counts_from_its_first_token():
    """The "<" of token 1 might have become </answer>; token 3 shows that it is content."""
    parser = BlockParser()
    assert parser.feed("<think></think><answer>") == (Closed(ParsedBlock(THINK, "", 0, 0, 0)),)
    assert parser.feed("<") == parser.feed("/an") == ()
    assert parser.feed("y") == (Opened(ANSWER, 1),)
    assert parser.feed("</answer>") == (Closed(ParsedBlock(ANSWER, "</any", 0, 1, 4)),)
    assert parser.finish().is_valid


def test_a_blank_thought_counts_from_its_closing_tag():
    parser = BlockParser()
    events = [parser.feed(piece) for piece in ("<think>", " ", "<", "/think>")]
    assert events == [(), (), (), (Closed(ParsedBlock(THINK, " ", 0, 2, 3)),)]


def test_no_event_comes_after_an_error():
    parser = BlockParser()
    first = parser.feed("<think>a</think>no<answer>b</answer>")
    assert [type(event) for event in first] == [Opened, Closed]
    assert parser.feed("<answer>b</answer>") == ()
    assert [one.text for one in parser.finish().blocks] == ["a"]


def test_the_time_to_the_first_answer_is_exact_in_tokens():
    """Five tokens before the 7; of the second response's three, the second holds tag and content."""
    pieces = ["<think>", "3+4", "</think>", "<answer>", " ", "7", "</answer>", "", "\n", ""]
    assert ttft_share(parse(pieces), len(pieces)) == 0.5
    assert ttft_share(parse(["<think></think>", "<answer>7</", "answer>"]), 4) == 0.25
    two = [*pieces[:7], *pieces[:7]]
    assert ttft_share(parse(two), 14) == 5 / 14
    assert ttft_share(parse(pieces[:6]), 6) == 1.0
    assert ttft_share(parse([*pieces, "!"]), 11) == 1.0
    assert ttft_share(parse([]), 0) == 1.0
    assert ttft_share(Parsed((), ""), 3) == 1.0


@pytest.mark.parametrize("piece", ["a", "<", "</answer"])
def test_a_token_costs_no_more_in_a_long_response(piece: str):
    """0.3 s of CPU time; a parser that touches the content again with each token needs at least 20 s."""
    pieces = ["<think>t</think><answer>", "a" * 4_000_000, *[piece] * 50_000, "</answer>"]
    before = time.process_time()
    final = parse(pieces).final
    assert time.process_time() - before < 5
    assert final is not None
    assert len(final.text) == 4_000_000 + 50_000 * len(piece)
