"""Renders one sample for the terminal: its tokens coloured by version and by log-prob."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any, NamedTuple, TextIO

from rich.console import Console, Group
from rich.text import Text

from areal_jax.types import NOT_SAMPLED, PolicyVersion, VersionSpan

COLOURS = ("cyan", "yellow", "magenta", "green", "blue", "red")
"""Colours of versions, in rotation; neighbouring versions have different colours."""

RARE, VERY_RARE = math.log(0.1), math.log(0.01)
"""Tokens with a log-prob below RARE are underlined; tokens below VERY_RARE are bold as well."""

SHADES = (
    (0.5, ""),
    (0.1, "black on bright_yellow"),
    (0.01, "black on bright_red"),
    (0.0, "bold white on red"),
)
"""(minimum probability, style) of tokens coloured by log-prob: a token has the style of the first row with a
minimum that its probability reaches. Every terminal has these colours.
"""

ANSWER_MARK = "▶ "
"""Put before answers where a completion is coloured; in plain text the tags say where an answer begins."""


class TokenView(NamedTuple):
    """One token of a completion: its text, its policy version, and its log-prob recorded at sampling."""

    text: str
    version: PolicyVersion
    logp: float
    block: str = ""
    """The block of a response that the token is part of: "think" (a thought), "answer", or "" for neither."""


@dataclass(frozen=True)
class SampleView:
    """The displayed content of a sample.

    A token that the run did not sample, as in a reference answer, has version NOT_SAMPLED and log-prob 0.
    """

    sample: str
    """The sample's name: ORDINAL/MEMBER, or ORDINAL/MEMBER/ATTEMPT if its group was started again."""
    prompt: str
    pieces: Sequence[TokenView]
    reward: float | None
    parts: Mapping[str, float] = field(default_factory=dict)
    stop_reason: str = ""
    task: str = ""
    reward_note: str = ""
    """How the sample was scored, such as which answers were compared."""
    truncated: bool = False
    interruptions: int = 0
    """Number of times that the version changed in the middle of the sample."""
    completion: str = ""
    """The completion's text without special tokens, which the pieces include."""
    turns: int = 1
    """Number of turns that were sampled; what was added between them has version NOT_SAMPLED."""
    trained_reward: float | None = None
    """The reward that was trained on, if a closed gate withheld a part of it; otherwise None."""
    branches: Sequence[Sequence[TokenView]] = ()
    """The other paths of an episode that branched, each from its first token on that is trained there."""

    @property
    def spans(self) -> list[VersionSpan]:
        """The completion divided, in order, into spans of consecutive pieces of one version."""
        spans, start = [], 0
        for version, run in groupby(self.pieces, key=lambda piece: piece.version):
            end = start + len(list(run))
            spans.append(VersionSpan(version, start, end))
            start = end
        return spans

    @property
    def headline(self) -> str:
        """One line with the reward and its parts, number of tokens, total log-prob, and the stop reason."""
        reward = "not scored" if self.reward is None else f"reward {self.reward:.3g}"
        parts = ", ".join(f"{name} {value:.3g}" for name, value in self.parts.items())
        paths = [self.pieces, *self.branches]
        sampled = [piece for path in paths for piece in path if piece.version != NOT_SAMPLED]
        turns = f" in {self.turns} turns" + (f" on {len(paths)} paths" if self.branches else "")
        withheld = self.trained_reward is not None
        words = [
            reward + (f" ({parts})" if parts else ""),
            *([f"trained with {self.trained_reward:.3g}: its batch's gate was closed"] if withheld else []),
            f"{len(sampled)} tokens" + (turns if self.turns > 1 else ""),
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
        return f"sample {self.sample}" + (f" of {self.task}" if self.task else "")

    def to_json(self) -> dict[str, Any]:
        """Returns all fields as values that JSON can represent; the pieces have the key `tokens`."""
        fields = {name: value for name, value in vars(self).items() if name != "pieces"}
        return fields | {
            "branches": [[piece._asdict() for piece in path] for path in self.branches],
            "parts": dict(self.parts),
            "versions": [span._asdict() for span in self.spans],
            "tokens": [piece._asdict() for piece in self.pieces],
        }


def version_name(version: PolicyVersion) -> str:
    return "given" if version == NOT_SAMPLED else f"v{version}"


def render_sample(view: SampleView, is_coloured: bool = True) -> Group:
    """Returns the sample as a rich renderable.

    If `is_coloured`, the completion appears twice: coloured by version, then by log-prob. In the copy
    coloured by version, tokens with a probability below 0.1 at sampling are underlined, and tokens below 0.01
    are bold as well. In both copies thoughts are dim, except for tokens that their log-prob colours, and
    ANSWER_MARK is before answers.
    """
    lines = [Text(view.title, style="bold"), Text(view.headline)]
    if view.reward_note:
        lines.append(Text(f"judged: {view.reward_note}"))
    lines.append(Text(view.prompt, style="dim"))
    lines += [_text(view.pieces, _version_style, is_coloured), _version_legend(view)]
    if is_coloured:
        lines += [Text(), _text(view.pieces, _logp_style, is_coloured), _logp_legend()]
        lines += [_block_legend()] if any(piece.block for piece in view.pieces) else []
    for number, path in enumerate(view.branches, 1):
        lines += [Text(f"branch {number}", style="bold"), _text(path, _version_style, is_coloured)]
    return Group(*lines)


def print_sample(view: SampleView, stream: TextIO) -> None:
    """Print the sample: in colour if the stream is a terminal, otherwise as plain text."""
    console = Console(file=stream, highlight=False)
    console.print(render_sample(view, console.is_terminal), soft_wrap=True)


def _text(pieces: Sequence[TokenView], style_of: Callable[[TokenView], str], is_marked: bool) -> Text:
    """Returns a completion; `is_marked`: with ANSWER_MARK before answers."""
    text = Text()
    for block, run in groupby(pieces, key=lambda piece: piece.block if is_marked else ""):
        if block == "answer":
            text.append(ANSWER_MARK, style="bold")
        for piece in run:
            text.append(_visible(piece.text), style=style_of(piece))
    return text


def _version_legend(view: SampleView) -> Text:
    legend = Text("versions  ", style="dim")
    for version, start, end in view.spans:
        legend.append(f"{version_name(version)} [{start}:{end}]", style=_colour(version)).append("  ")
    return legend.append("underlined: p < 0.1, bold: p < 0.01", style="dim")


def _logp_legend() -> Text:
    legend = Text("probabilities  ", style="dim")
    for least, style in SHADES:
        legend.append(f" ≥ {least:g} " if least else " less ", style=style).append(" ")
    return legend


def _block_legend() -> Text:
    return Text.assemble(("blocks  ", "dim"), ("thought", "dim"), "  ", (ANSWER_MARK, "bold"), "answer")


def _visible(text: str) -> str:
    """Returns the text with a visible character before each line break."""
    return text.replace("\n", "↵\n")


def _colour(version: PolicyVersion) -> str:
    return "dim" if version == NOT_SAMPLED else COLOURS[version % len(COLOURS)]


def _version_style(piece: TokenView) -> str:
    colour = f"dim {_colour(piece.version)}" if piece.block == "think" else _colour(piece.version)
    if piece.version == NOT_SAMPLED or piece.logp >= RARE:
        return colour
    return f"underline {colour}" if piece.logp >= VERY_RARE else f"bold underline {colour}"


def _logp_style(piece: TokenView) -> str:
    if piece.version == NOT_SAMPLED:
        return "dim"
    chance = math.exp(min(piece.logp, 0.0))
    shade = next(style for least, style in SHADES if chance >= least)
    return shade or ("dim" if piece.block == "think" else "")
