"""The plan of a batch: the row and column of every token of its trajectories.

The process that has the complete batch makes the plan once; the plan is small, a few numbers per trajectory.
Every process then fills the rows on its own devices, and needs only the trajectories in those rows.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

import numpy as np

from areal_jax.types import NOT_SAMPLED, ArealError, Batch, SampleId, Trajectory

PER_TOKEN = {
    "tokens": np.int32(0),
    "loss_mask": np.bool_(False),
    "behavior_logp": np.float32(0),
    "versions": np.int32(NOT_SAMPLED),
    "turn_ids": np.int32(-1),
}
"""Name -> padding value, for each array of a batch that is copied token by token from trajectories."""


BatchLayout = Literal["shared", "repeated", "apart"]
"""How trajectories lie in the rows. shared: those in one row share one copy of each prefix that none of them
trains, such as a group's prompt. repeated: each has its own copy. apart: each has a row of its own, for an
update over prefix trees.
"""


class PackingError(ArealError):
    """Trajectories cannot be packed into a batch; the message names the cause and what to do."""


class Pieces(NamedTuple):
    """Where pieces (runs of consecutive tokens) lie in the packed rows; each array has one int64 per piece.

    A piece is a complete trajectory, a part of a prefix that trajectories share, or the rest of a trajectory
    after the tokens that it shares.
    """

    source: np.ndarray  # the piece's trajectory: its index in the order (group, member, path)
    start: np.ndarray  # the piece's first token in its trajectory
    size: np.ndarray
    row: np.ndarray
    column: np.ndarray
    end: np.ndarray  # column after the last token of the row that sees the piece's tokens
    segment: np.ndarray  # 1..S: the trajectory's segment; above S: that of a shared part
    previous: np.ndarray  # column of the token before the piece's first; -1 = none

    def where(self, chosen: np.ndarray) -> Pieces:
        return Pieces(*(values[chosen] for values in self))


class BatchPlan(NamedTuple):
    """Where each trajectory of a batch lies in its packed rows.

    The batch has B rows of T tokens and S trajectories in the order (group, member, path of the sample).
    """

    rows: int  # B
    length: int  # T
    layout: BatchLayout
    support: int  # K; 0 = no support
    samples: np.ndarray  # (S, 3) int64: ordinal, member, attempt
    tokens: np.ndarray  # (S,) int64: a trajectory's length
    reward: np.ndarray  # (S,) float32
    group_ids: np.ndarray  # (S,) int32
    temperature: np.ndarray  # (S,) float32
    truncated: np.ndarray  # (S,) bool
    pieces: Pieces
    sample_ids: np.ndarray | None = None
    """(S,) int32, ascending: the sample of each trajectory; None: each is its sample's only path. If given, S
    is a power of two, and the last trajectories may have no tokens: they count as paths of the last sample.
    """
    choice: Mapping[str, Any] = {}
    """What was decided about the computation, as fields of the step's metrics row (`runtime.compute_choice`).
    `compute` is packed or tree; `tree_costs`, if given, `LeafCosts` by which leaves are cut over devices.
    """
    experts: int = 0  # E; 0 = no experts

    def sources(self, rows: np.ndarray) -> dict[int, SampleId]:
        """Returns, for the trajectories with tokens in the given rows: index in the plan -> SampleId."""
        places = np.unique(self.pieces.source[np.isin(self.pieces.row, rows)]).tolist()
        return {place: SampleId(*self.samples[place].tolist()) for place in places}

    def path(self, place: int) -> int:
        """Returns the index of trajectory number `place` among the paths of its sample (`paths_of`)."""
        ids = self.sample_ids
        return 0 if ids is None else place - int(np.searchsorted(ids, ids[place]))

    def to_wire(self) -> dict[str, Any]:
        """Returns the plan as numbers, lists and bytes for msgpack; `from_wire` is the inverse."""
        plain = {name: _to_plain(value) for name, value in self._asdict().items()}
        return plain | {"pieces": [_to_plain(values) for values in self.pieces]}

    @classmethod
    def from_wire(cls, plain: Mapping[str, Any]) -> BatchPlan:
        """Returns the plan that `to_wire` encoded. Raises PackingError if `plain` has another form."""

        try:
            values = {name: _from_plain(plain[name]) for name in cls._fields if name != "pieces"}
            return cls(**values, pieces=Pieces(*map(_from_plain, plain["pieces"])))
        except (KeyError, TypeError, ValueError) as error:
            raise PackingError(
                f"the received batch plan has an unknown form ({error!r}); run the same areal-jax version "
                "in all processes"
            ) from error


def fill(plan: BatchPlan, rows: np.ndarray, trajectories: Mapping[int, Trajectory]) -> Batch:
    """Returns the rows with the ascending indices `rows` of the planned batch.

    Arrays with a value per token are (len(rows), T); arrays with a value per trajectory are (S,), for the
    whole batch. `trajectories`: index in the plan -> trajectory of its sample, for at least the indices in
    `plan.sources(rows)`. Raises PackingError if a trajectory is missing, or if its sample or length is not
    the planned one.
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
        # `nothing` gives the dtype and shape if `flat` is empty.
        values = np.concatenate([nothing, *(getattr(trajectory, name) for trajectory in flat)])
        return values if is_in_order else values[taken]

    def each(values: np.ndarray) -> np.ndarray:
        return np.repeat(values, pieces.size).astype(np.int32)

    previous = np.where(within > 0, at % plan.length - 1, each(pieces.previous)).astype(np.int32)
    no_support = np.zeros((0, plan.support), np.int32)
    no_experts = np.zeros((0, plan.experts), np.uint8)
    return Batch(
        **{name: spread(joined(name, empty[None][:0]), empty) for name, empty in PER_TOKEN.items()},
        positions=spread(each(pieces.start) + within.astype(np.int32), 0),
        segment_ids=spread(each(pieces.segment), 0),
        previous=spread(previous, -1),
        subtree_ends=spread(each(pieces.end), 0) if plan.layout == "shared" else None,
        reward=plan.reward,
        group_ids=plan.group_ids,
        temperature=plan.temperature,
        truncated=plan.truncated,
        support=spread(joined("support", no_support), -1) if plan.support else None,
        experts=spread(joined("experts", no_experts), 255) if plan.experts else None,
        sample_ids=plan.sample_ids,
    )


def _to_plain(value: Any) -> Any:
    return [value.dtype.str, list(value.shape), value.tobytes()] if isinstance(value, np.ndarray) else value


def _from_plain(value: Any) -> Any:
    if not isinstance(value, (list, tuple)):
        return value
    kind, shape, raw = value
    return np.frombuffer(raw, np.dtype(kind)).reshape(shape)


def _planned(plan: BatchPlan, place: int, trajectories: Mapping[int, Trajectory]) -> Trajectory:
    """Returns the trajectory with index `place` in the plan, from its sample's.

    Raises PackingError if `trajectories` lacks it, or if its sample or length is not the planned one.
    """
    sample = SampleId(*plan.samples[place].tolist())
    found = trajectories.get(place)
    if found is not None and plan.sample_ids is not None and (path := plan.path(place)):
        found = found.branches[path - 1] if path <= len(found.branches) else None
    if found is None or found.sample != sample or len(found.tokens) != plan.tokens[place]:
        got = "none" if found is None else f"{found.sample} of {len(found.tokens)} tokens"
        raise PackingError(
            f"trajectory {place} of the batch plan is {sample} of {plan.tokens[place]} tokens, but {got} "
            "was given; pass the trajectories that BatchPlan.sources names for these rows"
        )
    return found
