"""Measures how much of the time a host's slots decode while episodes wait for their tools."""

from __future__ import annotations

import asyncio
import queue
import statistics
import time
from collections.abc import Sequence
from contextlib import closing
from functools import partial
from typing import Any, NamedTuple

from areal_jax.assembly.devices import machine
from areal_jax.control import events as e
from areal_jax.episodes.episode import Episode
from areal_jax.episodes.limits import Limits
from areal_jax.episodes.open_episodes import Conversations
from areal_jax.episodes.workflow_runner import WorkflowRunner
from areal_jax.generation.commands import Stop, command_of
from areal_jax.generation.engine import Engine
from areal_jax.generation.host import Host
from areal_jax.generation.programs import DecodeState
from areal_jax.generation.slots import Prefix
from areal_jax.lab.bench.hosting import published
from areal_jax.lab.bench.measure import in_turn, random_model, random_params
from areal_jax.observe.threads import reporting_thread
from areal_jax.types import ArealError, Prompt, SampleId, Sampling, Trajectory

DEADLINE_S = 300.0
ADDED = " 7"
"""What a tool's result adds to the conversation."""
QUESTION = "What is it?"
RAMP = 2
"""Turns per episode, on the average, before the measured window begins."""


def episodes(
    *,
    shape: str = "tiny",
    dtype: str = "float32",
    slots: int = 8,
    episodes: int = 64,
    turns: int = 4,
    tokens: int = 160,
    tool_s: float = 1.0,
    seconds: float = 15.0,
    decode_steps: int = 4,
    prefill_chunk: int = 128,
    repeats: int = 3,
) -> dict[str, Any]:
    """Measures live slot-seconds over slot-seconds of a host, with `episodes` episodes live at a time.

    An episode has `turns` turns of `tokens` tokens, and after each calls a tool that takes `tool_s` seconds.
    A slot is live from the insertion of a turn's prompt to the turn's end. The window of `seconds` seconds
    begins once the episodes have had two turns on the average; new ones begin as others end. In the result,
    `blocking` is the same with `slots` episodes at a time: each slot then waits for the tool of its episode,
    as in rollouts in which a sample keeps its slot. `turn_s` is the median time of a turn in its slot.
    """
    engine = _Watched(
        random_model(shape, dtype),
        slots=slots,
        length=_length(turns, tokens, prefill_chunk),
        decode_steps=decode_steps,
        prefill_chunk=prefill_chunk,
    )
    params = random_params(engine.model, dtype)
    play = partial(_played, engine, params, turns=turns, tokens=tokens, tool_s=tool_s, seconds=seconds)
    arms = {"freed": partial(play, episodes), "blocking": partial(play, slots)}
    found = in_turn(arms, repeats)
    median = {
        name: _Figures(*map(statistics.median, zip(*runs, strict=True))) for name, runs in found.items()
    }
    freed, blocking = median["freed"], median["blocking"]
    return machine(shape, dtype, [run.turn_s for run in found["freed"]]) | {
        "live_share": freed.live_share,
        "live_share_runs": [run.live_share for run in found["freed"]],
        "blocking_live_share": blocking.live_share,
        "over_blocking": freed.turns_per_s / blocking.turns_per_s,
        "turns_per_s": freed.turns_per_s,
        "turn_s": freed.turn_s,
        "blocking_turn_s": blocking.turn_s,
        "slots": slots,
        "episodes": episodes,
        "tool_s": tool_s,
    }


class Span(NamedTuple):
    """A turn in its slot, in seconds of `time.perf_counter`."""

    start_s: float
    end_s: float


def live_share(spans: Sequence[Span], start_s: float, end_s: float, slots: int) -> float:
    """Returns the part of the slots' time from `start_s` to `end_s` that lies in the spans."""
    inside = sum(max(0.0, min(one.end_s, end_s) - max(one.start_s, start_s)) for one in spans)
    return inside / (slots * (end_s - start_s))


# --- parts --------------------------------------------------------------------------------------------------


class _Figures(NamedTuple):
    live_share: float
    turn_s: float
    turns_per_s: float


class _Watched(Engine):
    """An engine that notes when a sample got its slot."""

    began_s: dict[int, float]

    def insert(
        self, prefix: Prefix, decode_state: DecodeState, slot: int, *, request: Any = None, **settings: Any
    ) -> DecodeState:
        self.began_s[int(request.numbers[1])] = time.perf_counter()
        return super().insert(prefix, decode_state, slot, request=request, **settings)


def _length(turns: int, tokens: int, chunk: int) -> int:
    """Tokens of a complete episode, rounded up to complete chunks of its prefill."""
    needed = 2 + len(QUESTION) + turns * (tokens + len(ADDED))
    return -(-needed // chunk) * chunk


class _Play:
    """A host and the workflows of this process, with always as many episodes, until the window has ended."""

    def __init__(self, engine: _Watched, params: Any, workflow: Any, limits: Limits) -> None:
        self.engine, engine.began_s = engine, {}
        self.ended: list[Span] = []
        self._events: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._prompt = Prompt(QUESTION, task="own")
        prompt = tuple(engine.tokenizer.render(self._prompt))
        sampling = Sampling(max_tokens=limits.max_tokens)
        # No token ends a turn, so each has all its tokens.
        own: Any = dict(seed=0, sampling=sampling, stops=())
        self._host = Host("bench", engine, published(engine, params), self._deliver, **own)
        self._talks = Conversations(None, lambda _: prompt, sampling)
        emit = lambda event: self._deliver(event)  # noqa: E731
        self.runner = WorkflowRunner({"own": workflow}, engine.tokenizer, limits, emit, 0)
        self._thread = reporting_thread("bench", self._host.run, self._events.put)
        self._thread.start()
        self._begun = 0

    def begin(self) -> None:
        sample, self._begun = SampleId(self._begun, 0), self._begun + 1
        self.runner.begin(sample, self._prompt, self._talks.of(sample))

    def step(self) -> None:
        """Handles one event; begins an episode when one has ended."""
        event = self._events.get(timeout=DEADLINE_S)
        if isinstance(event, BaseException):
            raise event
        event, payload, now_s = event
        event, _ = self._talks.record(event, payload)
        match event:
            case e.TurnAdded(sample, segment, turn):
                go_on = e.Continue(sample, segment, turn, "bench", 0)
                self._host.inbox.put(command_of(go_on, self._talks.request(sample, turn), self._deliver))
            case e.TurnFinished(sample, _, turn):
                self.ended.append(Span(self.engine.began_s.pop(sample.ordinal), now_s))
                self.runner.answer(sample, turn, self._talks.of(sample))
            case e.ToolStarted(sample, call):
                self.runner.call(sample, call)
            case e.EpisodeEnded(sample):
                self._talks.forget(sample.ordinal)
                self._host.inbox.put(Stop((sample,)))
                self.begin()
            case e.EpisodeFailed(_, _, reason) | e.SampleFailed(_, _, reason):
                raise ArealError(f"an episode of the benchmark failed: {reason}")

    def close(self) -> None:
        self.runner.close()
        self._host.inbox.put(Stop())
        self._thread.join(DEADLINE_S)

    def _deliver(self, event: Any, trajectory: Trajectory | Any = None) -> None:
        self._events.put((event, trajectory, time.perf_counter()))


def _played(
    engine: _Watched, params: Any, at_once: int, *, turns: int, tokens: int, tool_s: float, seconds: float
) -> _Figures:
    """Plays `at_once` episodes at a time until the window has ended, and returns the window's figures."""

    async def conduct(prompt: Prompt, episode: Episode) -> float:
        for _ in range(turns):
            await episode.generate()
            await episode.tool(asyncio.sleep, tool_s)
            episode.add("tool", ADDED)
        return 0.0

    limits = Limits(engine.length, tokens, turns, DEADLINE_S, DEADLINE_S)
    with closing(_Play(engine, params, conduct, limits)) as play:
        for _ in range(at_once):
            play.begin()
        while len(play.ended) < RAMP * at_once:
            play.step()
        start_s = play.ended[-1].end_s
        while (now_s := time.perf_counter()) < start_s + seconds:
            play.step()
        live = [Span(began_s, now_s) for began_s in list(engine.began_s.values())]
        spans = [*play.ended, *live]
    inside = [one for one in play.ended if one.end_s > start_s]
    turn_s = statistics.median(one.end_s - one.start_s for one in inside)
    return _Figures(live_share(spans, start_s, now_s, engine.slots), turn_s, len(inside) / (now_s - start_s))
