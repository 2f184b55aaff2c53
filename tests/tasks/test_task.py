from __future__ import annotations

import pytest

from areal_jax.tasks.errors import TaskError
from areal_jax.tasks.task import Task
from areal_jax.types import Completion, Prompt, Reward

DONE = Completion("4", (4,), "stop")


def exact(prompt: Prompt, completion: Completion) -> float:
    return float(completion.text == prompt.info["answer"])


def test_rows_become_prompts_with_the_other_columns_as_info():
    task = Task.from_rows([{"prompt": "2+2", "answer": "4"}, {"prompt": "3", "answer": "3"}], exact)
    assert len(task) == 2
    assert task[0] == Prompt("2+2", info={"answer": "4"})
    assert [task.score(task[i], DONE) for i in range(2)] == [1.0, 0.0]
    assert task.score_group(task[0], [DONE, Completion("5", (5,), "stop")]) == [1.0, 0.0]


def test_the_prompt_may_be_another_column_messages_tokens_or_a_function():
    chat = [{"role": "user", "content": "hi"}]
    named = Task.from_rows([{"q": "a"}, {"q": chat, "n": 1}, {"q": [3, 4]}], exact, prompt="q")
    assert named[0] == Prompt("a")
    assert (named[1].messages, named[1].info) == (tuple(chat), {"n": 1})
    assert named[2].tokens == (3, 4)
    made = Task.from_rows([{"a": 1, "b": 2}], exact, prompt=lambda row: Prompt(f"{row['a']}+{row['b']}"))
    assert made[0].text == "1+2"


@pytest.mark.parametrize("value", [7, None, [], [1, "a"], [True], [{"role": "user"}], {"a": 1}])
def test_a_row_without_a_usable_prompt_is_named_when_the_task_is_made(value: object):
    good = {"prompt": "x"}
    with pytest.raises(TaskError, match=r"row 1: column 'prompt' is .*a prompt must be text, a list"):
        Task.from_rows([good, {"prompt": value}], exact)
    with pytest.raises(TaskError, match="row 1 has no column 'prompt'; its columns are question"):
        Task.from_rows([good, {"question": "x"}], exact)


def test_what_a_subclass_left_out_is_named():
    class Empty(Task):
        pass

    task = Empty()
    for use in (
        lambda: len(task),
        lambda: task[0],
        lambda: task.score(Prompt("a"), DONE),
        lambda: task.reference(Prompt("a")),
    ):
        with pytest.raises(TaskError, match=r"^Empty has no .*define"):
            use()
    assert task.tokenizer is None


def test_score_group_may_be_overridden_and_is_by_member_otherwise():
    class ByMember(Task):
        def score(self, prompt: Prompt, completion: Completion) -> Reward:
            return Reward(float(len(completion.tokens)))

    assert ByMember().score_group(Prompt("a"), [DONE, DONE]) == [Reward(1.0), Reward(1.0)]
