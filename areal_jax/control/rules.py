"""The few numbers of the config that the control plane and its audit obey."""

from __future__ import annotations

from dataclasses import dataclass

from areal_jax.config import Config


@dataclass(frozen=True)
class Rules:
    steps: int
    """Batches to train, unless RunStarted or RunResumed say otherwise."""
    batch_size: int
    """Groups a batch (B)."""
    group_size: int
    """Samples a group (G)."""
    strategy: str = "interruptible"
    max_staleness: int | None = 0
    """None = unbounded."""
    max_token_age: int | None = None
    max_concurrent: int | None = None
    group_filter: str = "none"
    keep_checkpoints: int = 2

    @classmethod
    def of(cls, config: Config | Rules) -> Rules:
        if isinstance(config, Rules):
            return config
        return cls(
            steps=config.run.steps,
            batch_size=config.trainer.batch_size,
            group_size=config.algorithm.group_size,
            strategy=config.control.strategy,
            max_staleness=config.max_staleness,
            max_token_age=config.control.max_token_age,
            max_concurrent=config.control.max_concurrent,
            group_filter=config.algorithm.group_filter,
            keep_checkpoints=config.trainer.keep_checkpoints,
        )
