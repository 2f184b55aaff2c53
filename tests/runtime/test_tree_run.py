"""Runs over prefix trees, on a game whose turns share prefixes.

At eta = 0 a run is the plain loop over trees; 50 asynchronous batches, trained again in a packed learner,
give the same parameters and metrics.
"""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import pytest

from areal_jax.assembly.parts import Parts, assemble
from areal_jax.assembly.run_folder import open_journal
from areal_jax.config.loading import load_config
from areal_jax.config.tree import Config
from areal_jax.control.events import BatchTrained
from areal_jax.generation.rollout import rollout
from areal_jax.jobs.local import resume, run
from areal_jax.observe.metrics import read_rows
from areal_jax.replay.folder_audit import audit_run
from areal_jax.runtime.batch_figures import batch_figures
from areal_jax.runtime.recovery import journaled_batches, journaled_groups
from areal_jax.tasks.datasets.tool_game import ToolGame
from areal_jax.trainer.checkpoint import discard_newer, restore
from areal_jax.trainer.gaps import PER_DECADE
from areal_jax.trajectories.journal import Entry
from areal_jax.trajectories.packing import pack
from areal_jax.trajectories.sqlite import JournalError, SqliteQueue
from areal_jax.trees.tree_learner import TreeLearner
from areal_jax.trees.tree_update import TreeBatch, TreeUpdate
from areal_jax.types import Completion, Group, Prompt, Reward
from areal_jax.weights.digest import digest

pytestmark = pytest.mark.slow

RECIPE = Path(__file__).parents[2] / "configs" / "tool_game.yaml"
STEPS = 50

WORDS = (
    "model.overrides={width: 32, heads: 2, kv_heads: 2, mlp_width: 64}",
    "algorithm.group_size=4",
    "algorithm.minibatches=2",
    "generation.slots=8",
    "generation.length=160",
    "generation.decode_steps=1",
    "trainer.batch_size=8",
    "trainer.rows=4",
    "trainer.length=160",
    "trainer.tree_block=32",
    "trainer.supervised.steps=0",
    "trainer.learning_rate=1e-3",
    "trainer.checkpoint_every=1000",
    "observe.live=false",
    "observe.tensorboard=false",
    "observe.report=false",
    "runtime.deadline_s=600",
)


class Capitals(ToolGame):
    """The tool game for an untrained model: the reward is the fraction of tokens that are capital letters."""

    def __init__(self) -> None:
        super().__init__(rooms=4, turns=4, compact=True)

    def score(self, prompt: Prompt, completion: Completion) -> Reward:
        return Reward(sum(map(str.isupper, completion.text)) / len(completion.tokens))


def config_of(folder: Path, *words: str) -> Config:
    return load_config(RECIPE, *WORDS, f"run.dir={folder}", *words)


# --- eta = 0 ------------------------------------------------------------------------------------------------


def plain_loop(config: Config) -> list[str]:
    """The synchronous loop of the extension page, over prefix trees."""
    parts = assemble(config, [Capitals()])
    engine, learner, state = parts.engine(0), parts.learner, parts.first_state()
    assert isinstance(learner, TreeLearner)
    size, digests, trees = config.trainer.batch_size, [], learner.over_trees()
    for step in range(config.run.steps):
        ordinals = range(step * size, (step + 1) * size)
        own = (engine, learner.publish(state), parts.tasks, ordinals, config.algorithm.group_size)
        groups = rollout(*own, config.run.seed, sampling=config.generation.sampling)
        batch = pack(groups, config.trainer.rows, config.row_length, config.algorithm.minibatches, "apart")
        state, _ = trees.update(state, trees.prepare(state, batch))
        digests.append(digest(state.params))
    return digests


SYNC = ("run.steps=5", "control.max_staleness=0", "trainer.checkpoint_every=2")


@pytest.fixture(scope="module")
def oracle(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    return plain_loop(config_of(tmp_path_factory.mktemp("plain"), *SYNC))


def test_eta_0_is_bit_identical_to_the_plain_loop_over_trees(tmp_path: Path, oracle: list[str]):
    rows = run(config_of(tmp_path / "run", *SYNC), tasks=[Capitals()], stream=io.StringIO()).metrics
    assert len(set(oracle)) == 5
    assert [row["params_digest"] for row in rows] == oracle
    assert {row["token_age_max"] for row in rows} == {0}


def test_after_a_crash_batches_are_trained_again_over_their_trees_to_the_same_bits(
    tmp_path: Path, oracle: list[str], monkeypatch: pytest.MonkeyPatch
):
    """The journal ends after step 2, which makes version 3; the newest checkpoint has version 2."""
    folder, append, has_ended = tmp_path / "run", SqliteQueue.append, []

    def append_until(self: SqliteQueue, entries: Sequence[Entry], durable: bool = False) -> Any:
        if has_ended:
            raise JournalError("killed")
        events = [entry.event for entry in entries]
        has_ended.extend(each for each in events if isinstance(each, BatchTrained) and each.step == 2)
        return append(self, entries, durable)

    with monkeypatch.context() as patch:
        patch.setattr(SqliteQueue, "append", append_until)
        with pytest.raises(JournalError, match="killed"):
            run(config_of(folder, *SYNC), tasks=[Capitals()], stream=io.StringIO())
    assert discard_newer(folder / "checkpoints", 2) == [3], "as a trainer that is killed leaves no checkpoint"
    said = io.StringIO()
    resume(folder, tasks=[Capitals()], stream=said)
    assert "training steps 2 to 2 again from the journal" in said.getvalue()
    assert [row["params_digest"] for row in read_rows(folder)] == oracle
    assert audit_run(folder).ok


# --- asynchronous -------------------------------------------------------------------------------------------


class Finished(NamedTuple):
    folder: Path
    ages: list[dict[str, np.ndarray]]
    """Of each step's prepared batch: the ages of each sample's trained tokens."""


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Finished]:
    """A run of 50 asynchronous steps over prefix trees, and the ages that its updates used."""
    folder, ages = tmp_path_factory.mktemp("tree") / "run", []
    prepare = TreeUpdate.prepare

    def noted(self: TreeUpdate, *args: Any, **costs: Any) -> TreeBatch:
        found = prepare(self, *args, **costs)
        ages.append(jax.device_get((found.batch.ages, found.batch.loss_mask, found.batch.segment_ids)))
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TreeUpdate, "prepare", noted)
        run(
            config_of(folder, f"run.steps={STEPS}", "control.max_staleness=2"),
            tasks=[Capitals()],
            stream=io.StringIO(),
        )
    yield Finished(folder, ages)


def trained_groups(folder: Path, parts: Parts) -> list[tuple[Group, ...]]:
    with open_journal(folder) as journal:
        return [journaled_groups(parts, journal, one.train) for one in journaled_batches(journal, 0, STEPS)]


def by_sample(ages: Any, loss_mask: Any, segment_ids: Any) -> list[list[int]]:
    """The ages of each sample's trained tokens, in the order of the samples."""
    count = int(segment_ids[loss_mask].max())
    return [ages[loss_mask & (segment_ids == number)].tolist() for number in range(1, count + 1)]


def relative(one: Any, other: Any, to: Any) -> float:
    """|one - other| / |to| in the Euclidean norm over all parameters."""
    norm = lambda tree: np.sqrt(sum(float((np.float64(x) ** 2).sum()) for x in jax.tree.leaves(tree)))  # noqa: E731
    return norm(jax.tree.map(lambda x, y: np.float64(x) - np.float64(y), one, other)) / norm(to)


@pytest.mark.soak
def test_50_asynchronous_batches_are_trained_as_a_packed_learner_trains_them(
    finished: Finished, capsys: pytest.CaptureFixture
):
    rows = read_rows(finished.folder)
    parts = assemble(load_config(finished.folder / "config.yaml", "trainer.compute=packed"), [Capitals()])
    learner, state = parts.learner, parts.first_state()
    start = jax.device_get(state.params)
    for row, groups, ages in zip(rows, trained_groups(finished.folder, parts), finished.ages, strict=True):
        step = row["step"]
        assert {name: row[name] for name in batch_figures(step, groups)} == batch_figures(step, groups)
        batch = learner.prepare(state, pack(groups, learner.rows, learner.length, 2))
        samples = [one for group in groups for one in group.trajectories]
        assert by_sample(*ages) == [(step - t.versions[t.loss_mask]).tolist() for t in samples]
        state, metrics = learner.update(state, batch)
        for name in metrics:
            # A quantile of the gaps is known to a bin of their histogram, and may lie at a bin's edge.
            rel = 10 ** (1 / PER_DECADE) - 1 if name.startswith("logp_gap_p999") else 1e-4
            if not name.startswith("logp_unequal"):  # a count of tokens whose log-probs differ in any bit
                assert row[name] == pytest.approx(metrics[name], rel=rel, abs=1e-5), (step, name)
    assert audit_run(finished.folder).ok
    assert max(row["token_age_max"] for row in rows) >= 1 and len({r["reward_mean"] for r in rows}) > 10
    assert sum(r["sequence_tokens"] for r in rows) > 8 * sum(r["tree_tokens"] for r in rows)
    tree = restore(finished.folder / "checkpoints", learner.abstract_state()).state
    assert tree is not None and int(tree.version) == int(state.version) == STEPS
    one, other = jax.device_get((tree.params, state.params))
    drift, of_change = (relative(one, other, to) for to in (other, jax.tree.map(np.subtract, other, start)))
    with capsys.disabled():
        print(f"drift {drift:.1e} of the parameters, {of_change:.1e} of their change")  # noqa: T201
    assert drift <= 1e-3 and of_change <= 1e-3
