"""GSM8K and MATH: from JSONL to prompts in the order of the lines, prepared once."""

from __future__ import annotations

import functools
import http.server
import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import cloudpickle
import pytest
import tensorflow_datasets as tfds

from areal_jax.tasks.datasets import builders
from areal_jax.tasks.datasets.math_data import Gsm8k, Math, ProblemSet
from areal_jax.tasks.errors import TaskError
from areal_jax.tasks.source import PromptStream, load_tasks
from areal_jax.tasks.task import Task
from areal_jax.types import Completion
from tests.hangs import HANG_S

ROOT = Path(__file__).parents[3]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


def write(folder: Path, name: str, *rows: object) -> Path:
    folder.mkdir(exist_ok=True)
    lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
    (folder / name).write_text("".join(f"{line}\n" for line in lines))
    return folder


def word_problem(number: int) -> dict[str, str]:
    return {
        "question": f"How many are {number} and 1000?",
        "answer": f"{number}+1000=<<{number}+1000={number + 1000}>>{number + 1000}.\n#### {number + 1000:,}",
    }


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write(tmp_path / "data", "train.jsonl", *map(word_problem, range(40)))
    return write(tmp_path / "data", "test.jsonl", *map(word_problem, range(100, 103)))


def judge(task: Task, i: int, text: str) -> float:
    reward = task.score(task[i], Completion(text, (1,), "stop"))
    return reward if isinstance(reward, float) else reward.value


def prepared(cache: Path) -> list[str]:
    return sorted(path.name for path in (cache / "areal-jax" / "datasets").glob("*/*"))


# --- GSM8K --------------------------------------------------------------------------------------------


def test_prompts_are_the_lines_in_their_order(folder: Path):
    task = Gsm8k(data_dir=str(folder), question="Q: {problem}", system="Be brief.")
    assert len(task) == 40
    for i in (39, 0, 7):
        assert task[i].messages == (
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": f"Q: How many are {i} and 1000?"},
        )
        assert task[i].info == {"answer": str(i + 1000), "solution": f"{i}+1000={i + 1000}.\n#### {i + 1000}"}
        assert judge(task, i, task.reference(task[i])) == 1.0
    assert [judge(task, 7, text) for text in ("so 1,007 in all", "#### 1008", "1007 or 1008", "")] == [
        1,
        0,
        0,
        0,
    ]
    for i in (40, -1):
        with pytest.raises(IndexError):
            task[i]


def test_the_test_split_is_its_own_files(folder: Path):
    write(folder, "test_b.jsonl", word_problem(200))
    task = Gsm8k(data_dir=str(folder), split="test")
    assert [task[i].info["answer"] for i in range(len(task))] == ["1100", "1101", "1102", "1200"]


def test_the_real_files_are_whole_and_in_order(shared_data: Path):
    """Against the file itself, by plain JSON."""
    task = Gsm8k(data_dir=str(shared_data / "gsm8k"))
    lines = (shared_data / "gsm8k" / "train.jsonl").read_text().splitlines()
    assert len(task) == len(lines) == 7473
    for i in (*range(0, 7473, 500), 7472):
        row = json.loads(lines[i])
        gold = row["answer"].split("#### ")[1].replace(",", "")
        prompt = task[i]
        assert prompt.messages[0]["content"].startswith(row["question"].strip())
        assert prompt.info["answer"] == gold
        assert task.reference(prompt).endswith(f"\n#### {gold}") and "<<" not in task.reference(prompt)
        assert judge(task, i, task.reference(prompt)) == 1.0
        assert judge(task, i, f"So it is {int(float(gold)) + 1}.") == 0.0


# --- MATH ---------------------------------------------------------------------------------------------


def test_a_missing_answer_is_in_the_solutions_box(tmp_path: Path):
    rows = [
        {"problem": "half?", "solution": r"It is $\boxed{\frac{1}{2}}$.", "level": 1},
        {"problem": "who?", "solution": "Eve.", "answer": r"\text{Eve}"},
        {"problem": "sum?", "solution": r"\boxed{3}, or rather 5", "answer": 5},
    ]
    task = Math(data_dir=str(write(tmp_path / "data", "test_a.jsonl", *rows)), split="test")
    assert [task[i].info["answer"] for i in range(3)] == [r"\frac{1}{2}", r"\text{Eve}", "5"]
    assert task[0].messages[-1]["content"] == "half?\nThink step by step, then give the answer in \\boxed{}."
    assert task.reference(task[0]) == r"It is $\boxed{\frac{1}{2}}$."
    assert task.reference(task[1]) == "Eve.\n" + r"The answer is \boxed{\text{Eve}}."
    assert [judge(task, i, task.reference(task[i])) for i in range(3)] == [1.0, 1.0, 1.0]
    assert [judge(task, 0, text) for text in (r"\boxed{0.5}", "1/2", r"\boxed{2}", "")] == [1, 1, 0, 0]


def test_real_solutions_score_one_and_others_zero(shared_data: Path):
    task = Math(data_dir=str(shared_data / "math500"), split="test")
    assert len(task) == 250
    for i in range(0, 250, 10):
        assert judge(task, i, task.reference(task[i])) == 1.0
    answers = [task[i].info["answer"] for i in range(0, 250, 10)]
    for i in range(10, 250, 10):
        if answers[i // 10] != answers[i // 10 - 1]:
            assert judge(task, i, f"\\boxed{{{answers[i // 10 - 1]}}}") == 0.0


# --- bad input ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        ('{"question": "a", answer: 1}', "is not JSON .*column"),
        ("[1, 2]", "is a list"),
        ({"question": "a"}, "has no column 'answer'; its columns are question"),
        ({"answer": "#### 3"}, "has no column 'question'; its columns are answer"),
        ({"question": "", "answer": "#### 3"}, "column 'question' is ''"),
        (
            {"question": "a", "answer": "It is 3."},
            "the answer ends in 'It is 3.'; it must end in #### and a number",
        ),
        ({"question": "a", "answer": "#### three"}, "the answer ends in '#### three'; .* as in #### 18"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, cache: Path, row: object, problem: str):
    folder = write(tmp_path / "data", "train.jsonl", word_problem(1), "", row)
    with pytest.raises(TaskError, match=f"train.jsonl, line 3:? {problem}"):
        Gsm8k(data_dir=str(folder))
    assert list((cache / "areal-jax" / "datasets").glob("**/*.array_record*")) == []


def test_a_problem_without_an_answer_is_named(tmp_path: Path):
    folder = write(tmp_path / "data", "train.jsonl", {"problem": "a", "solution": "It is 3."})
    with pytest.raises(TaskError, match=r"train.jsonl, line 1 has no answer: neither .*boxed"):
        Math(data_dir=str(folder))


def test_a_problem_set_without_parse_cannot_be_made(folder: Path):
    class Unparsed(ProblemSet):
        name, url, question = "unparsed", "", "{problem}"

    with pytest.raises(TypeError, match=r"abstract.*parse"):
        Unparsed(data_dir=str(folder))  # pyright: ignore[reportAbstractUsage]


def test_missing_folders_and_files_are_named(tmp_path: Path):
    none = tmp_path / "none"
    with pytest.raises(TaskError, match=f"tasks.gsm8k.data_dir={none} is not a folder; .*train"):
        Gsm8k(data_dir=str(none))
    folder = write(tmp_path / "data", "test_a.jsonl", word_problem(1))
    with pytest.raises(
        TaskError, match=r"no train\*.jsonl; its files are test_a.jsonl: set tasks.math.split=test"
    ):
        Math(data_dir=str(folder))
    with pytest.raises(TaskError, match=r"no test\*.jsonl; its files are none: add test.jsonl"):
        Math(data_dir=str(tmp_path), split="test")
    with pytest.raises(TaskError, match=r"train\.jsonl: the files are empty"):
        Gsm8k(data_dir=str(write(tmp_path / "data", "train.jsonl")))
    with pytest.raises(TaskError, match="split='dev' is unknown; use one of train, test"):
        Gsm8k(data_dir=str(folder), split="dev")


def test_a_cache_that_cannot_be_written_is_named(folder: Path, cache: Path):
    cache.write_text("a file stands here")
    with pytest.raises(TaskError, match=r"cannot be prepared in .*cache"):
        Gsm8k(data_dir=str(folder))


def test_a_missing_library_is_named(folder: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delitem(sys.modules, "areal_jax.tasks.datasets.builders")
    monkeypatch.delattr("areal_jax.tasks.datasets.builders")
    monkeypatch.setitem(sys.modules, "tensorflow_datasets", None)
    with pytest.raises(TaskError, match=r"tensorflow_datasets.*pip install '\.\[tasks\]'"):
        Gsm8k(data_dir=str(folder))


# --- preparing ----------------------------------------------------------------------------------------


def test_files_are_prepared_once_and_again_when_they_change(
    folder: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
):
    made: list[str] = []
    prepare = builders.prepare
    monkeypatch.setattr(
        builders, "prepare", lambda config, at: made.append(config.name) or prepare(config, at)
    )
    first = Gsm8k(data_dir=str(folder))
    assert Gsm8k(data_dir=str(folder))[0] == first[0]
    assert len(made) == 1
    lines = (folder / "train.jsonl").read_text()
    (folder / "train.jsonl").write_text(lines.replace("#### 1,000", "#### 1,500"))
    assert Gsm8k(data_dir=str(folder))[0].info["answer"] == "1500", "of the same size, but changed"
    assert len(made) == 2
    assert len(first) == 40 and first[39].info["answer"] == "1039"
    assert prepared(cache) == sorted(made), "nothing half-made stays"


def test_many_at_once_prepare_the_same_whole(folder: Path, cache: Path):
    """Each builds aside; the first to be done names the folder, the others leave it."""
    with ThreadPoolExecutor(4) as pool:
        tasks = list(pool.map(lambda _: Gsm8k(data_dir=str(folder)), range(4)))
    assert {task[39].info["answer"] for task in tasks} == {"1039"}
    assert len(prepared(cache)) == 1


def test_a_damaged_cache_is_named(folder: Path, cache: Path):
    Gsm8k(data_dir=str(folder))
    next(cache.glob("**/dataset_info.json")).unlink()
    with pytest.raises(
        TaskError, match=r"cannot be read .*delete that folder, and the next run prepares it again"
    ):
        Gsm8k(data_dir=str(folder))


def test_a_prepared_task_travels_closed(folder: Path):
    task = Gsm8k(data_dir=str(folder))
    before = task[3]
    blob = cloudpickle.dumps(task)
    assert len(blob) < 2000
    assert cloudpickle.loads(blob)[3] == before


@pytest.mark.slow
def test_neither_tensorflow_nor_jax_is_loaded_and_scoring_opens_nothing(folder: Path, cache: Path):
    code = f"""
import pickle, sys
from areal_jax.tasks.datasets.math_data import Gsm8k
from areal_jax.types import Completion
task = Gsm8k(data_dir={str(folder)!r})
prompt = task[0]
assert "tensorflow_datasets" in sys.modules and not {{"tensorflow", "jax"}} & set(sys.modules)
open({str(folder / "blob")!r}, "wb").write(pickle.dumps((task, prompt)))
"""
    score = f"""
import pickle, sys
from areal_jax.types import Completion
task, prompt = pickle.load(open({str(folder / "blob")!r}, "rb"))
assert task.score(prompt, Completion("#### 1000", (1,), "stop")).value == 1.0
assert not {{"tensorflow", "jax", "tensorflow_datasets", "array_record"}} & set(sys.modules)
"""
    for program in (code, score):
        done = subprocess.run(
            [sys.executable, "-c", program],
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=HANG_S,
            check=False,
        )
        assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_a_mixture_of_tasks_gives_each_its_share(folder: Path):
    tasks = load_tasks({"gsm8k": {"data_dir": str(folder), "weight": 1}, "arithmetic": {"weight": 3}})
    stream = PromptStream(tasks, seed=0)
    prompts = [stream.prompt(ordinal) for ordinal in range(1000)]
    by_task = {name: [prompt for prompt in prompts if prompt.task == name] for name in tasks}
    assert {name: len(found) for name, found in by_task.items()} == {"gsm8k": 250, "arithmetic": 750}
    assert len({prompt.info["solution"] for prompt in by_task["gsm8k"]}) == 40
    for name, found in by_task.items():
        task = tasks[name].task
        assert task.score(found[0], Completion(task.reference(found[0]), (1,), "stop")).value == 1.0


# --- downloading --------------------------------------------------------------------------------------


@pytest.fixture
def site(folder: Path) -> Iterator[str]:
    """The folder, served on the loopback."""

    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *_: object) -> None:
            pass

    server = http.server.ThreadingHTTPServer(
        ("127.0.0.1", 0), functools.partial(Quiet, directory=str(folder))
    )
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def elsewhere(site: str) -> type[Gsm8k]:
    class Mirror(Gsm8k):
        url = site + "/{split}.jsonl"

    return Mirror


def test_without_a_folder_both_splits_are_downloaded_once(
    site: str, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
):
    monkeypatch.setattr(tfds.core.constants, "DATA_DIR", str(tmp_path / "tfds"))
    task = elsewhere(site)()
    assert (len(task), task[39].info["answer"]) == (40, "1039")
    assert len(elsewhere(site)(split="test")) == 3
    for name in ("train.jsonl", "test.jsonl"):
        (folder / name).unlink()
    assert elsewhere(site)()[39] == task[39], "the second time nothing is asked of the network"
    assert [path.name for path in (tmp_path / "tfds").iterdir()] == ["areal_problems"]
    assert capsys.readouterr().out == "", "stdout may be somebody's JSON"


def test_no_network_and_missing_files_say_to_give_a_folder(
    site: str, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(tfds.core.constants, "DATA_DIR", str(tmp_path / "tfds"))
    remedy = "or give tasks.gsm8k.data_dir=FOLDER, a folder with train.jsonl and test.jsonl"
    (folder / "test.jsonl").unlink()
    with pytest.raises(
        TaskError, match=rf"{re.escape(site)}/test.jsonl cannot be downloaded: .*404.*; {remedy}"
    ):
        elsewhere(site)()
    with pytest.raises(TaskError, match=rf"127.0.0.1:9/train.jsonl cannot be downloaded: .*; {remedy}"):
        elsewhere("http://127.0.0.1:9")()


def test_the_official_files_are_kept_where_tensorflow_datasets_keeps_its_own(tmp_path: Path):
    code = "import areal_jax.tasks.datasets.problems as p; print(p._builders().tfds.core.constants.DATA_DIR)"
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env={**os.environ, "TFDS_DATA_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=HANG_S,
        check=True,
    )
    assert done.stdout.strip() == str(tmp_path)
