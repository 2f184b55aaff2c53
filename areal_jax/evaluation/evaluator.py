"""Evaluates versions of a model on held-out tasks; one compiled generation engine decodes all versions."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from jax.sharding import Mesh

from areal_jax.assembly.parts import make_engine
from areal_jax.config.tree import Config
from areal_jax.evaluation.result import RIGHT, TaskResult, overall, task_figures
from areal_jax.evaluation.run import EvalSettings, OnProgress, evaluate
from areal_jax.models.model import Model
from areal_jax.tasks.source import WeightedTask
from areal_jax.types import VersionedParams
from areal_jax.weights.digest import digest
from areal_jax.weights.store import is_in, wire_copy


class Evaluator:
    """Evaluates versions of one model on held-out tasks, on one mesh of devices."""

    def __init__(
        self, model: Model, asked: Mapping[str, WeightedTask], settings: EvalSettings, mesh: Mesh
    ) -> None:
        self._asked, self._settings = asked, settings
        # The version that is trained is evaluated, not the one that hosts quantise.
        full = settings.config.generation.model_copy(update={"quantize": "none"})
        self._engine = make_engine(full, model, mesh)
        self.shardings = self._engine.param_shardings

    def figures(self, value: VersionedParams, progress: OnProgress = lambda *_: None) -> dict[str, Any]:
        """Evaluates one version and returns its figures as plain values.

        `progress(task, "greedy" or "sampled", prompts, prompts done)` is called at the start and as rewards
        arrive; an exception in `progress` ends the evaluation. Raises ArealError if the evaluation fails.
        """
        settings = self._settings
        value = as_served(value, settings.config)
        result = evaluate(self._engine, value, self._asked, settings, progress)
        return {
            "version": value.version,
            "digest": value.digest,
            "limit": settings.limit,
            "samples": settings.samples,
            "threshold": RIGHT,
            "seed": settings.config.run.seed,
            "max_tokens": settings.config.generation.max_tokens,
            "evaluated_s": time.time(),
        } | _tables(result, self._asked)


def as_served(value: VersionedParams, config: Config) -> VersionedParams:
    """Returns `value` as generation hosts get it: parameters in weights.wire_dtype, and their digest."""
    dtype = config.wire_dtype
    if not is_in(value.params, dtype):
        return wire_copy(value, dtype)
    return value._replace(digest=value.digest or digest(value.params))


def _tables(result: Mapping[str, TaskResult], asked: Mapping[str, WeightedTask]) -> dict[str, Any]:
    together = overall(result)
    passes = together.passes.values()
    seconds = sum(one.seconds for one in passes)
    return {
        "tasks": {name: {"split": asked[name].split} | task_figures(one) for name, one in result.items()},
        "overall": task_figures(together),
        "seconds": seconds,
        "tokens_per_s": sum(one.tokens for one in passes) / seconds,
    }
