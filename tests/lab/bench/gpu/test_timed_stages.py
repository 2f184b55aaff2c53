"""`bench gpu` measures what it can, whatever a measurement does, and says what it could not measure."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from areal_jax.lab.bench.gpu import timed_stages
from areal_jax.lab.bench.gpu.cells import CALLS
from areal_jax.lab.bench.gpu.process import measured
from areal_jax.lab.bench.gpu.stages import Cell, Stage, stages
from areal_jax.lab.bench.gpu.table import LONGEST, lines
from areal_jax.lab.bench.gpu.timed_stages import gpu
from areal_jax.models.config import SHAPES
from areal_jax.plugin import check_settings
from areal_jax.types import ArealError
from tests.hangs import HANG_S
from tests.processes import assert_ends

HERE = "tests.lab.bench.gpu.measurements"


def cell(call: str, **rest: Any) -> Cell:
    return Cell(call, f"{HERE}:{call}", **rest)


def run(monkeypatch: pytest.MonkeyPatch, out: Path, *given: Stage, budget: float = 60.0) -> dict[str, Any]:
    monkeypatch.setattr(timed_stages, "stages", lambda shape: given)
    return gpu(shape="tiny", budget=budget, out=str(out))


@pytest.mark.parametrize("shape", SHAPES)
def test_every_cell_can_be_called_with_its_settings(shape: str):
    for stage in stages(shape):
        names = [each.name for each in stage.cells]
        assert len(set(names)) == len(names)
        for each in stage.cells:
            check_settings(CALLS[each.call], each.settings, stage.name)
            assert not each.halved or each.settings[each.halved] >= 1
    assert sum(stage.limit_s for stage in stages(shape)) <= 560
    assert sum(len(stage.cells) for stage in stages(shape)) <= LONGEST - 2


@pytest.mark.slow
def test_ceilings_and_decoding_are_measured(tmp_path: Path):
    found = gpu(shape="tiny", only=["ceilings", "decode"], out=str(tmp_path), budget=120)
    assert found["failed"] == []
    figures = {each["cell"]: each["figures"] for each in found["cells"]}
    assert set(figures["versions"]["devices"]) == {"cpu"}
    assert figures["versions"]["packages"]["tokamax"] == "not installed"
    assert min(figures["memory"].values()) > 1e8 and figures["float32 product"]["flops_per_s"] > 1e8
    for slots, layout, rest in ((4, "feature_major", ""), (4, "stacked", ", stacked weights")):
        of_cell = figures[f"{slots} slots{rest}"]
        assert of_cell["tokens_per_s"] == pytest.approx(slots / of_cell["seconds"])
        assert (of_cell["layout"], of_cell["kernels"]) == (layout, None)
        assert 0 < of_cell["dispatch_s"] < 1
    assert [json.loads(line) for line in (tmp_path / "gpu.jsonl").read_text().splitlines()] == found["cells"]


@pytest.mark.slow
def test_a_measurement_that_fails_costs_itself_alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    first = Stage("first", 300, (cell("raises"), cell("crashes"), cell("succeeds", settings={"value": 7})))
    found = run(monkeypatch, tmp_path, first, Stage("second", 300, (cell("succeeds"),)))
    assert found["failed"] == [
        "first: raises: ValueError: a first line",
        "first: crashes: killed by SIGSEGV",
    ]
    assert [each["cell"] for each in found["cells"]] == ["raises", "crashes", "succeeds", "succeeds"]
    assert found["cells"][2]["figures"]["value"] == 7
    table = lines(found)
    assert table[0] == "bench gpu shape=tiny: 4 measurements, 2 without figures"
    assert "FAILED: killed by SIGSEGV" in table[2] and table[-1].endswith("gpu.jsonl")


@pytest.mark.slow
def test_a_stage_ends_at_its_limit_and_the_next_begins(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    child = tmp_path / "child"
    hanging = Cell("hangs", f"{HERE}:hangs_in_a_child", {"file": str(child)})
    found = run(
        monkeypatch,
        tmp_path,
        Stage("first", 15, (hanging, cell("raises"))),
        Stage("second", 300, (cell("succeeds"),)),
    )
    killed, not_run = found["failed"]
    assert re.fullmatch(r"first: hangs: killed after 1\d s, the limit of its stage or of the budget", killed)
    assert not_run == "first: raises: not run: no time was left"
    assert found["cells"][-1]["figures"]["value"] == 1
    assert_ends(int(child.read_text()), "child of a killed measurement")


@pytest.mark.slow
def test_the_budget_ends_everything(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """A measurement that hangs sleeps much longer."""
    given = [Stage(name, 300, (cell("hangs"),)) for name in ("first", "second")]
    found = run(monkeypatch, tmp_path, *given, budget=4.0)
    killed, not_run = found["failed"]
    assert re.fullmatch(
        r"first: hangs: killed after [2-4] s, the limit of its stage or of the budget", killed
    )
    assert not_run == "second: hangs: not run: no time was left"


@pytest.mark.slow
def test_a_wrong_kernel_ends_its_process_and_a_refused_one_does_not(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    cells = [cell("is_refused"), cell("is_a_wrong_kernel"), cell("succeeds")]
    found = run(monkeypatch, tmp_path, Stage("kernels", 60, tuple(cells), is_isolated=True))
    assert found["failed"] == []
    refused, wrong, after = (each["figures"]["pid"] for each in found["cells"])
    assert refused == wrong != after


@pytest.mark.slow
def test_a_cell_with_an_environment_has_a_process_of_its_own(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    one = Cell("one", f"{HERE}:succeeds", env={"XLA_AS_TESTED": "1"})
    rest = [Cell(name, f"{HERE}:succeeds") for name in ("two", "three")]
    found = run(monkeypatch, tmp_path, Stage("parity", 60, (one, *rest)))
    figures = [each["figures"] for each in found["cells"]]
    assert [each["flag"] for each in figures] == ["1", None, None]
    assert figures[0]["pid"] != figures[1]["pid"] == figures[2]["pid"]


@pytest.mark.slow
def test_a_process_that_fails_after_its_last_measurement_loses_none(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    found = run(monkeypatch, tmp_path, Stage("first", 60, (cell("fails_at_its_end"), cell("succeeds"))))
    assert [each["cell"] for each in found["cells"]] == ["fails_at_its_end", "succeeds"]
    assert found["failed"] == []


def test_what_does_not_fit_is_halved_once():
    found = measured(cell("needs_memory", settings={"slots": 8}, halved="slots"))
    assert found["figures"] == {"slots": 4}
    assert found["note"] == "out of memory; measured with slots=4"
    found = measured(cell("needs_memory", settings={"slots": 16}, halved="slots"))
    assert "figures" not in found
    assert found["failed"].startswith("RuntimeError: RESOURCE_EXHAUSTED") and "8 slots" in found["failed"]
    found = measured(cell("needs_memory", settings={"slots": 8}))
    assert "note" not in found and "8 slots" in found["failed"]


@pytest.mark.slow
def test_an_older_result_and_a_torn_line_are_left_alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    older = {"stage": "first", "cell": "old", "figures": {}}
    (tmp_path / "gpu.jsonl").write_text(json.dumps(older) + "\n")
    found = run(monkeypatch, tmp_path, Stage("first", 30, (cell("succeeds"),)))
    assert [each["cell"] for each in found["cells"]] == ["succeeds"]
    assert len((tmp_path / "gpu.jsonl").read_text().splitlines()) == 2


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"shape": "tinny"}, "shape=tinny is unknown; did you mean tiny?"),
        ({"only": ["decod"]}, "only=decod: bench gpu has no such stage; did you mean decode?"),
        ({"only": "xyz"}, "only=xyz: bench gpu has no such stage; choose from: ceilings, kernels"),
    ],
)
def test_bad_settings_are_refused(settings: dict[str, Any], message: str, tmp_path: Path):
    with pytest.raises(ArealError, match=message.replace("?", r"\?")):
        gpu(**settings, out=str(tmp_path))


def test_the_table_has_at_most_60_lines_and_every_failure():
    cells = [{"stage": "s", "cell": f"c{i}", "seconds": 1.0, "figures": {"seconds": 0.5}} for i in range(90)]
    cells[80] = {"stage": "s", "cell": "c80", "seconds": 1.0, "failed": "no memory"}
    table = lines({"shape": "tiny", "cells": cells, "failed": ["one"], "file": "gpu.jsonl"})
    assert len(table) == LONGEST
    assert sum("FAILED: no memory" in line for line in table) == 1


@pytest.mark.soak
@pytest.mark.alone
def test_every_measurement_of_the_whole_command_has_figures(tmp_path: Path):
    """Alone: stages have limits in seconds, which another test on the second core would use up."""
    status, table = _whole_command(tmp_path, 240)
    assert [line for line in table if "FAILED" in line] == []
    count = sum(len(stage.cells) for stage in stages("tiny"))
    assert (status, table[0]) == (0, f"bench gpu shape=tiny: {count} measurements, 0 without figures")


@pytest.mark.soak
def test_a_killed_stage_and_the_end_of_the_budget_leave_a_whole_table(tmp_path: Path):
    status, table = _whole_command(tmp_path, 35, is_killed=True)
    failed = [line.partition("FAILED: ")[2] for line in table if "FAILED" in line]
    assert status == 0 and table[-1] == f"all figures: {tmp_path / 'gpu.jsonl'}"
    assert failed.count("killed by SIGKILL") == 1
    rest = {reason for reason in failed if reason != "killed by SIGKILL"}
    assert all("no time was left" in reason or "of the budget" in reason for reason in rest)
    count = sum(len(stage.cells) for stage in stages("tiny"))
    assert table[0] == f"bench gpu shape=tiny: {count} measurements, {len(failed)} without figures"


def _whole_command(folder: Path, budget: int, is_killed: bool = False) -> tuple[int, list[str]]:
    """Returns the command's exit status and table; `is_killed`: its first process is killed with SIGKILL."""
    words = ["bench", "gpu", "shape=tiny", f"budget={budget}", f"out={folder}"]
    process = subprocess.Popen(
        [sys.executable, "-m", "areal_jax.cli.main", *words], stdout=subprocess.PIPE, text=True
    )
    try:
        if is_killed:
            deadline = time.monotonic() + HANG_S
            while not (victims := _children(process.pid)):
                assert time.monotonic() < deadline
                time.sleep(0.05)
            os.kill(victims[0], signal.SIGKILL)
        printed, _ = process.communicate(timeout=budget + HANG_S)
    finally:
        process.kill()
    return process.returncode, printed.splitlines()


def _children(pid: int) -> list[int]:
    """The processes that measure, which `bench gpu` has started."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
            if parent == pid and b"areal_jax.lab.bench.gpu.process" in (folder / "cmdline").read_bytes():
                found.append(int(folder.name))
        except (FileNotFoundError, ProcessLookupError):
            continue
    return found
