"""A bad row in a reward process's copy of the data: the group fails there, and the process goes on."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest

from areal_jax.cluster import reward_role
from areal_jax.cluster.messages import Begin, Envelope
from areal_jax.cluster.reward_role import ConductedWorkflows
from areal_jax.config.loading import load_config
from areal_jax.control import events as e
from areal_jax.episodes.conversation import Conversation
from areal_jax.tasks.source import PromptStream, WeightedTask
from areal_jax.tasks.task import Task
from areal_jax.types import Completion, Prompt, SampleId


class Missing(Task):
    """A row that only another machine has."""

    def __len__(self) -> int:
        return 4

    def __getitem__(self, i: int) -> Prompt:
        if i == 2:
            raise FileNotFoundError("row-2.png")
        return Prompt(f"{i}")

    def score(self, prompt: Prompt, completion: Completion) -> float:
        return 1.0


PROMPTS = PromptStream({"own": WeightedTask(Missing())}, 0)
BAD = next(ordinal for ordinal in range(4) if PROMPTS.place(ordinal)[1] == 2)
GOOD = next(ordinal for ordinal in range(4) if ordinal != BAD)
MESSAGE = "tasks.own could not read its prompt at index 2: FileNotFoundError: row-2.png"


def test_a_group_with_a_row_that_cannot_be_read_fails_and_the_next_one_is_scored(
    monkeypatch: pytest.MonkeyPatch,
):
    commands = [
        Begin("e"),
        *(Envelope("e", e.Score(n, 0), [["a", [1], "stop", [], None]]) for n in (BAD, GOOD)),
    ]
    reported: list[Any] = []
    link = SimpleNamespace(commands=lambda: commands, ready=lambda: None, report=reported.append)
    submitted: list[tuple[int, Prompt]] = []

    pool = SimpleNamespace(submit=lambda ordinal, attempt, prompt, *_: submitted.append((ordinal, prompt)))
    monkeypatch.setattr(reward_role, "RewardPool", lambda *args: nullcontext(pool))
    monkeypatch.setattr(reward_role, "ControllerLink", lambda *args: nullcontext(link))
    monkeypatch.setattr(reward_role, "load_tasks", lambda given: {"own": WeightedTask(Missing())})
    reward_role.reward(load_config("tasks=countdown"), "reward-0")
    assert submitted == [(GOOD, PROMPTS.prompt(GOOD))]
    (failed,) = reported
    assert (failed.ordinal, failed.attempt, failed.member, failed.outcome) == (BAD, 0, -1, "failed")
    assert failed.message.startswith(MESSAGE)


def test_an_episode_with_a_row_that_cannot_be_read_fails_there():
    reported, begun = [], []
    workflows = object.__new__(ConductedWorkflows)
    workflows._prompts, workflows._talks = PROMPTS, {}
    workflows._runner = SimpleNamespace(begin=lambda sample, prompt, talk: begun.append((sample, prompt)))
    workflows._link = SimpleNamespace(report=lambda event, is_repeated: reported.append(event))
    for ordinal in (BAD, GOOD):
        workflows.command(e.Rerun(SampleId(ordinal, 1)), Conversation((1, 2)).to_wire())
    assert begun == [(SampleId(GOOD, 1), PROMPTS.prompt(GOOD))]
    (failed,) = reported
    assert (failed.sample, failed.reason) == (SampleId(BAD, 1), "failed_episode")
    assert failed.message.startswith(MESSAGE)
