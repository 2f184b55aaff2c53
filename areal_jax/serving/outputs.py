"""What a client gets of a request's completions, as their tokens arrive; the same over gRPC and HTTP."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Sequence
from typing import NamedTuple

from areal_jax.generation.commands import Tokens
from areal_jax.serving.answers import AnswerStream
from areal_jax.serving.http import Metrics
from areal_jax.serving.streams import Stream
from areal_jax.types import Trajectory


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
