"""Samples with branched episodes, and the float64 objective of their batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from areal_jax.trajectories.paths import paths_of
from areal_jax.types import Group, Prompt, SampleId, Sampling, Trajectory
from tests.trainer.conftest import VOCAB


def path(rng: np.random.Generator, sample: SampleId, parts: Sequence[tuple[np.ndarray, bool]]) -> Trajectory:
    """A path of these tokens, each part trained or not."""
    tokens = np.concatenate([part for part, _ in parts]).astype(np.int32)
    mask = np.concatenate([np.full(len(part), is_trained) for part, is_trained in parts])
    return Trajectory(
        sample=sample,
        tokens=tokens,
        loss_mask=mask,
        behavior_logp=np.where(mask, rng.normal(-4, 0.5, len(tokens)), 0).astype(np.float32),
        versions=np.where(mask, 0, -1).astype(np.int32),
        turn_ids=np.where(mask, 0, -1).astype(np.int32),
        sampling=Sampling(),
        stop_reason="stop",
        reward=None,
    )


def branched_groups(seed: int = 0) -> list[Group]:
    """Two groups of three samples; the first sample of the first has three paths, the last of both two.

    The paths of a sample share the prompt and a first turn of three tokens, which the first path trains.
    """
    rng = np.random.default_rng(seed)
    text = lambda size: rng.integers(0, VOCAB, size)  # noqa: E731
    rewards, groups = [[2.0, 0.5, -1.0], [1.0, 0.0, 0.25]], []
    for ordinal, branches in enumerate([(2, 0, 1), (0, 0, 1)]):
        prompt, members = text(2), []
        for member, count in enumerate(branches):
            sample, turn = SampleId(ordinal, member), text(3)
            first = path(rng, sample, [(prompt, False), (turn, True), (text(2), False), (text(4), True)])
            others = [
                path(rng, sample, [(np.concatenate([prompt, turn, text(1)]), False), (text(2 + place), True)])
                for place in range(count)
            ]
            members.append(replace(first, branches=tuple(others), reward=rewards[ordinal][member]))
        groups.append(Group(ordinal, Prompt("?"), tuple(members)))
    return groups


def slopes_of(
    groups: Sequence[Group],
    logp: dict[Any, np.ndarray],
    proximal: dict[Any, np.ndarray],
    *,
    reduction: str,
    level: str,
    clip: tuple[float, float],
) -> tuple[float, dict[Any, np.ndarray]]:
    """The loss, and its derivative by each path's log-probs; (sample, number of the path) -> float64 (n,).

    GRPO's advantages over samples, a clipped surrogate at `level` with the truncated off-policy weight (5) at
    the same level; `logp` and `proximal` are those of all tokens. Written from the formulas.
    """
    samples = [one for group in groups for one in group.trajectories]
    trained = {one.sample: sum(int(each.loss_mask.sum()) for each in paths_of(one)) for one in samples}
    loss, found = 0.0, {}
    for group in groups:
        rewards = np.array([one.reward for one in group.trajectories])
        advantages = (rewards - rewards.mean()) / (rewards.std(ddof=1) + 1e-6)
        for one, advantage in zip(group.trajectories, advantages, strict=True):
            of_sample = 1 / (trained[one.sample] * len(samples))
            weight = 1 / sum(trained.values()) if reduction == "token_mean" else of_sample
            for number, each in enumerate(paths_of(one)):
                mask, key = each.loss_mask, (one.sample, number)
                gap = (logp[key] - proximal[key])[mask]
                old = (proximal[key] - each.behavior_logp.astype(np.float64))[mask]
                count = len(gap)
                if level == "sequence":
                    gap, old = np.full(count, gap.mean()), np.full(count, old.mean())
                u, w = np.exp(gap), np.minimum(np.exp(old), 5)
                bound = np.clip(u, 1 - clip[0], 1 + clip[1])
                loss += -(weight * w * np.minimum(u * advantage, bound * advantage)).sum()
                is_free = u * advantage <= bound * advantage
                own = np.where(is_free, -weight * w * u * advantage, 0.0)
                slope = np.zeros(len(mask))
                slope[mask] = own if level == "token" else own.sum() / count
                found[key] = slope
    return loss, found
