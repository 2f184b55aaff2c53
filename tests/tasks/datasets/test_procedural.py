"""What the procedural tasks with sub-answers share, shown by the smallest of them."""

from __future__ import annotations

from collections import Counter
from itertools import permutations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal_jax.lab.multihop import MultiHop
from areal_jax.tasks.blocks import parse
from areal_jax.tasks.datasets.chained import Chained
from areal_jax.tasks.datasets.drawn import Draws
from areal_jax.tasks.datasets.knights import Knights
from areal_jax.tasks.datasets.procedural import Procedural, numbers_up_to
from areal_jax.tasks.errors import TaskError

TASKS = (Chained, Knights, MultiHop)


@given(st.integers(0, 2**32), st.integers(1, 10**6))
def test_a_number_is_a_scaled_draw_of_64_bits(key: int, bound: int):
    bits = np.random.Philox(key=key).random_raw(3)
    draws = Draws(np.random.Philox(key=key))
    assert [draws.below(bound) for _ in range(3)] == [int(raw) * bound // 2**64 for raw in bits]


@given(st.integers(0, 2**32), st.lists(st.integers(), unique=True, min_size=1), st.data())
def test_some_are_different_items_and_one_is_an_item(key: int, items: list[int], data: st.DataObject):
    draws = Draws(np.random.Philox(key=key))
    count = data.draw(st.integers(0, len(items)))
    some = draws.some(items, count)
    assert len(some) == len(set(some)) == count
    assert set(some) <= set(items)
    assert draws.one(items) in items


def test_all_orders_are_equally_likely():
    draws = Draws(np.random.Philox(key=0))
    counts = Counter(tuple(draws.some("abc", 2)) for _ in range(6000))
    assert set(counts) == set(permutations("abc", 2))
    assert min(counts.values()) > 900 and max(counts.values()) < 1100


@pytest.mark.parametrize("kind", TASKS)
def test_a_prompt_depends_on_its_index_and_the_settings_alone(kind: type[Procedural]):
    one, other = kind(size=50), kind()
    assert (len(one), len(other)) == (50, 100_000)
    assert [one[i] for i in (49, 7, 0)] == [other[i] for i in (49, 7, 0)]
    assert one[0] != one[1]
    for i in (50, -1):
        with pytest.raises(IndexError, match=f"there is no prompt {i}: the task has 50"):
            one[i]


@pytest.mark.parametrize("kind", TASKS)
def test_a_chat_begins_with_the_system_message_if_there_is_one(kind: type[Procedural]):
    system, user = kind(system="Think! {instructions}")[3].messages
    assert system["role"] == "system"
    assert system["content"].startswith("Think! Work in turns")
    assert kind(system=None)[3].messages == (user,)
    assert user["role"] == "user" and "partial answer" in user["content"]
    assert "partial answer" not in kind(system=None, template="think_answer")[3].messages[0]["content"]


@pytest.mark.parametrize("template", ["interleave", "think_answer", "delayed"])
@pytest.mark.parametrize("kind", [Chained, Knights])
def test_compact_problems_and_references_are_of_the_tasks_own_characters(kind, template: str):
    """Tags are one token each, and one vocabulary serves all settings."""
    largest = "steps" if kind is Chained else "people"
    task, large = kind(compact=True, template=template), kind(compact=True, template=template, **{largest: 8})
    chars = task.tokenizer
    for i in range(50):
        prompt = large[i]
        text = large.reference(prompt)
        assert chars.decode(chars.render(prompt)) == prompt.text
        tokens = chars.encode(text)
        assert chars.decode(tokens) == text
        tags = sum(text.count(tag) for tag in ("<think>", "</think>", "<answer>", "</answer>"))
        letters = sum(len(block.text) for block in parse([text], template).blocks)
        assert len(tokens) == tags + letters
    assert large.tokenizer.vocab_size == chars.vocab_size
    assert kind(template=template).tokenizer is None


@pytest.mark.parametrize(
    ("kind", "settings", "problem"),
    [
        (Chained, {"size": 0}, "size=0"),
        (Knights, {"split": "dev"}, "split='dev'"),
        (MultiHop, {"template": "think"}, "template='think'"),
        (MultiHop, {"reward": {"bas": 1}}, "reward.bas"),
        (Chained, {"compact": True, "system": "Be brief."}, "system='Be brief.' has no effect if compact"),
        (
            Chained,
            {"steps": 2, "modulus": 2, "operations": "+", "split": "test"},
            "split=test; choose settings with more distinct problems",
        ),
    ],
)
def test_settings_that_cannot_work_are_named(kind: type[Procedural], settings: dict, problem: str):
    with pytest.raises(TaskError, match=problem):
        kind(**settings)


def test_numbers_are_one_or_a_range():
    assert numbers_up_to("hops", 3, None, range(2, 5)) == range(3, 4)
    assert numbers_up_to("hops", 4, 2, range(2, 5)) == range(2, 5)
    for most, least in ((5, None), (4, 1), (2, 3), (1, None)):
        with pytest.raises(TaskError, match=rf"hops={most} violate 2 <= min_hops <= hops <= 4"):
            numbers_up_to("hops", most, least, range(2, 5))
