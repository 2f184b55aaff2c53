"""The canary of a bfloat16 model: other meshes differ from it by rounding, other layouts by more."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from areal_jax.generation.canary import canary
from areal_jax.models.config import model_config
from areal_jax.models.model import Model
from areal_jax.parallel.mesh import make_mesh, param_shardings
from areal_jax.tasks.tokenizers import ByteTokenizer
from areal_jax.types import VersionedParams
from areal_jax.weights.digest import digest
from areal_jax.weights.errors import WeightsError
from areal_jax.weights.memory import MemoryStore
from areal_jax.weights.store import Probe

PUBLISHERS = [{"fsdp": 4}, {"fsdp": 1, "tensor": 2}]
HOSTS = [{"tensor": 1}, {"tensor": 2}]

Place = Callable[[dict[str, int]], Any]


@pytest.fixture(scope="module")
def model() -> Model:
    return Model(model_config("5m", 256, "bfloat16"), ByteTokenizer())


@pytest.fixture(scope="module")
def probe(model: Model) -> Probe:
    return canary(model)


@pytest.fixture(scope="module")
def params(model: Model) -> Any:
    return jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), model.init(0))


def shardings(model: Model, mesh: dict[str, int]) -> Any:
    over = make_mesh(mesh, jax.devices(), "the test")
    return param_shardings(model.logical_axes, model.abstract_params, over)


@pytest.mark.slow
@pytest.mark.parametrize("host", HOSTS, ids=str)
@pytest.mark.parametrize("publisher", PUBLISHERS, ids=str)
def test_a_mesh_that_splits_products_is_accepted(
    model: Model, params: Any, publisher: dict[str, int], host: dict[str, int], probe: Probe
):
    """Where it splits them otherwise than the publisher's, they differ by more than a float32 model may."""
    store = MemoryStore(probe, "bfloat16")
    given = jax.device_put(params, shardings(model, publisher))
    wire = store.publish(VersionedParams(0, given, digest(given)))
    loaded = store.load(0, shardings(model, host))
    gap = np.abs(np.asarray(probe(loaded.params)) - np.asarray(probe(wire.params))).max()
    assert (gap > 1e-3) == (publisher.get("tensor") != host["tensor"])
    assert gap < 0.02  # a tenth of what is accepted


def exchanged(leaf: jax.Array, axis: int, one: int, other: int) -> jax.Array:
    order = np.arange(leaf.shape[axis])
    order[[one, other]] = other, one
    return jnp.take(leaf, order, axis)


def two_heads(name: str, params: Any) -> Any:
    attention = params["blocks"]["attention"]
    attention = attention | {name: exchanged(attention[name], 2, 0, 1)}
    return params | {"blocks": params["blocks"] | {"attention": attention}}


def two_layers(one: int, other: int, params: Any) -> Any:
    return params | {"blocks": jax.tree.map(lambda leaf: exchanged(leaf, 0, one, other), params["blocks"])}


@pytest.mark.parametrize("host", HOSTS, ids=str)
@pytest.mark.parametrize(
    "wrong",
    [
        *[pytest.param((two_heads, name), id=f"two heads of {name}") for name in "qkv"],
        pytest.param((two_layers, 2, 3), id="two layers"),
        pytest.param((two_layers, 0, 5), id="first and last layer"),
    ],
)
def test_a_wrong_layout_is_refused(
    model: Model, params: Any, host: dict[str, int], wrong: tuple, probe: Probe
):
    change, *which = wrong
    published = np.asarray(probe(jax.device_put(params, shardings(model, {"fsdp": 4}))))
    found = np.asarray(probe(jax.device_put(change(*which, params), shardings(model, host))))
    gaps = np.abs(found - published)
    assert gaps.max() > 2 * probe.largest and gaps.mean() > 4 * probe.mean
    with pytest.raises(WeightsError, match="canary's log-prob under version 0 differs by"):
        probe.require(0, published, found)


def test_a_float32_model_must_agree_to_a_thousandth():
    probe = canary(Model(model_config("tiny", 256), ByteTokenizer()))
    assert (probe.largest, probe.mean) == (1e-3, 1e-3)
