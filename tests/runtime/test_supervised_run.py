"""Supervised runs: the tasks' reference answers through the same loop, journal and resume as sampled ones."""

from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path

import pytest

from areal_jax.assembly.parts import assemble
from areal_jax.assembly.run_folder import open_journal
from areal_jax.config.loading import ConfigError, load_config
from areal_jax.config.tree import Config
from areal_jax.control.events import BatchTrained, Drop, SampleFailed
from areal_jax.jobs.local import resume, run
from areal_jax.replay.folder_audit import audit_run
from areal_jax.trajectories.packing import pack
from areal_jax.types import Group, SampleId
from areal_jax.weights.digest import digest

WORDS = (
    "run.steps=4",
    "tasks=countdown",
    "algorithm.preset=sft",
    "model.overrides={width: 16, heads: 2, kv_heads: 2, head_dim: 8, mlp_width: 32}",
    "generation.length=24",
    "generation.max_tokens=18",
    "trainer.batch_size=8",
    "trainer.rows=4",
    "trainer.checkpoint_every=2",
    "trainer.learning_rate=3e-3",
    "observe.tensorboard=false",
    "runtime.deadline_s=600",
)


def supervised(folder: Path, *words: str) -> Config:
    return load_config(*WORDS, f"run.dir={folder}", *words)


def plain_loop(config: Config) -> list[str]:
    parts = assemble(config)
    state, size, digests = parts.first_state(), config.trainer.batch_size, []
    for step in range(config.run.steps):
        ordinals = range(step * size, (step + 1) * size)
        groups = [
            Group(o, parts.prompts.prompt(o), (replace(parts.reference(SampleId(o, 0)), reward=1.0),))
            for o in ordinals
        ]
        batch = pack(groups, config.trainer.rows, config.row_length)
        state, _ = parts.learner.update(state, parts.learner.prepare(state, batch))
        digests.append(digest(state.params))
    return digests


@pytest.mark.slow
def test_a_supervised_run_is_the_plain_loop_over_reference_answers(tmp_path):
    config = supervised(tmp_path / "run")
    rows = run(config, stream=io.StringIO()).metrics
    assert [row["params_digest"] for row in rows] == plain_loop(config)
    assert {row["reward_mean"] for row in rows} == {1.0}  # references are scored like any completion
    assert {row["token_age_max"] for row in rows} == {0} == {row["generated_tokens"] for row in rows}
    assert rows[0]["nll"] > rows[-1]["nll"] > 0
    assert rows[0]["off_policy_weight_mean"] == 1 and rows[0]["logp_gap_max"] == 0
    audited = audit_run(tmp_path / "run")
    assert (audited.ok, audited.trained, audited.in_flight) == (True, 32, 0)
    assert "<svg" in (tmp_path / "run" / "report.html").read_text()


@pytest.mark.slow
def test_a_supervised_run_goes_on(tmp_path):
    whole = run(supervised(tmp_path / "whole"), stream=io.StringIO()).metrics
    run(supervised(tmp_path / "cut", "run.steps=2"), stream=io.StringIO())
    resumed = resume(tmp_path / "cut", ["run.steps=4"], stream=io.StringIO()).metrics
    assert [row["params_digest"] for row in resumed] == [row["params_digest"] for row in whole]


@pytest.mark.slow
def test_an_answer_that_does_not_fit_is_dropped_and_said(tmp_path):
    stream = io.StringIO()
    long = ("generation.length=20", "tasks.countdown.letters=26", "tasks.countdown.median=12")
    run(supervised(tmp_path / "run", *long), stream=stream)
    with open_journal(tmp_path / "run") as journal:
        rows = list(journal.rows())
    failed = {row.event.sample.ordinal for row in rows if isinstance(row.event, SampleFailed)}
    dropped = {a.ordinal for row in rows for a in row.actions if isinstance(a, Drop)}
    trained = {o for row in rows if isinstance(row.event, BatchTrained) for o in row.event.ordinals}
    assert failed and failed == {o for o in dropped if o not in trained}
    assert "generation.length=20; raise generation.length, or leave this row out" in stream.getvalue()


@pytest.mark.parametrize("word", ["algorithm.proximal=recompute", "algorithm.off_policy=truncate"])
def test_reference_answers_have_no_behaviour_log_probs_to_weigh(tmp_path, word):
    with pytest.raises(ConfigError, match="no policy sampled a reference answer"):
        supervised(tmp_path, word)
