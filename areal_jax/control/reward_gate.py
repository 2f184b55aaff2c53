"""The gate of a reward part (algorithm.gate): in which batches the part is paid, and what samples earn.

Interleaved Reasoning (Xie et al., arXiv:2505.19640, algorithm 1) pays right intermediate answers only while
the accuracy of the training batches does not fall. Rewards are journaled when they are scored, with the gated
part and before any batch exists; the control plane decides the gate when it forms a batch, and journals the
decision with the Train command. Every reader then takes the rewards from `rewards_of`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import fmean

from areal_jax.config.sections import GateConfig
from areal_jax.control.errors import ControlError
from areal_jax.control.events import RewardScored
from areal_jax.types import EQUAL_WITHIN, Group

CORRECT = "correct"
"""Name of the reward part that is a sample's accuracy: 1 if its final answer is right, else 0."""

DECIMALS = 9
"""Rewards without a withheld part are rounded to this many decimals, and what is smaller is rounding."""

Gates = tuple[tuple[str, bool], ...]
"""(name of a reward part, whether it is paid) for each gated part of a batch; empty without a gate."""


def is_open(accuracy: float, previous: float | None, gate: GateConfig) -> bool:
    """Returns whether the gated part is paid in a batch of this accuracy: accuracy > previous - tolerance.

    `previous`: the accuracy of the batch trained before; None for the run's first batch, for which the
    setting `gate.first` decides.
    """
    if previous is None:
        return gate.first == "open"
    # Rounded: 0.15 - 0.05 is not 0.1.
    return round(accuracy - previous + gate.tolerance, DECIMALS) > 0


def have_signal(rewards: Sequence[float]) -> bool:
    """Returns whether the rewards of a group differ by more than rounding."""
    least = max(10.0**-DECIMALS, EQUAL_WITHIN * max(map(abs, rewards)))
    return max(rewards) - min(rewards) > least


def accuracy_of(correct: Sequence[float | None]) -> float | None:
    """Returns the accuracy of a batch; `correct`: mean of the part `correct` for each group of the batch.

    Returns None if the run has no gate, so that the groups' means are None.
    """
    known = [mean for mean in correct if mean is not None]
    return fmean(known) if known else None


def gates_of(correct: Sequence[float | None], previous: float | None, gate: GateConfig) -> Gates:
    """Returns the gates of a batch; `correct`: mean of the part `correct` for each group of the batch.

    `previous`: the accuracy of the batch trained before; None for the run's first batch.
    """
    accuracy = accuracy_of(correct)
    if gate.part is None or accuracy is None:
        return ()
    return ((gate.part, is_open(accuracy, previous, gate)),)


def rewards_of(
    rewards: Sequence[float], parts: Sequence[Mapping[str, float]], gates: Gates
) -> tuple[float, ...]:
    """Returns the samples' rewards without the parts that a closed gate withholds.

    `rewards`, `parts`: the rewards as they were scored, and the parts of each; a part counts as 0 for a
    sample without it.
    """
    closed = [name for name, is_paid in gates if not is_paid]
    if not closed:
        return tuple(rewards)
    # Rounded, because a group's equal rewards must stay equal: (0.3 + 0.1) - 0.1 is not 0.3.
    return tuple(
        round(reward - sum(own.get(name, 0.0) for name in closed), DECIMALS)
        for reward, own in zip(rewards, parts or [{}] * len(rewards), strict=True)
    )


def paid(groups: Sequence[Group], gates: Gates) -> tuple[Group, ...]:
    """Returns the groups with the rewards that a batch with these gates trains on.

    Raises ControlError for a sample without a reward.
    """
    return tuple(groups) if all(is_paid for _, is_paid in gates) else tuple(_paid(g, gates) for g in groups)


def _paid(group: Group, gates: Gates) -> Group:
    members = group.trajectories
    scored = [one.reward for one in members if one.reward is not None]
    if len(scored) < len(members):
        raise ControlError(f"group {group.ordinal} has samples without a reward; score it before training it")
    rewards = rewards_of(scored, [one.reward_parts for one in members], gates)
    pairs = zip(members, rewards, strict=True)
    return replace(group, trajectories=tuple(replace(one, reward=reward) for one, reward in pairs))


def ungated(scored: RewardScored, gate: GateConfig) -> tuple[float, ...]:
    """Returns the rewards of a group that are paid whatever the gate decides."""
    gates = () if gate.part is None else ((gate.part, False),)
    return rewards_of(scored.rewards, [dict(own) for own in scored.parts], gates)


def group_correct(scored: RewardScored, gate: GateConfig) -> float | None:
    """Returns the mean of the part `correct` over the group's samples; None without a gate.

    Raises ControlError if a sample's reward lacks that part or the gated part.
    """
    if gate.part is None:
        return None
    parts = [dict(own) for own in scored.parts] or [{}]
    for name in (CORRECT, gate.part):
        if any(name not in own for own in parts):
            raise ControlError(
                f"algorithm.gate.part={gate.part} needs the reward parts {CORRECT} and {gate.part}, but a "
                f"sample of group {scored.ordinal} has {', '.join(parts[0]) or 'no parts'}; return both "
                "parts from the task's score, or leave algorithm.gate.part out"
            )
    return fmean(own[CORRECT] for own in parts)
