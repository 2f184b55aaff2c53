"""The few numbers of the config that the control plane and its audit obey."""

from __future__ import annotations

from dataclasses import dataclass

from areal_jax.config import Config

BOUNDED = ("sync", "one_step", "pinned")
"""Strategies whose max_staleness bounds every age, not the mean alone."""


@dataclass(frozen=True)
class Rules:
    steps: int
    """Batches to train, unless RunStarted or RunResumed say otherwise."""
    batch_size: int
    """Groups a batch (B)."""
    group_size: int
    """Samples a group (G)."""
    strategy: str = "interruptible"
    on_update: str = "recompute"
    max_staleness: int | None = 0
    """None = unbounded."""
    max_token_age: int | None = None
    max_concurrent: int | None = None
    group_filter: str = "none"
    keep_checkpoints: int = 2

    @property
    def oldest_trained(self) -> int | None:
        """Versions that a token may be behind when it is trained; None = bounded in the mean alone."""
        is_bounded = self.strategy in BOUNDED or self.max_staleness == 0
        return self.max_staleness if is_bounded else self.max_token_age

    @property
    def has_one_version(self) -> bool:
        """Whether every trajectory is of one version alone."""
        return self.on_update in ("pinned", "drain")

    @classmethod
    def of(cls, config: Config | Rules) -> Rules:
        if isinstance(config, Rules):
            return config
        return cls(
            steps=config.run.steps,
            batch_size=config.trainer.batch_size,
            group_size=config.algorithm.group_size,
            strategy=config.control.strategy,
            on_update=config.on_update,
            max_staleness=config.max_staleness,
            max_token_age=config.control.max_token_age,
            max_concurrent=config.control.max_concurrent,
            group_filter=config.algorithm.group_filter,
            keep_checkpoints=config.trainer.keep_checkpoints,
        )
