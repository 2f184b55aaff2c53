"""One sample as a person reads it: its text, token by token, coloured by version and shaded by log-prob."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any, NamedTuple, TextIO

from areal_jax.types import NOT_SAMPLED, PolicyVersion, VersionSpan

COLOURS = ("cyan", "yellow", "magenta", "green", "blue", "red")
"""By version, in turn: neighbouring versions never share one."""

RARE, VERY_RARE = math.log(0.1), math.log(0.01)
"""Log-probs below which a token counts as unlikely."""

SHADES = (
    (0.5, ""),
    (0.1, "black on bright_yellow"),
    (0.01, "black on bright_red"),
    (0.0, "bold white on red"),
)
"""(least probability, style) of a token read by its log-prob, in colours that every terminal has."""


class Piece(NamedTuple):
    """One token of a completion; `logp` is what was recorded when it was sampled."""

    text: str
    version: PolicyVersion
    logp: float


@dataclass(frozen=True)
class SampleView:
    """What is shown of a sample. Tokens that no policy sampled carry NOT_SAMPLED and log-prob 0."""

    sample_id: str
    prompt: str
    pieces: Sequence[Piece]
    reward: float | None
    parts: Mapping[str, float] = field(default_factory=dict)
    stop_reason: str = ""
    task: str = ""
    note: str = ""
    """How it was judged: what was compared with what."""
    truncated: bool = False
    interruptions: int = 0
    """How often it went on under newer weights."""
    completion: str = ""
    """Its text, special tokens dropped; the pieces mark them."""

    @property
    def spans(self) -> list[VersionSpan]:
        """Runs of pieces of one version, in order."""
        spans, start = [], 0
        for version, run in groupby(self.pieces, key=lambda piece: piece.version):
            end = start + len(list(run))
            spans.append(VersionSpan(version, start, end))
            start = end
        return spans

    @property
    def headline(self) -> str:
        """Reward, its parts, how long it is and why it stopped."""
        reward = "not scored" if self.reward is None else f"reward {self.reward:.3g}"
        parts = ", ".join(f"{name} {value:.3g}" for name, value in self.parts.items())
        sampled = [piece for piece in self.pieces if piece.version != NOT_SAMPLED]
        words = [
            reward + (f" ({parts})" if parts else ""),
            f"{len(sampled)} tokens",
            f"log-prob {sum(piece.logp for piece in sampled):.2f}",
        ]
        if self.stop_reason:
            words.append(
                "cut off by its length limit" if self.truncated else f"stopped by {self.stop_reason}"
            )
        if self.interruptions:
            words.append(
                f"interrupted {'once' if self.interruptions == 1 else f'{self.interruptions} times'}"
            )
        return " · ".join(words)

    @property
    def title(self) -> str:
        return f"sample {self.sample_id}" + (f" of {self.task}" if self.task else "")

    def to_json(self) -> dict[str, Any]:
        """All of it as plain values."""
        return {
            "sample": self.sample_id,
            "task": self.task,
            "prompt": self.prompt,
            "completion": self.completion,
            "reward": self.reward,
            "parts": dict(self.parts),
            "reward_note": self.note,
            "stop_reason": self.stop_reason,
            "truncated": self.truncated,
            "interruptions": self.interruptions,
            "versions": [span._asdict() for span in self.spans],
            "tokens": [piece._asdict() for piece in self.pieces],
        }


def version_name(version: PolicyVersion) -> str:
    return "given" if version == NOT_SAMPLED else f"v{version}"


def render_sample(view: SampleView, is_coloured: bool = True) -> Any:
    """A rich renderable. In colour the completion is shown twice: by version and by log-prob.

    By version, unlikely tokens are underlined (p < 0.1) and bold as well (p < 0.01).
    """
    from rich.console import Group
    from rich.text import Text

    lines = [Text(view.title, style="bold"), Text(view.headline)]
    if view.note:
        lines.append(Text(f"judged: {view.note}"))
    lines.append(Text(view.prompt, style="dim"))
    lines += [_text(view, _version_style), _version_legend(view)]
    if is_coloured:
        lines += [Text(), _text(view, _logp_style), _logp_legend()]
    return Group(*lines)


def print_sample(view: SampleView, stream: TextIO) -> None:
    """To a terminal in colour, to anything else as plain text."""
    from rich.console import Console

    console = Console(file=stream, highlight=False)
    console.print(render_sample(view, console.is_terminal), soft_wrap=True)


def _text(view: SampleView, style_of: Callable[[Piece], str]) -> Any:
    from rich.text import Text

    text = Text()
    for piece in view.pieces:
        text.append(_visible(piece.text), style=style_of(piece))
    return text


def _version_legend(view: SampleView) -> Any:
    from rich.text import Text

    legend = Text("versions  ", style="dim")
    for span in view.spans:
        legend.append(f"{version_name(span.version)} [{span.start}:{span.end}]", style=_colour(span.version))
        legend.append("  ")
    legend.append("underlined: p < 0.1, bold: p < 0.01", style="dim")
    return legend


def _logp_legend() -> Any:
    from rich.text import Text

    legend = Text("probabilities  ", style="dim")
    for least, style in SHADES:
        legend.append(f" ≥ {least:g} " if least else " less ", style=style)
        legend.append(" ")
    return legend


def _visible(text: str) -> str:
    """A new line shows as such and still breaks the line."""
    return text.replace("\n", "↵\n")


def _colour(version: PolicyVersion) -> str:
    return "dim" if version == NOT_SAMPLED else COLOURS[version % len(COLOURS)]


def _version_style(piece: Piece) -> str:
    colour = _colour(piece.version)
    if piece.version == NOT_SAMPLED or piece.logp >= RARE:
        return colour
    return f"underline {colour}" if piece.logp >= VERY_RARE else f"bold underline {colour}"


def _logp_style(piece: Piece) -> str:
    if piece.version == NOT_SAMPLED:
        return "dim"
    chance = math.exp(min(piece.logp, 0.0))
    return next(style for least, style in SHADES if chance >= least)
