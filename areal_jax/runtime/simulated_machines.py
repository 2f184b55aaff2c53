"""What hosts, trainer and rewards do behind the virtual clock: drawn from a seed, or the real thing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import numpy as np

from areal_jax.config import Config
from areal_jax.control import events as e
from areal_jax.runtime.schedule import Schedule
from areal_jax.runtime.simulated_host import Decoder, DrawnAnswers, Work
from areal_jax.types import PolicyVersion, SampleId


class Machines(Protocol):
    """Each is asked in the order of virtual time, one thing at a time; none has a clock of its own."""

    def decoder(self, name: str, latest: Callable[[], PolicyVersion]) -> Decoder:
        """That of a host; `latest()` is the last committed version."""
        ...

    def score(self, action: e.Score) -> e.RewardScored | e.RewardFailed: ...

    def train(self, action: e.Train) -> tuple[str, dict[str, Any]]:
        """The new version's digest, and the step's metrics."""
        ...

    def publish(self, version: PolicyVersion) -> str:
        """Make a trained version the one that hosts adopt; its digest."""
        ...

    def forget(self, ordinal: int) -> None:
        """The group was dropped, or starts again."""
        ...


class DrawnMachines:
    """Everything is a function of the schedule's seed and the numbers of what is asked."""

    def __init__(self, config: Config, schedule: Schedule) -> None:
        self._config, self._schedule = config, schedule

    def decoder(self, name: str, latest: Callable[[], PolicyVersion]) -> Decoder:
        def committed() -> tuple[PolicyVersion, str]:
            version = latest()
            return version, self.publish(version)

        return DrawnAnswers(name, self._config, self._work, committed)

    def score(self, action: e.Score) -> e.RewardScored | e.RewardFailed:
        schedule, size = self._schedule, self._config.algorithm.group_size
        rng = np.random.default_rng([schedule.seed, 4, action.ordinal, action.attempt])
        if rng.random() < schedule.failed_rewards:
            return e.RewardFailed(
                action.ordinal, action.attempt, int(rng.integers(size)), "timed_out", "simulated"
            )
        is_equal = rng.random() < schedule.equal_rewards
        rewards = np.zeros(size) if is_equal else np.round(rng.random(size), 3)
        return e.RewardScored(action.ordinal, action.attempt, tuple(float(reward) for reward in rewards))

    def train(self, action: e.Train) -> tuple[str, dict[str, Any]]:
        return self.publish(action.step + 1), {}

    def publish(self, version: PolicyVersion) -> str:
        """Equal versions have equal bits, also when redone."""
        return f"digest-{version}"

    def forget(self, ordinal: int) -> None:
        """Nothing is kept."""

    def _work(self, sample: SampleId) -> Work:
        """How a sample goes, as a function of (seed, ordinal, member, attempt) alone."""
        schedule = self._schedule
        rng = np.random.default_rng([schedule.seed, 3, *sample])
        tokens = schedule.median_tokens * np.exp(schedule.sigma_tokens * rng.standard_normal())
        length = int(np.clip(round(tokens), 1, self._config.generation.max_tokens))
        return Work(sample, length, fails=bool(rng.random() < schedule.failed_samples))
