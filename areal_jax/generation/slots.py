"""What a slot holds, what starts a sample in it, and what a decode call gives back.

Shapes: N slots, M pages a slot, E stop tokens, K ids of a support, k steps a call.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from flax import struct
from jaxtyping import Array, Bool, Float, Int, UInt32

from areal_jax.models.attention import KVPages

MAX_STOP_TOKENS = 4

HostArray = np.ndarray | Array
"""Numpy from the host, traced inside `insert`."""


class Prefix(struct.PyTreeNode):
    """A prompt's KV (all tokens but the last) and its tokens; shared by the samples of a group."""

    cache: KVPages  # of one slot: pages 1..M
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


class DecodeState(struct.PyTreeNode):
    cache: KVPages
    table: Int[Array, "N M"]
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


@dataclass(frozen=True)
class ResultTokens:
    """What one `generate` call sampled, in one int32 array: one device-to-host copy a call.

    Columns, with k steps a call: tokens k | valid k | length | log-probs k (float32 bits) | version |
    is_live | support k * K. The first three are JetStream's.
    """

    data: Any  # (N, columns) int32
    steps: int
    support_size: int

    def convert_to_numpy(self) -> ResultTokens:
        return ResultTokens(np.asarray(self.data), self.steps, self.support_size)

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
    def support(self) -> Any:
        flat = self.data[:, 3 * self.steps + 3 :]
        return flat.reshape(len(flat), self.steps, self.support_size) if self.support_size else None
