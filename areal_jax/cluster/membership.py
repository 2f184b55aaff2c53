"""The controller's record of a run's live processes: no I/O and no clock; the time is an argument."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Collection
from dataclasses import dataclass, field

from areal_jax.cluster.messages import Hello, Ready

LOST_S = 15.0
"""Seconds without a heartbeat after which a process is declared lost."""
HEARTBEAT_S = 2.0
"""Seconds between two heartbeats of a process."""
MOST_LOSSES, WINDOW_S = 5, 600.0
"""A process that was lost MOST_LOSSES times within WINDOW_S seconds is refused while another process can do
its work.
"""
INTERCHANGEABLE = ("generate", "reward")
"""Roles of which any process can do the work of any other process of the same role."""


@dataclass
class Member:
    hello: Hello
    since_s: float
    """From this time on it has LOST_S for a heartbeat: when it registered, or could last have sent none."""
    ready: Ready | None = None
    """The process's answer to the controller's last message Begin; None before that answer."""

    @property
    def is_ready(self) -> bool:
        """Whether the process takes commands; a trainer does not while it catches up with the journal."""
        return self.ready is not None and self.ready.next_step < 0

    @property
    def mailbox(self) -> str:
        """Name of the mailbox that only this start of the process reads.

        A restarted process has another mailbox, so a lost process never gets commands for its replacement.
        """
        return mailbox_of(self.hello.name, self.hello.incarnation)


def mailbox_of(name: str, incarnation: str) -> str:
    return f"{name}.{incarnation}"


@dataclass
class Membership:
    """The run's live processes by name; a process that joins replaces an earlier one of the same name."""

    members: dict[str, Member] = field(default_factory=dict)
    silent: dict[str, Member] = field(default_factory=dict)
    """By name, the processes that were lost for want of a heartbeat: they may be paused or slow, not dead."""
    _losses: dict[str, deque[float]] = field(default_factory=lambda: defaultdict(deque))

    def join(self, hello: Hello, now_s: float) -> str | None:
        """Adds the process that sent `hello`; an earlier process of the same name is counted as lost.

        Returns None, or the reason if the process is refused because it was lost too often. `now_s`: the time
        in seconds, on any clock that never goes back.
        """
        known = self.members.get(hello.name)
        if known is not None and known.hello.incarnation == hello.incarnation:
            return None
        if known is not None:
            self.lose(hello.name, now_s)
        self.silent.pop(hello.name, None)
        losses = self._losses[hello.name]
        while losses and losses[0] < now_s - WINDOW_S:
            losses.popleft()
        # Only if another process does the work: without one the run could not continue.
        if len(losses) >= MOST_LOSSES and hello.role in INTERCHANGEABLE and self.ready(hello.role):
            return (
                f"{hello.name} on {hello.machine} was lost {len(losses)} times within {WINDOW_S:g} s, so it "
                f"may not join until these losses are {WINDOW_S:g} s old; the run continues without it. See "
                f"logs/{hello.name}.log in the run's folder, and check the machine"
            )
        self.members[hello.name] = Member(hello, now_s)
        return None

    def of(self, name: str, incarnation: str) -> Member | None:
        """Returns the record of process `name` if it is live and was started as `incarnation`; else None.

        `incarnation`: the random string that identifies a start of a process.
        """
        member = self.members.get(name)
        return member if member is not None and member.hello.incarnation == incarnation else None

    def lose(self, name: str, now_s: float) -> Member | None:
        """Removes a process that was lost; returns its record, or None if no live process has this name.

        Also records the time `now_s` of the loss, because `join` refuses a process that was lost too often.
        """
        self._losses[name].append(now_s)
        return self.members.pop(name, None)

    def silence(self, name: str, now_s: float) -> Member | None:
        """Removes a process without a heartbeat, as `lose` does, until `heard_again` returns it."""
        if (member := self.lose(name, now_s)) is not None:
            self.silent[name] = member
        return member

    def heard_again(self, heard: Collection[str]) -> list[Hello]:
        """Returns what the processes without a heartbeat registered with that have one by now (`heard`).

        They were not lost after all, so these losses no longer count.
        """
        back = [member.hello for member in self.silent.values() if member.mailbox in heard]
        for hello in back:
            del self.silent[hello.name]
            self._losses[hello.name].pop()
        return back

    def forget(self, name: str, incarnation: str) -> None:
        """Gives up a process without a heartbeat for good, because it has ended."""
        if name in self.silent and self.silent[name].hello.incarnation == incarnation:
            del self.silent[name]

    def wait_for_all(self, now_s: float) -> None:
        """Gives every process LOST_S from now on for its next heartbeat."""
        for member in self.members.values():
            member.since_s = now_s

    def leave(self, name: str) -> Member | None:
        """Removes a process that ended as requested; returns its record, or None if none has this name."""
        return self.members.pop(name, None)

    def without_heartbeat(self, heard: Collection[str], now_s: float) -> list[str]:
        """Returns the names of the processes to declare lost at time `now_s`.

        These processes joined more than LOST_S seconds ago and have no live heartbeat: `heard` does not
        contain their mailboxes.
        """
        return [
            name
            for name, member in self.members.items()
            if member.mailbox not in heard and now_s - member.since_s > LOST_S
        ]

    def of_role(self, role: str) -> list[Member]:
        return [member for member in self.members.values() if member.hello.role == role]

    def ready(self, role: str) -> list[Member]:
        """Returns the live processes of a role that take commands, sorted by name."""
        found = [member for member in self.of_role(role) if member.is_ready]
        return sorted(found, key=lambda member: member.hello.name)
