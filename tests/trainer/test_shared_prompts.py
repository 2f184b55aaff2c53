"""Computing shared prefixes once changes what is computed, not what is learnt."""

from __future__ import annotations

import dataclasses
from typing import Any

import chex
import numpy as np
import pytest

from areal_jax.trajectories.packing import pack
from areal_jax.types import Batch, Group
from tests.trainer.conftest import LENGTH, MakeLearner
from tests.trajectories.test_shared_prompts import asked
from tests.trajectories.unpacking import places, unpack

VOCAB = 37


SIZES = [(5, [4, 3, 3, 6]), (3, [3, 8, 1, 5]), (6, [3, 4, 7, 2]), (2, [5, 9, 4, 6])]
"""Of each group the tokens of its prompt and of its completions."""
TURN = 2
"""Of each group the first two completions begin with that many equal tokens, which are not trained."""


def groups_of(count: int = 2) -> list[Group]:
    """Samples that share their prompt, and two of each group also the turn after it.

    Four groups have as many samples as `make_groups()`, and so share its learners' programs.
    """
    out = []
    for ordinal, (prompt, sizes) in enumerate(SIZES[:count]):
        group = asked(ordinal, prompt, sizes)
        members = []
        for member, t in enumerate(group.trajectories):
            tokens = (t.tokens * 7 % VOCAB).astype(np.int32)
            place, given = np.arange(len(tokens)) - prompt, prompt + TURN * (member < 2)
            tokens[prompt:given] = 3
            blank = {"loss_mask": False, "behavior_logp": 0, "versions": -1, "turn_ids": -1}
            cut = {n: np.where(place < given - prompt, v, getattr(t, n)) for n, v in blank.items()}
            cut = {n: x.astype(getattr(t, n).dtype) for n, x in cut.items()}
            members.append(dataclasses.replace(t, tokens=tokens, **cut))
        out.append(Group(ordinal, group.prompt, tuple(members)))
    return out


def levels(batch: Batch) -> set[int]:
    """Of all tokens, how many shared segments lie between the beginning of their sample and theirs."""
    ids, found = np.asarray(batch.segment_ids).reshape(-1), set()
    for where in places(batch):
        found |= {len(set(ids[where[: place + 1]].tolist())) - 1 for place in range(len(where))}
    return found


@pytest.mark.slow
def test_log_probs_and_gradient_are_those_of_repeated_prefixes(params: Any, learner: MakeLearner):
    of = learner()
    state = of.init(params)
    shared, repeated = (
        of.prepare(state, pack(groups_of(4), 2, LENGTH, layout=prompts)) for prompts in ("shared", "repeated")
    )
    assert levels(shared) == {0, 1, 2}
    assert repeated.subtree_ends is None
    assert (np.asarray(shared.segment_ids) > 0).sum() < (np.asarray(repeated.segment_ids) > 0).sum()
    for one, other in zip(unpack(shared), unpack(repeated), strict=True):
        for name in ("proximal_logp", "advantages", "loss_weights", "off_policy_weight"):
            own = one["loss_mask"]
            np.testing.assert_allclose(one[name][own], other[name][own], rtol=0, atol=1e-5)
    trained = [of.update(of.init(params), batch, lambda _: None) for batch in (shared, repeated)]
    chex.assert_trees_all_close(*(state.params for state, _ in trained), rtol=0, atol=1e-5)
    assert trained[0][1]["grad_norm"] > 0.1
    np.testing.assert_allclose(trained[0][1]["grad_norm"], trained[1][1]["grad_norm"], rtol=1e-4)


def test_a_completion_never_moves_another_of_its_group(params: Any, learner: MakeLearner):
    """Another token in one member: not a bit of the others' log-probs, though they share its prefix."""
    of = learner()
    state = of.init(params)
    batch = pack(groups_of(4), 2, LENGTH)
    tokens = np.array(batch.tokens)
    tokens[(batch.segment_ids == 2) & (batch.positions == 7)] += 1
    before, after = (
        np.asarray(of.prepare(state, b).proximal_logp) for b in (batch, batch._replace(tokens=tokens))
    )
    is_other = np.asarray(batch.segment_ids) != 2
    assert before[is_other].tobytes() == after[is_other].tobytes()
    assert np.abs(before - after).max() > 1e-3
