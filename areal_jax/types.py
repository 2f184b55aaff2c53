"""The records that parts of the system exchange; this module imports only numpy and the standard library.

Shapes: B rows, T tokens of a row, S sequences, G samples of a group, n tokens of a trajectory, K ids from
which a token is drawn. Index t always describes token t: `logp[t] = log p(tokens[t] | tokens[<t])`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Int, UInt8

PolicyVersion = int
"""0 for the initial weights, +1 per trained batch, even if the gradient was zero."""

WALL_PER_CPU = 4
"""Seconds of wall time that are allowed for each second of a limit on CPU time.

A limit on CPU time means the same on a busy machine; the one on wall time ends what sleeps.
"""

EQUAL_WITHIN = 1e-6
"""Rewards that differ by at most this fraction of the largest one are equal: they differ by rounding, since
the order of a sum, such as (0.1 + 0.2) + 0.3, changes its last bits.
"""

NOT_SAMPLED: PolicyVersion = -1
"""The version of each token that this run did not sample: prompt tokens and reference answers."""


class SampleId(NamedTuple):
    """Identifies a sample: completion number `member` of prompt number `ordinal` in the run's order."""

    ordinal: int
    member: int
    attempt: int = 0
    """Number of times that the group was started again, with other random keys and so other tokens."""


@dataclass(frozen=True)
class Sampling:
    """How a sample's tokens are drawn; temperature, top_k, top_p and min_p also affect their log-probs."""

    temperature: float = 1.0
    """0: greedy decoding; log-probs are then those of temperature 1."""
    top_k: int = 0
    """Keep the k likeliest ids; 0 keeps all."""
    top_p: float = 1.0
    """Keep the fewest likeliest ids with a total probability of at least top_p."""
    min_p: float = 0.0
    """Keep ids at least min_p times as likely as the likeliest id."""
    max_tokens: int = 256
    """Longest completion in tokens, the stop token included."""
    stop: tuple[str, ...] = ()
    """Texts that end a completion. The token that completes such a text is the completion's last token."""

    @property
    def is_truncated(self) -> bool:
        return self.top_k > 0 or self.top_p < 1.0 or self.min_p > 0.0


@dataclass(frozen=True)
class Prompt:
    """A prompt, given as exactly one of text, messages (a chat in OpenAI's form) or tokens.

    `info`: the task's data for scoring, such as the right answer; `tools`: OpenAI schemas of a chat's tools.
    """

    text: str | None = None
    info: Mapping[str, Any] = field(default_factory=dict)
    messages: Sequence[Mapping[str, Any]] | None = None
    tokens: Sequence[int] | None = None
    task: str = ""
    tools: Sequence[Mapping[str, Any]] = ()

    def __post_init__(self) -> None:
        given = [name for name in ("text", "messages", "tokens") if getattr(self, name) is not None]
        if len(given) != 1 or (self.tools and self.messages is None):
            raise ValueError(f"a Prompt needs one of text, messages (if it has tools), tokens; got {given}")


@dataclass(frozen=True)
class Completion:
    """The policy's answer to a prompt, as text and as exact tokens, the stop token included."""

    text: str
    tokens: tuple[int, ...]
    stop_reason: str
    pieces: tuple[str, ...] = ()
    """The text that each token adds; joined, they are `text`. Only for a task with `wants_pieces`."""
    reward: Reward | None = None
    """What the sample's workflow returned; None without a workflow."""


@dataclass(frozen=True)
class Reward:
    """A sample's score (`value`), and named figures to show beside it, such as partial scores (`parts`)."""

    value: float
    parts: Mapping[str, float] = field(default_factory=dict)
    note: str = ""
    """Text that explains the score to readers, such as the two answers that were compared."""


class VersionSpan(NamedTuple):
    """Tokens [start, end) of a trajectory, all sampled under `version`."""

    version: PolicyVersion
    start: int
    end: int


@dataclass(frozen=True, eq=False)
class Trajectory:
    """One finished sample, as the trainer needs it; arrays have one entry per token, prompt included."""

    sample: SampleId
    tokens: np.ndarray  # int32
    loss_mask: np.ndarray  # bool: sampled here, so trainable
    behavior_logp: np.ndarray  # float32; 0 if not sampled
    versions: np.ndarray  # int32; NOT_SAMPLED if not sampled
    turn_ids: np.ndarray  # int32; -1 if not sampled
    sampling: Sampling
    stop_reason: str  # "stop" | "length"
    support: np.ndarray | None = None  # int32 (n, K): ids kept at each token, padded with -1; None = all
    experts: np.ndarray | None = None  # uint8 (n, E): as in Batch; None = not kept
    reward: float | None = None
    reward_parts: Mapping[str, float] = field(default_factory=dict)
    reward_note: str = ""
    interruptions: int = 0
    on_update: str = "recompute"
    """generation.on_update of the host that sampled the trajectory: recompute | keep | pinned | drain."""
    branches: tuple[Trajectory, ...] = ()  # other paths; there, an earlier path's tokens are not sampled

    @property
    def is_reproducible(self) -> bool:
        """Whether the parameters of each token's version give the token's recorded log-prob again.

        False if the sample went on with KV of the older version after the version changed.
        """
        return self.on_update != "keep" or self.interruptions == 0

    @property
    def truncated(self) -> bool:
        """Whether the sample stopped at its length limit."""
        return self.stop_reason == "length"

    @property
    def completion_tokens(self) -> int:
        return sum(int(path.loss_mask.sum()) for path in (self, *self.branches))

    @property
    def first_version(self) -> PolicyVersion:
        """Version of the first sampled token, the sample's oldest; NOT_SAMPLED if no token was sampled."""
        sampled = [path.versions[path.loss_mask] for path in (self, *self.branches)]
        return min((int(versions[0]) for versions in sampled if versions.size), default=NOT_SAMPLED)

    @property
    def spans(self) -> tuple[VersionSpan, ...]:
        """Runs of consecutive tokens sampled under one version, in order; leaves out tokens not sampled."""
        edges = [0, *(np.flatnonzero(np.diff(self.versions)) + 1).tolist(), len(self.versions)]
        runs = (VersionSpan(int(self.versions[start]), start, end) for start, end in pairwise(edges) if end)
        return tuple(run for run in runs if run.version != NOT_SAMPLED)


@dataclass(frozen=True, eq=False)
class Group:
    """All samples of one prompt (algorithm.group_size): they start, are scored and are trained together."""

    ordinal: int
    prompt: Prompt
    trajectories: tuple[Trajectory, ...]


class Batch(NamedTuple):
    """Packed trajectories, in B rows of T tokens; S sequences, K ids of a support. Integers are int32.

    The rows are M minibatches of B / M successive rows, each for one optimiser step. A minibatch is divided
    into micro-batches, each for one backward pass. Rows without tokens are padding.
    """

    tokens: Int[Any, "B T"]
    positions: Int[Any, "B T"]
    """0 at each segment's first token."""
    segment_ids: Int[Any, "B T"]
    """1..S, unique in the batch; 0: padding; above S: shared prefixes."""
    loss_mask: Bool[Any, "B T"]
    behavior_logp: Float[Any, "B T"]
    versions: Int[Any, "B T"]
    turn_ids: Int[Any, "B T"]
    previous: Int[Any, "B T"]
    """Column of the preceding token, in the same row; -1 for a first token."""
    reward: Float[Any, " S"]
    group_ids: Int[Any, " S"]
    """0..groups-1."""
    temperature: Float[Any, " S"]
    truncated: Bool[Any, " S"]
    support: Int[Any, "B T K"] = None
    sample_ids: Int[Any, " S"] = None
    """Ascending: a sequence's sample, if some samples have several paths."""
    subtree_ends: Int[Any, "B T"] = None
    """Column after the last token that may see this one."""
    experts: UInt8[Any, "B T E"] = None
    """Of each layer in turn, the numbers of the experts that the token passed through on its host, E in all;
    255: not known. None: the trainer's routers choose them.
    """


class PreparedBatch(NamedTuple):
    """A `Batch` with what an update needs beside it; made by `Learner.prepare` or `prepare`.

    The first fields are those of `Batch`. `loss_mask` is the final one; off it ages, advantages and weights
    are 0, and off-policy weights 1. Advantage estimators get the batch while advantages and weights are None.
    """

    tokens: Int[Any, "B T"]
    positions: Int[Any, "B T"]
    segment_ids: Int[Any, "B T"]
    loss_mask: Bool[Any, "B T"]
    behavior_logp: Float[Any, "B T"]
    versions: Int[Any, "B T"]
    turn_ids: Int[Any, "B T"]
    previous: Int[Any, "B T"]
    reward: Float[Any, " S"]
    group_ids: Int[Any, " S"]
    temperature: Float[Any, " S"]
    truncated: Bool[Any, " S"]
    support: Int[Any, "B T K"] = None
    sample_ids: Int[Any, " S"] = None
    subtree_ends: Int[Any, "B T"] = None
    experts: UInt8[Any, "B T E"] = None
    ages: Int[Any, "B T"] = None
    """Trainer's version - token's version; 0 if not sampled."""
    proximal_logp: Float[Any, "B T"] = None
    """None if the loss computes it, from proximal_mix."""
    proximal_mix: Float[Any, "B T"] = None
    """α of proximal = sg(behaviour + α (current - behaviour))."""
    advantages: Float[Any, "B T"] = None
    loss_weights: Float[Any, "B T"] = None
    """The reduction weights (`algorithms.reduction`)."""
    off_policy_weight: Float[Any, "B T"] = None
    """None if proximal_logp is."""
    off_policy_cut: Bool[Any, "B T"] = None
    """Whether that weight was cut."""
    ref_logp: Float[Any, "B T"] = None
    teacher_logp: Float[Any, "B T"] = None
    token_rewards: Float[Any, "B T"] = None
    """Rewards of single tokens, besides the sequence's reward."""
    values: Float[Any, "B T"] = None
    """Value of the state before the token, by the critic before the batch's first update."""
    bootstrap: Float[Any, " S"] = None
    """Value after the last token if the sample was truncated, else 0."""
    returns: Float[Any, "B T"] = None
    """The critic's targets."""


class PolicyOutputs(NamedTuple):
    """The current policy's outputs for each token of the batch, with gradients."""

    logp: Float[Any, "B T"]
    entropy: Float[Any, "B T"] = None
    value: Float[Any, "B T"] = None


class VersionedParams(NamedTuple):
    """A policy version: its number, its parameters, and a digest of the parameters' bits."""

    version: PolicyVersion
    params: Any
    digest: str


class ArealError(Exception):
    """An error that the user can correct: the message names the value and what to do."""
