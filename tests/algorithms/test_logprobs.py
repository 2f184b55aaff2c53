"""The one log-prob function against float64 numpy, and its packed form."""

from __future__ import annotations

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from areal_jax.algorithms import logprobs
from areal_jax.algorithms.logprobs import PackedTokens, TokenStats, packed_stats, token_stats
from tests.algorithms import reference
from tests.algorithms.batches import positions_of, segments_of

N, V = 24, 41
RNG = np.random.default_rng(0)
LOGITS = (3 * RNG.normal(size=(N, V))).astype(np.float32)
TOKENS = RNG.integers(0, V, N).astype(np.int32)


def supports(sizes: np.ndarray, width: int) -> np.ndarray:
    """The likeliest `sizes[i]` ids of row i and its token; -1 beyond."""
    rows = np.full((N, width), -1, np.int32)
    for i, size in enumerate(sizes):
        if size:
            best = [v for v in np.argsort(-LOGITS[i]) if v != TOKENS[i]][: size - 1]
            rows[i, :size] = [*best, TOKENS[i]]
    return rows


def assert_stats(got: TokenStats, want: tuple[np.ndarray, ...]) -> None:
    for name, value, expected in zip(TokenStats._fields, got, want, strict=True):
        np.testing.assert_allclose(value, expected, rtol=0, atol=2e-5, err_msg=name)


@pytest.fixture(params=["cpu", "accelerator"])
def log_sum(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The sums over the vocabulary as a CPU computes them, then as GPUs and TPUs do."""
    if request.param == "accelerator":
        monkeypatch.setattr(logprobs, "_log_sum_exp", logprobs._in_one_pass)


@pytest.mark.usefixtures("log_sum")
@pytest.mark.parametrize("temperature", [0.7, 1.0, 1.3])
def test_stats_at_a_temperature(temperature: float):
    t = np.full(N, temperature, np.float32)
    got = token_stats(LOGITS, TOKENS, t)
    assert_stats(got, reference.token_stats(LOGITS, TOKENS, t.astype(np.float64)))
    np.testing.assert_array_equal(got.outside, 0)


def test_stats_over_a_support():
    """Support rows of every size, an empty one included; each token at a temperature of its own."""
    t = RNG.uniform(0.5, 1.5, N).astype(np.float32)
    support = supports(np.arange(N) % 9, 8)
    got = token_stats(LOGITS, TOKENS, t, support)
    assert_stats(got, reference.token_stats(LOGITS, TOKENS, t.astype(np.float64), support))
    assert np.asarray(got.outside).max() > 0.1
    np.testing.assert_array_equal(got.outside[::9], 0)  # nothing kept means everything kept
    np.testing.assert_allclose(got.logp[1::9], 0, atol=1e-6)  # a support of one: certain


def test_greedy_is_reported_at_temperature_one():
    zero, one = np.zeros(N, np.float32), np.ones(N, np.float32)
    for at_zero, at_one in zip(
        token_stats(LOGITS, TOKENS, zero), token_stats(LOGITS, TOKENS, one), strict=True
    ):
        np.testing.assert_array_equal(at_zero, at_one)


@pytest.mark.parametrize("log_sum_exp", [logprobs._log_sum_exp, logprobs._in_one_pass])
def test_log_of_a_sum_at_the_ends_of_float32(log_sum_exp):
    """Neither overflow, nor a largest value that comes last, nor a row without any possible id."""
    rows = [[3e38, 3e38, -3e38], [-3e38, -3e38, -np.inf], [-np.inf] * 3, [-200.0, 0.0, 1000.0]]
    got = log_sum_exp(jnp.asarray(rows, jnp.float32))
    np.testing.assert_array_equal(got, np.array([3e38, -3e38, -np.inf, 1000.0], np.float32))


@pytest.mark.usefixtures("log_sum")
def test_impossible_ids_take_no_part():
    """Logits of -inf, as beyond a tokenizer's vocabulary: out of the sums, and no NaN anywhere."""
    padded = np.concatenate([LOGITS, np.full((N, 7), -np.inf, np.float32)], axis=1)
    t = np.ones(N, np.float32)
    support = supports(np.arange(N) % 9, 8)

    def of(z: jax.Array, kept: np.ndarray | None) -> tuple[jax.Array, TokenStats]:
        stats = token_stats(z, TOKENS, t, kept)
        return stats.logp.sum() + stats.entropy.sum() + stats.outside.sum(), stats

    for kept in (None, support):
        slope, stats = jax.jit(jax.grad(of, has_aux=True))(padded, kept)
        assert_stats(stats, reference.token_stats(LOGITS, TOKENS, t.astype(np.float64), kept))
        assert np.isfinite(slope).all()


@pytest.mark.usefixtures("log_sum")
@pytest.mark.parametrize("has_support", [False, True])
def test_gradient_of_the_log_prob(has_support: bool):
    """d logp / d z = (onehot - q) / T, q the renormalised distribution."""
    t = RNG.uniform(0.5, 1.5, N).astype(np.float32)
    support = supports(1 + np.arange(N) % 8, 8) if has_support else None
    slope = jax.jit(jax.grad(lambda z: token_stats(z, TOKENS, t, support).logp.sum()))(LOGITS)
    for i in range(N):
        kept = np.arange(V) if support is None else support[i][support[i] >= 0]
        q = np.zeros(V)
        q[kept] = np.exp(reference.log_softmax(LOGITS[i, kept].astype(np.float64) / t[i]))
        np.testing.assert_allclose(slope[i], (np.eye(V)[TOKENS[i]] - q) / t[i], atol=2e-5)


# --- packed -----------------------------------------------------------------------------------------------

SEGMENTS = segments_of(((5, 4), (3, 6), (9,)))
POSITIONS = positions_of(SEGMENTS)
HIDDEN = RNG.normal(size=(*SEGMENTS.shape, 6)).astype(np.float32)
PREVIOUS = np.where(POSITIONS > 0, np.arange(SEGMENTS.shape[1]) - 1, -1)
HEAD = RNG.normal(size=(6, V)).astype(np.float32)
IDS = RNG.integers(0, V, SEGMENTS.shape).astype(np.int32)
TEMPERATURE = RNG.uniform(0.5, 1.5, SEGMENTS.shape).astype(np.float32)
SUPPORT = np.argsort(RNG.normal(size=(*SEGMENTS.shape, V)))[..., :5].astype(np.int32)


def packed(hidden: np.ndarray, ids: np.ndarray, chunk: int, support: np.ndarray | None = None) -> TokenStats:
    asked = PackedTokens(ids, PREVIOUS, SEGMENTS > 0, TEMPERATURE, support)
    return jax.jit(packed_stats, static_argnums=(0, 4))(head, HEAD, hidden, asked, chunk)


def head(weight: jax.Array, hidden: jax.Array) -> jax.Array:
    return hidden @ weight


@pytest.mark.parametrize("support", [None, SUPPORT], ids=["full", "support"])
def test_token_t_is_described_by_the_hidden_state_before_it(support: np.ndarray | None):
    got = [np.asarray(x) for x in packed(HIDDEN, IDS, 1000, support)]
    for row, column in np.argwhere(POSITIONS > 0):
        want = reference.token_stats(
            (HIDDEN[row, column - 1].astype(np.float64) @ HEAD)[None],
            IDS[row, column][None],
            TEMPERATURE[row, column][None],
            None if support is None else support[row, column][None],
        )
        for value, expected in zip(got, want, strict=True):
            np.testing.assert_allclose(value[row, column], expected[0], atol=2e-5)


def test_a_first_token_has_no_log_prob_and_reads_no_neighbour():
    """Change segment 1 (row 0): not one bit of segment 2, which begins where it ends, may move."""
    before = packed(HIDDEN, IDS, 8)
    is_first = SEGMENTS == 1
    rng = np.random.default_rng(1)
    hidden = np.where(is_first[..., None], rng.normal(size=HIDDEN.shape), HIDDEN).astype(np.float32)
    after = packed(hidden, np.where(is_first, 0, IDS).astype(np.int32), 8)
    for one, other in zip(before, after, strict=True):
        assert np.asarray(one)[~is_first].tobytes() == np.asarray(other)[~is_first].tobytes()
    assert np.abs(np.asarray(before.logp - after.logp)[is_first]).max() > 0.1
    first = (POSITIONS == 0) & (SEGMENTS > 0)
    np.testing.assert_array_equal(np.asarray(before.logp)[first], 0)


MASK = (SEGMENTS > 0) & (np.arange(SEGMENTS.shape[1]) % 3 > 0)
"""A token in three is a prompt's; rows hold different numbers of loss tokens."""


def dense_stats(hidden: jax.Array, weight: jax.Array, support: np.ndarray | None) -> TokenStats:
    """The same from all logits at once, by autodiff."""
    before = jnp.take_along_axis(hidden, np.maximum(PREVIOUS, 0)[..., None], axis=1)
    flat = support if support is None else support.reshape(-1, support.shape[-1])
    stats = token_stats((before @ weight).reshape(-1, V), IDS.reshape(-1), TEMPERATURE.reshape(-1), flat)
    counts = MASK & (PREVIOUS >= 0)
    return TokenStats(*(jnp.where(counts, x.reshape(IDS.shape), 0) for x in stats))


@pytest.mark.parametrize("has_entropy_gradient", [False, True])
@pytest.mark.parametrize("support", [None, SUPPORT], ids=["full", "support"])
@pytest.mark.parametrize(
    "chunk", [pytest.param(1, marks=pytest.mark.slow), 7, pytest.param(1000, marks=pytest.mark.slow)]
)
def test_chunks_change_nothing_beyond_rounding(
    chunk: int, support: np.ndarray | None, has_entropy_gradient: bool
):
    """Values, and slopes of hidden states and of the head, beside autodiff over all logits at once."""
    slopes = RNG.normal(size=(2, *IDS.shape)).astype(np.float32)

    def value(stats: TokenStats, slopes: jax.Array) -> tuple[jax.Array, TokenStats]:
        total = (slopes[0] * stats.logp).sum() + stats.outside.sum() * 0
        return total + (slopes[1] * stats.entropy).sum() * has_entropy_gradient, stats

    def chunked(hidden: jax.Array, weight: jax.Array, slopes: jax.Array) -> tuple[jax.Array, TokenStats]:
        asked = PackedTokens(IDS, PREVIOUS, MASK, TEMPERATURE, support)
        stats = packed_stats(head, weight, hidden, asked, chunk, has_entropy_gradient=has_entropy_gradient)
        return value(stats, slopes)

    def dense(hidden: jax.Array, weight: jax.Array, slopes: jax.Array) -> tuple[jax.Array, TokenStats]:
        return value(dense_stats(hidden, weight, support), slopes)

    got, want = (
        jax.jit(jax.grad(of, argnums=(0, 1), has_aux=True))(HIDDEN, HEAD, slopes) for of in (chunked, dense)
    )
    assert np.abs(np.asarray(want[0][1])).max() > 0.1
    chex.assert_trees_all_close(got, want, rtol=0, atol=1e-5)


def test_entropy_and_mass_outside_carry_no_gradient_unasked():
    def of(hidden: jax.Array) -> jax.Array:
        asked = PackedTokens(IDS, PREVIOUS, MASK, TEMPERATURE, SUPPORT)
        stats = packed_stats(head, HEAD, hidden, asked, 7)
        return (stats.entropy + stats.outside).sum()

    assert of(HIDDEN) > 1
    np.testing.assert_array_equal(jax.jit(jax.grad(of))(HIDDEN), 0)


def test_only_chunks_that_hold_loss_tokens_are_computed():
    """A chunk of a column a row: as many as the fullest row has loss tokens, twice with the backward pass."""
    calls: list[int] = []

    def counted(weight: jax.Array, hidden: jax.Array) -> jax.Array:
        jax.debug.callback(lambda: calls.append(len(hidden)))
        return hidden @ weight

    def of(hidden: jax.Array, mask: np.ndarray) -> jax.Array:
        asked = PackedTokens(IDS, PREVIOUS, mask, TEMPERATURE)
        return packed_stats(counted, HEAD, hidden, asked, 3).logp.sum()

    slope = jax.jit(jax.grad(of))
    for mask in (SEGMENTS > 0, MASK, np.zeros_like(MASK)):
        calls.clear()
        jax.block_until_ready(slope(HIDDEN, mask))
        jax.effects_barrier()
        assert calls == [3] * 2 * (mask & (PREVIOUS >= 0)).sum(1).max()


def test_hidden_states_that_no_loss_token_reads_do_not_matter():
    """NaN there, in a row without loss tokens too, reaches neither a value nor a slope."""
    mask = MASK.copy()
    mask[1] = False
    read = np.zeros(IDS.shape, bool)
    for row, column in np.argwhere(mask & (PREVIOUS >= 0)):
        read[row, PREVIOUS[row, column]] = True
    hidden = np.where(read[..., None], HIDDEN, np.nan).astype(np.float32)

    def of(hidden: jax.Array, weight: jax.Array) -> jax.Array:
        asked = PackedTokens(IDS, PREVIOUS, mask, TEMPERATURE)
        return packed_stats(head, weight, hidden, asked, 9).logp.sum()

    value, slopes = jax.jit(jax.value_and_grad(of, argnums=(0, 1)))(hidden, HEAD)
    assert np.isfinite(value)
    assert np.isfinite(slopes[1]).all()
    assert (np.asarray(slopes[0]) != 0).any(-1).tolist() == read.tolist()
