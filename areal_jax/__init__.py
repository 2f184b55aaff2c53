"""areal-jax: asynchronous reinforcement learning for language-model reasoning, in JAX.

`import areal_jax as aj` loads nothing heavy; each name below is imported when it is first used.
"""

from __future__ import annotations

from etils import epy

with epy.lazy_api_imports(globals()):
    from areal_jax.algorithms import advantages, losses
    from areal_jax.assembly.api import load_model, preset
    from areal_jax.config.loading import load_config
    from areal_jax.config.sections import AlgorithmConfig
    from areal_jax.config.tree import Config
    from areal_jax.generation.engine import Engine
    from areal_jax.generation.rollout import rollout
    from areal_jax.jobs.local import resume, run
    from areal_jax.report.run_result import RunResult
    from areal_jax.tasks.task import Task
    from areal_jax.trainer.learner import Learner
    from areal_jax.trainer.pure import objective, prepare
    from areal_jax.trajectories.packing import pack
    from areal_jax.trees.tree_learner import TreeLearner
    from areal_jax.types import (
        Batch,
        Completion,
        Group,
        PolicyOutputs,
        PreparedBatch,
        Prompt,
        Reward,
        Sampling,
        Trajectory,
        VersionedParams,
    )
    from areal_jax.weights.digest import digest
