"""A run small enough for a test: the quickstart's loop with a narrow model and few steps."""

from __future__ import annotations

from pathlib import Path

from areal_jax.config.loading import load_config
from areal_jax.config.tree import Config

RECIPE = Path(__file__).parents[1] / "configs" / "quickstart.yaml"

WORDS = (
    "run.steps=5",
    "model.overrides={width: 16, heads: 2, kv_heads: 2, head_dim: 8, mlp_width: 32}",
    "algorithm.group_size=4",
    "generation.slots=4",
    "generation.length=24",
    "generation.max_tokens=18",
    "trainer.batch_size=4",
    "trainer.rows=8",
    "trainer.length=24",
    "trainer.supervised_steps=0",
    "trainer.checkpoint_every=2",
    "observe.tensorboard=false",
    "observe.report=false",
    "runtime.deadline_s=120",
)


def small(folder: Path, *words: str) -> Config:
    return load_config(RECIPE, *WORDS, f"run.dir={folder}", *words)
