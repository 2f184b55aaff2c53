"""Attention of tokens that continue a path of a prefix tree: they see the path's KV and one another.

The KV of the paths lie in a stack, which each walk over a tree extends and cuts. Without gradients the stack
is the attention's cache: it is read, and the tokens' KV are written behind the path. With gradients the stack
is only read, and the cache is the port: arrays of the stack's shape whose values are never read, but whose
cotangent is the gradient with respect to the stack. The backward pass adds the gradient with respect to the
path's KV to this cotangent in place. It also takes the gradient with respect to the tokens' own KV out of it,
which the backward passes of later tokens of the tree have added. Shapes: L layers, W walks, P places of the
stack, n tokens, K kv heads, h head dimension.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp
from flax import struct
from jax.sharding import Mesh
from jaxtyping import Array, Float, Int

from areal_jax.models.attention import BLOCK, CPU_BLOCK
from areal_jax.models.blockwise import path_attention
from areal_jax.models.config import ModelConfig
from areal_jax.models.kernels.packed_attention import over_mesh
from areal_jax.models.products import sum_dtype
from areal_jax.parallel.mesh import platform_of


def written(x: Float[Array, "W P ..."], new: Float[Array, "W n ..."], places: Int[Array, " W"]) -> Array:
    """Returns `x` with `new[w]` in row w from places[w] on."""
    return jax.vmap(partial(jax.lax.dynamic_update_slice_in_dim, axis=0))(x, new.astype(x.dtype), places)


def taken(x: Float[Array, "W P ..."], places: Int[Array, " W"], size: int) -> Float[Array, "W n ..."]:
    """Returns `size` elements of each row w of `x` from places[w] on."""
    return jax.vmap(partial(jax.lax.dynamic_slice_in_dim, slice_size=size))(x, places)


class KVStack(NamedTuple):
    """Keys and values of the paths of W walks, or the gradient with respect to them."""

    keys: Float[Array, "L W P K h"]
    values: Float[Array, "L W P K h"]

    @classmethod
    def zeros(cls, config: ModelConfig, walks: int, places: int, dtype: Any = None) -> KVStack:
        """Returns a stack of zeros; `dtype` None: that of the model's keys and values."""
        shape = (config.layers, walks, places, config.kv_heads, config.head_dim)
        return cls(jnp.zeros(shape, dtype or config.dtype), jnp.zeros(shape, dtype or config.dtype))

    def layer(self, index: Any) -> tuple[Array, Array]:
        return self.keys[index], self.values[index]

    def written(self, index: Any, places: Int[Array, " W"], keys: Array, values: Array) -> KVStack:
        """Returns the stack with n keys and values of a layer at places[w], places[w] + 1, ... of walk w."""

        def put(stack: Array, new: Array) -> Array:
            return stack.at[index].set(written(stack[index], new, places))

        return KVStack(put(self.keys, keys), put(self.values, values))


class PrefixAttention(struct.PyTreeNode):
    """Attention of each walk's next n tokens over its path and over one another."""

    path_tokens: Int[Array, " W"]
    """Number of tokens of each walk's path."""
    places: Int[Array, " W"]
    """Where each walk's n tokens are written in the stack: behind the path; for a walk that does nothing in
    this call, at places that are never read.
    """
    ends: Int[Array, "W n"]
    """For each token the column after the last one that may see it; 0 for padding. The model may compute the
    walks' tokens in more rows of fewer tokens.
    """
    stack: KVStack | None = None
    """The path's KV if gradients are computed; the cache is then the port. None: the cache is the stack."""
    mesh: Mesh | None = struct.field(pytree_node=False, default=None)

    def __call__(self, layer: Any, q: Any, k: Any, v: Any, cache: KVStack) -> tuple[Array, KVStack]:
        chex.assert_shape([self.path_tokens, self.places], (len(self.ends),))
        shape = q.shape
        q, k, v = (x.reshape(*self.ends.shape, *x.shape[2:]) for x in (q, k, v))
        if self.stack is None:
            keys, values = (_joined(*pair) for pair in zip(cache.layer(layer), (k, v), strict=True))
            cache = cache.written(layer, self.places, k, v)
        else:
            (keys, values), cache = _read(self.stack, layer, self.places, k, v, cache)
        is_cpu = platform_of(self.mesh) == "cpu"
        if is_cpu:  # as in packed attention
            keys, values = keys.astype(sum_dtype(keys)), values.astype(sum_dtype(values))
        attend: Any = partial(path_attention, block=CPU_BLOCK if is_cpu else BLOCK)
        if self.mesh is not None:
            attend = over_mesh(attend, self.mesh, k.shape[2], ids=2)
        return attend(q, keys, values, self.path_tokens, self.ends).reshape(shape), cache


def _joined(path: Float[Array, "W P K h"], own: Float[Array, "W n K h"]) -> Float[Array, "W P+n K h"]:
    return jnp.concatenate([path, own.astype(path.dtype)], axis=1)


@jax.custom_vjp
def _read(
    stack: KVStack, layer: Any, places: Array, k: Array, v: Array, port: KVStack
) -> tuple[tuple[Array, Array], KVStack]:
    """Returns a layer's keys and values, those of the path and then `k` and `v`; and the port, unchanged."""
    return (_joined(stack.keys[layer], k), _joined(stack.values[layer], v)), port


def _read_forward(stack: KVStack, layer: Any, places: Array, k: Array, v: Array, port: KVStack) -> Any:
    return _read(stack, layer, places, k, v, port), (layer, places, k, v)


def _read_backward(kept: tuple, slopes: tuple[tuple[Array, Array], KVStack]) -> tuple:
    """Returns the gradients with respect to k, v and the port.

    `slopes`: the gradients with respect to keys and values, and the port's, in which the tokens behind these
    in the tree have put the gradients with respect to k and v. These are taken out of it.
    """
    layer, places, *own = kept
    of_own, ports = [], []
    for slope, port, x in zip(*slopes, own, strict=True):
        path = port.shape[2]
        rows = port[layer] + slope[:, :path].astype(port.dtype)
        later = taken(rows, places, x.shape[1])
        of_own.append((slope[:, path:].astype(port.dtype) + later).astype(x.dtype))
        ports.append(port.at[layer].set(written(rows, jnp.zeros_like(later), places)))
    return None, None, None, *of_own, KVStack(*ports)


_read.defvjp(_read_forward, _read_backward)
