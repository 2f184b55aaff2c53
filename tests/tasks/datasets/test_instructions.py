from __future__ import annotations

import re

import pytest

from areal_jax.tasks.blocks import TEMPLATES
from areal_jax.tasks.datasets.instructions import instructions, system_message, with_parts
from areal_jax.tasks.errors import TaskError


@pytest.mark.parametrize("template", TEMPLATES)
def test_each_template_has_its_own_text_which_names_the_tags(template: str):
    text = instructions(template)
    tags = set(re.findall(r"</?\w+>", text))
    assert tags == {"<think>", "</think>", "<answer>", "</answer>"}
    assert "final answer" in text and "nothing outside" in text
    assert len({instructions(other) for other in TEMPLATES}) == 3


def test_partial_answers_are_asked_for_where_the_template_has_them():
    asked = {template: with_parts(template, "Why?", "Part by part.") for template in TEMPLATES}
    both = "Why? Part by part."
    assert asked == {"interleave": both, "think_answer": "Why?", "delayed": both}
    assert "part of the result" in instructions("interleave")
    assert "part of the result" in instructions("delayed")
    assert "part" not in instructions("think_answer")


def test_a_system_message_may_contain_the_instructions():
    for template in TEMPLATES:
        text = instructions(template)
        assert system_message("Be brief. {instructions}", template) == f"Be brief. {text}"
    assert system_message("Be brief.", "delayed") == "Be brief."
    assert system_message(None, "delayed") is None


def test_an_unknown_template_is_named():
    with pytest.raises(TaskError, match=r"template='answer_think' is unknown; use one of interleave"):
        instructions("answer_think")
