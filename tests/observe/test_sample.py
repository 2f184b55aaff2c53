"""A sample as a person reads it."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from areal_jax.observe.sample import Piece, SampleView, print_sample, render_sample
from areal_jax.types import NOT_SAMPLED, VersionSpan

VIEW = SampleView(
    sample_id="17.3.0",
    prompt="count down from [e]",
    pieces=[
        Piece("d ", 3, -0.1),
        Piece("c ", 3, -3.0),
        Piece("tool", NOT_SAMPLED, 0.0),
        Piece("b\n", 4, -5.0),
        Piece(".", 4, -0.2),
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


def test_plain_text_holds_every_token_once():
    stream = io.StringIO()
    print_sample(VIEW, stream)
    lines = stream.getvalue().splitlines()
    assert lines[0] == "sample 17.3.0"
    assert lines[2] == "count down from [e]"  # brackets are text, not markup
    assert lines[3:5] == ["d c toolb↵", "."]
    assert "v3 [0:2]  given [2:3]  v4 [3:5]" in lines[5]


@pytest.mark.parametrize(
    ("piece", "style"),
    [
        (Piece("x", 0, -0.1), "cyan"),
        (Piece("x", 1, -2.5), "underline yellow"),
        (Piece("x", 7, -9.0), "bold underline yellow"),
        (Piece("x", NOT_SAMPLED, 0.0), "dim"),
    ],
)
def test_colour_says_the_version_and_underlining_the_probability(piece, style):
    group = render_sample(SampleView("0.0.0", "", [piece], 0.0))
    completion = group.renderables[3]
    assert [str(span.style) for span in completion.spans] == [style]
    assert "\x1b[" in _in_colour(completion)


def _in_colour(renderable) -> str:
    stream = io.StringIO()
    Console(file=stream, force_terminal=True, color_system="standard").print(renderable)
    return stream.getvalue()
