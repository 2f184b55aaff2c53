"""Messages between the processes of a cluster: records that `to_plain` converts to lists for msgpack.

Every process sends to the controller's mailbox; the controller sends to each process's own mailbox. The
controller's commands are the control plane's actions, in an `Envelope`. Delivery is at least once,
so handling a message twice must have the effect of handling it once.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, get_args

from areal_jax.control import events as e
from areal_jax.types import ArealError, SampleId

CONTROL = "control"
"""The controller's mailbox."""

# --- to the controller --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Hello:
    """Registers a process, which then waits for the answer, Begin, in its mailbox `name.incarnation`.

    `incarnation`: a random string, another one at each start of the process. `machine` (the host name of the
    process's machine) and `pid` (its process id) are only shown to the user.
    """

    role: str
    name: str
    incarnation: str
    machine: str
    pid: int


@dataclass(frozen=True)
class Ready:
    """The answer to Begin: the process is ready for commands, unless it is a trainer with `next_step` >= 0.

    Such a trainer must first train journaled batches again, from that step on. `epoch`: copied from the Begin
    message. `slots`: how many samples a host can decode at once. `version`, `digest`: of the weights
    that a trainer published last, or that a host adopted last; -1 and "" if there were none.
    """

    name: str
    incarnation: str
    epoch: str
    slots: int = 0
    next_step: int = -1
    """Step of the journaled batch that a trainer has to train again next; -1: no such batch is left."""
    version: int = -1
    digest: str = ""
    weights: str = ""
    """The address from which hosts pull weights; empty: hosts read weights from the run's folder."""
    shares_prompts: bool = True
    """Whether the trainer can process a prompt once for all samples of its group."""
    samples: tuple[SampleId, ...] = ()
    """The unfinished samples with which a host goes on, unless the controller cancels them."""


@dataclass(frozen=True)
class EventReport:
    """An event for the control plane, sent in `epoch` by the process `name` that started as `incarnation`.

    `epoch` is explained at Begin, `incarnation` at Hello. A SampleFinished announces the sample's trajectory,
    which is already in Redis (`cluster.payloads`).
    """

    name: str
    incarnation: str
    epoch: str
    number: int
    """The event's number, counted by the process; the controller confirms journaled events by this number."""
    event: e.Event
    ticket: bytes = b""
    """For a SamplesOffered: with this, the target fetches the samples (`generation.moving`); else empty."""


@dataclass(frozen=True)
class LogLine:
    """A line of text that the controller shows in the run's log."""

    name: str
    text: str


@dataclass(frozen=True)
class Ended:
    """Reports that a process ends: because of `error` or, if `error` is empty, because it received End."""

    name: str
    incarnation: str
    error: str = ""
    is_final: bool = False
    """Whether a restart would fail with the same error, so that a user has to correct the cause first."""


# --- from the controller ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Begin:
    """Starts an epoch for a process, which forgets the commands of earlier epochs and answers Ready.

    Also sent within an epoch, to a process that was lost and sends heartbeats again. An epoch lasts until the
    controller restarts or Redis loses its data. `epoch`: a random string that names the epoch. `version`: the
    newest weights version that the journal records as trained, up to which a trainer must first train
    journaled batches again; -1 for other roles. `weights`: the address from which a host pulls weights; "":
    hosts read weights from the run's folder.
    """

    epoch: str
    version: int = -1
    weights: str = ""


@dataclass(frozen=True)
class WeightsAddress:
    """Sent to hosts after a trainer restart: from now on, hosts pull weights from `address`."""

    epoch: str
    address: str


@dataclass(frozen=True)
class Envelope:
    """An action of the control plane, with the data that the receiver needs to carry it out.

    `payload` for Dispatch: the prompt's tokens; None if the samples have a workflow. For Continue: [all
    tokens before the turn, max_tokens, stop]. For Fetch: the ticket of the samples to take over. For Rerun:
    the sample's conversation (`Conversation.to_wire`). For Answer: [the turn's TurnFinished, the encoded
    trajectory up to its end]. For Score: [text, tokens, stop reason, the tokens' texts, the workflow's
    reward] of each completion; the tokens' texts are empty unless the task wants them, the reward is None
    without a workflow. For Train: a dict with the batch's `plan`, as `BatchPlan.to_wire` returns it; if a
    journaled batch is trained again, the dict also has `journaled`: the batch's digest, published, metrics,
    steps and is_reissued (see `recovery.Journaled`). For others: None. A Drop ends the workflows of its
    group.
    """

    epoch: str
    action: e.HostCommand | e.WorkflowCommand | e.Score | e.Train | e.Hold | e.Drop
    payload: Any = None


@dataclass(frozen=True)
class End:
    """Commands a process to end.

    `reason`: why the run failed, or why the process is refused; "": the process has no work left.
    """

    epoch: str
    reason: str = ""


AnyMessage = Hello | Ready | EventReport | LogLine | Ended | Begin | WeightsAddress | Envelope | End

KINDS: dict[str, type] = {kind.__name__: kind for kind in AnyMessage.__args__}

SENT: dict[str, type] = {
    kind.__name__: kind
    for kind in (*get_args(e.HostCommand | e.WorkflowCommand), e.Score, e.Train, e.Hold, e.Drop)
}
"""Class name -> class of the actions that an Envelope can contain; other actions are never sent."""


class MessageError(ArealError):
    """Raised if a message cannot be decoded, as when another version of areal-jax sent it."""


def to_plain(message: AnyMessage) -> list[Any]:
    """Returns [name of the message's class, values of its fields in order], for msgpack."""
    values = [getattr(message, f.name) for f in fields(message)]
    records = e.EVENTS | SENT
    return [
        type(message).__name__,
        [e.to_wire(value) if type(value).__name__ in records else value for value in values],
    ]


def from_plain(body: Any) -> AnyMessage:
    """Returns the message that `to_plain` converted to `body`; in an Envelope's payload, tuples become lists.

    Raises MessageError for any other `body`.
    """
    try:
        name, values = body
        kind = KINDS[name]
        named = dict(zip([f.name for f in fields(kind)], values, strict=True))
        if kind is EventReport:
            named["event"] = e.from_wire(*named["event"], kinds=e.EVENTS)
        elif kind is Envelope:
            named["action"] = e.from_wire(*named["action"], kinds=SENT)
        elif kind is Ready:
            named["samples"] = tuple(SampleId(*sample) for sample in named["samples"])
        return kind(**named)
    except (KeyError, TypeError, ValueError) as error:
        raise MessageError(
            f"a process sent a message that this process cannot decode ({error!r}); install the same version "
            "of areal-jax on every machine"
        ) from error
