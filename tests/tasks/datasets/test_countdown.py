from __future__ import annotations

import math

import numpy as np
import pytest

from areal_jax.tasks.datasets.countdown import Countdown
from areal_jax.tasks.errors import TaskError
from areal_jax.types import Completion, Prompt

TASK = Countdown()
CHARS = TASK.tokenizer
EOS = CHARS.eos_id


def score(answer: str, sampled: str, stops: bool) -> float:
    tokens = (*CHARS.encode(sampled), *([EOS] if stops else []))
    reason = "stop" if stops else "length"
    return TASK.score(Prompt("?", info={"answer": answer}), Completion(sampled, tokens, reason)).value


def test_the_answer_is_every_letter_below_the_prompts():
    for i in range(300):
        prompt = TASK[i]
        below = CHARS.alphabet.index(prompt.text[0])
        assert 1 <= below <= 15
        assert prompt.text[1:] == ">"
        assert TASK.reference(prompt) == prompt.info["answer"] == "abcdefghijklmnop"[:below][::-1]
        right = (*CHARS.encode(TASK.reference(prompt)), EOS)
        assert TASK.score(prompt, Completion("", right, "stop")).value == 1.0


def test_sizes_are_those_of_the_quickstart():
    assert CHARS.vocab_size == 19
    longest = max((TASK[i] for i in range(2000)), key=lambda prompt: len(prompt.text + prompt.info["answer"]))
    assert len(CHARS.render(longest)) + len(longest.info["answer"]) + 1 == 18


def test_lengths_have_a_long_tail():
    """p99 at least three times the median; EOS counts."""
    lengths = np.array([len(TASK[i].info["answer"]) + 1 for i in range(4000)])
    assert np.median(lengths) == 5
    assert np.percentile(lengths, 99) >= 3 * np.median(lengths)


def test_lengths_are_a_rounded_lognormal():
    """Against its distribution function: P(letters <= k) = Phi(log((k + 1/2) / 4) / 0.8)."""
    letters = np.array([len(TASK[i].info["answer"]) for i in range(20_000)])
    for k in (1, 2, 4, 8, 12):
        wanted = 0.5 * (1 + math.erf(math.log((k + 0.5) / 4) / 0.8 / math.sqrt(2)))
        assert np.mean(letters <= k) == pytest.approx(wanted, abs=0.012)


def test_a_prompt_depends_on_its_index_alone():
    other = Countdown(size=50)
    assert [other[i] for i in (49, 7, 0)] == [TASK[i] for i in (49, 7, 0)]
    assert len({TASK[i].text for i in range(100)}) > 8
    with pytest.raises(IndexError):
        other[50]


@pytest.mark.parametrize(
    ("sampled", "stops", "wanted"),
    [
        ("cba", True, 1.0),
        ("cba", False, 3 / 4),  # right, and cut off before it could stop
        ("cb", True, 2 / 4),  # stopped early: EOS stands where a belongs
        ("cbab", True, 3 / 5),  # went on
        ("cbaaaaaa", False, 3 / 8),
        ("dcba", True, 0.0),
        ("", True, 0.0),
        ("", False, 0.0),
    ],
)
def test_the_reward_is_the_correct_prefix_over_the_longer_of_both(sampled: str, stops: bool, wanted: float):
    assert score("cba", sampled, stops) == wanted


def test_settings_that_cannot_work_are_named():
    for settings in ({"letters": 1}, {"letters": 181}, {"size": 0}, {"median": 0}, {"sigma": -1}):
        with pytest.raises(TaskError, match=f"{next(iter(settings))}={next(iter(settings.values()))}"):
            Countdown(**settings)
