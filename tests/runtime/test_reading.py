"""Readings of a journal: what the report takes from its events, and the samples that it shows."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from areal_jax.assembly.parts import open_inputs
from areal_jax.config.loading import load_config
from areal_jax.config.tree import Config
from areal_jax.control import events as e
from areal_jax.runtime import viewer
from areal_jax.runtime.context import write_result
from areal_jax.runtime.reading import find, view_sample, write_report
from areal_jax.runtime.viewer import Late, Viewer, token_texts
from areal_jax.tasks.source import PromptStream, load_tasks
from areal_jax.tasks.tokenizers import ByteTokenizer, CharTokenizer
from areal_jax.trajectories.sqlite import Entry, SqliteQueue
from areal_jax.types import NOT_SAMPLED, ArealError, SampleId, Sampling, Trajectory

TEXT = CharTokenizer("abcdefghijklmnop>")


def trajectory(sample: SampleId, versions: list[int], stop: str = "stop") -> Trajectory:
    """The prompt "c>", then a token a version: the letters from a on."""
    tokens = TEXT.encode("c>" + "abcdefgh"[: len(versions)])
    mask = np.arange(len(tokens)) >= 2
    return Trajectory(
        sample=sample,
        tokens=np.array(tokens, np.int32),
        loss_mask=mask,
        behavior_logp=np.where(mask, -0.5, 0).astype(np.float32),
        versions=np.array([NOT_SAMPLED] * 2 + versions, np.int32),
        turn_ids=np.where(mask, 0, -1).astype(np.int32),
        sampling=Sampling(),
        stop_reason=stop,
        interruptions=len(set(versions)) - 1,
    )


def finished(t: Trajectory) -> Entry:
    return Entry(e.SampleFinished(t.sample, "host-0", t.spans, t.stop_reason, t.interruptions), (), t)


def scored(ordinal: int, *rewards: float, attempt: int = 0) -> Entry:
    notes = tuple(f"note {ordinal}/{member}" for member in range(len(rewards)))
    return Entry(e.RewardScored(ordinal, attempt, rewards, (), notes))


ENTRIES = [
    finished(trajectory(SampleId(0, 0), [0, 0, 1])),
    finished(trajectory(SampleId(0, 1), [0])),
    scored(0, 0.25, 1.0),
    finished(trajectory(SampleId(1, 0), [0])),  # started again: this attempt is void
    finished(trajectory(SampleId(1, 0, 1), [1, 1], "length")),
    finished(trajectory(SampleId(1, 1, 1), [1])),
    Entry(e.RewardFailed(2, 0, 1, "timed_out", "slow")),
    scored(1, 0.0, 0.5, attempt=1),
    finished(trajectory(SampleId(3, 0), [1])),  # never trained
    Entry(e.BatchTrained(2, (0, 1), "d", {})),
]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    config = load_config("tasks=countdown", f"run.dir={tmp_path}")
    (tmp_path / "config.yaml").write_text("tasks: countdown\nmodel: {shape: tiny}\n")
    with SqliteQueue.create(tmp_path / "journal.sqlite", {}) as journal:
        journal.append(ENTRIES)
    assert config.run.folder == tmp_path
    return tmp_path


@pytest.fixture
def journal(folder: Path) -> Iterator[SqliteQueue]:
    with SqliteQueue.open(folder / "journal.sqlite", readonly=True) as journal:
        yield journal


def config_of(*words: str) -> Config:
    return load_config("tasks=countdown", *words)


def test_ages_lengths_and_rewards_are_of_what_was_trained(journal: SqliteQueue):
    """The update started from version 2; the void attempt and what was not trained do not count."""
    found = find(journal)
    assert found.token_ages == {2: 3, 1: 4}
    assert found.head_ages == {2: 2, 1: 2}
    assert sorted(found.lengths) == [1, 1, 2, 3]
    assert list(found.late) == [
        Late(SampleId(0, 0), 0.25, 1),
        Late(SampleId(0, 1), 1.0, 0),
        Late(SampleId(1, 0, 1), 0.0, 0),
        Late(SampleId(1, 1, 1), 0.5, 0),
    ]
    assert [failure.message for failure in found.failures] == ["slow"]


def test_best_worst_and_most_interrupted_are_shown_once(journal: SqliteQueue, monkeypatch):
    monkeypatch.setattr(viewer, "SHOWN", 1)
    chosen = Viewer(journal, config_of()).chosen(list(find(journal).late))
    named = {title: [view.sample for view in views] for title, views in chosen}
    assert named == {"Best": ["0/1"], "Worst": ["1/0/1"], "Most interrupted": ["0/0"]}


def test_samples_of_one_kind_are_of_different_prompts_and_pruned_ones_are_left_out(journal: SqliteQueue):
    late = [*find(journal).late, Late(SampleId(7, 0), 9.0, 0)]
    chosen = dict(Viewer(journal, config_of()).chosen(late))
    assert [view.sample for view in chosen["Best"]] == ["0/1", "1/1/1"]
    assert [view.sample for view in chosen["Worst"]] == ["1/0/1", "0/0"]
    assert "Most interrupted" not in chosen  # 0/0 is shown already


def test_equal_rewards_have_no_best(journal: SqliteQueue):
    late = [Late(SampleId(0, 0), 0.5, 0), Late(SampleId(1, 1, 1), 0.5, 0)]
    chosen = Viewer(journal, config_of()).chosen(late)
    assert [(title, [view.sample for view in views]) for title, views in chosen] == [
        ("Newest", ["1/1/1", "0/0"])
    ]


def test_a_sample_says_how_it_was_judged(folder: Path):
    view = view_sample(folder, "1/0/1")
    assert (view.task, view.prompt, view.completion) == ("countdown", "c>", "ab")
    assert (view.reward, view.reward_note, view.truncated) == (0.0, "note 1/0", True)
    mixed = view_sample(folder, "0/0")
    assert (mixed.interruptions, mixed.truncated) == (1, False)
    assert [(piece.text, piece.version) for piece in mixed.pieces] == [("a", 0), ("b", 0), ("c", 1)]
    for name in ("9/9", "0", "x/y"):
        with pytest.raises(ArealError, match=name.split("/")[0]):
            view_sample(folder, name)


def test_a_run_of_tasks_that_cannot_be_made_here_is_reported_without_samples(folder: Path):
    """Tasks given as Python objects leave only their names: their own tokenizer is not to be had."""
    page = write_report(folder, load_config("tasks=[Sums]", "run.name=x")).read_text()
    assert "no task is called" in page and "Sums" in page


def test_the_report_of_a_run_names_its_tasks_as_the_config_does(folder: Path):
    """With their weights: by these a prompt's ordinal decides which task it is of."""
    words = ["tasks={countdown: {weight: 1}, arithmetic: {weight: 9}}", "model.tokenizer=byte", "run.name=x"]
    config = load_config(*words)
    result = write_result(folder, open_inputs(config))
    assert result.report is not None
    named = set(re.findall(r"sample (\d+)/\S+ of (\w+)", result.report.read_text()))
    prompts = PromptStream(load_tasks(config.tasks), config.run.seed)
    assert named == {("0", prompts.place(0)[0]), ("1", prompts.place(1)[0])}


def test_bytes_need_no_task(journal: SqliteQueue):
    """As a run of Python objects is read: its one task is known by name alone."""
    seen = Viewer(journal, load_config("tasks=[Sums]", "model.tokenizer=byte"))
    assert seen.view(SampleId(0, 0)).task == "Sums"
    assert Viewer(journal, load_config("tasks=[Sums,More]", "model.tokenizer=byte")).task_of(0) == ""


def test_a_character_of_several_tokens_comes_with_its_last():
    text = ByteTokenizer()
    assert token_texts([*text.encode("aé€😀"), text.eos_id], text) == [
        "a", "", "é", "", "", "€", "", "", "", "😀", "■",
    ]  # fmt: skip
    broken = token_texts([0x61, 0xE2, 0x82], text)
    assert len(broken) == 3 and broken[0] == "a" and set(broken[2]) == {"\N{REPLACEMENT CHARACTER}"}
    assert token_texts([], text) == []
    assert "".join(token_texts([0xFF] * 9 + [0x62], text)).endswith("b")
