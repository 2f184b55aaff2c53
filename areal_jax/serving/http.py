"""The HTTP application of a server: /metrics for Prometheus; /health (JSON) for health checks and users.

All errors have OpenAI's form, also those of unknown paths (`ERRORS`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from http import HTTPStatus
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from areal_jax.generation.commands import Statistics
from areal_jax.secret import Secret
from areal_jax.serving.requests import RequestError
from areal_jax.serving.streams import Streams

GAUGES = {
    "version": "Policy version of the parameters in use",
    "slots": "Number of slots, which is the largest number of samples decoded at once",
    "live": "Slots that hold a sample",
    "waiting": "Samples without a slot",
    "is_paused": "1 while decoding is paused by a request to /pause, else 0",
    "pages": "KV pages",
    "free_pages": "KV pages that no sample uses",
}
COUNTERS = {
    "generated_tokens": "Tokens sampled",
    "interruptions": "Version changes during a sample, one for each sample affected",
    "recomputed_tokens": "Tokens with KV rebuilt under a newer version",
    "swaps": "Versions adopted",
    "swap_s": "Seconds spent adopting versions",
    "evictions": "Samples evicted from their slots because KV pages ran out",
    "prefills": "Prompts computed",
}
SECONDS = (0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100)

STATUS = {
    "INVALID_ARGUMENT": (400, "invalid_request_error"),
    "UNAUTHENTICATED": (401, "authentication_error"),
    "PERMISSION_DENIED": (403, "permission_error"),
    "NOT_FOUND": (404, "not_found_error"),
    "FAILED_PRECONDITION": (409, "conflict_error"),
    "OUT_OF_RANGE": (413, "invalid_request_error"),
    "RESOURCE_EXHAUSTED": (429, "rate_limit_error"),
    "CANCELLED": (499, "cancelled_error"),
    "UNAVAILABLE": (503, "unavailable_error"),
    "DEADLINE_EXCEEDED": (504, "timeout_error"),
}
"""Code of a RequestError -> HTTP status, and the type in the error's body; others are the server's: 500."""

LARGEST_BODY = 16 * 2**20
"""Maximum number of bytes of a request's body."""

Handler = Callable[[Request], Awaitable[Response]]


def error_response(error: RequestError) -> JSONResponse:
    """Returns the error in OpenAI's form; one that a later call may not get has the header retry-after."""
    status, _ = STATUS.get(error.code, (500, ""))
    headers = {"retry-after": "1"} if status in (429, 503) else None
    return JSONResponse(error_body(error), status, headers)


def error_body(error: RequestError) -> dict[str, Any]:
    _, kind = STATUS.get(error.code, (500, "server_error"))
    return _body(str(error), kind, error.reason or error.code.lower(), error.param)


def _body(message: str, kind: str, code: str, param: str | None = None) -> dict[str, Any]:
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


async def _refused(request: Request, error: Exception) -> Response:
    """Returns the answer to an unknown path or method."""
    assert isinstance(error, HTTPException)
    of = f"{request.method} {request.url.path!r:.80}"
    remedy = {404: "; see docs/serving.md for the paths", 405: "; use another method"}
    message = f"{of}: {error.detail}{remedy.get(error.status_code, '')}"
    kind = "not_found_error" if error.status_code == 404 else "invalid_request_error"
    code = HTTPStatus(error.status_code).name.lower()
    return JSONResponse(_body(message, kind, code), error.status_code, error.headers)


async def _failed(request: Request, error: Exception) -> Response:
    """Returns the answer to a request that raised an error, which the server's log has, too."""
    message = f"the server failed ({type(error).__name__}); its log has the reason"
    return JSONResponse(_body(message, "server_error", "internal"), 500)


async def _disconnected(_: Request, __: Exception) -> Response:
    return Response(status_code=499)


async def _erroneous(_: Request, error: Exception) -> Response:
    assert isinstance(error, RequestError)
    return error_response(error)


ERRORS: Mapping[Any, Any] = {
    HTTPException: _refused,
    RequestError: _erroneous,
    ClientDisconnect: _disconnected,
    Exception: _failed,
}
"""Starlette's handlers of errors that no handler of a path has caught."""


class Metrics:
    """Prometheus metrics of one server: counts of requests; the host's statistics, read at each scrape."""

    def __init__(self, statistics: Callable[[], Statistics]) -> None:
        self._statistics = statistics
        self.registry = CollectorRegistry()
        self.requests = Counter(
            "areal_jax_requests",
            "Requests by method and status; methods of gRPC begin with a capital letter",
            ["method", "status"],
            registry=self.registry,
        )
        self.first_token = Histogram(
            "areal_jax_first_token_seconds",
            "Seconds from the arrival of a request for completions, over gRPC or HTTP, to its first tokens",
            buckets=SECONDS,
            registry=self.registry,
        )
        self.first_answer = Histogram(
            "areal_jax_first_answer_seconds",
            "Seconds from the arrival of a request for completions to the content of its first <answer>",
            buckets=SECONDS,
            registry=self.registry,
        )
        self.registry.register(self)  # type: ignore[arg-type]

    def collect(self) -> Iterator[Metric]:
        now = self._statistics()
        for name, doc in GAUGES.items():
            yield GaugeMetricFamily(f"areal_jax_{name}", doc, float(getattr(now, name)))
        for name, doc in COUNTERS.items():
            yield CounterMetricFamily(f"areal_jax_{name}", doc, float(getattr(now, name)))

    def describe(self) -> list[Metric]:
        """Returns no metric; without this method, the registry would call `collect` at registration."""
        return []


@contextmanager
def counted(method: str, metrics: Metrics) -> Iterator[None]:
    """Context manager that counts a request by its status; `method`: the request's name in the counts."""
    status = "UNKNOWN"
    try:
        yield
        status = "OK"
    except RequestError as error:
        status = error.code
        raise
    except (ClientDisconnect, asyncio.CancelledError):  # the client has gone, or its deadline passed
        status = "CANCELLED"
        raise
    finally:
        metrics.requests.labels(method, status).inc()


def answering(method: str, metrics: Metrics, answer: Handler) -> Handler:
    """Returns a handler that answers as `answer` does, and counts each request as `method`."""

    async def handle(request: Request) -> Response:
        with counted(method, metrics):
            return await answer(request)

    return handle


async def body_of(request: Request) -> bytes:
    parts, size = [], 0
    async for part in request.stream():
        parts.append(part)
        size += len(part)
        if size > LARGEST_BODY:
            said = f"the body has more than {LARGEST_BODY} bytes; send a shorter one"
            raise RequestError("OUT_OF_RANGE", said, "request_too_large")
    return b"".join(parts)


def described(model: str, is_live: bool, now: Statistics) -> dict[str, Any]:
    """Returns a host's state and totals, as /health, /pause and /resume answer them."""
    figures = {name: getattr(now, name) for name in ("version", "digest", *GAUGES, *COUNTERS)}
    return {"status": "ok" if is_live else "ended", "model": model, **figures}


class RequireBearer:
    """ASGI middleware: a request without the secret gets status 401, in the form of OpenAI's errors."""

    def __init__(self, app: ASGIApp, secret: Secret) -> None:
        self._app, self._secret = app, secret

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        given = Headers(scope=scope).get("authorization") if scope["type"] == "http" else None
        if scope["type"] != "http" or self._secret.is_in(given):
            await self._app(scope, receive, send)
            return
        await error_response(RequestError("UNAUTHENTICATED", Secret.REFUSAL))(scope, receive, send)


def http_app(
    model: str, streams: Streams, metrics: Metrics, secret: Secret | None, routes: Sequence[Route] = ()
) -> Starlette:
    """Returns an ASGI application with /health, /metrics and `routes`; with `secret`, all require it.

    `model`: the name of the model, which /health returns. `streams`: the open requests of a generation host;
    /health describes that host. `metrics`: the counters that /metrics returns.
    """

    async def health(_: Request) -> Response:
        live = streams.is_live
        return JSONResponse(described(model, live, streams.host.statistics()), 200 if live else 503)

    async def exposition(_: Request) -> Response:
        return Response(generate_latest(metrics.registry), media_type=CONTENT_TYPE_LATEST)

    own = [Route("/health", health), Route("/metrics", exposition)]
    guards = [Middleware(RequireBearer, secret=secret)] if secret else []
    return Starlette(routes=[*own, *routes], middleware=guards, exception_handlers=ERRORS)
