"""On-policy distillation end to end: a run whose teacher is another run."""

from __future__ import annotations

import io

import numpy as np
import pytest

from areal_jax.jobs.local import run
from areal_jax.replay.folder_audit import audit_run
from tests.small_run import small

pytestmark = pytest.mark.slow


@pytest.mark.soak
def test_a_student_comes_nearer_to_its_teacher(tmp_path):
    """No reward is read: what falls is the policy's own KL to the teacher, on its own samples."""
    teacher = small(tmp_path / "teacher", "run.steps=2", "run.seed=1")
    run(teacher, stream=io.StringIO())
    student = small(
        tmp_path / "student",
        "run.steps=120",
        "run.seed=2",
        "algorithm.preset=distillation",
        f"algorithm.teacher={tmp_path / 'teacher'}",
        "algorithm.group_size=4",
        "control.max_staleness=0",
    )
    gaps = [row["teacher_kl"] for row in run(student, stream=io.StringIO()).metrics]
    assert audit_run(tmp_path / "student").ok
    assert np.mean(gaps[-5:]) < 0.5 * np.mean(gaps[:5])
