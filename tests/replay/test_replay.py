"""Replay: whole and pruned runs, bit for bit; and what was changed is named.

tests/cluster/test_replayed_runs.py has runs of every strategy, by threads and by processes, and killed ones.
"""

from __future__ import annotations

import io
import json
import shutil
import sqlite3
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from areal_jax.assembly.run_folder import open_journal
from areal_jax.cli.main import app
from areal_jax.control.events import BatchTrained, SampleFinished
from areal_jax.jobs.local import run
from areal_jax.replay.replay import replay
from areal_jax.trajectories.codec import decode, encode
from areal_jax.trajectories.journal import pack, unpack
from areal_jax.types import ArealError
from tests.small_run import small

pytestmark = pytest.mark.slow

STEPS = 8
SAMPLES = STEPS * 16
WORDS = (
    f"run.steps={STEPS}",
    "control.strategy=interruptible",
    "runtime.hosts=2",
    "generation.slots=2",
    "generation.decode_steps=1",
)
"""Few slots: hosts, and not the trainer, take the time, so samples are live when a version is committed."""


def made(folder: Path, *words: str) -> Path:
    run(small(folder, *WORDS, *words), stream=io.StringIO())
    return folder


def events(folder: Path, kind: type) -> list[Any]:
    with open_journal(folder) as journal:
        return list(journal.events(kind.__name__))


@pytest.fixture(scope="module")
def recompute(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return made(tmp_path_factory.mktemp("runs") / "recompute")


@pytest.mark.parametrize("on_update", ["recompute", pytest.param("drain", marks=pytest.mark.soak)])
def test_a_run_replays_without_a_bit_of_difference(tmp_path, request, on_update):
    if on_update == "recompute":
        folder = request.getfixturevalue("recompute")
    else:
        folder = made(tmp_path / "run", "generation.on_update=drain")
    found = replay(folder)
    assert found.difference == "" and found.header == {} and found.uncompared == 0
    assert (found.steps, found.samples, found.unfinished) == (STEPS, SAMPLES, 0)
    assert found.tokens == found.by_value == found.by_digest > 3 * SAMPLES
    finished = events(folder, SampleFinished)
    is_mixed = any(len(event.spans) > 1 for event in finished)  # samples that changed version half-way
    assert is_mixed == any(event.rebuilds for event in finished) == (on_update == "recompute")


@pytest.mark.soak
def test_a_pruned_run_is_compared_by_digests(tmp_path):
    words = "observe.keep_groups=0", "trainer.keep_checkpoints=1"
    found = replay(made(tmp_path / "run", *words))
    assert found.difference == "" and found.samples == SAMPLES
    assert found.by_digest == found.tokens and found.by_value < found.tokens / 2


def test_a_replay_ends_after_so_many_steps(recompute):
    found = replay(recompute, until=3)
    assert (found.steps, found.difference) == (3, "") and found.samples < SAMPLES
    assert found.samples + found.unfinished >= 3 * 16


# --- what was changed ---------------------------------------------------------------------------------------


def changed_trajectory(folder: Path, change: Callable[[Any], Any], at: int = 40) -> str:
    """Changes the trajectory of the sample that ended as number `at`, and returns the sample's name."""
    sample = events(folder, SampleFinished)[at].sample
    where = "WHERE ordinal = ? AND attempt = ? AND member = ?"
    key = sample.ordinal, sample.attempt, sample.member
    with sqlite3.connect(folder / "journal.sqlite") as db:
        ((payload,),) = db.execute(f"SELECT payload FROM trajectories {where}", key).fetchall()
        new = encode(change(decode(payload)))
        db.execute(f"UPDATE trajectories SET payload = ? {where}", (new, *key))
    return f"{sample.ordinal}/{sample.member}"


def changed_event(folder: Path, kind: str, change: Callable[[list[Any]], None], at: int) -> list[Any]:
    """Changes the values of the event number `at` of its kind, and returns them."""
    with sqlite3.connect(folder / "journal.sqlite") as db:
        rows = db.execute("SELECT seq, event FROM events WHERE kind = ? ORDER BY seq", (kind,)).fetchall()
        values = unpack(rows[at][1])
        change(values)
        db.execute("UPDATE events SET event = ? WHERE seq = ?", (pack(values), rows[at][0]))
    return values


def more_reward(values: list[Any]) -> None:
    """Changes the first reward of a RewardScored."""
    values[2] = [values[2][0] + 0.5, *values[2][1:]]


@pytest.fixture
def copy(recompute: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(recompute, tmp_path / "copy"))


def test_a_changed_token_is_named(copy):
    def change(t):
        tokens = t.tokens.copy()
        tokens[-2] = (tokens[-2] + 1) % 10
        return replace(t, tokens=tokens)

    name = changed_trajectory(copy, change)
    with open_journal(copy) as journal:
        tokens = len(journal.trajectory(events(copy, SampleFinished)[40].sample).tokens)
    assert replay(copy).difference.startswith(f"sample {name}, token {tokens - 2}, tokens: the journal has")


def test_one_bit_of_a_log_prob_is_named(copy):
    def change(t):
        logp = t.behavior_logp.copy()
        logp[-1] = np.nextafter(logp[-1], np.float32(-10))
        return replace(t, behavior_logp=logp)

    name = changed_trajectory(copy, change)
    difference = replay(copy).difference
    assert difference.startswith(f"sample {name}, token ") and ", behavior_logp: " in difference


def test_a_changed_span_is_named(copy):
    finished = events(copy, SampleFinished)
    at = next(i for i, event in enumerate(finished) if len(event.spans) > 1)

    def change(values):
        first, second, *others = values[2]
        values[2] = [[first[0], first[1], first[2] + 1], [second[0], second[1] + 1, second[2]], *others]

    (ordinal, member, _), *_ = changed_event(copy, "SampleFinished", change, at)
    assert replay(copy).difference.startswith(f"sample {ordinal}/{member}, spans: the journal has")


def test_a_changed_reward_is_named(copy):
    ordinal, *_ = changed_event(copy, "RewardScored", more_reward, 9)
    found = replay(copy)
    assert found.difference.startswith(f"group {ordinal}, rewards: the journal has") and found.steps <= 2


def test_a_reward_that_was_changed_in_both_places_shows_in_the_step_that_trained_it(copy):
    ordinal, attempt, *rest = changed_event(copy, "RewardScored", more_reward, 9)
    with sqlite3.connect(copy / "journal.sqlite") as db:
        where = "WHERE ordinal = ? AND attempt = ?"
        db.execute(f"UPDATE rewards SET scored = ? {where}", (pack(rest), ordinal, attempt))
    step = next(event.step for event in events(copy, BatchTrained) if ordinal in event.ordinals)
    found = replay(copy)
    assert found.difference.startswith(f"step {step}, ") and found.steps == step


def test_a_folder_without_a_run_is_refused(tmp_path):
    with pytest.raises(ArealError, match=r"has no config\.yaml"):
        replay(tmp_path)


def test_the_command_ends_with_status_1_at_a_difference(recompute, copy):
    whole = CliRunner().invoke(app, ["replay", str(recompute), "--until", "2", "--json"])
    assert whole.exit_code == 0 and json.loads(whole.stdout)["steps"] == 2
    ordinal, *_ = changed_event(copy, "RewardScored", more_reward, 1)
    other = CliRunner().invoke(app, ["replay", str(copy)])
    assert other.exit_code == 1 and f"first difference: group {ordinal}, rewards: " in other.stdout
    refused = CliRunner().invoke(app, ["replay", str(copy), "--until", "0"])
    assert "--until=0 is no number of steps" in str(refused.exception) + refused.output
