"""What a slot holds, what starts a sample in it, and what a decode call gives back.

Shapes: N slots, M pages a slot, E stop tokens, K ids of a support, V vocabulary, k steps a call.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from flax import struct
from jaxtyping import Array, Bool, Float, Int, UInt32

from areal_jax.generation.pages import PageTable
from areal_jax.models.attention import KVPages

MAX_STOP_TOKENS = 8

HostArray = np.ndarray | Array
"""Numpy from the host, traced inside `insert`."""


class Prefix(struct.PyTreeNode):
    """The first tokens of a sample and the KV of all of them but the last: what a slot goes on from.

    A prompt's comes from `prefill` and is shared by the samples of a group; a half-decoded sample's from
    `extract`.
    """

    cache: KVPages  # of one slot: pages 1..m, in order, as many as the tokens fill rounded up to a bucket
    tokens: Int[HostArray, " length"]
    true_length: Int[HostArray, ""]


class Request(struct.PyTreeNode):
    """How one slot samples; scalars, so that one compiled `insert` serves every request."""

    numbers: Int[HostArray, "4"]  # seed, ordinal, member, attempt
    temperature: Float[HostArray, ""]
    top_k: Int[HostArray, ""]
    top_p: Float[HostArray, ""]
    min_p: Float[HostArray, ""]
    limit: Int[HostArray, ""]  # prompt + completion at most
    stop_tokens: Int[HostArray, "E"]
    penalty: RequestPenalty | None = None


class RequestPenalty(struct.PyTreeNode):
    repetition: Float[HostArray, ""]
    presence: Float[HostArray, ""]
    bias: Float[HostArray, " V"]


class SlotPenalties(struct.PyTreeNode):
    """Of engines that serve them; what is sampled then is no longer the policy's own distribution."""

    repetition: Float[Array, " N"]
    presence: Float[Array, " N"]
    bias: Float[Array, "N V"]
    counts: Int[Array, "N V"]
    """How often each id stands in the sample so far, its prompt included."""


class DecodeState(struct.PyTreeNode):
    cache: KVPages
    pages: PageTable
    tokens: Int[Array, "N length"]
    filled: Int[Array, " N"]  # tokens known; the KV holds all but the last of them
    is_live: Bool[Array, " N"]
    key: UInt32[Array, "N 2"]
    temperature: Float[Array, " N"]
    top_k: Int[Array, " N"]
    top_p: Float[Array, " N"]
    min_p: Float[Array, " N"]
    limit: Int[Array, " N"]
    stop_tokens: Int[Array, "N E"]
    penalties: SlotPenalties | None = None


@dataclass(frozen=True)
class ResultTokens:
    """What one `generate` call sampled, in one int32 array: one device-to-host copy a call.

    Columns, with k steps a call: tokens k | valid k | length | log-probs k (float32 bits) | version |
    is_live | is_starved | free pages | support k * K. The first three are JetStream's.
    """

    data: Any  # (N, columns) int32
    steps: int
    support_size: int

    def convert_to_numpy(self) -> ResultTokens:
        return replace(self, data=np.asarray(self.data))

    @property
    def tokens(self) -> Any:
        return self.data[:, : self.steps]

    @property
    def valid(self) -> Any:
        return self.data[:, self.steps : 2 * self.steps] != 0

    @property
    def length(self) -> Any:
        return self.data[:, 2 * self.steps]

    @property
    def logp(self) -> Any:
        return self.data[:, 2 * self.steps + 1 : 3 * self.steps + 1].view(np.float32)

    @property
    def version(self) -> Any:
        return self.data[:, 3 * self.steps + 1]

    @property
    def is_live(self) -> Any:
        return self.data[:, 3 * self.steps + 2] != 0

    @property
    def is_starved(self) -> Any:
        """(N,) bool: a live slot that was asked to step and got no page for it, so it sampled nothing."""
        return self.data[:, 3 * self.steps + 3] != 0

    @property
    def free_pages(self) -> int:
        return int(self.data[0, 3 * self.steps + 4])

    @property
    def support(self) -> Any:
        flat = self.data[:, 3 * self.steps + 5 :]
        return flat.reshape(len(flat), self.steps, self.support_size) if self.support_size else None
