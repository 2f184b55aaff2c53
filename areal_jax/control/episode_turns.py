"""The turns of samples with a workflow: multi-turn conversations, tool calls, agents.

The workflow of a sample asks for a turn (`TurnAdded`), a host decodes it (`Continue`, `TurnFinished`), and
the workflow goes on (`Answer`) until it returns a reward (`EpisodeEnded`, then `SampleFinished`). Between two
turns the sample has no slot and counts on no host, but stays with its group's host, which keeps its KV; if
that is lost, another host computes the KV again.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from areal_jax.config.tree import Config
from areal_jax.control import events as e
from areal_jax.control.errors import ControlError
from areal_jax.control.state import GroupState, State
from areal_jax.types import SampleId


def commands(group: GroupState, host: str, version: int) -> Iterator[e.Action]:
    """Yields the commands with which `host` takes over the group's unfinished samples.

    A sample that has begun a turn decodes that one, and one that waits for its workflow needs no command.
    """
    turns = group.turns or (0,) * len(group.oldest)
    if unbegun := tuple(sample for sample in group.unfinished if not turns[sample.member]):
        yield e.Dispatch(unbegun, host, version)
    for sample in group.unfinished:
        if turns[sample.member] and sample.member not in group.away:
            at = turns[sample.member] - 1
            yield e.Continue(sample, group.segments[sample.member], at, host, version)


def turn_added(state: State, event: e.TurnAdded, config: Config) -> Iterator[e.Action]:
    """The sample leaves its workflow; its host decodes the turn now, or once the group has a host again.

    If a sample has one version, the host goes on under that of its earlier turns.
    """
    sample = event.sample
    if (moving := state.groups[sample.ordinal]).target:  # without a turn so far, nothing is there to move
        yield e.TakeBack(moving.unfinished, moving.host)
        state.end_move(moving, moving.host)
    group = state.groups[sample.ordinal]
    away = tuple(member for member in group.away if member != sample.member)
    turns = _one_more(group, group.turns, sample.member)
    segments = list(group.segments or (0,) * len(group.oldest))
    segments[sample.member] = event.segment
    # A move would leave behind the samples that wait for their workflow.
    state.groups[group.ordinal] = replace(
        group, turns=turns, segments=tuple(segments), away=away, may_move=False
    )
    if group.host:
        # A first turn was counted at its group's dispatch, a later one leaves `away`.
        state.unload(group.counted_on, len(away) - len(group.away))
        version = group.version if config.is_one_version else state.version
        yield e.Continue(sample, event.segment, event.turn, group.host, version)


def bound_to(state: State, host: str) -> list[int]:
    """Returns the ordinals of groups with open samples that have begun a turn on `host`."""
    begun = (group for group in state.groups.values() if group.host == host)
    return [group.ordinal for group in begun if any(map(state.turns_of, group.unfinished))]


def turn_finished(state: State, event: e.TurnFinished) -> Iterator[e.Action]:
    """The sample gives up its slot, and waits for its workflow."""
    require_versions(state, event)
    group = state.groups[event.sample.ordinal]
    away = tuple(sorted((*group.away, event.sample.member)))
    state.groups[group.ordinal] = replace(group, away=away)
    state.unload(group.counted_on, 1)
    yield e.Answer(event.sample, event.segment, event.turn)


def forgotten(state: State, sample: SampleId) -> Iterator[e.Action]:
    """The sample's host drops the KV of its turns, because the episode has ended."""
    host = state.groups[sample.ordinal].host
    if host and state.turns_of(sample):
        yield e.Cancel((sample,), host)


def tool_started(state: State, event: e.ToolStarted) -> Iterator[e.Action]:
    """The call may begin, now that its beginning is journaled."""
    group = state.groups[event.sample.ordinal]
    calls = _one_more(group, group.calls, event.sample.member)
    state.groups[group.ordinal] = replace(group, calls=calls)
    yield e.Call(event.sample, event.call)


def _one_more(group: GroupState, counts: tuple[int, ...], member: int) -> tuple[int, ...]:
    counts = counts or (0,) * len(group.oldest)
    return (*counts[:member], counts[member] + 1, *counts[member + 1 :])


def rerun(state: State) -> Iterator[e.Action]:
    """Yields a Rerun for each open sample with a workflow that had begun a turn or a tool call."""
    for ordinal in sorted(state.groups):
        for sample in state.groups[ordinal].unfinished:
            if state.turns_of(sample) or state.calls_of(sample):
                yield e.Rerun(sample)


def require_versions(state: State, event: e.SampleFinished | e.TurnFinished) -> list[int]:
    """Returns the versions of the event's tokens; ControlError if they cannot be those of the sample."""
    group = state.groups[event.sample.ordinal]
    # A completion without tokens is as old as its dispatch.
    versions = [span.version for span in event.spans] or [group.min_version]
    if versions != sorted(versions) or versions[0] < group.min_version or versions[-1] > state.version:
        raise ControlError(
            f"the tokens of {event.sample} from host {event.host} have weights versions {versions}; these "
            f"must ascend, from at least {group.min_version} (the version at dispatch) to at most "
            f"{state.version} (the newest committed version); restart this host"
        )
    return versions
