"""Checks the shapes and kinds of arrays that are arguments or results of functions of a batch.

The checks run only while a function is traced, and read no values. Axes are letters: B rows, T tokens of a
row, S sequences, K ids of a support, E experts of a token.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import chex
import jax
import jax.numpy as jnp
from jaxtyping import Array

from areal_jax.types import ArealError, Batch, PreparedBatch

B = TypeVar("B", Batch, PreparedBatch)

AXES: Mapping[str, tuple[str, type]] = {
    **dict.fromkeys(("tokens", "positions", "segment_ids", "versions", "turn_ids", "previous"), ("BT", int)),
    **dict.fromkeys(("loss_mask", "off_policy_cut"), ("BT", bool)),
    **dict.fromkeys(("behavior_logp", "proximal_logp", "ref_logp", "teacher_logp"), ("BT", float)),
    **dict.fromkeys(("proximal_mix", "off_policy_weight", "loss_weights", "advantages"), ("BT", float)),
    **dict.fromkeys(("token_rewards", "values", "returns"), ("BT", float)),
    **dict.fromkeys(("subtree_ends", "ages"), ("BT", int)),
    **dict.fromkeys(("reward", "temperature", "bootstrap"), ("S", float)),
    **dict.fromkeys(("group_ids", "sample_ids"), ("S", int)),
    "truncated": ("S", bool),
    "support": ("BTK", int),
    "experts": ("BTE", int),
}
"""Field of PreparedBatch -> (its axes, the kind of its dtype); float and int allow any number of bits."""

PER_SEQUENCE = tuple(name for name in PreparedBatch._fields if AXES[name][0] == "S")


def map_batch(per_token: Callable[..., Any], per_sequence: Callable[..., Any], *batches: B) -> B:
    """Returns the batch in which each field is a function of that field's arrays in `batches`.

    The function is `per_sequence(*arrays)` for arrays with one value per sequence, `per_token(*arrays)` for
    all others. A field that is None in the first batch stays None.
    """

    def one(name: str, *arrays: Any) -> Any:
        function = per_sequence if name in PER_SEQUENCE else per_token
        return None if arrays[0] is None else function(*arrays)

    kind = type(batches[0])
    return kind(*map(one, kind._fields, *batches))


def check_batch(batch: Batch | PreparedBatch, *per_token: Array | None) -> None:
    """Raise AssertionError if an array of the batch or in `per_token` has a wrong shape or kind of dtype.

    `AXES` lists the required shapes and kinds (bool, int, float) of the batch's arrays; arrays in `per_token`
    must be (B, T) float. A field or argument that is None is skipped.
    """
    chex.assert_rank([batch.segment_ids, batch.group_ids], [2, 1])
    sizes = dict(zip("BTS", (*batch.segment_ids.shape, *batch.group_ids.shape), strict=True))
    for name, x in batch._asdict().items():
        if x is not None:
            axes, kind = AXES[name]
            chex.assert_shape(x, [sizes.get(axis) for axis in axes], custom_message=f"batch.{name}")
            chex.assert_type(x, kind, custom_message=f"batch.{name}")
    given = [x for x in per_token if x is not None]
    chex.assert_shape(given, batch.segment_ids.shape)
    chex.assert_type(given, float)


def check_result(result: Any, batch: PreparedBatch, what: str) -> None:
    """Raise ArealError unless every array in `result` is (B, T); `what` names the function in the message."""
    message = f"{what} must return only arrays of shape (B, T), one value per token; see docs/extending.md"
    leaves = jax.tree.leaves(result)
    chex.assert_shape(leaves, batch.segment_ids.shape, custom_message=message, exception_type=ArealError)


def empty_batch(rows: int, length: int) -> PreparedBatch:
    """Returns a prepared batch of `rows` x `length` zeros, to trace a function.

    The batch has one sequence, no loss tokens, no support, no shared prefixes, no branches and no experts.
    """
    sizes = {"B": rows, "T": length, "S": 1}

    def zeros(axes: str, kind: type) -> Array:
        return jnp.zeros([sizes[axis] for axis in axes], kind)

    absent = ("support", "subtree_ends", "sample_ids", "experts")
    given = {name: zeros(*of) for name, of in AXES.items() if name not in absent}
    return PreparedBatch(**given)
