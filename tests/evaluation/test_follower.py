"""Beside a run: its checkpoints are evaluated and exported, once each, and harm it in no way."""

from __future__ import annotations

import io
import json
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import jax
import numpy as np
import pytest

from areal_jax.assembly.parts import Inputs, assemble, open_inputs
from areal_jax.config.loading import load_config
from areal_jax.evaluation import follower as module
from areal_jax.evaluation.command import eval_model_or_run
from areal_jax.evaluation.follower import EXPORTS, Follower
from areal_jax.jobs.local import run
from areal_jax.models.io.huggingface import open_folder
from areal_jax.models.io.safetensors_folder import staged
from areal_jax.observe.evals import append_eval, read_evals
from areal_jax.observe.metrics import read_rows
from areal_jax.observe.waits import WaitTimeout
from areal_jax.parallel.mesh import make_mesh
from areal_jax.types import ArealError
from areal_jax.weights.digest import digest
from areal_jax.weights.manifest import committed
from tests.evaluation.test_command import flip_a_bit, without_times
from tests.hangs import HANG_S
from tests.small_run import small

DEADLINE_S = HANG_S


def inputs_of(folder: Path, *words: str) -> Inputs:
    return open_inputs(load_config(folder / "config.yaml", f"run.dir={folder}", *words))


def follow(folder: Path, *words: str, is_evaluating: bool = True) -> list[str]:
    """To the end of what lies there; what it noted."""
    notes: list[str] = []
    failures: list[BaseException] = []
    mesh = make_mesh({"tensor": 1}, jax.devices()[1:], "the test") if is_evaluating else None
    follower = Follower(inputs_of(folder, *words), folder, mesh, notes.append, failures.append)
    follower.finish(DEADLINE_S)
    follower.stop(DEADLINE_S)
    assert failures == []
    return notes


@pytest.mark.slow
def test_the_newest_checkpoint_is_evaluated_once_as_eval_does(folder: Path):
    said = eval_model_or_run(str(folder), limit=6)
    (folder / "evals.jsonl").unlink()
    notes = follow(folder, "observe.evaluate=6")
    (line,) = read_evals(folder)
    assert (line["version"], line["digest"]) == (3, read_rows(folder)[-1]["params_digest"])
    assert without_times(line) == without_times(said)
    right = line["overall"]["greedy"]["accuracy"]["value"]
    assert len(notes) == 1 and f"evaluated version 3: greedy accuracy {right:.3f} (" in notes[0]
    assert follow(folder, "observe.evaluate=6") == [] and len(read_evals(folder)) == 1
    assert len(follow(folder, "observe.evaluate=5")) == 1  # other prompts: other figures


@pytest.mark.slow
def test_an_evaluation_of_other_bits_under_that_version_does_not_count(folder: Path):
    append_eval(folder, {"version": 3, "digest": "0" * 16, "limit": 6})
    follow(folder, "observe.evaluate=6")
    assert read_evals(folder)[-1]["digest"] == read_rows(folder)[-1]["params_digest"]


@pytest.mark.slow
def test_an_export_is_the_checkpoint_and_says_so(folder: Path):
    notes = follow(folder, "observe.exports=2", is_evaluating=False)
    target = folder / EXPORTS / "3"
    assert notes == [f"exported version 3: {target} (float32)"]
    about = json.loads((target / "config.json").read_text())["areal_jax"]
    wanted = read_rows(folder)[-1]["params_digest"]
    assert about == {"run": load_config(folder / "config.yaml").run.name, "version": 3, "digest": wanted}
    model = inputs_of(folder).model
    assert digest(open_folder(target).load(model.abstract_params)) == wanted
    before = (target / "config.json").stat().st_mtime_ns
    assert follow(folder, "observe.exports=2", is_evaluating=False) == []
    assert (target / "config.json").stat().st_mtime_ns == before


def test_exports_of_void_versions_go_and_the_newest_stay(folder: Path):
    for version in (0, 1, 2, 4):
        (folder / EXPORTS / str(version)).mkdir(parents=True)
    follow(folder, "observe.exports=2", is_evaluating=False)
    assert sorted(path.name for path in (folder / EXPORTS).iterdir()) == ["2", "3"]


def test_an_export_that_a_killed_process_left_unfinished_goes(folder: Path, monkeypatch: pytest.MonkeyPatch):
    """A user's own hidden files stay."""
    exports = folder / EXPORTS
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt), staged(exports / "2"):
        patch.setattr(shutil, "rmtree", lambda *_, **__: None)  # nothing is cleared up, as after `kill -9`
        raise KeyboardInterrupt
    (exports / ".notes").mkdir()
    (exports / ".a.01234567").touch()
    assert len(list(exports.iterdir())) == 3
    follow(folder, "observe.exports=1", is_evaluating=False)
    assert sorted(path.name for path in exports.iterdir()) == [".a.01234567", ".notes", "3"]


def test_an_export_of_other_bits_under_that_version_is_replaced(folder: Path):
    target = folder / EXPORTS / "3"
    target.mkdir(parents=True)
    (target / "config.json").write_text('{"areal_jax": {"digest": "0"}}')
    follow(folder, "observe.exports=1", is_evaluating=False)
    assert (target / "model.safetensors").exists()


def test_a_damaged_checkpoint_is_named_and_what_comes_after_is_taken(folder: Path, trained: Path):
    flip_a_bit(folder / "checkpoints" / "3")
    notes: list[str] = []
    failures: list[BaseException] = []
    follower = Follower(inputs_of(folder, "observe.exports=1"), folder, None, notes.append, failures.append)
    follower.start()
    wait_until(lambda: len(notes) == 1)
    why = "checkpoint 3 could not be evaluated or exported, and the run continues without it: checkpoint"
    assert why in notes[0] and "damaged" in notes[0]
    shutil.rmtree(folder / "checkpoints" / "3")
    shutil.copytree(trained / "checkpoints" / "3", folder / "checkpoints" / "3", copy_function=shutil.copy)
    follower.finish(DEADLINE_S)
    assert failures == [] and notes[1:] == [f"exported version 3: {folder / EXPORTS / '3'} (float32)"]


def wait_until(holds: Callable[[], bool]) -> None:
    waited = threading.Event()
    for _ in range(600):
        if holds():
            return
        waited.wait(0.1)
    raise AssertionError("it did not come to hold within a minute")


@pytest.fixture
def stuck(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Follower, threading.Event]]:
    """A follower whose evaluation waits for the event before it hears of progress; it never fails."""
    go_on, failures = threading.Event(), []

    def figures(self, value, progress):
        go_on.wait(DEADLINE_S)
        progress("sums", "greedy", 1, 0)
        raise AssertionError("it went on")

    monkeypatch.setattr(module.Evaluator, "figures", figures)
    mesh = make_mesh({"tensor": 1}, jax.devices(), "the test")
    inputs = inputs_of(folder, "observe.evaluate=1")
    yield Follower(inputs, folder, mesh, failures.append, failures.append), go_on
    assert failures == []


def test_stopped_in_the_middle_it_leaves_nothing(folder: Path, stuck: tuple[Follower, threading.Event]):
    follower, go_on = stuck
    follower.start()
    wait_until(lambda: follower.steps == 1)
    threading.Timer(0.2, go_on.set).start()
    follower.stop(DEADLINE_S)
    assert not follower._thread.is_alive() and read_evals(folder) == []


def test_an_evaluation_that_gets_nowhere_is_given_up(stuck: tuple[Follower, threading.Event]):
    follower, go_on = stuck
    with pytest.raises(WaitTimeout, match=r"made no progress for 0\.5 s"):
        follower.finish(0.5)
    threading.Timer(0.2, go_on.set).start()
    follower.stop(DEADLINE_S)


def test_a_fault_of_ours_ends_it_and_is_raised(folder: Path, monkeypatch: pytest.MonkeyPatch):
    def figures(self, value, progress):
        raise RuntimeError("a fault of ours")

    monkeypatch.setattr(module.Evaluator, "figures", figures)
    failures: list[BaseException] = []
    inputs, mesh = (
        inputs_of(folder, "observe.evaluate=1"),
        make_mesh({"tensor": 1}, jax.devices(), "the test"),
    )
    follower = Follower(inputs, folder, mesh, lambda note: None, failures.append)
    with pytest.raises(RuntimeError, match="a fault of ours"):
        follower.finish(DEADLINE_S)
    assert len(failures) == 1


def test_shared_placement_has_no_device_for_it(tmp_path: Path):
    words = ("observe.evaluate=4", "runtime.placement=shared")
    with pytest.raises(
        ArealError, match=r"observe\.evaluate=4 needs a device of its own.*areal-jax eval RUN"
    ):
        assemble(small(tmp_path / "run", *words))


@pytest.mark.slow
def test_a_run_ends_with_its_last_checkpoint_evaluated_and_exported(tmp_path: Path):
    folder, told = tmp_path / "run", io.StringIO()
    words = ("run.steps=4", "observe.evaluate=8", "observe.exports=1", "observe.report=true")
    run(small(folder, *words, "weights.wire_dtype=bfloat16", "model.lora.rank=2"), stream=told)
    assert committed(folder / "checkpoints")[-1] == 4
    last = read_evals(folder)[-1]
    assert (last["version"], last["limit"]) == (4, 8) and last["overall"]["greedy"]["scored"] == 8
    assert "evaluated version 4: greedy accuracy" in told.getvalue()
    assert "greedy" in (folder / "report.html").read_text()
    (export,) = (folder / EXPORTS).iterdir()
    raw = json.loads((export / "config.json").read_text())
    assert (export.name, raw["torch_dtype"]) == ("4", "bfloat16")
    assert raw["areal_jax"]["digest"] == last["digest"]
    model = open_inputs(load_config(folder / "config.yaml")).model.base
    leaves = jax.tree.leaves(open_folder(export).load(model.abstract_params))
    assert sum(leaf.size for leaf in leaves) == model.parameter_count
    assert all(np.isfinite(leaf).all() for leaf in leaves)
