"""Statistics of remote hosts and trainers for the run's metrics, from their newest heartbeats."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from areal_jax.generation.commands import Statistics
from areal_jax.observe.waits import Timeline

COUNTS = tuple(f.name for f in fields(Statistics) if f.type in ("int", "float") and f.name != "version")


class RemoteHost:
    """Statistics of the host `name`, from the heartbeats of its process.

    If the process restarts, the counts continue from those of the earlier process.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.gaps_s: deque[float] = deque(maxlen=100_000)
        self._newest = Statistics()
        self._before: dict[str, float] = dict.fromkeys(COUNTS, 0)
        self._incarnation = ""
        self._at_s: float | None = None
        """Time of the newest heartbeat since the last start of the host's process; None before the first."""
        self.tokens_per_s: float | None = 0.0
        """Generated tokens per second between the host's last two heartbeats; 0 without a live heartbeat."""

    @property
    def generated_tokens(self) -> int:
        return int(self.statistics().generated_tokens)

    def statistics(self) -> Statistics:
        counts = {name: getattr(self._newest, name) + self._before[name] for name in COUNTS}
        return Statistics(**counts)

    def take_in(self, incarnation: str, heartbeat: Mapping[str, Any]) -> None:
        if incarnation != self._incarnation:  # a new process counts from 0
            self._before = {name: getattr(self.statistics(), name) for name in COUNTS}
            self._incarnation, self._at_s = incarnation, None
        if heartbeat["at_s"] == self._at_s:
            return  # the same heartbeat, read again
        former_s, self._at_s = self._at_s, heartbeat["at_s"]
        former = self._newest.generated_tokens
        self._newest = Statistics(**{name: heartbeat["statistics"][name] for name in COUNTS})
        self.gaps_s.extend(heartbeat["gaps_s"])
        if former_s is not None:
            self.tokens_per_s = (self._newest.generated_tokens - former) / (heartbeat["at_s"] - former_s)


class RemoteHosts:
    def __init__(self, timeline: Timeline) -> None:
        """`timeline`: the record of the controller's own activities; `take_totals` returns these too."""
        self._timeline = timeline
        self.hosts: list[RemoteHost] = []
        self._spent: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
        """Process -> activity -> seconds spent on the activity since the last call of `take_totals`."""
        self._taken: dict[str, dict[str, float]] = {}
        self._last: dict[str, dict[str, float]] = {}

    def join(self, name: str) -> None:
        if name not in {host.name for host in self.hosts}:
            self.hosts.append(RemoteHost(name))

    def take_in(self, heartbeats: Mapping[str, Any]) -> None:
        """Records the newest heartbeats: `heartbeats` is mailbox -> body of its heartbeat.

        Ignores bodies without `totals` (seconds per activity), which only hosts and trainers send. The token
        rate of a host without a heartbeat becomes 0.
        """
        living = {mailbox.rpartition(".")[0] for mailbox in heartbeats}
        for host in self.hosts:
            if host.name not in living:
                host.tokens_per_s = 0.0
        for mailbox, heartbeat in heartbeats.items():
            name, _, incarnation = mailbox.rpartition(".")
            if "totals" not in heartbeat:
                continue
            host = next((host for host in self.hosts if host.name == name), None)
            if host is not None:
                host.take_in(incarnation, heartbeat)
            # A new incarnation has a mailbox of its own, so its totals count from 0.
            before = self._last.get(mailbox, {})
            for activity, seconds in heartbeat["totals"].items():
                self._spent[name][activity] += max(0.0, seconds - before.get(activity, 0.0))
            self._last[mailbox] = dict(heartbeat["totals"])

    def take_totals(self) -> dict[str, dict[str, float]]:
        """Returns process -> activity -> seconds spent on the activity since the last call.

        For a process without a heartbeat since the last call, returns the former figures again, because the
        metrics divide by the sum of a process's figures. The key trainer has the figures of trainer-0.
        """
        own = self._timeline.take_totals()
        self._taken |= {name: dict(activities) for name, activities in self._spent.items()}
        self._spent.clear()
        return own | self._taken | {"trainer": self._taken.get("trainer-0", {})}
