"""A run's prompts are checked before anything starts; its supervised steps may have tasks of their own."""

from __future__ import annotations

import re
from typing import Any

import jax
import numpy as np
import pytest

from areal_jax.assembly import parts
from areal_jax.assembly.parts import assemble, first_params, make_engine, open_inputs
from areal_jax.tasks.errors import PromptError
from areal_jax.tasks.task import Task
from areal_jax.tasks.tokenizers import CharTokenizer
from areal_jax.types import ArealError, Completion, Prompt, Reward, SampleId, Sampling, Trajectory
from tests.small_run import small


class OneText(Task):
    """Every prompt is `text`."""

    tokenizer = CharTokenizer("ab")

    def __init__(self, text: str) -> None:
        self.text = text

    def __len__(self) -> int:
        return 10

    def __getitem__(self, i: int) -> Prompt:
        return Prompt(self.text)

    def score(self, prompt: Prompt, completion: Completion) -> Reward:
        return Reward(0.0)


def test_a_prompt_without_tokens_is_refused_for_that_reason(tmp_path):
    with pytest.raises(ArealError, match=r"prompt at ordinal 0 \(task OneText\) has no tokens.*leave such"):
        open_inputs(small(tmp_path), [OneText("")])


def test_a_prompt_must_leave_room_for_a_completion(tmp_path):
    with pytest.raises(ArealError, match=r"has 24 tokens, but .* must fit generation.length=24; raise"):
        open_inputs(small(tmp_path), [OneText("a" * 24)])
    with pytest.raises(
        ArealError, match=r"has at least 1000000 tokens, but .* must fit generation.length=24"
    ):
        open_inputs(small(tmp_path), [OneText("a" * 10**6)])
    inputs = open_inputs(small(tmp_path), [OneText("a" * 23)])
    assert inputs.prompt_tokens(0) == tuple(CharTokenizer("ab").encode("a")) * 23


async def two_turns(prompt, episode) -> float:
    await episode.generate(), await episode.generate()
    return 0.0


def test_dr_grpo_divides_by_what_a_sample_may_have_in_all_its_turns(tmp_path):
    """generation.max_tokens bounds one turn; a sample of several has the whole generation.length."""
    config = small(tmp_path, "algorithm.preset=dr_grpo")
    assert (config.generation.max_tokens, config.generation.length) == (18, 24)
    answers, talks = OneText("a"), OneText("a")
    talks.workflow = two_turns
    constants = {
        "one turn": open_inputs(config, [answers]).config.algorithm.reduction_constant,
        "several": open_inputs(config, [talks]).config.algorithm.reduction_constant,
        "given": open_inputs(
            small(tmp_path, "algorithm.preset=dr_grpo", "algorithm.reduction_constant=7"), [talks]
        ).config.algorithm.reduction_constant,
        "not read": open_inputs(small(tmp_path), [talks]).config.algorithm.reduction_constant,
    }
    assert constants == {"one turn": None, "several": 24.0, "given": 7.0, "not read": None}


def test_routes_need_experts_samples_of_one_turn_and_memory(tmp_path):
    """Eight groups in flight of 4 samples of 24 tokens, 2 layers of 2 experts each: 3 kB."""

    def opened(task: Task, *words: str, experts: int = 8) -> Any:
        mixture = f"model.overrides={{experts: {experts}, experts_per_token: 2, expert_width: 16}}"
        return open_inputs(small(tmp_path, "algorithm.routes=replay", mixture, *words), [task])

    assert opened(OneText("a")).model.config.experts == 8
    with pytest.raises(ArealError, match=r"routes=replay with a model without experts; set algorithm.routes"):
        open_inputs(small(tmp_path, "algorithm.routes=replay"), [OneText("a")])
    with pytest.raises(ArealError, match=r"with a model with 300 experts, of at most 255; set"):
        opened(OneText("a"), experts=300)
    talks = OneText("a")
    talks.workflow = two_turns
    with pytest.raises(ArealError, match=r"routes=replay with tasks.OneText, which has a workflow"):
        opened(talks)
    eta = "control.max_staleness=1"
    needed = 2 * 4 * 4 * 24 * 4 / 2**30
    opened(OneText("a"), eta, f"algorithm.routes_gib={1.01 * needed}")
    with pytest.raises(ArealError, match=r"for the routes of 8 groups in flight, more than .*routes_gib=2"):
        opened(OneText("a"), eta, f"algorithm.routes_gib={0.99 * needed}")


def test_a_support_beyond_the_vocabulary_is_refused(tmp_path):
    """Before anything starts, and also by an engine without a run."""
    config = small(tmp_path, "generation.top_k=8", "generation.support_size=4096")
    message = r"support_size=4096 exceeds the model's vocabulary of 4 tokens; lower"
    with pytest.raises(ArealError, match=message):
        open_inputs(config, [OneText("a")])
    with pytest.raises(ArealError, match=message):
        make_engine(config.generation, open_inputs(small(tmp_path), [OneText("a")]).model)


class Bad(OneText):
    """Prompts of which one is not a prompt, or raises an error, when it is read or encoded."""

    at: int = -1

    def __getitem__(self, i: int) -> Any:
        kind = self.text if i == self.at else ""
        if kind == "raises":
            raise KeyError("question")
        if kind == "exits":
            raise SystemExit("no such file")
        return {"": Prompt("a"), "returns": "a", "unknown": Prompt("z"), "roles": Prompt(messages=[{}])}[kind]


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (
            "raises",
            r"tasks.Bad could not read its prompt at index 3: KeyError: 'question' \(.*parts.py:\d+\)",
        ),
        ("exits", r"tasks.Bad could not read its prompt at index 3: SystemExit: no such file"),
        ("returns", r"tasks.Bad returned 'a' for its prompt at index 3, a str; return an areal_jax.Prompt"),
        ("unknown", r"ordinal \d+ \(task Bad\) cannot be encoded: the character 'z' .* alphabet"),
        ("roles", r"ordinal \d+ \(task Bad\) cannot be encoded: .*role"),
    ],
)
def test_whatever_users_code_raises_for_a_prompt_is_an_error_of_that_prompt(
    tmp_path, monkeypatch, kind, message
):
    monkeypatch.setattr(parts, "CHECKED_PROMPTS", 0)
    task = Bad(kind)
    task.at = 3
    inputs = open_inputs(small(tmp_path), [task])
    failed = []
    for ordinal in range(10):
        try:
            assert inputs.prompt_tokens(ordinal) == (2,)
        except PromptError as error:
            failed.append(str(error))
    assert len(failed) == 1 and re.search(message, failed[0]), failed


def test_a_completion_that_cannot_be_decoded_is_an_error_of_its_prompt(tmp_path, monkeypatch):
    inputs = open_inputs(small(tmp_path), [OneText("a")])
    monkeypatch.setattr(CharTokenizer, "decode", lambda self, tokens: 1 // 0)
    zeros = np.zeros(1, np.int32)
    own = zeros, np.ones(1, bool), zeros, zeros, zeros, Sampling(), "stop"
    with pytest.raises(PromptError, match=r"ordinal 5 \(task OneText\): ZeroDivisionError: .*test_parts.py"):
        inputs.completion(Trajectory(SampleId(5, 0), *own))


@pytest.mark.slow
def test_the_supervised_steps_may_have_tasks_of_their_own(tmp_path):
    """Equal to a run of that task alone; the run's prompts stay those of its own task."""
    words = ["trainer.supervised.steps=2", "trainer.supervised.batch=8"]
    other = small(tmp_path, *words, "tasks.countdown.median=8.0")
    supervised = [
        "trainer.supervised.tasks.countdown.median=8.0",
        "trainer.supervised.tasks.countdown.letters=12",
    ]
    both = small(tmp_path, *words, *supervised)
    own = small(tmp_path, *words)
    leaves = [jax.tree.leaves(first_params(assemble(each))) for each in (other, both, own)]
    assert all(map(np.array_equal, leaves[0], leaves[1]))
    assert not all(map(np.array_equal, leaves[0], leaves[2]))
    assert assemble(both).prompt(3) == assemble(own).prompt(3) != assemble(other).prompt(3)
