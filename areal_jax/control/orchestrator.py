"""Placement by version: which weights version each host decodes with, and which samples move between hosts.

Where each sample is of one version (`Config.places_versions`), a host that decodes for two versions needs two
forward passes for each token. Therefore each host serves one version, as many hosts as its share of the
unfinished samples asks for. Once a newer version is committed, older versions give up hosts: the samples of
such a host move, with their KV, to a host that serves the same version, and the host adopts the newest
version. Samples stay where they are if no other host serves their version, and their host then decodes
for both versions until they end. This is the load-balancing orchestrator of DORA (Algorithm 1), for hosts
that can load only the newest version.

Placement decides where samples are decoded, never whether; no bound on staleness depends on it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import replace

from areal_jax.config.tree import Config
from areal_jax.control import events as e
from areal_jax.control.gate import admissible
from areal_jax.control.state import GroupState, State
from areal_jax.types import PolicyVersion

PLACED_EVERY_S = 2.0
"""Seconds between two PlacementDue. At a commit, when a host is short of KV pages, and when one joins or is
lost, samples are placed again without waiting for it.
"""


def partition(hosts: int, work: Mapping[PolicyVersion, int]) -> dict[PolicyVersion, int]:
    """Returns the number of hosts for each version, in proportion to its work; together `hosts`.

    `work`: version -> number of unfinished samples. Each version with work gets at least one host. If there
    are more such versions than hosts, the newest one and those with the most work get one host each, and the
    others get none. Fractions are rounded by largest remainder; ties go to newer versions. This is
    DP_w = Round(DP_total R_w / sum R) of DORA (Algorithm 1), with the sum kept.
    """
    by_work = sorted((v for v, count in work.items() if count > 0), key=lambda v: (work[v], v), reverse=True)
    if not by_work or not hosts:
        return {}
    newest = max(by_work)
    chosen = [newest, *(version for version in by_work if version != newest)][:hosts]
    total = sum(work[version] for version in chosen)
    quota = {version: hosts * work[version] / total for version in chosen}
    given = {version: max(1, int(quota[version])) for version in chosen}
    while (left := hosts - sum(given.values())) != 0:
        # A version with one host keeps it; the others lose what the minimum of one gave to small ones.
        free = [version for version in chosen if left > 0 or given[version] > 1]
        lacks = {version: (quota[version] - given[version], version) for version in free}
        if left > 0:
            given[max(free, key=lacks.__getitem__)] += 1
        else:
            given[min(free, key=lacks.__getitem__)] -= 1
    return given


class Orchestrator:
    """Places the samples of a run; changes nothing and returns no action where hosts serve every version."""

    def __init__(self, config: Config, state: State) -> None:
        self._config, self._state = config, state
        self._is_used = config.places_versions

    def is_due(self) -> bool:
        """Whether a PlacementDue may change anything: a host serves an older version than the newest one, or
        decodes samples of an older version than it serves.
        """
        s = self._state
        if not self._is_used or s.is_finished:
            return False
        is_older = any(host.serves < s.version for host in s.hosts.values())
        return is_older or not all(self._is_at_home(group) for group in s.groups.values())

    # --- hosts ----------------------------------------------------------------------------------------------

    def join(self, host: str) -> Iterator[e.Action]:
        """Lets a new host serve the newest version, and places samples again."""
        if self._is_used:
            yield self._serve_newest(host)
            yield from self.place()

    def lose(self, host: str) -> Iterator[e.Action]:
        """Removes the host; its moves end: samples that were moving to it stay where they were."""
        for group in list(self._state.groups.values()):
            # The other end of a move may have the samples already, or be about to: it has to drop them.
            if group.target == host:
                yield e.TakeBack(group.unfinished, group.host)
            elif group.host == host and group.target:
                yield e.Cancel(group.unfinished, group.target)
        self._state.lose(host)

    def reuse(self) -> Iterator[e.Action]:
        """Lets hosts that have no samples left serve the newest version."""
        s = self._state
        if self._is_used:
            for name in [name for name, h in s.hosts.items() if h.serves < s.version and not h.outstanding]:
                yield self._serve_newest(name)

    def place(self) -> Iterator[e.Action]:
        """Gives each host a version to serve, and moves samples to hosts that serve their version."""
        s = self._state
        if not self._is_used:
            return
        wanted = partition(len(s.hosts), self._work())
        # A host that is to take over samples keeps their version.
        awaited = {group.target for group in s.groups.values()}
        freed: list[e.Action] = []
        for version in sorted({host.serves for host in s.hosts.values()} - {s.version}):
            serving = [(h.outstanding, name) for name, h in s.hosts.items() if h.serves == version]
            # Hosts with the fewest samples go first, since what they hold has to move.
            for _, name in sorted(serving)[: max(0, len(serving) - wanted.get(version, 0))]:
                if name not in awaited:
                    freed.append(self._serve_newest(name))
        for ordinal in sorted(s.groups):
            group = s.groups[ordinal]
            if not self._is_at_home(group) and (target := self._roomiest(group)) is not None:
                yield s.move(group, target)
        # After the moves: samples that wait on a freed host would else begin under the newest version there.
        yield from freed

    def relieve(self, host: str) -> Iterator[e.Action]:
        """Moves the youngest movable group of a host that is short of KV pages to a host of the same version.

        Moves nothing if no such host has fewer samples than this one even after the move.
        """
        s = self._state
        own = s.hosts[host]
        # The youngest one has the least KV to move, and the oldest one will soon free its own.
        for ordinal in sorted(s.groups, reverse=True) if self._is_used else ():
            group = s.groups[ordinal]
            if group.host != host or group.target or not group.may_move:
                continue
            target, count = self._roomiest(group), len(group.unfinished)
            if target is not None and s.hosts[target].outstanding + count <= own.outstanding - count:
                yield s.move(group, target)
                return

    def _serve_newest(self, host: str) -> e.Action:
        s = self._state
        s.hosts[host] = replace(s.hosts[host], serves=s.version)
        return e.Serve(host, s.version)

    def _work(self) -> Counter[PolicyVersion]:
        """Returns version -> number of samples that are decoded, wait for a host or may start now.

        Groups that may start count up to as many samples as all hosts have slots.
        """
        s, c = self._state, self._config
        size = c.trainer.batch_size
        more = s.open_places(size, c.control.max_concurrent)
        if (bound := c.max_staleness) is not None:
            more = min(more, admissible(s.admitted, s.refunds, s.version, size, bound))
        # Without the limit, a long run's remaining groups would leave no hosts to older versions.
        new = min(c.algorithm.group_size * more, sum(host.slots for host in s.hosts.values()))
        waiting = sum(len(s.groups[ordinal].unfinished) for ordinal in s.waiting)
        work: Counter[PolicyVersion] = Counter({s.version: waiting + new})
        for group in s.groups.values():
            if group.stage == "decoding":
                work[group.version] += len(group.unfinished)
        return work

    def _is_at_home(self, group: GroupState) -> bool:
        """Whether nothing is to be moved: the group's host serves its version, or it cannot move now."""
        if group.stage != "decoding" or group.target or not group.may_move:
            return True
        return self._state.hosts[group.host].serves <= group.version

    def _roomiest(self, group: GroupState) -> str | None:
        """Returns the host that could take over the group's samples and has the fewest, or None.

        Such a host has adopted the group's version and serves it. It need not have free slots: samples that
        wait there cost less time than a second version on the host where they are.
        """
        room = [
            (h.outstanding, name)
            for name, h in self._state.hosts.items()
            if name != group.host and h.serves == h.version == group.version
        ]
        return min(room)[1] if room else None

    # --- moves ----------------------------------------------------------------------------------------------

    def offered(self, event: e.SamplesOffered) -> Iterator[e.Action]:
        """The source keeps the samples: the target may fetch them, if they are all that are unfinished."""
        s, group = self._state, self._group_of(event)
        if event.samples == group.unfinished:
            s.groups[group.ordinal] = replace(group, is_offered=True)
            yield e.Fetch(event.samples, event.target, event.host)
        else:  # the end of another sample is still under way; the group moves as a whole or not at all
            s.end_move(group, event.host)
            yield e.TakeBack(event.samples, event.host)

    def moved(self, event: e.SamplesMoved) -> Iterator[e.Action]:
        self._state.end_move(self._group_of(event), event.host)
        yield e.Cancel(event.samples, event.source)

    def failed(self, event: e.MoveFailed) -> Iterator[e.Action]:
        """The target refuses the samples, which therefore stay on their host until they end."""
        # The reason, such as another layout of pages, would be the same the next time.
        self._state.end_move(replace(self._group_of(event), may_move=False), event.source)
        yield e.TakeBack(event.samples, event.source)

    def _group_of(self, event: e.SamplesOffered | e.SamplesMoved | e.MoveFailed) -> GroupState:
        return self._state.groups[event.samples[0].ordinal]
