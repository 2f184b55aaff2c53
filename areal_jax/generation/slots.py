"""What an engine puts into a slot: a sample's tokens with their KV, and its request.

Shapes: N slots, E stop tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from flax import struct
from jaxtyping import Bool, Float, Int

from areal_jax.algorithms.sampling import RequestPenalty
from areal_jax.models.kv_pages import KVPages

MAX_STOP_TOKENS = 8

HostArray = Any
"""A numpy array on the host; a (maybe traced) jax array in a program and in a decode state."""


class Prefix(struct.PyTreeNode):
    """The first `true_length` tokens of a sample and the KV of all but the last one, as `insert` takes them.

    A prompt's prefix comes from `prefill` and is shared by the samples of a group; a half-decoded sample's
    prefix comes from `extract`.
    """

    cache: KVPages  # one slot's pages 1..m in order, m rounded up to a bucket
    tokens: Int[HostArray, " length"]
    true_length: Int[HostArray, ""]


class ExistingPrefix(NamedTuple):
    """The KV of a prompt's first n tokens, with which its prefill goes on; as in JetStream's API."""

    cache: KVPages
    common_prefix_tokens: np.ndarray  # (n,) int32


class Request(struct.PyTreeNode):
    """The sampling settings of one sample, as arrays, so that one compiled `insert` serves every request.

    In a decode state, one Request holds the settings of all slots: every array has a row for each of N slots.
    """

    numbers: Int[HostArray, "*N 6"]  # the arguments of `sampling.sample_key`
    prompt_tokens: Int[HostArray, "*N"]
    temperature: Float[HostArray, "*N"]
    top_k: Int[HostArray, "*N"]
    top_p: Float[HostArray, "*N"]
    min_p: Float[HostArray, "*N"]
    limit: Int[HostArray, "*N"]  # prompt + completion at most
    stop_tokens: Int[HostArray, "*N E"]
    keeps_pages: Bool[HostArray, "*N"]  # whether an ended sample has pages until its slot is freed
    penalty: RequestPenalty | None = None


@dataclass(frozen=True)
class Penalties:
    """Changes to the logits that a client's request may set.

    Training samples have none: the trainer could not recompute their log-probs.
    """

    repetition: float = 1.0
    """Divides positive logits of ids already in the sample and multiplies negative ones (CTRL,
    arXiv:1909.05858); 1 changes nothing.
    """
    presence: float = 0.0
    """Subtracted from the logits of ids already in the completion."""
    bias: Mapping[int, float] = field(default_factory=dict)
    """Added to the logits of these ids."""
