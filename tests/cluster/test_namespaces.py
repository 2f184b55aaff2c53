"""Several hosts, honestly: a run over three of them, each with its own network, and a link that is cut."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from areal_jax.observe.metrics import read_rows
from areal_jax.replay.folder_audit import audit_run
from tests.cluster.agents import DEADLINE_S, QUIET, start_agent, wait_until
from tests.cluster.namespaces import hosts
from tests.programs import require

pytestmark = pytest.mark.slow

STEPS, CUT_S, BATCH = 10, 10.0, 16


def test_ten_updates_over_three_hosts_end_clean_although_a_link_was_cut(tmp_path):
    """An agent on each: the head with the trainer on host 0; a generation host each on 1 and 2."""
    require("redis-server")
    folder = tmp_path / "run"
    words = [f"run.steps={STEPS}", "runtime.hosts=2", "runtime.deadline_s=240", "launch.machine_devices=1"]
    words += ["--config=configs/quickstart.yaml", "--machines=3", "weights.backend=transfer", *QUIET]
    with hosts(3) as network:
        running = [
            start_agent(
                folder,
                f"--rank={rank}",
                f"--address={network.address(rank)}",
                *words,
                prefix=network.inside(rank, []),
            )
            for rank in range(3)
        ]
        try:
            wait_until(lambda: len(read_rows(folder)) >= 3, running, folder)
            network.cut(1)
            time.sleep(CUT_S)
            network.mend(1)
            wait_until(lambda: running[0].poll() is not None, running, folder)
            statuses = [agent.wait(DEADLINE_S) for agent in running]
        finally:
            for agent in running:
                agent.terminate()
            for agent in running:
                agent.wait(DEADLINE_S)
    assert statuses == [0, 0, 0], logs_of(folder)
    assert [row["step"] for row in read_rows(folder)] == list(range(STEPS))
    audit = audit_run(folder)
    assert audit.ok and audit.trained == STEPS * BATCH and audit.in_flight == 0
    assert not (folder / "weights").exists()  # no version went through a file
    secret = (folder / "launch" / "secret").read_text()
    assert all(secret not in path.read_text(errors="replace") for path in (folder / "logs").iterdir())
    controller = (folder / "logs" / "controller.log").read_text()
    assert "generate-0" in controller and "generate-1" in controller


def logs_of(folder: Path) -> str:
    return "\n".join(
        f"== {path.name}\n{path.read_text(errors='replace')[-2000:]}"
        for path in sorted((folder / "logs").glob("*.log"))
    )
