"""Agents with OpenAI's client at their base_url, beside a real host with an engine that writes given texts.

Workflows, HTTP server, sessions, host, slots and weight store are the real ones. Only the engine's programs
are replaced: a sample's tokens are those that `write` returns, with log-probs that tell version and position.
"""

from __future__ import annotations

import queue
import threading
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from areal_jax.control import events as e
from areal_jax.episodes.limits import History, Limits
from areal_jax.episodes.open_episodes import Conversations
from areal_jax.episodes.workflow_runner import WorkflowRunner
from areal_jax.generation.commands import Stop, command_of
from areal_jax.generation.host import Host
from areal_jax.generation.programs import ResultTokens
from areal_jax.generation.slots import Prefix
from areal_jax.lab.published.sleeping import SleepingEngine, Slots
from areal_jax.lab.simulation.schedule import Schedule
from areal_jax.models.config import model_config
from areal_jax.models.model import Model
from areal_jax.parallel.mesh import make_mesh
from areal_jax.serving.episode_gateway import EpisodeGateway
from areal_jax.tasks.hf_tokenizer import HFTokenizer
from areal_jax.types import Prompt, SampleId, Sampling, Trajectory, VersionedParams
from areal_jax.weights.digest import digest
from areal_jax.weights.memory import MemoryStore
from tests.hangs import HANG_S

STEPS = 16
"""Tokens of a decode call: most turns take several calls, so that swaps fall into turns."""
LENGTH = 16384
NO_TIME = Schedule(token_s=0, prefill_s=0, swap_s=0, recompute_token_s=0)

Write = Callable[[int, int, int], Sequence[int]]
"""(ordinal, segment, number of tokens before) -> the tokens of a turn."""


def logp_of(version: Any, position: Any) -> Any:
    """The log-prob of a token; exact in float32."""
    return -(1 + version % 1000 + position / LENGTH)


class WritingEngine(SleepingEngine):
    """An engine that samples what `write` returns, in no time.

    `publish` is called after every fifth decode call that leaves a turn unfinished, so the turn goes on under
    new weights however fast the agents are.
    """

    def __init__(self, tokenizer: HFTokenizer, slots: int, write: Write, publish: Callable[[], None]) -> None:
        model = Model(model_config("tiny", tokenizer.vocab_size, "float32"), tokenizer)
        mesh = make_mesh({"tensor": 1}, jax.devices()[:1], "a host")
        own: Any = dict(slots=slots, length=LENGTH, max_tokens=LENGTH, decode_steps=STEPS, mesh=mesh)
        super().__init__(model, NO_TIME, **own)
        self._write, self._publish, self._unfinished = write, publish, 0
        self._texts: dict[int, np.ndarray] = {}
        self._before = np.zeros(slots, np.int64)
        self.prompts: dict[tuple[int, int], list[list[int]]] = defaultdict(list)
        """(ordinal, segment) -> the tokens before each of its turns, as the engine got them."""

    def insert(
        self, prefix: Prefix, decode_state: Any, slot: int, *, request: Any = None, **settings: Any
    ) -> Any:
        state: Slots = decode_state
        before, filled = int(request.prompt_tokens), int(prefix.true_length)
        ordinal, segment = int(request.numbers[1]), int(request.numbers[4])
        prompt, known = np.asarray(prefix.tokens)[:before].tolist(), self.prompts[ordinal, segment]
        if not known or known[-1] != prompt:  # else new weights came before its first token
            known.append(prompt)
        self._texts[slot] = np.array(self._write(ordinal, segment, before), np.int32)
        self._before[slot] = before
        state.sampled[slot], state.length[slot] = filled - before, len(self._texts[slot])
        state.is_live[slot] = True
        return state

    def generate(self, params: VersionedParams, decode_state: Any, *own: Any, **later: Any) -> Any:
        found = super().generate(params, decode_state, *own, **later)
        if decode_state.is_live.any():
            self._unfinished += 1
            if self._unfinished % 5 == 0:
                self._publish()
        return found

    def _results(self, state: Slots, new: np.ndarray, version: int) -> ResultTokens:
        results = super()._results(state, new, version)
        rows = results.rows
        for slot in np.flatnonzero(new):
            end = int(state.sampled[slot])
            own = np.arange(end - new[slot], end)
            rows["tokens"][slot, : new[slot]] = self._texts[slot][own]
            rows["logp"][slot, : new[slot]] = logp_of(version, self._before[slot] + own)
        return results


class ToolRun:
    """Plays episodes of agents, `live` at a time, while the engine publishes versions."""

    def __init__(
        self,
        tokenizer: HFTokenizer,
        agent: Callable[[str, int], None],
        write: Write,
        *,
        live: int = 8,
        history: History = "exact",
    ) -> None:
        self._live, self._agent = live, agent
        self._events: queue.SimpleQueue[tuple[e.Event, Trajectory | None]] = queue.SimpleQueue()
        self.engine = WritingEngine(tokenizer, live, write, self._publish)
        self._store, self.version = MemoryStore(self.engine.canary), -1
        self._publish()
        sampling = Sampling(max_tokens=LENGTH)
        own: Any = dict(seed=0, sampling=sampling, deadline_s=HANG_S)
        self._host = Host("host", self.engine, self._store, self._deliver, **own)
        self.talks = Conversations(None, lambda ordinal: (), sampling)
        limits = Limits(LENGTH, LENGTH, 1000, 60.0, 60.0, history)
        runs = {"own": self._conduct}, tokenizer, limits, self._deliver, 0
        self._runner = WorkflowRunner(*runs, make_gateway=EpisodeGateway)
        self.asked: dict[int, list[e.TurnAdded]] = defaultdict(list)
        """Ordinal -> its turns, as they were asked for."""

    def play(self, episodes: int) -> None:
        """Plays so many episodes to their end; AssertionError if one of them fails."""
        host = threading.Thread(target=self._host.run, daemon=True)
        host.start()
        begun, ended = 0, 0
        try:
            while ended < episodes:
                while begun < min(episodes, ended + self._live):
                    prompt = Prompt(messages=[{"role": "user", "content": "x"}], task="own")
                    self._runner.begin(SampleId(begun, 0), prompt, self.talks.of(SampleId(begun, 0)))
                    begun += 1
                event, payload = self._events.get(timeout=HANG_S)
                assert not isinstance(event, e.EpisodeFailed | e.SampleFailed), event
                event, _ = self.talks.record(event, payload)
                ended += isinstance(event, e.EpisodeEnded)
                self._obey(event)
        finally:
            self._runner.close()
            self._host.inbox.put(Stop())
            host.join(HANG_S)

    def _obey(self, event: e.Event) -> None:
        match event:
            case e.TurnAdded(sample, segment, turn):
                self.asked[sample.ordinal].append(event)
                go_on = e.Continue(sample, segment, turn, "host", 0)
                self._host.inbox.put(command_of(go_on, self.talks.request(sample, turn), self._deliver))
            case e.TurnFinished(sample, _, turn):
                self._runner.answer(sample, turn, self.talks.of(sample))

    def _publish(self) -> None:
        self.version += 1
        params = {"version": jnp.full(1, self.version, jnp.float32)}
        self._store.publish(VersionedParams(self.version, params, digest(params)))

    def _deliver(self, event: e.Event, trajectory: Any = None) -> None:
        self._events.put((event, trajectory))

    async def _conduct(self, prompt: Prompt, episode: Any) -> float:
        await episode.in_thread(self._agent, episode.base_url, episode.sample.ordinal)
        return 1.0
