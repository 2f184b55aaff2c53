"""Bundles: one step of a run in a file, trained again with the same bits; and what was changed is named.

tests/runtime/test_over_age_run.py has one of a run with a critic over trees, tests/replay/test_branch.py one
that is verified on another machine.
"""

from __future__ import annotations

import hashlib
import io
import json
import shutil
import sqlite3
import struct
import sys
from dataclasses import replace
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import yaml
from safetensors import safe_open
from safetensors.numpy import save_file
from typer.testing import CliRunner

from areal_jax.assembly.run_folder import open_journal
from areal_jax.cli.main import app
from areal_jax.control.events import BatchTrained
from areal_jax.jobs.local import run
from areal_jax.replay import bundle as bundles
from areal_jax.replay import reopened
from areal_jax.replay.bundle import make_bundle, verify_bundle
from areal_jax.replay.bundle_file import ABOUT, DIGEST, BundleError, read_bundle
from areal_jax.trajectories.journal import pack, unpack
from areal_jax.types import ArealError
from tests.small_run import small

pytestmark = pytest.mark.slow

STEPS = 6


def made(folder: Path, *words: str) -> Path:
    run(small(folder, f"run.steps={STEPS}", "trainer.lr_schedule=cosine", *words), stream=io.StringIO())
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return made(tmp_path_factory.mktemp("runs") / "run")


@pytest.fixture(scope="module")
def file(folder: Path) -> Path:
    target = folder.parent / "step.bundle"
    make_bundle(folder, 5, target)
    return target


def trained(folder: Path, step: int) -> BatchTrained:
    with open_journal(folder) as journal:
        return next(event for event in journal.events("BatchTrained") if event.step == step)


def test_a_bundle_gives_the_steps_metrics_and_digest_again(folder, file):
    found, event = verify_bundle(file), trained(folder, 5)
    assert (found.difference, found.header, found.step) == ("", {}, 5)
    assert found.digest == event.digest
    for name in ("loss", "grad_norm", "entropy", "ratio"):
        assert found.metrics[name] == event.metrics[name]


def test_a_bundle_is_as_large_as_the_state_and_the_batch(file):
    bundle = read_bundle(file)
    params = sum(t.nbytes for name, t in bundle.tensors.items() if name.startswith("state.params."))
    state = sum(t.nbytes for name, t in bundle.tensors.items() if name.startswith("state."))
    assert state == 3 * params + 4 * 4  # parameters, two moments; two optimiser counts, step, version
    assert file.stat().st_size < bundle.bytes + 60_000


def changed(file: Path, target: Path, name: str, change) -> Path:
    """Writes the bundle again with one changed tensor; its digests stay those of the first."""
    bundle = read_bundle(file)
    digests = bundle.about["tensors"]
    tensors = dict(bundle.tensors)
    tensors[name] = change(tensors[name].copy())
    other = replace(bundle, tensors=tensors)
    with mock.patch("areal_jax.replay.bundle_file._digest", lambda tensor: None):
        other.write(target)
    # The digests are inside the file's header: put the first ones back.
    with safe_open(target, "np") as written:
        about = json.loads(written.metadata()[ABOUT]) | {"tensors": digests}
        kept = {each: written.get_tensor(each) for each in written.keys()}  # noqa: SIM118
    return described(target, json.dumps(about), kept)


def described(target: Path, about: str, tensors: dict[str, np.ndarray]) -> Path:
    """Writes a bundle with the description `about` and its digest, as an attacker can."""
    digest = hashlib.blake2b(about.encode(), digest_size=16).hexdigest()
    save_file(tensors, target, {ABOUT: about, DIGEST: digest})
    return target


def one_bit(tensor: np.ndarray) -> np.ndarray:
    tensor.reshape(-1)[3] = np.nextafter(tensor.reshape(-1)[3], np.float32(1))
    return tensor


def test_a_changed_moment_is_refused_by_name(file, tmp_path):
    names = [name for name in read_bundle(file).tensors if ".mu." in name]
    other = changed(file, tmp_path / "other.bundle", names[2], one_bit)
    with pytest.raises(BundleError, match=rf"the tensor {names[2]} was changed after the bundle was made"):
        verify_bundle(other)
    done = CliRunner().invoke(app, ["bundle", "verify", str(other)])
    assert done.exit_code == 1 and names[2] in str(done.exception) + done.output


def test_a_moment_that_was_changed_with_its_digest_shows_in_the_tensors_after_the_step(file, tmp_path):
    bundle = read_bundle(file)
    name = next(name for name in bundle.tensors if ".mu." in name)
    tensor = bundle.tensors[name].copy()
    tensor.reshape(-1)[0] += 1
    replace(bundle, tensors=bundle.tensors | {name: tensor}).write(tmp_path / "other.bundle")
    leaf = name.removeprefix("state.")
    assert verify_bundle(tmp_path / "other.bundle").difference.startswith(f"step 5, tensor {leaf}: ")


def test_a_changed_reward_shows_in_a_metric(file, tmp_path):
    bundle = read_bundle(file)
    batch = [dict(one) for one in bundle.about["batch"]]
    batch[0]["reward"] += 1
    replace(bundle, about=bundle.about | {"batch": batch}).write(tmp_path / "other.bundle")
    assert verify_bundle(tmp_path / "other.bundle").difference.startswith("step 5, ")


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bundle of a run with adapters and a reference policy; few leaves compile in less time."""
    folder = tmp_path_factory.mktemp("adapters")
    words = "model.lora.rank=2", "model.lora.targets=q", "algorithm.kl.coef=0.1", "algorithm.kl.target=0.01"
    make_bundle(made(folder / "run", *words), 4, folder / "step.bundle")
    return folder


def test_the_base_below_adapters_is_left_out_and_the_reference_is_not(adapters):
    found, bundle = verify_bundle(adapters / "step.bundle"), read_bundle(adapters / "step.bundle")
    assert (found.difference, found.digest) == ("", trained(adapters / "run", 4).digest)
    names = "\n".join(bundle.tensors)
    assert "state.params.embedding" not in names and "params.embedding" in bundle.about["kept"]
    assert "state.reference" in names and "state.kl_control" in names and "state.critic" not in names


def test_a_base_that_is_another_is_refused(adapters, tmp_path):
    bundle = read_bundle(adapters / "step.bundle")
    config = bundle.about["config"] | {"run": bundle.about["config"]["run"] | {"seed": 9}}
    replace(bundle, about=bundle.about | {"config": config}).write(tmp_path / "other.bundle")
    with pytest.raises(BundleError, match=r"model.source=random has another params\."):
        verify_bundle(tmp_path / "other.bundle")


def test_frozen_leaves_that_only_the_run_has_are_in_a_bundle(tmp_path):
    folder = made(tmp_path / "run", "trainer.trainable=blocks.*", "trainer.supervised.steps=2")
    bundle = make_bundle(folder, 4, tmp_path / "step.bundle")
    found = verify_bundle(tmp_path / "step.bundle")
    assert (found.difference, found.digest) == ("", trained(folder, 4).digest)
    assert "state.params.embedding" in "\n".join(bundle.tensors) and not bundle.about["kept"]


def test_a_pruned_run_gives_a_bundle_by_a_replay(tmp_path):
    folder, notes = made(tmp_path / "run", "observe.keep_groups=0", "trainer.keep_checkpoints=1"), []
    make_bundle(folder, 1, tmp_path / "step.bundle", note=notes.append)
    assert any("replaying the run up to the step" in note for note in notes)
    assert verify_bundle(tmp_path / "step.bundle").digest == trained(folder, 1).digest


def test_prompts_can_be_left_out(folder, tmp_path):
    bundle = make_bundle(folder, 3, tmp_path / "step.bundle", is_redacted=True)
    name, tokens = next((n, t) for n, t in bundle.tensors.items() if n.endswith(".tokens"))
    count = next(
        one for one in bundle.about["batch"] if name == f"batch.{'.'.join(map(str, one['sample']))}.tokens"
    )
    assert (tokens[: count["prompt"]] == -1).all() and (tokens[count["prompt"] :] >= 0).all()
    found = verify_bundle(tmp_path / "step.bundle")
    assert (found.difference, found.digest) == ("", trained(folder, 3).digest)


def test_wrong_inputs_are_refused(folder, file, tmp_path):
    with pytest.raises(ArealError, match=r"--step=6: .*has trained the steps 0 to 5; give one of them"):
        make_bundle(folder, 6, tmp_path / "x")
    with pytest.raises(BundleError, match=r"step.bundle exists; give another file"):
        make_bundle(folder, 2, file)
    with pytest.raises(BundleError, match=r"there is no file"):
        verify_bundle(tmp_path / "missing")
    (tmp_path / "text").write_text("not a bundle")
    with pytest.raises(BundleError, match=r"cut short or not a bundle"):
        verify_bundle(tmp_path / "text")
    (tmp_path / "cut").write_bytes(file.read_bytes()[:-100])
    with pytest.raises(BundleError, match=r"cut short or not a bundle"):
        verify_bundle(tmp_path / "cut")
    for words in (["verify"], [str(folder)], [str(folder), "x", "--step", "1"]):
        assert CliRunner().invoke(app, ["bundle", *words]).exit_code == 1


def test_a_changed_description_is_refused(file, tmp_path):
    with safe_open(file, "np") as written:
        metadata = dict(written.metadata())
    about = json.loads(metadata[ABOUT]) | {"run": "forged"}
    save_file(read_bundle(file).tensors, tmp_path / "other", metadata | {ABOUT: json.dumps(about)})
    with pytest.raises(BundleError, match=r"other: its description was changed after the bundle was made"):
        read_bundle(tmp_path / "other")


WRONG = {
    "step": "5; rm", "config": [], "model": None, "header.devices": 100_000, "header.device_kind": 3,
    "batch.0.reward": "high", "batch.0.sample": [0, 0], "batch.0.sampling.stop": 7, "batch.0.on_update": "x",
    "choice.tree_costs": [1.0], "kept": ["x"], "metrics": "none", "is_redacted": "perhaps",
}  # fmt: skip


@pytest.mark.parametrize("key", WRONG)
def test_a_value_of_another_type_is_refused_by_name(file, tmp_path, key):
    bundle = read_bundle(file)
    about = json.loads(json.dumps(bundle.about))
    inner, parts = about, key.split(".")
    for part in parts[:-1]:
        inner = inner[int(part) if part.isdigit() else part]
    inner[parts[-1]] = WRONG[key]
    other = described(tmp_path / "other", json.dumps(about), bundle.tensors)
    with pytest.raises(BundleError, match=rf"other: {key.replace('.', '[.]')}"):
        read_bundle(other)


def test_names_that_the_bundle_lacks_are_a_difference(file, tmp_path):
    bundle = read_bundle(file)
    replace(bundle, about=bundle.about | {"metrics": {}}).write(tmp_path / "other")
    assert "names of metrics" in verify_bundle(tmp_path / "other").difference


def test_an_array_of_the_batch_with_another_dtype_is_refused_by_name(file, tmp_path):
    bundle = read_bundle(file)
    name = next(name for name in bundle.tensors if name.endswith(".behavior_logp"))
    other = bundle.tensors | {name: bundle.tensors[name].astype(np.float64)}
    replace(bundle, tensors=other).write(tmp_path / "other")
    with pytest.raises(BundleError, match=rf"{name} is float64"):
        verify_bundle(tmp_path / "other")


@pytest.mark.parametrize(
    "head",
    [
        {"x": {"dtype": "F32", "shape": [1 << 40, 1 << 20], "data_offsets": [0, 4]}},
        {"x": {"dtype": "F32", "shape": [-1], "data_offsets": [0, 4]}},
        {"__metadata__": {ABOUT: "[]"}},
        {"__metadata__": {ABOUT: "{"}},
        {"__metadata__": {ABOUT: "[" * 200_000}},
        {"__metadata__": {ABOUT: '{"format": 2, "tensors": {}}'}},
        {"__metadata__": {ABOUT: '{"format": 1' + "0" * 5000 + "}"}},
    ],
)
def test_a_file_that_only_looks_like_a_bundle_is_refused(tmp_path, head):
    text = json.dumps(head).encode()
    (tmp_path / "other").write_bytes(struct.pack("<Q", len(text)) + text + bytes(4))
    with pytest.raises(BundleError, match="other"):
        read_bundle(tmp_path / "other")


# --- another CPU --------------------------------------------------------------------------------------------


def test_on_another_cpu_metrics_are_compared_within_bounds_if_bits_differ(file, tmp_path, monkeypatch):
    bundle = read_bundle(file)
    metrics = bundle.about["metrics"]
    other = bundle.about | {"metrics": metrics | {"grad_norm": metrics["grad_norm"] * 1.001}}
    replace(bundle, about=other).write(tmp_path / "other")
    assert "step 5, grad_norm: the journal has" in verify_bundle(tmp_path / "other").difference
    monkeypatch.setattr(bundles, "training_machine", lambda config: "another")
    assert verify_bundle(file).header == {}
    found = verify_bundle(tmp_path / "other")
    assert found.difference == "" and found.largest["grad_norm"] == pytest.approx(0.001, rel=0.01)
    assert found.header == {"machine": (trained_by(file), "another")}


def trained_by(file: Path) -> str:
    return read_bundle(file).about["header"]["machine"]


def test_a_step_that_has_other_bits_on_another_cpu_gives_no_bundle(folder, file, tmp_path, monkeypatch):
    copy = Path(shutil.copytree(folder, tmp_path / "run"))
    with sqlite3.connect(copy / "journal.sqlite") as db:
        ((scored,),) = db.execute("SELECT scored FROM rewards WHERE ordinal = 5").fetchall()
        rewards, *rest = unpack(scored)
        db.execute("UPDATE rewards SET scored = ? WHERE ordinal = 5", (pack([[3.0, *rewards[1:]], *rest]),))
    for reason in (
        "step 1, .*: the journal has",
        r"differs from the run's \(machine was '\w+', now 'another'",
    ):
        with pytest.raises(ArealError, match=reason):
            make_bundle(copy, 3, tmp_path / "step.bundle")
        monkeypatch.setattr(reopened, "training_machine", lambda *_: "another")
    assert trained(folder, 5).metrics["machine"] == trained_by(file)


# --- code that a file names ---------------------------------------------------------------------------------


@pytest.fixture
def evil(tmp_path, monkeypatch) -> Path:
    """The file that the module `evil`, in the working folder, makes when it is imported."""
    mark = tmp_path / "mark"
    (tmp_path / "evil.py").write_text(f"open({str(mark)!r}, 'w')\ndef code(**settings): raise ValueError\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    yield mark
    sys.modules.pop("evil", None)


@pytest.mark.parametrize("key", ["task", "loss", "program"])
def test_verifying_executes_nothing_that_a_bundle_names(folder, tmp_path, evil, key):
    bundle = make_bundle(folder, 5, tmp_path / "step.bundle", is_redacted=True)
    config = json.loads(json.dumps(bundle.about["config"]))
    if key == "loss":
        config["algorithm"] |= {"loss": "evil:code", "loss_settings": {}}
    elif key == "task":
        config["tasks"] = {"evil:code": {}}
    else:
        (tmp_path / "python").write_text(f"#!/bin/sh\ntouch {evil}\n")
        (tmp_path / "python").chmod(0o755)
        config["tasks"] = {"textarena": {"python": str(tmp_path / "python"), "game": "TicTacToe-v0"}}
    replace(bundle, about=bundle.about | {"config": config}).write(tmp_path / "other")
    done = CliRunner().invoke(app, ["bundle", "verify", "other"])
    assert done.exit_code == 1 and "--allow-code" in done.output and not evil.exists()
    done = CliRunner().invoke(app, ["bundle", "verify", "other", "--allow-code"])
    assert done.exit_code == 1 and evil.exists()


@pytest.mark.parametrize(
    "command",
    ["audit", "inspect 0/0", "report", "replay", "eval", "bundle --step 1", "convert out", "parity", "serve"],
)
def test_reading_a_run_executes_nothing_that_its_config_names(folder, tmp_path, evil, command):
    shutil.copytree(folder, tmp_path / "run")
    config = yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())
    config["algorithm"] |= {"loss": "evil:code", "loss_settings": {}, "advantage": "evil:code"}
    config["tasks"] = {"evil:code": {}}
    config["episode"] = (config.get("episode") or {}) | {"agent": "evil:code"}
    (tmp_path / "run" / "config.yaml").write_text(yaml.safe_dump(config))
    name, *words = command.split()
    done = CliRunner().invoke(app, [name, "run", *words])
    assert not evil.exists()
    if command == "audit":  # which finds the edit
        assert "config.yaml" in done.output and "--allow-code" not in done.output
    elif command == "report":  # which goes without samples, and says why
        assert done.exit_code == 0 and "--allow-code" in (tmp_path / "run" / "report.html").read_text()
    else:
        assert done.exit_code == 1 and "--allow-code" in done.output


def test_what_the_user_types_may_be_imported(tmp_path, evil):
    done = CliRunner().invoke(app, ["eval", "tiny", "tasks={evil:code: {}}"])
    assert done.exit_code == 1 and evil.exists() and "--allow-code" not in done.output
