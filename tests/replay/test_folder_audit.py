"""What audit and replay find in a run's folder that was changed, cut or copied in part.

Each change is made to a copy of one run. Where digests of events would name it, they are removed too, as in
folders of older versions: what is named is then the contradiction itself.
"""

from __future__ import annotations

import io
import json
import re
import shutil
import sqlite3
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from areal_jax.assembly.run_folder import open_journal
from areal_jax.cli.main import app
from areal_jax.cli.replay import _lines as report_lines
from areal_jax.control import events as e
from areal_jax.jobs.local import run
from areal_jax.replay import reopened
from areal_jax.replay.branch import make_branch
from areal_jax.replay.folder_audit import audit_run
from areal_jax.replay.one_sample import replay_sample
from areal_jax.replay.replay import replay
from areal_jax.trajectories.codec import decode, digest_of, encode
from areal_jax.trajectories.journal import Entry, JournalError, pack, unpack
from areal_jax.trajectories.sqlite import SqliteQueue
from areal_jax.types import ArealError
from areal_jax.weights.manifest import MANIFEST, render
from tests.small_run import small

pytestmark = pytest.mark.slow

STEPS = 6
WORDS = (
    f"run.steps={STEPS}",
    "weights.backend=orbax",
    "observe.exports=1",
    "trainer.checkpoint_every=2",
    "generation.slots=8",
)


@pytest.fixture(scope="module")
def clean(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "run"
    run(small(folder, *WORDS), stream=io.StringIO())
    return folder


@pytest.fixture
def copy(clean: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(clean, tmp_path / "copy"))


Change = Callable[[sqlite3.Connection], object]


def events_of(folder: Path, kind: type) -> list[Any]:
    with open_journal(folder) as journal:
        return list(journal.events(kind.__name__))


def changed(folder: Path, change: Change, is_chained: bool = False) -> list[str]:
    """Changes the journal, without its digests unless `is_chained`; returns what audit then says."""
    with sqlite3.connect(folder / "journal.sqlite") as db:
        change(db)
        if not is_chained:
            db.execute("DROP TABLE IF EXISTS chain")
    return audit_run(folder).violations


def of_kind(db: sqlite3.Connection, kind: str, at: int) -> tuple[int, list[Any]]:
    """Returns number and values of the event number `at` of its kind."""
    statement = "SELECT seq, event FROM events WHERE kind = ? ORDER BY seq LIMIT 1 OFFSET ?"
    ((seq, event),) = db.execute(statement, (kind, at)).fetchall()
    return seq, unpack(event)


def edited(kind: str, at: int, edit: Callable[[list[Any]], None]) -> Change:
    def change(db: sqlite3.Connection) -> None:
        seq, values = of_kind(db, kind, at)
        edit(values)
        db.execute("UPDATE events SET event = ? WHERE seq = ?", (pack(values), seq))

    return change


def metric(name: str, value: Any) -> Change:
    return edited("BatchTrained", 2, lambda values: values[3].update({name: value}))


def sql(*statements: str) -> Change:
    return lambda db: [db.execute(one) for one in statements]


def trajectory(edit: Callable[[Any], Any], is_digest_edited: bool = False) -> Change:
    """Changes the stored trajectory of sample 9/3 and, if asked, the digest in its event."""

    def change(db: sqlite3.Connection) -> None:
        where = "WHERE ordinal = 9 AND attempt = 0 AND member = 3"
        ((payload,),) = db.execute(f"SELECT payload FROM trajectories {where}").fetchall()
        new = edit(decode(payload))
        db.execute(f"UPDATE trajectories SET payload = ? {where}", (encode(new),))
        for seq, event in db.execute(
            "SELECT seq, event FROM events WHERE kind = 'SampleFinished'"
        ).fetchall():
            values = unpack(event)
            if is_digest_edited and values[0] == [9, 3, 0]:
                values[6] = digest_of(new)
                db.execute("UPDATE events SET event = ? WHERE seq = ?", (pack(values), seq))

    return change


def other_array(name: str, at: int, value: float) -> Callable[[Any], Any]:
    def edit(one: Any) -> Any:
        array = np.array(getattr(one, name))
        array[at] = value
        return replace(one, **{name: array})

    return edit


def other_snapshot(db: sqlite3.Connection) -> None:
    ((seq, state),) = db.execute("SELECT seq, state FROM snapshots ORDER BY seq LIMIT 1").fetchall()
    values = unpack(state)
    values["admitted"] += 4
    db.execute("UPDATE snapshots SET state = ? WHERE seq = ?", (pack(values), seq))


CUT = "DELETE FROM events WHERE seq > (SELECT seq FROM events WHERE kind = 'BatchTrained' LIMIT 1 OFFSET 2)"
HOLE = "DELETE FROM events WHERE seq = (SELECT max(seq) - 1 FROM events)"
SHIFT = "UPDATE events SET seq = -seq", "UPDATE events SET seq = 3 - seq"

CASES: dict[str, tuple[Change, str]] = {
    "reward_mean": (metric("reward_mean", 0.99), "step 2, reward_mean: the metrics have 0.99, but samples"),
    "signal_share": (metric("signal_share", 0.125), "step 2, signal_share: "),
    "token_age_mean": (metric("token_age_mean", 0.25), "step 2, token_age_mean: "),
    "completion_tokens_mean": (metric("completion_tokens_mean", 1.5), "step 2, completion_tokens_mean: "),
    "dropped": (metric("dropped", 3), "step 2, dropped: the metrics have 3, but"),
    "dropped_by_reason": (metric("dropped_by_reason", {"no_signal": 1}), "step 2, dropped_by_reason: "),
    "failed_rewards": (metric("failed_rewards", 1), "step 2, failed_rewards: "),
    "interruptions": (metric("interruptions", 99), "step 2, interruptions: "),
    "step": (metric("step", 7), "step 2, step: "),
    "params_digest": (metric("params_digest", "0" * 16), "step 2, params_digest: "),
    "no machine": (
        edited("BatchTrained", 2, lambda values: values[3].pop("machine") and None),
        "metrics.jsonl, step 2, machine: ",
    ),
    "a measured metric": (metric("wall_s", 1e9), "metrics.jsonl, step 2, wall_s: the file has"),
    "loss": (metric("loss", 0.5), "metrics.jsonl, step 2, loss: "),
    "the end": (sql(CUT), f"metrics.jsonl has {STEPS} steps, but the journal ends after 3"),
    "a hole": (sql(HOLE), "the rows between are missing"),
    "the beginning": (sql("DELETE FROM events WHERE seq < 3"), "the journal begins with event 3"),
    "other numbers": (sql(*SHIFT), "the journal begins with event 4"),
    "a reward's event": (
        edited("RewardScored", 6, lambda values: values.__setitem__(2, [5.0, *values[2][1:]])),
        "its event has RewardScored(",
    ),
    "a reward's row": (
        lambda db: db.execute(
            "UPDATE rewards SET scored = ? WHERE ordinal = 6", (pack([[5.0, 0.0, 0.0, 0.0], [], []]),)
        ) and None,
        "group 6: its event has RewardScored(",
    ),
    "no reward's row": (sql("DELETE FROM rewards WHERE ordinal = 6"), "group 6 was scored, but its rewards"),
    "an added reward": (
        lambda db: db.execute("INSERT INTO rewards VALUES (99, 0, ?)", (pack([[1.0], [], []]),)) and None,
        "group 99 has stored rewards, but no event",
    ),
    "a token": (trajectory(other_array("tokens", -1, 3)), "sample 9/3, digest: its event has"),
    "a log-prob": (trajectory(other_array("behavior_logp", -1, -1.25)), "sample 9/3, digest: "),
    "a span": (
        trajectory(other_array("versions", -1, 5), is_digest_edited=True),
        "sample 9/3, spans: its event has",
    ),
    "a mask": (trajectory(other_array("loss_mask", -1, False)), "sample 9/3, loss_mask: "),
    "a stop reason": (
        trajectory(lambda one: replace(one, stop_reason="other")), "sample 9/3, stop_reason: ",
    ),
    "a temperature": (
        trajectory(lambda one: replace(one, sampling=replace(one.sampling, temperature=0.5))),
        "sample 9/3 was sampled with Sampling(temperature=0.5",
    ),
    "bytes of a trajectory": (
        sql("UPDATE trajectories SET payload = x'00' WHERE ordinal = 9 AND member = 3"),
        "the trajectory of sample 9/3 cannot be read",
    ),
    "another's trajectory": (
        sql("UPDATE trajectories SET payload = (SELECT payload FROM trajectories WHERE ordinal = 8 AND "
            "member = 2) WHERE ordinal = 9 AND member = 3"),
        "the stored trajectory of sample 9/3 is that of 8/2",
    ),
    "half a group": (
        sql("DELETE FROM trajectories WHERE ordinal = 9 AND member = 3"),
        "sample 9/3 has no stored trajectory, but it was trained in step 2",
    ),
    "an added trajectory": (
        sql("INSERT INTO trajectories SELECT 99, attempt, member, payload FROM trajectories WHERE "
            "ordinal = 9"),
        "there is a trajectory of sample 99/0, but no event of its end",
    ),
    "a snapshot": (other_snapshot, "the stored snapshot of the state has admitted"),
    "a snapshot of nothing": (
        sql("UPDATE snapshots SET seq = 100000 WHERE seq = (SELECT max(seq) FROM snapshots)"),
        "there is a snapshot of the state after event 100000",
    ),
}  # fmt: skip
"""Name -> (change of the journal, what audit says)."""


def test_a_run_that_was_not_changed_is_clean(clean):
    found = audit_run(clean)
    assert (found.ok, found.violations, found.trained) == (True, [], 4 * STEPS)
    with open_journal(clean) as journal:
        assert journal.is_chained


@pytest.mark.parametrize("name", CASES)
def test_audit_names_a_change_of_the_journal(copy, name: str):
    change, said = CASES[name]
    violations = changed(copy, change)
    assert [found for found in violations if said in found], violations


UNREADABLE: dict[str, tuple[Change, str]] = {
    "an empty value": (
        edited("SampleFinished", 20, list.clear), "contains a SampleFinished that this areal-jax",
    ),
    "a value of another form": (
        edited("SampleFinished", 20, lambda values: values.__setitem__(2, 7)),
        "contains a SampleFinished that this areal-jax",
    ),
    "bytes of an event": (sql("UPDATE events SET event = x'C1' WHERE seq = 20"), "bytes that are no values"),
}  # fmt: skip


@pytest.mark.parametrize("name", UNREADABLE)
def test_audit_of_a_journal_that_cannot_be_read_ends_with_the_reason(copy, name: str):
    change, said = UNREADABLE[name]
    with pytest.raises(JournalError, match=said):
        changed(copy, change)


CHAINED: dict[str, Change] = {
    "times": sql("UPDATE events SET wall_s = wall_s - 100 WHERE seq = 30"),
    "a host's name": edited("SampleFinished", 30, lambda values: values[5].append(1)),
    "a reward in both places": lambda db: reward_in_both_places(db),
    "the header": lambda db: db.execute("UPDATE header SET value = ?", (pack({"jaxlib": "0"}),)) and None,
    "the last event": sql("DELETE FROM events WHERE seq = (SELECT max(seq) FROM events)"),
}  # fmt: skip


def reward_in_both_places(db: sqlite3.Connection) -> None:
    seq, values = of_kind(db, "RewardScored", 6)
    values[4] = ["forged"] * 4
    db.execute("UPDATE events SET event = ? WHERE seq = ?", (pack(values), seq))
    db.execute("UPDATE rewards SET scored = ? WHERE ordinal = ?", (pack(values[2:]), values[0]))


@pytest.mark.parametrize("name", CHAINED)
def test_digests_of_events_name_a_change_that_contradicts_nothing_else(copy, name: str):
    violations = changed(copy, CHAINED[name], is_chained=True)
    assert violations and ("digest" in violations[-1]), violations


def test_the_command_says_where_digests_are_missing(copy):
    whole = CliRunner().invoke(app, ["audit", str(copy), "--json"])
    assert whole.exit_code == 0 and json.loads(whole.stdout)["chained"] is True
    missing = "the digests of the journal's events are missing, which this run has written"
    assert changed(copy, sql()) == [missing]
    with sqlite3.connect(copy / "journal.sqlite") as db:
        ((header,),) = db.execute("SELECT value FROM header").fetchall()
        older = {name: value for name, value in unpack(header).items() if name != "config"}
        db.execute("UPDATE header SET value = ?", (pack(older),))
    older = CliRunner().invoke(app, ["audit", str(copy)])
    assert older.exit_code == 0 and "without digests: the journal has none" in older.stdout
    assert "without digests" not in CliRunner().invoke(app, ["audit", str(copy), "--json"]).stdout


# --- files --------------------------------------------------------------------------------------------------


def edit_json(path: Path, edit: Callable[[Any], None]) -> None:
    value = json.loads(path.read_text())
    edit(value)
    path.write_text(json.dumps(value))


def edit_manifest(folder: Path, leaf: str) -> None:
    path = folder / MANIFEST
    manifest = json.loads(path.read_text())
    name = next(name for name in manifest["leaves"] if name.startswith(leaf))
    manifest["leaves"][name] = manifest["leaves"][name].rpartition(":")[0] + ":00000000"
    path.write_bytes(render(manifest))


def lines(folder: Path, edit: Callable[[list[str]], Sequence[str]]) -> None:
    path = folder / "metrics.jsonl"
    path.write_text("".join(edit(path.read_text().splitlines(keepends=True))))


def rename(folder: Path, name: str, new: int) -> None:
    """Gives a stored version another number, in its folder's name and in its manifest."""
    old, path = max((folder / name).iterdir(), key=lambda path: int(path.name)), folder / name / str(new)
    old.rename(path)
    manifest = json.loads((path / MANIFEST).read_text()) | {"version": new}
    (path / MANIFEST).write_bytes(render(manifest))


def evaluation(version: int, digest: str) -> str:
    return json.dumps({"version": version, "digest": digest, "limit": 8}) + "\n"


FILES: dict[str, tuple[Callable[[Path], Any], str]] = {
    "config": (
        lambda f: (f / "config.yaml").write_text((f / "config.yaml").read_text() + "\n# a line\n"),
        "config.yaml has digest",
    ),
    "a metric": (
        lambda f: lines(f, lambda rows: [*rows[:-1], rows[-1].replace('reward_mean": ', 'reward_mean": 1')]),
        f"metrics.jsonl, step {STEPS - 1}, reward_mean: the file has",
    ),
    "no metrics": (lambda f: (f / "metrics.jsonl").unlink(), "metrics.jsonl has 0 of the journal's 6 steps"),
    "fewer metrics": (lambda f: lines(f, lambda rows: rows[:-2]), "metrics.jsonl has 4 of the journal's 6"),
    "an extra step": (lambda f: lines(f, lambda rows: [*rows, rows[-1]]), "metrics.jsonl has 7 steps, but"),
    "no JSON": (lambda f: lines(f, lambda rows: ["{\n", *rows]), "metrics.jsonl, line 1: not JSON"),
    "no checkpoint": (lambda f: shutil.rmtree(f / "checkpoints" / "6"), "`resume` goes back to checkpoint 4"),
    "no checkpoints": (lambda f: shutil.rmtree(f / "checkpoints"), "`resume` goes back to the start"),
    "another checkpoint": (
        lambda f: edit_manifest(f / "checkpoints" / "4", "params."), "checkpoint 4 has digest",
    ),
    "a checkpoint of the future": (lambda f: rename(f, "checkpoints", 9), "checkpoint 9 is there, but the"),
    "a file of a checkpoint": (
        lambda f: next((f / "checkpoints" / "6" / "state").rglob(".zarray")).write_text("{}"),
        "is damaged: file ",
    ),
    "a part of a checkpoint": (
        lambda f: next(p for p in (f / "checkpoints/6/state").rglob("*") if p.is_file()).unlink(),
        "is damaged: file ",
    ),
    "another published version": (
        lambda f: edit_manifest(max((f / "weights").iterdir()), ""), "published version 6 has digest",
    ),
    "a published version of the future": (lambda f: rename(f, "weights", 9), "published version 9 is there"),
    "an export of other parameters": (
        lambda f: edit_json(f / "exports/6/config.json", lambda c: c["areal_jax"].update(digest="0" * 16)),
        "export 6 has digest 0000000000000000, but the journal has",
    ),
    "an export of another version": (
        lambda f: edit_json(f / "exports/6/config.json", lambda c: c["areal_jax"].update(version=5)),
        "export 6 is of version 5",
    ),
    "an export of the future": (
        lambda f: (f / "exports/6").rename(f / "exports/8"), "export 8 is there, but the journal ends",
    ),
    "half an export": (
        lambda f: (f / "exports/6/model.safetensors").write_bytes(b"x"), "export 6 cannot be read: ",
    ),
    "an evaluation of other parameters": (
        lambda f: (f / "evals.jsonl").write_text(evaluation(4, "0" * 16)),
        "the evaluation of version 4 has digest 0000000000000000",
    ),
    "an evaluation of the future": (
        lambda f: (f / "evals.jsonl").write_text(evaluation(9, "0" * 16)),
        "an evaluation of version 9 is there",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", FILES)
def test_audit_names_a_changed_file(copy, name: str):
    change, said = FILES[name]
    change(copy)
    violations = audit_run(copy).violations
    assert [found for found in violations if said in found], violations


# --- replay -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "said", "steps"),
    [
        (metric("reward_mean", 0.99), "step 2, reward_mean: the journal has 0.99, the replay ", 2),
        (
            edited("BatchTrained", 1, lambda values: values[3].pop("grad_norm") and None),
            "step 1, grad_norm: the journal has no such metric",
            1,
        ),
        (sql(CUT), f"metrics.jsonl has {STEPS} steps, but the journal ends after 3", 3),
    ],
)
def test_replay_names_it_too(copy, change: Change, said: str, steps: int):
    changed(copy, change)
    found = replay(copy)
    assert found.difference.startswith(said) and found.steps == steps


def test_replay_names_a_leaf_of_the_optimizer_in_a_checkpoint(copy):
    edit_manifest(copy / "checkpoints" / "4", "optimizer")
    assert audit_run(copy).ok  # no event has its digest
    found = replay(copy)
    assert found.difference.startswith("checkpoint 4, optimizer") and found.steps == 3


def test_replay_names_a_hole_before_anything_is_generated(copy):
    changed(copy, sql("DELETE FROM events WHERE seq = 4"))
    found = replay(copy)
    assert "event 5 follows event 3; the events between are missing" in found.difference


# --- a run in progress, and another machine -----------------------------------------------------------------


def test_a_replay_reads_no_event_that_a_run_in_progress_adds_meanwhile(copy):
    path = copy / "journal.sqlite"
    with sqlite3.connect(path) as db:
        db.execute(CUT.replace("DELETE FROM events", "CREATE TABLE later AS SELECT * FROM events"))
        db.execute(CUT)
        ((last,),) = db.execute("SELECT max(seq) FROM events").fetchall()

    def go_on(said: str) -> None:
        with sqlite3.connect(path) as db:
            db.execute("INSERT OR IGNORE INTO events SELECT * FROM later")

    found = replay(copy, note=go_on)
    assert (found.difference, found.steps, found.open_at) == ("", 3, last)
    assert [line for line in report_lines(found) if f"not ended: it was replayed up to event {last}," in line]


def other_log_prob(by: float) -> Change:
    def edit(one: Any) -> Any:
        logp = one.behavior_logp.copy()
        logp[-1] += by
        return replace(one, behavior_logp=logp)

    return trajectory(edit)


@pytest.fixture
def elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """This machine has another CPU than the run's; all that the journal's header names is equal."""
    monkeypatch.setattr(reopened, "training_machine", lambda *_: "another")


def test_on_another_cpu_values_are_compared_within_bounds_from_the_first_other_bit_on(copy, elsewhere):
    changed(copy, other_log_prob(1e-5))
    (first, *_), words = events_of(copy, e.BatchTrained), ["replay", str(copy), "--until", str(STEPS)]
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 0, done.output
    machine = first.metrics["machine"]
    assert f"other bits than the run's: machine was '{machine}', now 'another'" in done.stdout
    # Sample 9/3 is trained in step 2, and generated there or before. What came before it has equal bits.
    assert re.search("from step [0-2] on, log-probs and metrics may therefore have other bits", done.stdout)
    assert "every value is within its bound" in done.stdout
    found = replay_sample(copy, "9/3")
    assert (found.difference, found.header) == ("", {"machine": (machine, "another")})
    assert 5e-6 < found.largest["behavior_logp"] < 2e-5
    said = rf"differs from the run's \(machine was '{machine}', now 'another'\)"
    with reopened.reopened(copy) as run, pytest.raises(ArealError, match=said):
        make_branch(run, 3, "elsewhere", ())


def test_there_a_value_beyond_its_bound_is_named_and_equal_bits_are_no_difference_of_machines(
    clean, copy, elsewhere
):
    changed(copy, other_log_prob(0.01))
    for stored in ("checkpoints", "weights", "exports"):  # which no replay needs
        shutil.rmtree(copy / stored)
    assert "9/3, token" in (said := replay(copy, 3).difference) and "than the bound of 0.001" in said
    found = replay(clean, 1)
    assert (found.difference, found.header, found.bounded_from, found.open_at) == ("", {}, None, None)


def test_on_a_device_that_does_not_repeat_bits_too(copy, monkeypatch):
    changed(copy, other_log_prob(1e-5))
    assert ", behavior_logp: the journal has" in replay_sample(copy, "9/3").difference
    monkeypatch.setattr(reopened, "repeats_bits", lambda: False)
    found = replay_sample(copy, "9/3")
    assert (found.difference, found.header) == ("", {"deterministic_kernels": (False, False)})
    assert "deterministic_kernels is False" in "".join(report_lines(found))


# --- what digests cost --------------------------------------------------------------------------------------


def test_a_digest_of_an_event_takes_a_fraction_of_a_millisecond(tmp_path):
    """A step of 32 samples has about 100 events; 1 % of a step of one second is 100 us for each."""

    def seconds(name: str, is_chained: bool) -> float:
        with SqliteQueue.create(tmp_path / name, {}) as journal:
            journal.is_chained = is_chained
            entries = [[Entry(e.HostAdopted("host-0", n, "0" * 16, 0))] for n in range(400)]
            start_s = time.process_time()
            for each in entries:
                journal.append(each)
            return time.process_time() - start_s

    pairs = [(seconds(f"plain-{n}", False), seconds(f"chained-{n}", True)) for n in range(5)]
    assert min(chained for _, chained in pairs) - min(plain for plain, _ in pairs) < 400 * 100e-6
