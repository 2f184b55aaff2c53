"""The plain synchronous rollout: a function of parameters, ordinals and seed alone."""

from __future__ import annotations

import numpy as np
import pytest

from areal_jax.generation.rollout import rollout
from areal_jax.tasks.errors import TaskError
from areal_jax.tasks.task import Task
from areal_jax.types import ArealError, Completion, Prompt, Reward, Sampling
from tests.generation.conftest import LENGTH


class Vowels(Task):
    """A reward that any text has: the share of its letters that are an e, and its length as a part."""

    def __len__(self) -> int:
        return 50

    def __getitem__(self, i: int) -> Prompt:
        return Prompt("abcdefghijklmnopq"[: 1 + i % 9], info={"i": i})

    def score(self, prompt: Prompt, completion: Completion) -> Reward:
        return Reward(
            completion.text.count("e") / len(completion.tokens), {"tokens": float(len(completion.tokens))}
        )


class Fragile(Vowels):
    def score(self, prompt: Prompt, completion: Completion) -> Reward:
        raise ValueError(f"no reward for {prompt.info['i']}")


class TooLong(Vowels):
    def __getitem__(self, i: int) -> Prompt:
        return Prompt("a" * LENGTH)


SAMPLING = Sampling(max_tokens=12)


def contents(groups) -> dict:
    return {
        t.sample: (t.tokens.tobytes(), t.behavior_logp.tobytes(), t.reward)
        for group in groups
        for t in group.trajectories
    }


def test_groups_come_in_ordinal_order_with_their_rewards(model, engine, versions):
    groups = rollout(engine, versions(0), Vowels(), [5, 2, 9], 3, sampling=SAMPLING)
    assert [group.ordinal for group in groups] == [2, 5, 9]
    for group in groups:
        assert [t.sample for t in group.trajectories] == [(group.ordinal, member, 0) for member in range(3)]
        for t in group.trajectories:
            prompt = t.tokens[~t.loss_mask].tolist()
            assert prompt == model.tokenizer.encode(group.prompt.text)
            completion = t.tokens[t.loss_mask].tolist()
            assert t.reward == pytest.approx(model.tokenizer.decode(completion).count("e") / len(completion))
            assert t.reward_parts == {"tokens": float(len(completion))}
            assert set(t.versions[t.loss_mask].tolist()) == {0}


def test_each_of_the_tokenizers_end_ids_ends_a_sample(engine, versions, monkeypatch):
    asked = [engine, versions(0), Vowels(), range(3), 2]
    before = [
        t.tokens[t.loss_mask].tolist() for g in rollout(*asked, sampling=SAMPLING) for t in g.trajectories
    ]
    also = before[0][len(before[0]) // 2]
    assert also not in engine.tokenizer.end_ids
    monkeypatch.setattr(type(engine.tokenizer), "end_ids", (engine.tokenizer.eos_id, also))
    after = [t for g in rollout(*asked, sampling=SAMPLING) for t in g.trajectories]
    for whole, t in zip(before, after, strict=True):
        end = whole.index(also) + 1 if also in whole else len(whole)
        assert t.tokens[t.loss_mask].tolist() == whole[:end]
        assert t.stop_reason == ("stop" if whole[end - 1] in engine.tokenizer.end_ids else "length")


def test_the_order_and_the_number_of_ordinals_change_no_bit(engine, versions):
    whole = contents(rollout(engine, versions(0), Vowels(), range(6), 3, seed=4, sampling=SAMPLING))
    turned = contents(
        rollout(engine, versions(0), Vowels(), [4, 0, 5, 1, 3, 2], 3, seed=4, sampling=SAMPLING)
    )
    alone = contents(rollout(engine, versions(0), Vowels(), [3], 3, seed=4, sampling=SAMPLING))
    assert turned == whole
    assert alone == {sample: content for sample, content in whole.items() if sample.ordinal == 3}


def test_seed_and_version_change_the_samples(engine, versions):
    whole = contents(rollout(engine, versions(0), Vowels(), range(2), 2, sampling=SAMPLING))
    for other in (
        rollout(engine, versions(0), Vowels(), range(2), 2, seed=1, sampling=SAMPLING),
        rollout(engine, versions(1), Vowels(), range(2), 2, sampling=SAMPLING),
    ):
        assert all(contents(other)[sample][0] != tokens for sample, (tokens, *_) in whole.items())


def test_it_may_be_called_again_with_the_same_parameters(engine, versions):
    """The store copies: neither the caller's parameters nor the engine keep anything of a rollout."""
    first = contents(rollout(engine, versions(0), Vowels(), [0], 2, sampling=SAMPLING))
    assert not versions(0).params["embedding"].is_deleted()
    assert contents(rollout(engine, versions(0), Vowels(), [0], 2, sampling=SAMPLING)) == first


def test_without_sampling_settings_samples_fill_the_length(engine, versions):
    groups = rollout(engine, versions(0), Vowels(), [0], 4)
    for t in groups[0].trajectories:
        assert t.stop_reason == "stop" or len(t.tokens) == LENGTH
        assert np.isfinite(t.behavior_logp).all()


def test_a_reward_that_raises_ends_the_rollout(engine, versions):
    with pytest.raises(
        TaskError, match=r"the group at ordinal 1 could not be scored: Fragile raised ValueError"
    ):
        rollout(engine, versions(0), Fragile(), [1], 2, sampling=SAMPLING)


def test_a_prompt_that_does_not_fit_is_named(engine, versions):
    with pytest.raises(ArealError, match=f"a prompt of {LENGTH} tokens does not fit"):
        rollout(engine, versions(0), TooLong(), [1], 2, sampling=SAMPLING)
