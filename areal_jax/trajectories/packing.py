"""Packs trajectories of any length into rows of a fixed length."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise

import numpy as np

from areal_jax.trajectories.allocation import allocate
from areal_jax.trajectories.plan import BatchPlan, Layout, PackingError, Pieces, fill
from areal_jax.types import Batch, Group, Trajectory


def pack(
    groups: Sequence[Group],
    rows: int,
    length: int,
    minibatches: int = 1,
    layout: Layout = "shared",
    own_rows: Callable[[int], np.ndarray] = np.arange,
) -> Batch:
    """Returns a batch of these groups, sorted by ordinal and laid out by `plan_batch` with these arguments.

    `own_rows(B)`: which of the batch's B rows to return, as ascending indices; by default all. Raises
    PackingError as `plan_batch` does.
    """
    plan = plan_batch(groups, rows, length, minibatches, layout)
    flat = (one for group in _in_order(groups) for one in group.trajectories)
    return fill(plan, own_rows(plan.rows), dict(enumerate(flat)))


def plan_batch(
    groups: Sequence[Group],
    rows: int,
    length: int,
    minibatches: int = 1,
    layout: Layout = "shared",
) -> BatchPlan:
    """Returns the plan of these groups' batch: micro-batches of `rows` rows of `length` tokens.

    `minibatches`: number of equal parts of the batch. Each part has the same number of micro-batches, a power
    of two, so that few shapes are compiled; unused rows are padding. A trajectory's tokens in a row are a
    segment. Segments are numbered from 1 in the order (group, member), with groups sorted by ordinal. With
    layout "shared", the prompt tokens that all trajectories of a group begin with are stored and computed
    once per row, as a segment of their own, to which the group's other segments in that row attend. With
    "repeated", each trajectory is stored with its own prompt. With "apart", each is stored in a row of its
    own; there are no micro-batches, and `rows` does not matter. Raises PackingError if `minibatches` does not
    divide the number of groups, or if a trajectory cannot be packed.
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
    shared = np.array([_common_tokens(group) if layout == "shared" else 0 for group in groups])
    bounds = np.searchsorted(group_ids, np.arange(minibatches + 1) * (len(groups) // minibatches))
    if layout == "apart":
        count = int(np.diff(bounds).max())
        first = np.repeat(np.arange(minibatches) * count - bounds[:-1], np.diff(bounds))
        bins = [(index + start, [index]) for index, start in enumerate(first.tolist())]
        needed = minibatches * count
    else:
        bins, micro_batches = _bins(lengths, group_ids, shared, bounds, rows, length)
        needed = minibatches * micro_batches * rows
    return BatchPlan(
        rows=needed,
        length=length,
        layout=layout,
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


def _common_tokens(group: Group) -> int:
    """Returns the number of prompt tokens that all members of a group begin with; 0 for a group of one.

    A trajectory's last token is never counted, so that its own segment has at least one token.
    """
    if len(group.trajectories) == 1:
        return 0
    most = min(_prompt_tokens(trajectory) for trajectory in group.trajectories)
    prompts = np.stack([trajectory.tokens[:most] for trajectory in group.trajectories])
    differs = np.flatnonzero((prompts != prompts[0]).any(axis=0))
    return int(differs[0]) if differs.size else most


def _prompt_tokens(trajectory: Trajectory) -> int:
    sampled = trajectory.loss_mask.argmax() if trajectory.loss_mask.any() else len(trajectory.tokens)
    # One token stays the trajectory's own, so that its segment is never empty.
    return min(int(sampled), len(trajectory.tokens) - 1)


def _bins(
    lengths: np.ndarray,
    group_ids: np.ndarray,
    shared: np.ndarray,
    bounds: np.ndarray,
    rows: int,
    length: int,
) -> tuple[list[tuple[int, list[int]]], int]:
    """Returns (row, indices of its trajectories) for every row in use, and the micro-batches per minibatch.

    `lengths`, `group_ids`: number of tokens and group of each trajectory; `shared`: number of prompt tokens
    that each group's trajectories share. Minibatch i has the trajectories `bounds[i]` up to, but without,
    `bounds[i + 1]`. A micro-batch has `rows` rows of `length` tokens.
    """
    parts = [
        allocate(lengths[start:end], length, group_ids[start:end], shared) for start, end in pairwise(bounds)
    ]
    needed = -(-max(len(part) for part in parts) // rows)
    # The next power of two: every count of micro-batches is compiled, so few counts may occur.
    micro_batches = 1 << (needed - 1).bit_length()
    placed = []
    for minibatch, part in enumerate(parts):
        for number, members in enumerate(part, minibatch * micro_batches * rows):
            placed.append((number, [int(index + bounds[minibatch]) for index in members]))
    return placed, micro_batches


def _pieces(
    bins: Sequence[tuple[int, list[int]]], lengths: np.ndarray, group_ids: np.ndarray, shared: np.ndarray
) -> Pieces:
    """Returns the positions of all pieces (`Pieces`): each trajectory's own tokens, then the shared prompts.

    `bins`: the rows in use, as `_bins` returns them. `lengths`, `group_ids`: number of tokens and group of
    each trajectory; `shared`: number of prompt tokens that each group's trajectories share.
    """
    size, owner, prompts = lengths.tolist(), group_ids.tolist(), shared.tolist()
    own: list[tuple[int, ...]] = [()] * len(size)
    heads: list[tuple[int, ...]] = []
    for row, members in bins:
        column = 0
        seen: dict[int, tuple[int, int]] = {}  # group -> its prompt's segment in this row, and last column
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
    """Raises PackingError if a trajectory cannot be part of the batch.

    A trajectory cannot if it is empty or longer than `length` tokens, has no reward, or has another number of
    kept token ids per position than the batch's first trajectory. `lengths`: tokens of each trajectory.
    """
    width = None if flat[0].support is None else flat[0].support.shape[1:]
    for trajectory, tokens in zip(flat, lengths.tolist(), strict=True):
        if not 1 <= tokens <= length:
            raise PackingError(
                f"{trajectory.sample} has {tokens} tokens, but a packed row has space for 1 to {length}; "
                "raise trainer.length"
            )
        if trajectory.reward is None:
            raise PackingError(f"{trajectory.sample} has no reward; score its group before it is packed")
        if width != (None if trajectory.support is None else trajectory.support.shape[1:]):
            raise PackingError(
                f"{trajectory.sample} and {flat[0].sample} differ in the number of kept token ids per "
                "position; sample all trajectories with the same generation.top_k and generation.support_size"
            )
