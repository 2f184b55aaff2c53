"""The house rules that no linter checks: what starting costs, how much is configurable, what is committed."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from areal_jax.config import leaves

ROOT = Path(__file__).parents[1]

HEAVY = {"jax", "jaxlib", "flax", "optax", "orbax", "chex", "matplotlib", "tensorboardX", "scipy", "pandas"}
"""Modules that take longer to import than the whole command line may."""

NO_JAX = ["types", "config", "presets", "control", "observe", "trajectories", "tasks"]
"""Rooms that a reward worker or a queue inspector may import."""

MACHINE_PATHS = r"/(?:work|root|tmp|opt)/\w|/home/\w+/|[A-Z]:\\Users"
INDEX_HOSTS = r"pypi\.[a-z]|pythonhosted|index-url|find-links|registry\.npm"


def modules_after(code: str) -> set[str]:
    """Top-level modules loaded once `code` has run in a fresh interpreter."""
    show = "import json, sys; print(); print(json.dumps([name.split('.')[0] for name in sys.modules]))"
    done = subprocess.run(
        [sys.executable, "-c", f"{code}\n{show}"],
        capture_output=True,
        text=True,
        timeout=60,
        cwd=ROOT,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return set(json.loads(done.stdout.splitlines()[-1]))


def tracked_files() -> list[Path]:
    if shutil.which("git") is None or not (ROOT / ".git").exists():
        pytest.skip("not a git checkout")
    listed = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True, timeout=60
    )
    paths = [ROOT / name for name in listed.stdout.split("\0") if name]
    return [path for path in paths if path.is_file() and path != Path(__file__)]


def test_importing_the_package_loads_nothing_heavy():
    """0.3 s is the limit of a bare import; one of these alone takes longer."""
    assert not modules_after("import areal_jax") & (HEAVY | {"numpy", "pydantic", "rich", "typer"})


def test_help_loads_nothing_heavy():
    """0.6 s is the limit of `areal-jax --help`; numpy and pydantic fit in, jax does not."""
    lines = [
        "import sys; sys.argv = ['areal-jax', '--help']",
        "from areal_jax.cli.main import app",
        "try: app()",
        "except SystemExit as done: assert not done.code, done.code",
    ]
    assert not modules_after("\n".join(lines)) & HEAVY


@pytest.mark.parametrize("room", NO_JAX)
def test_rooms_of_reward_workers_and_inspectors_load_no_jax(room: str):
    """The import contract reads source; this one sees what third-party packages pull in."""
    folder = ROOT / "areal_jax" / room
    names = [f"areal_jax.{room}"]
    if folder.is_dir():
        names = [f"areal_jax.{room}.{path.stem}" for path in folder.glob("*.py")]
    assert not modules_after("import " + ", ".join(names)) & {"jax", "jaxlib", "flax", "optax", "orbax"}


def test_the_config_tree_stays_small_and_explained():
    keys = list(leaves())
    assert len(keys) <= 120
    assert [key for key, _, _, doc in keys if not doc and key != "run.name"] == []


def test_no_machine_path_and_no_package_index_is_committed():
    found = []
    for path in tracked_files():
        text = path.read_bytes().decode("utf-8", errors="replace")
        hits = re.findall(f"{MACHINE_PATHS}|{INDEX_HOSTS}", text)
        found += [f"{path.relative_to(ROOT)}: {hit}" for hit in hits]
    assert found == []


def test_constraints_are_exact_versions_and_nothing_else():
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    assert [line for line in lines if not re.fullmatch(r"[A-Za-z0-9._-]+==[0-9][\w.]*", line)] == []


def test_every_file_is_a_chapter():
    """At most 400 lines a file; ruff sees to the columns."""
    files = sorted((ROOT / "areal_jax").rglob("*.py"))
    assert {path.name: count for path in files if (count := len(path.read_text().splitlines())) > 400} == {}
