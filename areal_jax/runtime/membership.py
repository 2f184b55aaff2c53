"""Which processes of a run there are, as its controller knows: pure, told the time by whoever asks."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Collection
from dataclasses import dataclass, field

from areal_jax.runtime.messages import Hello

SILENT_S = 15.0
"""Who gives no sign of life for so long is lost; a sign lives that long, and is given every BEAT_S."""
BEAT_S = 2.0
MOST_LOSSES, WINDOW_S = 5, 600.0
"""Who is lost so often within the window is not taken in again, where others do its work."""
REPLACEABLE = ("generate", "reward")
"""Roles in which one process does what another does."""


@dataclass
class Member:
    hello: Hello
    since_s: float
    is_ready: bool = False

    @property
    def box(self) -> str:
        """Of this incarnation alone: one that was given up for lost takes nobody's commands."""
        return box_of(self.hello.name, self.hello.incarnation)


def box_of(name: str, incarnation: str) -> str:
    return f"{name}.{incarnation}"


@dataclass
class Membership:
    """By name; the last to say hello under a name is the one that counts."""

    members: dict[str, Member] = field(default_factory=dict)
    _losses: dict[str, deque[float]] = field(default_factory=lambda: defaultdict(deque))

    def join(self, hello: Hello, now_s: float) -> str | None:
        """Take it in, in place of an earlier one of that name; or why it is not wanted."""
        known = self.members.get(hello.name)
        if known is not None and known.hello.incarnation == hello.incarnation:
            return None
        if known is not None:
            self.lose(hello.name, now_s)
        losses = self._losses[hello.name]
        while losses and losses[0] < now_s - WINDOW_S:
            losses.popleft()
        if len(losses) >= MOST_LOSSES and hello.role in REPLACEABLE and self.ready(hello.role):
            return (
                f"{hello.name} on {hello.machine} was lost {len(losses)} times within {WINDOW_S:g} s and is "
                "in quarantine until that is over; see its log, and the machine"
            )
        self.members[hello.name] = Member(hello, now_s)
        return None

    def of(self, name: str, incarnation: str) -> Member | None:
        """The member, unless another incarnation counts by now."""
        member = self.members.get(name)
        return member if member is not None and member.hello.incarnation == incarnation else None

    def lose(self, name: str, now_s: float) -> Member | None:
        """It is gone, and not as it should."""
        self._losses[name].append(now_s)
        return self.members.pop(name, None)

    def leave(self, name: str) -> Member | None:
        """It is gone, as it should."""
        return self.members.pop(name, None)

    def silent(self, heard: Collection[str], now_s: float) -> list[str]:
        """Names of members without a sign of life, beyond the time in which a first one has to come."""
        return [
            name
            for name, member in self.members.items()
            if member.box not in heard and now_s - member.since_s > SILENT_S
        ]

    def of_role(self, role: str) -> list[Member]:
        return [member for member in self.members.values() if member.hello.role == role]

    def ready(self, role: str) -> list[Member]:
        """Those of a role that work, by name."""
        found = [member for member in self.of_role(role) if member.is_ready]
        return sorted(found, key=lambda member: member.hello.name)
