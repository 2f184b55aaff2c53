"""control.over_age between processes: trainers mask what they fetch, and count what they are held for."""

from __future__ import annotations

import pytest

from areal_jax.assembly.run_folder import open_journal
from areal_jax.observe.metrics import read_rows
from areal_jax.observe.waits import HELD, read_timelines
from areal_jax.replay.folder_audit import audit_run
from areal_jax.report.reading import find
from tests.launched import launched

pytestmark = pytest.mark.soak

STEPS = 64
"""Trainers report their times every few seconds, and rows after a report have its shares: so many steps take
several of them. In fewer, no sample may be old.
"""
LONG_TAIL = (
    f"run.steps={STEPS}",
    "runtime.hosts=2",
    "control.max_staleness=1",
    "control.max_token_age=1",
    "generation.slots=12",
    "generation.decode_steps=1",
    "tasks.countdown.sigma=2.0",
    "generation.length=64",
    "generation.max_tokens=58",
    "trainer.length=64",
)


@pytest.mark.parametrize("over_age", ["hold", "mask"])
def test_no_trained_token_is_older_than_the_bound(tmp_path, over_age):
    folder = launched(tmp_path / "run", *LONG_TAIL, f"control.over_age={over_age}")
    audit = audit_run(folder)
    assert (audit.violations, audit.trained, audit.dropped) == ([], STEPS * 4, {})
    rows = read_rows(folder)
    assert max(row["token_age_max"] for row in rows) <= 1
    with open_journal(folder) as journal:
        ages = find(journal).token_ages
    old = sum(count for age, count in ages.items() if age > 1)
    assert sum(row["trained_tokens"] for row in rows) == sum(ages.values()) - old
    held = {each.component for each in read_timelines(folder) if each.activity == f"wait: {HELD}"}
    if over_age == "hold":
        assert held == {"trainer"} and old == 0
        assert sum(row["hold_share"] for row in rows) > 0
    else:
        assert not held and old > 0
        assert sum(row["masked_token_share"] for row in rows) > 0
