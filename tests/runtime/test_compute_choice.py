"""Which way a batch is computed, and that a batch trained again is computed the same."""

from __future__ import annotations

import io
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from areal_jax.config.loading import load_config
from areal_jax.config.tree import Config
from areal_jax.control.events import BatchTrained, Train
from areal_jax.jobs.local import resume, run
from areal_jax.observe.metrics import read_rows
from areal_jax.observe.waits import Timeline
from areal_jax.runtime import compute_choice, trainer_loop
from areal_jax.runtime.compute_choice import plan_groups, plan_new
from areal_jax.runtime.recovery import train_again
from areal_jax.runtime.trainer_loop import held_batch, train_batch
from areal_jax.trajectories.journal import Entry
from areal_jax.trajectories.leaf_ranges import LeafCosts
from areal_jax.trajectories.plan import BatchPlan
from areal_jax.trajectories.sqlite import JournalError, SqliteQueue
from areal_jax.trees.tree_learner import TreeLearner
from areal_jax.types import Batch, Group, Prompt, SampleId, Sampling
from tests.small_run import small
from tests.trajectories.samples import trajectory

LENGTH = 128
WORDS = ("trainer.rows=2", f"trainer.length={LENGTH}", "generation.length=128", "generation.max_tokens=64")


def config(*words: str) -> Config:
    return load_config(*WORDS, "trainer.compute=auto", *words)


def groups_of(texts: list[list[np.ndarray]]) -> list[Group]:
    """A group for each list of texts."""
    groups = []
    for ordinal, members in enumerate(texts):
        found = []
        for member, text in enumerate(members):
            one = replace(trajectory(SampleId(ordinal, member), len(text)), sampling=Sampling())
            one.tokens[:] = text
            found.append(one)
        groups.append(Group(ordinal, Prompt("?"), tuple(found)))
    return groups


def apart(groups: int = 4) -> list[Group]:
    rng = np.random.default_rng(0)
    return groups_of([[rng.integers(0, 999, 64) for _ in range(8)] for _ in range(groups)])


def turns(groups: int = 4) -> list[Group]:
    """Each sample ends after a turn of a conversation: compression 4.5."""
    rng = np.random.default_rng(1)
    whole = [rng.integers(0, 999, 96) for _ in range(groups)]
    return groups_of([[text[: 12 * (1 + turn)] for turn in range(8)] for text in whole])


def test_texts_apart_are_packed_and_conversations_are_trees():
    packed, tree = (plan_new(config(), groups, True) for groups in (apart(), turns()))
    assert (packed.choice["compute"], packed.layout) == ("packed", "shared")
    assert (tree.choice["compute"], tree.layout) == ("tree", "apart")
    sent = BatchPlan.from_wire(tree.to_wire())
    assert sent.choice == tree.choice


def test_a_row_says_what_each_way_costs():
    """32 texts of 64 tokens fill 16 rows of 128, in 8 micro-batches; the reference scores each once."""
    c = config("algorithm.preset=grpo", "algorithm.kl.coef=0.1")
    passes = 1 + (c.algorithm.proximal_form == "recompute")
    tokens = plan_new(c, apart(), True).choice["compute_tokens"]
    assert tokens["packed"] == (1 + passes) * 8 * 64 + (3 + passes) * 8 * 2 * LENGTH
    assert tokens["tree"] >= tokens["packed"]
    of_turns = plan_new(c, turns(), True).choice["compute_tokens"]
    assert of_turns["tree"] < 0.5 * of_turns["packed"]


@pytest.mark.parametrize("way", ["packed", "tree"])
def test_a_way_that_is_given_is_taken(way):
    for groups in (apart(), turns()):
        assert plan_new(config(f"trainer.compute={way}"), groups, True).choice == {"compute": way}


# --- the trainer --------------------------------------------------------------------------------------------


def test_the_trainer_cuts_by_the_plans_costs_and_reports_the_choice_and_its_own_seconds(monkeypatch):
    """Of the seconds that pass those in a host's turn, and those of the memory forecast, are not its own."""
    now_s = [100.0]
    monkeypatch.setattr(trainer_loop, "time", SimpleNamespace(monotonic=lambda: now_s[0]))

    def takes(seconds: float) -> None:
        now_s[0] += seconds

    c, groups = load_config(*WORDS, "trainer.compute=tree"), turns(1)
    choice = {"compute": "tree", "tree_costs": [3.0, 1.0, 0.5]}
    batch = held_batch(0, groups, plan_groups(c, groups, True, choice))
    costs: list[Any] = []

    def prepare(state: Any, packed: Batch, between: Any) -> Batch:
        takes(1.0)
        between(result)
        takes(2.0)
        return packed

    def update(state: Any, prepared: Batch, between: Any, before_apply: Any) -> tuple[Any, dict[str, Any]]:
        takes(4.0)
        between(result)
        before_apply(result)
        return state, {"grad_norm": 1.0}

    def trains(plan: BatchPlan) -> Any:
        over = TreeLearner.trains(SimpleNamespace(over_trees=costs.append), plan)  # type: ignore[arg-type]
        assert over is None
        return SimpleNamespace(own_rows=np.arange, prepare=prepare, update=update)

    result: Any = SimpleNamespace(block_until_ready=lambda: takes(8.0))
    learner: Any = SimpleNamespace(
        trains=trains,
        versioned=lambda state: "value",
    )
    memory: Any = SimpleNamespace(before=lambda *_: takes(0.25), after=lambda: {"compiled_programs": 0.0})
    wait: Any = lambda _: takes(0.5)  # noqa: E731
    state: Any = None
    clock = Timeline(None).clock("trainer")
    pauses: Any = dict(between=wait, before_apply=wait)
    _, _, metrics = train_batch(c, learner, state, batch, clock, **pauses, memory=memory)
    assert costs == [LeafCosts(3.0, 1.0, 0.5)]
    assert metrics.pop("update_s") == 1 + 8 + 2 + 4 + 8 + 8
    assert metrics == {"grad_norm": 1.0, "compiled_programs": 0.0, **choice}


# --- trained again ------------------------------------------------------------------------------------------


def test_recovery_computes_a_batch_as_it_was_computed(tmp_path, monkeypatch):
    """Steps 0 and 1 as their rows say; step 2's row is of an older program, so the config decides."""
    c = load_config(*WORDS, "trainer.compute=tree", "algorithm.group_size=8")
    groups = turns(1)
    of_rows = [{"compute": "packed"}, {"compute": "tree", "tree_costs": [3.0, 1.0, 0.5]}, {}]
    entries = [
        Entry(BatchTrained(step, (0,), "digest", metrics), [Train(step, (0,), (0,))])
        for step, metrics in enumerate(of_rows)
    ]
    monkeypatch.setattr(SqliteQueue, "group", lambda *_: groups[0].trajectories)
    parts: Any = SimpleNamespace(
        config=c,
        prompts=SimpleNamespace(prompt=lambda ordinal: Prompt("?")),
        learner=SimpleNamespace(takes_shared_prompts=True),
    )
    plans: list[BatchPlan] = []

    def train(_: Any, batch: Any) -> tuple[Any, dict]:
        plans.append(batch.plan)
        return SimpleNamespace(digest="digest"), {}

    trainer: Any = SimpleNamespace(state=SimpleNamespace(version=0), train_again=train, machine="here")
    with SqliteQueue.create(tmp_path / "journal.sqlite", {}) as journal:
        journal.append(entries)
        assert train_again(parts, trainer, journal, 3, print) == []
    assert [plan.layout for plan in plans] == ["shared", "apart", "apart"]
    assert [plan.choice for plan in plans] == [*of_rows[:2], {"compute": "tree"}]


def test_a_plan_of_a_recorded_choice_is_the_plan_of_the_step():
    c, groups = config(), turns()
    plan = plan_new(c, groups, True)
    again = plan_groups(c, groups, True, compute_choice.recorded_choice(c, plan.choice))
    assert again.layout == plan.layout
    assert all((one == two).all() for one, two in zip(again.pieces, plan.pieces, strict=True))


@pytest.mark.slow
def test_a_run_that_ended_is_trained_again_as_its_journal_says(tmp_path, monkeypatch):
    """Ways alternate until the journal ends before step 5; on the resume all new batches are packed."""
    folder, chosen, ended, append = tmp_path / "run", [], [], SqliteQueue.append

    def alternate(tokens: Any) -> str:
        chosen.append(("packed", "tree")[len(chosen) % 2])
        return chosen[-1]

    def append_until(self, entries, durable=False):
        if ended or any(isinstance(one.event, BatchTrained) and one.event.step == 5 for one in entries):
            ended.append(True)
            raise JournalError("killed")
        return append(self, entries, durable)

    words = ("run.steps=7", "trainer.compute=auto", "trainer.checkpoint_every=3", "trainer.tree_block=48")
    with monkeypatch.context() as patch:
        patch.setattr(compute_choice, "cheaper", alternate)
        patch.setattr(SqliteQueue, "append", append_until)
        with pytest.raises(JournalError, match="killed"):
            run(small(folder, *words, "control.max_staleness=1"), stream=io.StringIO())
    monkeypatch.setattr(compute_choice, "cheaper", lambda _: "packed")
    said = io.StringIO()
    resume(folder, stream=said)
    assert "training steps 3 to 4 again" in said.getvalue()
    assert "was trained again with digest" not in said.getvalue()
    rows = read_rows(folder)
    assert [one["compute"] for one in rows] == ["packed", "tree"] * 2 + ["packed"] * 3
    assert all(one["update_s"] > 0 and min(one["compute_tokens"].values()) > 0 for one in rows)
