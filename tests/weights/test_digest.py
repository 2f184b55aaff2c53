"""The digest sees every bit, every place, every name, and nothing of how the parameters lie on devices."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from areal_jax.weights.digest import digest, leaf_digests
from areal_jax.weights.manifest import combine

SHAPE = (6, 8)
WORDS = {"float32": np.uint32, "bfloat16": np.uint16}


def leaf(dtype: str, seed: int = 0) -> np.ndarray:
    return np.asarray(jnp.asarray(np.random.default_rng(seed).normal(size=SHAPE), dtype))


def tree(first: np.ndarray, second: np.ndarray) -> dict:
    return {"blocks": {"up": first}, "norm": second}


@given(
    dtype=st.sampled_from(sorted(WORDS)),
    which=st.integers(0, 1),
    at=st.tuples(st.integers(0, SHAPE[0] - 1), st.integers(0, SHAPE[1] - 1)),
    bit=st.integers(0, 31),
)
def test_one_flipped_bit_changes_the_digest(dtype, which, at, bit):
    leaves = [leaf(dtype, 0), leaf(dtype, 1)]
    before = digest(tree(*leaves))
    word = WORDS[dtype]
    flipped = leaves[which].view(word).copy()
    flipped[at] ^= word(1 << bit % (8 * flipped.itemsize))
    leaves[which] = flipped.view(leaves[which].dtype)
    assert digest(tree(*leaves)) != before


@given(
    st.lists(st.integers(0, SHAPE[0] * SHAPE[1] - 1), min_size=2, max_size=2, unique=True),
    st.sampled_from(
        [(1.0, -1.0), (1.0, float(np.nextafter(np.float32(1), np.float32(2)))), (0.0, -0.0), (2.0, 3.0)]
    ),
)
def test_two_elements_that_change_places_change_the_digest(places, values):
    """Also where they differ in a single bit, such as the sign."""
    one, other = leaf("float32").copy(), leaf("float32").copy()
    one.flat[places] = values
    other.flat[places] = values[::-1]
    assert digest({"w": one}) != digest({"w": other})


def test_zeros_of_another_shape_name_or_dtype_differ():
    zeros = np.zeros((4, 6), np.float32)
    trees = [
        {"w": zeros},
        {"v": zeros},
        {"w": zeros.T.copy()},
        {"w": zeros.reshape(-1)},
        {"w": zeros.astype(np.int32)},
        {"w": zeros, "v": zeros[:1]},
        {"w": {"v": zeros}},
    ]
    assert len({digest(one) for one in trees}) == len(trees)


def test_leaves_that_change_names_change_the_digest():
    one, other = leaf("float32", 0), leaf("float32", 1)
    assert digest(tree(one, other)) != digest(tree(other, one))


def test_a_leafs_digest_names_its_path_dtype_and_shape():
    leaves = leaf_digests(tree(leaf("float32"), leaf("bfloat16")))
    assert list(leaves) == ["blocks.up", "norm"]
    assert leaves["blocks.up"].startswith("float32[6, 8]:")
    assert leaves["norm"].startswith("bfloat16[6, 8]:")
    assert combine(dict(reversed(leaves.items()))) == digest(tree(leaf("float32"), leaf("bfloat16")))


def test_the_sum_is_that_of_its_definition():
    def mix(x: int) -> int:
        x = ((x ^ x >> 16) * 0x85EBCA6B) % 2**32
        x = ((x ^ x >> 13) * 0xC2B2AE35) % 2**32
        return x ^ x >> 16

    values = leaf("float32")
    total = sum(mix(int(bits) ^ mix(index)) for index, bits in enumerate(values.view(np.uint32).flat)) % 2**32
    assert leaf_digests({"w": values}) == {"w": f"float32[6, 8]:{total:08x}"}


@pytest.mark.parametrize("dtype", sorted(WORDS))
def test_the_digest_does_not_depend_on_the_sharding(dtype):
    mesh = Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("fsdp", "tensor"))
    specs = [(None, None), ("fsdp", None), (None, "tensor"), ("fsdp", "tensor"), (None, ("fsdp", "tensor"))]
    values = leaf(dtype)
    whole = digest({"w": values})
    for spec in specs:
        assert digest({"w": jax.device_put(values, NamedSharding(mesh, PartitionSpec(*spec)))}) == whole
