"""Trainable leaves: what is frozen keeps its bits and has no gradient, no moments, no copy."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
import pytest

from areal_jax.config.presets import preset_settings
from areal_jax.config.sections import ADAPTERS, AlgorithmConfig
from areal_jax.models.config import Lora
from areal_jax.models.lora import adapters_of, base_of
from areal_jax.models.model import Model
from areal_jax.parallel.mesh import make_mesh
from areal_jax.trainer.checkpoint import Checkpointer, restore
from areal_jax.trainer.trainable import Trainable
from areal_jax.trajectories.packing import pack
from areal_jax.trees.tree_learner import TreeLearner
from areal_jax.types import ArealError, Batch
from tests.trainer.conftest import LENGTH, MakeLearner, distance, make_groups, random_params, same_bits
from tests.trainer.prefix_trees import tree_groups

pytestmark = pytest.mark.few_optimizations

RANK, ALPHA, DECAY = 2, 8.0, 0.75
SOME = r"norm|blocks\.mlp\.(up|gate)"


def make(model: Model, trainable: str | None, optimizer: Any, **algorithm: Any) -> TreeLearner:
    settings = {"preset": "grpo", "kl": {"coef": 0.0}, "group_size": 4, "proximal": "recompute", **algorithm}
    return TreeLearner(
        model,
        AlgorithmConfig.model_validate(preset_settings(settings)),
        optimizer,
        rows=2,
        length=LENGTH,
        mesh=make_mesh({"data": 1, "fsdp": 1, "tensor": 1}, jax.devices(), "the trainer"),
        logp_chunk=8,
        trainable=trainable,
    )


@pytest.fixture(scope="module")
def with_lora(model: Model) -> Model:
    lora = Lora(RANK, ALPHA, "q|out|down")
    return Model(dataclasses.replace(model.config, lora=lora), model.tokenizer)


@pytest.fixture(scope="module")
def lora_params(with_lora: Model) -> Any:
    """Neither factor of any adapter is 0."""
    return random_params(with_lora, 1)


@pytest.fixture(scope="module")
def batch() -> Batch:
    return pack(make_groups(), 2, LENGTH)


def count(tree: Any) -> int:
    return sum(leaf.size for leaf in jax.tree.leaves(tree))


@pytest.mark.slow
def test_an_adapters_gradient_is_the_chain_rule_on_its_matrix(
    with_lora: Model, lora_params: Any, batch: Batch, learner: MakeLearner
):
    """d/da = s dW b^T and d/db = s a^T dW, with dW from the merged model, which knows of no adapters."""
    tuned, plain = make(with_lora, ADAPTERS, optax.sgd(0.5)), learner()
    merged = with_lora.merged(lora_params)
    state = plain.init(merged)
    micro = plain.micro_batches(plain.prepare(state, batch))[0][0]
    assert micro is not None
    of_matrices = plain.programs.begin(state, micro)[0][0]["blocks"]
    gradient = tuned.programs.begin(tuned.init(lora_params), micro)[0][0]
    assert count(gradient) == count(adapters_of(lora_params))
    scale = ALPHA / RANK
    for part, name, inputs in (("attention", "q", 1), ("attention", "out", 2), ("mlp", "down", 1)):
        w = np.asarray(of_matrices[part][name], np.float64)
        w = w.reshape(2, int(np.prod(w.shape[1 : 1 + inputs])), -1)
        a, b = (np.asarray(lora_params["blocks"][part][f"{name}_lora"][leaf]) for leaf in "ab")
        found = gradient["blocks"][part][f"{name}_lora"]
        want_a = scale * np.einsum("lio,lro->lir", w, b.reshape(2, RANK, -1)).reshape(a.shape)
        want_b = scale * np.einsum("lir,lio->lro", a.reshape(2, -1, RANK), w).reshape(b.shape)
        assert np.abs(want_a).max() > 1e-3 and np.abs(want_b).max() > 1e-3
        np.testing.assert_allclose(found["a"], want_a, rtol=0, atol=2e-5)
        np.testing.assert_allclose(found["b"], want_b, rtol=0, atol=2e-5)


@pytest.mark.slow
def test_a_subset_takes_the_steps_that_it_takes_in_the_whole(
    model: Model, params: Any, batch: Batch, learner: MakeLearner
):
    some, everything = make(model, SOME, optax.sgd(0.5, momentum=0.9)), learner()
    states = []
    for one in (some, everything):
        state = one.init(params)
        states.append(one.update(state, one.prepare(state, batch))[0].params)
    few, all_moved = states
    trained = Trainable(SOME)
    assert count(trained.of(params)) == params["norm"].size + 2 * params["blocks"]["mlp"]["up"].size
    assert (
        distance(trained.of(few), trained.of(all_moved))
        < 1e-6
        < 1e-3
        < distance(trained.of(few), trained.of(params))
    )
    assert same_bits(trained.whole(trained.of(params), few), params)  # the rest did not move


@pytest.mark.slow
def test_adapters_train_the_same_over_prefix_trees(with_lora: Model, lora_params: Any):
    tuned, groups = make(with_lora, ADAPTERS, optax.sgd(0.5)), tree_groups(0, LENGTH)
    states = []
    for layout, learns in (("apart", tuned.over_trees()), ("shared", tuned)):
        state = tuned.init(lora_params)
        batch = learns.prepare(state, pack(groups, 2, LENGTH, layout=layout))
        states.append(learns.update(state, batch)[0].params)
    over_tree, packed = states
    assert distance(over_tree, packed) < 1e-5 < 1e-3 < distance(packed, lora_params)
    assert same_bits(base_of(over_tree), base_of(lora_params))


@pytest.mark.slow
def test_adapters_with_a_critic_a_moving_reference_and_weight_decay(
    with_lora: Model, lora_params: Any, batch: Batch, tmp_path: Path
):
    """Two updates, a checkpoint, a third: moments, reference and critic exist for adapters alone."""
    tuned = make(
        with_lora,
        ADAPTERS,
        optax.adamw(1e-2, weight_decay=0.1),
        preset="ppo",
        critic={"kind": "separate"},
        kl={"coef": 0.1},
        reference="ema",
        reference_decay=DECAY,
    )
    adapters = count(adapters_of(lora_params))
    first = adapters_of(lora_params)
    state = tuned.init(lora_params)
    head = with_lora.config.width + 1
    assert count(state.reference) == adapters
    assert count(state.critic) == adapters + head
    assert count(state.optimizer) == 2 * adapters + 1
    assert count(state.critic_optimizer) == 2 * (adapters + head) + 1
    assert count(tuned.programs.zero_sums()[0]) == 2 * adapters + head
    reference = first
    for _ in range(2):
        prepared = tuned.prepare(state, batch)
        state, _ = tuned.update(state, prepared)
        now = adapters_of(state.params)
        reference = jax.tree.map(lambda old, new: DECAY * old + (1 - DECAY) * new, reference, now)
    np.testing.assert_array_less(1e-4, np.abs(np.asarray(prepared.ref_logp - prepared.proximal_logp)).max())
    assert same_bits(base_of(state.params), base_of(lora_params))
    assert distance(adapters_of(state.params), first) > 1e-3
    assert distance(adapters_of(state.reference), reference) < 1e-6
    assert distance(adapters_of(state.critic["trunk"]), first) > 1e-3
    checkpointer = Checkpointer(tmp_path)
    checkpointer.save(state, lambda version: None, 60.0)
    checkpointer.close(60.0)
    restored = restore(tmp_path, tuned.abstract_state()).state
    assert restored is not None and same_bits(restored, state)
    states = [tuned.update(one, tuned.prepare(one, batch))[0] for one in (restored, state)]
    assert same_bits(*states)
    assert tuned.versioned(states[0]).digest == tuned.versioned(states[1]).digest


def test_a_pattern_that_matches_nothing_names_the_nearest_paths(with_lora: Model):
    with pytest.raises(ArealError, match=r"trainable=blocks.mlp.dwn matches no .* blocks\.mlp\.down"):
        Trainable("blocks.mlp.dwn").require(with_lora)
    Trainable(ADAPTERS).require(with_lora)
    with pytest.raises(ArealError, match="matches no complete path"):
        Trainable(ADAPTERS).require(with_lora.base)
