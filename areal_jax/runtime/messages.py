"""What the processes of a cluster tell each other: records with a plain form for msgpack.

Everybody tells the controller (box `control`); it commands each process through a box of that process alone,
and reward workers through one that they share. Delivery is at least once; what comes twice does no harm.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from areal_jax.control.events import EVENTS, Event, from_wire, to_wire
from areal_jax.trajectories.codec import decode, encode
from areal_jax.types import ArealError, Completion, SampleId, Trajectory

CONTROL, REWARD = "control", "reward"
"""The boxes that several processes post to, or take from."""

# --- to the controller --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Hello:
    """A process is there and waits for Begin. Its box is `name.incarnation`."""

    role: str
    name: str
    incarnation: str
    machine: str
    pid: int


@dataclass(frozen=True)
class Ready:
    """It has begun: a host with `slots`; the trainer at `version`, whose published form has `digest`."""

    name: str
    incarnation: str
    epoch: str
    slots: int = 0
    version: int = -1
    digest: str = ""
    weights: str = ""
    """Where hosts pull weights from; empty: from the run's folder."""
    shares_prompts: bool = True
    """`Learner.takes_shared_prompts`."""


@dataclass(frozen=True)
class Told:
    """An event, and the payload it announces."""

    name: str
    incarnation: str
    epoch: str
    event: Event
    trajectory: Trajectory | None = None


@dataclass(frozen=True)
class Noted:
    """A line for the run's view."""

    name: str
    text: str


@dataclass(frozen=True)
class Ended:
    """A process ends; `error` says by what, and is empty where it was told to."""

    name: str
    incarnation: str
    error: str = ""
    is_final: bool = False
    """Whether it would end by it again: an error that somebody has to mend."""


# --- from the controller ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Begin:
    """Forget what another controller (an earlier epoch) asked for; be Ready at `version` or newer."""

    epoch: str
    version: int = -1
    weights: str = ""


@dataclass(frozen=True)
class Weights:
    """The trainer came back: weights are pulled from here."""

    epoch: str
    address: str


@dataclass(frozen=True)
class Decode:
    """A group's samples for a host; `min_version` as Dispatch has it."""

    epoch: str
    samples: tuple[SampleId, ...]
    prompt: tuple[int, ...]
    min_version: int


@dataclass(frozen=True)
class Cancelled:
    """Decode no further for these samples."""

    epoch: str
    samples: tuple[SampleId, ...]


@dataclass(frozen=True)
class Judge:
    """A group for whichever reward worker takes it."""

    epoch: str
    ordinal: int
    attempt: int
    completions: tuple[Completion, ...]


@dataclass(frozen=True)
class TrainOn:
    """Batch `step`: its plan in wire form, and the groups that a process reads its trajectories from."""

    epoch: str
    step: int
    ordinals: tuple[int, ...]
    attempts: tuple[int, ...]
    plan: Mapping[str, Any]


@dataclass(frozen=True)
class End:
    """The run is complete, or this process is not wanted: `reason` says why."""

    epoch: str
    reason: str = ""


Message = Hello | Ready | Told | Noted | Ended | Begin | Weights | Decode | Cancelled | Judge | TrainOn | End

KINDS: dict[str, type] = {kind.__name__: kind for kind in Message.__args__}


class MessageError(ArealError):
    """A message of another form than this program's."""


def to_plain(message: Message) -> list[Any]:
    """[kind, values in the order of the fields]."""
    return [type(message).__name__, [_plain(getattr(message, f.name)) for f in fields(message)]]


def from_plain(body: Any) -> Message:
    """The message back. Raises MessageError for what is none of this version's."""
    try:
        name, values = body
        kind = KINDS[name]
        names = [f.name for f in fields(kind)]
        restored = {key: _RESTORE.get(key, _same)(value) for key, value in zip(names, values, strict=True)}
        return kind(**restored)
    except (KeyError, TypeError, ValueError) as error:
        raise MessageError(
            f"a message of another form came ({error!r}); run the same version of areal-jax everywhere"
        ) from error


def _plain(value: Any) -> Any:
    if isinstance(value, Trajectory):
        return encode(value)
    if type(value).__name__ in EVENTS:
        return to_wire(value)
    if isinstance(value, Completion):
        return [value.text, value.tokens, value.stop_reason]
    return [_plain(item) for item in value] if isinstance(value, tuple) else value


def _same(value: Any) -> Any:
    return value


_RESTORE = {
    "event": lambda value: from_wire(value[0], value[1], EVENTS),
    "trajectory": lambda value: None if value is None else decode(value),
    "samples": lambda value: tuple(SampleId(*item) for item in value),
    "completions": lambda value: tuple(Completion(text, tuple(ids), why) for text, ids, why in value),
    "prompt": tuple,
    "ordinals": tuple,
    "attempts": tuple,
}
