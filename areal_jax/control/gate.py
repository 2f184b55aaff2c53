"""The staleness gate: one integer inequality, and nothing else."""

from __future__ import annotations


def may_admit(admitted: int, dropped: int, version: int, batch_size: int, max_staleness: int | None) -> bool:
    """May group number `admitted`, counted from 1 and including the one being asked for, start now?

    floor((admitted - dropped - 1) / B) <= version + eta, where `version` is the last committed one. A drop
    refunds its admission, whatever its reason. None = unbounded.

    AReaL, equation 3 (Fu et al., arXiv:2505.24298). It
    bounds the mean head age of what is trained, not the maximum.
    """
    if max_staleness is None:
        return True
    return (admitted - dropped - 1) // batch_size <= version + max_staleness
