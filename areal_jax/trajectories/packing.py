"""Trajectories of any length into static rows, and back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, Literal

import numpy as np

from areal_jax.trajectories.allocation import PackingError, allocate
from areal_jax.trajectories.plan import PER_TOKEN, BatchPlan, Pieces, fill
from areal_jax.types import Batch, Group, Trajectory

PREPARED = (
    "ages", "proximal_logp", "proximal_mix", "advantages", "weights", "off_policy_weight",
    "off_policy_cut", "ref_logp", "teacher_logp", "token_rewards", "values", "returns",
)  # fmt: skip
"""Those that `prepare` adds."""


def pack(
    groups: Sequence[Group],
    rows: int,
    length: int,
    minibatches: int = 1,
    prompts: Literal["shared", "repeated"] = "shared",
    own_rows: Callable[[int], np.ndarray] = np.arange,
) -> Batch:
    """The batch of these groups, in ordinal order: those rows of `plan_batch` that `own_rows(B)` names.

    Raises PackingError.
    """
    plan = plan_batch(groups, rows, length, minibatches, prompts)
    flat = (one for group in _in_order(groups) for one in group.trajectories)
    return fill(plan, own_rows(plan.rows), dict(enumerate(flat)))


def plan_batch(
    groups: Sequence[Group],
    rows: int,
    length: int,
    minibatches: int = 1,
    prompts: Literal["shared", "repeated"] = "shared",
) -> BatchPlan:
    """Where the tokens of these groups lie: micro-batches of `rows` rows of `length` tokens.

    Every minibatch has the same number of micro-batches, a power of two, so that few shapes are compiled;
    rows that got nothing are padding. Segments count from 1 in the order (group, member). `prompts` shared:
    what all of a group's trajectories begin with lies once in each row that holds any of them, as a segment
    of its own that they name as context; its hidden states are computed once. Raises PackingError.
    """
    groups = _in_order(groups)
    if not groups or len(groups) % minibatches:
        raise PackingError(
            f"{len(groups)} groups cannot be split into {minibatches} equal minibatches; change "
            "algorithm.minibatches or trainer.batch_size"
        )
    flat = [trajectory for group in groups for trajectory in group.trajectories]
    lengths = np.array([len(trajectory.tokens) for trajectory in flat])
    _check(flat, lengths, length)
    group_ids = np.repeat(np.arange(len(groups)), [len(group.trajectories) for group in groups])
    shared = np.array([_common_tokens(group) if prompts == "shared" else 0 for group in groups])
    bounds = np.searchsorted(group_ids, np.arange(minibatches + 1) * (len(groups) // minibatches))
    bins, micro_batches = _bins(lengths, group_ids, shared, bounds, rows, length)
    return BatchPlan(
        rows=minibatches * micro_batches * rows,
        length=length,
        shares_prompts=prompts == "shared",
        support=0 if flat[0].support is None else flat[0].support.shape[1],
        samples=np.array([trajectory.sample for trajectory in flat], np.int64),
        tokens=lengths,
        reward=np.array([trajectory.reward for trajectory in flat], np.float32),
        group_ids=group_ids.astype(np.int32),
        temperature=np.array([trajectory.sampling.temperature for trajectory in flat], np.float32),
        truncated=np.array([trajectory.truncated for trajectory in flat], np.bool_),
        pieces=_pieces(bins, lengths, group_ids, shared),
    )


def _in_order(groups: Sequence[Group]) -> list[Group]:
    return sorted(groups, key=lambda group: group.ordinal)


def unpack(batch: Batch) -> list[dict[str, Any]]:
    """Each trajectory's arrays and values, by name, in segment order; the inverse of `pack`."""
    present = [*PER_TOKEN, "positions", *(n for n in ("support", *PREPARED) if getattr(batch, n) is not None)]
    arrays = {name: np.asarray(getattr(batch, name)) for name in present}
    flat = {name: array.reshape(-1, *array.shape[2:]) for name, array in arrays.items()}
    ids = np.asarray(batch.segment_ids).reshape(-1)
    contexts = None if batch.context_ids is None else np.asarray(batch.context_ids).reshape(-1)
    count = len(np.asarray(batch.reward))
    order = np.argsort(ids, kind="stable")  # a segment's tokens keep their order: they lie side by side
    edges = np.searchsorted(ids[order], np.arange(ids.max() + 2))
    segments = []
    for number in range(count):
        where = order[edges[number + 1] : edges[number + 2]]
        context = 0 if contexts is None else int(contexts[where[0]])
        if context:
            where = np.concatenate([order[edges[context] : edges[context + 1]], where])
        segments.append(
            {name: array[where] for name, array in flat.items()}
            | {
                "reward": float(batch.reward[number]),
                "group_id": int(batch.group_ids[number]),
                "temperature": float(batch.temperature[number]),
                "truncated": bool(batch.truncated[number]),
            }
        )
    return segments


def _common_tokens(group: Group) -> int:
    """How many tokens all members begin with, none of them sampled; each has one more. 0 for a single one."""
    if len(group.trajectories) == 1:
        return 0
    first, *rest = group.trajectories
    most = min(_prompt_tokens(trajectory) for trajectory in group.trajectories)
    for other in rest:
        differs = np.flatnonzero(first.tokens[:most] != other.tokens[:most])
        most = int(differs[0]) if differs.size else most
    return most


def _prompt_tokens(trajectory: Trajectory) -> int:
    sampled = trajectory.loss_mask.argmax() if trajectory.loss_mask.any() else len(trajectory.tokens)
    return min(int(sampled), len(trajectory.tokens) - 1)


def _bins(
    lengths: np.ndarray,
    group_ids: np.ndarray,
    shared: np.ndarray,
    bounds: np.ndarray,
    rows: int,
    length: int,
) -> tuple[list[tuple[int, list[int]]], int]:
    """(row, its trajectories) of every row that holds any, and micro-batches a minibatch."""
    prompts = shared.tolist() if shared.any() else None
    parts = [
        allocate(
            lengths[start:end].tolist(),
            length,
            1,
            group_ids[start:end].tolist() if prompts else None,
            prompts,
        )
        for start, end in pairwise(bounds)
    ]
    needed = -(-max(len(part) for part in parts) // rows)
    micro_batches = 1 << (needed - 1).bit_length()
    placed = []
    for minibatch, part in enumerate(parts):
        for number, members in enumerate(part, minibatch * micro_batches * rows):
            placed.append((number, [int(index + bounds[minibatch]) for index in members]))
    return placed, micro_batches


def _pieces(
    bins: Sequence[tuple[int, list[int]]], lengths: np.ndarray, group_ids: np.ndarray, shared: np.ndarray
) -> Pieces:
    """In the order of trajectories, shared prompts behind them all."""
    size, owner, prompts = lengths.tolist(), group_ids.tolist(), shared.tolist()
    own: list[tuple[int, ...]] = [()] * len(size)
    heads: list[tuple[int, ...]] = []
    for row, members in bins:
        column = 0
        seen: dict[
            int, tuple[int, int]
        ] = {}  # group -> segment of its prompt in this row, and its last column
        for index in members:
            prompt = prompts[owner[index]]
            if prompt and owner[index] not in seen:
                segment = len(size) + len(heads) + 1
                heads.append((index, 0, prompt, row, column, segment, 0, -1))
                column += prompt
                seen[owner[index]] = segment, column - 1
            context, before = seen.get(owner[index], (0, -1))
            rest = size[index] - prompt
            own[index] = (index, prompt, rest, row, column, index + 1, context, before)
            column += rest
    return Pieces(*np.array([*own, *heads], np.int64).T)


def _check(flat: list[Trajectory], lengths: np.ndarray, length: int) -> None:
    """Raise PackingError for the first trajectory that cannot be part of the batch."""
    width = None if flat[0].support is None else flat[0].support.shape[1:]
    for trajectory, tokens in zip(flat, lengths.tolist(), strict=True):
        if not 1 <= tokens <= length:
            raise PackingError(
                f"{trajectory.sample} has {tokens} tokens; a row holds 1 to {length}: raise trainer.length"
            )
        if trajectory.reward is None:
            raise PackingError(f"{trajectory.sample} has no reward; score its group before it is packed")
        if width != (None if trajectory.support is None else trajectory.support.shape[1:]):
            raise PackingError(
                f"{trajectory.sample} and {flat[0].sample} differ in their support; sample all of a "
                "batch's trajectories with the same top_k and support_size"
            )
