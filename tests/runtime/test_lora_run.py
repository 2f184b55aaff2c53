"""Runs with adapters: what they train, and what convert makes of them."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from areal_jax.assembly.api import load_model
from areal_jax.assembly.conversion import convert
from areal_jax.assembly.parts import assemble, first_params
from areal_jax.assembly.sources import run_params, run_source
from areal_jax.config.loading import load_config
from areal_jax.config.tree import Config
from areal_jax.jobs.local import run
from areal_jax.models.attention import PackedAttention
from areal_jax.models.lora import adapters_of, base_of
from areal_jax.models.model import Model
from areal_jax.replay.folder_audit import audit_run
from areal_jax.types import ArealError
from areal_jax.weights.digest import digest
from tests.small_run import RECIPE, small

pytestmark = pytest.mark.slow


def logits(model: Model, params: Any) -> np.ndarray:
    """Of every id of the vocabulary in turn."""
    tokens = jnp.arange(model.config.vocab_size)[None]
    hidden, _ = model.hidden(params, tokens, tokens, PackedAttention(jnp.ones_like(tokens)))
    return np.asarray(model.logits(params, hidden[0]))


def same_bits(one: Any, other: Any) -> bool:
    pairs = zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True)
    return all(np.asarray(a).tobytes() == np.asarray(b).tobytes() for a, b in pairs)


@pytest.fixture(scope="module", params=[pytest.param("none", marks=pytest.mark.soak), "int4"])
def tuned(
    tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> tuple[Config, list[dict[str, Any]]]:
    """A run of adapters alone beside floats or codes, published through files in bfloat16, and its rows."""
    config = small(
        tmp_path_factory.mktemp("lora") / "run",
        "run.steps=2",
        "control.max_staleness=0",
        "model.lora={rank: 2, targets: q|v|down}",
        f"model.quantize={request.param}",
        "weights={backend: orbax, wire_dtype: bfloat16}",
        "trainer.supervised.steps=1",
        "trainer={learning_rate: 0.03, lr_warmup_steps: 0}",
    )
    return config, list(run(config, stream=io.StringIO()).metrics)


def test_a_run_moves_adapters_and_no_bit_of_the_base(tuned: tuple[Config, list[dict[str, Any]]]):
    """The supervised start is in the base: it is what the adapters train from."""
    config, rows = tuned
    theirs, source = run_source(config.run.folder)
    params = run_params(config.run.folder, theirs, source.model)
    first = first_params(assemble(config))
    assert same_bits(base_of(params), base_of(first))
    assert not same_bits(base_of(first)["norm"], source.model.base.init(0)["norm"])
    moved = jax.tree.map(lambda a, b: float(np.abs(a - b).max()), adapters_of(params), adapters_of(first))
    assert min(jax.tree.leaves(moved)) > 1e-3
    assert digest(params) == rows[-1]["params_digest"]
    assert audit_run(config.run.folder).ok
    assert max(row["logp_gap_max"] for row in rows) < 0.1  # bfloat16 sampled, float32 recomputed


def test_convert_writes_the_merged_model_its_base_and_its_adapter(
    tuned: tuple[Config, list[dict[str, Any]]], tmp_path: Path
):
    config, _ = tuned
    run_folder = config.run.folder
    theirs, source = run_source(run_folder)
    params = run_params(run_folder, theirs, source.model)
    figures = convert(str(run_folder), tmp_path / "merged")
    assert figures["parameters"] == source.model.base.parameter_count
    convert(str(run_folder), tmp_path / "base", form="base")
    figures = convert(str(run_folder), tmp_path / "adapter", "bfloat16", "adapter")
    assert figures["parameters"] == sum(leaf.size for leaf in jax.tree.leaves(adapters_of(params)))
    about = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    named = f"the folder written by: areal-jax convert {run_folder} FOLDER --as base"
    assert about["base_model_name_or_path"] == figures["base"] == named
    model, again = load_model(str(run_folder))
    assert model.config.lora is None
    ours = logits(source.model, params)
    np.testing.assert_allclose(logits(model, again), ours, rtol=0, atol=1e-4)
    assert np.abs(logits(model, source.model.without_adapters(params)) - ours).max() > 1e-3


def test_forms_that_a_source_does_not_have_are_refused(
    tuned: tuple[Config, list[dict[str, Any]]], tmp_path: Path
):
    with pytest.raises(ArealError, match="--as peft is unknown; choose one of: merged, adapter, base"):
        convert("random", tmp_path / "x", form="peft")
    with pytest.raises(ArealError, match="--as adapter: random is not a run with adapters"):
        convert("random", tmp_path / "x", form="adapter")
    with pytest.raises(
        ArealError, match=r"quantize=nf4 with trainer.trainable=everything: blocks\.attention"
    ):
        assemble(small(tmp_path / "y", "model.quantize=nf4"))
    with pytest.raises(ArealError, match=r"trainer.trainable=blocks.mlp.dwn matches no complete path"):
        assemble(small(tmp_path / "y", "trainer.trainable=blocks.mlp.dwn"))
    assert not (tmp_path / "x").exists()


@pytest.mark.soak
def test_adapters_learn_the_quickstart(tmp_path: Path):
    """Half the recipe's steps with rank 8: rewards rise, by adapters alone."""
    words = ("run.steps=100", "model.lora.rank=8", "observe.tensorboard=false", "observe.report=false")
    config = load_config(RECIPE, *words, f"run.dir={tmp_path / 'run'}")
    rewards = [row["reward_mean"] for row in run(config, stream=io.StringIO()).metrics]
    assert sum(rewards[:10]) / 10 < 0.3 < 0.45 < sum(rewards[-25:]) / 25
    theirs, source = run_source(config.run.folder)
    params = run_params(config.run.folder, theirs, source.model)
    first = first_params(assemble(config))
    assert same_bits(base_of(params), base_of(first))
    assert not same_bits(adapters_of(params), adapters_of(first))
