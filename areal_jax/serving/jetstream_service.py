"""JetStream's gRPC service, Orchestrator, of one generation host.

Handlers receive bytes and parse them here, so a malformed message gets INVALID_ARGUMENT like any other bad
request. Sockets and threads are in `serving.endpoint`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from typing import Any, TypeVar

import grpc
from google.protobuf.message import DecodeError, Message
from google.protobuf.message_factory import GetMessageClass

from areal_jax.generation import jetstream
from areal_jax.generation.commands import Start, Tokens
from areal_jax.secret import Secret
from areal_jax.serving.answers import AnswerStream, outputs
from areal_jax.serving.http import Metrics, counted
from areal_jax.serving.requests import (
    Ask,
    RequestError,
    Served,
    at_least,
    checked_ids,
    invalid,
    rendered,
    that_fits,
)
from areal_jax.serving.streams import Streams
from areal_jax.types import Prompt

protocol = jetstream.protocol()

M = TypeVar("M", bound=Message)

Method = Callable[[Any, Any], Awaitable[Any]]


class OrchestratorMethods:
    """The service's methods; `request` is a parsed protobuf message, `context` is gRPC's."""

    def __init__(self, streams: Streams, served: Served, metrics: Metrics) -> None:
        self._streams, self._served, self._metrics = streams, served, metrics

    # A DecodeRequest has no sampling fields: it is greedy unless `serve` samples.
    async def Decode(self, request: Any, context: Any) -> None:
        """Streams tokens as they are sampled, EOS included; for a text prompt also the tokens' text."""
        started_s = time.monotonic()
        ask = await asyncio.to_thread(decode_ask, request, self._served)
        has_text = request.WhichOneof("content") == "text_content"
        response = AnswerStream(self._served.tokenizer, needs_text=has_text)
        only = self._served.is_answers_only
        with self._streams.submitted(ask) as stream:
            found = outputs(stream, [response], self._metrics, started_s=started_s, is_answers_only=only)
            async for _, output, text in found:
                if isinstance(output, Tokens):
                    await context.write(_decoded(output.tokens, text if has_text else ""))
                elif text and has_text:
                    await context.write(_decoded((), text))

    async def HealthCheck(self, request: Any, context: Any) -> Any:
        """Answers whether the decode loop runs; a paused loop counts as running."""
        return protocol.HealthCheckResponse(is_live=self._streams.is_live)


def _decoded(ids: tuple[int, ...], text: str) -> Any:
    sample = protocol.DecodeResponse.StreamContent.Sample(text=text, token_ids=ids)
    return protocol.DecodeResponse(stream_content=protocol.DecodeResponse.StreamContent(samples=[sample]))


# --- requests -----------------------------------------------------------------------------------------------


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
        sampling = replace(sampling, max_tokens=at_least(request.max_tokens, 1, "max_tokens"))
    return Ask(Start((), that_fits(prompt, served), 0, sampling, is_request=True))


# --- the gRPC side ------------------------------------------------------------------------------------------


def handler(orchestrator: OrchestratorMethods, metrics: Metrics) -> grpc.GenericRpcHandler:
    """Returns the service's handler, for `server.add_generic_rpc_handlers`."""
    descriptor = protocol.DESCRIPTOR.services_by_name["Orchestrator"]
    methods: dict[str, grpc.RpcMethodHandler] = {}
    for method in descriptor.methods:
        make = (
            grpc.unary_stream_rpc_method_handler
            if method.server_streaming
            else grpc.unary_unary_rpc_method_handler
        )
        answer = _answering(getattr(orchestrator, method.name), method, metrics)
        serialize = GetMessageClass(method.output_type).SerializeToString
        methods[method.name] = make(answer, response_serializer=serialize)
    return grpc.method_handlers_generic_handler(descriptor.full_name, methods)


def _answering(run: Method, method: Any, metrics: Metrics) -> Method:
    """Returns the gRPC handler of `method`, which parses a request and awaits `run(message, context)`.

    `method`: its protobuf descriptor. The handler turns a RequestError into a gRPC status, and counts each
    call by status in `metrics`.
    """
    kind = GetMessageClass(method.input_type)

    async def answer(data: bytes, context: Any) -> Any:
        try:
            with counted(method.name, metrics):
                return await run(parsed(kind, data), context)
        except RequestError as error:
            await context.abort(grpc.StatusCode[error.code], str(error))

    return answer


class RequireSecret(grpc.aio.ServerInterceptor):
    """gRPC interceptor: a call without the secret in its metadata ends with status UNAUTHENTICATED."""

    def __init__(self, secret: Secret) -> None:
        self._secret = secret

        async def refuse(_: bytes, context: Any) -> None:
            await context.abort(grpc.StatusCode.UNAUTHENTICATED, Secret.REFUSAL)

        self._refusal = grpc.unary_unary_rpc_method_handler(refuse)

    async def intercept_service(self, continuation: Any, handler_call_details: Any) -> Any:
        metadata: Mapping[str, Any] = dict(handler_call_details.invocation_metadata or ())
        if self._secret.is_in(metadata.get("authorization")):
            return await continuation(handler_call_details)
        return self._refusal
