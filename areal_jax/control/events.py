"""The control plane's events (its input) and actions (its output).

The journal stores these frozen records of plain values under their class names. A field that is added needs
a default, so that existing journals can still be read. Renaming or removing a field or class requires a
higher `trajectories.journal.FORMAT`. In all records, `attempt` is the number of times that the group was
restarted from its prompt (0 = never).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from areal_jax.types import SampleId, VersionSpan

# --- events -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class RunStarted:
    """First event of every journal: the run began, and weights version 0, with this digest, is committed."""

    digest: str
    steps: int = 0
    """Number of batches to train; 0 = the config's run.steps. Recorded here, so that a replay of the
    journal gives the same state even if a resume changes run.steps."""


@dataclass(frozen=True)
class RunResumed:
    """The run was resumed: a process rebuilt the control plane's state from the journal.

    All hosts that joined before count as lost, and Score and Train commands without a result are issued
    again.
    """

    steps: int = 0
    """Number of batches of the whole run, including those already trained; 0 = the config's run.steps."""
    header: dict[str, Any] = field(default_factory=dict)
    """What of the machine that resumes may change the bits of results (`assembly.devices.header`); empty in
    journals of older versions."""


@dataclass(frozen=True)
class HostJoined:
    """A host joins the run, or comes back after it was lost.

    `samples`: those that it still decodes from before. It goes on with each one that is unfinished and that
    no other host has been given since; the others are cancelled on it.
    """

    host: str
    slots: int
    samples: tuple[SampleId, ...] = ()


@dataclass(frozen=True)
class HostLost:
    """A host is lost. Its unfinished samples are dispatched again, to any host, with the same random keys."""

    host: str
    reason: str


@dataclass(frozen=True)
class HostAdopted:
    """The host now decodes with version `version` of the weights. `digest`: the digest of the loaded weights.

    `interrupted`: number of half-decoded samples on the host that continue with this version.
    """

    host: str
    version: int
    digest: str
    interrupted: int = 0


@dataclass(frozen=True)
class SampleFinished:
    """A sample is complete: it ended by itself (`stop_reason` "stop") or at its length limit ("length").

    `spans`: the weights versions of the sample's tokens. If an episode branched, they are those of all paths,
    in the order of the turns. The sample's trajectory is journaled with the event.
    """

    sample: SampleId
    host: str
    spans: tuple[VersionSpan, ...]
    stop_reason: str
    interruptions: int = 0
    # A replay needs it: KV rebuilt in chunks may have other bits than KV that decode calls computed.
    rebuilds: tuple[int, ...] = ()
    """How many tokens the sample had, prompt included, each time that its KV was computed anew."""
    digest: str = ""
    """Hash of tokens, log-probs, versions and supports, by which they can be compared after their deletion;
    empty in journals of older versions."""


@dataclass(frozen=True)
class SampleFailed:
    """The host cannot finish this sample, for the given reason.

    The first failure of a sample or of the scoring restarts the whole group (`Reissue`); the second failure
    drops the group.
    """

    sample: SampleId
    host: str
    reason: str


@dataclass(frozen=True)
class RewardScored:
    """A group was scored: `rewards[i]` is the reward of the group's sample i.

    `parts[i]` lists the components of that reward as (name, value) pairs, and `notes[i]` explains the reward.
    `parts` is empty if no reward has components, `notes` if no reward has an explanation.
    """

    ordinal: int
    attempt: int
    rewards: tuple[float, ...]
    parts: tuple[tuple[tuple[str, float], ...], ...] = ()
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class RewardFailed:
    """A group could not be scored, so its samples have no rewards; a reward of 0 is not assumed.

    The first failure of a sample or of the scoring restarts the whole group (`Reissue`); the second failure
    drops the group. `outcome`: failed | timed_out. `member`: index of the sample that could not be scored; -1
    if the failure concerns the whole group. `cause`: policy, if its text made the task raise an error while
    other samples of the prompt can be scored; task, if its own code did; or infrastructure, as where a worker
    was killed.
    """

    ordinal: int
    attempt: int
    member: int
    outcome: str
    message: str
    cause: str = "task"


@dataclass(frozen=True)
class PromptFailed:
    """The prompt of a group cannot be used, so the group is dropped at once: a restart would fail again.

    The task raised an error when it was read, the chat template or the tokenizer when it was encoded, or it
    has no token or too many. `message`: what happened, for readers.
    """

    ordinal: int
    attempt: int
    message: str


@dataclass(frozen=True)
class BatchTrained:
    """Batch `step` was trained; the parameters are now version step + 1, which has this digest.

    `metrics`: name -> value. The trainer sends only its own metrics; before the event is journaled,
    `runtime.core` replaces them by the complete metrics row of the step.
    """

    step: int
    ordinals: tuple[int, ...]
    digest: str
    metrics: dict[str, Any]


@dataclass(frozen=True)
class VersionCommitted:
    """The weights version is committed: hosts can load it, and more groups may start (`gate.may_admit`)."""

    version: int
    digest: str


@dataclass(frozen=True)
class VersionReissued:
    """After a resume, training a journaled batch again gave other parameters than before the resume.

    The cause may be another device. `old`, `new`: digests of the published parameters of `version`, before
    and after the resume.
    """

    version: int
    old: str
    new: str


@dataclass(frozen=True)
class CheckpointCommitted:
    """A checkpoint of `version` is complete on disk."""

    version: int


@dataclass(frozen=True)
class SamplesOffered:
    """The answer to Move: `host` no longer decodes these samples and keeps them, with their KV, for `target`.

    They are the group's samples that were unfinished on `host`; what is needed to fetch them comes with the
    event and is not journaled.
    """

    samples: tuple[SampleId, ...]
    host: str
    target: str


@dataclass(frozen=True)
class SamplesMoved:
    """The answer to Fetch: `host` now decodes these samples of `source`, from the KV computed there."""

    samples: tuple[SampleId, ...]
    host: str
    source: str


@dataclass(frozen=True)
class MoveFailed:
    """The answer to Fetch: `host` does not take over these samples of `source`, for the given reason.

    `source` still has them and continues to decode them (`TakeBack`).
    """

    samples: tuple[SampleId, ...]
    host: str
    source: str
    reason: str


@dataclass(frozen=True)
class KVShort:
    """The host had too few free KV pages for its live samples, and moved one sample's KV to host memory."""

    host: str


@dataclass(frozen=True)
class PlacementDue:
    """PLACED_EVERY_S (`control.orchestrator`) has passed since samples were last placed on hosts."""


@dataclass(frozen=True)
class TurnAdded:
    """The workflow of a sample asks for turn `turn` (0 = the first) of its episode.

    `tokens` follow the turn number `after`; they were not sampled. `max_tokens`, `stop`: as in `Sampling`,
    for this turn. `segment`: number of the branch of the sample, 0 until it branches.
    """

    sample: SampleId
    segment: int
    turn: int
    tokens: tuple[int, ...]
    max_tokens: int
    stop: tuple[str, ...] = ()
    after: int | None = None
    """None: the turn before or, if there is none, the prompt. -1: nothing, `tokens` begin a conversation."""


@dataclass(frozen=True)
class TurnFinished:
    """A turn is sampled, so the sample gives up its slot and waits for its workflow.

    The other fields are those of SampleFinished, `spans` and `rebuilds` with places in the turn's whole path,
    of which `digest` is. The sample's trajectory up to here is journaled with the event.
    `reused`: (turn, tokens): the KV of the first `tokens` tokens was the one with which an earlier turn of
    the sample had ended; empty: the KV of all tokens was computed for this turn.
    """

    sample: SampleId
    segment: int
    turn: int
    host: str
    spans: tuple[VersionSpan, ...]
    stop_reason: str
    interruptions: int = 0
    rebuilds: tuple[int, ...] = ()
    reused: tuple[int, ...] = ()
    digest: str = ""


@dataclass(frozen=True)
class ToolStarted:
    """The workflow of a sample is about to call a tool: its call number `call`, counted from 0.

    `arguments`: hash of the tool's name and arguments. The call begins only once this is journaled.
    """

    sample: SampleId
    call: int
    tool: str
    arguments: str


@dataclass(frozen=True)
class ToolReturned:
    """A tool call ended: `result` is what it returned, as JSON, or `error` says what it raised."""

    sample: SampleId
    call: int
    result: str
    error: str = ""


@dataclass(frozen=True)
class EpisodeEnded:
    """The workflow of a sample returned this reward, or None to reject the sample: its group is dropped.

    `stop_reason`: "length" if the workflow was refused a turn for want of tokens or turns, else "stop",
    whatever ended the last turn. SampleFinished follows, with the spans of all turns.
    """

    sample: SampleId
    reward: float | None
    parts: tuple[tuple[str, float], ...] = ()
    note: str = ""
    stop_reason: str = "stop"


@dataclass(frozen=True)
class EpisodeFailed:
    """The workflow of a sample cannot go on. `message`: what happened, for readers.

    `reason`: failed_episode (it raised an error), tool_in_doubt (a process died during a tool call, which may
    have happened or not), workflow_diverged (run again after a crash, it did not do what it had done) or
    agent_lost (an agent that has only base_url cannot be run again after a crash). The first failure restarts
    the whole group, the second drops it.
    """

    sample: SampleId
    reason: str
    message: str


Event = (
    RunStarted | RunResumed | HostJoined | HostLost | HostAdopted | SampleFinished | SampleFailed
    | RewardScored | RewardFailed | PromptFailed | BatchTrained | VersionCommitted | VersionReissued
    | CheckpointCommitted | SamplesOffered | SamplesMoved | MoveFailed | KVShort | PlacementDue | TurnAdded
    | TurnFinished | ToolStarted | ToolReturned | EpisodeEnded | EpisodeFailed
)  # fmt: skip


def cause_of(event: Event) -> str | None:
    """Returns what caused a failure, policy, task or infrastructure; None for an event that is no failure."""
    match event:
        case RewardFailed():
            return event.cause
        case EpisodeFailed(_, reason):
            return "infrastructure" if reason in ("agent_lost", "tool_in_doubt") else "task"
        case SampleFailed():
            return "infrastructure"
    return None


# --- actions ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Dispatch:
    """Command to `host`: decode these samples, which belong to one group.

    Before it decodes their first token, the host must adopt weights version `min_version` or a newer version.
    Samples of episodes only begin: their workflows ask for the first turn (`TurnAdded`). A host that drains
    (on_update=drain) counts them from here on among those that it finishes before it adopts a version.
    """

    samples: tuple[SampleId, ...]
    host: str
    min_version: int


@dataclass(frozen=True)
class Continue:
    """Command to `host`: decode turn `turn` of a sample's episode, with version `min_version` or a newer one.

    The tokens of the prompt and of all turns so far come with the command.
    """

    sample: SampleId
    segment: int
    turn: int
    host: str
    min_version: int


@dataclass(frozen=True)
class Answer:
    """Command to the sample's workflow: go on with this turn, which is sampled and journaled."""

    sample: SampleId
    segment: int
    turn: int


@dataclass(frozen=True)
class Rerun:
    """Command to the sample's workflow: run again from the start, after a crash.

    What the journal has of its turns and calls answers it, so nothing is sampled or called a second time.
    """

    sample: SampleId


@dataclass(frozen=True)
class Call:
    """Command to the sample's workflow: the tool call may begin, since its ToolStarted is journaled."""

    sample: SampleId
    call: int


@dataclass(frozen=True)
class Cancel:
    """Command to `host`: forget these samples, which it decodes, or of which it keeps tokens or KV.

    Issued when their group is dropped or restarted, when another host has taken them over, when a host comes
    back with samples that are no longer its own, and at the end of an episode, of which the host kept the KV
    of earlier turns.
    """

    samples: tuple[SampleId, ...]
    host: str


@dataclass(frozen=True)
class Serve:
    """Command to `host`: adopt weights version `version` or, if that is committed, a newer one.

    Issued only where hosts decode for different versions (`Config.places_versions`); elsewhere a host adopts
    each version by itself.
    """

    host: str
    version: int


@dataclass(frozen=True)
class Move:
    """Command to `host`: stop decoding these samples of one group, and offer them with their KV to `target`.

    `target` decodes samples of the same version. The host answers SamplesOffered if it still has them.
    """

    samples: tuple[SampleId, ...]
    host: str
    target: str


@dataclass(frozen=True)
class Fetch:
    """Command to `host`: take over these samples, which `source` keeps for it, and continue to decode them.

    The host answers SamplesMoved or MoveFailed.
    """

    samples: tuple[SampleId, ...]
    host: str
    source: str


@dataclass(frozen=True)
class TakeBack:
    """Command to `host`: decode these samples again, which it kept for another host."""

    samples: tuple[SampleId, ...]
    host: str


@dataclass(frozen=True)
class Score:
    """Command to the reward workers: score this group, all samples of which are finished."""

    ordinal: int
    attempt: int


@dataclass(frozen=True)
class Train:
    """Command to the trainer: train batch `step` on the groups `ordinals`, in this order.

    `attempts[i]`: number of restarts of group `ordinals[i]`; samples from before the last restart are not
    trained. `gates`: (reward part, whether it is paid in this batch) for each gated part.
    """

    step: int
    ordinals: tuple[int, ...]
    attempts: tuple[int, ...]
    gates: tuple[tuple[str, bool], ...] = ()


@dataclass(frozen=True)
class Hold:
    """The trainer waits before batch `step`, although enough groups are complete (control.over_age=hold).

    Training that batch now would make a group outside of it older than control.max_token_age. The wait ends
    with the batch's Train.
    """

    step: int


@dataclass(frozen=True)
class Drop:
    """The group is removed from the run for good. The group of a further prompt may start in its place."""

    ordinal: int
    reason: str


@dataclass(frozen=True)
class Reissue:
    """The group starts again from its prompt, with other random keys than before.

    `attempt`: number of the group's restarts, including this one. Trajectories from before the restart are
    never trained.
    """

    ordinal: int
    attempt: int
    reason: str


@dataclass(frozen=True)
class Abort:
    """The run is to end with an error, because one group after the other is dropped; it can be resumed.

    `dropped`: (reason, number of groups) for the groups dropped since the last group with usable rewards, or
    since the run was resumed. With `prompts` > 0, they are those of the newest `prompts` prompts that could
    not be used.
    """

    dropped: tuple[tuple[str, int], ...]
    prompts: int = 0


@dataclass(frozen=True)
class Finish:
    """The run is complete: every admitted group is trained or dropped."""


HostCommand = Dispatch | Continue | Cancel | Serve | Move | Fetch | TakeBack
"""The commands to a generation host; their field `host` names it."""

WorkflowCommand = Answer | Call | Rerun
"""The commands to the workflow of a sample."""

Action = HostCommand | WorkflowCommand | Score | Train | Hold | Drop | Reissue | Abort | Finish

# --- wire form ----------------------------------------------------------------------------------------------

EVENTS: dict[str, type] = {kind.__name__: kind for kind in Event.__args__}
ACTIONS: dict[str, type] = {kind.__name__: kind for kind in Action.__args__}

WITH_DICTS = {kind.__name__ for kind in (RunResumed, BatchTrained)}
"""Kinds of events with dicts, whose lists stay lists."""


def to_wire(record: Event | Action) -> tuple[str, list[Any]]:
    """Returns (class name, field values in order) for msgpack, which stores tuples as lists."""
    return type(record).__name__, list(vars(record).values())


def from_wire(name: str, values: Sequence[Any], kinds: dict[str, type]) -> Any:
    """Returns the record that `to_wire` turned into `name` and `values`; lists become tuples again.

    `values`: in a list, or in a tuple if there are no lists among them. `kinds`: the possible classes by
    name, EVENTS or ACTIONS. Raises KeyError if `kinds` lacks `name`.
    """
    kind = kinds[name]
    values = [*values] if isinstance(values, tuple) else [_freeze(value) for value in values]
    for place, restore in _PLACES[kind]:
        if place < len(values):  # else an older version wrote the record, and the field has a default
            values[place] = restore(values[place])
    return kind(*values)


def _freeze(value: Any) -> Any:
    return tuple(_freeze(item) for item in value) if isinstance(value, (list, tuple)) else value


_RESTORE = {
    "sample": lambda value: SampleId(*value),
    "samples": lambda value: tuple(SampleId(*item) for item in value),
    "spans": lambda value: tuple(VersionSpan(*item) for item in value),
}
"""Fields that hold records of their own have one name in all kinds."""
_PLACES = {
    kind: [(place, _RESTORE[each.name]) for place, each in enumerate(fields(kind)) if each.name in _RESTORE]
    for kind in (*EVENTS.values(), *ACTIONS.values())
}
"""Kind -> the places among its values that hold records, and what makes these of them."""
