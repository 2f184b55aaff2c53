"""Placement by version: which weights version each host decodes with, and which samples move between hosts.

Where each sample is of one version (`Config.places_versions`), a host that decodes for two versions needs two
forward passes for each token. Therefore each host serves one version, as many hosts as its share of the
unfinished samples asks for. Once a newer version is committed, older versions give up hosts: the samples of
such a host move, with their KV, to a host that serves the same version, and the host adopts the newest
version. Samples whose version no other host serves stay where they are, and their host decodes for both
versions until they end. This is the load-balancing orchestrator of DORA (Algorithm 1), for hosts that can
load only the newest version.

Placement decides where samples are decoded, never whether; no bound on staleness depends on it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import replace

from areal_jax.control import events as e
from areal_jax.control.state import GroupState, State
from areal_jax.types import PolicyVersion


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


def place(state: State, demand: int) -> Iterator[e.Action]:
    """Gives each host a version to serve, and moves samples to hosts that serve their version.

    `demand`: number of samples that wait for a host or may start now, all under the newest version.
    """
    work: Counter[PolicyVersion] = Counter({state.version: demand})
    for group in state.groups.values():
        if group.stage == "decoding":
            work[group.version] += len(group.unfinished)
    wanted = partition(len(state.hosts), work)
    awaited = {group.target for group in state.groups.values()}
    freed: list[e.Action] = []
    for version in sorted({host.serves for host in state.hosts.values()} - {state.version}):
        serving = [(h.outstanding, name) for name, h in state.hosts.items() if h.serves == version]
        # Hosts with the fewest samples go first, since what they hold has to move.
        for _, name in sorted(serving)[: max(0, len(serving) - wanted.get(version, 0))]:
            if name not in awaited:
                freed += serve_newest(state, name)
    for ordinal in sorted(state.groups):
        group = state.groups[ordinal]
        if is_at_home(state, group):
            continue
        if (target := _roomiest(state, group)) is not None:
            yield state.move(group, target)
    # After the moves: samples that wait on a freed host would else begin under the newest version there.
    yield from freed


def serve_newest(state: State, host: str) -> Iterator[e.Action]:
    """Lets the host serve the newest committed version."""
    state.hosts[host] = replace(state.hosts[host], serves=state.version)
    yield e.Serve(host, state.version)


def relieve(state: State, host: str) -> Iterator[e.Action]:
    """Moves the youngest movable group of a host that is short of KV pages to a host of the same version.

    Moves nothing if no such host has fewer samples than this one even after the move.
    """
    own = state.hosts[host]
    for ordinal in sorted(state.groups, reverse=True):
        group = state.groups[ordinal]
        if group.host != host or group.target or not group.may_move:
            continue
        target, count = _roomiest(state, group), len(group.unfinished)
        if target is not None and state.hosts[target].outstanding + count <= own.outstanding - count:
            yield state.move(group, target)
            return


def is_at_home(state: State, group: GroupState) -> bool:
    """Whether nothing is to be moved: the group's host serves its version, or none of it can move now."""
    if group.stage != "decoding" or group.target or not group.may_move:
        return True
    return state.hosts[group.host].serves <= group.version


def _roomiest(state: State, group: GroupState) -> str | None:
    """Returns the host that could take over the group's samples and has the fewest; None if there is none.

    Such a host has adopted the group's version and serves it. It need not have free slots: samples that wait
    there cost less time than a second version on the host where they are.
    """
    room = [
        (h.outstanding, name)
        for name, h in state.hosts.items()
        if name != group.host and h.serves == h.version == group.version
    ]
    return min(room)[1] if room else None
