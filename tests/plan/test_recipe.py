"""The abstract arguments of a recipe's programs are those that a run passes: shapes, dtypes, fields."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from areal_jax.assembly.memory_table import memory_table
from areal_jax.assembly.parts import make_engine, make_learner
from areal_jax.config.loading import load_config
from areal_jax.lab.bench.measure import random_trajectory
from areal_jax.plan.recipe import TREE_PROGRAMS, Recipe, open_recipe, recipe_source
from areal_jax.trainer.compiled import Program
from areal_jax.trajectories.packing import pack
from areal_jax.trees.tree_learner import TreeLearner
from areal_jax.types import Group, Prompt, SampleId

QUICKSTART = Path(__file__).parents[2] / "configs" / "quickstart.yaml"


def arguments(recipe: Recipe, role: str) -> dict[str, tuple]:
    return {one.name: one.arguments for side in recipe.sides if side.role == role for one in side.programs}


def shapes(tree: Any) -> list[tuple[str, tuple[int, ...], str]]:
    """Paths, shapes and dtypes of all leaves; of Python numbers only their type, as jit sees them."""
    return [
        (jax.tree_util.keystr(path), np.shape(leaf), str(jnp.result_type(leaf)))
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
    ]


@pytest.mark.slow
@pytest.mark.parametrize(
    "words",
    [
        (),
        ("algorithm.minibatches=2", "algorithm.truncation=mask"),
        ("generation.top_k=4", "generation.support_size=4", "algorithm.advantage_settings.scale=none"),
    ],
)
def test_a_micro_batch_is_that_of_a_packed_batch_of_full_samples(words: tuple[str, ...]):
    config = load_config(QUICKSTART, "trainer.rows=8", "trainer.batch_size=4", *words)
    c, g = config.algorithm, config.generation
    model = recipe_source(config)[0].model
    numbers = np.random.default_rng(0)

    def group(ordinal: int) -> Group:
        made = [
            random_trajectory(SampleId(ordinal, member), g.length, numbers, 20)
            for member in range(c.group_size)
        ]
        support = np.full((g.length, g.support_size), -1, np.int32) if g.support_size else None
        return Group(ordinal, Prompt("a"), tuple(replace(one, support=support) for one in made))

    recipe = open_recipe(config, jax.devices())
    learner = make_learner(config, model, recipe.devices, None)
    batch = pack([group(i) for i in range(4)], 8, learner.length, c.minibatches)
    state = learner.init(model.init(0))
    micros = learner.micro_batches(learner.prepare(state, batch))
    planned = arguments(recipe, "trainer")["begin"]
    assert shapes(planned[1]) == shapes(micros[0][0])
    assert shapes(planned[0]) == shapes(state)
    calls = {one.name: one.calls for one in recipe.sides[0].programs}
    assert calls["begin"] + calls["accumulate"] == sum(map(len, micros))


PPO = ("algorithm.preset=ppo", "algorithm.kl.coef=0.1")


@pytest.mark.slow
@pytest.mark.parametrize("words", [(), PPO])
def test_the_programs_over_trees_are_those_that_a_step_calls(
    words: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
):
    """Nothing is compiled or computed: each program returns zeros."""
    sizes = ("trainer.batch_size=4", "trainer.tree_block=32", "algorithm.minibatches=2")
    config = load_config(QUICKSTART, *sizes, "trainer.compute=tree", *words)
    recipe, size = open_recipe(config, jax.devices()), config.generation.length
    learner = make_learner(config, recipe.model, recipe.devices, None)
    numbers = np.random.default_rng(0)

    def group(ordinal: int) -> Group:
        first, *others = (
            random_trajectory(SampleId(ordinal, member), size, numbers, 20)
            for member in range(config.algorithm.group_size)
        )
        for one in others:
            one.tokens[: size // 2] = first.tokens[: size // 2]
        return Group(ordinal, Prompt("a"), (first, *others))

    groups = [group(ordinal) for ordinal in range(4)]
    batch = pack(groups, 8, learner.length, 2, "apart")
    state, seen = learner.init(recipe.model.init(0)), []

    def zeros(program: Program, *args: Any) -> Any:
        seen.append(shapes(args))
        return jax.tree.map(
            lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), jax.eval_shape(program._jitted, *args)
        )

    monkeypatch.setattr(Program, "__call__", zeros)
    assert isinstance(learner, TreeLearner)
    trees = learner.over_trees()
    trees.update(state, trees.prepare(state, batch))
    planned = {one.name: one for one in recipe.sides[0].programs if one.name in TREE_PROGRAMS}
    assert len(planned) == (4 if words else 3)
    columns = ("[5].sequence", "[5].position", "[5].piece")  # as many as the bucket of the step has
    called = [[leaf for leaf in each if leaf[0] not in columns] for each in seen]
    for one in planned.values():
        assert [leaf for leaf in shapes(one.arguments) if leaf[0] not in columns] in called, one.name
        assert one.calls > 0


def test_of_two_ways_the_cheaper_one_is_called_and_both_need_memory():
    words = ("trainer.batch_size=4", "trainer.rows=8")
    config = load_config(QUICKSTART, *words, "trainer.compute=auto")

    def calls(*words: str) -> dict[str, float]:
        recipe = open_recipe(load_config(QUICKSTART, *words), jax.devices())
        return {one.name: one.calls for one in recipe.sides[0].programs}

    of_auto = calls(*words, "trainer.compute=auto")
    packed, tree = calls(*words), calls(*words, "trainer.compute=tree")
    assert of_auto.keys() == packed.keys() | tree.keys()
    is_tree = of_auto["pop"] > 0
    expected = dict.fromkeys(of_auto, 0.0) | (tree if is_tree else packed)
    assert of_auto == expected
    model = recipe_source(config)[0].model
    table = {what: size for _, what, size in memory_table(config, model, "split")}
    assert table["a prefix tree's path, and its gradient in float32"] > 0


def test_a_hosts_programs_are_those_that_it_warms_up(monkeypatch: pytest.MonkeyPatch):
    config = load_config(QUICKSTART)
    engine = make_engine(config.generation, recipe_source(config)[0].model)
    seen: dict[str, list[tuple]] = {}

    def record(name: str, jitted: Any) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            seen.setdefault(name, []).append(args)
            return jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), jitted.eval_shape(*args))

        return call

    planned = engine.abstract_calls("float32")
    for name, (jitted, _) in planned.items():
        attribute = next(key for key, value in vars(engine.jitted).items() if value is jitted)
        monkeypatch.setattr(engine.jitted, attribute, record(name, jitted))
    engine.warm(engine.load_params(engine.blank("float32")))
    for name, (jitted, args) in planned.items():
        assert jitted.eval_shape(*args) is not None  # it can be traced
        assert shapes(args) in [shapes(given) for given in seen[name]], name


def test_a_hosts_queries_see_the_keys_before_them():
    """The prompt of 37 tokens is prefilled in 3 chunks of 16, the last with 11 queries of padding."""
    words = ("generation.length=64", "generation.max_tokens=27", "generation.prefill_chunk=16")
    host = open_recipe(load_config(QUICKSTART, *words), jax.devices()).sides[1]
    assumed = {one.name: one.assumed for one in host.programs}
    for name, tokens in (("prefill", 37), ("recompute", 64)):
        seen = np.zeros(-(-tokens // 16) * 16)
        seen[:tokens] = np.arange(tokens) + 1
        assert assumed[name].keys == seen.mean()
        assert assumed[name].context == seen.reshape(-1, 16).max(1).mean()
    assert assumed["decode"].keys == assumed["decode"].context == 37 + 27 / 2
