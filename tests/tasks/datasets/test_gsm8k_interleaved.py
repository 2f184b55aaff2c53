from __future__ import annotations

import json
from pathlib import Path

import pytest

from areal_jax.tasks.blocks import parse
from areal_jax.tasks.datasets.gsm8k_interleaved import Gsm8kInterleaved
from areal_jax.tasks.datasets.instructions import instructions
from areal_jax.tasks.datasets.math_data import Gsm8k
from areal_jax.tasks.errors import TaskError
from tests.tasks.responses import judge, perfect


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    rows = [{"question": f"{n}+1000?", "answer": f"A secret.\n#### {n + 1000:,}"} for n in range(40)]
    for split, its in (("train", rows), ("test", rows[:2])):
        (tmp_path / f"{split}.jsonl").write_text("\n".join(map(json.dumps, its)))
    return str(tmp_path)


def test_prompts_are_those_of_gsm8k_with_the_blocks_explained(folder: str):
    task = Gsm8kInterleaved(data_dir=folder)
    assert len(task) == 40 and len(Gsm8kInterleaved(data_dir=folder, split="test")) == 2
    for i in (0, 39):
        system, user = task[i].messages
        assert system == {"role": "system", "content": instructions("interleave")}
        problem = Gsm8k(data_dir=folder, question="{problem}")[i].messages[0]["content"]
        assert user["content"].startswith(problem + "\n") and "partial answer" in user["content"]
        assert task[i].info == {"steps": (), "answer": str(i + 1000)}
    plain = Gsm8kInterleaved(data_dir=folder, template="think_answer", system=None)[0]
    assert [message["role"] for message in plain.messages] == ["user"]
    assert "partial answer" not in plain.messages[0]["content"]
    with pytest.raises(TaskError, match="split='dev'"):
        Gsm8kInterleaved(data_dir=folder, split="dev")


@pytest.mark.parametrize("template", ["interleave", "think_answer", "delayed"])
def test_a_right_response_gets_format_and_final_as_there_are_no_sub_answers(folder: str, template: str):
    task = Gsm8kInterleaved(data_dir=folder, template=template)
    for i in range(5):
        reward = perfect(task, task[i], template)
        assert reward.value == 1 + 2
        assert (reward.parts["correct"], reward.parts["first_correct"]) == (1.0, 1.0)
        assert (reward.parts["intermediate"], reward.parts["sub_correct"]) == (0.0, 0.0)


@pytest.mark.parametrize(
    ("answers", "wanted"),
    [
        (["5", "1007"], 3),
        (["1,007"], 3),
        (["$1007.00"], 3),
        (["1007 apples."], 3),
        ([r"\boxed{1007}"], 3),
        (["The answer is 1007."], 3),
        (["1008"], 1 - 1.5),
        (["1007 or 1008"], 1 - 1.5),
        (["1007", "1008"], 1 - 1.5),
        (["a thousand and seven"], 1 - 2),
        (["..."], 1 - 2),
    ],
)
def test_final_answers_are_compared_as_numbers(folder: str, answers: list[str], wanted: float):
    task = Gsm8kInterleaved(data_dir=folder)
    assert judge(task, task[7], answers).value == wanted


def test_a_reference_has_one_to_three_drawn_numbers_and_nothing_of_the_solution(folder: str):
    task = Gsm8kInterleaved(data_dir=folder)
    thoughts, counts = set(), set()
    for i in range(40):
        blocks = parse([task.reference(task[i])]).blocks
        answers = [block.text for block in blocks if block.kind == "answer"]
        counts.add(len(answers))
        assert all(answer.isdigit() and int(answer) < 100 for answer in answers)
        thoughts |= {block.text for block in blocks if block.kind == "think"}
        assert task.reference(task[i]) == task.reference(task[i])
    assert counts == {1, 2, 3}
    assert len(thoughts) == 3 and not any("secret" in thought for thought in thoughts)
