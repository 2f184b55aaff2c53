"""Two inequalities that bound staleness: when a group may start, and when a batch may be trained.

Staleness, or age, of a token: the trainer's weights version minus the version that generated the token.
"""

from __future__ import annotations

from collections.abc import Sequence


def may_admit(admitted: int, dropped: int, version: int, batch_size: int, max_staleness: int | None) -> bool:
    """Whether the next group, number `admitted` of the run (counted from 1), may start now.

    The condition: floor((admitted - dropped - 1) / B) <= version + eta. `dropped`: number of groups dropped
    so far; B: `batch_size` in groups; `version`: the newest committed version; eta: `max_staleness` in
    versions, None = unbounded.

    This is equation 3 of AReaL (Fu et al., arXiv:2505.24298). The condition bounds the mean age of the
    trained samples' first tokens, not the largest age.
    """
    if max_staleness is None:
        return True
    # A dropped group is never trained. Counted, it would close the gate for ever after B (1 + eta) drops.
    return (admitted - dropped - 1) // batch_size <= version + max_staleness


def admissible(admitted: int, dropped: int, version: int, batch_size: int, max_staleness: int) -> int:
    """Returns how many more groups may start now by `may_admit`, at least 0.

    The arguments are those of `may_admit`, with `admitted` the number of groups that have started. Its
    condition for group number a is equivalent to a <= B (version + eta + 1) + dropped.
    """
    return max(0, batch_size * (version + max_staleness + 1) + dropped - admitted)


def may_train(step: int, left: Sequence[int], batch_size: int, max_staleness: int) -> bool:
    """Whether training batch `step` now makes no group outside the batch too old for that group's own batch.

    `left`: for each admitted group outside the batch, in ordinal order, the version under which the group
    began. Group r of `left`, counted from 0, is trained in batch t = step + 1 + floor(r / B) at the earliest,
    with B = `batch_size` in groups. The group's age is then t - left[r] versions, and may be at most
    `max_staleness`. This is constraint C3 of DORA.
    """
    # For B = 1 this waits for every sample of version step - K. For larger batches, waiting for that version
    # alone lets more stragglers pile up than one batch can take.
    #
    # Together with `may_admit`, which counts the batch in training too, this bounds every age by K and cannot
    # deadlock: at most (version + K + 1 - step) B groups are admitted and not trained, so the r-th of them is
    # young enough for step + floor(r / B), and once all are complete the B lowest may be trained.
    #
    # This also holds for a bound K above the gate's eta (control.over_age=hold). A drop moves the groups
    # behind it to lower places, and a group that starts again begins under a newer version: both make room. A
    # lost host's group keeps the version of its first dispatch, as does one that waits for its rewards.
    # Admission stops at steps x B, so the last batch leaves no group behind to wait for.
    #
    # Waiting only for groups that would be too old for the next batch would deadlock: with B = 1 and K = 2,
    # groups 2 and 3 could be trained before 0 and 1, of which then only one can be trained in time.
    return all(
        step + 1 + place // batch_size <= version + max_staleness for place, version in enumerate(left)
    )
