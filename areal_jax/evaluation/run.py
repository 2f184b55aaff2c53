"""Evaluation: decodes each prompt greedily, then several times with sampling, and scores the completions.

Evaluation and training share the code of generation engine, host and reward pool; decoding and scoring
overlap. A sample's PRNG key depends only on run.seed, the prompt's index in its task, and the sample's number
within the prompt. So the figures depend neither on the number of decode slots, nor on other tasks, nor on
when a reward arrives.
"""

from __future__ import annotations

import queue
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

from areal_jax.config.tree import Config
from areal_jax.control.events import Event, RewardFailed
from areal_jax.episodes.agent import workflows_of
from areal_jax.episodes.limits import limits_of
from areal_jax.episodes.open_episodes import Conversations
from areal_jax.episodes.workflow_runner import Gateway
from areal_jax.evaluation.result import Failure, PassResult, ScoredPrompt, TaskResult
from areal_jax.generation.commands import Start
from areal_jax.generation.conducted import conducted
from areal_jax.generation.engine import Engine
from areal_jax.generation.host import Host
from areal_jax.generation.rollout import completion_of
from areal_jax.observe.waits import get
from areal_jax.tasks.errors import USERS, PromptError, TooLongError, raised
from areal_jax.tasks.pool import RewardPool
from areal_jax.tasks.scoring import Outcome, score_group
from areal_jax.tasks.source import WeightedTask, prompt_at
from areal_jax.tasks.task import Task, Workflow
from areal_jax.trajectories.paths import turns_of
from areal_jax.types import ArealError, Prompt, SampleId, Sampling, Trajectory, VersionedParams

TURNS = "turns"
"""The part that an evaluation adds to the rewards of episodes: the number of turns."""


@dataclass(frozen=True)
class EvalSettings:
    config: Config
    limit: int | None = None
    """Number of each task's prompts to evaluate, from the first on; None = all."""
    samples: int = 4
    """Completions sampled per prompt at generation.temperature, besides the greedy one; 0 = greedy only."""
    make_gateway: Callable[[], Gateway] | None = None
    """Returns what serves the chats of agents, see `WorkflowRunner`; None: nothing, so agents fail."""

    def __post_init__(self) -> None:
        if self.limit is not None and self.limit < 1:
            raise ArealError(f"limit={self.limit} leaves no prompt; give 1 or more, or leave it out")
        if self.samples < 0:
            raise ArealError(f"samples={self.samples} is negative; give 0 (greedy only) or more")


OnProgress = Callable[[str, str, int, int], None]
"""Called as `progress(task, "greedy" | "sampled", number of prompts, number of prompts done)`."""


def evaluate(
    engine: Engine,
    params: VersionedParams,
    tasks: Mapping[str, WeightedTask],
    settings: EvalSettings,
    progress: OnProgress = lambda *_: None,
) -> dict[str, TaskResult]:
    """Evaluates `params` on each task's first `settings.limit` prompts (None: all); returns task -> result.

    The tasks' weights are ignored. `progress(task, "greedy" or "sampled", prompts, prompts done)` is called
    as rewards arrive; for a task with a workflow, once all have. Raises ArealError for a task without prompts
    or a prompt without tokens; WaitTimeout if no reward arrives for runtime.deadline_s seconds.
    """
    g, r = settings.config.generation, settings.config.runtime
    ways = [("greedy", 1, Sampling(temperature=0.0, max_tokens=g.max_tokens))]
    if settings.samples:
        ways.append(("sampled", settings.samples, g.sampling))
    by_name = {name: weighted.task for name, weighted in tasks.items()}
    workflows = workflows_of(settings.config.episode.agent, tasks)
    results = {}
    with RewardPool(by_name, r.reward_workers, r.reward_timeout_s) as pool:
        for name, task in by_name.items():
            count = min(len(task), settings.limit or len(task))
            if not count:
                raise ArealError(f"tasks.{name} has no prompts; check its settings, or leave the task out")
            prompts = _fitting(name, task, count, engine)
            passes = {}
            for way, samples, sampling in ways:
                tell = partial(progress, name, way, count)
                if name in workflows:
                    passes[way] = _episode_pass(
                        engine,
                        params,
                        task,
                        prompts.fitting,
                        samples=samples,
                        sampling=sampling,
                        settings=settings,
                        workflow=workflows[name],
                    )
                    tell(count)
                    continue
                asked = _Pass(
                    engine,
                    params,
                    task,
                    pool,
                    prompts,
                    samples=samples,
                    sampling=sampling,
                    settings=settings,
                    tell=tell,
                )
                passes[way] = asked.run()
                del asked  # frees its pages before the next pass allocates its own
            room = engine.length - g.max_tokens
            cramped = sum(len(tokens) > room for _, tokens in prompts.fitting.values())
            results[name] = TaskResult(count, prompts.too_long, cramped, passes)
    return results


class _Prompts(NamedTuple):
    fitting: dict[int, tuple[Prompt, tuple[int, ...]]]
    """Index -> (prompt, its token ids) of each prompt shorter than generation.length."""
    too_long: tuple[str, ...]
    """"task/index" of each prompt of at least generation.length tokens; these are not evaluated."""


def _fitting(name: str, task: Task, count: int, engine: Engine) -> _Prompts:
    """Returns the first `count` prompts of task `name`, sorted into those that fit and those too long.

    Raises ArealError for a prompt without tokens, or one that cannot be read or encoded.
    """
    fitting, too_long = {}, []
    for index in range(count):
        prompt = prompt_at(task, name, index)
        try:
            tokens = tuple(engine.tokenizer.render(prompt, engine.length - 1))
        except TooLongError:
            too_long.append(f"{name}/{index}")
            continue
        except USERS as error:
            raise PromptError(
                f"prompt {index} of task {name} cannot be encoded: {raised(error)}; leave it out of the task"
            ) from error
        if not tokens:
            raise ArealError(f"prompt {index} of task {name} has no tokens; leave it out of the task")
        if len(tokens) < engine.length:
            fitting[index] = prompt, tokens
        else:
            too_long.append(f"{name}/{index}")
    return _Prompts(fitting, tuple(too_long))


def _result_of(prompt: Prompt, outcome: Outcome, members: Sequence[Trajectory]) -> ScoredPrompt | Failure:
    """Returns the result of one prompt; `members`: its samples."""
    if isinstance(outcome, RewardFailed):
        return Failure(f"{prompt.task}/{outcome.ordinal}", outcome.outcome, outcome.message)
    return ScoredPrompt(
        outcome.rewards,
        tuple(member.completion_tokens for member in members),
        tuple(member.truncated for member in members),
        tuple(dict(parts) for parts in outcome.parts),
    )


def _pass_result(
    sampling: Sampling,
    samples: int,
    results: Mapping[int, ScoredPrompt | Failure],
    tokens: int,
    began_s: float,
) -> PassResult:
    """Returns the result of a pass; `results`: index of each prompt -> its result."""
    each = [results[index] for index in sorted(results)]
    return PassResult(
        samples,
        sampling.temperature,
        tuple(one for one in each if isinstance(one, ScoredPrompt)),
        tuple(one for one in each if isinstance(one, Failure)),
        tokens,
        time.perf_counter() - began_s,
    )


def _episode_pass(
    engine: Engine,
    params: VersionedParams,
    task: Task,
    prompts: Mapping[int, tuple[Prompt, tuple[int, ...]]],
    *,
    samples: int,
    sampling: Sampling,
    settings: EvalSettings,
    workflow: Workflow,
) -> PassResult:
    """Conducts `samples` episodes of each prompt (index -> the prompt and its token ids), and scores them.

    `workflow` conducts them. A workflow that fails, or rejects its sample, is a failure of its prompt.
    """
    began_s, c = time.perf_counter(), settings.config
    failed: dict[int, str] = {}
    talks = Conversations(None, lambda index: prompts[index][1], sampling)
    found = conducted(
        engine,
        params,
        {index: prompt for index, (prompt, _) in prompts.items()},
        samples,
        talks=talks,
        workflows={prompt.task: workflow for prompt, _ in prompts.values()},
        make_gateway=settings.make_gateway,
        limits=limits_of(c.episode, c.generation.length, c.generation.max_tokens),
        sampling=sampling,
        seed=c.run.seed,
        on_failure=lambda sample, reason: failed.setdefault(sample.ordinal, reason),
    )
    results: dict[int, ScoredPrompt | Failure] = {}
    for index, (prompt, _) in prompts.items():
        if index in failed:
            results[index] = Failure(f"{prompt.task}/{index}", "failed", failed[index])
            continue
        members = found[index]
        completions = [talks.rewarded(t.sample, completion_of(t, engine.tokenizer, task)) for t in members]
        one = _result_of(prompt, score_group(task, prompt, completions, index), members)
        if isinstance(one, ScoredPrompt):
            pairs = zip(one.parts or ({},) * samples, members, strict=True)
            one = one._replace(parts=tuple({**own, TURNS: float(turns_of(t))} for own, t in pairs))
        results[index] = one
    tokens = sum(t.completion_tokens for members in found.values() for t in members)
    return _pass_result(sampling, samples, results, tokens, began_s)


class _Pass:
    """One pass over one task's prompts: decodes `samples` completions of each, and scores them meanwhile."""

    def __init__(
        self,
        engine: Engine,
        params: VersionedParams,
        task: Task,
        pool: RewardPool,
        prompts: _Prompts,
        *,
        samples: int,
        sampling: Sampling,
        settings: EvalSettings,
        tell: Callable[[int], None],
    ) -> None:
        """`tell(count)` is called with the number of prompts that are scored, failed or too long so far."""
        self._engine, self._task, self._pool = engine, task, pool
        self._prompts, self._tell = prompts, tell
        self._samples, self._sampling, self._version = samples, sampling, params.version
        self._deadline_s = settings.config.runtime.deadline_s
        self._host = Host(
            "the evaluation",
            engine,
            _OneVersion(params),
            self._collect,
            seed=settings.config.run.seed,
            sampling=sampling,
            calls_ahead=settings.config.generation.calls_ahead,
            deadline_s=self._deadline_s,
        )
        self._members: dict[int, dict[int, Trajectory]] = defaultdict(dict)
        self._scoring: dict[int, tuple[Trajectory, ...]] = {}
        self._outcomes: queue.SimpleQueue[Outcome] = queue.SimpleQueue()
        self._results: dict[int, ScoredPrompt | Failure] = {}

    def run(self) -> PassResult:
        start_s = time.perf_counter()
        self._tell(0)
        for index, (_, tokens) in self._prompts.fitting.items():
            samples = tuple(SampleId(index, member) for member in range(self._samples))
            self._host.inbox.put(Start(samples, tokens, self._version))
            self._host.take_commands()
            # Enough samples wait to fill every slot that becomes free; the other prompts are queued later.
            while self._open_samples > 2 * self._engine.slots:
                self._step()
        while self._host.has_work:
            self._step()
        while self._scoring:
            outcome = get(
                self._outcomes,  # type: ignore[arg-type]
                waiter="the evaluation",
                what="rewards from the reward pool",
                deadline_s=self._deadline_s,
            )
            self._settle(outcome)
        tokens = self._host.generated_tokens
        return _pass_result(self._sampling, self._samples, self._results, tokens, start_s)

    @property
    def _open_samples(self) -> int:
        statistics = self._host.statistics()
        return statistics.live + statistics.waiting

    def _step(self) -> None:
        """Makes one decode call, and stores the rewards that have arrived."""
        self._host.step()
        while not self._outcomes.empty():
            self._settle(self._outcomes.get())

    def _collect(self, _: Event, trajectory: Trajectory | None) -> None:
        """Stores a finished sample; once a prompt's samples are complete, submits them to the reward pool.

        Events that finish no sample, for which `trajectory` is None, are ignored.
        """
        if trajectory is None:
            return
        index = trajectory.sample.ordinal
        members = self._members[index]
        members[trajectory.sample.member] = trajectory
        if len(members) < self._samples:
            return
        del self._members[index]
        self._scoring[index] = tuple(members[member] for member in range(self._samples))
        prompt, tokenizer = self._prompts.fitting[index][0], self._engine.tokenizer
        completions = [completion_of(member, tokenizer, self._task) for member in self._scoring[index]]
        self._pool.submit(index, 0, prompt, completions, self._outcomes.put)

    def _settle(self, outcome: Outcome) -> None:
        index = outcome.ordinal
        prompt, _ = self._prompts.fitting[index]
        self._results[index] = _result_of(prompt, outcome, self._scoring.pop(index))
        self._tell(len(self._results) + len(self._prompts.too_long))


class _OneVersion:
    """A weight store with a single version, for a generation host; the engine shards what `load` returns."""

    def __init__(self, value: VersionedParams) -> None:
        self._value = value

    def latest(self) -> int:
        return self._value.version

    def load(self, version: int, shardings: Any) -> VersionedParams:
        return self._value
