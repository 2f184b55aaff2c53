"""What a client asks, checked before the host hears of it: from protobuf messages to an `Ask`, or an error.

Pure: no socket, no thread. Whatever bytes arrive, the answer is an Ask that the host can serve or a
RequestError whose message names the value and the remedy.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from google.protobuf.message import DecodeError, Message

from areal_jax.generation.slots import MAX_STOP_TOKENS
from areal_jax.tasks.task import TaskError
from areal_jax.tasks.tokenizers import Tokenizer
from areal_jax.types import ArealError, Penalties, Prompt, Sampling

M = TypeVar("M", bound=Message)

COLDEST, HOTTEST = 0.001, 100.0
"""Temperatures other than 0: beyond these float32 log-probs are not finite."""

MAX_STOPS, LONGEST_STOP = 16, 256
MAX_BIASES, LARGEST_BIAS = 1024, 100.0
LONGEST_ID = 256


class RequestError(ArealError):
    """An error of one request; `code` is the name of its gRPC status."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


def invalid(message: str) -> RequestError:
    return RequestError("INVALID_ARGUMENT", message)


@dataclass(frozen=True)
class Served:
    """What requests are checked against."""

    name: str
    """The model's, as `serve` was given it."""
    tokenizer: Tokenizer
    length: int
    """Prompt and completion at most, in tokens."""
    max_samples: int
    """Completions of one request at most."""
    sampling: Sampling
    """What Generate leaves out."""
    decode_sampling: Sampling
    """How JetStream's Decode samples: its request says nothing of that."""


@dataclass(frozen=True)
class Ask:
    """A request that can be served."""

    prompt: tuple[int, ...]
    sampling: Sampling
    penalties: Penalties | None = None
    stop_tokens: tuple[int, ...] = ()
    """Beside the tokenizer's EOS."""
    n: int = 1
    seed: int | None = None
    min_version: int = 0
    request_id: str = ""


def parsed(kind: type[M], data: bytes) -> M:
    """The message that the bytes encode. Raises RequestError."""
    try:
        return kind.FromString(data)
    except (DecodeError, UnicodeDecodeError) as error:
        raise invalid(
            f"{len(data)} bytes are no {kind.DESCRIPTOR.full_name} ({error}); encode the message with the "
            "service's own .proto"
        ) from None


def decode_ask(request: Any, served: Served) -> Ask:
    """Of a JetStream DecodeRequest. Raises RequestError."""
    if request.session_cache:
        raise invalid(
            f"session_cache={request.session_cache!r:.80}: no session is kept here; leave it empty and send "
            "the whole conversation"
        )
    content = request.WhichOneof("content")
    if content == "text_content":
        prompt = rendered(Prompt(text=request.text_content.text), served)
    elif content == "token_content":
        prompt = checked_ids(request.token_content.token_ids, served, "token_ids")
    else:
        raise invalid("the request has no content; give text_content or token_content")
    sampling = served.decode_sampling
    if request.max_tokens:
        sampling = replace(sampling, max_tokens=_at_least(request.max_tokens, 1, "max_tokens"))
    return Ask(_that_fits(prompt, served), sampling)


def generate_ask(request: Any, served: Served) -> Ask:
    """Of a GenerateRequest of our own. Raises RequestError."""
    if request.model and request.model != served.name:
        raise invalid(f"model={request.model!r:.80} is not served here; ask for {served.name!r}, or for none")
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
    return Ask(
        _that_fits(prompt, served),
        _sampling(request, served.sampling),
        _penalties(request, served),
        _stop_tokens(request, served),
        _n(request, served),
        _seed(request),
        _at_least(request.min_version, 0, "min_version"),
        request.request_id,
    )


def rendered(prompt: Prompt, served: Served) -> tuple[int, ...]:
    """The prompt's tokens, exactly as the tokenizer renders it: no BOS is added to them, nothing is cut."""
    try:
        return tuple(served.tokenizer.render(prompt))
    except TaskError as error:
        raise invalid(str(error)) from None


def checked_ids(ids: Iterable[int], served: Served, name: str) -> tuple[int, ...]:
    checked, size = tuple(ids), served.tokenizer.vocab_size
    for token in checked:
        if not 0 <= token < size:
            raise invalid(
                f"{name} has the id {token}, and the tokenizer's are 0..{size - 1}; was it encoded with "
                "another one?"
            )
    return checked


def _that_fits(prompt: tuple[int, ...], served: Served) -> tuple[int, ...]:
    if not prompt:
        raise invalid("the prompt is empty; give at least one token")
    if len(prompt) >= served.length:
        raise invalid(
            f"the prompt has {len(prompt)} tokens, and prompt and completion have {served.length}; shorten "
            "it, or serve with a larger generation.length"
        )
    return prompt


def _sampling(request: Any, default: Sampling) -> Sampling:
    given = {
        name: getattr(request, name)
        for name in ("temperature", "top_k", "top_p", "min_p", "max_tokens")
        if request.HasField(name)
    }
    sampling = replace(default, **given, stop=tuple(request.stop))
    if sampling.temperature != 0 and not COLDEST <= sampling.temperature <= HOTTEST:
        raise invalid(
            f"temperature={sampling.temperature:g} is neither 0, which is greedy, nor within {COLDEST:g} to "
            f"{HOTTEST:g}"
        )
    _at_least(sampling.top_k, 0, "top_k")
    _at_least(sampling.max_tokens, 1, "max_tokens")
    if not 0 < sampling.top_p <= 1:
        raise invalid(f"top_p={sampling.top_p:g} is no share; give one above 0, at most 1")
    if not 0 <= sampling.min_p < 1:
        raise invalid(f"min_p={sampling.min_p:g} is no share below 1; give one from 0 on")
    if len(sampling.stop) > MAX_STOPS:
        raise invalid(f"{len(sampling.stop)} stop texts; give at most {MAX_STOPS}")
    for text in sampling.stop:
        if not 1 <= len(text) <= LONGEST_STOP:
            raise invalid(f"the stop text {text!r:.40} has {len(text)} characters; give 1 to {LONGEST_STOP}")
    return sampling


def _penalties(request: Any, served: Served) -> Penalties | None:
    repetition = request.repetition_penalty if request.HasField("repetition_penalty") else 1.0
    if not (math.isfinite(repetition) and repetition > 0):
        raise invalid(f"repetition_penalty={repetition:g} is not above 0; 1 changes nothing")
    presence = request.presence_penalty
    if not abs(presence) <= LARGEST_BIAS:
        raise invalid(f"presence_penalty={presence:g} is not within -{LARGEST_BIAS:g} to {LARGEST_BIAS:g}")
    bias = dict(request.logit_bias)
    if len(bias) > MAX_BIASES:
        raise invalid(f"logit_bias has {len(bias)} ids; give at most {MAX_BIASES}")
    checked_ids(bias, served, "logit_bias")
    for token, value in bias.items():
        if not abs(value) <= LARGEST_BIAS:
            raise invalid(
                f"logit_bias[{token}]={value:g} is not within -{LARGEST_BIAS:g} to {LARGEST_BIAS:g}"
            )
    penalties = Penalties(repetition, presence, bias)
    return None if penalties == Penalties() else penalties


def _stop_tokens(request: Any, served: Served) -> tuple[int, ...]:
    most = MAX_STOP_TOKENS - 1  # the EOS is one more
    given = tuple(sorted({*request.stop_tokens} - {served.tokenizer.eos_id}))
    if len(given) > most:
        raise invalid(f"{len(given)} stop_tokens beside the EOS; give at most {most}")
    return checked_ids(given, served, "stop_tokens")


def _n(request: Any, served: Served) -> int:
    n = request.n if request.HasField("n") else 1
    if not 1 <= n <= served.max_samples:
        raise invalid(f"n={n} is no number of completions; give 1 to {served.max_samples}")
    return n


def _seed(request: Any) -> int | None:
    if not request.HasField("seed"):
        return None
    return _at_least(request.seed, 0, "seed")


def _at_least(value: int, least: int, name: str) -> int:
    if value < least:
        raise invalid(f"{name}={value} is below {least}; give {least} or more")
    return value
