"""An array in pieces on one mesh is the same array on any other."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding

from areal_jax.weights.transfer.pieces import are_whole, assemble, landing, own_pieces, places

SHAPE = (8, 4)
SPECS = [
    PartitionSpec(),
    PartitionSpec("x"),
    PartitionSpec("y"),
    PartitionSpec("x", "y"),
    PartitionSpec("y", "x"),
    PartitionSpec(None, ("x", "y")),
]


@st.composite
def shardings(draw: st.DrawFn) -> Sharding:
    x, y, first = draw(st.sampled_from([(1, 1, 3), (2, 1, 0), (1, 2, 2), (2, 2, 0), (4, 1, 0)]))
    devices = jax.devices()[first : first + x * y]
    if draw(st.booleans()):
        devices = devices[::-1]
    return NamedSharding(Mesh(np.array(devices).reshape(x, y), ("x", "y")), draw(st.sampled_from(SPECS)))


@settings(max_examples=40, deadline=None)
@given(shardings(), shardings())
def test_pieces_of_any_layout_make_up_any_other(source: Sharding, target: Sharding):
    given = np.arange(32, dtype=np.float32).reshape(SHAPE)
    pieces = own_pieces(jax.device_put(given, source))
    assert are_whole([box for box, _ in pieces], SHAPE)
    sent = [(box, jax.device_put(piece, landing(box, places(target, SHAPE)))) for box, piece in pieces]
    found = assemble(SHAPE, jnp.float32, target, sent)
    assert found.sharding == target and found.dtype == jnp.float32
    np.testing.assert_array_equal(np.asarray(found), given)
    for shard in found.addressable_shards:
        np.testing.assert_array_equal(np.asarray(shard.data), given[shard.index])


def test_an_equal_layout_moves_nothing_twice():
    """Each piece lands where it stays, and is not copied there."""
    spec = PartitionSpec("x")
    source = NamedSharding(Mesh(np.array(jax.devices()[:2]), ("x",)), spec)
    target = NamedSharding(Mesh(np.array(jax.devices()[2:4]), ("x",)), spec)
    pieces = own_pieces(jax.device_put(np.zeros(SHAPE, np.float32), source))
    wanted = places(target, SHAPE)
    sent = [(box, jax.device_put(piece, landing(box, wanted))) for box, piece in pieces]
    assert [piece.device for _, piece in sent] == jax.devices()[2:4]
    found = assemble(SHAPE, jnp.float32, target, sent)
    assert [shard.data.unsafe_buffer_pointer() for shard in found.addressable_shards] == [
        piece.unsafe_buffer_pointer() for _, piece in sent
    ]


def test_scalars_and_missing_pieces():
    sharding = NamedSharding(Mesh(np.array(jax.devices()[:2]), ("x",)), PartitionSpec())
    found = assemble((), jnp.int8, sharding, own_pieces(jnp.int8(5)))
    assert found == 5 and found.sharding == sharding
    whole = ((0, 2), (0, 4))
    assert are_whole([whole], (2, 4)) and not are_whole([whole], (4, 4)) and are_whole([()], ())
