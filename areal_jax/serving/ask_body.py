"""The fields of completions and chats that say what the host decodes: checked, and turned into an `Ask`."""

from __future__ import annotations

import ctypes
from dataclasses import replace
from typing import Annotated

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from areal_jax.generation.commands import Start
from areal_jax.generation.slots import MAX_STOP_TOKENS, Penalties
from areal_jax.serving.bodies import Integer, Stop
from areal_jax.serving.requests import Ask, Served, at_least, checked_ids, invalid, that_fits
from areal_jax.types import Sampling

COLDEST, HOTTEST = 0.001, 100.0
"""Bounds of a temperature other than 0; outside them, float32 log-probs could be infinite or NaN.

A lower one counts as 0 (greedy), as clients mean it and other servers take it.
"""

LARGEST_REPETITION = 1000.0
"""Bound of repetition_penalty, and its reciprocal the other one, for the same reason."""

MAX_STOPS, LONGEST_STOP = 16, 256
MAX_BIASES, LARGEST_BIAS = 1024, 100.0
LONGEST_ID = 256

Single = Annotated[float, AfterValidator(lambda value: ctypes.c_float(value).value)]
"""A number rounded to float32, in which the engine computes with it."""


class AskBody(BaseModel):
    """The fields of a request that say what is decoded; those left out have the server's defaults."""

    model_config = ConfigDict(extra="forbid")
    model: str = ""
    request_id: str = Field("", max_length=LONGEST_ID)
    """The request's name for /cancel."""
    temperature: Single | None = None
    top_p: Single | None = None
    top_k: Integer | None = None
    min_p: Single | None = None
    n: Integer = 1
    seed: int | None = Field(None, ge=-(2**63), lt=2**64)
    max_tokens: Integer | None = None
    stop: Stop = []
    stop_token_ids: list[Integer] = []
    presence_penalty: Single = 0.0
    repetition_penalty: Single = 1.0
    logit_bias: dict[Integer, Single] = {}
    min_version: Integer = 0


def ask_of(body: AskBody, prompt: tuple[int, ...], served: Served) -> Ask:
    """Returns the request as an Ask; fields that it does not set get the defaults of `served`.

    Raises RequestError if a field is not valid, or exceeds the limits of `served`.
    """
    seed = body.seed
    if seed is not None and seed >= 2**63:
        seed -= 2**64  # the same 64 bits
    start = Start(
        (),
        that_fits(prompt, served),
        at_least(body.min_version, 0, "min_version"),
        _sampling(body, served.sampling),
        _penalties(body, served),
        seed,
        _stop_tokens(body, served),
        drawn_as=None if seed is None else 0,
        is_request=True,
    )
    if not 1 <= body.n <= served.max_samples:
        raise invalid(f"n={body.n} completions are out of range; give 1 to {served.max_samples}", "n")
    return Ask(start, body.n, body.request_id)


def _sampling(body: AskBody, default: Sampling) -> Sampling:
    names = ("temperature", "top_k", "top_p", "min_p", "max_tokens")
    given = {name: value for name in names if (value := getattr(body, name)) is not None}
    if given.get("top_k") == -1:  # as other servers write it
        given["top_k"] = 0
    if 0 < given.get("temperature", 0) < COLDEST:
        given["temperature"] = 0.0
    sampling = replace(default, **given, stop=tuple(body.stop))
    if not 0 <= sampling.temperature <= HOTTEST:
        said = f"temperature={sampling.temperature:g} is out of range; give 0 (greedy) to {HOTTEST:g}"
        raise invalid(said, "temperature")
    at_least(sampling.top_k, 0, "top_k")
    at_least(sampling.max_tokens, 1, "max_tokens")
    if not 0 < sampling.top_p <= 1:
        raise invalid(f"top_p={sampling.top_p:g} is out of range; give more than 0 and at most 1", "top_p")
    if not 0 <= sampling.min_p < 1:
        raise invalid(f"min_p={sampling.min_p:g} is out of range; give at least 0 and less than 1", "min_p")
    if len(sampling.stop) > MAX_STOPS:
        raise invalid(f"{len(sampling.stop)} stop texts are too many; give at most {MAX_STOPS}", "stop")
    for text in sampling.stop:
        if len(text) > LONGEST_STOP:
            said = f"the stop text {text!r:.40} has {len(text)} characters; give 1 to {LONGEST_STOP}"
            raise invalid(said, "stop")
    return sampling


def _penalties(body: AskBody, served: Served) -> Penalties | None:
    repetition, presence, bias = body.repetition_penalty, body.presence_penalty, body.logit_bias
    if not 1 / LARGEST_REPETITION <= repetition <= LARGEST_REPETITION:
        raise invalid(
            f"repetition_penalty={repetition:g} is out of range; give {1 / LARGEST_REPETITION:g} to "
            f"{LARGEST_REPETITION:g} (1: no penalty)",
            "repetition_penalty",
        )
    if not abs(presence) <= LARGEST_BIAS:
        raise invalid(
            f"presence_penalty={presence:g} is out of range; give -{LARGEST_BIAS:g} to {LARGEST_BIAS:g}",
            "presence_penalty",
        )
    if len(bias) > MAX_BIASES:
        raise invalid(f"logit_bias has {len(bias)} ids; give at most {MAX_BIASES}", "logit_bias")
    checked_ids(bias, served, "logit_bias")
    for token, value in bias.items():
        if not abs(value) <= LARGEST_BIAS:
            said = (
                f"logit_bias[{token}]={value:g} is out of range; give -{LARGEST_BIAS:g} to {LARGEST_BIAS:g}"
            )
            raise invalid(said, "logit_bias")
    penalties = Penalties(repetition, presence, bias)
    if penalties == Penalties():
        return None
    if not served.has_penalties:
        raise invalid("a training run's host does not support penalties and logit_bias; leave them out")
    return penalties


def _stop_tokens(body: AskBody, served: Served) -> tuple[int, ...]:
    ends = served.tokenizer.end_ids
    most = MAX_STOP_TOKENS - len(ends)
    given = tuple(sorted({*body.stop_token_ids} - {*ends}))
    if len(given) > most:
        said = f"{len(given)} stop_token_ids besides the end tokens are too many; give at most {most}"
        raise invalid(said, "stop_token_ids")
    return checked_ids(given, served, "stop_token_ids")
