"""Quantised hosts: each version's codes, what is recorded under them, and what stays in full precision."""

from __future__ import annotations

import functools
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from areal_jax.control.events import HostAdopted
from areal_jax.generation.engine import Engine
from areal_jax.models.config import PROJECTIONS
from areal_jax.models.model import Model
from areal_jax.models.quantize import CODES, SCALE, dequantize_tree, quantize_tree
from areal_jax.parallel.mesh import has_fp8
from areal_jax.types import ArealError, SampleId, VersionedParams
from areal_jax.weights.memory import MemoryStore
from tests.generation.conftest import DenseLogp, make_engine
from tests.generation.decoding import Heard, make_host, start

PROMPT = (5, 9, 2, 14, 3)


def as_int8(value: VersionedParams) -> VersionedParams:
    """The value with the float matrices that its int8 codes stand for (`tests/models/test_quantize.py`)."""
    return value._replace(params=dequantize_tree(quantize_tree(value.params, "int8"), "int8"))


@pytest.fixture(scope="module")
def quantised(model: Model) -> Engine:
    return make_engine(model, quantize="int8")


def gaps(trajectory, dense: DenseLogp, under) -> list[float]:
    """By version: the largest distance of recorded log-probs from a dense forward with `under(version)`."""
    return [
        float(np.abs(trajectory.behavior_logp - dense(under(v).params, trajectory))[begin:end].max())
        for v, begin, end in trajectory.spans
    ]


@pytest.mark.slow
def test_a_host_quantises_every_version_anew_and_records_that_policys_log_probs(
    quantised, versions, dense: DenseLogp
):
    """Three versions in one sample: each token's log-prob is that of its own version's codes."""
    store, heard = MemoryStore(quantised.canary), Heard()
    published = [store.publish(versions(0))]
    host = make_host(quantised, store, heard, on_update="recompute")
    host.inbox.put(start(0, 1, PROMPT))
    host.take_commands()
    for step in range(100):
        if step in (3, 6):
            published.append(store.publish(versions(len(published))))
        host.step()
        if not host.has_work:
            break
    done = heard.done[SampleId(0, 0)]
    assert [version for version, *_ in done.spans] == [0, 1, 2]
    assert max(gaps(done, dense, lambda v: as_int8(versions(v)))) < 1e-4
    assert min(gaps(done, dense, versions)) > 1e-3  # the mismatch that the trainer sees, in each span
    # What was published, and what hosts say they adopted, is the full precision.
    assert [value.digest for value in published] == [versions(v).digest for v in range(3)]
    assert [event.digest for event in heard.of(HostAdopted)] == [versions(v).digest for v in range(3)]


def test_what_was_quantised_ahead_is_adopted_as_it_is_and_the_rest_stays_as_published(quantised, versions):
    for layout in ("stacked", "auto"):
        engine = make_engine(quantised.model, quantize="int8", weight_layout=layout)
        served = engine.load_params(versions(0))
        assert engine.load_params(served) is served
        for name in ("embedding", "norm"):
            np.testing.assert_array_equal(served.params[name], versions(0).params[name])
    codes = [leaf for leaf in jax.tree.leaves(served.params) if leaf.dtype == np.int8]
    assert sum(leaf.size for leaf in codes) == sum(
        leaf.size
        for path, leaf in jax.tree.leaves_with_path(versions(0).params)
        if path[-1].key in PROJECTIONS
    )


@pytest.mark.parametrize(("devices", "layout"), [(1, "stacked"), (1, "auto"), (2, "split")])
def test_a_plan_compiles_for_the_codes_that_a_host_loads(model, devices, layout):
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:devices]), ("tensor",))
    engine = make_engine(model, quantize="int8", mesh=mesh, weight_layout=layout)
    loaded = engine.load_params(engine.blank("bfloat16")).params

    def same(planned, loaded):
        assert (planned.shape, planned.dtype) == (loaded.shape, loaded.dtype)
        assert planned.sharding.is_equivalent_to(loaded.sharding, loaded.ndim)

    jax.tree.map(same, engine.abstract_served("bfloat16"), loaded)
    is_split = [
        leaf.dtype == np.int8 and not leaf.sharding.is_fully_replicated for leaf in jax.tree.leaves(loaded)
    ]
    assert any(is_split) == (devices == 2)


def test_each_device_quantises_its_own_shard_as_one_device_would(model, versions):
    """From a version in bfloat16, with the codes of its values in float32."""
    half = versions(0)._replace(params=jax.tree.map(lambda x: x.astype("bfloat16"), versions(0).params))
    again = half._replace(params=jax.tree.map(lambda x: x.astype("float32"), half.params))
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:2]), ("tensor",))
    sharded = make_engine(model, quantize="int8", mesh=mesh).load_params(half).params["blocks"]
    alone = make_engine(model, quantize="int8", weight_layout="stacked").load_params(again).params["blocks"]
    for path, leaf in jax.tree.leaves_with_path(alone):
        if path[-1].key in (CODES, SCALE):
            there = functools.reduce(lambda node, key: node[key.key], path, sharded)
            np.testing.assert_array_equal(np.asarray(there), np.asarray(leaf))


def test_fp8_is_refused_where_no_device_has_it():
    def mesh(platform: str, **known) -> SimpleNamespace:
        device = SimpleNamespace(
            platform=platform, client=SimpleNamespace(runtime_type="stream_executor"), **known
        )
        return SimpleNamespace(devices=np.array([device]))

    found = {c: has_fp8(mesh("gpu", compute_capability=c)) for c in ("8.0", "8.9", "9.0", "10.0")}
    assert found == {"8.0": False, "8.9": True, "9.0": True, "10.0": True}
    assert not has_fp8(mesh("gpu")) and not has_fp8(mesh("tpu"))


def test_an_engine_that_cannot_quantise_says_so(model):
    with pytest.raises(ArealError, match=r"generation\.quantize=fp8 on cpu: fp8 needs an NVIDIA GPU"):
        make_engine(model, quantize="fp8")
    with pytest.raises(ArealError, match=r"model\.quantize=int8 cannot be quantised again, to int8"):
        make_engine(model.with_codes("int8"), quantize="int8")
