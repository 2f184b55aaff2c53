"""`areal-jax eval`: a model by its name, or a run's newest committed version, read beside the run."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from typer.testing import CliRunner

from areal_jax.assembly import committed
from areal_jax.assembly.parts import assemble
from areal_jax.cli.main import app
from areal_jax.config.loading import load_config
from areal_jax.evaluation import command as eval_jobs
from areal_jax.observe.evals import append_eval, read_evals
from areal_jax.observe.metrics import read_rows
from areal_jax.trajectories.lock import WriterLock, holder
from areal_jax.types import ArealError, VersionedParams
from areal_jax.weights.digest import digest
from areal_jax.weights.orbax import OrbaxStore
from areal_jax.weights.publishing import PublisherSettings
from tests.small_run import small

TINY = (
    "model.overrides={width: 16, heads: 2, kv_heads: 2, head_dim: 8, mlp_width: 32}",
    "generation.length=24", "generation.max_tokens=18", "generation.slots=4", "generation.decode_steps=2",
    "generation.prefill_chunk=8",
)  # fmt: skip
"""The sizes of `small`, so that programs are compiled once."""


def asked(*words: str) -> dict:
    """The one JSON object on stdout."""
    result = CliRunner().invoke(app, ["eval", *words, "--json"])
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def refused(*words: str) -> str:
    result = CliRunner().invoke(app, ["eval", *words])
    assert result.exit_code == 1 and isinstance(result.exception, SystemExit), result.output
    assert "Traceback" not in result.output
    return result.stderr


def without_times(figures: dict) -> dict:
    """What has to be the same twice."""
    timed = ("seconds", "tokens_per_s", "evaluated_s")
    return {
        key: without_times(value) if isinstance(value, dict) else value
        for key, value in figures.items()
        if key not in timed
    }


def flip_a_bit(version: Path) -> None:
    """In the largest file of a committed version."""
    files = (path for path in (version / "state").rglob("*") if path.is_file())
    blob = max(files, key=lambda path: path.stat().st_size)
    data = bytearray(blob.read_bytes())
    data[-1] ^= 1
    blob.write_bytes(data)


# --- a run --------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_run_is_evaluated_at_its_newest_version_and_twice_alike(folder: Path):
    figures = asked(str(folder), "--limit", "12")
    assert (figures["version"], figures["digest"]) == (3, read_rows(folder)[-1]["params_digest"])
    assert (figures["run"], figures["model"], figures["refused"]) == (str(folder), None, [])
    one = figures["tasks"]["countdown"]
    assert (one["split"], one["prompts"], one["greedy"]["scored"], one["sampled"]["scored"]) == (
        None, 12, 12, 12,
    )  # fmt: skip
    assert (one["greedy"]["samples"], one["sampled"]["samples"], figures["threshold"]) == (1, 4, 1.0)
    assert {"pass@1", "pass@2", "pass@4"} <= one["sampled"].keys()
    again = asked(str(folder), "--limit", "12")
    assert without_times(again) == without_times(figures)
    assert [line["tasks"] for line in read_evals(folder)] == [figures["tasks"], again["tasks"]]


@pytest.mark.slow
def test_a_run_in_progress_is_read_at_low_priority_and_never_locked(folder: Path, monkeypatch):
    given: list[int] = []
    monkeypatch.setattr(os, "nice", given.append)
    lock = WriterLock(folder / "journal.sqlite")
    assert holder(folder / "journal.sqlite") is not None  # this process ran it
    (folder / "journal.sqlite.lock").write_text("process 4194305 on " + os.uname().nodename)
    assert holder(folder / "journal.sqlite") is None  # beyond any process number
    assert lock.acquire() is None
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("*") if path.is_file()}
    assert asked(str(folder), "--limit", "1", "--samples", "0")["version"] == 3
    assert given == [19]
    after = {path: path.stat().st_mtime_ns for path in folder.rglob("*") if path.is_file()}
    new = {path.name for path in after.keys() - before.keys()}
    assert new <= {"evals.jsonl", "journal.sqlite-shm", "journal.sqlite-wal"}
    assert {path: stamp for path, stamp in after.items() if path in before} == before
    lock.release()


@pytest.mark.slow
def test_a_damaged_version_gives_way_to_the_one_before(folder: Path):
    flip_a_bit(folder / "checkpoints" / "3")
    figures = asked(str(folder), "--limit", "1", "--samples", "0")
    assert (figures["version"], figures["digest"]) == (2, read_rows(folder)[1]["params_digest"])
    assert len(figures["refused"]) == 1 and "checkpoints/3 is damaged" in figures["refused"][0]


@pytest.mark.slow
def test_a_version_pruned_while_it_is_read_gives_way_to_the_next(folder: Path, monkeypatch):
    newer = folder / "checkpoints" / "3"
    newer.rename(folder / "aside")
    read = committed.restore_params

    def prune_first(path: Path, like):
        if path.name == "2":
            (folder / "aside").rename(newer)
            shutil.rmtree(path)
        return read(path, like)

    monkeypatch.setattr(committed, "restore_params", prune_first)
    figures = asked(str(folder), "--limit", "1", "--samples", "0")
    assert (figures["version"], figures["refused"]) == (3, [])


@pytest.mark.slow
def test_a_run_without_a_version_or_with_none_left(folder: Path):
    manifest = folder / "checkpoints" / "2" / "manifest.json"
    manifest.write_text("{")
    shutil.rmtree(folder / "checkpoints" / "3")
    assert "none of the committed versions in" in refused(str(folder)) and "checkpoints/2" in refused(
        str(folder)
    )
    shutil.rmtree(folder / "checkpoints")
    message = refused(str(folder))
    assert "has no committed version yet; the run writes its first checkpoint after step 2" in message


@pytest.mark.slow
def test_what_hosts_decode_with_is_what_is_evaluated(folder: Path):
    """bfloat16 on the wire: the digest is of the cast parameters."""
    figures = asked(str(folder), "weights.wire_dtype=bfloat16", "--limit", "2", "--samples", "0")
    assert figures["version"] == 3 and figures["digest"] != read_rows(folder)[-1]["params_digest"]


@pytest.mark.slow
def test_the_newer_of_checkpoint_and_published_version_is_taken(folder: Path):
    """As the Orbax ParamStore leaves them in weights/; a damaged one gives way to the checkpoint."""
    parts = assemble(load_config(folder / "config.yaml"))
    shardings = parts.learner.state_shardings.params
    newest = committed.committed_params(folder, parts.config, parts.model, shardings).value
    moved = jax.tree.map(lambda leaf: leaf + 1, newest.params)
    store = OrbaxStore(folder / "weights", PublisherSettings(lambda _: jnp.zeros(1)))
    store.publish(VersionedParams(5, moved, digest(moved)))
    store.close(60.0)
    figures = asked(str(folder), "--limit", "1", "--samples", "0")
    assert (figures["version"], figures["digest"]) == (5, digest(moved))
    flip_a_bit(folder / "weights" / "5")
    figures = asked(str(folder), "--limit", "1", "--samples", "0")
    assert (figures["version"], figures["digest"]) == (3, newest.digest)
    assert "weights/5 is damaged" in figures["refused"][0]


@pytest.mark.slow
def test_a_task_of_another_tokenizer_is_refused(folder: Path):
    assert "trained with a CharTokenizer of 15" in refused(str(folder), "tasks.countdown.letters=8")


def test_the_runs_split_is_not_the_evaluations(tmp_path: Path):
    words = ("tasks=arithmetic", "tasks.arithmetic.split=train", "trainer.length=64", "generation.length=40")
    base = eval_jobs._base_of(small(tmp_path, *words))
    assert base["tasks"] == {"arithmetic": {}}
    assert base["trainer"]["length"] is None


# --- a model ------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_shape_with_random_parameters_on_the_held_out_split():
    words = ("tiny", "tasks=[arithmetic,countdown]", "model.tokenizer=byte", *TINY, "generation.length=80")
    figures = asked(*words, "--limit", "4", "--samples", "1")
    assert {name: task["split"] for name, task in figures["tasks"].items()} == {
        "arithmetic": "test", "countdown": None,
    }  # fmt: skip
    assert (figures["version"], figures["run"], figures["model"]) == (0, None, "tiny")
    assert figures["overall"]["prompts"] == 8
    given = asked(*words, "tasks.arithmetic.split=train", "--limit", "1", "--samples", "0")
    assert given["tasks"]["arithmetic"]["split"] == "train"
    assert "sampled" not in given["overall"]


@pytest.mark.slow
def test_a_table_for_people():
    result = CliRunner().invoke(app, ["eval", "tiny", "tasks=countdown", *TINY, "--limit", "3"])
    assert result.exit_code == 0, result.output
    words = result.stdout.split()
    assert result.stdout.startswith("tiny: version 0, digest ")
    assert {"greedy", "pass@1,", "pass@4,", "reward"} <= set(words) and "3 of 3" in result.stdout
    assert result.stderr == "countdown: 3 prompts, greedy\ncountdown: 3 prompts, sampled\n"


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("tinny", "tasks=countdown"), "did you mean tiny?"),
        (("no-such", "tasks=countdown"), "choose one of random, smollm2, tiny"),
        (("tiny",), "eval needs a task; give tasks=NAME, one of arithmetic"),
        (("tiny", "tasks=countdwn"), "did you mean countdown?"),
        (("tiny", "tasks=countdown", "--limit", "0"), "limit=0"),
        (("tiny", "tasks=countdown", "--samples", "-1"), "samples=-1"),
        (("tiny", "tasks=countdown", "generation.lenght=3"), "did you mean generation.length?"),
        (
            ("tiny", "tasks=arithmetic", "tasks.arithmetic.split=dev"),
            "split='dev' is unknown; use one of train, test",
        ),
    ],
)
def test_what_cannot_be_evaluated_is_refused_by_name(words, says):
    assert says in refused(*words)


# --- evals.jsonl --------------------------------------------------------------------------------------------


def test_a_line_cut_short_is_left_out_and_overwritten(tmp_path: Path):
    assert read_evals(tmp_path) == []
    append_eval(tmp_path, {"version": 1})
    path = tmp_path / "evals.jsonl"
    path.write_text(path.read_text() + '{"version": 2')
    assert read_evals(tmp_path) == [{"version": 1}]
    append_eval(tmp_path, {"version": 3})
    assert read_evals(tmp_path) == [{"version": 1}, {"version": 3}]
    path.write_text("nonsense\n" + path.read_text())
    with pytest.raises(ArealError, match=r"evals\.jsonl, line 1: not JSON"):
        read_evals(tmp_path)


@pytest.mark.slow
def test_the_model_is_the_named_one_whatever_a_recipe_says(tmp_path):
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("tasks: countdown\nmodel: {source: nowhere, shape: 5m}\n")
    figures = asked("tiny", str(recipe), *TINY, "--limit", "2", "--samples", "0")
    assert (figures["model"], figures["tasks"]["countdown"]["greedy"]["scored"]) == ("tiny", 2)
