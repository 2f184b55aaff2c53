"""Hosts of a mixture of experts: what they record, in floats or int8, on one device or two; the router."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from areal_jax.models.attention import PagedAttention
from areal_jax.models.experts import NO_EXPERT
from areal_jax.models.model import Model
from areal_jax.models.quantize import dequantize_tree, quantize_tree
from areal_jax.models.transformer import Execution
from areal_jax.types import SampleId, Sampling, VersionedParams
from areal_jax.weights.memory import MemoryStore
from areal_jax.weights.store import wire_copy
from tests.generation.conftest import LENGTH, STEPS, DenseLogp, dense_of, make_engine, make_model, version_of
from tests.generation.decoding import Asked, Heard, decode, make_host, start

pytestmark = pytest.mark.slow

PROMPT = (5, 9, 2, 14, 3, 3, 7)
SLOTS = {0: Asked(PROMPT, SampleId(3, 0), Sampling(max_tokens=64)), 3: Asked(PROMPT * 2, SampleId(3, 1))}


HOSTS = ("recompute", "keep", "pinned")


def routes_of(model: Model, params: Any, tokens: np.ndarray, before: Any = None, known: int = 0) -> Any:
    """(KV, experts (n, L k)) of `tokens` by one call over pages, of which `before` has the first `known`."""
    positions = known + np.arange(len(tokens))[None]
    cache = model.kv_pages(1, LENGTH, "float32") if before is None else before
    attend = PagedAttention(
        jnp.ones((1, 1), jnp.int32), jnp.asarray(positions), jnp.ones_like(positions, bool)
    )
    transformer = nnx.merge(model._abstract[0], params)
    _, cache, experts = transformer(jnp.asarray(tokens)[None], positions, attend, cache, Execution())
    return cache, np.moveaxis(np.asarray(experts)[:, 0], 0, 1).reshape(len(tokens), -1)


@pytest.mark.parametrize("on_update", HOSTS)
def test_kept_routes_are_those_with_which_the_kv_was_last_computed(model, version, on_update):
    """A version arrives after 2 of the sampled tokens, when the KV has all tokens but the last of them."""
    engine, heard = make_engine(model, keeps_routes=True), Heard()
    store = MemoryStore(engine.canary)
    versions = [version, version_of(engine, 1)]
    store.publish(versions[0])
    host = make_host(engine, store, heard, on_update=on_update, versions=2)
    host.inbox.put(start(0, 2, PROMPT))
    host.take_commands()
    host.step()
    store.publish(versions[1])
    while host.has_work:
        host.step()
    at = len(PROMPT) + STEPS - 1
    for trajectory in heard.done.values():
        tokens, found = trajectory.tokens[:-1], trajectory.experts
        assert trajectory.interruptions == (on_update != "pinned")
        old, new = (routes_of(model, each.params, tokens)[1] for each in versions)
        if on_update == "keep":
            kv, first = routes_of(model, versions[0].params, tokens[:at])
            rest = routes_of(model, versions[1].params, tokens[at:], kv, at)[1]
            want = np.concatenate([first, rest])
        else:
            want = new if on_update == "recompute" else old
        np.testing.assert_array_equal(found[:-1], want)
        assert (found[-1] == NO_EXPERT).all() and found.dtype == np.uint8
        assert (old != new).any()


def router_of(params: Any) -> jax.Array:
    return params["blocks"]["mlp"]["router"]


@pytest.fixture(scope="module")
def model() -> Model:
    return make_model(experts=6, experts_per_token=2, expert_width=24, shared_width=16)


@pytest.fixture(scope="module")
def version(model: Model) -> VersionedParams:
    return version_of(make_engine(model), 0)


@pytest.fixture(scope="module")
def dense(model: Model) -> DenseLogp:
    return dense_of(model)


@pytest.mark.parametrize("devices", [1, 2])
@pytest.mark.parametrize("quantize", ["none", "int8"])
def test_recorded_log_probs_are_those_of_a_dense_forward(model, version, dense, quantize, devices):
    """Of the matrices that its codes stand for, if it has codes. Two devices have half of the experts."""
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:devices]), ("tensor",))
    engine = make_engine(model, mesh=mesh, quantize=quantize)
    done = decode(engine, engine.load_params(version), SLOTS)
    params = version.params
    if quantize != "none":
        params = dequantize_tree(quantize_tree(params, quantize), quantize)
        np.testing.assert_array_equal(router_of(params), router_of(version.params))
    for trajectory in done.values():
        gap = np.abs(trajectory.behavior_logp - dense(params, trajectory))
        assert gap[trajectory.loss_mask].max() < 1e-4
    up = engine.param_shardings["blocks"]["mlp"]["expert_up"]
    assert up.shard_shape((2, 6, 32, 24)) == (2, 6 // devices, 32, 24)


def test_a_version_in_bfloat16_has_its_router_in_float32(model, version):
    """Trainer, published version and host read the same router: in fewer bits it would choose otherwise."""
    sent = wire_copy(version, "bfloat16").params
    kinds = {path[-1].key: leaf.dtype for path, leaf in jax.tree.leaves_with_path(sent)}
    assert kinds.pop("router") == np.float32 and set(kinds.values()) == {jnp.dtype("bfloat16")}
    np.testing.assert_array_equal(router_of(sent), router_of(version.params))
    assert router_of(make_engine(model).blank("bfloat16").params).dtype == np.float32
