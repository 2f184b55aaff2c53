"""An engine that attends by a kernel: chosen by self-test, the same samples as by blocks."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from areal_jax.generation.commands import Start
from areal_jax.models.kernels.packed_attention import KernelChoice
from areal_jax.types import SampleId, Sampling
from areal_jax.weights.memory import MemoryStore
from tests.generation.conftest import LENGTH
from tests.generation.decoding import Asked, Heard, decode, fill, make_host

PROMPT = (5, 9, 2, 14, 3, 3, 7, 1, 4, 4, 6)


def test_on_a_cpu_an_engine_decodes_by_blocks(engine):
    assert engine.attention.path == "blocks"
    assert set(engine.attention.rejected.values()) == {"needs CUDA; this device is cpu"}


@pytest.mark.slow
def test_a_host_samples_the_same_by_kernel_and_by_blocks(engine, with_kernel, versions):
    """Prompts shared by groups, a pool so small that samples are evicted, and a swap of versions."""
    tight, calls = with_kernel(kv_tokens=2 * LENGTH)
    assert tight.attention == KernelChoice("pages", {})
    found = []
    for used in (tight, engine):
        heard, store = Heard(), MemoryStore(used.canary)
        store.publish(versions(0))
        host = make_host(used, store, heard)
        for ordinal in range(3):
            samples = tuple(SampleId(ordinal, member) for member in range(3))
            host.inbox.put(Start(samples, PROMPT[: 5 + 3 * ordinal], 0, Sampling(1.0, max_tokens=64)))
        host.take_commands()
        host.step()
        store.publish(versions(1))  # the KV of live samples is computed again
        while host.has_work:
            host.step()
        found.append((heard.done, host.statistics().evictions))
    (kernels, evictions), (blocks, _) = found
    assert evictions > 0 and len(kernels) == 9
    # Decode steps, chunks of prefill and chunks of recompute.
    assert {shape[:2] for shape in calls} == {(tight.slots, 1), (1, 4), (tight.slots, 4)}
    for sample, trajectory in kernels.items():
        np.testing.assert_array_equal(trajectory.tokens, blocks[sample].tokens)
        np.testing.assert_allclose(trajectory.behavior_logp, blocks[sample].behavior_logp, atol=1e-3)


@pytest.mark.slow
def test_heads_are_divided_among_a_mesh(engine, with_kernel, versions):
    mesh = jax.sharding.Mesh(np.array(jax.devices()[2:4]), ("tensor",))
    sharded, calls = with_kernel(mesh=mesh)
    slots = {i: Asked(PROMPT[: 3 + i], SampleId(3, i)) for i in range(3)}
    done = decode(sharded, versions(0), slots)
    assert {shape[2] for shape in calls} == {2}  # of four heads
    for slot, want in decode(engine, versions(0), slots).items():
        np.testing.assert_array_equal(done[slot].tokens, want.tokens)
        np.testing.assert_allclose(done[slot].behavior_logp, want.behavior_logp, atol=1e-3)


@pytest.mark.slow
def test_samples_of_spoilt_weights_leave_nothing_behind(engine, versions):
    """Pages whose keys and values are no numbers go to a sample of sound weights: not a bit of it moves."""
    asked = Asked(PROMPT, SampleId(3, 1))
    want = decode(engine, versions(0), {0: asked})[0]
    nan = versions(0)._replace(params=jax.tree.map(lambda leaf: leaf * np.nan, versions(0).params))
    spoilt, sound = engine.load_params(nan), engine.load_params(versions(0))
    state = fill(engine, spoilt, dict.fromkeys(range(engine.slots), asked))
    state, results = engine.generate(spoilt, state)
    assert np.isnan(results.rows["logp"]).all()
    for _ in range(LENGTH):
        state, _ = engine.generate(spoilt, state)
    assert not np.asarray(state.is_live).any()
    prefix = engine.prefill(params=sound, padded_tokens=np.array(PROMPT), true_length=len(PROMPT))
    request = engine.request(asked.sample, 0, asked.sampling, len(PROMPT))
    state = engine.insert(prefix, state, 0, request=request)
    logp: list[float] = []
    while np.asarray(state.is_live)[0]:
        state, results = engine.generate(sound, state)
        rows = results.rows
        logp += rows["logp"][0][rows["valid"][0] == 1].tolist()
    np.testing.assert_array_equal(np.asarray(state.tokens)[0], want.tokens)
    np.testing.assert_array_equal(np.array(logp, np.float32), want.behavior_logp[want.loss_mask])
