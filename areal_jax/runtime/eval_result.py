"""What an evaluation found, prompt by prompt, and the figures made of it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any, NamedTuple

from areal_jax.observe.estimates import mean_estimate, pass_at_k, powers_of_two, share_estimate

RIGHT = 1.0
"""A completion is right when its reward is at least this."""

NAMED = 20
"""Prompts without figures that a result names: those too long, and those whose reward failed."""


class ScoredPrompt(NamedTuple):
    """A prompt's samples: reward, completion tokens, and whether its length limit stopped it, of each."""

    rewards: tuple[float, ...]
    lengths: tuple[int, ...]
    truncated: tuple[bool, ...]

    @property
    def right(self) -> int:
        return sum(reward >= RIGHT for reward in self.rewards)


class Failure(NamedTuple):
    """A prompt that could not be scored: no answer, right or wrong."""

    prompt: str
    """task/index"""
    outcome: str  # failed | timed_out
    message: str


@dataclass(frozen=True)
class PassResult:
    """All prompts under one way of sampling, by their order in the task."""

    samples: int
    temperature: float
    prompts: tuple[ScoredPrompt, ...] = ()
    failures: tuple[Failure, ...] = ()
    tokens: int = 0
    """Sampled, those of prompts whose reward failed included."""
    seconds: float = 0.0

    def __add__(self, other: PassResult) -> PassResult:
        return replace(
            self,
            prompts=self.prompts + other.prompts,
            failures=self.failures + other.failures,
            tokens=self.tokens + other.tokens,
            seconds=self.seconds + other.seconds,
        )


@dataclass(frozen=True)
class TaskResult:
    prompts: int
    too_long: tuple[str, ...]
    """task/index of those that leave generation.length no room for a completion."""
    cramped: int
    """Prompts that leave room for less than generation.max_tokens; they are asked all the same."""
    greedy: PassResult
    sampled: PassResult | None

    def __add__(self, other: TaskResult) -> TaskResult:
        sampled = self.sampled and other.sampled and self.sampled + other.sampled
        too_long = self.too_long + other.too_long
        return TaskResult(
            self.prompts + other.prompts,
            too_long,
            self.cramped + other.cramped,
            self.greedy + other.greedy,
            sampled,
        )


@dataclass(frozen=True)
class EvalResult:
    tasks: dict[str, TaskResult]

    @property
    def overall(self) -> TaskResult:
        """All prompts of all tasks together, each counted once."""
        first, *rest = self.tasks.values()
        return sum(rest, first)


def task_figures(result: TaskResult) -> dict[str, Any]:
    """Counts, then the figures of both passes over the prompts that were scored; plain values."""
    figures: dict[str, Any] = {
        "prompts": result.prompts,
        "too_long": len(result.too_long),
        "too_long_prompts": list(result.too_long[:NAMED]),
        "cramped": result.cramped,
        "greedy": _pass_figures(result.greedy),
    }
    if result.sampled is not None:
        figures["sampled"] = _pass_figures(result.sampled)
    return figures


def _pass_figures(result: PassResult) -> dict[str, Any]:
    prompts = result.prompts
    outcomes = [failure.outcome for failure in result.failures]
    lengths = [length for prompt in prompts for length in prompt.lengths]
    truncated = [is_cut for prompt in prompts for is_cut in prompt.truncated]
    return {
        "samples": result.samples,
        "temperature": result.temperature,
        "scored": len(prompts),
        "failed": outcomes.count("failed"),
        "timed_out": outcomes.count("timed_out"),
        **_right_figures(result),
        "reward_mean": mean_estimate([fmean(prompt.rewards) for prompt in prompts])._asdict(),
        "completion_tokens_mean": fmean(lengths) if lengths else None,
        "truncated_share": fmean(truncated) if truncated else None,
        "tokens": result.tokens,
        "seconds": result.seconds,
        "tokens_per_s": result.tokens / result.seconds if result.seconds else None,
        "failures": [failure._asdict() for failure in result.failures[:NAMED]],
    }


def _right_figures(result: PassResult) -> dict[str, Any]:
    """accuracy of the greedy answers; of several samples pass@k, k = 1, 2, 4, ..."""
    rights = [prompt.right for prompt in result.prompts]
    if result.temperature == 0:
        return {"accuracy": share_estimate(rights)._asdict()}
    n = result.samples
    return {
        f"pass@{k}": share_estimate([pass_at_k(n, right, k) for right in rights])._asdict()
        for k in powers_of_two(n)
    }
