"""What a host is told, what it knows of each sample, and what it tells beside events."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from areal_jax.generation.slots import Prefix
from areal_jax.types import Penalties, PolicyVersion, SampleId, Sampling


@dataclass(frozen=True)
class Start:
    """Decode these samples of one prompt, under `min_version` or newer. None: as the host is set."""

    samples: tuple[SampleId, ...]
    prompt: tuple[int, ...]
    min_version: int
    sampling: Sampling | None = None
    penalties: Penalties | None = None
    seed: int | None = None
    stop_tokens: tuple[int, ...] = ()
    """Beside the tokenizer's own."""
    drawn_as: int | None = None
    """The ordinal in the draws' keys, where another than the samples' own: equal ones draw alike."""


@dataclass(frozen=True)
class Stop:
    """Decode no further for these samples; without any, the host ends its loop."""

    samples: tuple[SampleId, ...] = ()


@dataclass(frozen=True)
class Pause:
    """Decode nothing and admit nobody; live samples keep their slots and their KV."""


@dataclass(frozen=True)
class Unpause:
    """Go on."""


@dataclass(frozen=True)
class Give:
    """Take the sample out, with its KV; `to` hears it, or None where the host does not have it."""

    sample: SampleId
    to: Callable[[Work | None], None]


@dataclass(frozen=True)
class Take:
    """Go on with a sample of another host: no prefill. `refused` hears why it cannot be.

    Its KV is of one version's parameters: a host that does not hold the same ones refuses it.
    """

    work: Work
    refused: Callable[[Work, str], None]


Command = Start | Stop | Pause | Unpause | Give | Take


class Tokens(NamedTuple):
    """What one decode call sampled for one sample."""

    tokens: tuple[int, ...]
    logp: tuple[float, ...]
    version: PolicyVersion


@dataclass(frozen=True, eq=False)
class SoFar:
    """A half-decoded sample out of its slot: n tokens with its prompt, and their KV."""

    tokens: np.ndarray  # (n,) int32
    logp: np.ndarray  # (n,) float32
    versions: np.ndarray  # (n,) int32
    support: np.ndarray | None  # (n, K) int32
    kv: Prefix


@dataclass(eq=False)
class Work:
    """One sample on a host, from its arrival to its end."""

    sample: SampleId
    prompt: tuple[int, ...]
    min_version: int
    sampling: Sampling
    seed: int
    stops: tuple[int, ...] = ()
    penalties: Penalties | None = None
    drawn_as: int | None = None
    so_far: SoFar | None = None
    """While it is half-decoded and in no slot."""
    version: PolicyVersion = -1
    """Whose parameters its KV is of, once it has any."""
    digest: str = ""
    """Of these parameters."""
    is_stale: bool = False
    """Its KV is of parameters that the version changed under; it has to be rebuilt."""
    place: int = 0
    """In the order in which the host's samples got their slots."""
    epoch: int = -1
    """Which of the host's sets of fresh prompt KV its own began with; -1: none that others may share."""
    interruptions: int = 0

    @property
    def key(self) -> SampleId:
        """What its draws depend on, beside the seed."""
        return self.sample if self.drawn_as is None else self.sample._replace(ordinal=self.drawn_as)

    @property
    def group(self) -> tuple[int, int]:
        return self.sample.ordinal, self.sample.attempt


@dataclass(frozen=True)
class Statistics:
    """A host at one moment; counts are since its start."""

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
    """Samples, with at least one token, under which the version changed; each time counts."""
    recomputed_tokens: int = 0
    """Tokens whose KV was rebuilt."""
    swaps: int = 0
    swap_s: float = 0.0
    evictions: int = 0
    prefills: int = 0
