from __future__ import annotations

import re
from collections import Counter

import pytest

from areal_jax.lab.multihop import MultiHop
from areal_jax.tasks.blocks import parse
from areal_jax.tasks.errors import TaskError
from areal_jax.types import Prompt
from tests.tasks.responses import judge, perfect

FACTS = {
    "the company that employs ": "X works for Y.",
    "the birthplace of ": "X was born in Y.",
    "the teacher of ": "X was taught by Y.",
    "the city that is home to ": "X is based in Y.",
    "the founder of ": "X was founded by Y.",
    "the company that supplies ": "X is supplied by Y.",
    "the river that flows through ": "X lies on the river Y.",
    "the province that contains ": "X belongs to the province of Y.",
    "the mayor of ": "The mayor of X is Y.",
    "the lake that is fed by ": "The river X flows into Lake Y.",
    "the city that bridges ": "The oldest bridge over the river X is in Y.",
    "the capital of ": "The capital of the province of X is Y.",
    "the senator of ": "The senator of the province of X is Y.",
    "the largest port on ": "The largest port on Lake X is Y.",
    "the owner of the ferries on ": "The ferries on Lake X belong to Y.",
}
"""A question's words -> the sentence that answers them."""

NAME = "([A-Z][a-z]+(?: [A-Z][a-z]+)?)"


def read(prompt: Prompt) -> tuple[list[str], str]:
    """A prompt's paragraphs and its question."""
    *paragraphs, blank, question = prompt.messages[-1]["content"].split("\n")
    assert blank == ""
    return paragraphs, question


def facts(paragraphs: list[str]) -> list[tuple[str, str, str]]:
    """(words, subject, object) of each sentence; each is of exactly one form."""
    found = []
    for sentence in re.findall(r"[^.]+\.", " ".join(paragraphs)):
        forms = {words: fact.replace("X", NAME).replace("Y", NAME) for words, fact in FACTS.items()}
        matches = [(words, re.fullmatch(form, sentence.strip())) for words, form in forms.items()]
        ((words, match),) = ((words, match) for words, match in matches if match)
        found.append((words, match[1], match[2]))
    return found


def search(prompt: Prompt) -> list[str]:
    """The entities that the question leads to, one after the other; there must be one for each step."""
    paragraphs, question = read(prompt)
    wanted = re.match(r"What is the name of (.*)\?", question)[1]
    steps = []
    while words := next((words for words in FACTS if wanted.startswith(words)), ""):
        steps.insert(0, words)
        wanted = wanted.removeprefix(words)
    at = re.sub("^(the river|the province of|Lake) ", "", wanted)
    way = []
    for words in steps:
        (at,) = {target for name, subject, target in facts(paragraphs) if (name, subject) == (words, at)}
        way.append(at)
    return way


@pytest.mark.parametrize(("hops", "distractors"), [(2, 0), (3, 6), (4, 20)])
def test_the_facts_lead_to_exactly_one_answer(hops: int, distractors: int):
    task = MultiHop(hops=hops, distractors=distractors)
    used = set()
    for i in range(60):
        prompt = task[i]
        way = search(prompt)
        assert len(way) == len(set(way)) == hops
        assert (prompt.info["steps"], prompt.info["answer"]) == (tuple(way[:-1]), way[-1])
        paragraphs, _ = read(prompt)
        assert len(paragraphs) == hops + distractors
        stated = facts(paragraphs)
        assert len(stated) == 2 * len(paragraphs)
        assert len({fact[:2] for fact in stated}) == len(stated), "one object per relation and subject"
        used |= {words for words, *_ in stated}
    assert used == set(FACTS)


def test_hops_are_drawn_uniformly():
    task = MultiHop(hops=4, min_hops=2, distractors=0)
    counts = Counter(len(task[i].info["steps"]) + 1 for i in range(600))
    assert sorted(counts) == [2, 3, 4]
    assert min(counts.values()) > 160


def test_other_paragraphs_answer_the_same_words():
    """So a reader cannot take the only company for the employer: most worlds have several."""
    task = MultiHop(hops=3, distractors=6)
    several = 0
    for i in range(100):
        prompt = task[i]
        paragraphs, question = read(prompt)
        last = next(words for words in FACTS if question.startswith(f"What is the name of {words}"))
        several += sum(words == last for words, *_ in facts(paragraphs)) > 1
    assert several > 80


def test_paragraphs_and_their_facts_are_in_random_order():
    task = MultiHop(hops=2, distractors=0)
    is_needed, is_first_hop = Counter(), Counter()
    for i in range(400):
        prompt = task[i]
        first = facts(read(prompt)[0])[0]
        is_first_hop[first[1] != prompt.info["steps"][0]] += 1
        is_needed[first[2] in (*prompt.info["steps"], prompt.info["answer"])] += 1
    assert 160 < is_first_hop[True] < 240
    assert 160 < is_needed[True] < 240


def test_the_largest_prompts_have_at_most_700_words():
    task = MultiHop(hops=4, distractors=20)
    words = [sum(len(message["content"].split()) for message in task[i].messages) for i in range(300)]
    assert 400 < max(words) <= 700


@pytest.mark.parametrize("template", ["interleave", "delayed"])
def test_a_right_response_gets_format_final_and_all_of_the_sub_answers(template: str):
    task = MultiHop(hops=4, min_hops=2, template=template)
    for i in range(20):
        reward = perfect(task, task[i], template)
        assert reward.value == 1 + 2 + 0.5
        assert (reward.parts["sub_correct"], reward.parts["first_correct"]) == (1.0, 1.0)


def test_a_right_response_without_sub_answers_gets_format_and_final():
    task = MultiHop(template="think_answer")
    assert perfect(task, task[0], "think_answer").value == 1 + 2


@pytest.mark.parametrize(
    ("final", "wanted"),
    [
        ("Orana", 3),
        (" orana. ", 3),
        ("the city of Orana", 3),
        ("The river  Orana", 3),
        ("Lake Orana.", 3),
        ("the province of Orana", 3),
        ("Orana Works", 1 - 1.5),
        ("Orana or Velden", 1 - 1.5),
        ("It is Orana", 1 - 1.5),
        (".", 1 - 2),
        ("the river", 1 - 1.5),
    ],
)
def test_a_final_answer_is_a_name(final: str, wanted: float):
    prompt = Prompt("?", info={"steps": ("Isden Mills",), "answer": "Orana"})
    assert judge(MultiHop(), prompt, [final]).value == wanted
    assert judge(MultiHop(), prompt, ["isden mills.", "Orana"]).value == 3.5


def test_a_reference_has_names_of_the_prompt_which_are_seldom_right():
    task = MultiHop(hops=3)
    right = Counter()
    for i in range(200):
        prompt = task[i]
        blocks = parse([task.reference(prompt)]).blocks
        thoughts, answers = ([block.text for block in blocks if block.kind == k] for k in ("think", "answer"))
        _, question = read(prompt)
        words = [next(words for words in FACTS if words in f"{thought} ") for thought in thoughts]
        befores = [prompt.info["start"], *answers[:-1]]
        assert thoughts == [f"I look for {w}{b}." for w, b in zip(words, befores, strict=True)]
        assert f"What is the name of {''.join(reversed(words))}{prompt.info['start']}?" in question
        assert all(answer in prompt.messages[1]["content"] for answer in answers)
        truth = [*prompt.info["steps"], prompt.info["answer"]]
        right.update(one == other for one, other in zip(answers, truth, strict=True))
    assert right[True] / right.total() < 0.12


def test_a_question_is_in_one_split():
    train, test = (MultiHop(hops=2, distractors=0, split=split) for split in ("train", "test"))
    asked, held = ({read(task[i])[1] for i in range(600)} for task in (train, test))
    assert not asked & held
    assert min(len(asked), len(held)) > 500


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"hops": 1}, "hops=1"),
        ({"hops": 5}, "hops=5"),
        ({"hops": 2, "min_hops": 3}, "min_hops=3 and hops=2"),
        ({"distractors": -1}, "distractors=-1"),
        ({"distractors": 21}, "distractors=21"),
    ],
)
def test_settings_that_cannot_work_are_named(settings: dict, problem: str):
    with pytest.raises(TaskError, match=problem):
        MultiHop(**settings)
