"""The engine against dense forwards, itself with other neighbours, and JetStream's interface."""

from __future__ import annotations

import inspect

import jax
import numpy as np
import pytest

from areal_jax.algorithms.sampling import GENERATOR, sample_key
from areal_jax.generation.canary import TOKENS as CANARY_TOKENS
from areal_jax.generation.engine import Engine
from areal_jax.generation.slots import MAX_STOP_TOKENS, ExistingPrefix
from areal_jax.types import ArealError, SampleId, Sampling, VersionedParams
from areal_jax.weights.memory import MemoryStore
from tests.generation.conftest import LENGTH, SLOTS, STEPS, SUPPORT, make_engine
from tests.generation.decoding import Asked, Heard, decode, fill, make_host, start

PROMPT = (5, 9, 2, 14, 3, 3, 7)
EOS = 1


def asked(member: int, prompt=PROMPT, stops=(), **sampling) -> Asked:
    return Asked(prompt, SampleId(3, member), Sampling(**{"max_tokens": 64, **sampling}), stops)


# --- log-probs ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "shape", ["pages and chunks", "one page", pytest.param("uneven chunks", marks=pytest.mark.slow)]
)
def test_recorded_logp_is_that_of_a_dense_forward(model, engine, one_page_engine, versions, dense, shape):
    """Prefill, pages and decode steps are another way to compute what the trainer computes."""
    if shape == "one page":
        engine = one_page_engine
    elif shape == "uneven chunks":
        engine = make_engine(model, page_tokens=4, prefill_chunk=3)
    temperatures = [0.7, 1.0, 1.3, 1.0, 0.0]
    slots = {i: asked(i, PROMPT[: 1 + i], temperature=t) for i, t in enumerate(temperatures)}
    done = decode(engine, versions(0), slots)
    for trajectory in done.values():
        assert len(trajectory.tokens) == LENGTH
        gap = np.abs(trajectory.behavior_logp - dense(versions(0).params, trajectory))
        assert gap[trajectory.loss_mask].max() < 1e-5


@pytest.mark.slow
def test_recorded_logp_over_a_support_is_that_of_a_dense_forward(support_engine, versions, dense):
    cuts = [
        dict(top_k=SUPPORT, top_p=0.8, temperature=0.7),
        dict(top_k=SUPPORT, min_p=0.05, temperature=1.3),
        dict(top_k=SUPPORT, top_p=0.8, min_p=0.05),
        dict(top_k=2),
        dict(temperature=1.3),
    ]
    done = decode(support_engine, versions(0), {i: asked(i, **cut) for i, cut in enumerate(cuts)})
    for i, trajectory in done.items():
        sampled = trajectory.loss_mask
        gap = np.abs(trajectory.behavior_logp - dense(versions(0).params, trajectory))
        assert gap[sampled].max() < 1e-5
        assert trajectory.support is not None
        support, tokens = trajectory.support[sampled], trajectory.tokens[sampled]
        if i == 4:  # nothing cut: every id
            assert (support == -1).all()
        else:
            assert (support == tokens[:, None]).any(axis=1).all()
            assert ((support >= 0).sum(axis=1) <= cuts[i]["top_k"]).all()
    sizes = (done[2].support[done[2].loss_mask] >= 0).sum(axis=1)
    assert sizes.min() < SUPPORT  # top-p and min-p cut further
    assert ((done[3].support[done[3].loss_mask] >= 0).sum(axis=1) == 2).all()


def test_only_ids_of_the_tokenizer_are_sampled(model, engine, versions):
    done = decode(engine, versions(0), {i: asked(i, temperature=50.0) for i in range(SLOTS)})
    tokens = np.concatenate([t.tokens[t.loss_mask] for t in done.values()])
    assert len(set(tokens.tolist())) > 10
    assert tokens.max() < model.tokenizer.vocab_size


def test_temperature_0_takes_the_likeliest(model, engine, versions):
    """The greedy continuation, one dense forward a token."""
    import jax.numpy as jnp

    from areal_jax.models.attention import PackedAttention

    @jax.jit
    def likeliest(tokens):
        hidden, _ = model.hidden(
            versions(0).params, tokens, jnp.arange(LENGTH)[None], PackedAttention(jnp.ones_like(tokens))
        )
        return model.logits(versions(0).params, hidden[0]).argmax(-1)

    tokens = np.zeros((1, LENGTH), np.int32)
    tokens[0, : len(PROMPT)] = PROMPT
    for at in range(len(PROMPT), LENGTH):
        tokens[0, at] = likeliest(tokens)[at - 1]
    greedy = decode(engine, versions(0), {1: asked(0, temperature=0.0)})[1]
    np.testing.assert_array_equal(greedy.tokens, tokens[0])


# --- neighbours ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cut", [{}, dict(top_k=4, top_p=0.8)])
def test_a_sample_does_not_change_by_a_bit_with_its_slot_or_its_neighbours(
    engine, support_engine, versions, cut
):
    used = support_engine if cut else engine
    mine = asked(0, **cut)
    alone = decode(used, versions(0), {0: mine})[0]
    others = {
        "elsewhere": {SLOTS - 1: mine},
        "longer": {0: asked(7, PROMPT * 4), 2: mine, 4: asked(8, PROMPT * 3, temperature=0.5)},
        "ended": {1: asked(9, max_tokens=1), 3: mine, 0: asked(6, (4,), max_tokens=3)},
        "same": dict.fromkeys(range(SLOTS), mine),
        # Another program, which also searches for thresholds.
        "cut": {1: asked(7, top_p=0.7), 2: mine, 3: asked(8, top_k=3, min_p=0.1)},
    }
    for slots in others.values():
        done = decode(used, versions(0), slots)
        for slot in [slot for slot, other in slots.items() if other is mine]:
            np.testing.assert_array_equal(done[slot].tokens, alone.tokens)
            np.testing.assert_array_equal(
                done[slot].behavior_logp.view(np.int32), alone.behavior_logp.view(np.int32)
            )


def test_seed_member_and_attempt_draw_anew(engine, versions):
    one = decode(engine, versions(0), {0: asked(0), 1: asked(1), 2: Asked(PROMPT, SampleId(3, 0, 1))})
    other = decode(engine, versions(0), {0: asked(0)}, seed=1)
    texts = {tuple(t.tokens.tolist()) for t in (*one.values(), *other.values())}
    assert len(texts) == 4


@pytest.mark.slow
def test_a_host_of_two_devices_samples_what_one_device_does(model, engine, versions, dense):
    """Heads, MLP and vocabulary over two devices; randomness is counted, so it does not see them."""
    mesh = jax.sharding.Mesh(np.array(jax.devices()[2:4]), ("tensor",))
    sharded = make_engine(model, mesh=mesh)
    params = sharded.load_params(versions(0))
    assert params.params["blocks"]["mlp"]["up"].sharding.spec[2] == "tensor"
    slots = {0: asked(0), 3: asked(1, PROMPT * 2)}
    one, two = decode(engine, versions(0), slots), decode(sharded, params, slots)
    for slot in slots:
        np.testing.assert_array_equal(two[slot].tokens, one[slot].tokens)
        np.testing.assert_allclose(two[slot].behavior_logp, one[slot].behavior_logp, atol=1e-5)
    programs = [sharded.jitted.prefill, sharded.jitted.insert, sharded.jitted.generate]
    assert [program._cache_size() for program in programs] == [1, 2, 1]  # prompts of one page, and of two


# --- ends and limits ----------------------------------------------------------------------------------------


def test_a_stop_token_ends_a_sample_and_is_its_last(engine, versions):
    free = decode(engine, versions(0), {0: asked(0)})[0].tokens
    stop = int(free[len(PROMPT) + 5])
    place = int(np.flatnonzero(free[len(PROMPT) :] == stop)[0]) + len(PROMPT)
    stopped = decode(engine, versions(0), {0: asked(0, stops=(20, stop, 21))})[0]
    np.testing.assert_array_equal(stopped.tokens, free[: place + 1])
    assert stopped.stop_reason == "stop"


@pytest.mark.parametrize("max_tokens", [1, 2, 3, 7])
def test_each_request_has_its_own_length(engine, versions, max_tokens):
    done = decode(engine, versions(0), {0: asked(0, max_tokens=max_tokens), 1: asked(0)})
    assert len(done[0].tokens) == len(PROMPT) + max_tokens
    assert len(done[1].tokens) == LENGTH
    np.testing.assert_array_equal(done[0].tokens, done[1].tokens[: len(PROMPT) + max_tokens])


def test_a_prompt_of_one_token_and_the_longest_prompt(engine, versions, dense):
    longest = tuple(int(i) for i in np.arange(LENGTH - 1) % 15)
    done = decode(engine, versions(0), {0: asked(0, (4,)), 1: asked(1, longest)})
    assert [len(done[i].tokens) for i in (0, 1)] == [LENGTH, LENGTH]
    assert [int(done[i].loss_mask.sum()) for i in (0, 1)] == [LENGTH - 1, 1]
    for trajectory in done.values():
        gap = np.abs(trajectory.behavior_logp - dense(versions(0).params, trajectory))
        assert gap[trajectory.loss_mask].max() < 1e-5


@pytest.mark.parametrize("length", [0, LENGTH, LENGTH + 5])
def test_a_prompt_that_does_not_fit_is_refused(engine, versions, length):
    with pytest.raises(ArealError, match=rf"a prompt of {length} tokens .* raise generation.length"):
        engine.prefill(params=versions(0), padded_tokens=np.ones(length, np.int32), true_length=length)


def test_what_cannot_be_served_is_refused(model, engine, versions):
    with pytest.raises(
        ArealError, match=f"{MAX_STOP_TOKENS + 1} stop_tokens are too many; give at most {MAX_STOP_TOKENS}"
    ):
        engine.request(SampleId(0, 0), 0, Sampling(), 3, tuple(range(MAX_STOP_TOKENS + 1)))
    with pytest.raises(ArealError, match="page_tokens=5 does not divide length=32"):
        make_engine(model, page_tokens=5)
    prefix = engine.prefill(params=versions(0), padded_tokens=np.array(PROMPT), true_length=len(PROMPT))
    other = ExistingPrefix(prefix.cache, np.array([1, 2]))
    with pytest.raises(ArealError, match="does not begin with the 2 tokens of existing_prefix"):
        engine.prefill(
            params=versions(0), padded_tokens=np.array(PROMPT), true_length=len(PROMPT), existing_prefix=other
        )


def test_a_released_slot_samples_nothing_more(engine, versions):
    state = fill(engine, versions(0), {0: asked(0), 1: asked(1)})
    state = engine.free_resource(0, state)
    state, results = engine.generate(versions(0), state)
    np.testing.assert_array_equal(results.rows["valid"].sum(axis=1), [0, STEPS, 0, 0, 0])
    np.testing.assert_array_equal(results.rows["is_live"], [False, True, False, False, False])


# --- JetStream's interface ----------------------------------------------------------------------------------


def parameters(member) -> list[str]:
    return [name for name in inspect.signature(member).parameters if name != "self"]


def test_the_twelve_members_have_jetstreams_names(model, engine, versions):
    calls = {
        "prefill": ["params", "padded_tokens", "true_length", "existing_prefix"],
        "insert": ["prefix", "decode_state", "slot"],
        "generate": ["params", "decode_state"],
        "init_decode_state": [],
        "get_tokenizer": [],
        "get_prefix_destination_sharding": [],
    }
    for name, expected in calls.items():
        given = parameters(getattr(Engine, name))
        assert given[: len(expected)] == expected
        rest = list(inspect.signature(getattr(Engine, name)).parameters.values())[1 + len(expected) :]
        variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
        assert all(p.default is not inspect.Parameter.empty or p.kind in variadic for p in rest)
    assert callable(engine.load_params)
    assert engine.tokenizer is model.tokenizer
    assert engine.get_tokenizer().path == ""
    assert (engine.max_concurrent_decodes, engine.samples_per_slot) == (SLOTS, 1)
    assert engine.max_prefill_length == LENGTH
    assert isinstance(engine.mesh, jax.sharding.Mesh)
    assert engine.colocated_cpus is None
    assert isinstance(engine.get_prefix_destination_sharding(), jax.sharding.Sharding)


def test_jetstreams_loop_decodes(engine, versions):
    """prefill, insert, generate with JetStream's arguments alone, and its first columns of the result."""
    params = engine.load_params(versions(0))
    state = engine.init_decode_state()
    padded = np.zeros(16, np.int32)
    padded[: len(PROMPT)] = PROMPT
    prefix = engine.prefill(params=params, padded_tokens=padded, true_length=len(PROMPT))
    state = engine.insert(prefix, state, slot=2)
    state, results = engine.generate(params, state)
    data = np.asarray(results.data)
    assert data.dtype == np.int32
    assert data.shape == (SLOTS, 3 * STEPS + 5)
    same = decode(engine, versions(0), {2: Asked(PROMPT, SampleId(0, 0))})[2].tokens
    np.testing.assert_array_equal(data[2, :STEPS], same[len(PROMPT) : len(PROMPT) + STEPS])
    np.testing.assert_array_equal(data[:, STEPS : 2 * STEPS].sum(axis=1), [0, 0, STEPS, 0, 0])
    assert data[2, 2 * STEPS] == STEPS  # of the completion, which is what JetStream counts


def test_load_params_places_the_value_on_the_engines_mesh(model, engine, versions):
    elsewhere = versions(0)._replace(params=jax.device_put(versions(0).params, jax.devices()[1]))
    loaded = engine.load_params(elsewhere)
    assert (loaded.version, loaded.digest) == (0, versions(0).digest)
    assert {d for leaf in jax.tree.leaves(loaded.params) for d in leaf.devices()} == {jax.devices()[0]}
    sharded = make_engine(model, mesh=jax.sharding.Mesh(np.array(jax.devices()[2:4]), ("tensor",)))
    loaded = sharded.load_params(elsewhere)
    for leaf, sharding in zip(
        jax.tree.leaves(loaded.params), jax.tree.leaves(sharded.param_shardings), strict=True
    ):
        assert leaf.sharding == sharding


# --- programs -----------------------------------------------------------------------------------------------


def test_a_seed_of_64_bits_counts_to_its_last_bit_and_one_of_31_draws_as_jaxs_own_key(one_page_engine):
    def key_of(seed: int) -> tuple[int, ...]:
        numbers = one_page_engine.request(SampleId(3, 2, 1), seed, Sampling(), 4).numbers
        return tuple(np.asarray(sample_key(*numbers)).tolist())

    largest = (2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**32 + 5, 2**63 - 1, 2**63, 2**64 - 1)
    seeds = (0, 5, *largest, -2, -(2**32), -(2**63) + 1)
    assert len({key_of(seed) for seed in seeds}) == len(seeds)
    for seed in (0, 5, 2**31 - 1):
        key = jax.random.key(seed, impl=GENERATOR)
        for number in (3, 2, 1):
            key = jax.random.fold_in(key, number)
        assert key_of(seed) == tuple(np.asarray(jax.random.key_data(key)).tolist())
    assert key_of(-1) == key_of(2**64 - 1), "the same 64 bits"


def test_refilling_slots_and_other_requests_compile_nothing(one_page_engine, versions):
    """One program each, whatever is in the slots and whichever program its arguments come from."""
    engine = one_page_engine
    served = [engine.load_params(versions(version)) for version in (0, 1)]
    state = fill(engine, served[0], {0: asked(0)})
    for slot, request in enumerate([asked(1, (4,)), asked(2, PROMPT * 4, temperature=0.3, stops=(1, 2))]):
        state, _ = engine.generate(served[slot], state)
        prefix = engine.prefill(
            params=served[slot],
            padded_tokens=np.array(request.prompt),
            true_length=len(request.prompt),
        )
        numbers = engine.request(request.sample, slot, request.sampling, len(request.prompt), request.stops)
        state = engine.insert(prefix, state, slot, request=numbers)
        state = engine.recompute(served[slot], state)
        state = engine.free_resource(slot, state)
    state, _ = engine.generate(served[1], state)
    jitted = engine.jitted
    programs = [jitted.prefill, jitted.insert, jitted.generate, jitted.recompute, jitted.release]
    assert [program._cache_size() for program in programs] == [1, 1, 1, 1, 1]


@pytest.mark.slow
def test_once_warm_a_host_compiles_nothing(model):
    """Warm before any version was there. Prompts of every bucket, a swap, an eviction and a return."""
    engine = make_engine(model, kv_tokens=2 * LENGTH)
    published = [VersionedParams(version, model.init(version), str(version)) for version in range(2)]
    engine.warm(engine.load_params(engine.blank("float32")))
    jitted = engine.jitted
    programs = [jitted.empty_prefix, jitted.put, jitted.take, jitted.insert, jitted.extract]
    programs += [jitted.prefill, jitted.generate, jitted.recompute, jitted.release]
    sizes = [program._cache_size() for program in programs]
    assert sizes == [2, 2, 2, 2, 2, 1, 1, 1, 1]
    store, heard = MemoryStore(engine.canary), Heard()
    store.publish(published[0])
    host = make_host(engine, store, heard)
    for ordinal, count in enumerate([1, 7, 8, 9, 20, 31]):
        host.inbox.put(start(ordinal, 2, PROMPT[:1] * count))
    while host.take_commands() and host.has_work:
        host.step()
        if host.statistics().evictions and store.latest() == 0:
            store.publish(published[1])
    assert host.statistics().evictions > 0 and host.statistics().swaps == 1
    assert [program._cache_size() for program in programs] == sizes


def test_the_decode_state_is_updated_in_place(engine, versions):
    """Donated: two copies of the KV pages would not fit where one fills the device."""
    state = fill(engine, versions(0), {0: asked(0)})
    pages = state.cache.k.unsafe_buffer_pointer()
    after, _ = engine.generate(versions(0), state)
    assert state.cache.k.is_deleted() and state.tokens.is_deleted()
    assert after.cache.k.unsafe_buffer_pointer() == pages
    rebuilt = engine.recompute(versions(0), after)
    assert after.cache.k.is_deleted()
    prefix = engine.prefill(params=versions(0), padded_tokens=np.array(PROMPT), true_length=len(PROMPT))
    inserted = engine.insert(prefix, rebuilt, 1)
    assert rebuilt.cache.k.is_deleted() and not prefix.cache.k.is_deleted()
    assert inserted.cache.k.unsafe_buffer_pointer() == pages


def test_the_canary_tells_parameters_apart(engine, versions, dense):
    logp = np.asarray(engine.canary(versions(0).params))
    assert logp.shape == (CANARY_TOKENS - 1,)
    assert np.isfinite(logp).all()
    assert np.abs(logp - np.asarray(engine.canary(versions(1).params))).max() > 0.1
