"""OpenAI's chat interface to the episodes of a process, each at an address with a secret of its own.

The address is all that an agent knows: `/episodes/SECRET/v1`. An agent that renders its prompts itself posts
their token ids to `/episodes/SECRET/inference/v1/generate`, as to vLLM. Tokens are drawn as the run's config
says, so what a request says of temperature, top_k and the like is not used.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from pydantic import BaseModel, ConfigDict, Field
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from areal_jax.episodes.apart import apart
from areal_jax.episodes.chats import (
    ChatRequest,
    Chats,
    ChatTurn,
    NoRoomError,
    NoTurnsError,
    OverError,
    TokenRequest,
)
from areal_jax.episodes.episode import Episode, Turn
from areal_jax.serving.bodies import StopTexts, Tool, validated
from areal_jax.serving.connections import http_server, listening
from areal_jax.serving.http import ERRORS, body_of
from areal_jax.serving.openai_bodies import StreamOptions, sent, tools_of, usage
from areal_jax.serving.requests import RequestError, context_exceeded, invalid, json_of
from areal_jax.serving.text_parts import LogProbs
from areal_jax.tasks.errors import TaskError
from areal_jax.tasks.tool_calls import finish_reason

MODEL = "policy"
"""The name of the model that the gateway lists; requests may name any."""

RETRY = "x-stainless-retry-count"
"""The header with which OpenAI's client says how often it has sent a request before."""


class AgentBody(BaseModel):
    """What of a chat request the gateway uses; agents may send more."""

    model_config = ConfigDict(extra="ignore")
    messages: list[dict[str, Any]] = Field(min_length=1)
    tools: list[Tool] | None = None
    tool_choice: Any = None
    n: int | None = Field(None, ge=1, le=1)
    max_tokens: int | None = Field(None, ge=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    stop: StopTexts = []
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    logprobs: bool | None = None
    return_token_ids: bool | None = None
    chat_template_kwargs: dict[str, Any] = {}


class EpisodeGateway:
    """Serves the chats of open episodes, in the event loop of their workflows."""

    def __init__(self) -> None:
        """Begins to listen on loopback; called in a running event loop."""
        self._chats: dict[str, Chats] = {}
        opened = listening("127.0.0.1", 0)
        self._port = opened.getsockname()[1]
        path = "/episodes/{secret}"
        routes = [
            Route(f"{path}/v1/models", self._models, methods=["GET"]),
            Route(f"{path}/v1/chat/completions", self._chat, methods=["POST"]),
            Route(f"{path}/inference/v1/generate", self._generate, methods=["POST"]),
        ]
        app = Starlette(routes=routes, exception_handlers=ERRORS)
        self._server = http_server(app)
        self._task = asyncio.get_running_loop().create_task(self._server.serve(sockets=[opened]))

    def open(self, episode: Episode) -> tuple[str, Callable[[], None]]:
        """Returns the address of the episode's chats, and a function that ends them."""
        secret = secrets.token_urlsafe(24)
        self._chats[secret] = Chats(episode)
        return f"http://127.0.0.1:{self._port}/episodes/{secret}/v1", lambda: self._close(secret)

    def _close(self, secret: str) -> None:
        if (chats := self._chats.pop(secret, None)) is not None:
            chats.close()

    async def stop(self) -> None:
        self._server.should_exit = self._server.force_exit = True
        await self._task

    # --- requests -------------------------------------------------------------------------------------------

    def _of(self, request: Request) -> Chats:
        chats = self._chats.get(request.path_params["secret"])
        if chats is None:
            raise _over()
        return chats

    async def _models(self, request: Request) -> Response:
        longest = self._of(request).most_tokens
        own = {"id": MODEL, "object": "model", "created": 0, "owned_by": "areal-jax"}
        return JSONResponse({"object": "list", "data": [own | {"max_model_len": longest}]})

    async def _chat(self, request: Request) -> Response:
        chats = self._of(request)
        body = await body_of(request)
        asked = await apart(partial(_asked, body), len(body))
        found = await _answered(chats, asked, _is_retry(request))
        answer = _Answer(asked, found, chats)
        if asked.stream:
            return StreamingResponse(answer.streamed(), media_type="text/event-stream")
        return JSONResponse(answer.whole())

    async def _generate(self, request: Request) -> Response:
        chats = self._of(request)
        body = await body_of(request)
        asked = await apart(partial(_tokens_asked, body, chats.tokenizer.vocab_size), len(body))
        with _refusals():
            turn = await chats.extend(asked, _is_retry(request))
        return JSONResponse(generated(turn, len(asked.tokens)))


def _is_retry(request: Request) -> bool:
    retries = request.headers.get(RETRY, "0")
    return retries.isdecimal() and int(retries) > 0


def _over() -> RequestError:
    return RequestError("NOT_FOUND", "there is no such episode, or it has ended; end the agent")


@contextmanager
def _refusals() -> Iterator[None]:
    try:
        yield
    except OverError:
        raise _over() from None
    except NoRoomError as error:
        raise context_exceeded("the conversation", error.tokens, error.length) from None
    except NoTurnsError as error:
        raise invalid(
            f"the episode has had {error.turns} turns, as many as episode.max_turns; end the conversation"
        ) from None


def _asked(body: bytes) -> AgentBody:
    return validated(AgentBody, json_of(body, is_mended=True))


def _tokens_asked(body: bytes, vocab_size: int) -> TokenRequest:
    return token_request(validated(GenerateBody, json_of(body, is_mended=True)), vocab_size)


async def _answered(chats: Chats, asked: AgentBody, is_retry: bool) -> ChatTurn:
    tools = tools_of(asked.tools, asked.tool_choice)
    limits = [n for n in (asked.max_tokens, asked.max_completion_tokens) if n is not None]
    own = tuple(asked.messages), tuple(tools), asked.chat_template_kwargs
    try:
        with _refusals():
            return await chats.answer(
                ChatRequest(*own, min(limits, default=None), tuple(asked.stop)), is_retry
            )
    except TaskError as error:
        raise invalid(str(error)) from None


class _Answer:
    """One answer in OpenAI's form."""

    def __init__(self, asked: AgentBody, found: ChatTurn, chats: Chats) -> None:
        self._asked, self._found, self._chats = asked, found, chats
        self._head = {"id": f"chatcmpl-{secrets.token_hex(12)}", "created": int(time.time()), "model": MODEL}
        self._reason = finish_reason(found.turn.stop_reason, found.has_calls)
        self._usage = usage(len(found.prompt), len(found.turn.tokens))

    def whole(self) -> dict[str, Any]:
        choice = {"index": 0, "message": self._found.message, **self._exact(), "finish_reason": self._reason}
        head = self._head | {"object": "chat.completion"} | self._prompt()
        return head | {"choices": [choice], "usage": self._usage}

    async def streamed(self) -> AsyncIterator[str]:
        """Yields the answer as one chunk of its stream, because a turn is complete before it is answered."""
        message = dict(self._found.message)
        if calls := message.get("tool_calls"):
            message["tool_calls"] = [{"index": place} | call for place, call in enumerate(calls)]
        first = {"index": 0, "delta": message, **self._exact(), "finish_reason": None}
        last = {"index": 0, "delta": {}, "finish_reason": self._reason}
        head = self._head | {"object": "chat.completion.chunk"}
        yield sent(head | self._prompt() | {"choices": [first]})
        yield sent(head | {"choices": [last]})
        if self._asked.stream_options is not None and self._asked.stream_options.include_usage:
            yield sent(head | {"choices": [], "usage": self._usage})
        yield "data: [DONE]\n\n"

    def _exact(self) -> dict[str, Any]:
        turn, fields = self._found.turn, {}
        if self._asked.logprobs:
            own = turn.tokens.tolist(), turn.logp.tolist()
            fields["logprobs"] = LogProbs(self._chats.tokenizer).chat(*own)
        if self._asked.return_token_ids:
            fields |= {"token_ids": turn.tokens.tolist(), "versions": turn.versions.tolist()}
        return fields

    def _prompt(self) -> dict[str, Any]:
        return {"prompt_token_ids": self._found.prompt} if self._asked.return_token_ids else {}


# --- token ids, as vLLM takes them -------------------------------------------------------------------------


class GenerateSampling(BaseModel):
    """What of `sampling_params` is used; stop_token_ids is not: a turn ends with the run's end token."""

    model_config = ConfigDict(extra="ignore")
    max_tokens: int | None = Field(default=None, ge=1)
    stop: StopTexts | None = None
    n: int | None = Field(default=None, ge=1, le=1)


class GenerateBody(BaseModel):
    """What of a request is used; clients may send more."""

    model_config = ConfigDict(extra="ignore")
    token_ids: list[int] = Field(min_length=1)
    sampling_params: GenerateSampling = GenerateSampling()
    stream: bool | None = None
    features: Any = None
    content_parts: Any = None


def token_request(body: GenerateBody, vocab_size: int) -> TokenRequest:
    """Returns the request; raises RequestError for an unknown id, for images, and for a stream."""
    for token in body.token_ids:
        if not 0 <= token < vocab_size:
            raise invalid(
                f"token_ids contains {token}, but the policy's ids are 0 to {vocab_size - 1}; render prompts "
                "with the policy's tokenizer"
            )
    if body.features is not None or body.content_parts is not None:
        raise invalid("the policy reads text alone; send no images, videos or sounds")
    if body.stream:
        raise invalid("stream=true: a turn is sent once it is complete; leave stream out")
    sampling = body.sampling_params
    return TokenRequest(tuple(body.token_ids), sampling.max_tokens, tuple(sampling.stop or ()))


def generated(turn: Turn, prompt_tokens: int) -> dict[str, Any]:
    """Returns the answer: ids, log-probs, and as an extension the policy version of each token."""
    ids = turn.tokens.tolist()
    logprobs = [
        {"token": f"token_id:{token}", "logprob": value, "bytes": None, "top_logprobs": []}
        for token, value in zip(ids, turn.logp.tolist(), strict=True)
    ]
    choice = {
        "index": 0,
        "token_ids": ids,
        "logprobs": {"content": logprobs},
        "finish_reason": turn.stop_reason,
        "versions": turn.versions.tolist(),
    }
    head = {"request_id": f"gen-{secrets.token_hex(12)}"}
    return head | {"choices": [choice], "usage": usage(prompt_tokens, len(ids))}
