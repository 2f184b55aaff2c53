"""The proximal policy by mix: the exact place between behaviour and current policy."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal_jax.algorithms.proximal import proximal_mix


@given(st.integers(1, 5), st.integers(0, 2**16))
def test_loglinear_finds_the_policy_that_the_step_began_with(minibatches: int, seed: int):
    """Log-probs that move evenly, a version a unit of time: minibatch k of n of step s is at s + k / n."""
    rng = np.random.default_rng(seed)
    ages = rng.integers(1, 9, (minibatches * 2, 3))
    behavior, slope = rng.normal(-2, 1, ages.shape), rng.normal(size=ages.shape)
    trained = np.repeat(np.arange(minibatches), 2)[:, None] / minibatches
    current = behavior + slope * (ages + trained)
    mix = np.asarray(proximal_mix(ages, minibatches, "loglinear"), float)
    np.testing.assert_allclose(
        behavior + mix * (current - behavior), behavior + slope * ages, rtol=1e-5, atol=1e-5
    )


def test_at_the_first_minibatch_the_current_policy_is_the_proximal_one():
    """The published form says a token of the version before is as far as its behaviour policy: 0, not 1."""
    ages = np.array([[0, 1, 2, 4], [0, 1, 2, 4]], np.int32)
    np.testing.assert_allclose(proximal_mix(ages, 2, "loglinear"), [[1, 1, 1, 1], [0, 2 / 3, 4 / 5, 8 / 9]])
    published = [0, 0, 1 / 2, 3 / 4]
    np.testing.assert_allclose(proximal_mix(ages, 2, "loglinear_published"), [published, published])
    np.testing.assert_array_equal(proximal_mix(ages, 1, "reuse"), np.ones((2, 4)))


def test_a_form_that_is_no_mix_is_refused():
    with pytest.raises(ValueError, match=r"algorithm\.proximal='recompute' has no mixing weights"):
        proximal_mix(np.zeros((1, 1), np.int32), 1, "recompute")
