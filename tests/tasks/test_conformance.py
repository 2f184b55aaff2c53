"""What every built-in task promises. A new entry of BUILTIN is tested here once it says how it is made."""

from __future__ import annotations

import json
import math
from pathlib import Path

import cloudpickle
import pytest
from hypothesis import HealthCheck, given, settings

from areal_jax.control.events import RewardScored
from areal_jax.lab.demonstrations import TASKS
from areal_jax.tasks.datasets import verify
from areal_jax.tasks.datasets.reasoning_gym import ReasoningGym
from areal_jax.tasks.interleaved import Interleaved
from areal_jax.tasks.scoring import score_group
from areal_jax.tasks.source import load_tasks
from areal_jax.tasks.task import Task
from areal_jax.types import Completion, Prompt
from tests.tasks.rubbish import NUMBERS, RUBBISH, drawn

ROWS = {
    "jsonl": [{"prompt": "2+2", "answer": 4}, {"prompt": "π?", "answer": "3.14"}],
    "gsm8k": [{"question": f"{n}+1?", "answer": f"<<{n}+1={n + 1}>>\n#### {n + 1}"} for n in range(3)],
    "gsm8k_interleaved": [{"question": f"{n}+1?", "answer": f"#### {n + 1}"} for n in range(3)],
    "math": [{"problem": f"{n}/7?", "solution": rf"\boxed{{\frac{{{n}}}{{7}}}}"} for n in range(3)],
}
"""Files of the tasks that read one."""

SETTINGS = {
    "arithmetic": {"digits": 3, "terms": 3, "operations": "+-*", "split": "test"},
    "chained": {"steps": 4, "compact": True, "template": "delayed"},
    "countdown": {"size": 100},
    "gsm8k": {"data_dir": "."},
    "gsm8k_interleaved": {"data_dir": ".", "template": "think_answer"},
    "jsonl": {"path": "train.jsonl"},
    "knights": {"people": 3, "compact": True, "split": "test"},
    "math": {"data_dir": "."},
    TASKS["multihop"]: {"hops": 4, "size": 50},
    "reasoning_gym": {"dataset": "fraction_simplification", "size": 20},
    "tool_game": {"rooms": 6, "compact": True, "split": "test"},
}


@pytest.fixture(params=SETTINGS)
def task(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Task:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    name = request.param
    Path("train.jsonl").write_text("\n".join(map(json.dumps, ROWS.get(name, []))))
    return load_tasks({name: SETTINGS[name]})[name].task


def complete(task: Task, text: str) -> Completion:
    """A completion of the text, in the task's own tokens where it has a tokenizer."""
    tokens = (*task.tokenizer.encode(text), task.tokenizer.eos_id) if task.tokenizer else (1,)
    return Completion(text, tokens, "stop")


def test_a_task_keeps_its_promises(task: Task):
    size = len(task)
    assert size > 0
    for outside in (size, size + 10):
        with pytest.raises(IndexError):
            task[outside]
    other = cloudpickle.loads(cloudpickle.dumps(task))
    assert len(other) == size
    for i in {0, 1, size // 2, size - 1}:
        prompt = task[i]
        assert isinstance(prompt, Prompt)
        assert task[i] == other[i] == prompt, "a prompt is asked for again on resume"
        assert cloudpickle.loads(cloudpickle.dumps(prompt)) == prompt

        answers = [complete(task, task.reference(prompt)), complete(task, ""), Completion("", (), "length")]
        for judge in (task, other):
            scored = score_group(judge, prompt, answers, ordinal=i)
            assert hasattr(scored, "rewards"), scored
            if isinstance(task, Interleaved):
                assert dict(scored.parts[0])["format"] == 1.0, "such a reference teaches the format alone"
            else:
                assert scored.rewards[0] == 1.0
            assert all(math.isfinite(reward) and reward < 1 for reward in scored.rewards[1:])


FORM = {
    "Gsm8k": "#### {}", "Math": "\\boxed{{{}}}", "ReasoningGym": "<answer>{}</answer>",
    "Arithmetic": "the answer is {}",
}  # fmt: skip
"""Task -> how a completion marks its answer; for the others, as the last of its blocks."""


def test_whatever_the_policy_writes_is_scored(task: Task, monkeypatch: pytest.MonkeyPatch):
    """No text raises: one completion must not decide that its group is not trained."""
    monkeypatch.setattr(verify, "LIMIT_CPU_S", 1)
    prompt, form = task[0], FORM.get(type(task).__name__, "<think>a</think><answer>{}</answer>")
    texts = [*RUBBISH, *(form.format(number) for number in NUMBERS)]
    if type(task).__name__ in ("Gsm8k", "Math"):  # each text costs a process of its own
        some = ("２２", "²", "1e400", "9^{9^{9^9}}", "\ud800", "\\frac{1}{", "1/0")
        texts = [form.format(text) for text in some]
    completions = [Completion(text, (1,), "stop", tuple(text[:99])) for text in texts]
    scored = score_group(task, prompt, completions, 0)
    assert isinstance(scored, RewardScored), scored
    json.dumps(scored.notes, ensure_ascii=False).encode()


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(text=drawn)
def test_drawn_text_is_scored(task: Task, text: str):
    if type(task).__name__ not in ("Gsm8k", "Math"):  # test_verify.py draws for these
        scored = score_group(task, task[0], [Completion(text, (1,), "stop", tuple(text))], 0)
        assert isinstance(scored, RewardScored), scored


@pytest.mark.parametrize(
    ("dataset", "answer"), [("prime_factorization", "²"), ("coin_flip", "1e400"), ("boxnet", "NaN")]
)
def test_an_answer_at_which_a_data_set_raises_is_wrong(dataset: str, answer: str):
    task = ReasoningGym(dataset=dataset, size=1)
    reward = task.score(task[0], Completion(f"<answer>{answer}</answer>", (1,), "stop"))
    assert reward.value == 0.0 and "which raises" in reward.note


def test_a_data_set_that_raises_at_its_own_answer_is_at_fault(monkeypatch: pytest.MonkeyPatch):
    task = ReasoningGym(dataset="chain_sum", size=1)
    prompt = task[0]
    monkeypatch.setattr(task._data, "score_answer", lambda answer, entry: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        task.score(prompt, Completion("<answer>1</answer>", (1,), "stop"))
