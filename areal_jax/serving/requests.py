"""What clients' requests have in common: the `Ask` that each becomes, or the error that its client gets.

Pure functions: no socket, no thread. A RequestError has a message that names the value and the remedy.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from areal_jax.generation.commands import Start
from areal_jax.tasks.errors import TaskError, TooLongError
from areal_jax.tasks.plain_json import MOST_LEVELS, is_plain, readable
from areal_jax.tasks.tokenizers import Tokenizer
from areal_jax.types import ArealError, Prompt, Sampling


class RequestError(ArealError):
    """The request cannot be served; `code` is the name of the gRPC status that the client gets.

    Over HTTP, the client also gets `reason`, a code of OpenAI, and the name of the wrong field as `param`.
    """

    def __init__(self, code: str, message: str, reason: str = "", param: str | None = None) -> None:
        super().__init__(message)
        self.code, self.reason, self.param = code, reason, param


def invalid(message: str, param: str | None = None) -> RequestError:
    return RequestError("INVALID_ARGUMENT", message, param=param)


def context_exceeded(what: str, count: int | str, length: int) -> RequestError:
    """Returns the error of `what`, such as a prompt, that has `count` tokens; clients know its words.

    `count`: a number, or "at least" and a number.
    """
    return RequestError(
        "INVALID_ARGUMENT",
        f"the model's maximum context length is {length} tokens (generation.length), prompt and completion "
        f"together, but {what} has {count} tokens; shorten it, or serve with a larger generation.length",
        "context_length_exceeded",
    )


def json_of(body: bytes, *, is_mended: bool = False) -> Any:
    """Returns a request's body; raises RequestError if it is no JSON.

    `is_mended`: whether lone surrogates become U+FFFD, as the client may send what a policy wrote, or a tool
    that the policy called; else they are an error.
    """
    try:
        written = body.decode("utf-8-sig", "surrogatepass")
        data = json.loads(written)
        if "\\ud" in written.lower() or _SURROGATE.search(written):
            text = json.dumps(data, ensure_ascii=False)
            if not is_mended and (lone := _SURROGATE.search(text)):
                before = text[max(0, lone.start() - 40) : lone.start()]
                raise invalid(
                    f"the body has the lone surrogate {lone[0]!r}, half of a character, after {before!r}; "
                    "send complete characters"
                )
            data = json.loads(readable(text))
    except (ValueError, RecursionError) as error:
        raise invalid(f"the body is not JSON ({error}); send a JSON object") from None
    if not is_plain(data):
        raise invalid(
            f"the body has a number beyond those of JSON, or more than {MOST_LEVELS} levels; send plain JSON"
        )
    return data


_SURROGATE = re.compile("[\ud800-\udfff]")


@dataclass(frozen=True)
class Served:
    """A server's limits for requests, and its defaults for fields that a request does not set."""

    name: str
    """The name of the served model or training run; a request's field `model` must be this name or empty."""
    tokenizer: Tokenizer
    length: int
    """Maximum number of tokens of a sample, prompt and completion together."""
    max_samples: int
    """Maximum number of completions of one request."""
    sampling: Sampling
    """Defaults for the sampling fields that a request over HTTP does not set."""
    decode_sampling: Sampling
    """The sampling of all JetStream Decode requests, which have no sampling fields but max_tokens."""
    has_penalties: bool = True
    is_answers_only: bool = False
    """Whether clients get the text of answers alone, without thoughts, token ids and log-probs."""


@dataclass(frozen=True)
class Ask:
    """A client's request for `n` completions, checked and completed with the server's defaults."""

    start: Start
    """The command that makes the host decode the completions; `Streams.submitted` adds the samples' ids."""
    n: int = 1
    request_id: str = ""


def rendered(prompt: Prompt, served: Served) -> tuple[int, ...]:
    """Returns the tokens of a text or chat prompt exactly as `served.tokenizer.render` makes them.

    Raises RequestError if the tokenizer cannot encode the prompt, or the prompt is too long.
    """
    with refusals(served):
        return tuple(served.tokenizer.render(prompt, served.length - 1))


@contextmanager
def refusals(served: Served) -> Iterator[None]:
    """Context manager for encoding a prompt: a TaskError becomes a RequestError."""
    try:
        yield
    except TooLongError as error:
        raise context_exceeded("the prompt", f"at least {error.fewest}", served.length) from None
    except TaskError as error:
        raise invalid(str(error)) from None


def checked_ids(ids: Iterable[int], served: Served, name: str) -> tuple[int, ...]:
    checked, size = tuple(ids), served.tokenizer.vocab_size
    for token in checked:
        if not 0 <= token < size:
            raise invalid(
                f"{name} has the id {token}, and the tokenizer's ids are 0..{size - 1}; use the served "
                "model's tokenizer"
            )
    return checked


def that_fits(prompt: tuple[int, ...], served: Served) -> tuple[int, ...]:
    if not prompt:
        raise invalid("the prompt is empty; give at least one token")
    if len(prompt) >= served.length:
        raise context_exceeded("the prompt", len(prompt), served.length)
    return prompt


def at_least(value: int, least: int, name: str) -> int:
    if value < least:
        raise invalid(f"{name}={value} is below {least}; give {least} or more", name)
    return value
