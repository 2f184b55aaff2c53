from __future__ import annotations

import sys

import cloudpickle
import pytest

from areal_jax.tasks.datasets.reasoning_gym import ReasoningGym, find_answer
from areal_jax.tasks.errors import TaskError
from areal_jax.types import ArealError, Completion


def judge(task: ReasoningGym, i: int, text: str):
    return task.score(task[i], Completion(text, (1,), "stop"))


def test_a_prompt_is_the_data_sets_question_and_its_answer_scores_one():
    """chain_sum says its own expression; Python says its value."""
    task = ReasoningGym(dataset="chain_sum", settings={"min_terms": 3, "max_terms": 3}, size=50)
    for i in (0, 3, 49):
        expression = task[i].info["metadata"]["expression"]
        wanted = sum(int(part) for part in expression.replace("- ", "-").replace("+ ", "").split())
        assert task[i].messages[-1]["content"].endswith(f"{expression} =")
        assert task[i].info["answer"] == str(wanted)
        assert task.reference(task[i]) == f"<answer>{wanted}</answer>"
        assert judge(task, i, f"Let me see.\n<answer>{wanted}</answer> That is it.").value == 1.0
        assert judge(task, i, f"It takes a while.\n{wanted}\n").value == 1.0
        reward = judge(task, i, f"<answer>{wanted + 1}</answer>")
        assert (reward.value, reward.note) == (0.0, f"found {wanted + 1}, wanted {wanted}")
        assert judge(task, i, "").note == "found no answer"


def test_partial_credit_is_the_data_sets_own():
    """Its default gives the share of the answer that is right: length over length."""
    task = ReasoningGym(dataset="caesar_cipher", size=3)
    answer = task[1].info["answer"]
    assert judge(task, 1, f"<answer>{answer}{'x' * len(answer)}</answer>").value == 0.5


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("<answer> 1 </answer> or <answer>2\n3</answer> 4", "2\n3"),
        ("think\n\n 5 \n\n", "5"),
        ("<answer>6", "<answer>6"),
        ("<answer></answer> 7", ""),
        (" \n", ""),
    ],
)
def test_the_answer_is_in_the_last_tags_or_the_last_line(text: str, answer: str):
    assert find_answer(text) == answer


def test_splits_and_seeds_ask_other_questions():
    def questions(**settings) -> list[str]:
        task = ReasoningGym(dataset="chain_sum", size=30, **settings)
        return [task[i].info["question"] for i in range(30)]

    train = questions()
    assert train == questions()
    assert not set(train) & set(questions(split="test"))
    assert questions(seed=5)[:25] == train[5:], "item i is drawn with seed + i"


def test_it_travels_without_its_data_set_and_scores_there():
    task = ReasoningGym(dataset="spell_backward", size=9)  # it holds a list of words
    prompt = task[4]
    blob = cloudpickle.dumps((task, prompt))
    assert len(blob) < 3000
    other, same = cloudpickle.loads(blob)
    assert other[4] == prompt == same
    assert other.score(same, Completion(task.reference(prompt), (1,), "stop")).value == 1.0


def test_a_data_set_without_answers_says_so():
    task = ReasoningGym(dataset="graph_color", size=2)
    with pytest.raises(TaskError, match="graph_color has no reference answers"):
        task.reference(task[0])


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"dataset": "chain_sums"}, "no dataset='chain_sums'; did you mean chain_sum"),
        ({"dataset": "?"}, "choose one of ab, acre"),
        (
            {"dataset": "chain_sum", "settings": {"min_term": 3}},
            r"unknown key tasks\.reasoning_gym\.settings\.min_term; did you mean .*\.min_terms\?",
        ),
        ({"dataset": "chain_sum", "settings": {"zzz": 3}}, "its settings are: min_terms, max_terms"),
        ({"dataset": "chain_sum", "settings": {"size": 3}}, r"set tasks.*\.size instead"),
        ({"dataset": "chain_sum", "settings": {"min_terms": -3}}, "min_terms must be positive"),
        ({"dataset": "list_functions"}, "generates different items at every start"),
        ({"dataset": "chain_sum", "size": 0}, "size=0"),
        ({"dataset": "chain_sum", "seed": -1}, "seed=-1"),
        ({"dataset": "chain_sum", "split": "dev"}, "split='dev'"),
    ],
)
def test_what_is_wrong_with_the_settings_is_named(settings: dict, problem: str):
    with pytest.raises(ArealError, match=problem):
        ReasoningGym(**settings)


def test_a_missing_library_is_named(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    with pytest.raises(TaskError, match=r"needs reasoning-gym.*pip install '\.\[reasoning-gym\]'"):
        ReasoningGym(dataset="chain_sum")
