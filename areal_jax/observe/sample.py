"""One sample as a person reads it: its text, token by token, coloured by the version that sampled it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any, NamedTuple, TextIO

from areal_jax.types import NOT_SAMPLED, PolicyVersion, VersionSpan

COLOURS = ("cyan", "yellow", "magenta", "green", "blue", "red")
"""By version, in turn: neighbouring versions never share one."""

RARE, VERY_RARE = math.log(0.1), math.log(0.01)
"""Log-probs below which a token counts as unlikely."""


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
        return " · ".join([*words, f"stopped by {self.stop_reason}"] if self.stop_reason else words)


def version_name(version: PolicyVersion) -> str:
    return "given" if version == NOT_SAMPLED else f"v{version}"


def render_sample(view: SampleView) -> Any:
    """A rich renderable; unlikely tokens are underlined (p < 0.1) and bold as well (p < 0.01)."""
    from rich.console import Group
    from rich.text import Text

    legend = Text("versions  ", style="dim")
    for span in view.spans:
        legend.append(f"{version_name(span.version)} [{span.start}:{span.end}]", style=_colour(span.version))
        legend.append("  ")
    legend.append("underlined: p < 0.1, bold: p < 0.01", style="dim")
    completion = Text()
    for piece in view.pieces:
        completion.append(_visible(piece.text), style=_style(piece))
    return Group(
        Text(f"sample {view.sample_id}", style="bold"),
        Text(view.headline),
        Text(view.prompt, style="dim"),
        completion,
        legend,
    )


def print_sample(view: SampleView, stream: TextIO) -> None:
    """To a terminal in colour, to anything else as plain text."""
    from rich.console import Console

    Console(file=stream, highlight=False).print(render_sample(view), soft_wrap=True)


def _visible(text: str) -> str:
    """A new line shows as such and still breaks the line."""
    return text.replace("\n", "↵\n")


def _colour(version: PolicyVersion) -> str:
    return "dim" if version == NOT_SAMPLED else COLOURS[version % len(COLOURS)]


def _style(piece: Piece) -> str:
    colour = _colour(piece.version)
    if piece.version == NOT_SAMPLED or piece.logp >= RARE:
        return colour
    return f"underline {colour}" if piece.logp >= VERY_RARE else f"bold underline {colour}"
