"""The settings that the control plane and the audit read, taken from the config."""

from __future__ import annotations

from dataclasses import dataclass

from areal_jax.config.tree import Config

BOUNDED = ("sync", "one_step", "pinned")
"""Strategies in which max_staleness bounds the age of every trained token, not only the mean age."""


@dataclass(frozen=True)
class Rules:
    steps: int
    """Number of batches to train, unless a RunStarted or RunResumed event contains another number."""
    batch_size: int
    """Groups in a batch (B)."""
    group_size: int
    """Samples in a group (G)."""
    strategy: str = "interruptible"
    on_update: str = "recompute"
    max_staleness: int | None = 0
    """Bound on staleness (eta), in versions; None = unbounded."""
    max_token_age: int | None = None
    max_concurrent: int | None = None
    group_filter: str = "none"
    keep_checkpoints: int = 2

    @property
    def oldest_trained(self) -> int | None:
        """Largest age that a trained token may have, in versions; None if no bound holds for every token."""
        # At eta = 0 the gate alone keeps every group in the version that trains it.
        is_bounded = self.strategy in BOUNDED or self.max_staleness == 0
        return self.max_staleness if is_bounded else self.max_token_age

    @property
    def has_one_version(self) -> bool:
        """Whether each trajectory is of one version, given what hosts do at a new one (on_update)."""
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
