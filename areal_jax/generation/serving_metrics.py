"""What the HTTP side says of the host: /metrics for Prometheus, /health for people and probes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import BaseRoute, Route

from areal_jax.generation.commands import Statistics
from areal_jax.generation.serving_secret import Secret

GAUGES = {
    "version": "Version of the parameters in force",
    "slots": "Samples decoded at once",
    "live": "Slots that hold a sample",
    "waiting": "Samples without a slot",
    "is_paused": "1 while nothing is decoded on request",
    "pages": "KV pages",
    "free_pages": "KV pages that hold nothing",
}
COUNTERS = {
    "generated_tokens": "Tokens sampled",
    "interruptions": "Samples under which the version changed",
    "recomputed_tokens": "Tokens whose KV was rebuilt",
    "swaps": "Versions adopted",
    "swap_s": "Seconds spent adopting versions",
    "evictions": "Samples taken out of their slots for want of pages",
    "prefills": "Prompts computed",
}
SECONDS = (0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100)


class Metrics:
    """Of one server: what its requests came to, and what its host says of itself when asked."""

    def __init__(self, statistics: Callable[[], Statistics]) -> None:
        self._statistics = statistics
        self.registry = CollectorRegistry()
        self.requests = Counter(
            "areal_jax_requests",
            "Calls by method and gRPC status",
            ["method", "status"],
            registry=self.registry,
        )
        self.first_token = Histogram(
            "areal_jax_first_token_seconds",
            "From a Generate's arrival to its first tokens",
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
        """Nothing: the host need not be up when a server is put together."""
        return []


def http_app(
    model: str,
    is_live: Callable[[], bool],
    statistics: Callable[[], Statistics],
    metrics: Metrics,
    secret: Secret | None,
    routes: Sequence[BaseRoute] = (),
) -> Any:
    """An ASGI application: /health, /metrics, and further `routes` under the same secret."""

    async def health(_: Request) -> Response:
        now, live = statistics(), is_live()
        figures = {
            "status": "ok" if live else "ended",
            "model": model,
            "version": now.version,
            "digest": now.digest,
            "slots": now.slots,
            "live": now.live,
            "waiting": now.waiting,
            "is_paused": now.is_paused,
            "pages": now.pages,
            "free_pages": now.free_pages,
        }
        return JSONResponse(figures, 200 if live else 503)

    async def exposition(_: Request) -> Response:
        return Response(generate_latest(metrics.registry), media_type=CONTENT_TYPE_LATEST)

    app = Starlette(routes=[Route("/health", health), Route("/metrics", exposition), *routes])
    return app if secret is None else _guarded(app, secret)


def _guarded(app: Any, secret: Secret) -> Any:
    async def guarded(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http":
            given = dict(scope["headers"]).get(b"authorization")
            if not secret.is_in(given):
                await PlainTextResponse(f"{Secret.REFUSAL}\n", 401)(scope, receive, send)
                return
        await app(scope, receive, send)

    return guarded
