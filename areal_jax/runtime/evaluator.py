"""From a version's parameters to its figures: held-out tasks, an engine that is compiled once."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import jax
from jax.sharding import Mesh

from areal_jax.config import Config
from areal_jax.models.model import Model
from areal_jax.runtime.assembly import make_engine
from areal_jax.runtime.eval_result import RIGHT, EvalResult, task_figures
from areal_jax.runtime.evaluation import EvalSettings, Progress, evaluate
from areal_jax.tasks.held_out import HeldOut
from areal_jax.types import VersionedParams
from areal_jax.weights.digest import digest
from areal_jax.weights.store import dtype_in, wire_copy

SAMPLES = 4
"""Completions a prompt for pass@k, unless another number is given."""


def settings_of(config: Config, limit: int | None, samples: int = SAMPLES) -> EvalSettings:
    r = config.runtime
    return EvalSettings(
        config.generation, limit, samples, config.run.seed, r.reward_workers, r.reward_timeout_s, r.deadline_s
    )


class Evaluator:
    """Evaluates versions of one model, one after the other, on one mesh."""

    def __init__(
        self, config: Config, model: Model, asked: HeldOut, settings: EvalSettings, mesh: Mesh
    ) -> None:
        self._config, self._asked, self._settings = config, asked, settings
        self._engine = make_engine(settings.generation, model, mesh)
        self.shardings = self._engine.param_shardings

    def figures(self, value: VersionedParams, progress: Progress = lambda *_: None) -> dict[str, Any]:
        """Of one version, as plain values. Raises ArealError, and whatever `progress` does."""
        value, settings = as_served(value, self._config), self._settings
        result = evaluate(self._engine, value, self._asked.tasks, settings, progress)
        return {
            "version": value.version,
            "digest": value.digest,
            "limit": settings.limit,
            "samples": settings.samples,
            "threshold": RIGHT,
            "seed": settings.seed,
            "max_tokens": settings.generation.max_tokens,
            "evaluated_s": time.time(),
        } | _tables(result, self._asked.splits)


def as_served(value: VersionedParams, config: Config) -> VersionedParams:
    """In weights.wire_dtype, as a run's hosts decode with them, with the digest of that."""
    dtype = config.weights.wire_dtype
    if any(leaf.dtype != dtype_in(leaf.dtype, dtype) for leaf in jax.tree.leaves(value.params)):
        return wire_copy(value, dtype)
    return value._replace(digest=value.digest or digest(value.params))


def _tables(result: EvalResult, splits: Mapping[str, str | None]) -> dict[str, Any]:
    overall = task_figures(result.overall)
    passes = [overall[way] for way in ("greedy", "sampled") if way in overall]
    seconds = sum(one["seconds"] for one in passes)
    return {
        "tasks": {name: {"split": splits[name]} | task_figures(one) for name, one in result.tasks.items()},
        "overall": overall,
        "seconds": seconds,
        "tokens_per_s": sum(one["tokens"] for one in passes) / seconds,
    }
