"""The served protocol: JetStream's Orchestrator and the Rollout service, over one host.

Handlers take bytes and parse them here, so that malformed ones are an error of the request like any other.
The server itself, its sockets and threads, is `runtime.serve`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import grpc
from google.protobuf.message_factory import GetMessageClass

from areal_jax.generation.commands import Pause, Statistics, Unpause
from areal_jax.generation.jetstream import protocol
from areal_jax.generation.proto import rollout_pb2 as messages
from areal_jax.generation.serving_metrics import Metrics
from areal_jax.generation.serving_requests import (
    RequestError,
    Served,
    decode_ask,
    generate_ask,
    invalid,
    parsed,
)
from areal_jax.generation.serving_secret import Secret
from areal_jax.generation.serving_streams import Finished, Sampled, Streams
from areal_jax.generation.text import TextStream
from areal_jax.types import ArealError, VersionedParams

POLL_S = 0.005

Publish = Callable[[str, int], VersionedParams]
"""`publish(path, version)`: make the weights at `path` the host's next version, newer than `version`."""

Method = Callable[[Any, Any], Awaitable[Any]]


class Orchestrator:
    """JetStream's service. Greedy unless `serve` says otherwise: a DecodeRequest does not name a sampling."""

    def __init__(self, streams: Streams, served: Served) -> None:
        self._streams, self._served = streams, served

    async def Decode(self, request: Any, context: Any) -> None:
        """A text is answered with text and tokens, tokens with tokens alone. The EOS is one of them."""
        ask = await asyncio.to_thread(decode_ask, request, self._served)
        has_text = request.WhichOneof("content") == "text_content"
        text = TextStream(self._served.tokenizer)
        with self._streams.submitted(ask) as stream:
            async for item in stream.items():
                if isinstance(item, Sampled):
                    ids = item.tokens.tokens
                    await context.write(_decoded(ids, text.push(ids) if has_text else ""))
                elif rest := text.finish() if has_text else "":
                    await context.write(_decoded((), rest))

    async def HealthCheck(self, request: Any, context: Any) -> Any:
        """True while paused too: statistics say so."""
        return protocol.HealthCheckResponse(is_live=self._streams.is_live)


class Rollout:
    """Our own service. `deadline_s`: how long a pause or a swap may take to be in force."""

    def __init__(
        self, streams: Streams, served: Served, metrics: Metrics, publish: Publish, deadline_s: float
    ) -> None:
        self._streams, self._served, self._metrics = streams, served, metrics
        self._publish, self._deadline_s = publish, deadline_s
        self._swapping = asyncio.Lock()

    async def Generate(self, request: Any, context: Any) -> None:
        started_s = time.monotonic()
        ask = await asyncio.to_thread(generate_ask, request, self._served)
        texts = [TextStream(self._served.tokenizer) for _ in range(ask.n)]
        with self._streams.submitted(ask) as stream:
            await context.write(messages.GenerateResponse(prompt=messages.Prompt(token_ids=ask.prompt)))
            is_first = True
            async for item in stream.items():
                if is_first:
                    self._metrics.first_token.observe(time.monotonic() - started_s)
                    is_first = False
                await context.write(_generated(item, texts[item.member]))

    async def Cancel(self, request: Any, context: Any) -> Any:
        if not request.request_id:
            raise invalid("request_id is empty; give the name that the Generate was given")
        return messages.CancelResponse(was_found=self._streams.cancel(request.request_id))

    async def Pause(self, request: Any, context: Any) -> Any:
        self._streams.tell(Pause())
        return self._described(await self._until(lambda now: now.is_paused, "paused"))

    async def Resume(self, request: Any, context: Any) -> Any:
        self._streams.tell(Unpause())
        return self._described(await self._until(lambda now: not now.is_paused, "resumed"))

    async def Swap(self, request: Any, context: Any) -> Any:
        """Answers once the host has adopted the version; of two at a time the second waits."""
        async with self._swapping:
            started_s = time.monotonic()
            version = self._streams.host.statistics().version
            try:
                value = await asyncio.to_thread(self._publish, request.path, version)
            except RequestError:
                raise
            except ArealError as error:
                raise RequestError("FAILED_PRECONDITION", str(error)) from None
            self._streams.wake()
            now = await self._until(lambda now: now.version >= value.version, "swapped")
            seconds = time.monotonic() - started_s
            return messages.SwapResponse(version=now.version, digest=now.digest, seconds=seconds)

    async def Statistics(self, request: Any, context: Any) -> Any:
        return self._described(self._streams.host.statistics())

    def _described(self, now: Statistics) -> Any:
        names = {*messages.StatisticsResponse.DESCRIPTOR.fields_by_name} - {"model"}
        figures = {name: getattr(now, name) for name in names}
        return messages.StatisticsResponse(model=self._served.name, **figures)

    async def _until(self, holds: Callable[[Statistics], bool], what: str) -> Statistics:
        """The host's statistics once they are so. Raises RequestError after the deadline."""
        end_s = time.monotonic() + self._deadline_s
        while self._streams.is_live and time.monotonic() < end_s:
            now = self._streams.host.statistics()
            if holds(now):
                return now
            await asyncio.sleep(POLL_S)
        if not self._streams.is_live:
            raise RequestError("UNAVAILABLE", f"the host ended before it was {what}")
        raise RequestError("DEADLINE_EXCEEDED", f"the host was not {what} within {self._deadline_s:g} s")


def _decoded(ids: tuple[int, ...], text: str) -> Any:
    sample = protocol.DecodeResponse.StreamContent.Sample(text=text, token_ids=ids)
    return protocol.DecodeResponse(stream_content=protocol.DecodeResponse.StreamContent(samples=[sample]))


def _generated(item: Sampled | Finished, text: TextStream) -> Any:
    if isinstance(item, Sampled):
        t = item.tokens
        return messages.GenerateResponse(
            sampled=messages.Sampled(
                member=item.member,
                token_ids=t.tokens,
                logp=t.logp,
                version=t.version,
                text=text.push(t.tokens),
            )
        )
    return messages.GenerateResponse(
        finished=messages.Finished(
            member=item.member,
            stop_reason=item.stop_reason,
            interruptions=item.interruptions,
            is_reproducible=item.is_reproducible,
            text=text.finish(),
        )
    )


# --- the gRPC side ------------------------------------------------------------------------------------------


def handlers(orchestrator: Orchestrator, rollout: Rollout, metrics: Metrics) -> list[grpc.GenericRpcHandler]:
    """Both services, for `server.add_generic_rpc_handlers`."""
    services = {
        protocol.DESCRIPTOR.services_by_name["Orchestrator"]: orchestrator,
        messages.DESCRIPTOR.services_by_name["Rollout"]: rollout,
    }
    return [_service(descriptor, service, metrics) for descriptor, service in services.items()]


def _service(descriptor: Any, service: Any, metrics: Metrics) -> grpc.GenericRpcHandler:
    methods: dict[str, grpc.RpcMethodHandler] = {}
    for method in descriptor.methods:
        make = (
            grpc.unary_stream_rpc_method_handler
            if method.server_streaming
            else grpc.unary_unary_rpc_method_handler
        )
        answer = _answering(getattr(service, method.name), method, metrics)
        methods[method.name] = make(answer, response_serializer=_serialized)
    return grpc.method_handlers_generic_handler(descriptor.full_name, methods)


def _answering(run: Method, method: Any, metrics: Metrics) -> Method:
    """The method on bytes: its errors become statuses, and every call is counted by its status."""
    kind = GetMessageClass(method.input_type)

    async def answer(data: bytes, context: Any) -> Any:
        status = "UNKNOWN"
        try:
            result = await run(parsed(kind, data), context)
            status = "OK"
            return result
        except RequestError as error:
            status = error.code
            await context.abort(grpc.StatusCode[error.code], str(error))
        except asyncio.CancelledError:  # the client has gone, or its deadline has passed
            status = "CANCELLED"
            raise
        finally:
            metrics.requests.labels(method.name, status).inc()

    return answer


def _serialized(message: Any) -> bytes:
    return message.SerializeToString()


class RequireSecret(grpc.aio.ServerInterceptor):
    """Calls whose metadata does not carry the secret end with UNAUTHENTICATED, whatever they ask for."""

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
