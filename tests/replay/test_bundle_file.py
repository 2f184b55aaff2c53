"""Groups as a bundle's values, and read back."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from areal_jax.replay.bundle_file import Bundle, BundleError, groups_from_plain, groups_to_plain
from areal_jax.runtime.batch_figures import batch_figures
from areal_jax.trajectories.age_mask import trained_tokens
from areal_jax.trajectories.paths import paths_of
from areal_jax.types import Group, Prompt, SampleId
from tests.trainer.branches import branched_groups
from tests.trajectories.samples import assert_same, trajectory


@pytest.mark.parametrize("is_redacted", [False, True])
def test_samples_that_branched_are_read_back(is_redacted: bool):
    groups = branched_groups()
    plain, tensors = groups_to_plain(groups, is_redacted)
    bundle = Bundle({"batch": json.loads(json.dumps(plain))}, tensors)
    prompts = {group.ordinal: group.trajectories[0].tokens[:2].tolist() for group in groups}
    if is_redacted:
        hidden = [array for name, array in tensors.items() if name.endswith("tokens")]
        assert len(hidden) == 10 and all((array[:3] < 0).tolist() == [True, True, False] for array in hidden)
        with pytest.raises(BundleError, match="has 3 tokens here, but 2 in the run"):
            groups_from_plain(bundle, {0: [1, 2, 3]})
    again = groups_from_plain(bundle, prompts if is_redacted else {})
    for group, found in zip(groups, again, strict=True):
        for one, other in zip(group.trajectories, found.trajectories, strict=True):
            assert one.reward == other.reward
            for path, copy in zip(paths_of(one), paths_of(other), strict=True):
                assert_same(path, replace(copy, reward=path.reward))


def test_experts_are_read_back():
    members = tuple(trajectory(SampleId(0, member), 5, experts=4) for member in range(2))
    plain, tensors = groups_to_plain([Group(0, Prompt("?"), members)], False)
    (found,) = groups_from_plain(Bundle({"batch": json.loads(json.dumps(plain))}, tensors), {})
    for one, other in zip(members, found.trajectories, strict=True):
        assert_same(one, other)


def test_figures_of_a_batch_count_samples_and_the_tokens_of_all_paths():
    groups = branched_groups()
    samples = [one for group in groups for one in group.trajectories]
    # A first path trains 7 tokens, the branches 2, 3, 2 and 2.
    figures = batch_figures(0, groups)
    assert trained_tokens(samples, None) == 6 * 7 + 9
    assert (figures["completion_tokens_max"], figures["completion_tokens_mean"]) == (12, 51 / 6)
    assert (figures["reward_mean"], figures["sequence_tokens"]) == (2.75 / 6, 6 * 11 + 8 + 9 + 8 + 8)
    assert figures["token_age_mean"] == 0 and figures["signal_share"] == 1
