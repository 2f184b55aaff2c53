"""A step's metrics row: what trainer, hosts and control plane did since the row before."""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from areal_jax.control.events import Action, Drop, Event, HostAdopted, Reissue, RewardFailed
from areal_jax.generation.commands import Statistics
from areal_jax.observe.waits import idle_share
from areal_jax.types import NOT_SAMPLED, Group

BY_TASK = ("reward_mean", "signal_share", "completion_tokens_mean", "truncated_share")
"""What a row says of each task as well, and `failed_rewards`."""

HOST_COUNTS = ("swaps", "swap_s", "recomputed_tokens", "evictions")
"""What a row says of the hosts' `Statistics`: versions adopted and the seconds it took, tokens whose KV was
rebuilt, samples that left their slot for want of pages."""


class HostFigures(Protocol):
    """A host as a row asks for it, in this process or in another."""

    name: str
    gaps_s: deque[float]

    @property
    def generated_tokens(self) -> int: ...

    @property
    def tokens_per_s(self) -> float | None:
        """None where `generated_tokens` is of this moment; else the rate between the last two said."""
        ...

    def statistics(self) -> Statistics: ...


class RowMaker:
    """Counts between two rows. `take_totals`: as `Timeline`'s, of `trainer` and the hosts. `start_s`: seconds
    the run had taken before this process.

    `tasks`: the run's, by name; with several, a row has figures of each, and `task_of` says whose an ordinal
    is.
    """

    def __init__(
        self,
        take_totals: Callable[[], Mapping[str, Mapping[str, float]]],
        hosts: Sequence[HostFigures],
        start_s: float = 0.0,
        tasks: Sequence[str] = (),
        task_of: Callable[[int], str] = lambda _: "",
    ) -> None:
        self._take_totals, self._hosts = take_totals, hosts
        self._tasks, self._task_of = tasks if len(tasks) > 1 else (), task_of
        self._zero_s = time.monotonic() - start_s
        self._last_s = time.monotonic()
        self._generated = 0
        self._host_totals: Mapping[str, float] = dict.fromkeys(HOST_COUNTS, 0)
        self._counts: Counter[str] = Counter()
        self._failed: Counter[str] = Counter()
        self._dropped: Counter[str] = Counter()
        self._reissued: Counter[str] = Counter()

    def see(self, event: Event, actions: Iterable[Action]) -> None:
        """Count what an event and its actions say."""
        if isinstance(event, HostAdopted):
            self._counts["interruptions"] += event.interrupted
        elif isinstance(event, RewardFailed):
            self._counts["failed_rewards"] += 1
            self._failed[self._task_of(event.ordinal)] += 1
        for action in actions:
            if isinstance(action, Drop):
                self._dropped[action.reason] += 1
            elif isinstance(action, Reissue):
                self._reissued[action.reason] += 1

    def make(
        self, step: int, groups: Sequence[Group], trained: dict[str, float], digest: str
    ) -> dict[str, Any]:
        """The row of `step`, whose batch was `groups`; starts the next one."""
        now = time.monotonic()
        span, self._last_s = max(now - self._last_s, 1e-9), now
        generated = sum(host.generated_tokens for host in self._hosts)
        new_tokens, self._generated = generated - self._generated, generated
        totals = self._take_totals()
        gaps = [gap for host in self._hosts for gap in _taken(host)]
        row = {
            "step": step,
            "version": step + 1,
            "wall_s": now - self._zero_s,
            **batch_figures(step, groups),
            **self._task_figures(groups),
            "generated_tokens": new_tokens,
            "generate_tokens_per_s": self._rate(new_tokens / span),
            "train_tokens_per_s": trained["trained_tokens"] / span,
            "trainer_wait_share": idle_share(totals.get("trainer", {})),
            "generator_idle_share": self._idle_share(totals),
            "decode_gap_p99_s": float(np.quantile(gaps, 0.99)) if gaps else 0.0,
            "interruptions": self._counts["interruptions"],
            **self._host_counts(),
            "failed_rewards": self._counts["failed_rewards"],
            "dropped": self._dropped.total(),
            "dropped_by_reason": dict(self._dropped),
            "reissued_by_reason": dict(self._reissued),
            "params_digest": digest,
            "clip_share": 0.0,
            **trained,
        }
        for counter in (self._counts, self._failed, self._dropped, self._reissued):
            counter.clear()
        return row

    def _rate(self, counted: float) -> float:
        """Tokens/s of all hosts; what they said themselves where their counts come but now and then."""
        said = [host.tokens_per_s for host in self._hosts]
        rates = [rate for rate in said if rate is not None]
        return sum(rates) if rates else counted

    def _idle_share(self, totals: Mapping[str, Mapping[str, float]]) -> float:
        """Mean of the hosts'; 0 where there is none at the moment."""
        shares = [idle_share(totals.get(host.name, {})) for host in self._hosts]
        return sum(shares) / len(shares) if shares else 0.0

    def _host_counts(self) -> dict[str, float]:
        """What the hosts did since the row before, summed over them."""
        said = [host.statistics() for host in self._hosts]
        totals = {name: sum(getattr(each, name) for each in said) for name in HOST_COUNTS}
        new = {name: total - self._host_totals[name] for name, total in totals.items()}
        self._host_totals = totals
        return new

    def _task_figures(self, groups: Sequence[Group]) -> dict[str, float]:
        """`<figure>/<task>` for each of several tasks; of one without a group in the batch, its failures."""
        figures: dict[str, float] = {}
        for task in self._tasks:
            own = [group for group in groups if group.prompt.task == task]
            found = {**_reward_figures(own), **_length_figures(own)} if own else {}
            figures |= {f"{name}/{task}": found[name] for name in BY_TASK if name in found}
            figures[f"failed_rewards/{task}"] = self._failed[task]
        return figures


def batch_figures(step: int, groups: Sequence[Group]) -> dict[str, float]:
    """What the groups of batch `step` say of themselves: rewards, ages, lengths."""
    return {**_reward_figures(groups), **_age_figures(step, groups), **_length_figures(groups)}


def _taken(host: HostFigures) -> list[float]:
    return [host.gaps_s.popleft() for _ in range(len(host.gaps_s))]


def _reward_figures(groups: Sequence[Group]) -> dict[str, float]:
    rewards = np.array([[t.reward for t in group.trajectories] for group in groups], float)
    return {
        "reward_mean": float(rewards.mean()),
        "reward_std": float(rewards.std()),
        "signal_share": float((np.ptp(rewards, axis=1) > 0).mean()),
    }


def _age_figures(step: int, groups: Sequence[Group]) -> dict[str, float]:
    """Ages in versions; the trained version is the one at the start of the update, which is `step`."""
    trajectories = [t for group in groups for t in group.trajectories]
    versions = np.concatenate([t.versions[t.loss_mask] for t in trajectories])
    ages = np.where(versions == NOT_SAMPLED, 0, step - versions)  # a reference answer has no age
    heads = [step - t.first_version if t.first_version != NOT_SAMPLED else 0 for t in trajectories]
    return {
        "head_age_mean": float(np.mean(heads)),
        "token_age_mean": float(ages.mean()),
        "token_age_min": int(ages.min()),
        "token_age_median": float(np.median(ages)),
        "token_age_max": int(ages.max()),
    }


def _length_figures(groups: Sequence[Group]) -> dict[str, float]:
    lengths = [t.completion_tokens for group in groups for t in group.trajectories]
    return {
        "completion_tokens_mean": float(np.mean(lengths)),
        "completion_tokens_p50": float(np.median(lengths)),
        "completion_tokens_p99": float(np.quantile(lengths, 0.99)),
        "truncated_share": float(np.mean([t.truncated for group in groups for t in group.trajectories])),
    }
