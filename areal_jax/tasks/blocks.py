"""Responses made of think and answer blocks: templates, and a streaming parser.

A response is a sequence of blocks, `<think>...</think>` for thoughts and `<answer>...</answer>` for what the
user sees. Interleaved Reasoning (Xie et al., arXiv:2505.19640) alternates the two; the last answer is final.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from areal_jax.tasks.errors import TaskError

THINK = "think"
ANSWER = "answer"

TEMPLATES = ("interleave", "think_answer", "delayed")
"""The orders of blocks that a response may have to follow. The last answer is always the final one.

interleave: one or more pairs of a think block and an answer. think_answer: one think block, then one answer
(DeepSeek-R1, Guo et al., arXiv:2501.12948). delayed: one think block, then one or more answers.
"""

_TAGS = tuple(f"<{slash}{kind}>" for kind in (THINK, ANSWER) for slash in ("", "/"))
_LONGEST = max(map(len, _TAGS))
_TAG = re.compile(f"({'|'.join(_TAGS)})")


class ParsedBlock(NamedTuple):
    """A complete block; tokens are counted from 0, the response's first token."""

    kind: str
    """THINK or ANSWER."""
    text: str
    """The content between the tags, verbatim."""
    opened: int
    """Index of the token that completed the opening tag."""
    first: int
    """Index of the token with the content's first character that is not whitespace.

    If the content is blank: index of the token that began the closing tag.
    """
    closed: int
    """Index of the token that completed the closing tag."""


class Opened(NamedTuple):
    """Event: the content of a block has begun; `token` is the block's `Block.first`."""

    kind: str
    token: int


class Closed(NamedTuple):
    """Event: a block is complete."""

    block: ParsedBlock


class Parsed(NamedTuple):
    """A response's complete blocks up to its first error, and the error."""

    blocks: tuple[ParsedBlock, ...]
    error: str
    """How the response breaks its template; "" if it follows the template."""

    @property
    def is_valid(self) -> bool:
        return not self.error

    @property
    def answers(self) -> tuple[ParsedBlock, ...]:
        return tuple(block for block in self.blocks if block.kind == ANSWER)

    @property
    def final(self) -> ParsedBlock | None:
        """The last answer; None if the response breaks its template."""
        return self.answers[-1] if self.is_valid else None


@dataclass
class _OpenBlock:
    """The block that is open: its content so far, and the tokens at which tag and content began."""

    kind: str
    opened: int
    first: int | None = None
    runs: list[str] = field(default_factory=list)


class BlockParser:
    """Parses a response as its tokens arrive: `feed` takes the text that one token adds.

    Only whitespace may stand outside of the blocks. Inside, only the four exact tags are tags: all other
    text, such as `<b>` or `</`, is content. How the text is divided into tokens changes the token indices
    alone. After the first error, `feed` returns no more events.
    """

    def __init__(self, template: str = "interleave") -> None:
        check_template(template)
        self._template = template
        self._blocks: list[ParsedBlock] = []
        self._open: _OpenBlock | None = None
        self._error = ""
        self._tokens = 0
        self._held = ""
        self._held_since = 0

    def feed(self, piece: str) -> tuple[Opened | Closed, ...]:
        """Returns the events that the next token's text completes; `piece` may be empty."""
        token = self._tokens
        self._tokens += 1
        if self._error:
            return ()
        text = self._held + piece
        # The token of the text's first character. All other characters that matter are of this token: text
        # that was held back has its only "<" at the beginning.
        since = self._held_since if self._held else token
        end = _end_without_tag(text)
        self._held, self._held_since = text[end:], token if end else since
        events: list[Opened | Closed | None] = []
        for number, part in enumerate(_TAG.split(text[:end])):
            events.append(self._tag(part, since, token) if number % 2 else self._run(part, since))
            if self._error:
                break
            since = token if part else since
        return tuple(event for event in events if event is not None)

    @property
    def is_broken(self) -> bool:
        """Whether the text so far breaks the template, so that `feed` returns no more events."""
        return bool(self._error)

    def finish(self) -> Parsed:
        """Returns the response's blocks and error, as if the text so far were all of it."""
        return Parsed(tuple(self._blocks), self._error or self._error_at_end())

    def _run(self, text: str, token: int) -> Opened | None:
        """Takes text without tags; `token`: index of the token of the text's first character."""
        block, is_blank = self._open, not text.strip()
        if block is None:
            if not is_blank:
                self._error = self._text_outside()
            return None
        block.runs.append(text)
        if is_blank or block.first is not None:
            return None
        block.first = token
        return Opened(block.kind, token)

    def _tag(self, tag: str, began: int, token: int) -> Closed | None:
        """Takes a tag that token `began` began and `token` completed."""
        block, kind = self._open, tag.strip("</>")
        if block is not None and tag == f"</{block.kind}>":
            return self._close(block, began, token)
        number = len(self._blocks)
        wanted = _kind_at(number, self._template)
        if block is not None:
            self._error = f"block {number + 1}, <{block.kind}>, contains the tag {tag}"
        elif tag.startswith("</"):
            self._error = f"the tag {tag} after block {number} closes nothing: no block is open"
        elif kind != wanted:
            rule = f"requires <{wanted}> there" if wanted else f"ends with block {number}"
            self._error = f"block {number + 1} is <{kind}>, but the template {self._template} {rule}"
        else:
            self._open = _OpenBlock(kind, token)
        return None

    def _close(self, block: _OpenBlock, began: int, token: int) -> Closed | None:
        if block.first is None and block.kind == ANSWER:
            self._error = f"block {len(self._blocks) + 1}, <{ANSWER}>, is blank"
            return None
        first = began if block.first is None else block.first
        closed = ParsedBlock(block.kind, "".join(block.runs), block.opened, first, token)
        self._blocks.append(closed)
        self._open = None
        return Closed(closed)

    def _text_outside(self) -> str:
        return f"there is text outside of blocks, after block {len(self._blocks)}"

    def _error_at_end(self) -> str:
        if self._open is not None:
            return f"block {len(self._blocks) + 1}, <{self._open.kind}>, is not closed"
        if self._held:
            return self._text_outside()
        if not self._blocks:
            return "the response is empty"
        return "the response has no final answer" if self._blocks[-1].kind == THINK else ""


def check_template(template: str) -> None:
    if template not in TEMPLATES:
        raise TaskError(f"template={template!r} is unknown; use one of {', '.join(TEMPLATES)}")


def parse(pieces: Sequence[str], template: str = "interleave") -> Parsed:
    """Returns the blocks of a response, or how it breaks the template; `pieces`: the text of each token.

    Raises TaskError if the template is unknown.
    """
    parser = BlockParser(template)
    for piece in pieces:
        parser.feed(piece)
    return parser.finish()


def render(blocks: Iterable[tuple[str, str] | ParsedBlock]) -> str:
    """Returns the text of a response; `blocks`: (kind, text) of each block, or blocks that were parsed."""
    return "".join(f"<{kind}>{text}</{kind}>" for kind, text, *_ in blocks)


def ttft_share(parsed: Parsed, tokens: int) -> float:
    """Returns the time to the first answer, as a share of the response's `tokens` tokens, in 0..1.

    That is the number of tokens before the first token of the first answer's content / `tokens`. Returns 1 if
    the response breaks its template, so that an early answer in a broken response gains nothing.
    """
    if not (parsed.is_valid and parsed.answers and tokens):
        return 1.0
    return parsed.answers[0].first / tokens


def _kind_at(number: int, template: str) -> str:
    """Returns the kind of block `number`, counted from 0, in a template; "" if there is no such block."""
    if template == "interleave":
        return ANSWER if number % 2 else THINK
    if template == "think_answer" and number > 1:
        return ""
    return ANSWER if number else THINK


def _end_without_tag(text: str) -> int:
    """Returns the length of the text up to an unfinished tag, such as "</ans", with which it may end."""
    start = text.rfind("<", max(0, len(text) - _LONGEST + 1))
    rest = text[start:]
    is_held = start >= 0 and any(tag.startswith(rest) and tag != rest for tag in _TAGS)
    return start if is_held else len(text)
