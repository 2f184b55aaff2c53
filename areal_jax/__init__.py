"""areal-jax: asynchronous reinforcement learning for language-model reasoning, in JAX.

`import areal_jax as aj` loads nothing heavy; each name below is imported when it is first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from areal_jax.config import AlgorithmConfig, Config, load_config
    from areal_jax.generation.engine import Engine
    from areal_jax.generation.rollout import rollout
    from areal_jax.runtime.api import load_model, preset
    from areal_jax.runtime.jobs import RunResult, resume, run
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
    "AlgorithmConfig": "config",
    "Config": "config",
    "load_config": "config",
    "Engine": "generation.engine",
    "rollout": "generation.rollout",
    "load_model": "runtime.api",
    "preset": "runtime.api",
    "RunResult": "runtime.jobs",
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

__all__ = [
    "AlgorithmConfig",
    "Batch",
    "Completion",
    "Config",
    "Engine",
    "Group",
    "Learner",
    "Prompt",
    "Reward",
    "RunResult",
    "Sampling",
    "Task",
    "Trajectory",
    "VersionedParams",
    "load_config",
    "load_model",
    "pack",
    "preset",
    "resume",
    "rollout",
    "run",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'areal_jax' has no attribute {name!r}")
    return getattr(importlib.import_module(f"areal_jax.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
