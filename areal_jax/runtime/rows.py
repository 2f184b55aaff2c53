"""Makes each step's metrics row: counts and times of trainer, hosts and control plane since the last row."""

from __future__ import annotations

import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from areal_jax.config.sections import ControlConfig
from areal_jax.control.events import (
    Action,
    Drop,
    Event,
    HostAdopted,
    Reissue,
    RewardFailed,
    SamplesMoved,
)
from areal_jax.control.reward_gate import Gates
from areal_jax.generation.commands import Statistics
from areal_jax.observe.waits import CONTROL, CONTROL_ALONE, HELD, idle_share
from areal_jax.trajectories.age_mask import oldest_trained, trained_mask
from areal_jax.trajectories.prefix_tree import Sampled, tree_of
from areal_jax.types import NOT_SAMPLED, Group, PolicyVersion

BY_TASK = ("reward_mean", "signal_share", "completion_tokens_mean", "truncated_share")
"""Fields of a metrics row that a run with several tasks also has for each task, besides `failed_rewards`."""

HOST_COUNTS = ("swaps", "swap_s", "recomputed_tokens", "evictions")
"""Fields of the hosts' `Statistics` that a metrics row sums: versions adopted, seconds spent on adopting
versions, tokens recomputed, samples evicted because pages ran out."""


Totals = Callable[[], Mapping[str, Mapping[str, float]]]
"""A function that returns component -> activity -> seconds spent on it since the last call, such as
`Timeline.take_totals`.
"""


class HostFigures(Protocol):
    """The figures that a metrics row reads from a host, which may run in another process.

    `gaps_s`: seconds between successive decode calls of the host; making a row removes all entries.
    """

    name: str
    gaps_s: deque[float]

    @property
    def generated_tokens(self) -> int: ...

    @property
    def tokens_per_s(self) -> float | None:
        """Tokens per second between the host's last two heartbeats; None for a host of this process.

        A host of this process sends no heartbeats, because its `generated_tokens` are always up to date.
        """
        ...

    def statistics(self) -> Statistics: ...


class RowMaker:
    """Counts events between two rows and makes the rows.

    `take_totals()` returns component -> activity -> seconds since its last call. `start_s`: seconds that the
    run took before this process. `tasks`: names of the run's tasks; with several tasks, a row also has
    figures for each task. `task_of(ordinal)` returns the name of the group's task. `control`: with
    over_age=hold or mask, a row also has what that costs.
    """

    def __init__(
        self,
        take_totals: Totals,
        hosts: Sequence[HostFigures],
        start_s: float = 0.0,
        tasks: Sequence[str] = (),
        task_of: Callable[[int], str] = lambda _: "",
        control: ControlConfig | None = None,
    ) -> None:
        self._take_totals, self._hosts = take_totals, hosts
        self._tasks, self._task_of = tasks if len(tasks) > 1 else (), task_of
        self._control = control or ControlConfig()
        self._zero_s = time.monotonic() - start_s
        self._last_s = time.monotonic()
        self._generated = 0
        self._host_totals: Mapping[str, float] = dict.fromkeys(HOST_COUNTS, 0)
        self._interruptions = self._moved = 0
        self._failed: Counter[str] = Counter()
        self._dropped: Counter[str] = Counter()
        self._reissued: Counter[str] = Counter()

    def see(self, event: Event, actions: Iterable[Action]) -> None:
        """Count an event and the actions that the control plane returned for it."""
        if isinstance(event, HostAdopted):
            self._interruptions += event.interrupted
        elif isinstance(event, SamplesMoved):
            self._moved += len(event.samples)
        elif isinstance(event, RewardFailed):
            self._failed[self._task_of(event.ordinal)] += 1
        for action in actions:
            if isinstance(action, Drop):
                self._dropped[action.reason] += 1
            elif isinstance(action, Reissue):
                self._reissued[action.reason] += 1

    def make(
        self, step: int, groups: Sequence[Group], trained: dict[str, float], digest: str, gates: Gates = ()
    ) -> dict[str, Any]:
        """Return the row of `step`, which trained `groups`, and reset the counts for the next row.

        `trained`: the metrics that the trainer reported; `digest`: a hash of the new parameters; `gates`: the
        gates of the batch, by which the rewards of `groups` were paid.
        """
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
            **batch_figures(step, groups, gates, oldest_trained(self._control, step)),
            **self._task_figures(groups),
            "generated_tokens": new_tokens,
            "generate_tokens_per_s": self._rate(new_tokens / span),
            "train_tokens_per_s": trained["trained_tokens"] / span,
            "trainer_wait_share": idle_share(totals.get("trainer", {})),
            **self._hold_share(totals.get("trainer", {})),
            "generator_idle_share": self._idle_share(totals),
            "move_share": self._share_of("move", totals),
            **_control_shares(totals),
            "decode_gap_p99_s": float(np.quantile(gaps, 0.99)) if gaps else 0.0,
            "interruptions": self._interruptions,
            "moved_samples": self._moved,
            **self._host_counts(),
            "failed_rewards": self._failed.total(),
            "dropped": self._dropped.total(),
            "dropped_by_reason": dict(self._dropped),
            "reissued_by_reason": dict(self._reissued),
            "params_digest": digest,
            "clip_share": 0.0,
            **trained,
        }
        self._interruptions = self._moved = 0
        for counter in (self._failed, self._dropped, self._reissued):
            counter.clear()
        return row

    def _rate(self, counted: float) -> float:
        """Return the tokens per second that all hosts generate: the sum of the rates that hosts report.

        If no host reports a rate, this is `counted`: the tokens counted since the last row, per second.
        """
        rates = [host.tokens_per_s for host in self._hosts if host.tokens_per_s is not None]
        return sum(rates) if rates else counted

    def _idle_share(self, totals: Mapping[str, Mapping[str, float]]) -> float:
        """Return the fraction of time that a host was idle, averaged over hosts; 0 if there is no host."""
        shares = [idle_share(totals.get(host.name, {})) for host in self._hosts]
        return sum(shares) / len(shares) if shares else 0.0

    def _hold_share(self, trainer: Mapping[str, float]) -> dict[str, float]:
        """Return the fraction of time that the trainer waited because of control.over_age=hold.

        It is a part of `trainer_wait_share`. `trainer`: activity -> seconds.
        """
        if self._control.over_age != "hold":
            return {}
        elapsed = sum(trainer.values())
        return {"hold_share": trainer.get(f"wait: {HELD}", 0.0) / elapsed if elapsed else 0.0}

    def _share_of(self, activity: str, totals: Mapping[str, Mapping[str, float]]) -> float:
        """Return the fraction of time that a host spent on `activity`, averaged over hosts.

        A host without any time, such as one that has just started again, does not count.
        """
        spent = [totals.get(host.name, {}) for host in self._hosts]
        shares = [own.get(activity, 0.0) / sum(own.values()) for own in spent if sum(own.values())]
        return sum(shares) / len(shares) if shares else 0.0

    def _host_counts(self) -> dict[str, float]:
        """Return by how much each of HOST_COUNTS has grown since the last row, summed over hosts."""
        statistics = [host.statistics() for host in self._hosts]
        totals = {name: sum(getattr(each, name) for each in statistics) for name in HOST_COUNTS}
        new = {name: total - self._host_totals[name] for name, total in totals.items()}
        self._host_totals = totals
        return new

    def _task_figures(self, groups: Sequence[Group]) -> dict[str, float]:
        """Return the figures of each task as `<figure>/<task>`; empty if the run has only one task.

        A task without a group in this batch has only `failed_rewards/<task>`.
        """
        figures: dict[str, float] = {}
        for task in self._tasks:
            own = [group for group in groups if group.prompt.task == task]
            found = {**_reward_figures(own), **_length_figures(own)} if own else {}
            figures |= {f"{name}/{task}": found[name] for name in BY_TASK if name in found}
            figures[f"failed_rewards/{task}"] = self._failed[task]
        return figures


def batch_figures(
    step: int, groups: Sequence[Group], gates: Gates = (), oldest: PolicyVersion | None = None
) -> dict[str, Any]:
    """Return the figures on rewards, ages and lengths for the groups of batch `step`.

    `gates`: the gates of the batch, by which the rewards of `groups` were paid. `oldest`: the oldest version
    of which tokens are trained; None: all are.
    """
    return {
        **_reward_figures(groups),
        **_part_figures(groups, gates),
        **_age_figures(step, groups, oldest),
        **_length_figures(groups),
        **_tree_figures(groups),
    }


def _control_shares(totals: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
    """Return two fractions of the time since the last row: control plane busy, only the control plane busy.

    The second fraction is present only for a run in one process. `totals`: component -> activity -> seconds.
    """
    named = {"control_busy_share": CONTROL, "control_alone_share": CONTROL_ALONE}
    return {
        name: 1 - idle_share(totals[component]) for name, component in named.items() if totals.get(component)
    }


def _taken(host: HostFigures) -> list[float]:
    return [host.gaps_s.popleft() for _ in range(len(host.gaps_s))]


def _reward_figures(groups: Sequence[Group]) -> dict[str, float]:
    rewards = np.array([[t.reward for t in group.trajectories] for group in groups], float)
    return {
        "reward_mean": float(rewards.mean()),
        "reward_std": float(rewards.std()),
        "signal_share": float((np.ptp(rewards, axis=1) > 0).mean()),
    }


def _part_figures(groups: Sequence[Group], gates: Gates) -> dict[str, Any]:
    """Return the mean of each reward part, and the figures on gated parts; empty if no reward has parts.

    `reward_ungated_mean` is the mean reward as it was scored; `gates` says which gated part was paid, and
    `paid_share` to which fraction of the samples more than 0 of it was paid.
    """
    samples = [t for group in groups for t in group.trajectories]
    named = defaultdict(list)
    for t in samples:
        for name, value in t.reward_parts.items():
            named[name].append(value)
    figures: dict[str, Any] = {}
    if named:
        figures["reward_parts"] = {name: float(np.mean(values)) for name, values in named.items()}
    if gates:
        withheld = sum(sum(named[name]) for name, is_paid in gates if not is_paid) / len(samples)
        figures["reward_ungated_mean"] = float(np.array([t.reward for t in samples], float).mean() + withheld)
        figures["gates"] = dict(gates)
        figures["paid_share"] = {
            name: sum(value > 0 for value in named[name]) / len(samples) if is_paid else 0.0
            for name, is_paid in gates
        }
    return figures


def _age_figures(step: int, groups: Sequence[Group], oldest: PolicyVersion | None) -> dict[str, float]:
    """Return the least, median, mean and largest age of the trained tokens, and the mean age of first tokens.

    An age is `step`, the version at the start of the update, minus the token's version. Tokens of reference
    answers have age 0. If `oldest` is a version, tokens of older versions are not trained (over_age=mask):
    they count in `masked_token_share`, their fraction of the samples' tokens, and not in the tokens' ages,
    which are 0 if no token is left.
    """
    trajectories = [t for group in groups for t in group.trajectories]
    versions = np.concatenate([t.versions[trained_mask(t, oldest)] for t in trajectories])
    ages = np.where(versions == NOT_SAMPLED, 0, step - versions)  # a reference answer has no age
    ages = ages if ages.size else np.zeros(1, int)
    heads = [step - t.first_version if t.first_version != NOT_SAMPLED else 0 for t in trajectories]
    sampled = sum(t.completion_tokens for t in trajectories)
    return {
        "head_age_mean": float(np.mean(heads)),
        "token_age_mean": float(ages.mean()),
        "token_age_min": int(ages.min()),
        "token_age_median": float(np.median(ages)),
        "token_age_max": int(ages.max()),
        **({} if oldest is None else {"masked_token_share": 1 - versions.size / max(sampled, 1)}),
    }


def _tree_figures(groups: Sequence[Group]) -> dict[str, int]:
    """Return the number of tokens of all samples, prompts included, and of their distinct prefixes."""
    tree = tree_of([Sampled.of(t) for group in groups for t in group.trajectories])
    return {"sequence_tokens": tree.sequence_tokens, "tree_tokens": tree.tokens}


def _length_figures(groups: Sequence[Group]) -> dict[str, float]:
    """Return the figures on completion lengths.

    `completion_bubble_share` is (longest - mean) / longest: the share of slots and steps that a decoder with
    one slot for each sample would leave empty while it waits for the longest one.
    """
    lengths = [t.completion_tokens for group in groups for t in group.trajectories]
    longest = int(max(lengths))
    return {
        "completion_bubble_share": float(1 - np.mean(lengths) / longest) if longest else 0.0,
        "completion_tokens_max": longest,
        "completion_tokens_mean": float(np.mean(lengths)),
        "completion_tokens_p50": float(np.median(lengths)),
        "completion_tokens_p99": float(np.quantile(lengths, 0.99)),
        "truncated_share": float(np.mean([t.truncated for group in groups for t in group.trajectories])),
    }
