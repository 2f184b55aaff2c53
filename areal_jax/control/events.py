"""The control plane's events (its input) and actions (its output).

The journal stores these frozen records of plain values under their class names. A new field needs a default,
so that older journals can still be read. Renaming or removing a field or class requires a higher
`trajectories.journal.FORMAT`.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from areal_jax.types import SampleId, VersionSpan

# --- events -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class RunStarted:
    """First event of every journal: the run began, and weights version 0, with this digest, is committed."""

    digest: str
    steps: int = 0
    """Number of batches to train; 0 = the config's run.steps. Recorded here, so that the journal still folds
    to the same state after a resume with another run.steps."""


@dataclass(frozen=True)
class RunResumed:
    """A new driver process has taken over the run from its journal. Every host of the old process is lost,
    and pending Score and Train commands are issued again.
    """

    steps: int = 0
    """New total of batches to train, those already trained included; 0 = the config's run.steps."""


@dataclass(frozen=True)
class HostJoined:
    host: str
    slots: int


@dataclass(frozen=True)
class HostLost:
    """A host is gone. Its unfinished samples are dispatched again, with the same attempt and random keys."""

    host: str
    reason: str


@dataclass(frozen=True)
class HostAdopted:
    """The host now decodes with weights `version`; `digest`: that of the weights as this host loaded them.

    `interrupted`: number of half-decoded samples on the host that continue with this version.
    """

    host: str
    version: int
    digest: str
    interrupted: int = 0


@dataclass(frozen=True)
class SampleFinished:
    """A sample ended: by itself (`stop_reason` "stop") or at its length limit ("length").

    Its trajectory is journaled with this event.
    """

    sample: SampleId
    host: str
    spans: tuple[VersionSpan, ...]
    stop_reason: str
    interruptions: int = 0


@dataclass(frozen=True)
class SampleFailed:
    """The host cannot finish this sample, for the given reason.

    Its whole group starts again (`Reissue`), or is dropped if a sample or the scoring of this group failed
    before.
    """

    sample: SampleId
    host: str
    reason: str


@dataclass(frozen=True)
class RewardScored:
    """A group was scored. For member i, `rewards[i]` is the reward, `parts[i]` lists its components as (name,
    value) pairs, and `notes[i]` explains the score. `parts` and `notes` are empty if no member has any.
    """

    ordinal: int
    attempt: int
    rewards: tuple[float, ...]
    parts: tuple[tuple[tuple[str, float], ...], ...] = ()
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class RewardFailed:
    """A group could not be scored. It gets no rewards (not 0 either).

    It starts again (`Reissue`), or is dropped if a sample or the scoring of this group failed before.
    `outcome`: failed | timed_out. `member`: the sample that could not be scored; -1 if the failure is not
    that of one sample.
    """

    ordinal: int
    attempt: int
    member: int
    outcome: str
    message: str


@dataclass(frozen=True)
class BatchTrained:
    """Batch `step` was trained; the parameters are now version step + 1, which has this digest.

    `metrics`: those of the trainer; in the journal, all metrics of the step.
    """

    step: int
    ordinals: tuple[int, ...]
    digest: str
    metrics: dict[str, Any]


@dataclass(frozen=True)
class VersionCommitted:
    """Hosts can load this version from now on, and with it more groups may start (`gate.may_admit`)."""

    version: int
    digest: str


@dataclass(frozen=True)
class VersionReissued:
    """After a resume, a journaled batch was trained again and gave other parameters than before; the cause
    may be another device.

    `old` and `new`: digests of the published parameters, before and now.
    """

    version: int
    old: str
    new: str


@dataclass(frozen=True)
class CheckpointCommitted:
    """A checkpoint of `version` is complete on disk."""

    version: int


Event = (
    RunStarted | RunResumed | HostJoined | HostLost | HostAdopted | SampleFinished | SampleFailed
    | RewardScored | RewardFailed | BatchTrained | VersionCommitted | VersionReissued | CheckpointCommitted
)  # fmt: skip

# --- actions ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Dispatch:
    """Command to `host`: decode these samples of one prompt. Before their first token the host adopts version
    min_version or a newer one.
    """

    samples: tuple[SampleId, ...]
    host: str
    min_version: int


@dataclass(frozen=True)
class Cancel:
    """Command to `host`: stop decoding these samples. Issued when their group is dropped or reissued."""

    samples: tuple[SampleId, ...]
    host: str


@dataclass(frozen=True)
class Score:
    """Command to the reward workers: score this group. Issued once all its samples have finished."""

    ordinal: int
    attempt: int


@dataclass(frozen=True)
class Train:
    """Command to the trainer: train batch `step` on these groups, in this order.

    `attempts[i]`: which attempt of group `ordinals[i]` to train on.
    """

    step: int
    ordinals: tuple[int, ...]
    attempts: tuple[int, ...]


@dataclass(frozen=True)
class Drop:
    """The group is removed from the run for good. A new group may be admitted in its place."""

    ordinal: int
    reason: str


@dataclass(frozen=True)
class Reissue:
    """The group starts again from its prompt as attempt `attempt`, with new random keys.

    Trajectories of its earlier attempts are never trained.
    """

    ordinal: int
    attempt: int
    reason: str


@dataclass(frozen=True)
class Finish:
    """The run is complete: every admitted group is trained or dropped."""


Action = Dispatch | Cancel | Score | Train | Drop | Reissue | Finish

# --- wire form ----------------------------------------------------------------------------------------------

EVENTS: dict[str, type] = {kind.__name__: kind for kind in Event.__args__}
ACTIONS: dict[str, type] = {kind.__name__: kind for kind in Action.__args__}


def to_wire(record: Event | Action) -> tuple[str, list[Any]]:
    """Returns (class name, field values in order) for msgpack, which stores tuples as lists."""
    return type(record).__name__, [getattr(record, f.name) for f in fields(record)]


def from_wire(name: str, values: list[Any], kinds: dict[str, type]) -> Any:
    """Returns the record that `to_wire` turned into `name` and `values`; lists become tuples again.

    `kinds`: class name -> class: EVENTS or ACTIONS. Raises KeyError if `kinds` lacks `name`.
    """
    kind = kinds[name]
    record = kind(*(_freeze(value) for value in values))
    # Fields that hold records of their own have one name in all kinds, so that names alone restore them.
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
