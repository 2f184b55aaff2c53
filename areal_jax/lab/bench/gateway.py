"""Measures what the chats of agents cost beside decoding, with a policy that takes no time."""

from __future__ import annotations

import asyncio
import json
import statistics
import string
import subprocess
import sys
import threading
import time
from typing import Any

import numpy as np

from areal_jax.assembly.devices import machine
from areal_jax.control import events as e
from areal_jax.episodes.conversation import Conversation
from areal_jax.episodes.episode import Episode
from areal_jax.episodes.limits import Limits
from areal_jax.episodes.workflow_runner import WorkflowRunner
from areal_jax.tasks.tokenizers import CharTokenizer
from areal_jax.types import NOT_SAMPLED, ArealError, Prompt, SampleId, Sampling, Trajectory

DEADLINE_S = 300.0
TOKENIZER = CharTokenizer(string.printable)

CLIENTS = """
import http.client, json, sys, time
from concurrent.futures import ThreadPoolExecutor
from urllib.parse import urlsplit

urls, turns, at_once = json.loads(sys.stdin.read())
took_s = []

def play(url):
    parts = urlsplit(url)
    line = http.client.HTTPConnection(parts.hostname, parts.port, timeout=60)
    said = [{"role": "user", "content": "begin"}]
    for _ in range(turns):
        body = json.dumps({"model": "policy", "messages": said})
        began_s = time.perf_counter()
        line.request("POST", parts.path + "/chat/completions", body, {"content-type": "application/json"})
        answer = json.loads(line.getresponse().read())
        took_s.append(time.perf_counter() - began_s)
        said += [answer["choices"][0]["message"], {"role": "user", "content": "go on"}]

with ThreadPoolExecutor(at_once) as pool:
    list(pool.map(play, urls))
print(json.dumps(took_s))
"""
"""A process of agents: each plays one episode, and repeats the whole conversation in each request."""


class _Instant:
    """A driver with a policy that answers each turn at once."""

    def __init__(self, episodes: int, turns: int, tokens: int) -> None:
        from areal_jax.serving.episode_gateway import EpisodeGateway  # needs the extra [serve]

        self.answer = tuple(TOKENIZER.encode("abcdefghij" * (1 + tokens // 10)))[:tokens]
        self.urls: list[str] = []
        self.asked: list[e.TurnAdded] = []
        self._is_open, self._count = threading.Event(), episodes
        limits = Limits(10**6, tokens, turns, DEADLINE_S, DEADLINE_S)
        own = {"own": self._conduct}, TOKENIZER, limits, self._take, 0
        self.runner = WorkflowRunner(*own, make_gateway=EpisodeGateway)
        self._talks: dict[SampleId, Conversation] = {}
        prompt = Prompt(messages=[{"role": "user", "content": "begin"}], task="own")
        for ordinal in range(episodes):
            self._talks[SampleId(ordinal, 0)] = talk = Conversation((1,))
            self.runner.begin(SampleId(ordinal, 0), prompt, talk)
        if not self._is_open.wait(DEADLINE_S):
            raise ArealError(f"{episodes} episodes did not open within {DEADLINE_S:g} s; ask for fewer")

    async def _conduct(self, prompt: Prompt, episode: Episode) -> None:
        self.urls.append(episode.base_url)
        if len(self.urls) == self._count:
            self._is_open.set()
        await asyncio.sleep(DEADLINE_S)

    def _take(self, event: e.Event) -> None:
        if not isinstance(event, e.TurnAdded):
            return
        self.asked.append(event)
        talk, sample, turn = self._talks[event.sample], event.sample, event.turn
        talk.add(event)
        tokens = np.array(talk.request(turn, Sampling()).tokens + self.answer, np.int32)
        is_sampled = np.arange(len(tokens)) >= len(tokens) - len(self.answer)
        versions = np.where(is_sampled, 0, NOT_SAMPLED).astype(np.int32)
        of = sample, tokens, is_sampled, -1.0 * is_sampled.astype(np.float32), versions, versions
        made = Trajectory(*of, Sampling(), "stop")
        ended = e.TurnFinished(sample, event.segment, turn, "none", made.spans, "stop")
        talk.finish(ended, talk.joined(turn, made))
        self.runner.answer(sample, turn, talk)


def gateway(*, episodes: int = 64, turns: int = 16, tokens: int = 40, at_once: int = 8) -> dict[str, Any]:
    """Measures the chats of `episodes` agents with `turns` turns of `tokens` tokens, `at_once` at a time.

    The agents are a process of their own. The result has the CPU time of this process, with the workflows,
    the HTTP server and the sessions, and the agents' median and 99th percentile of a request, in ms.
    """
    driver = _Instant(episodes, turns, tokens)
    try:
        cpu_s, began_s = time.process_time(), time.perf_counter()
        done = subprocess.run(
            [sys.executable, "-c", CLIENTS],
            input=json.dumps([driver.urls, turns, at_once]),
            capture_output=True,
            text=True,
            timeout=DEADLINE_S,
            check=False,
        )
        cpu_s, wall_s = time.process_time() - cpu_s, time.perf_counter() - began_s
    finally:
        driver.runner.close()
    if done.returncode:
        raise ArealError(f"the agents' process failed: {done.stderr[-500:]}")
    took_s = json.loads(done.stdout)
    return machine("none", "none", took_s) | {
        "requests": len(took_s),
        "cpu_ms_per_request": 1000 * cpu_s / len(took_s),
        "p50_ms": 1000 * statistics.median(took_s),
        "p99_ms": 1000 * statistics.quantiles(took_s, n=100)[-1],
        "requests_per_s": len(took_s) / wall_s,
        "branches": sum(event.segment > 0 for event in driver.asked),
        "at_once": at_once,
    }
