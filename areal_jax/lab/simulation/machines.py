"""Decoders, reward pool and trainer of a simulated run: an interface, and machines with random results."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np

from areal_jax.config.tree import Config
from areal_jax.control import events as e
from areal_jax.control.reward_gate import CORRECT
from areal_jax.lab.simulation.decoders import Decoder, DrawnDecoder, DrawnSample, StepResult
from areal_jax.lab.simulation.schedule import Schedule
from areal_jax.runtime.core import Prompts
from areal_jax.tasks.errors import PromptError
from areal_jax.trajectories.age_mask import oldest_trained, trained_tokens
from areal_jax.types import Completion, Group, PolicyVersion, Prompt, SampleId, Trajectory


class Machines(Protocol):
    """Interface of the decoders, reward pool and trainer of a simulated run.

    The simulation calls one method at a time, in the order of virtual time; a machine has no clock.
    """

    @property
    def prompts(self) -> Prompts: ...

    def decoder(self, name: str, latest: Callable[[], PolicyVersion]) -> Decoder:
        """Return the decoder of the host `name`; `latest()` returns the newest committed version."""
        ...

    def score(
        self, action: e.Score, prompt: Prompt, completions: Sequence[Completion]
    ) -> e.RewardScored | e.RewardFailed: ...

    def train(self, action: e.Train, groups: tuple[Group, ...]) -> tuple[str, dict[str, Any]]:
        """Train one batch; return the new version's digest and the step's metrics."""
        ...

    def publish(self, version: PolicyVersion) -> str:
        """Make a trained version available for hosts to adopt; return its digest."""
        ...


class EmptyPrompts:
    """Prompts and completions without content, because `DrawnMachines` reads neither.

    A fraction `schedule.failed_prompts` of them cannot be used, drawn from the schedule's seed.
    """

    _prompt, _completion = Prompt(""), Completion("", (), "")

    def __init__(self, schedule: Schedule | None = None) -> None:
        self._schedule = schedule or Schedule()

    def has_workflow(self, ordinal: int) -> bool:
        return self._schedule.turns > 0

    def prompt(self, ordinal: int) -> Prompt:
        return self._prompt

    def prompt_tokens(self, ordinal: int) -> tuple[int, ...]:
        if self._drawn(ordinal) < self._schedule.failed_prompts / 2:
            raise PromptError(f"simulated: prompt {ordinal} is too long")
        return ()

    def completion(self, trajectory: Trajectory) -> Completion:
        ordinal = trajectory.sample.ordinal
        if 1 - self._drawn(ordinal) < self._schedule.failed_prompts / 2:
            raise PromptError(f"simulated: a completion of prompt {ordinal} cannot be decoded")
        return self._completion

    def _drawn(self, ordinal: int) -> float:
        if not self._schedule.failed_prompts:
            return 0.5
        return float(np.random.default_rng([self._schedule.seed, 9, ordinal]).random())


class DrawnMachines:
    """Machines with random results, drawn from the schedule's seed.

    A result depends only on the seed and on the sample, group or version to which the result belongs.
    """

    def __init__(
        self,
        config: Config,
        schedule: Schedule,
        seen: Callable[[str, StepResult, bool], None] = lambda *_: None,
    ) -> None:
        """`seen`: as in `DrawnDecoder`."""
        self.prompts = EmptyPrompts(schedule)
        self._config, self._schedule, self._seen = config, schedule, seen

    def decoder(self, name: str, latest: Callable[[], PolicyVersion]) -> Decoder:
        def committed() -> tuple[PolicyVersion, str]:
            version = latest()
            return version, self.publish(version)

        return DrawnDecoder(name, self._config, self._work, committed, self._seen)

    def score(
        self, action: e.Score, prompt: Prompt, completions: Sequence[Completion]
    ) -> e.RewardScored | e.RewardFailed:
        schedule, size = self._schedule, len(completions)
        rng = np.random.default_rng([schedule.seed, 4, action.ordinal, action.attempt])
        if rng.random() < schedule.failed_rewards:
            return e.RewardFailed(
                action.ordinal, action.attempt, int(rng.integers(size)), "timed_out", "simulated"
            )
        is_equal = rng.random() < schedule.equal_rewards
        rewards = [0.0] * size if is_equal else rng.random(size).round(3).tolist()
        if completions[0].reward is not None:
            rewards = [one.reward.value for one in completions if one.reward is not None]
        parts = ()
        if (gated := self._config.algorithm.gate.part) is not None:
            right = rng.integers(2, size=size).tolist()
            rewards = [reward + 0.5 * one for reward, one in zip(rewards, right, strict=True)]
            parts = tuple(((CORRECT, float(one)), (gated, 0.5 * one)) for one in right)
        return e.RewardScored(action.ordinal, action.attempt, tuple(rewards), parts)

    def train(self, action: e.Train, groups: tuple[Group, ...]) -> tuple[str, dict[str, Any]]:
        oldest = oldest_trained(self._config.control, action.step)
        count = sum(trained_tokens(group.trajectories, oldest) for group in groups)
        return self.publish(action.step + 1), {"trained_tokens": float(count)}

    def publish(self, version: PolicyVersion) -> str:
        """Return a digest made from the version's number; it is the same if the version is trained again."""
        return f"digest-{version}"

    def _work(self, sample: SampleId, turn: int | None = None) -> DrawnSample:
        return drawn_work(self._schedule, sample, self._config.generation.max_tokens, turn)


def drawn_work(schedule: Schedule, sample: SampleId, most: int, turn: int | None = None) -> DrawnSample:
    """Draw a sample's length and whether it fails, from the schedule's seed and the sample's id alone.

    `most`: tokens of the longest completion. `turn`: number of the episode's turn to draw instead.
    """
    rng = np.random.default_rng([schedule.seed, 3, *sample, *(() if turn is None else (turn,))])
    tokens = schedule.median_tokens * np.exp(schedule.sigma_tokens * rng.standard_normal())
    fails = bool(rng.random() < schedule.failed_samples)
    return DrawnSample(sample, min(max(round(tokens), 1), most), fails, turn=turn)
