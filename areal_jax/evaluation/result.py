"""Results of an evaluation, prompt by prompt, and the figures computed from them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any, NamedTuple

from areal_jax.control.reward_gate import CORRECT, DECIMALS
from areal_jax.observe.estimates import mean_estimate, pass_at_k, powers_of_two, share_estimate

RIGHT = 1.0
"""A completion counts as right if its reward part `correct` is at least this.

Without that part, its reward must be at least this. Both are rounded first: 0.6 + 0.3 + 0.1 is below 1.
"""

NAMED = 20
"""A result lists at most this many prompts that are too long, and at most this many failures."""


class ScoredPrompt(NamedTuple):
    """One prompt's samples: for each its reward, token count, and whether the length limit ended it.

    `parts`: the parts of each reward; empty if no reward has parts.
    """

    rewards: tuple[float, ...]
    lengths: tuple[int, ...]
    truncated: tuple[bool, ...]
    parts: tuple[Mapping[str, float], ...] = ()

    @property
    def right(self) -> int:
        """Number of samples that count as right (see RIGHT)."""
        parts = self.parts or ({},) * len(self.rewards)
        pairs = zip(self.rewards, parts, strict=True)
        return sum(round(own.get(CORRECT, reward), DECIMALS) >= RIGHT for reward, own in pairs)


class Failure(NamedTuple):
    """A prompt that could not be scored; its samples count neither as right nor as wrong."""

    prompt: str
    """The prompt's task and its index in the task, as "task/index"."""
    outcome: str  # failed | timed_out
    message: str


@dataclass(frozen=True)
class PassResult:
    """Results of prompts decoded in one way (greedily or at one temperature), ordered by task and index."""

    samples: int
    temperature: float
    prompts: tuple[ScoredPrompt, ...] = ()
    failures: tuple[Failure, ...] = ()
    tokens: int = 0
    """Number of sampled tokens, including tokens of prompts with a failed reward."""
    seconds: float = 0.0

    def __add__(self, other: PassResult) -> PassResult:
        return _added(self, other, ("prompts", "failures", "tokens", "seconds"))


@dataclass(frozen=True)
class TaskResult:
    prompts: int
    too_long: tuple[str, ...]
    """"task/index" of prompts that are not evaluated, because they have generation.length tokens or more."""
    cramped: int
    """Number of evaluated prompts that leave less than generation.max_tokens for a completion.

    Prompt and completion together may have generation.length tokens.
    """
    passes: Mapping[str, PassResult]
    """Way of decoding -> result: "greedy" and, if completions are also sampled, "sampled"."""

    def __add__(self, other: TaskResult) -> TaskResult:
        passes = {way: result + other.passes[way] for way, result in self.passes.items()}
        return replace(_added(self, other, ("prompts", "too_long", "cramped")), passes=passes)


def _added(one: Any, other: Any, names: Sequence[str]) -> Any:
    """Returns a copy of `one` in which each field in `names` is the sum of `one`'s and `other`'s field."""
    return replace(one, **{name: getattr(one, name) + getattr(other, name) for name in names})


def overall(tasks: Mapping[str, TaskResult]) -> TaskResult:
    """Returns the result of all prompts of all tasks, as if the prompts belonged to one task."""
    first, *rest = tasks.values()
    return sum(rest, first)


def task_figures(result: TaskResult) -> dict[str, Any]:
    """Returns a result's figures as plain values: numbers of prompts, then the figures of each pass."""
    return {
        "prompts": result.prompts,
        "too_long": len(result.too_long),
        "too_long_prompts": list(result.too_long[:NAMED]),
        "cramped": result.cramped,
        **{way: _pass_figures(one) for way, one in result.passes.items()},
    }


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
        "parts": _part_figures(prompts),
        "completion_tokens_mean": fmean(lengths) if lengths else None,
        "truncated_share": fmean(truncated) if truncated else None,
        "tokens": result.tokens,
        "seconds": result.seconds,
        "tokens_per_s": result.tokens / result.seconds if result.seconds else None,
        "failures": [failure._asdict() for failure in result.failures[:NAMED]],
    }


def _part_figures(prompts: Sequence[ScoredPrompt]) -> dict[str, Any]:
    """Returns part -> estimate of its mean over the prompts; empty if no reward has parts.

    A prompt counts with the mean over its samples; a part counts as 0 for a sample without it.
    """
    names = dict.fromkeys(name for prompt in prompts for own in prompt.parts for name in own)

    def mean(prompt: ScoredPrompt, name: str) -> float:
        return sum(own.get(name, 0.0) for own in prompt.parts) / len(prompt.rewards)

    return {name: mean_estimate([mean(prompt, name) for prompt in prompts])._asdict() for name in names}


def _right_figures(result: PassResult) -> dict[str, Any]:
    """Returns a greedy pass's accuracy, or a sampled pass's pass@k for each power of two k <= samples."""
    rights = [prompt.right for prompt in result.prompts]
    if result.temperature == 0:
        return {"accuracy": share_estimate(rights)._asdict()}
    n = result.samples
    return {
        f"pass@{k}": share_estimate([pass_at_k(n, right, k) for right in rights])._asdict()
        for k in powers_of_two(n)
    }
