"""The figures of a metrics row that follow from a batch's groups alone: rewards, ages, lengths, prefixes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import numpy as np

from areal_jax.control.reward_gate import Gates, have_signal
from areal_jax.trajectories.age_mask import trained_mask
from areal_jax.trajectories.paths import paths_of
from areal_jax.trajectories.prefix_tree import Sampled, tree_of
from areal_jax.types import NOT_SAMPLED, Group, PolicyVersion


def batch_figures(
    step: int, groups: Sequence[Group], gates: Gates = (), oldest: PolicyVersion | None = None
) -> dict[str, Any]:
    """Return the figures on rewards, ages and lengths for the groups of batch `step`.

    `gates`: the gates of the batch, by which the rewards of `groups` were paid. `oldest`: the oldest version
    of which tokens are trained; None: all are.
    """
    return {
        **reward_figures(groups),
        **_part_figures(groups, gates),
        **_age_figures(step, groups, oldest),
        **length_figures(groups),
        **_tree_figures(groups),
    }


def reward_figures(groups: Sequence[Group]) -> dict[str, float]:
    return figures_of_rewards([[t.reward for t in group.trajectories] for group in groups])


def figures_of_rewards(of_groups: Sequence[Sequence[float | None]]) -> dict[str, float]:
    """Return the figures on the rewards of groups, for each group those of its samples."""
    rewards = np.array(of_groups, float)
    return {
        "reward_mean": float(rewards.mean()),
        "reward_std": float(rewards.std()),
        "signal_share": float(np.mean([have_signal(of_group) for of_group in rewards.tolist()])),
    }


def _part_figures(groups: Sequence[Group], gates: Gates) -> dict[str, Any]:
    """Return the mean of each reward part, and the figures on gated parts; empty if no reward has parts.

    A part counts as 0 for a sample without it. `reward_ungated_mean` is the mean reward as it was scored;
    `gates` says which gated part was paid, and `paid_share` to which fraction of the samples more than 0 of
    it was paid.
    """
    samples = [t for group in groups for t in group.trajectories]
    named = defaultdict(list)
    for t in samples:
        for name, value in t.reward_parts.items():
            named[name].append(value)
    figures: dict[str, Any] = {}
    if named:
        figures["reward_parts"] = {name: sum(values) / len(samples) for name, values in named.items()}
    if gates:
        withheld = sum(sum(named[name]) for name, is_paid in gates if not is_paid) / len(samples)
        figures["reward_ungated_mean"] = float(np.array([t.reward for t in samples], float).mean() + withheld)
        figures["gates"] = dict(gates)
        figures["paid_share"] = {
            name: sum(value > 0 for value in named[name]) / len(samples) if is_paid else 0.0
            for name, is_paid in gates
        }
    return figures


def _age_figures(step: int, groups: Sequence[Group], oldest: PolicyVersion | None) -> dict[str, float]:
    """Return the least, median, mean and largest age of the trained tokens, and the mean age of first tokens.

    An age is `step`, the version at the start of the update, minus the token's version. Tokens of reference
    answers have age 0. If `oldest` is a version, tokens of older versions are not trained (over_age=mask):
    they count in `masked_token_share`, their fraction of the samples' tokens, and not in the tokens' ages,
    which are 0 if no token is left.
    """
    trajectories = [t for group in groups for t in group.trajectories]
    paths = [path for t in trajectories for path in paths_of(t)]
    versions = np.concatenate([path.versions[trained_mask(path, oldest)] for path in paths])
    ages = np.where(versions == NOT_SAMPLED, 0, step - versions)  # a reference answer has no age
    ages = ages if ages.size else np.zeros(1, int)
    heads = [step - t.first_version if t.first_version != NOT_SAMPLED else 0 for t in trajectories]
    sampled = sum(t.completion_tokens for t in trajectories)
    return {
        "head_age_mean": float(np.mean(heads)),
        "token_age_mean": float(ages.mean()),
        "token_age_min": int(ages.min()),
        "token_age_median": float(np.median(ages)),
        "token_age_max": int(ages.max()),
        **({} if oldest is None else {"masked_token_share": 1 - versions.size / max(sampled, 1)}),
    }


def _tree_figures(groups: Sequence[Group]) -> dict[str, int]:
    """Return the number of tokens of all sequences, prompts included, and of their distinct prefixes."""
    tree = tree_of([Sampled.of(path) for group in groups for t in group.trajectories for path in paths_of(t)])
    return {"sequence_tokens": tree.sequence_tokens, "tree_tokens": tree.tokens}


def length_figures(groups: Sequence[Group]) -> dict[str, float]:
    """Return the figures on completion lengths.

    `completion_bubble_share` is (longest - mean) / longest: the share of slots and steps that a decoder with
    one slot for each sample would leave empty while it waits for the longest one.
    """
    lengths = [t.completion_tokens for group in groups for t in group.trajectories]
    longest = int(max(lengths))
    return {
        "completion_bubble_share": float(1 - np.mean(lengths) / longest) if longest else 0.0,
        "completion_tokens_max": longest,
        "completion_tokens_mean": float(np.mean(lengths)),
        "completion_tokens_p50": float(np.median(lengths)),
        "completion_tokens_p99": float(np.quantile(lengths, 0.99)),
        "truncated_share": float(np.mean([t.truncated for group in groups for t in group.trajectories])),
    }
