"""`launch local`: every process of a run on this machine, ended by Ctrl-C and launched again."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import jax
import pytest

from areal_jax.assembly.parts import assemble
from areal_jax.config.loading import load_config
from areal_jax.observe.evals import read_evals
from areal_jax.observe.metrics import read_rows
from areal_jax.replay.folder_audit import audit_run
from tests.cluster.agents import DEADLINE_S, pids_of, said, wait_until
from tests.programs import require

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
LIVE_BUFFERS = Path(__file__).parent / "live_buffers"
GROUPS = 16
WORDS = ["runtime.hosts=2", "trainer.checkpoint_every=8", "runtime.deadline_s=600"]
QUIET = ["launch.accelerator=cpu", "observe.tensorboard=false", "observe.report=false"]
PROGRAM = ["env", "--default-signal=INT", sys.executable, "-m", "areal_jax.cli.main", "launch", "local"]


def launch(folder: Path, *words: str, **variables: str) -> subprocess.Popen:
    env = {key: value for key, value in os.environ.items() if key != "JAX_NUM_CPU_DEVICES"} | variables
    out = folder.with_suffix(".out").open("a")
    return subprocess.Popen([*PROGRAM, *words], cwd=ROOT, env=env, stdout=out, stderr=out)


def fresh(folder: Path, steps: int) -> list[str]:
    return ["configs/quickstart.yaml", f"run.dir={folder}", f"run.steps={steps}", *WORDS, *QUIET]


def check_whole(folder: Path, steps: int) -> None:
    audit = audit_run(folder)
    assert audit.ok and audit.trained == steps * GROUPS and audit.in_flight == 0
    assert [row["step"] for row in read_rows(folder)] == list(range(steps))


@pytest.mark.parametrize("backend", ["orbax", pytest.param("transfer", marks=pytest.mark.soak)])
def test_ctrl_c_ends_every_process_and_the_run_goes_on_when_it_is_launched_again(tmp_path, backend):
    """Versions as files below weights.dir, which is empty after either end; or from device to device."""
    require("redis-server")
    folder, place = tmp_path / "run", tmp_path / "versions"
    place.mkdir()
    words = [f"weights.backend={backend}", *([f"weights.dir={place}"] if backend == "orbax" else [])]
    run = launch(folder, *fresh(folder, 8), "observe.evaluate=4", "observe.exports=1", *words)
    try:
        wait_until(lambda: len(read_rows(folder)) >= 3, [run], folder)
        names = {"controller", "evaluate-0", "generate-0", "generate-1", "reward-0", "trainer-0"}
        assert set(pids_of(folder)) == names
        assert bool(list(place.glob("run-*/*/manifest.json"))) == (backend == "orbax")
        run.send_signal(signal.SIGINT)
        assert run.wait(DEADLINE_S) == 130
        printed = folder.with_suffix(".out").read_text()
        assert f"\nstopped; `areal-jax launch local {folder}` continues the run\n" in printed
        assert pids_of(folder) == {} and list(place.iterdir()) == []
        for steps in (10, 12):  # after an interruption, and after its end
            run = launch(folder, str(folder), f"run.steps={steps}")
            assert run.wait(DEADLINE_S) == 0, said(folder)[-4000:]
            check_whole(folder, steps)
            assert list(place.iterdir()) == [] and not (folder / "weights").exists()
            assert read_evals(folder)[-1]["version"] == steps
            assert [path.name for path in (folder / "exports").iterdir()] == [str(steps)]
    finally:
        run.kill()
        run.wait()


def test_a_redis_that_is_killed_is_started_again_and_the_run_goes_on(tmp_path):
    require("redis-server")
    folder, steps = tmp_path / "run", 10
    run = launch(folder, *fresh(folder, steps))
    try:
        wait_until(lambda: len(read_rows(folder)) >= 3, [run], folder)
        before = pids_of(folder)
        os.kill(redis_of(run.pid), signal.SIGKILL)
        assert run.wait(DEADLINE_S) == 0, said(folder)[-4000:]
    finally:
        run.kill()
        run.wait()
    assert "starts again" not in said(folder) and len(before) == 5  # no process of the run had to
    check_whole(folder, steps)


@pytest.mark.soak
@pytest.mark.parametrize("backend", ["orbax", "transfer"])
def test_a_bfloat16_model_goes_from_an_fsdp_trainer_to_hosts_of_two_devices(tmp_path, backend):
    """Both sides split products, each in its own way, so their log-probs differ by bfloat16's rounding.

    No array of a trainer's process is of KV, and none of a host's is of the optimiser (LlamaRL's L8).
    """
    require("redis-server")
    folder, live, steps = tmp_path / "run", tmp_path / "live", 3
    live.mkdir()
    sizes = ["model.shape=5m", "model.dtype=bfloat16", "trainer.mesh.fsdp=4", "runtime.host_tensor=2"]
    once = ["trainer.supervised.steps=0", "launch.restarts=0", f"weights.backend={backend}"]
    watched = {"LIVE_BUFFERS": str(live), "PYTHONPATH": str(LIVE_BUFFERS)}
    run = launch(folder, *fresh(folder, steps), *sizes, *once, **watched)
    try:
        assert run.wait(DEADLINE_S) == 0, said(folder)[-4000:]
    finally:
        run.kill()
        run.wait()
    assert "canary" not in said(folder)
    check_whole(folder, steps)
    held = {name: arrays_of(live / f"{name}.json") for name in ("trainer-0", "generate-0", "generate-1")}
    kv, matrices = shapes(folder)
    assert kv not in {shape for shape, _ in held["trainer-0"]}
    assert all(
        (shape, "float32") in held["trainer-0"] for shape in matrices
    )  # so that the check can see them
    for name in ("generate-0", "generate-1"):
        assert kv in {shape for shape, _ in held[name]}
        assert {dtype for shape, dtype in held[name] if shape in matrices} <= {"bfloat16", "uint16"}


def arrays_of(path: Path) -> set[tuple[tuple[int, ...], str]]:
    """Shape and dtype of the arrays that live_buffers/sitecustomize.py found in a process."""
    return {(tuple(shape), dtype) for shape, dtype in json.loads(path.read_text())}


def shapes(folder: Path) -> tuple[tuple[int, ...], set[tuple[int, ...]]]:
    """The shapes of a host's KV pages and of the model's matrices, of the run in `folder`."""
    parts = assemble(load_config(folder / "config.yaml", "weights.backend=auto"))
    kv = jax.eval_shape(parts.engine(0).init_decode_state).cache.k.shape
    return kv, {leaf.shape for leaf in jax.tree.leaves(parts.model.abstract_params) if leaf.ndim > 1}


def redis_of(pid: int) -> int:
    """The redis-server that the process started."""
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            name, _, rest = path.read_text().partition("(")[2].rpartition(")")
            if name.startswith("redis-server") and int(rest.split()[1]) == pid:
                return int(path.parent.name)
    raise AssertionError("no redis-server of this launch")
