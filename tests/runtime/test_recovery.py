"""Batches that are trained again after a crash: with the run.steps of then, and compared as by a replay."""

from __future__ import annotations

import io
import shutil
import sqlite3
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax.numpy as jnp
import pytest

from areal_jax.assembly import devices
from areal_jax.assembly.devices import header, training_machine
from areal_jax.assembly.run_folder import open_journal
from areal_jax.cluster import launched
from areal_jax.control import events as e
from areal_jax.control.events import BatchTrained, VersionReissued
from areal_jax.jobs.local import resume, run
from areal_jax.observe.metrics import read_rows
from areal_jax.replay.folder_audit import audit_run
from areal_jax.replay.replay import replay
from areal_jax.runtime import recovery, trainer_loop
from areal_jax.runtime.context import make_folder
from areal_jax.runtime.recovery import Journaled, Repetition, journaled_batches
from areal_jax.runtime.resuming import read_config, steps_asked
from areal_jax.trajectories.journal import Entry, pack, unpack
from areal_jax.trajectories.sqlite import SqliteQueue
from areal_jax.types import ArealError, VersionedParams
from areal_jax.weights.digest import digest
from tests.small_run import killed_at, small

PARAMS = {"w": jnp.arange(3.0) / 3}
VALUE = VersionedParams(4, PARAMS, digest(PARAMS))
CAST = digest({"w": PARAMS["w"].astype("bfloat16")})
TRAIN = e.Train(3, (0, 1), (0, 0))


class Again(Repetition):
    """Of a run with weights published in bfloat16, on this machine; a batch gives VALUE and a loss of 1."""

    def __init__(self, folder: Path) -> None:
        self.notes: list[str] = []
        config = small(folder, "weights.wire_dtype=bfloat16")
        self.machine = training_machine(config)
        trainer: Any = SimpleNamespace(
            machine=self.machine, train_again=lambda parts, batch: (VALUE, {"loss": 1.0})
        )
        parts: Any = SimpleNamespace(config=config)
        super().__init__(parts, trainer, self.notes.append)

    def of(self, digest: str, published: str, loss: float = 1.0, **more: Any) -> VersionReissued | None:
        own = {"machine": self.machine, "loss": loss} | more.pop("metrics", {})
        return self.train(Journaled(TRAIN, digest, published, own, 0, **more), None)  # pyright: ignore


@pytest.mark.parametrize(
    ("digest", "loss", "difference"),
    [
        ("journaled", 1.0, f"step 3, digest of the parameters: the journal has 'journaled', the replay "
         f"'{VALUE.digest}'"),
        (VALUE.digest, 1.5, "step 3, loss: the journal has 1.5, the replay 1.0"),
    ],
)  # fmt: skip
def test_on_the_machine_that_trained_it_a_batch_with_other_bits_ends_the_run(
    tmp_path, digest: str, loss: float, difference: str
):
    again = Again(tmp_path)
    assert again.of(VALUE.digest, "published") is None
    with pytest.raises(ArealError) as refused:
        again.of(digest, "published", loss)
    assert difference in str(refused.value) and "config.yaml, a checkpoint or the journal" in str(
        refused.value
    )
    assert again.notes == []


@pytest.mark.parametrize(
    "elsewhere",
    [
        {"metrics": {"machine": "another"}},
        {"metrics": {"machine": None}},  # an older version of areal-jax did not record it
        {"header": {"usable_cores": 640}},
    ],
)
def test_on_another_machine_other_bits_are_noted_and_the_published_version_is_issued_again(
    tmp_path, elsewhere: dict[str, Any]
):
    again = Again(tmp_path)
    assert again.of(VALUE.digest, "published", 1.5, **elsewhere) is None and again.notes == []
    assert again.of("journaled", "", **elsewhere) is None  # no host has it
    assert len(again.notes) == 1 and f"digest {VALUE.digest} instead of journaled" in again.notes[0]
    assert again.of("journaled", "published", **elsewhere) == VersionReissued(4, "published", CAST)
    # What was trained on this machine built on the other bits, so it is no error that it differs now.
    assert again.of("journaled", "published") == VersionReissued(4, "published", CAST)


def test_a_device_that_does_not_repeat_bits_is_no_error(tmp_path, monkeypatch):
    monkeypatch.setattr(recovery, "repeats_bits", lambda: False)
    assert Again(tmp_path).of("journaled", "published") == VersionReissued(4, "published", CAST)


def test_a_reissued_version_is_compared_with_what_was_issued_last(tmp_path):
    again = Again(tmp_path)
    assert again.of("journaled", CAST, is_reissued=True) is None and again.notes == []
    assert again.of(VALUE.digest, "issued", is_reissued=True) == VersionReissued(4, "issued", CAST)


def test_another_layout_of_hosts_weights_is_the_same_machine_and_another_dtype_of_the_reference_is_not(
    tmp_path,
):
    own, kl = training_machine(small(tmp_path)), "algorithm.kl.coef=0.1"
    assert training_machine(small(tmp_path, kl, "generation.weight_layout=split")) == own
    assert training_machine(small(tmp_path, kl, "runtime.reference.dtype=bfloat16")) != own
    again = Again(tmp_path)
    with pytest.raises(ArealError, match="gives other bits than the run had"):
        again.of("journaled", "published", header=header(small(tmp_path)) | {"weight_layout": "split"})


def test_gpus_repeat_bits_only_with_deterministic_kernels(monkeypatch):
    assert devices.repeats_bits()
    monkeypatch.setattr(devices.jax, "devices", lambda: [SimpleNamespace(platform="gpu")])
    monkeypatch.setenv("XLA_FLAGS", "")
    assert not devices.repeats_bits()
    monkeypatch.setenv("XLA_FLAGS", "--xla_gpu_deterministic_ops=true")
    assert devices.repeats_bits()


# --- which steps, which header ------------------------------------------------------------------------------


def journal_of(path: Path, *entries: e.Event | Entry, header: dict[str, Any] | None = None) -> SqliteQueue:
    journal = SqliteQueue.create(path, header or {"jaxlib": "1"})
    journal.append([one if isinstance(one, Entry) else Entry(one) for one in entries])
    return journal


def batch(step: int) -> list[Entry]:
    train = e.Train(step, (step,), (0,))
    return [
        Entry(e.RewardScored(step, 0, (1.0,)), (train,)),
        Entry(e.BatchTrained(step, (step,), f"d{step}", {})),
    ]


def test_a_batch_has_the_steps_and_the_header_that_were_in_force_when_it_was_trained(tmp_path):
    longer, shorter = e.RunResumed(40, {"jaxlib": "2"}), e.RunResumed(7, {"jaxlib": "3"})
    duplicate = Entry(e.BatchTrained(1, (1,), "late", {}))
    events = [e.RunStarted("d", 9), *batch(0), *batch(1), longer, duplicate, *batch(2), shorter, *batch(3)]
    reissued = e.VersionReissued(2, "", "new")
    with journal_of(tmp_path / "journal.sqlite", *events, reissued) as journal:
        found = journaled_batches(journal, 0, 4)
        assert [one.steps for one in found] == [9, 9, 40, 7]
        assert [one.header["jaxlib"] for one in found] == ["1", "1", "2", "3"]
        assert [one.digest for one in found] == ["d0", "d1", "d2", "d3"]
        assert [one.is_reissued for one in found] == [False, True, False, False]
        assert steps_asked(journal) == 7


@pytest.mark.parametrize(
    ("resumed", "words", "steps"),
    [((), (), 5), ((), ("run.steps=8",), 8), ((400,), (), 400), ((400, 7), (), 7),
     ((400,), ("run.steps=5",), 5)],
)  # fmt: skip
def test_a_resume_keeps_the_steps_of_the_resume_before(tmp_path, resumed, words, steps):
    make_folder(small(tmp_path, "weights.backend=auto"), tmp_path)
    events = [e.RunStarted("d", 5), *(e.RunResumed(number) for number in resumed)]
    journal_of(tmp_path / "journal.sqlite", *events).close()
    assert read_config(tmp_path, words).run.steps == steps
    assert launched.read([str(tmp_path), *words]).config.run.steps == steps


def test_a_branch_has_its_own_steps_and_not_those_of_its_parents_resumes(tmp_path):
    make_folder(small(tmp_path), tmp_path)
    record = {"branch": {"run": "parent", "step": 1, "seq": 2}}
    past = e.RunStarted("d", 9), e.RunResumed(400)
    with journal_of(tmp_path / "journal.sqlite", *past, header=record) as journal:
        assert read_config(tmp_path).run.steps == 5
        journal.append([Entry(e.RunResumed(6))])
        assert read_config(tmp_path).run.steps == 6


# --- runs ---------------------------------------------------------------------------------------------------

COSINE = ("run.steps=9", "trainer.lr_schedule=cosine", "trainer.checkpoint_every=3")


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of 9 steps with a learning rate that depends on their number; killed after four of them."""
    folder = tmp_path_factory.mktemp("runs") / "run"
    with pytest.MonkeyPatch.context() as patch:
        with killed_at(patch, lambda event: isinstance(event, BatchTrained) and event.step == 4):
            run(small(folder, *COSINE), stream=io.StringIO())
        shutil.rmtree(folder / "checkpoints")
    return folder


@pytest.mark.slow
def test_resumes_with_fewer_and_with_more_steps_change_no_bit_of_the_steps_before(
    tmp_path, monkeypatch, killed
):
    """The second resume trains steps of both numbers again, the third keeps the number of the second."""
    folder, said = Path(shutil.copytree(killed, tmp_path / "run")), io.StringIO()
    digests = lambda: [row["params_digest"] for row in read_rows(folder)]  # noqa: E731
    first = digests()
    with killed_at(monkeypatch, lambda event: isinstance(event, BatchTrained) and event.step == 5):
        resume(folder, ["run.steps=20"], stream=said)
    shutil.rmtree(folder / "checkpoints")
    second = digests()
    with killed_at(monkeypatch, lambda event: isinstance(event, e.CheckpointCommitted) and event.version > 5):
        resume(folder, ["run.steps=7"], stream=said)
    assert len(resume(folder, stream=said).metrics) == 7
    assert (len(first), len(second)) == (4, 5) and digests()[:5] == second and second[:4] == first
    assert "again with digest" not in said.getvalue() and "steps 0 to 4 again" in said.getvalue()
    found = replay(folder)
    assert (found.difference, found.steps, found.reissued) == ("", 7, 0) and audit_run(folder).ok


@pytest.mark.slow
def test_a_reward_that_was_changed_after_the_crash_ends_the_resume_and_not_on_another_machine(
    tmp_path, monkeypatch, killed
):
    folder = Path(shutil.copytree(killed, tmp_path / "run"))
    with sqlite3.connect(folder / "journal.sqlite") as db:
        ((scored,),) = db.execute("SELECT scored FROM rewards WHERE ordinal = 5").fetchall()
        rewards, *rest = unpack(scored)
        forged = pack([[3.0, *rewards[1:]], *rest])
        db.execute("UPDATE rewards SET scored = ? WHERE ordinal = 5", (forged,))
    with open_journal(folder) as journal:
        before = journal.last_seq
    with pytest.raises(ArealError, match=r"gives other bits than the run had: step 1, .*--until 1 --branch"):
        resume(folder, stream=io.StringIO())
    with open_journal(folder) as journal:
        assert journal.last_seq == before
    monkeypatch.setattr(trainer_loop, "training_machine", lambda config: "another")
    resume(folder, stream=io.StringIO())
    with open_journal(folder) as journal:
        assert [event.version for event in journal.events("VersionReissued")] == [2, 3, 4]
