"""OpenAI's chat interface to the episodes of a process, each at an address with a secret of its own.

The address is all that an agent knows: `/episodes/SECRET/v1`. An agent that renders its prompts itself posts
their token ids to `/episodes/SECRET/inference/v1/generate`, as to vLLM. Tokens are drawn as the run's config
says, so what a request says of temperature, top_k and the like is not used.
"""

from __future__ import annotations

import asyncio
import json
import secrets
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from pydantic import BaseModel, ConfigDict, Field
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
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
from areal_jax.episodes.episode import Episode
from areal_jax.serving.bodies import Stop, Tool, validated
from areal_jax.serving.connections import http_server
from areal_jax.serving.generate_bodies import GenerateBody, generated, token_request
from areal_jax.serving.http import ERRORS, body_of, error_response
from areal_jax.serving.listening import listening
from areal_jax.serving.openai_bodies import StreamOptions
from areal_jax.serving.requests import RequestError, context_exceeded, invalid, json_of
from areal_jax.serving.token_logprobs import LogProbs
from areal_jax.tasks.errors import TaskError
from areal_jax.tasks.tool_calls import finish_reason

MODEL = "policy"
"""The name of the model that the gateway lists; requests may name any."""

RETRY = "x-stainless-retry-count"
"""The header with which OpenAI's client says how often it has sent a request before."""


class Asked(BaseModel):
    """What of a chat request the gateway uses; agents may send more."""

    model_config = ConfigDict(extra="ignore")
    messages: list[dict[str, Any]] = Field(min_length=1)
    tools: list[Tool] | None = None
    tool_choice: Any = None
    n: int | None = Field(None, ge=1, le=1)
    max_tokens: int | None = Field(None, ge=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    stop: Stop = []
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
        try:
            longest = self._of(request).most_tokens
        except RequestError as error:
            return error_response(error)
        own = {"id": MODEL, "object": "model", "created": 0, "owned_by": "areal-jax"}
        return JSONResponse({"object": "list", "data": [own | {"max_model_len": longest}]})

    async def _chat(self, request: Request) -> Response:
        try:
            chats = self._of(request)
            body = await body_of(request)
            asked = await apart(partial(_asked, body), len(body))
            found = await _answered(chats, asked, _is_retry(request))
        except RequestError as error:
            return error_response(error)
        except ClientDisconnect:
            return Response(status_code=499)
        answer = _Answer(asked, found, chats)
        if asked.stream:
            return StreamingResponse(answer.streamed(), media_type="text/event-stream")
        return JSONResponse(answer.whole())

    async def _generate(self, request: Request) -> Response:
        try:
            chats = self._of(request)
            body = await body_of(request)
            asked = await apart(partial(_tokens_asked, body, chats.tokenizer.vocab_size), len(body))
            with _refusals():
                turn = await chats.extend(asked, _is_retry(request))
        except RequestError as error:
            return error_response(error)
        except ClientDisconnect:
            return Response(status_code=499)
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


def _asked(body: bytes) -> Asked:
    asked = validated(Asked, json_of(body, is_mended=True))
    if asked.tool_choice not in (None, "auto", "none"):
        said = f"tool_choice={asked.tool_choice!r:.80}: a policy cannot be made to call a tool"
        raise invalid(f"{said}; give auto or none", "tool_choice")
    return asked


def _tokens_asked(body: bytes, vocab_size: int) -> TokenRequest:
    return token_request(validated(GenerateBody, json_of(body, is_mended=True)), vocab_size)


async def _answered(chats: Chats, asked: Asked, is_retry: bool) -> ChatTurn:
    tools = asked.tools or [] if asked.tool_choice != "none" else []
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

    def __init__(self, asked: Asked, found: ChatTurn, chats: Chats) -> None:
        self._asked, self._found, self._chats = asked, found, chats
        self._head = {"id": f"chatcmpl-{secrets.token_hex(12)}", "created": int(time.time()), "model": MODEL}
        self._reason = finish_reason(found.turn.stop_reason, found.has_calls)
        sampled = len(found.turn.tokens)
        prompt = len(found.prompt)
        self._usage = {
            "prompt_tokens": prompt,
            "completion_tokens": sampled,
            "total_tokens": prompt + sampled,
        }

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
        yield _sent(head | self._prompt() | {"choices": [first]})
        yield _sent(head | {"choices": [last]})
        if self._asked.stream_options is not None and self._asked.stream_options.include_usage:
            yield _sent(head | {"choices": [], "usage": self._usage})
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


def _sent(value: dict[str, Any]) -> str:
    return f"data: {json.dumps(value, ensure_ascii=False)}\n\n"
