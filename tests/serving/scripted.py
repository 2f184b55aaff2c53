"""A host that answers with written texts, behind the real streams and the real HTTP application."""

from __future__ import annotations

import asyncio
import queue
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import uvicorn

from areal_jax.generation.commands import Start, Statistics, Stop, Tokens
from areal_jax.serving.http import Metrics, http_app
from areal_jax.serving.openai_api import OpenAIApi
from areal_jax.serving.requests import Served
from areal_jax.serving.streams import Streams
from areal_jax.tasks.tokenizers import Tokenizer
from areal_jax.types import Sampling, Trajectory
from tests.hangs import HANG_S


class Scripted:
    """Answers the n-th request with the n-th text, `step` tokens at a time."""

    def __init__(self, tokenizer: Tokenizer, texts: list[str], step: int = 3) -> None:
        self.inbox: queue.Queue[Any] = queue.Queue()
        self.starts: list[Start] = []
        self._tokenizer, self._texts, self._step = tokenizer, texts, step
        self.streams: Streams

    def statistics(self) -> Statistics:
        return Statistics(version=3, slots=4)

    def run(self) -> None:
        while not isinstance(command := self.inbox.get(timeout=HANG_S), Stop) or command.samples:
            if isinstance(command, Start):
                self._answer(command)

    def _answer(self, start: Start) -> None:
        ids = [
            *self._tokenizer.encode(self._texts[len(self.starts) % len(self._texts)]),
            self._tokenizer.eos_id,
        ]
        assert start.sampling is not None
        stop_reason = "stop" if len(ids) <= start.sampling.max_tokens else "length"
        ids = ids[: start.sampling.max_tokens]
        self.starts.append(start)
        for sample in start.samples:
            for at in range(0, len(ids), self._step):
                some = tuple(ids[at : at + self._step])
                self.streams.hear(sample, Tokens(some, (-0.5,) * len(some), 3))
            n = len(ids)
            mask, versions = np.ones(n, bool), np.full(n, 3, np.int32)
            logp, turns = np.full(n, -0.5, np.float32), np.zeros(n, np.int32)
            tokens = np.array(ids, np.int32)
            trajectory = Trajectory(sample, tokens, mask, logp, versions, turns, Sampling(), stop_reason)
            self.streams.hear(sample, trajectory)


@contextmanager
def serving(tokenizer: Tokenizer, texts: list[str], **limits: Any) -> Iterator[tuple[str, Scripted]]:
    """Serves the texts under the name `scripted`; yields the base_url and the host."""
    loop = asyncio.new_event_loop()
    host = Scripted(tokenizer, texts)
    streams = Streams(loop, slots=4, queue=limits.get("queue", 64), room_tokens=100_000)
    host.streams, streams.host = streams, host  # type: ignore[assignment]
    sampling = Sampling(max_tokens=100)
    served = Served("scripted", tokenizer, 100_000, 64, sampling, sampling)
    metrics = Metrics(host.statistics)
    app = http_app("scripted", streams, metrics, None, OpenAIApi(streams, served, metrics, 60.0).routes())
    listening = socket.create_server(("127.0.0.1", 0))
    config = uvicorn.Config(app, log_config=None, lifespan="off", access_log=False)
    server = uvicorn.Server(config)
    threads = [
        threading.Thread(target=loop.run_until_complete, args=(server.serve([listening]),)),
        threading.Thread(target=host.run),
    ]
    for thread in threads:
        thread.start()
    try:
        yield f"http://127.0.0.1:{listening.getsockname()[1]}/v1", host
    finally:
        server.should_exit = True
        host.inbox.put(Stop())
        for thread in threads:
            thread.join(HANG_S)
