"""OpenAI's HTTP interface to one generation host: models, completions and chat completions, also streamed."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import aclosing
from typing import Any

from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from areal_jax.generation.commands import Tokens
from areal_jax.serving.answers import AnswerStream, Output, outputs
from areal_jax.serving.http import Handler, Metrics, answering, body_of, error_body
from areal_jax.serving.openai_bodies import Asked, chat_asked, completion_asked, sent, usage
from areal_jax.serving.requests import RequestError, Served, json_of
from areal_jax.serving.streams import Streams
from areal_jax.serving.text_parts import BeforeStop, LogProbs, MessageParts, Part
from areal_jax.tasks.tokenizers import Tokenizer
from areal_jax.tasks.tool_calls import AnswerParts, finish_reason, message_of
from areal_jax.types import Trajectory

POLL_S = 0.05
"""Seconds between two looks at whether a client has gone."""


class OpenAIApi:
    """The handlers; `deadline_s`: the longest that a request may take, in seconds."""

    def __init__(self, streams: Streams, served: Served, metrics: Metrics, deadline_s: float) -> None:
        self._streams, self.served, self._metrics = streams, served, metrics
        self._deadline_s, self._started_s = deadline_s, int(time.time())

    def routes(self) -> list[Route]:
        return [
            Route("/v1/models", self._models, methods=["GET"]),
            Route("/v1/models/{name:path}", self._model, methods=["GET"]),
            Route("/v1/completions", self._handler("completions", completion_asked), methods=["POST"]),
            Route("/v1/chat/completions", self._handler("chat", chat_asked), methods=["POST"]),
        ]

    async def _models(self, _: Request) -> Response:
        return JSONResponse({"object": "list", "data": [self._described()]})

    async def _model(self, request: Request) -> Response:
        name = request.path_params["name"]
        if name != self.served.name:
            served = self.served.name
            said = f"model={name!r:.80} is not served; give {served!r}"
            raise RequestError("NOT_FOUND", said, "model_not_found", "model")
        return JSONResponse(self._described())

    def _described(self) -> dict[str, Any]:
        return {
            "id": self.served.name,
            "object": "model",
            "created": self._started_s,
            "owned_by": "areal-jax",
        }

    def _handler(self, name: str, check: Callable[[Any, Served], Asked]) -> Handler:
        async def answer(request: Request) -> Response:
            started_s = time.monotonic()
            body = await body_of(request)
            asked = await asyncio.to_thread(lambda: check(json_of(body), self.served))
            one = Answering(self, name, asked, started_s)
            return await _unless_gone(request, one.streamed() if asked.is_stream else one.whole())

        return answering(f"openai {name}", self._metrics, answer)

    async def outputs(self, asked: Asked, started_s: float) -> AsyncGenerator[Output, None]:
        """Submits the request and yields its outputs.

        Raises RequestError if the host refuses it, or it takes longer than the deadline.
        """
        responses = [AnswerStream(self.served.tokenizer) for _ in range(asked.ask.n)]
        only, end_s = self.served.is_answers_only, started_s + self._deadline_s
        with self._streams.submitted(asked.ask) as stream:
            found = outputs(stream, responses, self._metrics, started_s=started_s, is_answers_only=only)
            while True:
                try:
                    yield await asyncio.wait_for(anext(found), end_s - time.monotonic())
                except StopAsyncIteration:
                    return
                except TimeoutError:
                    raise RequestError(
                        "DEADLINE_EXCEEDED",
                        f"the request took longer than {self._deadline_s:g} s; ask for fewer tokens, retry "
                        "when fewer requests wait, or serve with a longer --deadline",
                    ) from None


async def _unless_gone(request: Request, answer: Coroutine[Any, Any, Response]) -> Response:
    """Returns the answer. If the client disconnects before, ends the answer and raises ClientDisconnect."""
    tasks = asyncio.ensure_future(answer), asyncio.ensure_future(_disconnected(request))
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        if tasks[0].done():
            return tasks[0].result()
        raise ClientDisconnect
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _disconnected(request: Request) -> None:
    """Returns when the client has gone."""
    while not await request.is_disconnected():
        await asyncio.sleep(POLL_S)


class Arriving:
    """One completion of a request, as far as it has arrived."""

    def __init__(self, index: int, asked: Asked, is_chat: bool, tokenizer: Tokenizer) -> None:
        self.index, self._asked, self._is_chat = index, asked, is_chat
        self._logprobs = LogProbs(tokenizer)
        self._before_stop = BeforeStop(asked.stops)
        self._parts = MessageParts(asked.notation, asked.is_in_thought) if is_chat else None
        self.text, self._tokens, self._logp, self._versions = "", [], [], []
        self._sent = 0
        """Number of tokens that `exact` has returned."""
        self.count = 0
        """Number of tokens sampled, also of those that the client does not get; known at the end."""
        self._end: dict[str, Any] = {}
        """What is known of the completion once it has ended."""
        self.stop_reason: str | None = None
        self.answer: AnswerParts | None = None

    def take(self, output: Output) -> Part:
        """Adds an output; returns what the client gets of it."""
        found = output.output
        is_last = isinstance(found, Trajectory)
        text = self._before_stop.push(output.text, is_last)
        self.text += text
        if isinstance(found, Tokens):
            self._tokens += found.tokens
            self._logp += found.logp
            self._versions += [found.version] * len(found.tokens)
        else:
            self.stop_reason, self.count = found.stop_reason, int(found.loss_mask.sum())
            self._end = {
                "interruptions": found.interruptions,
                "is_reproducible": found.is_reproducible,
            }
        if self._parts is None:
            return Part(text, "")
        part = self._parts.push(text)
        if is_last:
            rest, self.answer = self._parts.finish()
            part = Part(part.content + rest.content, part.reasoning + rest.reasoning)
        return part

    def exact(self) -> dict[str, Any]:
        """Log-probs of the tokens since the last call; with return_token_ids their ids and versions, too.

        With return_token_ids also, at the end, how often the version changed, and whether the completion is
        reproducible: no token was sampled with KV of an older version.
        """
        new, self._sent = slice(self._sent, None), len(self._tokens)
        tokens, logp = self._tokens[new], self._logp[new]
        fields: dict[str, Any] = {"logprobs": None}
        if self._asked.has_logprobs:
            form = self._logprobs.chat if self._is_chat else self._logprobs.completion
            fields["logprobs"] = form(tokens, logp)
        if self._asked.has_ids:
            fields |= {"token_ids": tokens, "versions": self._versions[new], **self._end}
        return fields

    @property
    def finish_reason(self) -> str | None:
        return finish_reason(self.stop_reason, self.answer is not None and bool(self.answer.calls))

    def message(self) -> dict[str, Any]:
        assert self.answer is not None
        message = message_of(self.answer, [f"call_{secrets.token_hex(12)}" for _ in self.answer.calls])
        return message | {"refusal": None}


class Answering:
    """One request and its answer, in OpenAI's form."""

    def __init__(self, api: OpenAIApi, name: str, asked: Asked, started_s: float) -> None:
        self._api, self._asked, self._started_s = api, asked, started_s
        self._is_chat = name == "chat"
        kind = "chat.completion" if self._is_chat else "text_completion"
        prefix = "chatcmpl" if self._is_chat else "cmpl"
        self._head = {
            "id": f"{prefix}-{secrets.token_hex(12)}",
            "object": kind,
            "created": int(time.time()),
            "model": api.served.name,
        }
        own = asked, self._is_chat, api.served.tokenizer
        self._choices = [Arriving(index, *own) for index in range(asked.ask.n)]

    async def whole(self) -> Response:
        """Returns the answer once it is complete."""
        async with aclosing(self._api.outputs(self._asked, self._started_s)) as found:
            async for output in found:
                self._choices[output.member].take(output)
        choices = [self._choice(choice) for choice in self._choices]
        return JSONResponse(self._head | self._prompt() | {"choices": choices, "usage": self._usage()})

    async def streamed(self) -> Response:
        """Returns a stream of server-sent events. An error of the first output is an HTTP error."""
        found = self._api.outputs(self._asked, self._started_s)
        first = await anext(found)
        return StreamingResponse(self._events(first, found), media_type="text/event-stream")

    async def _events(self, first: Output, found: AsyncGenerator[Output, None]) -> AsyncGenerator[str, None]:
        async with aclosing(found):
            if self._is_chat:
                for choice in self._choices:
                    yield self._event(choice, {"role": "assistant", "content": ""}, self._prompt())
            try:
                yield self._taken(first)
                async for output in found:
                    yield self._taken(output)
            except RequestError as error:  # the status is sent already
                yield sent(error_body(error))
                return
        if self._asked.has_usage:
            yield sent(self._chunk() | {"choices": [], "usage": self._usage()})
        yield "data: [DONE]\n\n"

    def _taken(self, output: Output) -> str:
        choice = self._choices[output.member]
        part = choice.take(output)
        delta: dict[str, Any] = {}
        if part.content or not self._is_chat:
            delta["content"] = part.content
        if part.reasoning:
            delta["reasoning_content"] = part.reasoning
        if choice.answer is not None and choice.answer.calls:
            calls = choice.message()["tool_calls"]
            delta["tool_calls"] = [{"index": place} | call for place, call in enumerate(calls)]
        return self._event(choice, delta, {} if self._is_chat else self._prompt())

    def _event(self, choice: Arriving, delta: dict[str, Any], more: dict[str, Any]) -> str:
        said = {"delta": delta} if self._is_chat else {"text": delta.get("content", "")}
        one = {"index": choice.index, **said, **choice.exact()}
        one["finish_reason"] = choice.finish_reason if choice.stop_reason is not None else None
        ending = {"usage": None} if self._asked.has_usage else {}
        return sent(self._chunk() | more | {"choices": [one]} | ending)

    def _chunk(self) -> dict[str, Any]:
        return self._head | ({"object": "chat.completion.chunk"} if self._is_chat else {})

    def _choice(self, choice: Arriving) -> dict[str, Any]:
        said = {"message": choice.message()} if self._is_chat else {"text": choice.text}
        return {"index": choice.index, **said, **choice.exact(), "finish_reason": choice.finish_reason}

    def _prompt(self) -> dict[str, Any]:
        return {"prompt_token_ids": list(self._asked.ask.start.prompt)} if self._asked.has_ids else {}

    def _usage(self) -> dict[str, Any]:
        return usage(len(self._asked.ask.start.prompt), sum(choice.count for choice in self._choices))
