"""Which groups are too old, or would become so (control.max_token_age), as control.over_age says.

With over_age=mask no group is: the trainer masks the old tokens (`trajectories.age_mask`).
"""

from __future__ import annotations

from areal_jax.config.tree import Config
from areal_jax.control.gate import may_train
from areal_jax.control.state import State


def to_restart(state: State, config: Config) -> list[int]:
    """Returns the scored groups that must start again: those with a token older than the bound."""
    bound = config.control.max_token_age
    if bound is None or config.control.over_age != "restart":
        return []

    def age(ordinal: int) -> int:
        versions = [version for version in state.groups[ordinal].oldest if version is not None]
        return state.trained_version - min(versions)

    return [ordinal for ordinal in state.complete if age(ordinal) > bound]


def is_to_hold(state: State, config: Config, ordinals: tuple[int, ...]) -> bool:
    """Returns whether the batch `ordinals` must wait, because it would make a group outside of it too old.

    A group's tokens are at least as new as the version that was committed when it was first dispatched
    (`State.began`); the groups to wait for can then be trained in time, so the wait ends (`may_train`).
    """
    bound = config.control.max_token_age
    if bound is None or config.control.over_age != "hold":
        return False
    left = state.began(but=ordinals)
    return not may_train(state.trained_version, left, config.trainer.batch_size, bound)
