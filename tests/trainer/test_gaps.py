"""Log-prob gaps by age, value figures and the KL coefficient: sums that add up, figures that are right."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from areal_jax.trainer.gaps import gap_figures, gap_sums
from areal_jax.trainer.state import KLControl
from areal_jax.trainer.update_metrics import add_metrics, to_floats, value_sums

SUMS = jax.jit(gap_sums)
NAMES = {0: "0", 1: "1", 3: "3", 4: "4", 5: "5-8", 8: "5-8", 9: "9-up", 40: "9-up"}


def drawn(seed: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Proximal and behaviour log-probs, ages, mask: gaps from rounding to several nats, NaN off the mask."""
    rng = np.random.default_rng(seed)
    shape = (8, 500)
    mask = rng.random(shape) < 0.8
    gap = rng.normal(size=shape) * 10.0 ** rng.uniform(-7, 0.3, shape)
    behavior = rng.normal(-2, 1, shape)
    proximal = np.where(mask, np.where(rng.random(shape) < 0.3, behavior, behavior + gap), np.nan)
    ages = rng.choice(list(NAMES), shape)
    return proximal.astype(np.float32), behavior.astype(np.float32), ages.astype(np.int32), mask


def test_gaps_overall_and_by_age():
    proximal, behavior, ages, mask = drawn(0)
    figures = gap_figures(SUMS(proximal, behavior, ages, mask))
    gap = proximal.astype(float) - behavior
    buckets = {"": mask} | {
        f"/age_{name}": mask & np.isin(ages, [age for age in NAMES if NAMES[age] == name])
        for name in set(NAMES.values())
    }
    for suffix, where in buckets.items():
        size = np.abs(gap[where])
        assert figures[f"logp_gap_mean{suffix}"] == pytest.approx(size.mean(), rel=1e-4)
        assert figures[f"logp_gap_max{suffix}"] == pytest.approx(size.max(), rel=1e-6)
        kl = (np.exp(gap[where]) - 1 - gap[where]).mean()
        assert figures[f"mismatch_kl{suffix}"] == pytest.approx(kl, rel=1e-3)
        exact = np.quantile(size, 0.999, method="inverted_cdf")
        assert figures[f"logp_gap_p999{suffix}"] == pytest.approx(exact, rel=0.04)
        assert figures[f"logp_unequal{suffix}"] == (proximal != behavior)[where].sum()
    assert len(figures) == 5 * len(buckets)  # no age that no token has: 2 is absent


def test_gaps_of_parts_add_up_to_the_whole():
    proximal, behavior, ages, mask = drawn(1)
    whole = SUMS(proximal, behavior, ages, mask)
    half = mask & (np.arange(500) < 200)
    parts = [SUMS(proximal, behavior, ages, part) for part in (half, mask & ~half)]
    joined = add_metrics({"gaps": parts[0]}, {"gaps": parts[1]})["gaps"]
    np.testing.assert_array_equal(joined.counts, whole.counts)
    np.testing.assert_array_equal(joined.largest, whole.largest)
    np.testing.assert_array_equal(joined.unequal, whole.unequal)
    np.testing.assert_allclose(joined.absolute, whole.absolute, rtol=1e-5)
    split = to_floats(
        [{"tokens": m.sum(), "gaps": p} for m, p in zip((half, mask & ~half), parts, strict=True)]
    )
    assert split["trained_tokens"] == mask.sum()
    assert split["logp_gap_p999"] == gap_figures(whole)["logp_gap_p999"]


def test_no_gap_at_all_is_0():
    zeros = np.zeros((1, 4), np.float32)
    figures = gap_figures(SUMS(zeros, zeros, zeros.astype(np.int32), np.array([[True, True, False, False]])))
    assert set(figures.values()) == {0.0}


def test_a_gap_that_is_no_number_is_seen():
    bad = np.array([[np.nan, 0]], np.float32)
    figures = gap_figures(SUMS(bad, 0 * bad[::, ::-1], np.zeros((1, 2), np.int32), np.ones((1, 2), bool)))
    assert np.isnan(figures["logp_gap_mean"])


def test_explained_variance_is_that_of_the_returns():
    rng = np.random.default_rng(2)
    returns, values = (rng.normal(1, 2, (4, 50)).astype(np.float32) for _ in range(2))
    values = (0.8 * returns + 0.3 * values + 0.5).astype(np.float32)
    mask = rng.random(returns.shape) < 0.7
    sums = value_sums(0 * returns, mask, values, returns, mask)
    figures = to_floats([{"tokens": mask.sum(), "values": sums}])
    r, v = returns[mask].astype(float), values[mask].astype(float)
    assert figures["explained_variance"] == pytest.approx(1 - (r - v).var() / r.var(), rel=1e-3)
    assert figures["value_clip_share"] == 1


def test_the_coefficient_moves_once_a_version_by_the_error_of_the_whole_version():
    """Ziegler et al.: by at most a fifth a horizon; half a horizon of tokens moves it half as far."""
    control = KLControl.first(0.1)

    def after(control: KLControl, kl: float, tokens: int, is_last: bool) -> KLControl:
        return control.after(
            jnp.float32(kl), jnp.float32(tokens), jnp.bool_(is_last), target=0.02, horizon=1000
        )

    middle = after(control, 3.0, 100, False)
    assert float(middle.coef) == np.float32(0.1)
    end = after(middle, 7.5, 400, True)  # 10.5 / 500 = 0.021: an error of 0.05 over half a horizon
    assert float(end.coef) == pytest.approx(0.1 * (1 + 0.05 * 0.5), rel=1e-5)
    assert (float(end.kl), float(end.tokens)) == (0, 0)
    assert float(after(control, 1e4, 1000, True).coef) == pytest.approx(0.12, rel=1e-5)
    assert float(after(control, 0, 1_000_000, True).coef) == pytest.approx(0.08, rel=1e-5)  # never below 0
