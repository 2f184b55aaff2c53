"""Links between executors: every array arrives bit for bit, in its layout, and never through host memory."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from areal_jax.parallel.mesh import make_mesh, replicated, rows_over
from areal_jax.types import ArealError
from areal_jax.weights.links import Broadcast, Gather, Scatter, Weights


def trainer_mesh(first: int = 0, **sizes: int) -> Mesh:
    return make_mesh({"data": 1, "fsdp": 1, "tensor": 1, **sizes}, jax.devices()[first:], "a test")


def numbers(*shape: int, dtype: Any = jnp.float32) -> jax.Array:
    return jnp.asarray(np.random.default_rng(len(shape)).normal(size=shape), dtype)


@contextmanager
def on_devices_only() -> Iterator[None]:
    """jax makes an array's value in host memory by this property, also within `device_put`."""

    def refused(self: Any) -> None:
        raise AssertionError("an array went through host memory")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(jnp.zeros(())), "_value", property(refused))
        yield


def assert_arrived(array: jax.Array, given: jax.Array, sharding: Any) -> None:
    assert array.sharding.is_equivalent_to(sharding, array.ndim)
    assert array.dtype == given.dtype
    for shard in array.addressable_shards:
        np.testing.assert_array_equal(np.asarray(shard.data), np.asarray(given)[shard.index])


SPLITS = [
    (("fsdp", "tensor"), ("tensor", None)),
    (("tensor", "fsdp"), ("fsdp", None)),
    ((None, None), (None, "tensor")),
    (("fsdp", None), (None, None)),
]


@pytest.mark.parametrize(("here", "there"), SPLITS)
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.int8])
def test_weights_are_cut_and_joined_from_one_meshs_shards_to_anothers(here, there, dtype):
    """From a trainer of 2 x 2 to meshes of 2, split along another axis or not at all."""
    of = trainer_mesh(fsdp=2, tensor=2)
    given = numbers(8, 12, dtype=dtype)
    params = {"w": jax.device_put(given, NamedSharding(of, PartitionSpec(*here)))}
    for to in (trainer_mesh(1, fsdp=2), trainer_mesh(2, tensor=2)):
        on = {"w": NamedSharding(to, PartitionSpec(*there))}
        with on_devices_only():
            arrived = Weights(on)(params)["w"]
        assert_arrived(arrived, given, on["w"])


def test_weights_that_lie_as_wanted_are_not_copied():
    on = NamedSharding(trainer_mesh(fsdp=2), PartitionSpec("fsdp"))
    params = {"w": jax.device_put(numbers(8), on)}
    assert Weights({"w": on})(params)["w"] is params["w"]


def test_broadcast_gives_every_device_the_whole_array(monkeypatch):
    given = numbers(6, 4)
    x = jax.device_put(given, NamedSharding(trainer_mesh(fsdp=2), PartitionSpec("fsdp")))
    to = trainer_mesh(1, data=3)
    with on_devices_only():
        arrived = Broadcast(to)(x)
    assert_arrived(arrived, given, replicated(to))


@pytest.mark.parametrize("sizes", [{"data": 2}, {"fsdp": 2}, {"data": 2, "tensor": 2}, {"tensor": 2}])
def test_scatter_and_gather_move_rows_to_a_mesh_and_back(sizes):
    """Four rows, split over a trainer of 2 x 2, to a mesh of another shape, and as results back again."""
    trainer = trainer_mesh(data=2, fsdp=2)
    given = numbers(4, 6)
    to = trainer_mesh(4 - 2 ** len(sizes), **sizes)
    rows = jax.device_put(given, rows_over(trainer))
    with on_devices_only():
        there = Scatter(to)(rows)
        back = Gather(to, trainer)(there)
    assert_arrived(there, given, rows_over(to))
    assert_arrived(back, given, rows_over(trainer))


def test_rows_that_do_not_divide_or_come_from_another_mesh_are_refused():
    one, two = trainer_mesh(), trainer_mesh(2, data=2)
    rows = jax.device_put(numbers(3, 2), replicated(one))
    with pytest.raises(ArealError, match=r"3 rows do not divide evenly over the data x fsdp x expert = 2"):
        Scatter(two)(rows)
    with pytest.raises(ArealError, match=r"are not results of the mesh .*'data': 2"):
        Gather(two, one)(rows)


def test_device_put_does_go_through_host_memory():
    """Which is why links exist; if jax stops doing so, they can become one call of `device_put`."""
    of, to = trainer_mesh(fsdp=2, tensor=2), trainer_mesh(1, fsdp=2)
    x = jax.device_put(numbers(8, 12), NamedSharding(of, PartitionSpec("fsdp", "tensor")))
    with on_devices_only(), pytest.raises(AssertionError, match="host memory"):
        jax.device_put(x, NamedSharding(to, PartitionSpec("fsdp")))
