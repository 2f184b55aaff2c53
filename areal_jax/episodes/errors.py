"""Errors of episodes."""

from __future__ import annotations

from areal_jax.tasks.errors import TaskError


class EpisodeError(TaskError):
    """An episode cannot go on. `reason`: as in `EpisodeFailed`."""

    def __init__(self, message: str, reason: str = "failed_episode") -> None:
        super().__init__(message)
        self.reason = reason


class ToolError(TaskError):
    """A tool raised an error, or exceeded its deadline. The workflow may catch it and go on."""
