"""Figures of an evaluation: the parts of rewards, and which completions count as right."""

from __future__ import annotations

import pytest

from areal_jax.evaluation.result import PassResult, ScoredPrompt, TaskResult, task_figures


def prompt(*samples: tuple[float, dict[str, float]]) -> ScoredPrompt:
    count = len(samples)
    rewards, parts = zip(*samples, strict=True)
    return ScoredPrompt(rewards, (4,) * count, (False,) * count, parts)


def figures(*prompts: ScoredPrompt, samples: int = 2) -> dict:
    result = PassResult(samples, 1.0, prompts, tokens=8, seconds=1.0)
    return task_figures(TaskResult(len(prompts), (), 0, {"sampled": result}))["sampled"]


def test_the_part_correct_decides_whether_a_completion_is_right():
    """A wrong answer of valid format may earn more than 1, and a right one less."""
    paid_for_format = prompt((1.5, {"correct": 0.0}), (0.4, {"correct": 1.0}))
    assert paid_for_format.right == 1
    assert ScoredPrompt((1.0, 0.9), (1, 1), (False, False)).right == 1
    assert figures(paid_for_format)["pass@1"]["value"] == 0.5


def test_the_parts_of_rewards_are_averaged_over_prompts_with_an_interval():
    found = figures(
        prompt((1.0, {"ttft_share": 0.2, "correct": 1.0}), (1.0, {"ttft_share": 0.4, "correct": 1.0})),
        prompt((0.0, {"ttft_share": 0.9, "correct": 0.0}), (0.0, {"ttft_share": 0.9, "correct": 0.0})),
    )
    share = found["parts"]["ttft_share"]
    assert share["value"] == pytest.approx(0.6) and share["low"] < 0.6 < share["high"]
    assert found["parts"]["correct"]["value"] == 0.5
    assert figures(ScoredPrompt((1.0, 0.0), (1, 1), (False, False)))["parts"] == {}


def test_a_part_counts_as_zero_for_a_sample_without_it():
    found = figures(prompt((1.0, {"fmt": 1.0}), (0.0, {})), prompt((0.0, {}), (0.0, {})))
    assert found["parts"]["fmt"]["value"] == 0.25


def test_a_reward_of_1_but_for_rounding_is_right():
    """0.6 + 0.3 + 0.1 is the float before 1."""
    assert 0.6 + 0.3 + 0.1 < 1
    assert ScoredPrompt((0.6 + 0.3 + 0.1, 0.999), (1, 1), (False, False)).right == 1
