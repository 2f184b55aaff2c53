"""Several hosts, honestly: a run over three of them, each with its own network, and a link that is cut."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from areal_jax.config import load_config, to_yaml
from areal_jax.observe.metrics import read_rows
from areal_jax.runtime.launch.plan import Plan, Process, environment, make_plan, words_of
from areal_jax.runtime.reading import audit_run
from tests.cluster.namespaces import Network, hosts
from tests.programs import require

pytestmark = [pytest.mark.cluster, pytest.mark.slow]

STEPS, CUT_S = 10, 10.0
SECRET = "a secret of thirty-two characters"
ROOT = Path(__file__).parents[2]


def test_ten_updates_over_three_hosts_end_clean_although_a_link_was_cut(tmp_path):
    """Redis, controller, reward worker and trainer on host 0; a generation host each on 1 and 2."""
    require("redis-server")
    folder = tmp_path / "run"
    words = [f"run.dir={folder}", f"run.steps={STEPS}", "runtime.hosts=2", "runtime.deadline_s=120"]
    words += ["weights.backend=transfer", "observe.tensorboard=false", "observe.report=false"]
    with hosts(3) as network, ExitStack() as stack:
        redis = f"redis://{network.address(0)}:6379/0"
        config = load_config("configs/quickstart.yaml", *words, f"runtime.redis={redis}")
        (folder / "logs").mkdir(parents=True)
        (folder / "config.yaml").write_text(to_yaml(config))
        stack.enter_context(redis_on(network, folder))
        plan = make_plan(config, folder, "cpu", one_machine=True)
        running = {
            process.name: stack.enter_context(role_on(network, plan, process)) for process in plan.processes
        }
        wait_until(lambda: len(read_rows(folder)) >= 3, running, folder)
        network.cut(1)
        time.sleep(CUT_S)
        network.mend(1)
        wait_until(lambda: running["controller"].poll() is not None, running, folder)
        statuses = {name: process.wait(60) for name, process in running.items()}
    assert statuses == dict.fromkeys(running, 0), logs_of(folder)
    assert [row["step"] for row in read_rows(folder)] == list(range(STEPS))
    audit = audit_run(folder)
    assert audit.ok and audit.trained == STEPS * config.trainer.batch_size and audit.in_flight == 0
    assert not (folder / "weights").exists()  # no version went through a file
    assert all(SECRET not in path.read_text(errors="replace") for path in (folder / "logs").iterdir())
    controller = (folder / "logs" / "controller.log").read_text()
    assert "generate-0" in controller and "generate-1" in controller


def place(process: Process) -> int:
    """The host that a process runs on."""
    return process.index + 1 if process.role == "generate" else 0


@contextmanager
def redis_on(network: Network, folder: Path) -> Iterator[None]:
    settings = {
        "bind": network.address(0),
        "port": 6379,
        "requirepass": json.dumps(SECRET),
        "dir": folder,
        "appendonly": "yes",
    }
    server = subprocess.Popen(
        network.inside(0, ["redis-server", "-"]),
        stdin=subprocess.PIPE,
        stdout=(folder / "logs" / "redis.log").open("w"),
        text=True,
    )
    try:
        assert server.stdin is not None
        with server.stdin as pipe:
            pipe.write("".join(f"{key} {value}\n" for key, value in settings.items()))
        yield
    finally:
        server.terminate()
        server.wait(30)


@contextmanager
def role_on(network: Network, plan: Plan, process: Process) -> Iterator[subprocess.Popen]:
    folder, number = str(plan.folder), place(process)
    coordinator = f"{network.address(0)}:7601"
    words = words_of(process, plan, folder, f"{folder}/config.yaml", coordinator, None)
    program = [sys.executable, "-m", "areal_jax.cli.main", *words[1:]]
    own = {**environment(plan, process), "AREAL_JAX_SECRET": SECRET, "PYTHONPATH": str(ROOT)}
    with (plan.folder / "logs" / f"{process.name}.log").open("w") as log:
        started = subprocess.Popen(
            network.inside(number, program), env={**os.environ, **own}, stdout=log, stderr=log
        )
    try:
        yield started
    finally:
        if started.poll() is None:
            started.kill()
            started.wait()


def wait_until(
    holds: Callable[[], bool], running: dict[str, subprocess.Popen], folder: Path, timeout_s: float = 240
) -> None:
    end_s = time.monotonic() + timeout_s
    while not holds():
        ended = {name: process.returncode for name, process in running.items() if process.poll()}
        assert not ended and time.monotonic() < end_s, f"{ended}\n{logs_of(folder)}"
        time.sleep(0.2)


def logs_of(folder: Path) -> str:
    return "\n".join(
        f"== {path.name}\n{path.read_text(errors='replace')[-2000:]}"
        for path in sorted((folder / "logs").glob("*.log"))
    )
