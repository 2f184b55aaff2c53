"""What a client gets of a request's completions, as their tokens arrive; the same over gRPC and HTTP."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Sequence
from typing import NamedTuple

from areal_jax.generation.commands import Tokens
from areal_jax.serving.http import Metrics
from areal_jax.serving.streams import Stream
from areal_jax.tasks.blocks import ANSWER, THINK, BlockParser, Closed, Opened, render
from areal_jax.tasks.errors import TaskError
from areal_jax.tasks.text import TextStream
from areal_jax.tasks.tokenizers import Tokenizer
from areal_jax.types import ArealError, Prompt, Trajectory


class Added(NamedTuple):
    """What new tokens add to a response."""

    text: str
    answers: str
    """The text of each answer that the tokens complete, verbatim, with a newline after each answer."""


class AnswerStream:
    """Decodes one sample's tokens as they arrive: `push(tokens)` returns the text and answers that they add.

    Answers are found in responses with the template `interleave`. Once a response breaks the template, no
    further answer is found in it; its text is decoded to the end.
    """

    def __init__(self, tokenizer: Tokenizer, needs_text: bool = True) -> None:
        """`needs_text`: False: after the response breaks the template, its tokens are not decoded."""
        self._text, self._parser = TextStream(tokenizer), BlockParser("interleave")
        self._needs_text = needs_text
        self.has_answer = False
        """Whether the first content of an answer has arrived."""

    def push(self, tokens: Sequence[int]) -> Added:
        if self._parser.is_broken and not self._needs_text:
            return Added("", "")
        return self._parsed(self._text.push(tokens))

    def finish(self) -> Added:
        """Returns what is left after the last token: an incomplete character becomes U+FFFD."""
        return self._parsed(self._text.finish())

    def _parsed(self, text: str) -> Added:
        answers = ""
        for found in self._parser.feed(text):
            match found:
                case Opened(kind=kind):
                    self.has_answer |= kind == ANSWER
                case Closed(block) if block.kind == ANSWER:
                    answers += f"{block.text}\n"
        return Added(text, answers)


def require_tags(tokenizer: Tokenizer, name: str) -> None:
    """Raises ArealError if no response of the model `name` can have the tags of thoughts and answers as text.

    The tokenizer may have no tokens for them, or may have them as special tokens, which are not decoded.
    """
    tags = render([(THINK, ""), (ANSWER, "")])
    try:
        # A rendered text has special tokens where the model generates special tokens; encode makes none.
        has_tags = tags in tokenizer.decode(tokenizer.render(Prompt(text=tags)))
    except TaskError:
        has_tags = False
    if not has_tags:
        raise ArealError(
            f"--answers-only: the tokenizer of {name} has no tokens with the text {tags}, so that no answer "
            "could be sent; serve the model without --answers-only"
        )


class Output(NamedTuple):
    """New tokens of a completion, or the trajectory of an ended one, and the text that the client gets."""

    member: int
    output: Tokens | Trajectory
    text: str


async def outputs(
    stream: Stream,
    responses: Sequence[AnswerStream],
    metrics: Metrics,
    *,
    started_s: float,
    is_answers_only: bool,
) -> AsyncIterator[Output]:
    """Yields what the client gets of the completions in `stream`: all of it, or the answers alone.

    `responses` decode the completions, one each. Records the seconds from `started_s` to the request's first
    tokens, and to the first content of an answer in any of its completions.
    """
    is_first, has_answer = True, False
    async for member, output in stream.items():
        if is_first:
            metrics.first_token.observe(time.monotonic() - started_s)
            is_first = False
        response = responses[member]
        added = response.push(output.tokens) if isinstance(output, Tokens) else response.finish()
        if response.has_answer and not has_answer:
            metrics.first_answer.observe(time.monotonic() - started_s)
            has_answer = True
        if not is_answers_only:
            yield Output(member, output, added.text)
        elif isinstance(output, Trajectory):
            yield Output(member, output, added.answers)
        elif added.answers:
            yield Output(member, Tokens((), (), output.version), added.answers)
