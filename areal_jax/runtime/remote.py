"""The hosts of a cluster as metrics rows ask for them: what their signs of life said last."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from areal_jax.generation.commands import Statistics
from areal_jax.observe.waits import Timeline

COUNTS = tuple(f.name for f in fields(Statistics) if f.type in ("int", "float") and f.name != "version")


class RemoteHost:
    """Counts go on where a host of the same name starts anew."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.gaps_s: deque[float] = deque(maxlen=100_000)
        self._said = Statistics()
        self._before: dict[str, float] = dict.fromkeys(COUNTS, 0)
        self._incarnation = ""
        self._number = -1
        self._at_s = 0.0
        self.tokens_per_s: float | None = 0.0
        """Between its last two signs of life."""

    @property
    def generated_tokens(self) -> int:
        return int(self.statistics().generated_tokens)

    def statistics(self) -> Statistics:
        counts = {name: getattr(self._said, name) + self._before[name] for name in COUNTS}
        return Statistics(**counts)

    def hear(self, incarnation: str, beat: Mapping[str, Any]) -> None:
        if incarnation != self._incarnation:
            self._before = {name: getattr(self.statistics(), name) for name in COUNTS}
            self._incarnation, self._number = incarnation, -1
        if beat["number"] == self._number:
            return  # heard before
        former, passed_s = self._said, beat["at_s"] - self._at_s
        is_first, self._number, self._at_s = self._number < 0, beat["number"], beat["at_s"]
        self._said = Statistics(**{name: beat["statistics"][name] for name in COUNTS})
        self.gaps_s.extend(beat["gaps_s"])
        if not is_first and passed_s > 0:
            self.tokens_per_s = (self._said.generated_tokens - former.generated_tokens) / passed_s


class RemoteHosts:
    def __init__(self, timeline: Timeline) -> None:
        """`timeline`: of the controller's own actors."""
        self._timeline = timeline
        self.hosts: list[RemoteHost] = []
        self._spent: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
        """Seconds by activity since the last take, by actor."""
        self._taken: dict[str, dict[str, float]] = {}
        self._last: dict[str, dict[str, float]] = {}

    def join(self, name: str) -> None:
        if name not in {host.name for host in self.hosts}:
            self.hosts.append(RemoteHost(name))

    def hear(self, beats: Mapping[str, Any]) -> None:
        """Signs of life by `name.incarnation`, of all who live; those without figures are no host's or
        trainer's.
        """
        living = {box.rpartition(".")[0] for box in beats}
        for host in self.hosts:
            if host.name not in living:
                host.tokens_per_s = 0.0
        for box, beat in beats.items():
            name, _, incarnation = box.rpartition(".")
            if "totals" not in beat:
                continue
            host = next((host for host in self.hosts if host.name == name), None)
            if host is not None and "number" in beat:
                host.hear(incarnation, beat)
            before = self._last.get(box, {})
            for activity, seconds in beat["totals"].items():
                self._spent[name][activity] += max(0.0, seconds - before.get(activity, 0.0))
            self._last[box] = dict(beat["totals"])

    def take_totals(self) -> dict[str, dict[str, float]]:
        """Seconds by activity of every actor since the last take, as `Timeline.take_totals` gives them.

        Of one that gave no sign of life meanwhile those before: rows ask for shares.
        """
        own = self._timeline.take_totals()
        self._taken |= {name: dict(activities) for name, activities in self._spent.items()}
        self._spent.clear()
        return own | self._taken | {"trainer": self._taken.get("trainer-0", {})}
