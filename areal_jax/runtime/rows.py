"""Makes each step's metrics row: counts and times of trainer, hosts and control plane since the last row."""

from __future__ import annotations

import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from statistics import fmean
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from areal_jax.config.sections import ControlConfig
from areal_jax.control.events import (
    Action,
    Drop,
    EpisodeFailed,
    Event,
    HostAdopted,
    Reissue,
    RewardFailed,
    SamplesMoved,
    ToolStarted,
    TurnFinished,
    cause_of,
)
from areal_jax.control.reward_gate import Gates
from areal_jax.observe.waits import CONTROL, CONTROL_ALONE, HELD, idle_share
from areal_jax.runtime.batch_figures import batch_figures, length_figures, reward_figures
from areal_jax.trajectories.age_mask import oldest_trained
from areal_jax.trajectories.paths import turns_of
from areal_jax.types import Group

if TYPE_CHECKING:
    from areal_jax.generation.commands import Statistics

BY_TASK = ("reward_mean", "signal_share", "completion_tokens_mean", "truncated_share")
"""Fields of a metrics row that a run with several tasks also has for each task, besides `failed_rewards`."""

HOST_COUNTS = ("swaps", "swap_s", "recomputed_tokens", "evictions", "prefilled_tokens", "reused_tokens")
"""Fields of the hosts' `Statistics` that a metrics row sums: versions adopted, seconds spent on adopting
versions, tokens recomputed, samples evicted because pages ran out, prompt tokens computed, and tokens with KV
from an earlier turn."""

BY_KIND = ("dropped_by_reason", "reissued_by_reason", "failures_by_cause", "dropped_by_cause")
"""Fields of a metrics row that map a reason or cause to the number of groups or failures with it."""

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
    over_age=hold or mask, a row also has what that costs. `has_episodes`: whether a task has a workflow; a
    row then has figures of episodes.
    """

    COUNTED = (
        "interruptions", "moved_samples", "failed_rewards", "failures_by_cause", "dropped",
        "dropped_by_reason", "dropped_by_cause", "reissued_by_reason", "tool_calls", "calls_in_doubt",
        "failed_episodes",
    )  # fmt: skip
    """Figures that are counted from events since the last row, also those with /TASK. After a resume, older
    versions of areal-jax counted in the first row only those that the new process handled."""

    def __init__(
        self,
        take_totals: Totals,
        hosts: Sequence[HostFigures],
        start_s: float = 0.0,
        tasks: Sequence[str] = (),
        task_of: Callable[[int], str] = lambda _: "",
        control: ControlConfig | None = None,
        *,
        has_episodes: bool = False,
    ) -> None:
        self._take_totals, self._hosts = take_totals, hosts
        self._tasks, self._task_of = tasks if len(tasks) > 1 else (), task_of
        self._control = control or ControlConfig()
        self._zero_s = time.monotonic() - start_s
        self._last_s = time.monotonic()
        self._generated = 0
        self._host_totals: Mapping[str, float] = dict.fromkeys(HOST_COUNTS, 0)
        self._interruptions = self._moved = 0
        self._has_episodes = has_episodes
        self._episodes: Counter[str] = Counter()
        """Counts of episodes' events since the last row."""
        self._counts: defaultdict[str, Counter[str]] = defaultdict(Counter)
        """Since the last row: those of BY_KIND, and `failed_rewards` by task."""

    def see(self, event: Event, actions: Iterable[Action]) -> None:
        """Count an event and the actions that the control plane returned for it."""
        if isinstance(event, HostAdopted):
            self._interruptions += event.interrupted
        elif isinstance(event, SamplesMoved):
            self._moved += len(event.samples)
        elif isinstance(event, RewardFailed):
            self._counts["failed_rewards"][self._task_of(event.ordinal)] += 1
        elif isinstance(event, TurnFinished | ToolStarted | EpisodeFailed):
            self._episodes[event.reason if isinstance(event, EpisodeFailed) else type(event).__name__] += 1
        if (cause := cause_of(event)) is not None:
            self._counts["failures_by_cause"][cause] += 1
        for action in actions:
            if isinstance(action, Drop):
                self._counts["dropped_by_reason"][action.reason] += 1
                self._counts["dropped_by_cause"].update([] if cause is None else [cause])
            elif isinstance(action, Reissue):
                self._counts["reissued_by_reason"][action.reason] += 1

    def make(
        self, step: int, groups: Sequence[Group], trained: dict[str, float], digest: str, gates: Gates = ()
    ) -> dict[str, Any]:
        """Return the row of `step`, which trained `groups`, and reset the counts for the next row.

        `trained`: the metrics that the trainer reported; `digest`: a hash of the new parameters; `gates`: the
        gates of the batch, by which the rewards of `groups` were paid.
        """
        now = time.monotonic()
        span, self._last_s = max(now - self._last_s, 1e-9), now
        of_journal = self.of_journal(step, groups, gates)
        generated = sum(host.generated_tokens for host in self._hosts)
        new_tokens, self._generated = generated - self._generated, generated
        totals = self._take_totals()
        gaps = [gap for host in self._hosts for gap in _taken(host)]
        return {
            **of_journal,
            "wall_s": now - self._zero_s,
            "generated_tokens": new_tokens,
            "generate_tokens_per_s": self._rate(new_tokens / span),
            "train_tokens_per_s": trained["trained_tokens"] / span,
            "trainer_wait_share": idle_share(totals.get("trainer", {})),
            **self._hold_share(totals.get("trainer", {})),
            "generator_idle_share": self._idle_share(totals),
            "move_share": self._share_of("move", totals),
            **_control_shares(totals),
            "decode_gap_p99_s": float(np.quantile(gaps, 0.99)) if gaps else 0.0,
            **self._host_counts(),
            "params_digest": digest,
            "clip_share": 0.0,
            **trained,
        }

    def of_journal(self, step: int, groups: Sequence[Group], gates: Gates = ()) -> dict[str, Any]:
        """Return the figures of the row that follow from the journal's events and the batch's groups.

        Resets the counts for the next row. `groups`: as in `make`; if empty, only counts are returned.
        """
        of_groups: dict[str, Any] = {}
        if groups:
            of_groups = batch_figures(step, groups, gates, oldest_trained(self._control, step))
            of_groups |= self._task_figures(groups) | self._episode_figures(groups)
        row = {
            "step": step,
            "version": step + 1,
            **of_groups,
            "interruptions": self._interruptions,
            "moved_samples": self._moved,
            "failed_rewards": self._counts["failed_rewards"].total(),
            "dropped": self._counts["dropped_by_reason"].total(),
            **{name: dict(self._counts[name]) for name in BY_KIND},
        }
        self._interruptions = self._moved = 0
        self._counts.clear()
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

    def _episode_figures(self, groups: Sequence[Group]) -> dict[str, float]:
        """Return figures of the episodes since the last row; empty for a run without episodes."""
        if not self._has_episodes:
            return {}
        counts, self._episodes = self._episodes, Counter()
        samples = [t for group in groups for t in group.trajectories]
        return {
            "turns_mean": fmean(turns_of(t) for t in samples),
            "turns_max": max(turns_of(t) for t in samples),
            "branches_mean": fmean(len(t.branches) for t in samples),
            "tool_calls": counts["ToolStarted"],
            "calls_in_doubt": counts["tool_in_doubt"],
            "failed_episodes": counts["failed_episode"] + counts["workflow_diverged"] + counts["agent_lost"],
        }

    def _task_figures(self, groups: Sequence[Group]) -> dict[str, float]:
        """Return the figures of each task as `<figure>/<task>`; empty if the run has only one task.

        A task without a group in this batch has only `failed_rewards/<task>`.
        """
        figures: dict[str, float] = {}
        for task in self._tasks:
            own = [group for group in groups if group.prompt.task == task]
            found = {**reward_figures(own), **length_figures(own)} if own else {}
            figures |= {f"{name}/{task}": found[name] for name in BY_TASK if name in found}
            figures[f"failed_rewards/{task}"] = self._counts["failed_rewards"][task]
        return figures


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
