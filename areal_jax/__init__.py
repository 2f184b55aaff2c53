"""areal-jax: asynchronous reinforcement learning for language-model reasoning, in JAX.

`import areal_jax as aj` loads nothing heavy; each name below is imported when it is first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from areal_jax.assembly.api import load_model, preset
    from areal_jax.config.loading import load_config
    from areal_jax.config.sections import AlgorithmConfig
    from areal_jax.config.tree import Config
    from areal_jax.generation.engine import Engine
    from areal_jax.generation.rollout import rollout
    from areal_jax.runtime.context import RunResult
    from areal_jax.runtime.jobs import resume, run
    from areal_jax.tasks.task import Task
    from areal_jax.trainer.learner import Learner
    from areal_jax.trajectories.packing import pack
    from areal_jax.types import (
        Batch,
        Completion,
        Group,
        Prompt,
        Reward,
        Sampling,
        Trajectory,
        VersionedParams,
    )

_HOMES = {
    "AlgorithmConfig": "config.sections",
    "Config": "config.tree",
    "load_config": "config.loading",
    "Engine": "generation.engine",
    "rollout": "generation.rollout",
    "load_model": "assembly.api",
    "preset": "assembly.api",
    "RunResult": "runtime.context",
    "resume": "runtime.jobs",
    "run": "runtime.jobs",
    "Task": "tasks.task",
    "Learner": "trainer.learner",
    "pack": "trajectories.packing",
    "Batch": "types",
    "Completion": "types",
    "Group": "types",
    "Prompt": "types",
    "Reward": "types",
    "Sampling": "types",
    "Trajectory": "types",
    "VersionedParams": "types",
}

__all__ = list(_HOMES)  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'areal_jax' has no attribute {name!r}")
    return getattr(importlib.import_module(f"areal_jax.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted(_HOMES)
