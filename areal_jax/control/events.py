"""What the control plane is told (events) and what it answers (actions).

Frozen records of plain values with stable names: the journal stores them. A field may be added with a
default; none is ever renamed or removed without raising `trajectories.journal.FORMAT`.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from areal_jax.types import SampleId, VersionSpan

# --- events -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class RunStarted:
    """The first event of a journal. Version 0 is committed with it."""

    digest: str
    steps: int = 0
    """Batches the run was asked for, so that no later config changes the fold; 0 = as configured."""


@dataclass(frozen=True)
class RunResumed:
    """A new process took over: every host is gone, whatever was scoring or training starts again."""

    steps: int = 0
    """Batches the run is asked for from here on; 0 = as configured."""


@dataclass(frozen=True)
class HostJoined:
    host: str
    slots: int


@dataclass(frozen=True)
class HostLost:
    """Its unfinished samples are dispatched again with the same attempt, so with the same keys."""

    host: str
    reason: str


@dataclass(frozen=True)
class HostAdopted:
    """The host now decodes under `version`; `interrupted` live samples had at least one token."""

    host: str
    version: int
    digest: str
    interrupted: int = 0


@dataclass(frozen=True)
class SampleFinished:
    """A sample ended by itself. Its trajectory is the payload of the same transaction."""

    sample: SampleId
    host: str
    spans: tuple[VersionSpan, ...]
    stop_reason: str
    interruptions: int = 0


@dataclass(frozen=True)
class SampleFailed:
    """A sample that cannot be finished: a workflow raised, a deadline passed."""

    sample: SampleId
    host: str
    reason: str


@dataclass(frozen=True)
class RewardScored:
    """The rewards of a group, by member; `parts[i]` are member i's named parts as (name, value) pairs,
    `notes[i]` says how it was judged. Both are empty where no member has any.
    """

    ordinal: int
    attempt: int
    rewards: tuple[float, ...]
    parts: tuple[tuple[tuple[str, float], ...], ...] = ()
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class RewardFailed:
    """A group that could not be scored. `outcome`: failed | timed_out; never a reward of 0."""

    ordinal: int
    attempt: int
    member: int
    outcome: str
    message: str


@dataclass(frozen=True)
class BatchTrained:
    """Batch `step` was trained; the parameters are now version step + 1 with this digest."""

    step: int
    ordinals: tuple[int, ...]
    digest: str
    metrics: dict[str, Any]


@dataclass(frozen=True)
class VersionCommitted:
    """Hosts can load this version; the staleness gate counts from it."""

    version: int
    digest: str


@dataclass(frozen=True)
class VersionReissued:
    """A batch redone after a resume gave other bits than the journal records (another device or mesh)."""

    version: int
    old: str
    new: str


@dataclass(frozen=True)
class CheckpointCommitted:
    """A checkpoint that holds `version` is whole on disk."""

    version: int


Event = (
    RunStarted | RunResumed | HostJoined | HostLost | HostAdopted | SampleFinished | SampleFailed
    | RewardScored | RewardFailed | BatchTrained | VersionCommitted | VersionReissued | CheckpointCommitted
)  # fmt: skip

# --- actions ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Dispatch:
    """Give these samples of one prompt to `host`; it adopts min_version or newer before their first token."""

    samples: tuple[SampleId, ...]
    host: str
    min_version: int


@dataclass(frozen=True)
class Cancel:
    """Stop decoding these samples: their group was dropped or reissued."""

    samples: tuple[SampleId, ...]
    host: str


@dataclass(frozen=True)
class Score:
    """All samples of the group are there: send it to the reward pool."""

    ordinal: int
    attempt: int


@dataclass(frozen=True)
class Train:
    """Train batch `step` on these groups, in this order."""

    step: int
    ordinals: tuple[int, ...]
    attempts: tuple[int, ...]


@dataclass(frozen=True)
class Drop:
    """The group left the run for good; its admission is refunded."""

    ordinal: int
    reason: str


@dataclass(frozen=True)
class Reissue:
    """The group starts again on purpose under attempt `attempt`; its old trajectories are void."""

    ordinal: int
    attempt: int
    reason: str


@dataclass(frozen=True)
class Finish:
    """Every admitted ordinal is trained or dropped: the run is complete."""


Action = Dispatch | Cancel | Score | Train | Drop | Reissue | Finish

# --- wire form ----------------------------------------------------------------------------------------------

EVENTS: dict[str, type] = {kind.__name__: kind for kind in Event.__args__}
ACTIONS: dict[str, type] = {kind.__name__: kind for kind in Action.__args__}


def to_wire(record: Event | Action) -> tuple[str, list[Any]]:
    """(stable name, field values in order); nested tuples stay tuples and become lists in msgpack."""
    return type(record).__name__, [getattr(record, f.name) for f in fields(record)]


def from_wire(name: str, values: list[Any], kinds: dict[str, type]) -> Any:
    """The record back from its wire form; lists become tuples again. Raises KeyError for an unknown name."""
    kind = kinds[name]
    record = kind(*(_freeze(value) for value in values))
    for attribute, restore in _RESTORE.items():
        if hasattr(record, attribute):
            object.__setattr__(record, attribute, restore(getattr(record, attribute)))
    return record


def _freeze(value: Any) -> Any:
    return tuple(_freeze(item) for item in value) if isinstance(value, (list, tuple)) else value


_RESTORE = {
    "sample": lambda value: SampleId(*value),
    "samples": lambda value: tuple(SampleId(*item) for item in value),
    "spans": lambda value: tuple(VersionSpan(*item) for item in value),
}
