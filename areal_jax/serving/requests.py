"""Checks clients' requests: a protobuf message becomes an `Ask` for the host, or an error for the client.

Pure functions: no socket, no thread. Any bytes result in either an Ask that the host can serve or a
RequestError with a message that names the value and the remedy.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from google.protobuf.message import DecodeError, Message

from areal_jax.generation.commands import Start
from areal_jax.generation.slots import MAX_STOP_TOKENS, Penalties
from areal_jax.tasks.errors import TaskError, TooLongError
from areal_jax.tasks.plain_json import MOST_LEVELS, is_plain, readable
from areal_jax.tasks.tokenizers import Tokenizer
from areal_jax.types import ArealError, Prompt, Sampling

M = TypeVar("M", bound=Message)

COLDEST, HOTTEST = 0.001, 100.0
"""Bounds of a temperature other than 0; outside them, float32 log-probs could be infinite or NaN.

A lower one counts as 0 (greedy), as clients mean it and other servers take it.
"""

LARGEST_REPETITION = 1000.0
"""Bound of repetition_penalty, and its reciprocal the other one, for the same reason."""

MAX_STOPS, LONGEST_STOP = 16, 256
MAX_BIASES, LARGEST_BIAS = 1024, 100.0
LONGEST_ID = 256


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
    """Defaults for the sampling fields that a Generate request does not set."""
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


def parsed(kind: type[M], data: bytes) -> M:
    """Returns the message of type `kind` that `data` encodes; raises RequestError for malformed bytes."""
    try:
        return kind.FromString(data)
    except (DecodeError, UnicodeDecodeError) as error:
        raise invalid(
            f"{len(data)} bytes are not a {kind.DESCRIPTOR.full_name} ({error}); encode the message with the "
            "service's own .proto file"
        ) from None


def decode_ask(request: Any, served: Served) -> Ask:
    """Checks a JetStream DecodeRequest and returns it as an Ask; unset fields get the defaults of `served`.

    Raises RequestError if a field is not valid, or exceeds the limits of `served`.
    """
    if request.session_cache:
        raise invalid(
            f"session_cache={request.session_cache!r:.80}: this server keeps no sessions; leave it empty "
            "and send the whole conversation"
        )
    content = request.WhichOneof("content")
    if content == "text_content":
        prompt = rendered(Prompt(text=request.text_content.text), served)
    elif content == "token_content":
        if served.is_answers_only:
            raise invalid(
                "token_content is answered with token ids, and this server sends answers alone, as text "
                "(serve --answers-only); send text_content"
            )
        prompt = checked_ids(request.token_content.token_ids, served, "token_ids")
    else:
        raise invalid("the request has no content; give text_content or token_content")
    sampling = served.decode_sampling
    if request.max_tokens:
        sampling = replace(sampling, max_tokens=_at_least(request.max_tokens, 1, "max_tokens"))
    return Ask(Start((), _that_fits(prompt, served), 0, sampling, is_request=True))


def generate_ask(request: Any, served: Served) -> Ask:
    """Checks a GenerateRequest of areal-jax and returns it as an Ask; unset fields get `served`'s defaults.

    Raises RequestError if a field is not valid, or exceeds the limits of `served`.
    """
    if request.model and request.model != served.name:
        raise invalid(
            f"model={request.model!r:.80} is not served here; give {served.name!r}, or leave it empty"
        )
    if len(request.request_id) > LONGEST_ID:
        raise invalid(f"request_id has {len(request.request_id)} characters; give at most {LONGEST_ID}")
    kind = request.WhichOneof("prompt")
    if kind == "text":
        prompt = rendered(Prompt(text=request.text), served)
    elif kind == "chat":
        messages = [{"role": one.role, "content": one.content} for one in request.chat.messages]
        if not messages:
            raise invalid("chat has no messages; give at least one")
        prompt = rendered(Prompt(messages=messages), served)
    elif kind == "tokens":
        prompt = checked_ids(request.tokens.ids, served, "tokens")
    else:
        raise invalid("the request has no prompt; give text, tokens or chat")
    seed = request.seed if request.HasField("seed") else None
    start = Start(
        (),
        _that_fits(prompt, served),
        _at_least(request.min_version, 0, "min_version"),
        _sampling(request, served.sampling),
        _penalties(request, served),
        seed,
        _stop_tokens(request, served),
        drawn_as=None if seed is None else 0,
        is_request=True,
    )
    return Ask(start, _n(request, served), request.request_id)


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


def _that_fits(prompt: tuple[int, ...], served: Served) -> tuple[int, ...]:
    if not prompt:
        raise invalid("the prompt is empty; give at least one token")
    if len(prompt) >= served.length:
        raise context_exceeded("the prompt", len(prompt), served.length)
    return prompt


def _sampling(request: Any, default: Sampling) -> Sampling:
    given = {
        name: getattr(request, name)
        for name in ("temperature", "top_k", "top_p", "min_p", "max_tokens")
        if request.HasField(name)
    }
    if given.get("top_k") == -1:  # as other servers write it
        given["top_k"] = 0
    if 0 < given.get("temperature", 0) < COLDEST:
        given["temperature"] = 0.0
    sampling = replace(default, **given, stop=tuple(request.stop))
    if not 0 <= sampling.temperature <= HOTTEST:
        said = f"temperature={sampling.temperature:g} is out of range; give 0 (greedy) to {HOTTEST:g}"
        raise invalid(said, "temperature")
    _at_least(sampling.top_k, 0, "top_k")
    _at_least(sampling.max_tokens, 1, "max_tokens")
    if not 0 < sampling.top_p <= 1:
        raise invalid(f"top_p={sampling.top_p:g} is out of range; give more than 0 and at most 1", "top_p")
    if not 0 <= sampling.min_p < 1:
        raise invalid(f"min_p={sampling.min_p:g} is out of range; give at least 0 and less than 1", "min_p")
    if len(sampling.stop) > MAX_STOPS:
        raise invalid(f"{len(sampling.stop)} stop texts are too many; give at most {MAX_STOPS}")
    for text in sampling.stop:
        if not 1 <= len(text) <= LONGEST_STOP:
            raise invalid(f"the stop text {text!r:.40} has {len(text)} characters; give 1 to {LONGEST_STOP}")
    return sampling


def _penalties(request: Any, served: Served) -> Penalties | None:
    repetition = request.repetition_penalty if request.HasField("repetition_penalty") else 1.0
    if not 1 / LARGEST_REPETITION <= repetition <= LARGEST_REPETITION:
        raise invalid(
            f"repetition_penalty={repetition:g} is out of range; give {1 / LARGEST_REPETITION:g} to "
            f"{LARGEST_REPETITION:g} (1: no penalty)"
        )
    presence = request.presence_penalty
    if not abs(presence) <= LARGEST_BIAS:
        raise invalid(
            f"presence_penalty={presence:g} is out of range; give -{LARGEST_BIAS:g} to {LARGEST_BIAS:g}"
        )
    bias = dict(request.logit_bias)
    if len(bias) > MAX_BIASES:
        raise invalid(f"logit_bias has {len(bias)} ids; give at most {MAX_BIASES}")
    checked_ids(bias, served, "logit_bias")
    for token, value in bias.items():
        if not abs(value) <= LARGEST_BIAS:
            raise invalid(
                f"logit_bias[{token}]={value:g} is out of range; give -{LARGEST_BIAS:g} to {LARGEST_BIAS:g}"
            )
    penalties = Penalties(repetition, presence, bias)
    if penalties == Penalties():
        return None
    if not served.has_penalties:
        raise invalid("a training run's host does not support penalties and logit_bias; leave them out")
    return penalties


def _stop_tokens(request: Any, served: Served) -> tuple[int, ...]:
    ends = served.tokenizer.end_ids
    most = MAX_STOP_TOKENS - len(ends)
    given = tuple(sorted({*request.stop_tokens} - {*ends}))
    if len(given) > most:
        raise invalid(f"{len(given)} stop_tokens besides the end tokens are too many; give at most {most}")
    return checked_ids(given, served, "stop_tokens")


def _n(request: Any, served: Served) -> int:
    n = request.n if request.HasField("n") else 1
    if not 1 <= n <= served.max_samples:
        raise invalid(f"n={n} completions are out of range; give 1 to {served.max_samples}", "n")
    return n


def _at_least(value: int, least: int, name: str) -> int:
    if value < least:
        raise invalid(f"{name}={value} is below {least}; give {least} or more", name)
    return value
