"""The nouns. Everything that crosses a room's border is one of these; numpy and the standard library only.

Shapes: B rows, T tokens of a row, S sequences, G samples of a group, K ids of a support, n tokens of a
trajectory. Index t always describes token t: `logp[t] = log p(tokens[t] | tokens[<t])`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

PolicyVersion = int
"""0 = initial weights, +1 per trained batch, also when the gradient was zero."""

NOT_SAMPLED: PolicyVersion = -1
"""The version of a token that no policy of ours sampled: a prompt's, a tool's, a supervised answer's."""


class SampleId(NamedTuple):
    """One completion of the prompt at place `ordinal` of the run's order."""

    ordinal: int
    member: int
    attempt: int = 0
    """0 unless the group was reissued on purpose; part of the sampling key, so a reissue draws anew."""


@dataclass(frozen=True)
class Sampling:
    """How a sample's tokens are chosen. Temperature and support belong to the log-prob too."""

    temperature: float = 1.0
    """0 is greedy; the log-prob is then the one at temperature 1."""
    top_k: int = 0
    """Keep the k likeliest ids; 0 keeps all."""
    top_p: float = 1.0
    """Keep the smallest set of likeliest ids whose mass reaches top_p."""
    min_p: float = 0.0
    """Keep ids at least min_p times as likely as the likeliest."""
    max_tokens: int = 256
    """Longest completion, in tokens; the stop token counts."""
    stop: tuple[str, ...] = ()
    """Texts that end a completion; the tokens up to the one that completed a text stay."""

    @property
    def is_truncated(self) -> bool:
        return self.top_k > 0 or self.top_p < 1.0 or self.min_p > 0.0


@dataclass(frozen=True)
class Penalties:
    """Changes to the logits that a server's requests may ask for; never those of training samples, whose
    log-probs the trainer could not compute again.
    """

    repetition: float = 1.0
    """Logits of ids seen in the sample are divided by it where positive, else multiplied (CTRL,
    arXiv:1909.05858); 1 changes nothing.
    """
    presence: float = 0.0
    """Taken from the logits of ids seen in the sample."""
    bias: Mapping[int, float] = field(default_factory=dict)
    """Added to the logits of these ids."""


@dataclass(frozen=True)
class Prompt:
    """What the policy is asked: exactly one of text, messages, tokens; `info` is what the reward needs."""

    text: str | None = None
    info: Mapping[str, Any] = field(default_factory=dict)
    messages: Sequence[Mapping[str, str]] | None = None
    tokens: Sequence[int] | None = None
    task: str = ""

    def __post_init__(self) -> None:
        given = [name for name in ("text", "messages", "tokens") if getattr(self, name) is not None]
        if len(given) != 1:
            raise ValueError(f"a Prompt has exactly one of text, messages, tokens; got {given or 'none'}")


@dataclass(frozen=True)
class Completion:
    """What the policy answered: its text and the exact tokens, stop token included."""

    text: str
    tokens: tuple[int, ...]
    stop_reason: str


@dataclass(frozen=True)
class Reward:
    """A sample's score and its named parts."""

    value: float
    parts: Mapping[str, float] = field(default_factory=dict)
    note: str = ""
    """How it was judged, for people: what was compared with what."""


class VersionSpan(NamedTuple):
    """Tokens [start, end) of a trajectory, all sampled under `version`."""

    version: PolicyVersion
    start: int
    end: int


@dataclass(frozen=True, eq=False)
class Trajectory:
    """One finished sample, as the trainer needs it: n tokens, prompt included. All arrays are (n,)."""

    sample: SampleId
    tokens: np.ndarray  # int32
    loss_mask: np.ndarray  # bool: sampled here, so trainable
    behavior_logp: np.ndarray  # float32; 0 where not sampled
    versions: np.ndarray  # int32; NOT_SAMPLED where not sampled
    turn_ids: np.ndarray  # int32; -1 where not sampled
    sampling: Sampling
    stop_reason: str  # "stop" | "length"
    support: np.ndarray | None = None  # int32 (n, K): the ids kept at each token, -1 beyond; None = all ids
    reward: float | None = None
    reward_parts: Mapping[str, float] = field(default_factory=dict)
    reward_note: str = ""
    interruptions: int = 0
    on_update: str = "recompute"
    """What its host does with KV when the version changes: recompute | keep | pinned | drain."""

    @property
    def is_reproducible(self) -> bool:
        """Each token's log-prob is that of a dense forward under its version; not so once KV was kept."""
        return self.on_update != "keep" or self.interruptions == 0

    @property
    def truncated(self) -> bool:
        """Stopped by its length limit; never said of a row's width."""
        return self.stop_reason == "length"

    @property
    def completion_tokens(self) -> int:
        return int(self.loss_mask.sum())

    @property
    def first_version(self) -> PolicyVersion:
        """Version of the first sampled token: what head age is measured from."""
        sampled = self.versions[self.loss_mask]
        return int(sampled[0]) if sampled.size else NOT_SAMPLED

    @property
    def spans(self) -> tuple[VersionSpan, ...]:
        """Runs of tokens sampled under one version, in order; replay needs nothing else."""
        edges = np.flatnonzero(np.diff(self.versions)) + 1
        starts, ends = [0, *edges.tolist()], [*edges.tolist(), len(self.versions)]
        return tuple(
            VersionSpan(int(self.versions[start]), start, end)
            for start, end in zip(starts, ends, strict=True)
            if end > start and self.versions[start] != NOT_SAMPLED
        )


@dataclass(frozen=True, eq=False)
class Group:
    """All G samples of one prompt: the unit of admission, of reward normalisation and of training."""

    ordinal: int
    prompt: Prompt
    trajectories: tuple[Trajectory, ...]


class Batch(NamedTuple):
    """Packed trajectories. The second half is None until `prepare` fills it in.

    A batch holds `minibatches * micro_batches` micro-batches of R rows each: B = minibatches * micro_batches
    * R, and minibatch m owns the rows [m * B / minibatches, (m + 1) * B / minibatches). Rows without tokens
    are padding.
    """

    tokens: Any  # (B, T) int32
    positions: Any  # (B, T) int32: 0 at each segment's first token
    segment_ids: (
        Any  # (B, T) int32: 1..S, unique in the batch; 0 = padding; beyond S: prompts that groups share
    )
    loss_mask: Any  # (B, T) bool
    behavior_logp: Any  # (B, T) float32
    versions: Any  # (B, T) int32
    turn_ids: Any  # (B, T) int32
    previous: Any  # (B, T) int32: column, in the same row, of the token before; -1 where there is none
    reward: Any  # (S,) float32
    group_ids: Any  # (S,) int32: 0..groups-1
    temperature: Any  # (S,) float32
    truncated: Any  # (S,) bool
    support: Any = None  # (B, T, K) int32 or None
    context_ids: Any = (
        None  # (B, T) int32: segment of the row that the token also sees, its group's prompt; 0 = none
    )
    ages: Any = None  # (B, T) int32: trained version - version; 0 where not sampled
    proximal_logp: Any = None  # (B, T) float32; None where it is made in the update, by proximal_mix
    proximal_mix: Any = None  # (B, T) float32: α of proximal = sg(behaviour + α (current - behaviour))
    advantages: Any = None  # (B, T) float32
    weights: Any = None  # (B, T) float32: the reduction
    off_policy_weight: Any = None  # (B, T) float32; None where proximal_logp is
    off_policy_cut: Any = None  # (B, T) bool: where that weight was cut
    ref_logp: Any = None  # (B, T) float32
    teacher_logp: Any = None  # (B, T) float32
    token_rewards: Any = None  # (B, T) float32: what single tokens earn beside the sequence's reward
    values: Any = None  # (B, T) float32: of the state before the token, under the critic at arrival
    bootstrap: Any = None  # (S,) float32: value after the last token where the sample was truncated, else 0
    returns: Any = None  # (B, T) float32: what the critic is trained towards


class PolicyOutputs(NamedTuple):
    """What the current policy says of the batch's tokens; carries the gradients. All (B, T) float32."""

    logp: Any
    entropy: Any = None
    value: Any = None


class VersionedParams(NamedTuple):
    """A version, its parameters and their digest: the only way weights travel."""

    version: PolicyVersion
    params: Any
    digest: str


class ArealError(Exception):
    """An error a user can mend: its message names the value and the remedy."""
