"""Bundles: one step of a run in a file, trained again with the same bits; and what was changed is named.

tests/runtime/test_over_age_run.py has one of a run with a critic over trees, tests/runtime/test_branch.py one
that is verified on another machine.
"""

from __future__ import annotations

import io
import json
from dataclasses import replace
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import save_file
from typer.testing import CliRunner

from areal_jax.cli.main import app
from areal_jax.control.events import BatchTrained
from areal_jax.runtime.bundle import make_bundle, verify_bundle
from areal_jax.runtime.bundle_file import BundleError, read_bundle
from areal_jax.runtime.jobs import run
from areal_jax.runtime.reading import open_journal
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
    with mock.patch("areal_jax.runtime.bundle_file._digest", lambda tensor: None):
        other.write(target)
    # The digests are inside the file's header: put the first ones back.
    with safe_open(target, "np") as written:
        about = json.loads(written.metadata()["areal_jax_bundle"]) | {"tensors": digests}
        kept = {each: written.get_tensor(each) for each in written.keys()}  # noqa: SIM118
    target.unlink()
    save_file(kept, target, {"areal_jax_bundle": json.dumps(about)})
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
    folder = made(tmp_path / "run", "trainer.trainable=blocks.*", "trainer.supervised_steps=2")
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
