"""A sample as a person reads it."""

from __future__ import annotations

import io
import json
from dataclasses import replace

import pytest
from rich.console import Console

from areal_jax.report.sample import SampleView, TokenView, print_sample, render_sample
from areal_jax.types import NOT_SAMPLED, VersionSpan

VIEW = SampleView(
    sample="17.3.0",
    prompt="count down from [e]",
    pieces=[
        TokenView("d ", 3, -0.1),
        TokenView("c ", 3, -3.0),
        TokenView("tool", NOT_SAMPLED, 0.0),
        TokenView("b\n", 4, -5.0),
        TokenView(".", 4, -0.2),
    ],
    reward=0.75,
    parts={"prefix": 0.5, "format": 0.25},
    stop_reason="stop",
)


def test_spans_and_headline():
    assert VIEW.spans == [VersionSpan(3, 0, 2), VersionSpan(NOT_SAMPLED, 2, 3), VersionSpan(4, 3, 5)]
    assert VIEW.headline == (
        "reward 0.75 (prefix 0.5, format 0.25) · 4 tokens · log-prob -8.30 · stopped by stop"
    )


def test_a_sample_without_reward_or_tokens():
    empty = SampleView("0.0.0", "", [], None)
    assert empty.spans == []
    assert empty.headline == "not scored · 0 tokens · log-prob 0.00"


def test_what_befell_a_sample_is_in_its_headline():
    view = replace(VIEW, stop_reason="length", truncated=True, interruptions=1, task="sums")
    assert view.headline.endswith("· cut off by its length limit · interrupted once")
    assert replace(view, interruptions=3).headline.endswith("interrupted 3 times")
    withheld = replace(view, reward=3.5, trained_reward=3.0).headline
    assert withheld.startswith("reward 3.5") and "· trained with 3: its batch's gate was closed ·" in withheld
    assert "· 4 tokens in 3 turns ·" in replace(VIEW, turns=3).headline
    assert (view.title, VIEW.title) == ("sample 17.3.0 of sums", "sample 17.3.0")


def test_the_branches_of_a_sample_are_shown_after_it():
    view = replace(
        VIEW,
        turns=4,
        branches=[[TokenView("e", 3, -1.0), TokenView("f", 3, -0.5)], [TokenView("g", 4, -2.0)]],
    )
    assert "· 7 tokens in 4 turns on 3 paths · log-prob -11.80 ·" in view.headline
    stream = io.StringIO()
    print_sample(view, stream)
    assert stream.getvalue().splitlines()[-4:] == ["branch 1", "ef", "branch 2", "g"]
    assert [len(path) for path in json.loads(json.dumps(view.to_json()))["branches"]] == [2, 1]


def test_plain_text_holds_every_token_once():
    stream = io.StringIO()
    print_sample(replace(VIEW, reward_note="found [1], wanted 2"), stream)
    lines = stream.getvalue().splitlines()
    assert lines[0] == "sample 17.3.0"
    assert lines[2] == "judged: found [1], wanted 2"  # brackets are text, not markup
    assert lines[3] == "count down from [e]"
    assert lines[4:6] == ["d c toolb↵", "."]
    assert "v3 [0:2]  given [2:3]  v4 [3:5]" in lines[6]
    assert len(lines) == 7


def test_json_holds_all_of_it():
    view = replace(VIEW, task="sums", reward_note="judged so", interruptions=2, completion="d c b\n.")
    plain = json.loads(json.dumps(view.to_json()))
    tokens = plain.pop("tokens")
    assert plain == {
        "sample": "17.3.0",
        "turns": 1,
        "branches": [],
        "task": "sums",
        "prompt": "count down from [e]",
        "completion": "d c b\n.",
        "reward": 0.75,
        "parts": {"prefix": 0.5, "format": 0.25},
        "reward_note": "judged so",
        "stop_reason": "stop",
        "truncated": False,
        "interruptions": 2,
        "trained_reward": None,
        "versions": [
            {"version": 3, "start": 0, "end": 2},
            {"version": NOT_SAMPLED, "start": 2, "end": 3},
            {"version": 4, "start": 3, "end": 5},
        ],
    }
    assert tokens[3] == {"text": "b\n", "version": 4, "logp": -5.0, "block": ""} and len(tokens) == 5


@pytest.mark.parametrize(
    ("piece", "by_version", "by_logp"),
    [
        (TokenView("x", 0, -0.1), "cyan", ""),
        (TokenView("x", 3, -2.2), "green", "black on bright_yellow"),
        (TokenView("x", 1, -2.5), "underline yellow", "black on bright_red"),
        (TokenView("x", 7, -9.0), "bold underline yellow", "bold white on red"),
        (TokenView("x", 4, float("-inf")), "bold underline blue", "bold white on red"),
        (TokenView("x", NOT_SAMPLED, 0.0), "dim", "dim"),
    ],
)
def test_colour_says_the_version_and_shade_the_probability(piece, by_version, by_logp):
    group = render_sample(SampleView("0.0.0", "", [piece], 0.0))
    version, logp = group.renderables[3], group.renderables[6]
    assert [str(span.style) for span in version.spans] == [by_version]
    assert [str(span.style) for span in logp.spans] == ([by_logp] if by_logp else [])
    assert "\x1b[" in _in_colour(version)
    assert "probabilities" in group.renderables[7].plain
    assert len(render_sample(SampleView("0.0.0", "", [piece], 0.0), is_coloured=False).renderables) == 5


BLOCKS = replace(
    VIEW,
    pieces=[
        TokenView("<think>", 3, -0.1, "think"),
        TokenView("2+2", 3, -3.0, "think"),
        TokenView("</think>", 3, -0.1, "think"),
        TokenView("\n", 3, -0.1),
        TokenView("<answer>", 3, -0.1, "answer"),
        TokenView("4", 3, -0.1, "answer"),
        TokenView("</answer>", 3, -0.1, "answer"),
    ],
)


def test_thoughts_are_dim_and_answers_are_marked_in_colour():
    version, _, _, logp, legend, blocks = render_sample(BLOCKS).renderables[3:]
    for text in (version, logp):
        assert text.plain == "<think>2+2</think>↵\n▶ <answer>4</answer>"
    styles = {version.plain[span.start : span.end]: str(span.style) for span in version.spans}
    assert (styles["2+2"], styles["4"]) == ("underline dim green", "green")
    shades = {logp.plain[span.start : span.end]: str(span.style) for span in logp.spans}
    assert shades == {"<think>": "dim", "2+2": "black on bright_red", "</think>": "dim", "▶ ": "bold"}
    assert legend.plain.startswith("probabilities")
    assert blocks.plain == "blocks  thought  ▶ answer"
    assert "\x1b[2;32m<think>" in _in_colour(version)


def test_in_plain_text_a_response_is_as_it_was_sampled():
    stream = io.StringIO()
    print_sample(BLOCKS, stream)
    assert stream.getvalue().splitlines()[3:5] == ["<think>2+2</think>↵", "<answer>4</answer>"]
    assert "▶" not in stream.getvalue() and "blocks" not in stream.getvalue()


def test_json_has_each_tokens_block():
    tokens = json.loads(json.dumps(BLOCKS.to_json()))["tokens"]
    assert [token["block"] for token in tokens] == [*["think"] * 3, "", *["answer"] * 3]


def _in_colour(renderable) -> str:
    stream = io.StringIO()
    Console(file=stream, force_terminal=True, color_system="standard").print(renderable)
    return stream.getvalue()
