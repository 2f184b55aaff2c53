"""Runs of answers among thoughts: every strategy, optimiser, template and reward, and the virtual clock.

Every run checks the same: what its journal says of rewards, gates and metrics is worked out again here, from
the journaled tokens and from the definitions of Interleaved Reasoning (arXiv:2505.19640).
"""

from __future__ import annotations

import io
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import Any

import jax
import numpy as np
import pytest

from areal_jax.assembly.parts import assemble, first_params
from areal_jax.assembly.run_folder import open_journal
from areal_jax.assembly.sources import run_params, run_source
from areal_jax.config.loading import load_config
from areal_jax.config.tree import Config
from areal_jax.control.events import Train
from areal_jax.jobs.local import run
from areal_jax.lab.ablations.ablation import Workbench
from areal_jax.models.lora import adapters_of, base_of
from areal_jax.observe.metrics import read_rows
from areal_jax.replay.folder_audit import audit_run
from areal_jax.tasks.interleaved import PARTS
from areal_jax.tasks.source import PromptStream, load_tasks
from areal_jax.tasks.task import Task
from areal_jax.trajectories.sqlite import SqliteQueue
from areal_jax.types import Completion, Prompt, Reward, Trajectory
from tests.promises import GROUPS, MEMBERS, PAIRS, STEPS, check, scarce
from tests.small_run import RECIPE, WORDS, small

TASK = (
    "tasks=chained",
    "tasks.chained.steps=3",
    "tasks.chained.modulus=3",
    "tasks.chained.compact=true",
    "generation.length=40",
    "generation.max_tokens=30",
    "trainer.length=40",
)
LEARN_FORMAT = ("trainer.supervised.steps=60", "trainer.supervised.batch=32", "trainer.learning_rate=0.02")
"""Supervised steps after which most responses of temperature 1 follow the template, but not all."""

GATE = ("algorithm.gate.part=intermediate", "algorithm.gate.tolerance=0")
FEW = (f"run.steps={STEPS}", f"algorithm.group_size={MEMBERS}", f"trainer.batch_size={GROUPS}")

FORMS = {
    "interleave": re.compile(r"(<think>[^<]*</think><answer>[^<]+</answer>)+"),
    "think_answer": re.compile(r"<think>[^<]*</think><answer>[^<]+</answer>"),
    "delayed": re.compile(r"<think>[^<]*</think>(<answer>[^<]+</answer>)+"),
}
"""The templates' responses. Compact ones have no "<" but those of tags, and no whitespace."""

# Whole runs, from a model that is first taught the format.
pytestmark = [pytest.mark.few_optimizations, pytest.mark.slow]

OTHERS = ("ppo", "reinforce_pp", "aipo", "decoupled_ppo")
"""Presets beside grpo: with a critic, with the reference's KL in the reward, of LlamaRL and of AReaL."""

Sample = tuple[Trajectory, list[str]]
"""A trained sample, and the text of each of its tokens."""


def taught(folder: Path) -> Path:
    """Train a run on references alone, as LEARN_FORMAT does; returns its folder, for model.source."""
    steps = ("run.steps=60", "trainer.batch_size=32", "trainer.checkpoint_every=60")
    words = ("algorithm.preset=sft", "algorithm.group_size=1", "trainer.learning_rate=0.02")
    run(small(folder, *TASK, *steps, *words), stream=io.StringIO())
    return folder


def words_from(source: Path) -> list[str]:
    """Settings of a small gated run that starts from the run in `source`."""
    sizes = [word for word in WORDS if not word.startswith("model.overrides")]
    return [*sizes, *TASK, *GATE, "trainer.learning_rate=0.001", f"model.source={source}"]


def gated(folder: Path, source: Path, *words: str) -> Config:
    return load_config(RECIPE, *words_from(source), f"run.dir={folder}", *words)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return taught(tmp_path_factory.mktemp("taught") / "run")


# --- what every run must show -------------------------------------------------------------------------------


def check_run(folder: Path, form: re.Pattern[str] = FORMS["interleave"]) -> list[Sample]:
    """Work out rewards, gates and metrics of a finished gated run again; returns its trained samples."""
    config, rows = load_config(folder / "config.yaml"), read_rows(folder)
    assert audit_run(folder).violations == []
    assert [row["step"] for row in rows] == list(range(config.run.steps))
    samples, accuracy = [], -math.inf
    with open_journal(folder) as journal:
        for row, batch in zip(rows, batches(config, journal), strict=True):
            check_scores(batch, form)
            right = fmean(t.reward_parts["correct"] for t, _ in batch)
            check_row(row, batch, is_open=right > accuracy)
            accuracy = right
            samples += batch
    return samples


def batches(config: Config, journal: SqliteQueue) -> Iterator[list[Sample]]:
    """The trained samples of each batch; the task has confirmed their journaled rewards."""
    tasks = load_tasks(config.tasks)
    prompts = PromptStream(tasks, config.run.seed)
    asked = {a.step: a for row in journal.rows() for a in row.actions if isinstance(a, Train)}
    for _, train in sorted(asked.items()):
        batch = []
        for ordinal, attempt in zip(train.ordinals, train.attempts, strict=True):
            prompt = prompts.prompt(ordinal)
            members = journal.group(ordinal, attempt, config.algorithm.group_size)
            batch += [(t, confirmed(tasks[prompt.task].task, prompt, t)) for t in members]
        yield batch


def confirmed(task: Task, prompt: Prompt, t: Trajectory) -> list[str]:
    """Score the journaled tokens again, and compare; returns the text of each token."""
    assert task.tokenizer is not None
    tokens = t.tokens[t.loss_mask].tolist()
    pieces = [task.tokenizer.decode([token]) for token in tokens]
    again = task.score(prompt, Completion("".join(pieces), tuple(tokens), t.stop_reason, tuple(pieces)))
    assert again == Reward(t.reward or 0.0, t.reward_parts, t.reward_note)
    return pieces


def check_scores(batch: Iterable[Sample], form: re.Pattern[str]) -> None:
    """Work out what follows from a response's text alone; the other parts are checked for their bounds."""
    for t, pieces in batch:
        parts = t.reward_parts
        assert tuple(parts) == PARTS
        is_valid = form.fullmatch("".join(pieces)) is not None
        assert parts["format"] == (1 if is_valid else -1), pieces
        if is_valid:
            opened = pieces.index("<answer>") + 1
            first = next(i for i in range(opened, len(pieces)) if pieces[i])
            assert parts["ttft_share"] == first / len(pieces), pieces
            assert parts["final"] in ((2.0,) if parts["correct"] else (-1.5, -2.0))
        else:
            assert parts == dict.fromkeys(PARTS, 0.0) | {"format": -1.0, "ttft_share": 1.0}
        assert 0 <= parts["intermediate"] <= 0.5
        assert t.reward == parts["format"] + parts["final"] + parts["intermediate"]


def check_row(row: dict[str, Any], batch: list[Sample], is_open: bool) -> None:
    """Compare a metrics row with the journaled rewards of its batch; a closed gate withholds one part."""
    parts = [t.reward_parts for t, _ in batch]
    scored = np.array([t.reward for t, _ in batch])
    extra = np.array([own["intermediate"] for own in parts])
    assert row["gates"] == {"intermediate": is_open}, row["step"]
    assert list(row["reward_parts"]) == list(PARTS)
    for name, mean in row["reward_parts"].items():
        assert mean == pytest.approx(fmean(own[name] for own in parts), abs=1e-12), (row["step"], name)
    paid = scored if is_open else scored - extra
    assert row["reward_mean"] == pytest.approx(paid.mean(), abs=1e-9)
    assert row["reward_ungated_mean"] == pytest.approx(scored.mean(), abs=1e-9)
    assert row["paid_share"] == {"intermediate": np.mean(extra > 0) if is_open else 0}
    assert all(math.isfinite(value) for value in numbers(row)), row


def numbers(value: Any) -> Iterator[float]:
    """All numbers of a metrics row, at any depth."""
    if isinstance(value, dict):
        for one in value.values():
            yield from numbers(one)
    elif isinstance(value, (int, float)):
        yield value


def is_mixed(samples: list[Sample]) -> bool:
    """Whether some responses break the template, some are wrong and some are right."""
    found = {(t.reward_parts["format"], t.reward_parts["correct"]) for t, _ in samples}
    return found == {(-1, 0), (1, 0), (1, 1)}


def first_answers(samples: list[Sample]) -> float:
    """Mean `ttft_share` of the responses that follow the template."""
    return fmean(t.reward_parts["ttft_share"] for t, _ in samples if t.reward_parts["format"] > 0)


# --- strategies, optimisers, adapters -----------------------------------------------------------------------

CORE = {("sync", "drain"), ("interruptible", "recompute"), ("pinned", "pinned")}
"""What `.ci/run` runs of them."""


@pytest.mark.parametrize(
    ("strategy", "on_update"),
    [
        pytest.param(*pair, id="-".join(pair), marks=() if pair in CORE else pytest.mark.soak)
        for pair in PAIRS
    ],
)
def test_every_strategy_pays_interleaved_answers_by_the_gate(tmp_path, source, strategy, on_update):
    config = gated(tmp_path / "run", source, *scarce(strategy, on_update))
    run(config, stream=io.StringIO())
    with open_journal(tmp_path / "run") as journal:
        check(config, (row.event for row in journal.rows()))
    samples = check_run(tmp_path / "run")
    assert is_mixed(samples)
    assert first_answers(samples) < 0.4


@pytest.mark.parametrize(
    "preset", ["grpo", *(pytest.param(preset, marks=pytest.mark.soak) for preset in OTHERS)]
)
def test_every_optimiser_trains_on_the_same_rewards(tmp_path, source, preset):
    run(gated(tmp_path / "run", source, *FEW, f"algorithm.preset={preset}"), stream=io.StringIO())
    assert is_mixed(check_run(tmp_path / "run"))
    rows = read_rows(tmp_path / "run")
    assert len({row["params_digest"] for row in rows}) == len(rows)
    assert ("value_loss" in rows[0]) == (preset == "ppo")


def test_adapters_learn_from_interleaved_answers_beside_a_base_without_a_changed_bit(tmp_path, source):
    config = gated(tmp_path / "run", source, *FEW, "model.lora.rank=4")
    run(config, stream=io.StringIO())
    assert is_mixed(check_run(tmp_path / "run"))
    theirs, own = run_source(tmp_path / "run")
    before, after = first_params(assemble(config)), run_params(tmp_path / "run", theirs, own.model)
    assert same_bits(base_of(before), base_of(after))
    assert not same_bits(adapters_of(before), adapters_of(after))
    config, first = run_source(source)
    assert same_bits(base_of(before), run_params(source, config, first.model))


def same_bits(one: Any, other: Any) -> bool:
    pairs = zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True)
    return all(np.asarray(a).tobytes() == np.asarray(b).tobytes() for a, b in pairs)


# --- templates and rewards ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["think_answer", pytest.param("delayed", marks=pytest.mark.soak)])
def test_templates_with_all_thoughts_first_show_their_first_answer_later(tmp_path, name):
    words = (*TASK, *LEARN_FORMAT, *GATE, *FEW, "control.max_staleness=0", f"tasks.chained.template={name}")
    run(small(tmp_path / "run", *words), stream=io.StringIO())
    samples = check_run(tmp_path / "run", FORMS[name])
    assert is_mixed(samples)
    assert first_answers(samples) > 0.5
    sub_answers = [t.reward_parts["sub_correct"] for t, _ in samples]
    assert (max(sub_answers) > 0) == (name == "delayed")


Pays = Callable[[Mapping[str, float]], float]
"""The parts of a response without surplus answers -> what its sub-answers earn."""


@pytest.mark.parametrize(
    ("words", "pays"),
    [
        (["intermediate=none"], lambda parts: 0.0),
        (["intermediate=all_or_none"], lambda parts: 0.5 * (parts["correct"] and parts["sub_correct"] == 1)),
        (["intermediate=partial"], lambda parts: 0.5 * parts["correct"] * parts["sub_correct"]),
        (["intermediate=partial", "pay=direct"], lambda parts: 0.5 * parts["sub_correct"]),
    ],
    ids=["none", "all_or_none", "partial", "direct"],
)
def test_every_way_to_pay_sub_answers_trains(tmp_path, source, words: list[str], pays: Pays):
    own = [f"tasks.chained.reward.{word}" for word in words]
    run(gated(tmp_path / "run", source, *FEW, "control.max_staleness=0", *own), stream=io.StringIO())
    samples = check_run(tmp_path / "run")
    assert is_mixed(samples)
    for t, pieces in samples:
        # A problem has two right sub-answers; beyond three answers, a response may only be guessing.
        expected = pays(t.reward_parts) if pieces.count("<answer>") <= 3 else 0.0
        assert t.reward_parts["intermediate"] == pytest.approx(expected, abs=1e-12), pieces
    earned = [t.reward_parts["intermediate"] for t, _ in samples]
    assert (max(earned) > 0) == ("intermediate=none" not in words)


# --- the virtual clock --------------------------------------------------------------------------------------


def test_the_virtual_clock_decides_the_gates_and_gives_the_same_bits_twice(tmp_path, source):
    bench = Workbench(1.5)
    config = gated(tmp_path / "run", source, *FEW, "control.max_staleness=1")
    rows, again = bench.run(config).rows, bench.run(config).rows
    assert rows == again and len({row["params_digest"] for row in rows}) == STEPS
    assert [row["head_age_mean"] for row in rows] == [0, 1, 1, 1, 1]
    accuracies = [row["reward_parts"]["correct"] for row in rows]
    opened = [True, *(new > old for old, new in pairwise(accuracies))]
    assert [row["gates"]["intermediate"] for row in rows] == opened and not all(opened)
    for row, is_open in zip(rows, opened, strict=True):
        parts = row["reward_parts"]
        paid = parts["format"] + parts["final"] + (parts["intermediate"] if is_open else 0)
        assert row["reward_mean"] == pytest.approx(paid, abs=1e-9)
    withheld = [row["reward_ungated_mean"] - row["reward_mean"] for row in rows]
    assert max(withheld) > 0.001
