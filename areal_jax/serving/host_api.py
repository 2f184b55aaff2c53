"""The HTTP routes that control a generation host: cancel a request, pause and resume, swap the weights."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from pydantic import BaseModel, ConfigDict, Field
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from areal_jax.generation.commands import InboxCommand, Pause, Statistics, Unpause, Wake
from areal_jax.serving.bodies import validated
from areal_jax.serving.http import Metrics, answering, body_of, described
from areal_jax.serving.requests import RequestError, json_of
from areal_jax.serving.streams import Streams
from areal_jax.types import ArealError, VersionedParams

POLL_S = 0.005

DEADLINE_S = 120.0
"""Time limit, in seconds, for the host to carry out a /pause, /resume or /swap."""

Publish = Callable[[str, int], VersionedParams]
"""`publish(path, version)` publishes the weights at `path` to the host under a version above `version`."""

Act = Callable[[Any], Awaitable[Mapping[str, Any]]]


class ControlBody(BaseModel):
    model_config = ConfigDict(extra="forbid")


class CancelBody(ControlBody):
    request_id: str = Field(min_length=1)


class SwapBody(ControlBody):
    path: str
    """A folder of versions, of which the newest is taken, or a Hugging Face model."""


class HostApi:
    """The handlers; `publish`: loads the weights of a /swap; None: a training run controls the host."""

    def __init__(self, streams: Streams, name: str, metrics: Metrics, publish: Publish | None) -> None:
        self._streams, self._name, self._metrics, self._publish = streams, name, metrics, publish
        self._swapping = asyncio.Lock()

    def routes(self) -> list[Route]:
        return [
            self._route("cancel", CancelBody, self._cancel),
            self._route("pause", ControlBody, self._pause),
            self._route("resume", ControlBody, self._resume),
            self._route("swap", SwapBody, self._swap),
        ]

    def _route(self, method: str, kind: type[ControlBody], act: Act) -> Route:
        async def answer(request: Request) -> Response:
            # Any web page can have a browser on this machine post to loopback, without reading the answer.
            if (origin := request.headers.get("origin")) is not None:
                raise RequestError(
                    "PERMISSION_DENIED",
                    f"the request has the header Origin: {origin:.80}, as those of web pages, which must not "
                    "control the host; send it from a program, without that header",
                )
            body = await body_of(request)
            return JSONResponse(await act(validated(kind, json_of(body) if body else {})))

        return Route(f"/{method}", answering(method, self._metrics, answer), methods=["POST"])

    async def _cancel(self, body: CancelBody) -> Mapping[str, Any]:
        return {"was_found": self._streams.cancel(body.request_id)}

    async def _pause(self, _: ControlBody) -> Mapping[str, Any]:
        return await self._until_paused(Pause(), True)

    async def _resume(self, _: ControlBody) -> Mapping[str, Any]:
        return await self._until_paused(Unpause(), False)

    async def _until_paused(self, command: InboxCommand, is_paused: bool) -> Mapping[str, Any]:
        self._require_control()
        self._streams.tell(command)
        what = "paused" if is_paused else "resumed"
        now = await self._until(lambda now: now.is_paused == is_paused, what)
        return described(self._name, self._streams.is_live, now)

    async def _swap(self, body: SwapBody) -> Mapping[str, Any]:
        """Loads the weights at the body's path, and answers once the host decodes with these weights.

        Raises RequestError if the host does not use the weights within DEADLINE_S (120 s).
        """
        publish = self._require_control()
        async with self._swapping:
            started_s = time.monotonic()
            version = self._streams.host.statistics().version
            try:
                value = await asyncio.to_thread(publish, body.path, version)
            except RequestError:
                raise
            except ArealError as error:
                raise RequestError("FAILED_PRECONDITION", str(error)) from None
            now = await self._until(lambda now: now.version >= value.version, "on the new version")
            return {
                "version": now.version,
                "digest": now.digest,
                "seconds": time.monotonic() - started_s,
            }

    def _require_control(self) -> Publish:
        """Returns the function that publishes weights. Raises RequestError on a host of a training run."""
        if self._publish is None:
            raise RequestError(
                "FAILED_PRECONDITION",
                "this host belongs to a training run, which controls its versions: pause and swap only a "
                "server started by `areal-jax serve`",
            )
        return self._publish

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
