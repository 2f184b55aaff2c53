"""The draw: kept sets against a sort-based float64 oracle, frequencies by chi-square, keys as counters."""

from __future__ import annotations

import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from areal_jax.algorithms.sampling import (
    EVERY,
    IN_COMPLETION,
    IN_PROMPT,
    RequestPenalty,
    Settings,
    Truncation,
    _least_kept,
    _likeliest,
    _pick,
    draw,
    penalized,
    require_counted_randomness,
    sample_key,
    uniforms,
)
from areal_jax.types import ArealError, Sampling

SLOTS, VOCABULARY = 4, 24
KEY, UNIFORMS = [1830458104, 1425310503], [0.696926474571228, 0.2635657787322998]
"""Of (seed 1, ordinal 2, member 3, attempt 0) and position 5."""

LARGEST = np.float32(1 - 2**-24)
"""The largest float32 below 1: no uniform is larger."""

DRAWS = 20_000


@partial(jax.jit, static_argnums=(6, 7, 8))
def jitted(logits, randoms, temperature, top_k, top_p, min_p, support_size, *program):
    return draw(logits, randoms, Settings(temperature, top_k, top_p, min_p), support_size, *program)


thresholds = jax.jit(_least_kept, static_argnums=(2, 3))


def kept_by_sorting(z: np.ndarray, top_k: int, top_p: float, min_p: float) -> set[int]:
    """Top-k, then top-p of what is left, then min-p; ties at a threshold are kept. By sorting, in float64."""
    order = np.argsort(-z, kind="stable")
    kept = z >= z[order[min(top_k, len(z)) - 1]] if top_k else np.ones(len(z), bool)
    p = np.where(kept, np.exp(z - z.max()), 0)
    p /= p.sum()
    reached = np.cumsum(p[order]) >= top_p
    if top_p < 1 and reached.any():
        kept &= z >= z[order[np.argmax(reached)]]
    return set(np.flatnonzero(kept & (p >= min_p * p.max())).tolist())


def supports(z: np.ndarray, top_k: list[int], top_p: list[float], min_p: list[float]) -> list[set[int]]:
    _, ids = jitted(
        z.astype(np.float32),
        np.full((len(z), 2), 0.5, np.float32),
        np.ones(len(z), np.float32),
        np.array(top_k, np.int32),
        np.array(top_p, np.float32),
        np.array(min_p, np.float32),
        z.shape[1],
    )
    return [set(row[row >= 0].tolist()) for row in np.asarray(ids)]


# Logits on a grid, so that many are equal; top-p and min-p at values that no partial sum meets by rounding.
grid = arrays(np.float64, (SLOTS, VOCABULARY), elements=st.integers(-8, 8).map(lambda i: i / 2))
of_logits_and_cuts = given(
    grid,
    st.lists(st.integers(0, VOCABULARY + 3), min_size=SLOTS, max_size=SLOTS),
    st.lists(st.sampled_from([1.0, 0.9137, 0.5171, 0.0731]), min_size=SLOTS, max_size=SLOTS),
    st.lists(st.sampled_from([0.0, 0.0317, 0.2713]), min_size=SLOTS, max_size=SLOTS),
)


@pytest.mark.slow
@of_logits_and_cuts
@settings(max_examples=150)
def test_kept_sets_equal_those_found_by_sorting(z, top_k, top_p, min_p):
    is_cut = [k > 0 or p < 1 or m > 0 for k, p, m in zip(top_k, top_p, min_p, strict=True)]
    expected = [
        kept_by_sorting(z[i], top_k[i], top_p[i], min_p[i]) if is_cut[i] else set() for i in range(SLOTS)
    ]
    assert supports(z, top_k, top_p, min_p) == expected


@of_logits_and_cuts
@settings(max_examples=150)
def test_a_search_of_fixed_length_finds_the_same_sets(z, top_k, top_p, min_p):
    cut = Settings(
        np.ones(SLOTS, np.float32),
        np.array(top_k, np.int32),
        np.array(top_p, np.float32),
        np.array(min_p, np.float32),
    )
    least = np.asarray(thresholds(z.astype(np.float32), cut, EVERY, False))
    for row in range(SLOTS):
        expected = kept_by_sorting(z[row], top_k[row], top_p[row], min_p[row])
        assert set(np.flatnonzero(z[row] >= least[row]).tolist()) == expected


@pytest.mark.parametrize("first", [-3.7, -1e-30, 0.1, 5.3, 7e20])
@pytest.mark.parametrize("ends_early", [True, False])
def test_a_search_separates_neighbouring_floats(first, ends_early):
    """32 halvings: with one less, some of these ids are kept beside those that top-k keeps."""
    z = np.empty((8, 12), np.float32)
    z[:, 0] = np.arange(8) * np.float32(first) / 8 + np.float32(first)
    for i in range(1, 12):
        z[:, i] = np.nextafter(z[:, i - 1], np.float32(np.inf))
    one = np.ones(8, np.float32)
    cut = Settings(one, np.arange(1, 9, dtype=np.int32), one, 0 * one)
    least = np.asarray(thresholds(z, cut, Truncation(True, True, False), ends_early))
    np.testing.assert_array_equal((z >= least[:, None]).sum(-1), np.arange(1, 9))


@pytest.mark.parametrize("support_size", [0, 8])
@pytest.mark.parametrize(
    "cut",
    [
        (0, 1.0, 0.0),
        *(
            pytest.param(cut, marks=pytest.mark.slow)
            for cut in ((5, 1.0, 0.0), (0, 0.9137, 0.0), (0, 1.0, 0.0317))
        ),
        (5, 0.9137, 0.0317),
    ],
)
def test_every_program_with_a_samples_truncations_draws_the_same_tokens(cut, support_size):
    """Also by the program without others, and by a GPU's; among ties, and with 300 ids in three blocks."""
    rng = np.random.default_rng(16)
    z = (rng.integers(-12, 9, (64, 300)) / 2).astype(np.float32)
    randoms, one = rng.random((64, 2), np.float32), np.ones(64, np.float32)
    rows = z, randoms, one, np.full(64, cut[0], np.int32), cut[1] * one, cut[2] * one
    tokens, support = jitted(*rows, support_size)
    own = Truncation.of(Sampling(1.0, *cut))
    assert own.is_any == any(own[1:]) or cut[2]
    for truncation, ends_early in ((own, True), (own, False), (EVERY, False)):
        others, their_support = jitted(*rows, support_size, truncation, ends_early)
        np.testing.assert_array_equal(others, tokens)
        if support_size:
            np.testing.assert_array_equal(their_support, support)
    kept = [kept_by_sorting(row, *cut) for row in z.astype(float)]
    assert all(int(token) in ids for token, ids in zip(tokens, kept, strict=True))
    assert any(len(ids) < 300 for ids in kept) == any(own)


@given(
    grid,
    st.integers(0, 9),
    st.sampled_from([1.0, 0.9137, 0.5171, 0.0731]),
    st.sampled_from([0.0, 0.0317, 0.2713]),
)
@settings(max_examples=100)
def test_a_small_support_is_the_front_of_what_sorting_keeps(z, top_k, top_p, min_p):
    """Six ids at most: top-k is at most six, ties beyond the sixth have mass and no room."""
    tokens, ids = jitted(
        z.astype(np.float32),
        np.full((SLOTS, 2), 0.5, np.float32),
        np.ones(SLOTS, np.float32),
        np.full(SLOTS, top_k, np.int32),
        np.full(SLOTS, top_p, np.float32),
        np.full(SLOTS, min_p, np.float32),
        6,
    )
    for row in range(SLOTS):
        kept = kept_by_sorting(z[row], min(top_k or 6, 6), top_p, min_p)
        front = sorted(kept, key=lambda i: (-z[row, i], i))[:6]
        found = [i for i in np.asarray(ids)[row].tolist() if i >= 0]
        if top_k or top_p < 1 or min_p:
            assert found == front and int(tokens[row]) in front
        else:
            assert found == []


@pytest.mark.slow
@given(arrays(np.float32, (3, 300), elements=st.integers(-3, 3).map(np.float32)), st.booleans())
def test_the_likeliest_is_the_first_of_equals(z, is_masked):
    if is_masked:
        z[:, 280:] = -np.inf
    np.testing.assert_array_equal(jax.jit(_likeliest)(z), z.argmax(-1))


def test_penalties_are_those_of_a_loop_in_numpy():
    """A CTRL penalty above and below 0 of ids of prompt and completion, presence of those of the completion
    alone, and bias whether seen or not."""
    rng = np.random.default_rng(13)
    logits, bias = rng.normal(size=(2, 3, 40)).astype(np.float32)
    occurs = rng.choice([0, IN_PROMPT, IN_COMPLETION], (3, 40)).astype(np.int32)
    repetition, presence = np.array([1.0, 1.3, 0.8], np.float32), np.array([0.0, 0.5, -0.25], np.float32)
    want = np.zeros((3, 40))
    for i, j in np.ndindex(3, 40):
        want[i, j] = logits[i, j]
        if occurs[i, j]:
            want[i, j] *= repetition[i] if want[i, j] < 0 else 1 / repetition[i]
        if occurs[i, j] == IN_COMPLETION:
            want[i, j] -= presence[i]
        want[i, j] += bias[i, j]
    penalty = RequestPenalty(repetition, presence, bias)
    np.testing.assert_allclose(penalized(logits, occurs, penalty), want, rtol=1e-6)
    neutral = RequestPenalty(np.ones(3), np.zeros(3), np.zeros((3, 40)))
    np.testing.assert_array_equal(penalized(logits, occurs, neutral), logits)


def test_zero_and_minus_zero_tie():
    z = np.full((1, VOCABULARY), -3.0)
    z[0, 4], z[0, 9] = 0.0, -0.0
    assert supports(z, [1], [1.0], [0.0]) == [{4, 9}]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_support_too_small_for_its_ties_is_what_the_token_is_drawn_from(temperature):
    z = np.zeros((64, VOCABULARY), np.float32)
    one = np.ones(64, np.float32)
    randoms = np.random.default_rng(0).random((64, 2), np.float32)
    tokens, ids = jitted(z, randoms, temperature * one, np.full(64, 2, np.int32), one, 0 * one, 3)
    np.testing.assert_array_equal(ids, np.tile([0, 1, 2], (64, 1)))
    assert set(np.asarray(tokens).tolist()) == ({0, 1, 2} if temperature else {0})


def test_nothing_cut_returns_no_support_also_beside_a_slot_that_is_cut():
    z = np.random.default_rng(1).normal(size=(2, VOCABULARY))
    first, second = supports(z, [0, 3], [1.0, 1.0], [0.0, 0.0])
    assert first == set()
    assert second == kept_by_sorting(z[1], 3, 1.0, 0.0)


def test_no_sort_of_the_vocabulary():
    """Neither as written nor as compiled: a sort of 152 k logits would cost more than the model's head."""
    n = jax.ShapeDtypeStruct((SLOTS,), jnp.float32)
    shapes = (
        jax.ShapeDtypeStruct((SLOTS, 1024), jnp.float32),
        jax.ShapeDtypeStruct((SLOTS, 2), jnp.float32),
        Settings(n, jax.ShapeDtypeStruct((SLOTS,), jnp.int32), n, n),
    )
    sorts = []
    for support_size in (0, 8):
        function = partial(draw, support_size=support_size)
        text = str(jax.make_jaxpr(function)(*shapes)) + jax.jit(function).lower(*shapes).compile().as_text()
        sorts.append(re.search(r"\b(sort|top_k|topk)[\[(]", text, re.IGNORECASE))
    assert sorts[0] is None
    assert sorts[1] is not None  # it is the program's text that was searched


# --- the draw -----------------------------------------------------------------------------------------------


def drawn(z: np.ndarray, count: int, seed: int, **cut: float) -> np.ndarray:
    """`count` tokens from one row of logits, with the randomness of `count` positions of one sample."""
    z = np.broadcast_to(np.asarray(z, np.float32), (count, len(z)))
    return np.asarray(
        jitted(
            z,
            uniforms(jnp.tile(sample_key(seed, 0, 0, 0), (count, 1)), jnp.arange(count)),
            np.full(count, cut.get("temperature", 1.0), np.float32),
            np.full(count, cut.get("top_k", 0), np.int32),
            np.full(count, cut.get("top_p", 1.0), np.float32),
            np.full(count, cut.get("min_p", 0.0), np.float32),
            0,
        )[0]
    )


def chi_square(counts: np.ndarray, p: np.ndarray) -> float:
    """Standard deviations of chi-square above its mean; normal for many bins, nearly so for 20."""
    expected = counts.sum() * p
    degrees = len(p) - 1
    return (((counts - expected) ** 2 / expected).sum() - degrees) / np.sqrt(2 * degrees)


@pytest.mark.parametrize("temperature", [0.7, 1.0, 1.3])
def test_frequencies_are_those_of_the_softmax(temperature):
    z = np.random.default_rng(2).normal(0, 1, 20)
    p = np.exp(z / temperature)
    counts = np.bincount(drawn(z, DRAWS, 3, temperature=temperature), minlength=20)
    assert abs(chi_square(counts, p / p.sum())) < 4
    q = np.exp(z / (temperature * 1.1))  # the same counts tell a tenth more temperature apart
    assert chi_square(counts, q / q.sum()) > 6


def test_frequencies_of_a_truncated_draw():
    z = np.random.default_rng(4).normal(0, 1, 20)
    kept = sorted(kept_by_sorting(z.astype(np.float32).astype(float), 12, 0.8, 0.05))
    assert 3 < len(kept) < 12
    p = np.exp(z[kept])
    tokens = drawn(z, DRAWS, 5, top_k=12, top_p=0.8, min_p=0.05)
    counts = np.bincount(tokens, minlength=20)
    assert counts.sum() == counts[kept].sum()
    assert abs(chi_square(counts[kept], p / p.sum())) < 4


@pytest.mark.parametrize("cut", [dict(top_k=4), dict(top_p=0.7), dict(min_p=0.2), dict(top_k=9, min_p=0.2)])
def test_each_truncation_cuts_by_itself(cut):
    """Without a recorded support, as on a server: exactly the ids that sorting keeps are drawn."""
    z = np.random.default_rng(17).normal(0, 1, 20)
    full = {"top_k": 0, "top_p": 1.0, "min_p": 0.0} | cut
    kept = kept_by_sorting(z.astype(np.float32).astype(float), *full.values())
    assert len(kept) < 10
    assert set(drawn(z, DRAWS, 18, **cut).tolist()) == kept


def test_frequencies_at_a_vocabulary_of_152064_with_its_tail():
    """Half the mass lies on 150 k ids of 3e-6 each: one uniform over one float32 sum would lose steps."""
    vocabulary, head, rows, count = 152_064, 2_064, 8, 16_000
    rng = np.random.default_rng(6)
    p = np.concatenate(
        [rng.dirichlet(np.ones(head)) / 2, np.full(vocabulary - head, 0.5 / (vocabulary - head))]
    )
    place = rng.permutation(vocabulary)
    z = np.log(p)[place].astype(np.float32)
    cut = (
        np.ones(rows, np.float32),
        np.zeros(rows, np.int32),
        np.ones(rows, np.float32),
        np.zeros(rows, np.float32),
    )
    many = jax.jit(
        lambda randoms: jax.lax.map(lambda r: draw(jnp.tile(z, (rows, 1)), r, Settings(*cut), 0)[0], randoms)
    )
    keys = jnp.tile(sample_key(7, 0, 0, 0), (count, 1))
    tokens = np.asarray(many(uniforms(keys, jnp.arange(count)).reshape(-1, rows, 2))).reshape(-1)
    bins = np.where(place < head, place % 16, 16 + place % 64)  # 16 bins of the head, 64 of the tail
    counts = np.bincount(bins[tokens], minlength=80)
    assert abs(chi_square(counts, np.bincount(bins, weights=p[place]))) < 4
    assert abs(counts[16:].sum() / count - 0.5) < 4 * 0.5 / np.sqrt(count)


@pytest.mark.parametrize("size", [1, 2, 128, 1188])
def test_an_id_of_probability_0_is_never_picked(size):
    """Also at the edges: the largest uniform, 0, and uniforms at a partial sum, where rounding decides."""
    rng = np.random.default_rng(8)
    n = 2000
    weights = np.exp(rng.normal(0, 4, (n, size))) * (rng.random((n, size)) < 0.3)
    weights[np.arange(n), rng.integers(0, size, n)] += 1e-3  # nobody is without weight
    weights = weights.astype(np.float32)
    below = np.asarray(jnp.cumsum(weights, axis=-1))
    at = rng.integers(0, size, n)
    edge = (below[np.arange(n), at] / below[:, -1]).astype(np.float32)
    edges = [np.full(n, LARGEST), np.zeros(n, np.float32)]
    edges += [np.clip(np.nextafter(edge, np.float32(to)), 0, LARGEST) for to in (-1, 2)]
    for random in (*edges, np.minimum(edge, LARGEST)):
        picked = np.asarray(jax.jit(_pick)(weights, random))
        assert (weights[np.arange(n), picked] > 0).all()


def test_ids_beyond_the_tokenizer_are_never_drawn():
    z = np.full(300, -np.inf)
    z[[0, 130, 299 - 30]] = [0.0, 0.0, -5.0]
    assert set(drawn(z, 4000, 9).tolist()) == {0, 130, 269}


def test_temperature_0_is_greedy_whatever_the_randomness():
    z = np.random.default_rng(10).normal(size=20)
    assert set(drawn(z, DRAWS, 11, temperature=0.0).tolist()) == {int(z.argmax())}
    assert set(drawn(z, DRAWS, 11, temperature=0.0, top_k=3).tolist()) == {int(z.argmax())}


def test_greedy_is_the_limit_of_a_falling_temperature():
    z = np.random.default_rng(14).normal(size=200)
    shares = [(drawn(z, 2000, 15, temperature=t) == z.argmax()).mean() for t in (1.0, 0.3, 0.1, 0.01, 1e-4)]
    assert shares == sorted(shares) and shares[0] < 0.1 and shares[-1] == 1


# --- counted randomness -------------------------------------------------------------------------------------


def test_uniforms_are_a_function_of_five_numbers_and_all_differ():
    numbers = [
        (seed, ordinal, member, attempt, position)
        for seed in (0, 1)
        for ordinal in (0, 1, 2)
        for member in (0, 1, 2)
        for attempt in (0, 1)
        for position in range(8)
    ]
    keys = np.stack([sample_key(*five[:4]) for five in numbers])
    positions = np.array([five[4] for five in numbers])
    values = np.asarray(uniforms(jnp.asarray(keys), jnp.asarray(positions)))
    assert values.shape == (len(numbers), 2)
    assert len({tuple(pair) for pair in values.tolist()}) == len(numbers)
    shuffled = np.random.default_rng(12).permutation(len(numbers))
    again = np.asarray(uniforms(jnp.asarray(keys[shuffled]), jnp.asarray(positions[shuffled])))
    np.testing.assert_array_equal(again, values[shuffled])


def test_keys_and_uniforms_do_not_change_with_a_release_of_jax():
    """Typed in: a journal's samples must be drawn again by whoever replays it."""
    np.testing.assert_array_equal(sample_key(1, 2, 3, 0), KEY)
    np.testing.assert_allclose(
        uniforms(jnp.asarray([KEY], jnp.uint32), jnp.array([5])), [UNIFORMS], rtol=1e-7
    )


def test_the_default_generator_of_jax_does_not_matter():
    with jax.default_prng_impl("rbg"):
        np.testing.assert_array_equal(sample_key(1, 2, 3, 0), KEY)


def test_sharded_draws_need_counted_randomness():
    require_counted_randomness()
    with (
        jax.threefry_partitionable(False),
        pytest.raises(ArealError, match="with jax_threefry_partitionable=False"),
    ):
        require_counted_randomness()
