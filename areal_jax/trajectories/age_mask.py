"""The loss mask of tokens that are too old to be trained (control.over_age=mask).

The mask follows from a token's weights version and the step that trains it, both of which the journal has. So
a batch that is trained again, after a crash or by a replay, has the same mask.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from areal_jax.config.sections import ControlConfig
from areal_jax.trajectories.paths import paths_of
from areal_jax.types import NOT_SAMPLED, Batch, PolicyVersion, Trajectory


def oldest_trained(control: ControlConfig, step: int) -> PolicyVersion | None:
    """Returns the oldest version of which batch `step` trains tokens; None if it trains all."""
    if control.over_age != "mask" or control.max_token_age is None:
        return None
    return step - control.max_token_age


def trained_mask(one: Trajectory | Batch, oldest: PolicyVersion | None) -> np.ndarray:
    """Returns the loss mask without the tokens of versions older than `oldest`; None: the mask itself.

    The result is bool and has the shape of `one.loss_mask`, (n,) or (B, T). Tokens of reference answers,
    which no version sampled, stay.
    """
    if oldest is None:
        return one.loss_mask
    return one.loss_mask & ((one.versions >= oldest) | (one.versions == NOT_SAMPLED))


def trained_tokens(trajectories: Iterable[Trajectory], oldest: PolicyVersion | None) -> int:
    """Returns the number of the samples' tokens that are trained, on all paths."""
    return sum(int(trained_mask(path, oldest).sum()) for one in trajectories for path in paths_of(one))
