"""Training over a prefix tree gives the log-probs and the gradient of training each sequence alone."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from areal_jax.config.presets import preset_settings
from areal_jax.config.sections import AlgorithmConfig
from areal_jax.models.config import ModelConfig
from areal_jax.models.model import Model
from areal_jax.parallel.mesh import make_mesh
from areal_jax.tasks.tokenizers import CharTokenizer
from areal_jax.trainer.learner import Learner
from areal_jax.trajectories.leaf_order import Blocks, depth_first
from areal_jax.trajectories.leaf_ranges import TOKENS
from areal_jax.trajectories.prefix_tree import PrefixTree, Sampled, trained_on_paths, tree_of
from areal_jax.trajectories.walk import POP, PUSH, Walk, plan_walk
from areal_jax.trees.tree_arrays import Gradients, Sequences, WalkStep
from areal_jax.trees.tree_passes import TreePasses
from areal_jax.trees.tree_update import TreeBatch, TreeUpdate
from areal_jax.types import Trajectory
from tests.trainer.conftest import LENGTH, VOCAB, random_params
from tests.trainer.prefix_trees import prepared, rows_of, trie

pytestmark = [pytest.mark.few_optimizations, pytest.mark.slow]

SIZES = dict(vocab_size=VOCAB, layers=2, width=16, heads=4, kv_heads=2, head_dim=4, mlp_width=24)
WIDE = dict(dtype="float64", accumulate="float64")
RATE = 0.5
"""Learning rate."""
COUNT = 10
"""Sequences of a tree."""
WHOLE = COUNT * LENGTH
"""Tokens of a block into which every tree fits."""
CHUNKS = (1, 3, 7, WHOLE)


class Passes(NamedTuple):
    """A learner's dense gradient and the passes over a tree, compiled."""

    learner: Learner
    state: Any
    dense: Callable[..., Any]
    arrive: Callable[..., Any]
    tree: TreePasses
    push: Callable[..., Any]
    pop: Callable[..., Any]


@cache
def passes(preset: str, walks: int = 1, **options: Any) -> Passes:
    settings = dict(options.pop("algorithm", {}))
    is_wide, mesh = options.pop("is_wide", False), options.pop("mesh", None)
    model = Model(
        ModelConfig(**SIZES, **(WIDE if is_wide else {}), **options),
        CharTokenizer("".join(map(chr, range(97, 97 + VOCAB - 2)))),
    )
    algorithm = preset_settings({"preset": preset, "kl": {"coef": 0.0}, "minibatches": 1, **settings})
    learner = Learner(
        model,
        AlgorithmConfig.model_validate(algorithm),
        optax.sgd(RATE),
        rows=COUNT,
        length=LENGTH,
        mesh=make_mesh({"data": 1, "fsdp": 1, "tensor": 1, **(mesh or {})}, jax.devices(), "the trainer"),
        logp_chunk=8,
        remat="none",
    )
    rng = np.random.default_rng(5)
    state = learner.init(random_params(model, 0))
    if state.critic is not None:
        noise = lambda leaf: leaf + 0.1 * rng.normal(size=leaf.shape).astype(leaf.dtype)  # noqa: E731
        state = state.replace(critic=jax.tree.map(noise, state.critic))
    tree = TreePasses(learner.objective, learner.mesh, walks, LENGTH, Blocks(WHOLE, LENGTH))
    gradient = learner.objective.gradient
    return Passes(
        learner,
        state,
        jax.jit(lambda state, micro: gradient(state.params, state.critic, micro, state.kl_control)),
        jax.jit(learner.objective.arrive),
        tree,
        jax.jit(tree.push),
        jax.jit(tree.pop),
    )


def sequences_of(trajectories: list[Trajectory], batch: Any, tree: PrefixTree) -> Sequences:
    trained = trained_on_paths(tree, list(map(Sampled.of, trajectories)), LENGTH)
    temperature = trained.temperature.astype(batch.advantages.dtype)
    return Sequences(jnp.asarray(batch.tokens), None, *map(jnp.asarray, (trained.is_trained, temperature)))


def steps(walk: Walk) -> list[tuple[int, WalkStep]]:
    """The steps, padded to LENGTH or WHOLE columns: two programs run them whatever the block's size."""

    def padded(x: Any) -> Any:
        width = LENGTH if x.shape[1] <= LENGTH else WHOLE
        return jnp.pad(x, ((0, 0), (0, width - x.shape[1])))

    endings, each = jnp.asarray(walk.endings), zip(walk.kinds.tolist(), walk.rows, walk.columns, strict=True)
    return [
        (kind, WalkStep(endings, *jnp.asarray(rows.T), *map(padded, columns))) for kind, rows, columns in each
    ]


def gradient_by_tree(of: Passes, batch: Any, sequences: Sequences, walk: Walk) -> Gradients:
    """The sums after all steps, and what is left of the slopes."""
    programs, state = of.learner.programs, of.state
    slopes, path = of.tree.no_slopes(), of.tree.empty_path()
    sums = programs._zero_sums()[0], of.learner.objective.no_metrics(walk.rows.shape[1], LENGTH)
    gradients = Gradients(sums, slopes)
    for kind, step in steps(walk):
        if kind == PUSH:
            path, _ = of.push(state.params, state.critic, path, {}, sequences, step)
        else:
            gradients = of.pop(state, gradients, path, batch, sequences, step)
    return gradients


def error(found: Any, right: Any) -> float:
    """The largest error of a leaf, relative to the leaf's largest value."""
    each = jax.tree.map(lambda x, y: float(jnp.abs(x - y).max() / jnp.abs(y).max()), found, right)
    return max(jax.tree.leaves(each))


def tried(of: Passes, seed: int, blocks: Blocks, in_order: bool, walks: int = 1, **options: Any) -> float:
    """Asserts that nothing is left of the slopes and that metrics agree; returns the gradient's error."""
    trajectories = trie(seed, COUNT, LENGTH, **options)
    dtype = of.learner.model.config.accumulate
    batch = prepared(rows_of(trajectories, LENGTH), seed, dtype)
    tree = tree_of(list(map(Sampled.of, trajectories)))
    if in_order:
        tree = depth_first(tree, blocks)
    walk = plan_walk(tree, walks, blocks)
    batch = jax.tree.map(jnp.asarray, batch)
    sums, slopes = gradient_by_tree(of, batch, sequences_of(trajectories, batch, tree), walk)
    (grads, metrics) = of.dense(of.state, batch)
    assert not any(jnp.any(leaf) for leaf in jax.tree.leaves(slopes))
    for name in ("tokens", "entropy"):
        np.testing.assert_allclose(sums[1][name], metrics[name], rtol=1e-5)
    return error(sums[0], grads)


@pytest.mark.parametrize("chunk", CHUNKS)
def test_gradients_are_the_dense_ones_in_float64(chunk: int):
    """Fourteen random trees for each chunk size, with and without cut tail and order, three times each."""
    cases = [(cuts_tail, in_order) for cuts_tail in (True, False) for in_order in (True, False)]
    with jax.enable_x64(True):
        of = passes("decoupled_ppo", is_wide=True, algorithm=WITH_ENTROPY)
        for seed in range(14):
            cuts_tail, in_order = cases[seed % 4]
            assert (
                tried(of, 100 * chunk + seed, Blocks(chunk, chunk, cuts_tail, call_tokens=0), in_order)
                <= 1e-9
            )


@pytest.mark.parametrize("mesh", [pytest.param({"data": 2}, marks=pytest.mark.soak), {"fsdp": 2}])
def test_gradients_of_two_devices_are_the_dense_ones_in_float64(mesh: dict[str, int]):
    """Five random trees. The optimiser is SGD, so the step is the gradient."""
    with jax.enable_x64(True):
        one, two = (
            passes("decoupled_ppo", is_wide=True, algorithm=WITH_ENTROPY, mesh=each)
            for each in (None, Frozen(mesh))
        )
        learner, start = two.learner, jax.device_get(two.state.params)
        tree = TreeUpdate(
            learner.objective, learner.programs, learner.mesh, LENGTH, Blocks(7, 7, call_tokens=0)
        )
        for seed in range(5):
            batch = prepared(rows_of(trie(seed, COUNT, LENGTH), LENGTH), seed, np.float64)
            sequences, walks = tree._planned(batch, 1, TOKENS)
            assert (walks[0].training.rows[:, :, 1].sum(axis=0) > 0).all()
            on_mesh = TreeBatch(jax.tree.map(tree._everywhere, batch), sequences, walks)
            state, _ = tree.update(learner.init(start), on_mesh, None)
            found = jax.tree.map(lambda old, new: (old - new) / RATE, start, jax.device_get(state.params))
            right, _ = one.dense(one.state, jax.tree.map(jnp.asarray, batch))
            assert error(found, jax.device_get(right)[0]) <= 1e-9


class Frozen(dict):
    """Settings that `cache` can hash."""

    def __hash__(self) -> int:  # type: ignore[override]
        return hash(repr(self))


WITH_ENTROPY = Frozen(entropy_coef=0.1, proximal="recompute")


@pytest.mark.parametrize(
    ("preset", "options"),
    [
        ("gspo", {"walks": 3}),
        pytest.param("ppo", {"has_qkv_bias": True, "is_tied": False}, marks=pytest.mark.soak),
        ("ppo", {"algorithm": Frozen(critic={"kind": "shared"})}),
        ("grpo", {"experts": 5, "experts_per_token": 2, "expert_width": 8, "shared_width": 4}),
    ],
)
def test_gradients_are_the_dense_ones_with_sequence_losses_critics_and_several_walks(preset, options):
    """Among sequences of two temperatures, which share no trained token."""
    walks = options.get("walks", 1)
    of = passes(preset, **options)
    for seed in range(3):
        assert tried(of, seed, Blocks(5, 5, call_tokens=0), True, walks, temperatures=(1.0, 0.5)) <= 1e-4


def test_scores_of_a_forward_walk_are_the_dense_ones():
    of = passes("ppo", algorithm=Frozen(proximal="recompute"))
    trajectories = trie(3, COUNT, LENGTH)
    batch = prepared(rows_of(trajectories, LENGTH), 3)
    tree = depth_first(tree_of(list(map(Sampled.of, trajectories))), Blocks(5, 5, call_tokens=0))
    walk = plan_walk(tree, 1, Blocks(5, 5, call_tokens=0), with_gradients=False)
    sequences, path = sequences_of(trajectories, batch, tree), of.tree.empty_path()
    zero = jnp.zeros((COUNT, LENGTH))
    scores = {"logp": zero, "values_after": zero}
    assert walk.tokens(PUSH) == tree.tokens < tree.sequence_tokens
    for kind, step in steps(walk):
        assert kind != POP
        path, scores = of.push(of.state.params, of.state.critic, path, scores, sequences, step)
    right = of.arrive(of.state.params, of.state.critic, jax.tree.map(jnp.asarray, batch))
    mask, is_token = batch.loss_mask, batch.segment_ids > 0
    np.testing.assert_allclose(scores["logp"][mask], right["proximal_logp"][mask], rtol=0, atol=1e-5)
    np.testing.assert_allclose(
        scores["values_after"][is_token], right["values_after"][is_token], rtol=0, atol=1e-5
    )
