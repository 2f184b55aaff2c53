"""Asynchronous updates in exact numerics: not one bit differs, also in samples that moved, and the cost."""

from __future__ import annotations

import json
import time
from pathlib import Path

import jax
import numpy as np
import pytest

from areal_jax.assembly.parts import Parts, assemble
from areal_jax.assembly.run_folder import open_journal
from areal_jax.config.loading import load_config
from areal_jax.control.events import BatchTrained, Train
from areal_jax.jobs.local import run
from areal_jax.lab.bench.parity import recomputed_logp
from areal_jax.parallel.mesh import param_shardings
from areal_jax.replay.folder_audit import audit_run
from areal_jax.types import Group, Trajectory
from areal_jax.weights.staged import read
from tests.small_run import RECIPE, small

SETTINGS = ("observe.live=false", "observe.tensorboard=false", "observe.report=false")
SMALL = ("trainer.batch_size=8", "trainer.rows=12")
"""Half of the recipe's batch: what is promised holds of every token, and each update costs half."""


def trained_groups(folder: Path, parts: Parts) -> list[Group]:
    """What the run trained on, in the order of training; also checks that all of it is still there."""
    with open_journal(folder) as journal:
        rows = list(journal.rows())
        batches = {e.step: e.ordinals for e in (row.event for row in rows) if isinstance(e, BatchTrained)}
        orders = [a for row in rows for a in row.actions if isinstance(a, Train) and a.step in batches]
        return [
            Group(
                ordinal,
                parts.prompts.prompt(ordinal),
                journal.group(ordinal, attempt, parts.config.algorithm.group_size),
            )
            for order in orders
            for ordinal, attempt in zip(order.ordinals, order.attempts, strict=True)
        ]


def unequal_under_own_version(folder: Path, parts: Parts, groups: list[Group]) -> tuple[int, int]:
    """Tokens whose recorded log-prob has other bits than the learner's under the version that is stamped on
    them, as it was published; and tokens compared.
    """
    model, learner = parts.model, parts.learner
    shardings = param_shardings(model.logical_axes, model.abstract_params, learner.mesh)
    like = jax.tree.map(
        lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, "float32", sharding=sharding),
        model.abstract_params,
        shardings,
    )
    of_version: dict[int, list[Group]] = {}
    for group in groups:
        for version in {int(v) for one in group.trajectories for v in one.versions[one.loss_mask]}:
            of_version.setdefault(version, []).append(group)
    differ = count = 0
    for version, concerned in of_version.items():
        params = read(folder / "weights" / str(version), like)
        again = recomputed_logp(learner, params, concerned)
        found: list[Trajectory] = [
            t for group in sorted(concerned, key=lambda g: g.ordinal) for t in group.trajectories
        ]
        for one, logp in zip(found, again, strict=True):
            mine = one.versions[one.loss_mask] == version
            recorded = one.behavior_logp[one.loss_mask]
            differ += int((recorded.view(np.uint32) != logp.view(np.uint32))[mine].sum())
            count += int(mine.sum())
    return differ, count


def step_s(rows: list[dict]) -> float:
    """Seconds of a step, without the first steps, which compile."""
    return (rows[-1]["wall_s"] - rows[20]["wall_s"]) / (len(rows) - 21)


MIXTURE = "model.overrides={experts: 8, experts_per_token: 2, expert_width: 128, has_unit_weights: true}"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("updates", "model"),
    [
        (30, ()),
        pytest.param(200, (), marks=pytest.mark.soak),
        pytest.param(200, (MIXTURE,), marks=pytest.mark.soak),
    ],
)
def test_asynchronous_updates_without_a_differing_bit(tmp_path, capsys, updates, model):
    """The bounded run is the control, which shows that bits can differ."""
    walls, rows = {}, {}
    kept = ("weights.backend=orbax", f"weights.keep_versions={updates + 1}")
    for numerics, steps in {"bounded": 40, "exact": updates}.items():
        folder = tmp_path / numerics
        words = (*SETTINGS, *SMALL, *kept, *model, f"run.dir={folder}", f"run.steps={steps}")
        begun = time.monotonic()
        result = run(load_config(RECIPE, *words, f"trainer.numerics={numerics}"))
        walls[numerics], rows[numerics] = time.monotonic() - begun, result.metrics
    exact = rows["exact"]
    assert len(exact) == updates
    assert (
        sum(row["interruptions"] for row in exact) > len(exact)
        and max(r["token_age_max"] for r in exact) >= 2
    )
    assert sum(row.get("logp_unequal/age_0", 0) for row in exact) == 0
    assert sum(row.get("logp_unequal/age_0", 0) for row in rows["bounded"]) > 1000  # the control
    assert max(row.get("logp_gap_max/age_0", 0) for row in rows["bounded"]) < 1e-4
    parts = assemble(load_config(tmp_path / "exact" / "config.yaml"))
    groups = trained_groups(tmp_path / "exact", parts)
    differ, count = unequal_under_own_version(tmp_path / "exact", parts, groups)
    assert count == sum(row["trained_tokens"] for row in exact)
    assert differ == 0
    figures = {
        "tokens": count,
        "unequal": differ,
        "interruptions": sum(row["interruptions"] for row in exact),
        "token_age_mean": float(np.mean([row["token_age_mean"] for row in exact])),
        "wall_s": walls,
        "exact_over_bounded": step_s(exact) / step_s(rows["bounded"]),
        "last_rewards": {k: float(np.mean([r["reward_mean"] for r in v[-50:]])) for k, v in rows.items()},
    }
    with capsys.disabled():
        print(json.dumps(figures))  # noqa: T201 - what the run cost


@pytest.mark.slow
def test_samples_that_moved_between_hosts_differ_in_no_bit_from_their_one_version(tmp_path):
    """DORA's D1 and D5 in a real run of three hosts, one of which adopts each version before the others.

    Long samples on few slots: many are half-decoded when a version is committed.
    """
    folder, steps, bound = tmp_path / "run", 24, 2
    words = (
        *SETTINGS, "weights.backend=orbax", f"weights.keep_versions={steps + 1}", "trainer.numerics=exact",
        "control.strategy=pinned", f"control.max_staleness={bound}",
        f"run.steps={steps}", "runtime.hosts=3", "generation.decode_steps=1",
    )  # fmt: skip
    rows = run(small(folder, *words)).metrics
    assert sum(row["moved_samples"] for row in rows) >= 10
    assert max(row["token_age_max"] for row in rows) <= bound
    assert audit_run(folder).violations == []
    parts = assemble(load_config(folder / "config.yaml"))
    groups = trained_groups(folder, parts)
    assert all(len(one.spans) == 1 for group in groups for one in group.trajectories)
    differ, count = unequal_under_own_version(folder, parts, groups)
    assert (differ, count) == (0, sum(row["trained_tokens"] for row in rows))
