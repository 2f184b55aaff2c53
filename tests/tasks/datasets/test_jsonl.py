from __future__ import annotations

from pathlib import Path

import pytest

from areal_jax.tasks.datasets.jsonl import JsonLines
from areal_jax.tasks.errors import TaskError
from areal_jax.types import Completion, Prompt


def write(tmp_path: Path, text: str | bytes) -> str:
    path = tmp_path / "data.jsonl"
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return str(path)


def test_lines_become_prompts_in_any_order(tmp_path: Path):
    path = write(
        tmp_path,
        '\ufeff{"prompt": "2+2", "answer": 4}\n\n  \n{"prompt": "π?", "answer": " 3.14 ", "level": 2}\n'
        '{"answer": "x", "prompt": "last, without a newline"}',
    )
    task = JsonLines(path=path)
    assert len(task) == 3
    assert task[2].text == "last, without a newline"
    assert task[1] == Prompt("π?", info={"answer": " 3.14 ", "level": 2})
    assert task[0] == Prompt("2+2", info={"answer": 4})
    assert [task.reference(task[i]) for i in range(3)] == ["4", "3.14", "x"]


def test_the_reward_is_exact_match_of_stripped_text(tmp_path: Path):
    task = JsonLines(path=write(tmp_path, '{"q": "2+2", "a": 4}'), prompt="q", answer="a")
    scores = [task.score(task[0], Completion(text, (1,), "stop")).value for text in ("4", " 4\n", "4.", "")]
    assert scores == [1.0, 1.0, 0.0, 0.0]


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ('{"prompt": "a", answer: 1}', "is not JSON .*column"),
        ("[1, 2]", "is a list; each line must be a JSON object"),
        ('{"prompt": "a"}', "has no column 'answer'; its columns are prompt"),
        ('{"answer": "a"}', "has no column 'prompt'; its columns are answer"),
        ('{"prompt": 3, "answer": "a"}', "column 'prompt' is 3, but a prompt must be text"),
        ('{"prompt": "a", "answer": null}', "column 'answer' is None; an answer must be text or a number"),
        ('{"prompt": "a", "answer": true}', "column 'answer' is True"),
        (b'{"prompt": "\xff", "answer": "a"}', "is not UTF-8"),
        ('{"prompt": "a", "answer": 1, "more": ' + "[" * 100_000 + "}", "cannot be read .*recursion"),
        ('{"prompt": "a", "answer": 1' + "0" * 5000 + "}", "cannot be read .*digits"),
    ],
)
def test_a_bad_line_is_named_when_the_task_is_made(tmp_path: Path, line: str | bytes, problem: str):
    raw = line.encode() if isinstance(line, str) else line
    path = write(tmp_path, b'{"prompt": "a", "answer": "b"}\n\n' + raw + b"\n")
    with pytest.raises(TaskError, match=f"data.jsonl, line 3:? {problem}"):
        JsonLines(path=path)


def test_a_missing_file_is_named(tmp_path: Path):
    with pytest.raises(TaskError, match=r"none\.jsonl cannot be read: No such file"):
        JsonLines(path=str(tmp_path / "none.jsonl"))


def test_a_file_without_lines_is_a_task_without_prompts(tmp_path: Path):
    assert len(JsonLines(path=write(tmp_path, "\n"))) == 0
