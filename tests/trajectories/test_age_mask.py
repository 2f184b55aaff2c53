"""The loss mask of tokens that are too old, by values."""

from __future__ import annotations

import numpy as np

from areal_jax.config.sections import ControlConfig
from areal_jax.trajectories.age_mask import oldest_trained, trained_mask, trained_tokens
from areal_jax.trajectories.packing import pack
from areal_jax.types import Group, Prompt, SampleId, Sampling, Trajectory

MASK = ControlConfig(max_token_age=2, over_age="mask")


def sample(versions: list[int], mask: list[int]) -> Trajectory:
    n = len(versions)
    return Trajectory(
        sample=SampleId(0, 0),
        tokens=np.arange(n, dtype=np.int32),
        loss_mask=np.array(mask, bool),
        behavior_logp=np.zeros(n, np.float32),
        versions=np.array(versions, np.int32),
        turn_ids=np.zeros(n, np.int32),
        sampling=Sampling(),
        stop_reason="stop",
        reward=1.0,
    )


def test_the_oldest_trained_version_is_the_step_less_the_bound():
    assert [oldest_trained(MASK, step) for step in (0, 2, 7)] == [-2, 0, 5]
    for over_age in ("restart", "hold"):
        assert oldest_trained(ControlConfig(max_token_age=2, over_age=over_age), 7) is None
    assert oldest_trained(ControlConfig(over_age="mask"), 7) is None


def test_only_tokens_of_older_versions_leave_the_mask():
    one = sample([-1, -1, 3, 4, 5, 5, -1], [0, 0, 1, 1, 1, 1, 1])  # the last one: a reference answer's
    assert trained_mask(one, 5).tolist() == [False, False, False, False, True, True, True]
    assert trained_mask(one, 4).tolist() == [False, False, False, True, True, True, True]
    assert trained_mask(one, None) is one.loss_mask
    assert [trained_tokens([one, one], oldest) for oldest in (None, -2, 4, 9)] == [10, 10, 8, 2]


def test_a_packed_batch_has_the_mask_of_its_samples():
    one = sample([-1, 3, 4, 5], [0, 1, 1, 1])
    batch = pack([Group(0, Prompt("?"), (one,))], 1, 6)
    assert trained_mask(batch, 5)[0].tolist() == [False, False, False, True, False, False]
