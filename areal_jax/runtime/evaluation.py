"""Evaluation: every prompt asked greedily and several times at the sampling temperature, and scored.

Decoding goes through the same engine and host as a run's, rewards through the same killable pool, both at
once. A sample's key is (seed, the prompt's index in its task, member): the figures do not depend on slots,
on other tasks, or on when a reward comes back.
"""

from __future__ import annotations

import queue
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from areal_jax.control.events import Event, RewardFailed
from areal_jax.generation.engine import Engine
from areal_jax.generation.host import Host, Start
from areal_jax.generation.rollout import completion_of
from areal_jax.observe.waits import get
from areal_jax.runtime.eval_result import EvalResult, Failure, PassResult, ScoredPrompt, TaskResult
from areal_jax.sections import GenerationConfig
from areal_jax.tasks.pool import RewardPool
from areal_jax.tasks.scoring import Outcome
from areal_jax.tasks.source import WeightedTask
from areal_jax.tasks.task import Task
from areal_jax.types import ArealError, Prompt, SampleId, Sampling, Trajectory, VersionedParams
from areal_jax.weights.store import VersionGoneError


@dataclass(frozen=True)
class EvalSettings:
    generation: GenerationConfig
    limit: int | None = None
    """The first so many prompts of each task; all of them unless given."""
    samples: int = 4
    """Completions a prompt at generation's temperature; 0 asks greedily only."""
    seed: int = 0
    reward_workers: int = 1
    reward_timeout_s: float = 30.0
    deadline_s: float = 600.0

    def __post_init__(self) -> None:
        if self.limit is not None and self.limit < 1:
            raise ArealError(f"limit={self.limit} leaves nothing to ask; give 1 or more, or leave it out")
        if self.samples < 0:
            raise ArealError(f"samples={self.samples} is no number of samples; give 0 (greedy only) or more")


Progress = Callable[[str, str, int, int], None]
"""`progress(task, "greedy" | "sampled", prompts in all, prompts done)`"""


def evaluate(
    engine: Engine,
    params: VersionedParams,
    tasks: Mapping[str, WeightedTask],
    settings: EvalSettings,
    progress: Progress = lambda *_: None,
) -> EvalResult:
    """Ask the first `limit` prompts of each task, in index order; weights of tasks play no part.

    Raises ArealError for a task without prompts, WaitTimeout when rewards stop coming.
    """
    g = settings.generation
    ways = [("greedy", 1, Sampling(temperature=0.0, max_tokens=g.max_tokens))]
    if settings.samples:
        ways.append(("sampled", settings.samples, g.sampling))
    by_name = {name: weighted.task for name, weighted in tasks.items()}
    results = {}
    with RewardPool(by_name, settings.reward_workers, settings.reward_timeout_s) as pool:
        for name, task in by_name.items():
            count = min(len(task), settings.limit or len(task))
            if not count:
                raise ArealError(f"tasks.{name} has no prompts; check its settings, or leave it out")
            passes, prompts = [], _Prompts(name, task, count, engine, g.max_tokens)
            for way, samples, sampling in ways:
                tell = partial(progress, name, way, count)
                asked = _Pass(engine, params, pool, prompts, samples, sampling, settings)
                passes.append(asked.run(tell))
                del asked  # its pages go before the next pass makes its own
            greedy, sampled = passes[0], passes[1] if settings.samples else None
            results[name] = TaskResult(count, tuple(prompts.too_long), len(prompts.cramped), greedy, sampled)
    return EvalResult(results)


class _Prompts:
    """The first `count` prompts of a task that fit, in index order; what is said of the others."""

    def __init__(self, name: str, task: Task, count: int, engine: Engine, max_tokens: int) -> None:
        self.name, self.count = name, count
        self.too_long: dict[str, None] = {}
        self.cramped: set[int] = set()
        self._task, self._engine, self._max_tokens = task, engine, max_tokens

    def fitting(self) -> Iterator[tuple[int, Prompt, tuple[int, ...]]]:
        """(index, prompt, its tokens). Raises ArealError for an empty prompt."""
        tokenizer, length = self._engine.get_tokenizer(), self._engine.length
        for index in range(self.count):
            prompt = replace(self._task[index], task=self.name)
            tokens = tuple(tokenizer.render(prompt))
            if not tokens:
                raise ArealError(f"prompt {index} of task {self.name} is empty; leave it out of the task")
            if len(tokens) >= length:
                self.too_long[f"{self.name}/{index}"] = None
                continue
            if len(tokens) + self._max_tokens > length:
                self.cramped.add(index)
            yield index, prompt, tokens


class _Pass:
    """One task's prompts under one way of sampling: slots stay full across prompts, scoring runs beside."""

    def __init__(
        self,
        engine: Engine,
        params: VersionedParams,
        pool: RewardPool,
        prompts: _Prompts,
        samples: int,
        sampling: Sampling,
        settings: EvalSettings,
    ) -> None:
        self._engine, self._pool, self._prompts = engine, pool, prompts
        self._samples, self._sampling, self._version = samples, sampling, params.version
        self._deadline_s = settings.deadline_s
        self._host = Host(
            "the evaluation",
            engine,
            _OneVersion(params),
            self._collect,
            seed=settings.seed,
            sampling=sampling,
            deadline_s=settings.deadline_s,
        )
        self._open = 0  # samples asked for that have not ended
        self._asked: dict[int, Prompt] = {}
        self._members: dict[int, dict[int, Trajectory]] = {}
        self._scoring: dict[int, tuple[Trajectory, ...]] = {}
        self._outcomes: queue.SimpleQueue[Outcome] = queue.SimpleQueue()
        self._scored: dict[int, ScoredPrompt] = {}
        self._failures: dict[int, Failure] = {}

    def run(self, progress: Callable[[int], None]) -> PassResult:
        """Ask them all; `progress` hears how many are settled, those that do not fit included."""
        start_s = time.perf_counter()
        progress(0)
        for index, prompt, tokens in self._prompts.fitting():
            self._asked[index], self._members[index] = prompt, {}
            samples = tuple(SampleId(index, member) for member in range(self._samples))
            self._host.inbox.put(Start(samples, tokens, self._version))
            self._host.take_commands()
            self._open += len(samples)
            while self._open > 2 * self._engine.slots:
                self._step(progress)
        while self._host.has_work:
            self._step(progress)
        while self._scoring:
            outcome = get(
                self._outcomes,  # type: ignore[arg-type]
                who="the evaluation",
                what="rewards from the reward pool",
                deadline_s=self._deadline_s,
            )
            self._settle(outcome)
            progress(self._settled)
        return PassResult(
            self._samples,
            self._sampling.temperature,
            tuple(self._scored[index] for index in sorted(self._scored)),
            tuple(self._failures[index] for index in sorted(self._failures)),
            self._host.generated_tokens,
            time.perf_counter() - start_s,
        )

    @property
    def _settled(self) -> int:
        return len(self._scored) + len(self._failures) + len(self._prompts.too_long)

    def _step(self, progress: Callable[[int], None]) -> None:
        """Decode once, and take the rewards that have come meanwhile."""
        self._host.step()
        before = self._settled
        with suppress(queue.Empty):
            while True:
                self._settle(self._outcomes.get_nowait())
        if self._settled > before:
            progress(self._settled)

    def _collect(self, _: Event, trajectory: Trajectory | None) -> None:
        """A sample ended: once all of its prompt have, they go to the reward pool."""
        if trajectory is None:
            return
        self._open -= 1
        index = trajectory.sample.ordinal
        members = self._members[index]
        members[trajectory.sample.member] = trajectory
        if len(members) < self._samples:
            return
        del self._members[index]
        self._scoring[index] = tuple(members[member] for member in range(self._samples))
        tokenizer = self._engine.get_tokenizer()
        completions = [completion_of(member, tokenizer) for member in self._scoring[index]]
        self._pool.submit(index, 0, self._asked.pop(index), completions, self._outcomes.put)

    def _settle(self, outcome: Outcome) -> None:
        index = outcome.ordinal
        members = self._scoring.pop(index)
        if isinstance(outcome, RewardFailed):
            name = f"{self._prompts.name}/{index}"
            self._failures[index] = Failure(name, outcome.outcome, outcome.message)
            return
        self._scored[index] = ScoredPrompt(
            outcome.rewards,
            tuple(member.completion_tokens for member in members),
            tuple(member.truncated for member in members),
        )


class _OneVersion:
    """What a host reads one version from; it is not copied."""

    def __init__(self, value: VersionedParams) -> None:
        self._value = value

    def latest(self) -> int:
        return self._value.version

    def load(self, version: int, shardings: Any) -> VersionedParams:
        """As it was given; the engine lays it out. Raises VersionGoneError for another version."""
        if version != self._value.version:
            raise VersionGoneError(f"version {version} is not evaluated, but {self._value.version}")
        return self._value
