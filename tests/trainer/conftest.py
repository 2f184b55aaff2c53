"""One tiny model, its groups, and learners that share their compiled programs across tests."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
import optax
import pytest

from areal_jax.config.presets import preset_settings
from areal_jax.config.sections import AlgorithmConfig
from areal_jax.models.config import ModelConfig
from areal_jax.models.model import Model
from areal_jax.parallel.mesh import make_mesh
from areal_jax.tasks.tokenizers import CharTokenizer
from areal_jax.trajectories.leaf_order import Blocks
from areal_jax.trees.tree_learner import TreeLearner
from areal_jax.types import Group, Prompt, SampleId, Sampling, Trajectory

VOCAB, LENGTH = 37, 16

MakeLearner = Callable[..., TreeLearner]


@pytest.fixture(scope="session")
def model(few_optimizations: bool) -> Model:
    sizes = dict(layers=2, width=16, heads=4, kv_heads=2, head_dim=4, mlp_width=24)
    return Model(ModelConfig(vocab_size=VOCAB, **sizes), CharTokenizer("".join(map(chr, range(97, 132)))))


@pytest.fixture(scope="session")
def params(model: Model) -> Any:
    return random_params(model, 0)


def random_params(model: Model, seed: int) -> Any:
    """Larger than an init's, so that no distribution is near uniform."""
    rng = np.random.default_rng(seed)
    return jax.tree.map(
        lambda leaf: (0.4 * rng.normal(size=leaf.shape) + (leaf.ndim < 3)).astype(np.float32),
        model.abstract_params,
    )


@pytest.fixture(scope="session")
def learner(model: Model) -> MakeLearner:
    """`learner(rows=2, mesh={...}, **algorithm)`; plain SGD, whose step is linear in the gradient."""
    made: dict[str, TreeLearner] = {}

    def make(rows: int = 2, mesh: dict[str, int] | None = None, **algorithm: Any) -> TreeLearner:
        key = repr((rows, sorted((mesh or {}).items()), sorted(algorithm.items())))
        if key not in made:
            settings = {
                "preset": "grpo",
                "kl": {"coef": 0.0},
                "group_size": 4,
                "proximal": "recompute",
                **algorithm,
            }
            shape = {"data": 1, "fsdp": 1, "tensor": 1, **(mesh or {})}
            made[key] = TreeLearner(
                model,
                AlgorithmConfig.model_validate(preset_settings(settings)),
                optax.sgd(0.5, momentum=0.9),
                rows=rows,
                length=LENGTH,
                mesh=make_mesh(shape, jax.devices(), "the trainer"),
                logp_chunk=8,
                tree_blocks=Blocks(LENGTH, LENGTH, call_tokens=0),
            )
        return made[key]

    return make


def make_groups(
    count: int = 4, size: int = 4, seed: int = 0, rewards: Sequence[float] | None = None
) -> list[Group]:
    """Groups of random tokens; two or three tokens of prompt, behaviour log-probs near a random model's."""
    rng = np.random.default_rng(seed)
    groups = []
    for ordinal in range(count):
        members = []
        for member in range(size):
            n = int(rng.integers(5, 13))
            is_sampled = np.arange(n) >= 2 + ordinal % 2
            members.append(
                Trajectory(
                    sample=SampleId(ordinal, member),
                    tokens=rng.integers(0, VOCAB, n).astype(np.int32),
                    loss_mask=is_sampled,
                    behavior_logp=np.where(is_sampled, rng.normal(-4, 1, n), 0).astype(np.float32),
                    versions=np.where(is_sampled, np.sort(rng.integers(0, 3, n)), -1).astype(np.int32),
                    turn_ids=np.where(is_sampled, 0, -1).astype(np.int32),
                    sampling=Sampling(temperature=[1.0, 0.7, 1.3, 1.0][member % 4]),
                    stop_reason="length" if member == 1 else "stop",
                    reward=float(rng.normal() if rewards is None else rewards[member]),
                )
            )
        groups.append(Group(ordinal, Prompt("?"), tuple(members)))
    return groups


def poisoned(batch: Any, value: float) -> Any:
    """`value` off the loss mask in every float32 array of tokens."""
    mask = np.asarray(batch.loss_mask)

    def one(x: Any) -> Any:
        if x is None or x.shape != mask.shape or x.dtype != np.float32:
            return x
        return np.where(mask, x, np.float32(value))

    return type(batch)(*(one(x) for x in batch))


def distance(one: Any, other: Any) -> float:
    """Largest difference between two trees of parameters."""
    gaps = jax.tree.map(lambda a, b: float(np.abs(np.asarray(a) - np.asarray(b)).max()), one, other)
    return max(jax.tree.leaves(gaps))


def same_bits(one: Any, other: Any) -> bool:
    pairs = zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True)
    return all(np.asarray(a).tobytes() == np.asarray(b).tobytes() for a, b in pairs)
