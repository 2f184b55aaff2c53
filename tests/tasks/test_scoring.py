from __future__ import annotations

import numpy as np
import pytest

from areal_jax.control.events import RewardFailed, RewardScored
from areal_jax.sandbox.errors import SandboxError
from areal_jax.tasks.errors import VerifierError
from areal_jax.tasks.scoring import GROUP, score_group
from areal_jax.tasks.task import Task
from areal_jax.types import Completion, Prompt, Reward


class ByText(Task):
    """Scores a completion as what stands in `info` under its text."""

    def score(self, prompt: Prompt, completion: Completion):
        value = prompt.info[completion.text]
        if isinstance(value, BaseException):
            raise value
        return value


class Whole(ByText):
    def score_group(self, prompt: Prompt, completions):
        value = prompt.info["group"]
        if isinstance(value, BaseException):
            raise value
        return value


def outcome(*values: object, task: type[Task] = ByText) -> RewardScored | RewardFailed:
    names = [f"c{n}" for n in range(len(values))]
    prompt = Prompt("?", info=dict(zip(names, values, strict=True)))
    return score_group(task(), prompt, [Completion(name, (1,), "stop") for name in names], 7, 2)


def whole(value: object) -> RewardScored | RewardFailed:
    prompt = Prompt("?", info={"group": value})
    return score_group(Whole(), prompt, [Completion("a", (1,), "stop")] * 2, 7, 2)


def test_numbers_of_any_kind_become_floats():
    scored = outcome(1, 0.5, True, np.float32(0.25), np.int64(3), np.bool_(False), np.array(2.0), Reward(4))
    assert scored == RewardScored(7, 2, (1.0, 0.5, 1.0, 0.25, 3.0, 0.0, 2.0, 4.0))
    assert {type(value) for value in scored.rewards} == {float}


def test_parts_are_kept_by_member():
    scored = outcome(Reward(1.0, {"format": 0.5, "right": np.float32(1)}), 0.0)
    assert scored.parts == ((("format", 0.5), ("right", 1.0)), ())


def test_notes_are_kept_by_member_and_cut_to_what_a_journal_should_hold():
    scored = outcome(Reward(1.0, note="4 = 4"), Reward(0.0, note="x" * 5000), 0.5)
    assert scored.notes == ("4 = 4", "x" * 500, "")
    assert outcome(1.0, Reward(2.0)).notes == ()


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (ValueError("no such unit"), r"ByText raised ValueError: no such unit \(.*test_scoring.py:\d+\)"),
        (SystemExit(3), "ByText raised SystemExit: 3"),
        (float("nan"), "the reward is nan; return a finite"),
        (float("-inf"), "the reward is -inf"),
        (np.float32("nan"), "the reward is nan"),
        (1e39, r"the reward is 1e\+39; return a finite number in the range of float32"),
        (10**400, "raised OverflowError"),
        (None, "the reward is None, a NoneType; return a number"),
        ("0.5", "the reward is '0.5', a str"),
        (1j, "a complex"),
        (np.zeros(2), "a ndarray"),
        (Reward(float("nan")), "the reward is nan"),
        (Reward(1.0, {"format": float("inf")}), "the part 'format' of a reward is inf"),
    ],
)
def test_what_is_no_finite_number_fails_the_group_and_names_the_member(value: object, message: str):
    failure = outcome(1.0, value, 1.0)
    assert isinstance(failure, RewardFailed)
    assert (failure.ordinal, failure.attempt, failure.member, failure.outcome) == (7, 2, 1, "failed")
    with pytest.raises(AssertionError, match=message):
        raise AssertionError(failure.message)


def test_a_group_score_is_used_where_there_is_one():
    assert whole([0.0, 1.0]) == RewardScored(7, 2, (0.0, 1.0))
    assert whole(iter([0.0, 1.0])) == RewardScored(7, 2, (0.0, 1.0))


def test_a_failing_group_score_blames_no_single_member_but_a_bad_reward_does():
    assert whole(KeyError("x")).member == GROUP
    short = whole([1.0])
    assert (short.member, short.message) == (
        GROUP,
        "Whole: score_group returned 1 rewards for 2 completions; return one reward per completion",
    )
    assert whole([1.0, float("nan")]).member == 1


def test_an_interrupt_by_the_person_at_the_keyboard_goes_through():
    with pytest.raises(KeyboardInterrupt):
        outcome(KeyboardInterrupt())


def test_a_long_message_is_cut():
    assert len(outcome(ValueError("x" * 10_000)).message) == 500


@pytest.mark.parametrize(
    ("values", "cause"),
    [
        ((1.0, ValueError("²")), "policy"),
        ((ValueError("²"), ValueError("²"), 1.0), "policy"),
        ((ValueError("²"), ValueError("²")), "task"),
        ((1.0, float("nan")), "task"),
        ((1.0, "0.5"), "task"),
        ((1.0, ConnectionError("the judge is away")), "infrastructure"),
        ((1.0, SandboxError("no bubblewrap")), "infrastructure"),
        ((1.0, VerifierError("no memory")), "infrastructure"),
        ((MemoryError(), 1.0), "infrastructure"),
    ],
)
def test_a_failure_says_what_caused_it(values: tuple[object, ...], cause: str):
    """The text did if the task can score another sample of the prompt."""
    found = outcome(*values)
    assert isinstance(found, RewardFailed) and found.cause == cause


def test_a_failure_of_a_whole_group_is_the_tasks():
    found = whole(ValueError("no"))
    assert isinstance(found, RewardFailed) and found.cause == "task"


def test_notes_and_messages_can_be_written():
    """The journal and the report encode them; a policy's text may have lone surrogates."""
    assert outcome(Reward(1.0, {"a\ud800": 1.0}, note="a\ud800"), 0.0).notes == ("a\ufffd", "")
    found = outcome(ValueError("b\udfff"))
    assert isinstance(found, RewardFailed) and "ValueError: b\ufffd" in found.message
