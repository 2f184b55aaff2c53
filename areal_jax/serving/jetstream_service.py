"""The two gRPC services of one generation host: JetStream's Orchestrator, and Rollout of areal-jax.

Handlers receive bytes and parse them here, so a malformed message gets INVALID_ARGUMENT like any other bad
request. Sockets and threads are in `serving.endpoint`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from typing import Any

import grpc
from google.protobuf.message_factory import GetMessageClass

from areal_jax.generation import jetstream
from areal_jax.generation.commands import Pause, Statistics, Tokens, Unpause, Wake
from areal_jax.secret import Secret
from areal_jax.serving.answers import AnswerStream
from areal_jax.serving.http import Metrics
from areal_jax.serving.outputs import Output, outputs
from areal_jax.serving.proto import rollout_pb2 as messages
from areal_jax.serving.requests import (
    RequestError,
    Served,
    decode_ask,
    generate_ask,
    invalid,
    parsed,
)
from areal_jax.serving.streams import Stream, Streams
from areal_jax.types import ArealError, Trajectory, VersionedParams

POLL_S = 0.005

DEADLINE_S = 120.0
"""Time limit, in seconds, for the host to carry out a Pause, Resume or Swap request."""

protocol = jetstream.protocol()

Publish = Callable[[str, int], VersionedParams]
"""`publish(path, version)` publishes the weights at `path` to the host under a version above `version`."""

Method = Callable[[Any, Any], Awaitable[Any]]


class Services:
    """The gRPC methods of both services; `request` is a parsed protobuf message, `context` is gRPC's."""

    def __init__(self, streams: Streams, served: Served, metrics: Metrics, publish: Publish | None) -> None:
        self._streams, self._served, self._metrics, self._publish = streams, served, metrics, publish
        self._swapping = asyncio.Lock()

    # --- JetStream's Orchestrator ---------------------------------------------------------------------------

    # A DecodeRequest has no sampling fields: it is greedy unless `serve` samples.
    async def Decode(self, request: Any, context: Any) -> None:
        """Streams tokens as they are sampled, EOS included; for a text prompt also the tokens' text."""
        started_s = time.monotonic()
        ask = await asyncio.to_thread(decode_ask, request, self._served)
        has_text = request.WhichOneof("content") == "text_content"
        response = AnswerStream(self._served.tokenizer, needs_text=has_text)
        with self._streams.submitted(ask) as stream:
            async for _, output, text in self._outputs(stream, [response], started_s):
                if isinstance(output, Tokens):
                    await context.write(_decoded(output.tokens, text if has_text else ""))
                elif text and has_text:
                    await context.write(_decoded((), text))

    async def HealthCheck(self, request: Any, context: Any) -> Any:
        """Answers whether the decode loop runs; a paused loop counts as running."""
        return protocol.HealthCheckResponse(is_live=self._streams.is_live)

    # --- our own Rollout ------------------------------------------------------------------------------------

    async def Generate(self, request: Any, context: Any) -> None:
        started_s = time.monotonic()
        ask = await asyncio.to_thread(generate_ask, request, self._served)
        responses = [AnswerStream(self._served.tokenizer) for _ in range(ask.n)]
        with self._streams.submitted(ask) as stream:
            await context.write(messages.GenerateResponse(prompt=messages.Prompt(token_ids=ask.start.prompt)))
            async for member, output, text in self._outputs(stream, responses, started_s):
                await context.write(_generated(member, output, text))

    async def Cancel(self, request: Any, context: Any) -> Any:
        if not request.request_id:
            raise invalid("request_id is empty; give the request_id of the Generate to cancel")
        return messages.CancelResponse(was_found=self._streams.cancel(request.request_id))

    async def Pause(self, request: Any, context: Any) -> Any:
        self._require_control()
        self._streams.tell(Pause())
        return self._described(await self._until(lambda now: now.is_paused, "paused"))

    async def Resume(self, request: Any, context: Any) -> Any:
        self._require_control()
        self._streams.tell(Unpause())
        return self._described(await self._until(lambda now: not now.is_paused, "resumed"))

    async def Swap(self, request: Any, context: Any) -> Any:
        """Loads the weights at the request's path, and answers once the host decodes with these weights.

        Raises RequestError if the host does not use the weights within DEADLINE_S (120 s).
        """
        publish = self._require_control()
        async with self._swapping:
            started_s = time.monotonic()
            version = self._streams.host.statistics().version
            try:
                value = await asyncio.to_thread(publish, request.path, version)
            except RequestError:
                raise
            except ArealError as error:
                raise RequestError("FAILED_PRECONDITION", str(error)) from None
            now = await self._until(lambda now: now.version >= value.version, "on the new version")
            seconds = time.monotonic() - started_s
            return messages.SwapResponse(version=now.version, digest=now.digest, seconds=seconds)

    async def Statistics(self, request: Any, context: Any) -> Any:
        return self._described(self._streams.host.statistics())

    def _outputs(
        self, stream: Stream, responses: Sequence[AnswerStream], started_s: float
    ) -> AsyncIterator[Output]:
        return outputs(
            stream,
            responses,
            self._metrics,
            started_s=started_s,
            is_answers_only=self._served.is_answers_only,
        )

    def _require_control(self) -> Publish:
        """Returns the function that publishes weights. Raises RequestError on a host of a training run."""
        if self._publish is None:
            raise RequestError(
                "FAILED_PRECONDITION",
                "this host belongs to a training run, which controls its versions: pause and swap only a "
                "server started by `areal-jax serve`",
            )
        return self._publish

    def _described(self, now: Statistics) -> Any:
        names = {*messages.StatisticsResponse.DESCRIPTOR.fields_by_name} - {"model"}
        figures = {name: getattr(now, name) for name in names}
        return messages.StatisticsResponse(model=self._served.name, **figures)

    async def _until(self, holds: Callable[[Statistics], bool], what: str) -> Statistics:
        """Waits until `holds(statistics)` is true of the host's statistics; returns those statistics.

        Raises RequestError if the host ends before that, or after DEADLINE_S (120 s). `what`: the awaited
        state, for the message, such as "paused".
        """
        end_s = time.monotonic() + DEADLINE_S
        while self._streams.is_live and time.monotonic() < end_s:
            now = self._streams.host.statistics()
            if holds(now):
                return now
            self._streams.tell(Wake())  # an idle host looks for a newer version only after a command
            await asyncio.sleep(POLL_S)
        if not self._streams.is_live:
            raise RequestError(
                "UNAVAILABLE",
                f"the host ended before it was {what}; see the server's log, and start the server again",
            )
        raise RequestError(
            "DEADLINE_EXCEEDED",
            f"the host was not {what} within {DEADLINE_S:g} s; see the server's log, or retry later",
        )


def _decoded(ids: tuple[int, ...], text: str) -> Any:
    sample = protocol.DecodeResponse.StreamContent.Sample(text=text, token_ids=ids)
    return protocol.DecodeResponse(stream_content=protocol.DecodeResponse.StreamContent(samples=[sample]))


def _generated(member: int, output: Tokens | Trajectory, text: str) -> Any:
    if isinstance(output, Tokens):
        return messages.GenerateResponse(
            sampled=messages.Sampled(
                member=member,
                token_ids=output.tokens,
                logp=output.logp,
                version=output.version,
                text=text,
            )
        )
    return messages.GenerateResponse(
        finished=messages.Finished(
            member=member,
            stop_reason=output.stop_reason,
            interruptions=output.interruptions,
            is_reproducible=output.is_reproducible,
            text=text,
        )
    )


# --- the gRPC side ------------------------------------------------------------------------------------------


def handlers(services: Services, metrics: Metrics) -> list[grpc.GenericRpcHandler]:
    """Returns the handlers of both services, for `server.add_generic_rpc_handlers`."""
    theirs = protocol.DESCRIPTOR.services_by_name["Orchestrator"]
    ours = messages.DESCRIPTOR.services_by_name["Rollout"]
    return [_service(descriptor, services, metrics) for descriptor in (theirs, ours)]


def _service(descriptor: Any, services: Services, metrics: Metrics) -> grpc.GenericRpcHandler:
    methods: dict[str, grpc.RpcMethodHandler] = {}
    for method in descriptor.methods:
        make = (
            grpc.unary_stream_rpc_method_handler
            if method.server_streaming
            else grpc.unary_unary_rpc_method_handler
        )
        answer = _answering(getattr(services, method.name), method, metrics)
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
        status = "UNKNOWN"
        try:
            result = await run(parsed(kind, data), context)
            status = "OK"
            return result
        except RequestError as error:
            status = error.code
            await context.abort(grpc.StatusCode[error.code], str(error))
        except asyncio.CancelledError:  # the client disconnected, or its deadline passed
            status = "CANCELLED"
            raise
        finally:
            metrics.requests.labels(method.name, status).inc()

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
