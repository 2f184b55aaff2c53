"""Bodies of OpenAI's HTTP interface: checked, and turned into an `Ask`.

Fields that OpenAI has and this server cannot honour are refused by name, so that no client gets another
answer than it asked for. Extensions have the names that other servers use: top_k, min_p, repetition_penalty,
stop_token_ids, chat_template_kwargs, return_token_ids, request_id; min_version is ours.
"""

from __future__ import annotations

import ctypes
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from areal_jax.generation.commands import Start
from areal_jax.generation.slots import MAX_STOP_TOKENS, Penalties
from areal_jax.serving.bodies import Integer, StopTexts, Tool, validated
from areal_jax.serving.requests import (
    Ask,
    RequestError,
    Served,
    at_least,
    checked_ids,
    invalid,
    refusals,
    rendered,
    that_fits,
)
from areal_jax.tasks.tokenizers import chat_tokens
from areal_jax.tasks.tool_calls import Notation, is_in_thought
from areal_jax.types import Prompt, Sampling

NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "best_of": (1,),
    "echo": (False,),
    "suffix": ("",),
    "frequency_penalty": (0,),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "top_logprobs": (0,),
    "functions": ([],),
    "function_call": ("none",),
    "parallel_tool_calls": (True,),
    "ignore_eos": (False,),
    "min_tokens": (0,),
    "skip_special_tokens": (True,),
    "include_stop_str_in_output": (False,),
    "add_generation_prompt": (True,),
    "continue_final_message": (False,),
    "length_penalty": (1,),
    "use_beam_search": (False,),
}
"""Fields of OpenAI and vLLM that cannot be honoured -> the values, beside null, that ask for nothing."""

UNUSED = frozenset(
    {
        "user",
        "metadata",
        "store",
        "service_tier",
        "safety_identifier",
        "prompt_cache_key",
        "prompt_cache_retention",
        "prediction",
    }
)
"""Fields of OpenAI that do not change an answer."""


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


class StreamOptions(BaseModel):
    model_config = ConfigDict(extra="ignore")
    include_usage: bool = False


class AskBody(BaseModel):
    """The fields that completions and chats share; those left out have the server's defaults."""

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
    stop: StopTexts = []
    stop_token_ids: list[Integer] = []
    presence_penalty: Single = 0.0
    repetition_penalty: Single = 1.0
    logit_bias: dict[Integer, Single] = {}
    min_version: Integer = 0
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()
    return_token_ids: bool = False


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


class CompletionBody(AskBody):
    prompt: Any
    logprobs: Integer | None = None
    """0: the log-prob of each token; those of other tokens are not kept."""


class ChatBody(AskBody):
    messages: list[dict[str, Any]]
    tools: list[Tool] | None = None
    tool_choice: Any = None
    logprobs: bool | None = None
    max_completion_tokens: Integer | None = None
    chat_template_kwargs: dict[str, Any] = Field({})


@dataclass(frozen=True)
class Asked:
    """A checked request, and the form in which the client wants the answer."""

    ask: Ask
    stops: tuple[str, ...]
    """Texts that end a completion and are left out of its text."""
    is_stream: bool
    has_usage: bool
    """Whether a stream ends with the number of tokens."""
    has_logprobs: bool
    has_ids: bool
    """Whether the answer has token ids and versions."""
    notation: Notation = "none"
    """How the completions write tool calls; "none" if the client sent no tools."""
    is_in_thought: bool = False
    """Whether a completion begins inside a thought."""


def completion_asked(data: Any, served: Served) -> Asked:
    """Checks the body of a completions request. Raises RequestError if it is not valid."""
    body = _body(CompletionBody, data)
    if body.logprobs:
        said = f"logprobs={body.logprobs} is not supported, because log-probs of other tokens are not kept"
        raise invalid(f"{said}; give 0", "logprobs")
    prompt = body.prompt
    if isinstance(prompt, list) and prompt and isinstance(prompt[0], str | list):
        if len(prompt) > 1:
            raise invalid(f"prompt has {len(prompt)} prompts; send one request for each", "prompt")
        (prompt,) = prompt
    if isinstance(prompt, str):
        tokens = rendered(Prompt(text=prompt), served)
    elif isinstance(prompt, list) and all(type(token) is int for token in prompt):
        tokens = checked_ids(prompt, served, "prompt")
    else:
        raise invalid(f"prompt={prompt!r:.80}: give a text, or a list of token ids", "prompt")
    return _asked(body, tokens, served, has_logprobs=body.logprobs is not None)


def chat_asked(data: Any, served: Served) -> Asked:
    """Checks the body of a chat request, and renders its messages. Raises RequestError if it is not valid."""
    body = _body(ChatBody, data)
    tools = tools_of(body.tools, body.tool_choice)
    if not body.messages:
        raise invalid("messages is empty; give at least one message", "messages")
    if body.max_completion_tokens is not None:
        body.max_tokens = body.max_completion_tokens
    tokens = _chat(body.messages, tools, body.chat_template_kwargs, served)
    return _asked(
        body,
        tokens,
        served,
        has_logprobs=bool(body.logprobs),
        notation=served.tokenizer.notation if tools else "none",
        is_in_thought=is_in_thought(served.tokenizer.decode(tokens[-8:])),
    )


def tools_of(tools: list[Tool] | None, choice: Any) -> list[Tool]:
    """Returns the tools that the model may call; raises RequestError if `choice` asks for more than that."""
    if choice not in (None, "auto", "none"):
        said = f"tool_choice={choice!r:.80}: a model cannot be made to call a tool; give auto or none"
        raise invalid(said, "tool_choice")
    return tools or [] if choice != "none" else []


def usage(prompt: int, sampled: int) -> dict[str, int]:
    """Returns numbers of tokens, as answers have them."""
    return {"prompt_tokens": prompt, "completion_tokens": sampled, "total_tokens": prompt + sampled}


def sent(value: Mapping[str, Any]) -> str:
    """Returns a server-sent event."""
    return f"data: {json.dumps(value, ensure_ascii=False)}\n\n"


def _chat(
    said: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]],
    arguments: Mapping[str, Any],
    served: Served,
) -> tuple[int, ...]:
    """Returns the conversation as tokens."""
    with refusals(served):
        return tuple(chat_tokens(served.tokenizer, said, tools, arguments, served.length - 1))


def _body(kind: type[Any], data: Any) -> Any:
    if isinstance(data, dict):
        for name, values in NEUTRAL.items():
            if data.get(name) is not None and data[name] not in values:
                raise invalid(f"{name}={data[name]!r:.80} is not supported; leave it out", name)
        data = {name: value for name, value in data.items() if name not in NEUTRAL and name not in UNUSED}
    return validated(kind, data)


def _asked(
    body: AskBody,
    tokens: tuple[int, ...],
    served: Served,
    *,
    has_logprobs: bool,
    notation: Notation = "none",
    is_in_thought: bool = False,
) -> Asked:
    if served.is_answers_only and (has_logprobs or body.return_token_ids):
        raise invalid(
            "logprobs and return_token_ids are not available, because this server sends answers alone (serve "
            "--answers-only); leave them out"
        )
    if body.model and body.model != served.name:
        said = f"model={body.model!r:.80} is not served here; give {served.name!r}"
        raise RequestError("NOT_FOUND", said, "model_not_found", "model")
    return Asked(
        ask_of(body, tokens, served),
        tuple(body.stop),
        body.stream,
        body.stream_options.include_usage,
        has_logprobs,
        body.return_token_ids,
        notation,
        is_in_thought,
    )
