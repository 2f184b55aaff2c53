"""Readings of a journal: what the report takes from its events, and the samples that it shows."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from itertools import groupby
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner, Result

from areal_jax.assembly.parts import open_inputs
from areal_jax.cli.main import app
from areal_jax.config.loading import load_config
from areal_jax.config.tree import Config
from areal_jax.control import events as e
from areal_jax.observe.waits import Interval
from areal_jax.report import reading, viewer
from areal_jax.report.lanes import timeline, timeline_zoom
from areal_jax.report.reading import find, view_sample, write_report
from areal_jax.report.run_result import write_result
from areal_jax.report.sample import SampleView
from areal_jax.report.staleness import Trained
from areal_jax.report.viewer import Late, Viewer, token_blocks, token_texts
from areal_jax.tasks.interleaved import Interleaved
from areal_jax.tasks.source import PromptStream, WeightedTask, load_tasks
from areal_jax.tasks.tokenizers import ByteTokenizer, CharTokenizer
from areal_jax.trajectories.sqlite import Entry, SqliteQueue
from areal_jax.types import NOT_SAMPLED, ArealError, Prompt, SampleId, Sampling, Trajectory

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
    assert [Trained(*values) for values in found.trained.tolist()] == [
        Trained(0, 0.25, 2, 3), Trained(0, 1.0, 2, 1), Trained(1, 0.0, 1, 2), Trained(1, 0.5, 1, 1),
    ]  # fmt: skip
    assert list(found.late) == [
        Late(SampleId(0, 0), 0.25, 1),
        Late(SampleId(0, 1), 1.0, 0),
        Late(SampleId(1, 0, 1), 0.0, 0),
        Late(SampleId(1, 1, 1), 0.5, 0),
    ]
    assert [failure.message for failure in found.failures] == ["slow"]


def inspected(folder: Path, *words: str) -> Result:
    return CliRunner().invoke(app, ["inspect", str(folder), "--staleness", *words])


def test_inspect_and_the_report_compare_rewards_by_age(folder: Path):
    """Even groups are one version old, odd ones two; of four samples the last two are right, or all."""
    entries = []
    for ordinal in range(2, 62):
        age = 1 + ordinal % 2
        entries += [finished(trajectory(SampleId(ordinal, k), [2 - age] * (age + k % 2))) for k in range(4)]
        entries.append(scored(ordinal, *([1.0] * 4 if ordinal % 4 == 0 else [0.0, 0.0, 1.0, 1.0])))
    entries.append(Entry(e.BatchTrained(2, tuple(range(2, 62)), "d", {})))
    assert inspected(folder).exit_code == 1
    assert "rewards by age cannot be compared for the 4 trained samples" in inspected(folder).stderr
    with SqliteQueue.open(folder / "journal.sqlite") as journal:
        journal.append(entries)
    found = json.loads(inspected(folder, "--json").stdout)
    assert found["trained"] == found["compared"] == 4 + 60 * 4
    young, old = found["ages"]
    assert (young["youngest"], young["oldest"], old["youngest"]) == (1, 1, 2)
    assert young["reward"] == pytest.approx((15 * 4 + 15 * 2 + 0.5) / 122)
    assert old["reward"] == pytest.approx((30 * 2 + 1.25) / 122)
    assert (young["completion_tokens_p50"], old["completion_tokens_p50"]) == (1.5, 2.5)
    lines = inspected(folder).stdout.splitlines()
    assert lines[1].split()[:4] == ["1", "122", "1.5", "0.7418"] and len(lines) == 4
    assert lines[2].split()[:4] == ["2", "122", "2.5", "0.5020"]
    assert "<h3>Reward by age</h3>" in write_report(folder, config_of("run.name=x")).read_text()


def test_inspect_compares_trained_with_generated_groups(folder: Path):
    """Groups 2 to 41 have answers of 1 or 2 tokens and are trained, 42 to 61 have 5 and are dropped."""
    command = ["inspect", str(folder), "--selection"]
    failed = CliRunner().invoke(app, command)
    assert failed.exit_code == 1 and "no group was trained yet" in failed.stderr
    entries = []
    for ordinal in range(2, 62):
        samples = tuple(SampleId(ordinal, k) for k in range(2))
        entries.append(Entry(e.HostJoined("host-0", 2), (e.Dispatch(samples, "host-0", 0),)))
        tokens = 5 if ordinal > 41 else 1 + ordinal % 2
        entries += [finished(trajectory(sample, [0] * tokens)) for sample in samples]
        drop = (e.Drop(ordinal, "no_signal"),) if ordinal > 41 else ()
        entries.append(replace(scored(ordinal, 0.0, 0.0 if ordinal > 41 else 1.0), actions=drop))
    entries.append(Entry(e.BatchTrained(3, tuple(range(2, 42)), "d", {})))
    with SqliteQueue.open(folder / "journal.sqlite") as journal:
        journal.append(entries)
    found = json.loads(CliRunner().invoke(app, [*command, "--json"]).stdout)
    assert [(each["fate"], each["finished"], each["completion_tokens"]) for each in found["fates"]] == [
        ("trained", 40, 1.5), ("no_signal", 20, 5.0),
    ]  # fmt: skip
    tokens, longest, difficulty = found["gaps"]
    assert (tokens["trained_mean"], tokens["generated_mean"]) == (1.5, pytest.approx(160 / 60))
    assert tokens["relative"] == pytest.approx(1.5 * 60 / 160 - 1) and tokens["p"] < 1e-10
    assert {gap["cause"] for gap in (tokens, longest, difficulty)} == {"no_signal"}
    lines = CliRunner().invoke(app, command).stdout.splitlines()
    assert lines[1].split()[:4] == ["trained", "40", "0", "1.5"]
    assert lines[2].split()[:4] == ["no_signal", "20", "0", "5"]
    assert sum(line.startswith("alarm: trained groups are not the generated ones") for line in lines) == 3
    page = write_report(folder, config_of("run.name=x")).read_text()
    assert "<h3>Trained and generated groups</h3>" in page and page.count("<strong>Alarm:</strong>") == 3
    result = write_result(folder, open_inputs(config_of("run.name=x", "observe.report=false")))
    assert list(result.warnings) == found["alarms"]


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


class Steps(Interleaved):
    """One prompt, answered by blocks."""

    def __init__(self, template: str = "interleave") -> None:
        super().__init__(template=template)

    def __len__(self) -> int:
        return 1

    def __getitem__(self, i: int) -> Prompt:
        return Prompt("2+2?", info={"steps": (), "answer": "4"})

    def guess(self, prompt, rng):
        return ["?"], ["0"]


def respond(folder: Path, *texts: str) -> None:
    """A journal with a sample of ordinal 0 for each text: of bytes, then the EOS."""
    text = ByteTokenizer()
    with SqliteQueue.create(folder / "journal.sqlite", {}) as journal:
        for member, response in enumerate(texts):
            tokens = np.array([*text.encode("?" + response), text.eos_id], np.int32)
            sampled = np.arange(len(tokens)) >= 1
            journal.append(
                [
                    finished(
                        replace(
                            trajectory(SampleId(0, member), []),
                            tokens=tokens,
                            loss_mask=sampled,
                            behavior_logp=np.zeros(len(tokens), np.float32),
                            versions=np.where(sampled, 0, NOT_SAMPLED).astype(np.int32),
                            turn_ids=np.where(sampled, 0, -1).astype(np.int32),
                        )
                    )
                ]
            )


def blocks_of(view: SampleView) -> list[tuple[str, str]]:
    """(block, text) of the runs of tokens with one block."""
    runs = groupby(view.pieces, key=lambda piece: piece.block)
    return [(block, "".join(piece.text for piece in run)) for block, run in runs]


INTERLEAVED = "<think>a</think>\n<answer>b</answer><think>c</think><answer>d</answer>"
SHOWN = [
    ("think", "<think>a</think>"),
    ("", "\n"),
    ("answer", "<answer>b</answer>"),
    ("think", "<think>c</think>"),
    ("answer", "<answer>d</answer>"),
    ("", "■"),
]


def test_thoughts_and_answers_of_a_task_with_a_template_are_told_apart(tmp_path: Path):
    respond(tmp_path, INTERLEAVED, "<think>a</think><answer>b</answer> so")
    words = [f"tasks=[{__name__}:Steps]", "model.tokenizer=byte"]
    with SqliteQueue.open(tmp_path / "journal.sqlite", readonly=True) as journal:
        for seen in (
            Viewer(journal, load_config(*words)),
            Viewer(journal, load_config("tasks=[Steps]", words[1]), {"Steps": WeightedTask(Steps())}),
        ):
            assert blocks_of(seen.view(SampleId(0, 0))) == SHOWN
            assert blocks_of(seen.view(SampleId(0, 1)))[-1] == ("", " so■")
        # The second think block breaks the template.
        other = {"Steps": WeightedTask(Steps("delayed"))}
        seen = Viewer(journal, load_config("tasks=[Steps]", words[1]), other)
        assert blocks_of(seen.view(SampleId(0, 0)))[2:] == [
            ("answer", "<answer>b</answer>"),
            ("", "<think>c</think><answer>d</answer>■"),
        ]


@pytest.mark.parametrize("task", ["countdown", "Steps", f"{__name__}:Absent"])
def test_a_task_without_a_template_or_that_is_not_there_shows_no_blocks(tmp_path: Path, monkeypatch, task):
    """A task of a class without a template is not loaded, because its data may have to be downloaded."""
    monkeypatch.setattr(viewer, "load_tasks", lambda _: pytest.fail("a task was loaded"))
    respond(tmp_path, INTERLEAVED)
    with SqliteQueue.open(tmp_path / "journal.sqlite", readonly=True) as journal:
        seen = Viewer(journal, load_config(f"tasks=[{task}]", "model.tokenizer=byte"))
        assert blocks_of(seen.view(SampleId(0, 0))) == [("", INTERLEAVED + "■")]


@pytest.mark.parametrize(
    ("pieces", "kinds"),
    [
        ([], ""),
        (["<th", "ink>", "a", "</think", ">", " ", "<answer>", "4", "</answer>", ""], "ttttt-aaa-"),
        (["<think>a</think", "><ans", "wer>4</answer>"], "tta"),
        (["<think>", "a", "", " b"], "tttt"),  # cut off in a thought
        (["<think>a</think>", "<answer>", "4", "</ans"], "taaa"),  # cut off in a closing tag
        (["<think>a</think>", "<answer>", " "], "t--"),  # no answer has begun
        (["<think>a</think>", "<answer>4</answer>", " ", "so", "<think>", "b"], "ta----"),
        (["<think>a</think>", "<answer>4", "<think>", "b", "</think>"], "t----"),  # nested
        (["so", "<think>", "a", "</think>"], "----"),
    ],
)
def test_a_token_is_of_the_block_around_it(pieces: list[str], kinds: str):
    names = {"t": "think", "a": "answer", "-": ""}
    assert token_blocks(pieces, "interleave") == [names[kind] for kind in kinds]


def test_a_character_of_several_tokens_comes_with_its_last():
    text = ByteTokenizer()
    assert token_texts([*text.encode("aé€😀"), text.eos_id], text) == [
        "a", "", "é", "", "", "€", "", "", "", "😀", "■",
    ]  # fmt: skip
    broken = token_texts([0x61, 0xE2, 0x82], text)
    assert len(broken) == 3 and broken[0] == "a" and set(broken[2]) == {"\N{REPLACEMENT CHARACTER}"}
    assert token_texts([], text) == []
    assert "".join(token_texts([0xFF] * 9 + [0x62], text)).endswith("b")


def test_a_timeline_is_of_the_whole_run_or_of_its_last_seconds(tmp_path, monkeypatch):
    def pictured(seconds: int, draw) -> str:
        intervals = [
            Interval("host-0", "decode" if at % 2 else "prefill", at, at + 1) for at in range(seconds)
        ]
        monkeypatch.setattr(reading, "read_timelines", lambda folder: intervals)
        reading.write_timeline(tmp_path, tmp_path / "t.svg", draw)
        return (tmp_path / "t.svg").read_text()

    assert 'aria-label="Share of the time that each component worked: host-0 100%."' in pictured(8, timeline)
    assert 'aria-label="Each activity of each component from 5.0 s to 8.0 s' in pictured(8, timeline_zoom)
    with pytest.raises(ArealError, match="within 6 s; continue the run"):
        pictured(5, timeline_zoom)
