"""Where every token of a batch lies: what a process needs, beside its own trajectories, to build its rows.

A plan is made once, by whoever holds the whole batch, and is small: a few numbers a trajectory. Each process
then fills the rows that lie on its devices, from the trajectories in them and no others.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from areal_jax.trajectories.allocation import PackingError
from areal_jax.types import NOT_SAMPLED, Batch, SampleId, Trajectory

PER_TOKEN = {
    "tokens": np.int32(0),
    "loss_mask": np.bool_(False),
    "behavior_logp": np.float32(0),
    "versions": np.int32(NOT_SAMPLED),
    "turn_ids": np.int32(-1),
}
"""A batch's arrays that are copied from trajectories, and what padding holds."""


class Pieces(NamedTuple):
    """Runs of trajectories' tokens, and where they lie: a trajectory, or a shared prompt and what follows it.

    All (pieces,) int64.
    """

    source: np.ndarray  # the trajectory it is taken from: its place in the order (group, member)
    start: np.ndarray  # its first token there
    size: np.ndarray
    row: np.ndarray
    column: np.ndarray
    segment: np.ndarray  # 1..S: that of its trajectory; beyond: a shared prompt's
    context: np.ndarray  # segment of the shared prompt it follows; 0 = none
    previous: np.ndarray  # column of the token before its first; -1 = none

    def where(self, chosen: np.ndarray) -> Pieces:
        return Pieces(*(values[chosen] for values in self))


class BatchPlan(NamedTuple):
    """A batch of B rows of T tokens, S trajectories in the order (group, member), before it is filled."""

    rows: int  # B
    length: int  # T
    shares_prompts: bool
    support: int  # K; 0 = no support
    samples: np.ndarray  # (S, 3) int64: ordinal, member, attempt
    tokens: np.ndarray  # (S,) int64: a trajectory's length
    reward: np.ndarray  # (S,) float32
    group_ids: np.ndarray  # (S,) int32
    temperature: np.ndarray  # (S,) float32
    truncated: np.ndarray  # (S,) bool
    pieces: Pieces

    def sources(self, rows: np.ndarray) -> dict[int, SampleId]:
        """The trajectories of which a piece lies in these rows: their places in the order, and whose."""
        places = np.unique(self.pieces.source[np.isin(self.pieces.row, rows)]).tolist()
        return {place: SampleId(*self.samples[place].tolist()) for place in places}

    def to_wire(self) -> dict[str, Any]:
        """Numbers, lists and bytes, for msgpack; `from_wire` takes them back."""
        plain = {name: _to_plain(value) for name, value in self._asdict().items()}
        return plain | {"pieces": [_to_plain(values) for values in self.pieces]}

    @classmethod
    def from_wire(cls, plain: Mapping[str, Any]) -> BatchPlan:
        """Raises PackingError for what is no plan of this form."""

        try:
            values = {name: _from_plain(plain[name]) for name in cls._fields if name != "pieces"}
            return cls(**values, pieces=Pieces(*map(_from_plain, plain["pieces"])))
        except (KeyError, TypeError, ValueError) as error:
            raise PackingError(
                f"a batch's plan of another form ({error!r}); run the same version of areal-jax everywhere"
            ) from error


def fill(plan: BatchPlan, rows: np.ndarray, trajectories: Mapping[int, Trajectory]) -> Batch:
    """Those rows of the batch, (len(rows), T) a token's array; what a sequence has one of is whole, (S,).

    `rows`: ascending indices; `trajectories`: at least those of `plan.sources(rows)`, by their places. Raises
    PackingError for one that is missing or not the one that was planned with.
    """
    pieces = plan.pieces.where(np.isin(plan.pieces.row, rows))
    places, owner = np.unique(pieces.source, return_inverse=True)
    flat = [_planned(plan, place, trajectories) for place in places.tolist()]
    ends = np.cumsum(plan.tokens[places])

    first = np.cumsum(pieces.size) - pieces.size
    within = np.arange(pieces.size.sum()) - np.repeat(first, pieces.size)
    taken = np.repeat((ends - plan.tokens[places])[owner] + pieces.start, pieces.size) + within
    at = np.repeat(np.searchsorted(rows, pieces.row) * plan.length + pieces.column, pieces.size) + within
    is_in_order = taken.size == int(plan.tokens[places].sum()) and bool(
        (taken == np.arange(taken.size)).all()
    )

    def spread(values: np.ndarray, empty: Any) -> np.ndarray:
        out = np.full((len(rows) * plan.length, *values.shape[1:]), empty, values.dtype)
        out[at] = values
        return out.reshape(len(rows), plan.length, *values.shape[1:])

    def joined(name: str, nothing: np.ndarray) -> np.ndarray:
        values = np.concatenate([nothing, *(getattr(trajectory, name) for trajectory in flat)])  # maybe none
        return values if is_in_order else values[taken]

    def each(values: np.ndarray) -> np.ndarray:
        return np.repeat(values, pieces.size).astype(np.int32)

    previous = np.where(within > 0, at % plan.length - 1, each(pieces.previous)).astype(np.int32)
    no_support = np.zeros((0, plan.support), np.int32)
    return Batch(
        **{name: spread(joined(name, empty[None][:0]), empty) for name, empty in PER_TOKEN.items()},
        positions=spread(each(pieces.start) + within.astype(np.int32), 0),
        segment_ids=spread(each(pieces.segment), 0),
        previous=spread(previous, -1),
        context_ids=spread(each(pieces.context), 0) if plan.shares_prompts else None,
        reward=plan.reward,
        group_ids=plan.group_ids,
        temperature=plan.temperature,
        truncated=plan.truncated,
        support=spread(joined("support", no_support), -1) if plan.support else None,
    )


def _to_plain(value: Any) -> Any:
    return [value.dtype.str, list(value.shape), value.tobytes()] if isinstance(value, np.ndarray) else value


def _from_plain(value: Any) -> Any:
    if not isinstance(value, (list, tuple)):
        return value
    kind, shape, raw = value
    return np.frombuffer(raw, np.dtype(kind)).reshape(shape)


def _planned(plan: BatchPlan, place: int, trajectories: Mapping[int, Trajectory]) -> Trajectory:
    """The trajectory of that place. Raises PackingError."""
    sample = SampleId(*plan.samples[place].tolist())
    found = trajectories.get(place)
    if found is None or found.sample != sample or len(found.tokens) != plan.tokens[place]:
        got = "none" if found is None else f"{found.sample} of {len(found.tokens)}"
        raise PackingError(
            f"trajectory {place} of the plan is {sample} of {plan.tokens[place]} tokens, given was {got}; "
            "give those that BatchPlan.sources names for these rows"
        )
    return found
