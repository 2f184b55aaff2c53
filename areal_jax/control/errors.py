"""The control plane's exception."""

from __future__ import annotations

from areal_jax.types import ArealError


class ControlError(ArealError):
    """Raised for an event that contradicts the control plane's state, which then stays unchanged.

    The caller must not journal such an event.
    """
