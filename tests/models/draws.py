"""Random parameters as each path draws them; `python -m tests.models.draws` prints path -> digest as JSON."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import sys
from typing import Any

import jax
import numpy as np
from jax.sharding import SingleDeviceSharding

from areal_jax.lab.bench.measure import random_params
from areal_jax.models.config import Lora, model_config
from areal_jax.models.lora import adapters_of
from areal_jax.models.model import Model
from areal_jax.parallel.mesh import make_mesh, param_shardings
from areal_jax.tasks.tokenizers import ByteTokenizer

SIZES: dict[str, dict[str, Any]] = {
    "narrow": dict(width=16, heads=2, kv_heads=2, head_dim=8, mlp_width=32),
    "odd": dict(
        width=18, heads=3, kv_heads=1, head_dim=6, mlp_width=37, layers=3, is_tied=False, has_qkv_bias=True
    ),
}
MESHES = ({"tensor": 2}, {"fsdp": 2, "tensor": 2})
SEED = 0


def model_of(name: str) -> Model:
    """Returns the tiny model with the sizes `name`; adapted: tiny itself, with adapters and int8 codes."""
    tokenizer = ByteTokenizer()
    config = model_config("tiny", tokenizer.vocab_size, "float32", **SIZES.get(name, {}))
    if name == "adapted":
        config = dataclasses.replace(config, lora=Lora(4, 8.0), quantize="int8")
    return Model(config, tokenizer)


def digest(params: Any) -> str:
    """Returns a hash of the leaves' paths and bytes."""
    found = hashlib.blake2b(digest_size=8)
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        found.update(jax.tree_util.keystr(path).encode())
        found.update(np.asarray(leaf).tobytes())
    return found.hexdigest()


def plain(model: Model, seed: int = SEED) -> Any:
    """Returns `model.base.init(seed)` as XLA compiles it by default."""
    draw = Model._random.__wrapped__  # pyright: ignore[reportFunctionMemberAccess]
    return jax.jit(draw, static_argnums=0)(model.base, jax.random.key(seed))


def plain_adapters(model: Model, seed: int = SEED) -> Any:
    """Returns the adapters of `model.init(seed)` as XLA compiles their draw by default."""
    draw = Model._random.__wrapped__  # pyright: ignore[reportFunctionMemberAccess]
    key = jax.random.fold_in(jax.random.key(seed), 1)
    return jax.jit(lambda key: adapters_of(draw(model, key)))(key)


def on_mesh(model: Model, axes: dict[str, int]) -> tuple[Any, Any]:
    """Returns the parameters drawn and then placed on a mesh, as a run does, and drawn by a program of it."""
    shape = {"data": 1, "fsdp": 1, "tensor": 1, **axes}
    devices = jax.devices()[: int(np.prod(list(shape.values())))]
    shardings = param_shardings(
        model.logical_axes, model.abstract_params, make_mesh(shape, devices, "the trainer")
    )
    return jax.device_put(model.init(SEED), shardings), jax.jit(model.init, out_shardings=shardings)(SEED)


def drawn_by_init() -> dict[str, str]:
    """Returns the digest of each model's `init`."""
    return {name: digest(model_of(name).init(SEED)) for name in ("narrow", "odd", "adapted")}


def digests() -> dict[str, str]:
    narrow, adapted = model_of("narrow"), model_of("adapted")
    found = drawn_by_init() | {
        "narrow by default": digest(plain(narrow)),
        "narrow in a jit": digest(jax.jit(narrow.init)(SEED)),
        "narrow of benchmarks": digest(random_params(narrow, "float32")),
        "adapters": digest(adapters_of(adapted.init(SEED))),
        "adapters by default": digest(plain_adapters(adapted)),
        "adapters in a jit": digest(adapters_of(jax.jit(adapted.init)(SEED))),
        "odd by default": digest(plain(model_of("odd"))),
    }
    for axes in MESHES:
        placed, drawn = on_mesh(narrow, axes)
        found |= {f"narrow on {axes}": digest(placed), f"narrow by {axes}": digest(drawn)}
    last = SingleDeviceSharding(jax.devices()[-1])
    with jax.default_device(jax.devices()[-1]):
        drawn = narrow.init(SEED)
    assert {leaf.sharding for leaf in jax.tree.leaves(drawn)} == {last}
    return found | {"narrow on the last device": digest(drawn)}


if __name__ == "__main__":
    sys.stdout.write(json.dumps(digests()) + "\n")
