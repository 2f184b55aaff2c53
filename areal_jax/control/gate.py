"""Staleness as integer inequalities: one for admission, one for training."""

from __future__ import annotations

from collections.abc import Sequence


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


def may_train(step: int, left: Sequence[int], batch_size: int, max_staleness: int) -> bool:
    """May batch `step` be trained now, though it leaves these groups behind?

    `left` holds, in ordinal order, the version that each group began under, whether it is decoded, scored or
    complete. The r-th of them, from 0 on, is trained at the earliest in step + 1 + floor(r / B), and nobody
    may be older than K = eta then: step + 1 + floor(r / B) <= version + K. With B = 1 this is to wait for
    every sample of version step - K; with larger batches that alone lets stragglers pile up that no single
    batch could take.

    With `may_admit`, whose count holds the batch in training too, it makes K a bound on every age, and never
    waits for nothing: of the admitted - dropped - step B groups that are not trained, at most
    (version + K + 1 - step) B, the r-th is young enough for step + floor(r / B), so once all are complete the
    batch of the B lowest may always be trained. This is constraint C3 of DORA.
    """
    return all(
        step + 1 + place // batch_size <= version + max_staleness for place, version in enumerate(left)
    )
