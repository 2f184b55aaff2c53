"""Responses of think and answer blocks, for the tests of tasks that score them."""

from __future__ import annotations

from collections.abc import Sequence

from areal_jax.tasks.interleaved import Interleaved
from areal_jax.types import Completion, Prompt, Reward


def response(answers: Sequence[str], template: str = "interleave") -> str:
    """A response in the template with these answers, of which the last is final; typed out, not rendered."""
    if template == "interleave":
        return "".join(f"<think>hm</think><answer>{answer}</answer>" for answer in answers)
    kept = answers if template == "delayed" else answers[-1:]
    return "<think>hm</think>" + "".join(f"<answer>{answer}</answer>" for answer in kept)


def judge(task: Interleaved, prompt: Prompt, answers: Sequence[str], template: str = "interleave") -> Reward:
    return task.score(prompt, Completion(response(answers, template), (1,), "stop"))


def perfect(task: Interleaved, prompt: Prompt, template: str = "interleave") -> Reward:
    """The reward of the right sub-answers and the right final answer."""
    return judge(task, prompt, [*prompt.info["steps"], prompt.info["answer"]], template)
