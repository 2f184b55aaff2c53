"""Commands to a generation host, its record of each sample (`Work`), and its statistics."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from areal_jax.generation.slots import Penalties, Prefix
from areal_jax.types import PolicyVersion, SampleId, Sampling


@dataclass(frozen=True)
class Start:
    """Command: decode these samples of one prompt (token ids) with weights version `min_version` or newer.

    If `sampling` or `seed` is None, the host's default is used. Only clients' requests may have `penalties`.
    """

    samples: tuple[SampleId, ...]
    prompt: tuple[int, ...]
    min_version: int
    sampling: Sampling | None = None
    penalties: Penalties | None = None
    seed: int | None = None
    stop_tokens: tuple[int, ...] = ()
    """Ids that end a sample, in addition to the host's stop tokens."""
    drawn_as: int | None = None
    """Ordinal in the keys of the random draws; None: that of the samples. Equal keys give equal draws."""
    is_request: bool = False
    """Whether a client requested the samples; False: they are rollouts. A draining host starts no request."""

    def works(self, sampling: Sampling, seed: int, stops: tuple[int, ...]) -> list[Work]:
        """Returns a new record (Work) of each sample of this command.

        The arguments are the host's own: `sampling` and `seed` are used where this command has None, and the
        token ids `stops` end a sample in addition to `stop_tokens`.
        """
        seed = seed if self.seed is None else self.seed
        sampling, stops = self.sampling or sampling, stops + self.stop_tokens
        return [Work(sample, self, sampling, seed, stops) for sample in self.samples]


@dataclass(frozen=True)
class Stop:
    """Command: drop `samples`, waiting or live, without a result; if none are given, end the host's loop."""

    samples: tuple[SampleId, ...] = ()


@dataclass(frozen=True)
class Pause:
    """Command: decode nothing and start no sample until Unpause; live samples keep their slots and KV."""


@dataclass(frozen=True)
class Unpause:
    """Command: resume decoding after a Pause."""


@dataclass(frozen=True)
class Wake:
    """Command: take one more step, if idle; in it the host adopts a newer version, if there is one."""


@dataclass(frozen=True)
class HandOver:
    """Command: remove `sample` from this host and call `to` with its record, tokens and KV included.

    If the sample is not on this host, `to` is called with None.
    """

    sample: SampleId
    to: Callable[[Work | None], None]


@dataclass(frozen=True)
class TakeOver:
    """Command: continue a sample of another host, `work`, without a prefill.

    Its KV was computed with one version's parameters. If this host does not hold these parameters, or lays
    out KV pages differently, it does not take the sample and calls `refused` with `work` and the reason.
    """

    work: Work
    refused: Callable[[Work, str], None]


Command = Start | Stop | Pause | Unpause | Wake | HandOver | TakeOver


class Tokens(NamedTuple):
    """The tokens that one decode call sampled for one sample, with their log-probs and policy version."""

    tokens: tuple[int, ...]
    logp: tuple[float, ...]
    version: PolicyVersion


@dataclass(frozen=True, eq=False)
class SoFar:
    """A half-decoded sample without a slot: records and KV of its n tokens, prompt included.

    A token's record has its id, log-prob and weights version, among others.
    """

    rows: np.ndarray  # (n,) of `live_slots.Records`
    kv: Prefix


@dataclass(eq=False)
class Work:
    """A host's record of one sample, from the sample's arrival to its end."""

    sample: SampleId
    start: Start
    """The command that created the sample. The next three fields are its values, or the host's defaults."""
    sampling: Sampling
    seed: int
    stops: tuple[int, ...]
    so_far: SoFar | None = None
    """Tokens and KV while the sample is half-decoded and has no slot; else None."""
    version: PolicyVersion = -1
    """The version of the parameters that the sample is decoded under; -1 before it first gets a slot."""
    digest: str = ""
    """Digest of those parameters."""
    is_stale: bool = False
    """Whether its KV was computed under an older version and must be rebuilt."""
    prompt_version: PolicyVersion = -1
    """The version under which its prompt was prefilled; -1: the pages of its prompt cannot be shared."""
    interruptions: int = 0

    # Samples of equal keys draw the same numbers, whatever slots and neighbours they have.
    @property
    def key(self) -> SampleId:
        """The id that, together with the seed, determines the sample's random draws.

        It is `sample`, but with the ordinal `start.drawn_as` unless that is None.
        """
        ordinal = self.start.drawn_as
        return self.sample if ordinal is None else self.sample._replace(ordinal=ordinal)

    @property
    def group(self) -> tuple[int, int]:
        return self.sample.ordinal, self.sample.attempt


@dataclass
class Statistics:
    """A host's state after its last step or command; version -1: it has not adopted one yet.

    `generated_tokens` and the fields after it are totals since the host's start.
    """

    version: PolicyVersion = -1
    digest: str = ""
    slots: int = 0
    live: int = 0
    waiting: int = 0
    is_paused: bool = False
    free_pages: int = 0
    pages: int = 0
    held_versions: tuple[PolicyVersion, ...] = ()
    generated_tokens: int = 0
    interruptions: int = 0
    """Number of version changes in the middle of samples (after their first token), summed over samples."""
    recomputed_tokens: int = 0
    """Number of tokens for which the KV was rebuilt under a newer version."""
    swaps: int = 0
    swap_s: float = 0.0
    evictions: int = 0
    prefills: int = 0
