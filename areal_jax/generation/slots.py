"""The engine's records: the slots' decode state, their KV pages, a sample's request, a decode call's results.

Shapes: N slots, M pages per slot, E stop tokens, K ids of a support (the ids that truncation left to draw a
token from), V vocabulary, k steps per call.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jaxtyping import Array, Bool, Float, Int, UInt32

from areal_jax.generation import jetstream
from areal_jax.models.kv_pages import KVPages

MAX_STOP_TOKENS = 8

IN_PROMPT, IN_COMPLETION = 1, 2

HostArray = Any
"""A numpy array on the host; a (maybe traced) jax array in a program and in a decode state."""

NONE = 0
"""Entry of a page table without a page: KV written through it goes to the scratch page, 0."""


class PageTable(struct.PyTreeNode):
    """The KV pages in use: `table` lists the pages of each slot, `users` counts each page's table entries.

    A page may be in several slots' rows, since the samples of one prompt share its pages; a page in no row is
    free. Shapes: N slots, M entries per slot. Page 0 takes KV that is not kept and is never free; entry 0 in
    the table means no page.
    """

    table: Int[Array, "N M"]
    users: Int[Array, " pages"]
    """For each page, the number of table entries that contain it; always 1 for page 0."""

    @classmethod
    def empty(cls, slots: int, places: int, pages: int) -> PageTable:
        return cls(jnp.full((slots, places), NONE, jnp.int32), jnp.zeros(pages + 1, jnp.int32).at[0].set(1))

    def released(self, slots: Bool[Array, " N"]) -> PageTable:
        """Returns the table with these slots' entries cleared; pages that no other slot uses become free."""
        gone = slots[:, None] & (self.table != NONE)
        users = self.users.at[jnp.where(gone, self.table, 0)].add(-gone.astype(jnp.int32))
        return PageTable(jnp.where(slots[:, None], NONE, self.table), users)

    def sharing(self, slot: Int[Array, ""], sibling: Int[Array, ""], count: Int[Array, ""]) -> PageTable:
        """Returns the table with the first `count` pages of slot `sibling` used by the empty `slot` too."""
        is_shared = jnp.arange(self.table.shape[1]) < count
        shared = jnp.where(is_shared, self.table[sibling], NONE)
        table = self.table.at[slot].set(jnp.where(is_shared, shared, self.table[slot]))
        return PageTable(table, self.users.at[shared].add((shared != NONE).astype(jnp.int32)))

    def free_beside(self, reserved: int) -> Int[Array, ""]:
        """Returns the number of free pages, without those that the first `reserved` slots may still take."""
        taken = (self.table[:reserved] != NONE).sum()
        return (self.users == 0).sum() - (reserved * self.table.shape[1] - taken)

    def with_pages(
        self, wanted: Bool[Array, "N M"], reserved: int = 0
    ) -> tuple[PageTable, Bool[Array, " N"]]:
        """Returns the table with free pages in the entries that `wanted` marks, and a mask of slots served.

        A marked entry that has a page keeps it. A slot gets all the pages that it lacks, or none. Slots are
        served in order, up to the first one for which too few pages are free; the first `reserved` slots,
        which share no pages, are always served.
        """
        wanted = wanted & (self.table == NONE)
        # The k-th wanted place gets the k-th free page, so a page is found without a loop over slots.
        order = jnp.cumsum(wanted.ravel()).reshape(wanted.shape)
        free = jnp.cumsum(self.users == 0)
        is_served = order[:, -1] <= free[-1]
        if reserved:
            # Reserved slots come first in the order, and their pages are outside of what the others may use.
            others = order[:, -1] - order[reserved - 1, -1]
            is_served = (others <= self.free_beside(reserved)) | (jnp.arange(len(wanted)) < reserved)
        given = wanted & is_served[:, None]
        page = jnp.where(given, jnp.searchsorted(free, order), NONE)
        users = self.users.at[page].add(given.astype(jnp.int32))
        return PageTable(jnp.where(given, page, self.table), users), is_served


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


class RequestPenalty(struct.PyTreeNode):
    """A request's penalties and biases as arrays, see `Penalties`.

    With them, tokens are not drawn from the policy itself.
    """

    repetition: Float[HostArray, "*N"]
    presence: Float[HostArray, "*N"]
    bias: Float[HostArray, "*N V"]


class DecodeState(struct.PyTreeNode):
    """The state of all slots on the device; a program takes a state, reuses its memory, returns the next."""

    cache: KVPages
    pages: PageTable
    tokens: Int[Array, "N length"]
    filled: Int[Array, " N"]  # tokens known; the KV holds all but the last of them
    is_live: Bool[Array, " N"]
    key: UInt32[Array, "N 2"]  # `sampling.sample_key` of each request's numbers
    requests: Request
    inserted: Int[Array, ""]  # samples so far: the ordinal of the next one without a request
    occurs: Int[Array, "N V"] | None = None
    """Where each id occurs in the sample so far: 0, IN_PROMPT (there alone) or IN_COMPLETION; None on engines
    without penalties.
    """

    @classmethod
    def empty(cls, cache: KVPages, slots: int, length: int, r: Request) -> DecodeState:
        """Returns the state of `slots` slots without samples, each with space for `length` tokens.

        `cache`: the pool of pages. `r`: settings of the empty slots, under which no id is cut.
        """
        requests = jax.tree.map(lambda leaf: jnp.broadcast_to(leaf, (slots, *leaf.shape)), r)
        return cls(
            cache=cache,
            pages=PageTable.empty(slots, length // cache.page_tokens, cache.k.shape[1] - 1),
            tokens=jnp.zeros((slots, length), jnp.int32),
            filled=jnp.ones(slots, jnp.int32),  # not 0: every slot feeds its token at `filled - 1`
            is_live=jnp.zeros(slots, bool),
            key=jnp.zeros((slots, 2), jnp.uint32),
            requests=requests,
            inserted=jnp.zeros((), jnp.int32),
            occurs=None if r.penalty is None else jnp.zeros_like(requests.penalty.bias, jnp.int32),
        )

    @property
    def slots(self) -> Int[Array, " N"]:
        return jnp.arange(len(self.is_live))


@struct.dataclass
class SlotData(jetstream.SlotData):
    """JetStream's results of one slot, extended by the tokens' log-probs and their policy version."""

    logp: Any  # (1, k) float32
    version: Any  # (1,) int32


@struct.dataclass
class ResultTokens(jetstream.ResultTokens):
    """The results of one `generate` call in one int32 array, so that one device-to-host copy suffices.

    One row per slot; `rows` names its columns. JetStream reads the first three. `length` is the number of
    tokens in the completion so far, `is_starved` is 1 for a live slot that sampled nothing because too few
    pages were free, and `free_pages` counts those that are not reserved.
    """

    support_size: int = struct.field(pytree_node=False)

    @classmethod
    def of(cls, data: Any, steps: int, support_size: int) -> ResultTokens:
        columns = (0, steps), (steps, 2 * steps), (2 * steps, 2 * steps + 1)
        return cls(data, *columns, samples_per_slot=1, support_size=support_size)

    def convert_to_numpy(self) -> ResultTokens:
        return self.replace(data=np.asarray(self.data))  # type: ignore[attr-defined]

    def get_result_at_slot(self, slot: int) -> SlotData:
        own = self.rows[slot : slot + 1]
        return SlotData(own["tokens"], own["valid"], own["length"], own["logp"], own["version"])

    @property
    def rows(self) -> np.ndarray:
        """(N,): a structured view of `data` in host memory, with the columns by name."""
        columns = _columns(self.tokens_idx[1], self.support_size)
        return np.ascontiguousarray(self.data).view(columns)[:, 0]


@cache
def _columns(steps: int, support_size: int) -> np.dtype:
    """Returns the dtype of a row of `ResultTokens`; it is made once, because making it takes longer than
    reading a row.
    """
    each = (steps,)
    columns = [
        ("tokens", np.int32, each),
        ("valid", np.int32, each),
        ("length", np.int32),
        ("logp", np.float32, each),
        ("version", np.int32),
        ("is_live", np.int32),
        ("is_starved", np.int32),
        ("free_pages", np.int32),
        ("support", np.int32, (*each, support_size)),
    ]
    return np.dtype(columns)
