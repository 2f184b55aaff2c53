"""Bodies of OpenAI's HTTP interface: checked, and turned into an `Ask`.

Fields that OpenAI has and this server cannot honour are refused by name, so that no client gets another
answer than it asked for. Extensions have the names that other servers use: top_k, min_p, repetition_penalty,
stop_token_ids, chat_template_kwargs, return_token_ids, request_id; min_version is ours.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from areal_jax.serving.ask_body import AskBody, ask_of
from areal_jax.serving.bodies import Integer, Tool, validated
from areal_jax.serving.requests import Ask, RequestError, Served, checked_ids, invalid, refusals, rendered
from areal_jax.tasks.tokenizers import chat_tokens
from areal_jax.tasks.tool_calls import Notation, is_in_thought
from areal_jax.types import Prompt

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


class StreamOptions(BaseModel):
    model_config = ConfigDict(extra="ignore")
    include_usage: bool = False


class Body(AskBody):
    """The fields that completions and chat completions share."""

    stream: bool = False
    stream_options: StreamOptions = StreamOptions()
    return_token_ids: bool = False


class CompletionBody(Body):
    prompt: Any
    logprobs: Integer | None = None
    """0: the log-prob of each token; those of other tokens are not kept."""


class ChatBody(Body):
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
    if body.tool_choice not in (None, "auto", "none"):
        raise invalid(
            f"tool_choice={body.tool_choice!r:.80}: a model cannot be made to call a tool; give auto or none",
            "tool_choice",
        )
    if not body.messages:
        raise invalid("messages is empty; give at least one message", "messages")
    tools = body.tools or [] if body.tool_choice != "none" else []
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
    body: Body,
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
