"""A run of rewards with a gated part: eta = 0 is the plain loop; a crash changes no gate and no bit."""

from __future__ import annotations

import io
from pathlib import Path

import pytest

from areal_jax.assembly.parts import assemble
from areal_jax.assembly.run_folder import open_journal
from areal_jax.config.loading import load_config
from areal_jax.config.tree import Config
from areal_jax.control.events import BatchTrained, Event, RewardScored, Train
from areal_jax.control.reward_gate import gates_of, paid
from areal_jax.generation.rollout import rollout
from areal_jax.jobs.local import resume, run
from areal_jax.observe.metrics import read_rows
from areal_jax.replay.folder_audit import audit_run
from areal_jax.report.reading import find
from areal_jax.report.viewer import Viewer
from areal_jax.tasks.datasets.countdown import Countdown
from areal_jax.tasks.source import WeightedTask
from areal_jax.trajectories.packing import pack
from areal_jax.trajectories.sqlite import JournalError, SqliteQueue
from areal_jax.types import Reward, SampleId
from areal_jax.weights.digest import digest
from tests.small_run import small

STEPS = 6
WORDS = (
    f"run.steps={STEPS}",
    "control.max_staleness=0",
    "trainer.checkpoint_every=2",
    "observe.keep_groups=0",
    "algorithm.gate.part=short",
    "algorithm.gate.tolerance=0",
)


class Gated(Countdown):
    """Countdown for an untrained model: `correct` if the first letter is right; a gated part beside it."""

    def score(self, prompt, completion):
        right = float(completion.text[:1] == prompt.info["answer"][:1])
        short = 0.5 / (1 + len(completion.tokens))
        return Reward(right + short, {"correct": right, "short": short})


def plain_loop(config: Config) -> tuple[list[str], list[bool]]:
    """The synchronous loop of the extension page, with the gate decided by its pure functions."""
    parts = assemble(config, [Gated()])
    engine, learner, state = parts.engine(0), parts.learner, parts.first_state()
    digests, opened, before = [], [], None
    size, seed = config.trainer.batch_size, config.run.seed
    for step in range(config.run.steps):
        ordinals = range(step * size, (step + 1) * size)
        own = (engine, learner.publish(state), parts.tasks, ordinals, config.algorithm.group_size, seed)
        groups = rollout(*own, sampling=config.generation.sampling)
        right = [[t.reward_parts["correct"] for t in group.trajectories] for group in groups]
        correct = [sum(one) / len(one) for one in right]
        gates = gates_of(correct, before, config.algorithm.gate)
        before = sum(correct) / len(correct)
        batch = pack(paid(groups, gates), config.trainer.rows, config.row_length)
        state, _ = learner.update(state, learner.prepare(state, batch))
        digests.append(digest(state.params))
        opened.append(gates[0][1])
    return digests, opened


@pytest.fixture(scope="module")
def oracle(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[str], list[bool]]:
    return plain_loop(small(tmp_path_factory.mktemp("plain"), *WORDS))


def check(folder: Path, oracle: tuple[list[str], list[bool]]) -> None:
    rows = read_rows(folder)
    assert [row["params_digest"] for row in rows] == oracle[0]
    assert [row["gates"]["short"] for row in rows] == oracle[1]
    assert audit_run(folder).ok


@pytest.mark.slow
def test_eta_0_is_the_plain_loop_with_gates_that_opened_and_closed(tmp_path, oracle):
    run(small(tmp_path / "run", *WORDS), tasks=[Gated()], stream=io.StringIO())
    assert set(oracle[1][1:]) == {True, False}, "the test needs an open and a closed gate"
    check(tmp_path / "run", oracle)
    rows = read_rows(tmp_path / "run")
    with open_journal(tmp_path / "run") as journal:
        scored = [row.event for row in journal.rows() if isinstance(row.event, RewardScored)]
    means = [sum(event.rewards) / len(event.rewards) for event in scored]
    assert sum(means) / len(means) == pytest.approx(
        sum(row["reward_ungated_mean"] for row in rows) / len(rows)
    )
    closed = next(row for row in rows if not row["gates"]["short"])
    assert closed["reward_mean"] == pytest.approx(
        closed["reward_ungated_mean"] - closed["reward_parts"]["short"]
    )
    assert closed["paid_share"] == {"short": 0.0}


def crash_after(folder: Path, monkeypatch: pytest.MonkeyPatch, is_last) -> None:
    """A run with a journal that takes nothing after the first row that `is_last(event, actions)` selects."""
    append, has_ended = SqliteQueue.append, []

    def append_until(self, entries, durable=False):
        if has_ended:
            raise JournalError("killed")
        has_ended.extend(entry for entry in entries if is_last(entry.event, entry.actions))
        return append(self, entries, durable)

    with monkeypatch.context() as patch:
        patch.setattr(SqliteQueue, "append", append_until)
        with pytest.raises(JournalError, match="killed"):
            run(small(folder, *WORDS), tasks=[Gated()], stream=io.StringIO())


def asked(step: int):
    def is_last(event: Event, actions) -> bool:
        return any(isinstance(action, Train) and action.step == step for action in actions)

    return is_last


def trained(step: int):
    return lambda event, actions: isinstance(event, BatchTrained) and event.step == step


@pytest.mark.slow
@pytest.mark.parametrize(
    "last", [pytest.param(asked(3), id="asked for a batch"), pytest.param(trained(3), id="trained a batch")]
)
def test_after_a_crash_the_gates_come_from_the_journal_and_the_bits_stay(tmp_path, monkeypatch, oracle, last):
    folder = tmp_path / "run"
    crash_after(folder, monkeypatch, last)
    resume(folder, tasks=[Gated()], stream=io.StringIO())
    check(folder, oracle)


@pytest.mark.slow
def test_a_sample_and_the_report_show_what_was_trained_on(tmp_path, oracle):
    folder = tmp_path / "run"
    run(small(folder, *WORDS, "observe.keep_groups=100"), tasks=[Gated()], stream=io.StringIO())
    row = next(row for row in read_rows(folder) if not row["gates"]["short"])
    with open_journal(folder) as journal:
        (batch,) = [event for event in journal.events("BatchTrained") if event.step == row["step"]]
        viewer = Viewer(journal, load_config(folder / "config.yaml"), {"Gated": WeightedTask(Gated())})
        views = [viewer.view(SampleId(ordinal, member)) for ordinal in batch.ordinals for member in range(4)]
        late = find(journal).late
    for view in views:
        assert view.trained_reward == pytest.approx(view.reward - view.parts["short"])
        assert f"trained with {view.trained_reward:.3g}: its batch's gate was closed" in view.headline
    assert sum(view.trained_reward for view in views) / len(views) == pytest.approx(row["reward_mean"])
    shown = [each.reward for each in late if each.sample.ordinal in batch.ordinals]
    assert sorted(shown) == sorted(view.trained_reward for view in views)
