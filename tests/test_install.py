"""Every install command of the README and the documentation.

The one without extras, and those without our constraints, run in an empty environment; the others run in one
that holds what the one without extras had to install, without our package.
"""

from __future__ import annotations

import io
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from areal_jax.config.loading import load_config
from areal_jax.jobs.local import run
from areal_jax.replay.bundle import make_bundle

pytestmark = pytest.mark.slow  # packages are downloaded and installed

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]

INSTALLS = re.compile(r"\bpip (?:install(?! --no-index)|wheel)\b")
"""All but those of a machine without a network, from wheels that were gathered for its Python."""

GIGABYTES = re.compile(r"\[[^\]]*(?:cuda|jetstream)")
"""Extras that download gigabytes: pip resolves them, and installs nothing."""

OTHERS = re.compile(r"'(?:verifiers|textarena)==")
"""Packages that exclude ours: tests/tasks/outside installs each of them into an environment of its own."""

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


(PLAIN,) = (command for command in COMMANDS if "pip wheel" in command)
"""Without extras; every command with extras and the same constraints installs the same packages, and more."""


def checkout_in(folder: Path) -> Path:
    """A copy without what git ignores, since a build writes into its folder."""
    unwanted = shutil.ignore_patterns(".*", "__pycache__", "*.egg-info", "build", "dist", "runs", "tests")
    return shutil.copytree(ROOT, folder / "checkout", symlinks=True, ignore=unwanted)


class Environment:
    """A virtual environment and a shell whose `python3`, `pip` and `areal-jax` are its own."""

    def __init__(self, folder: Path):
        self.folder = folder
        unwanted = ("PYTHON", "JAX_NUM_", "JAX_PLATFORMS", "XLA")  # where compiled programs are kept stays
        kept = {key: value for key, value in os.environ.items() if not key.startswith(unwanted)}
        # An environment that is active where the tests are started has an areal-jax of its own.
        others = [each for each in os.environ["PATH"].split(":") if not Path(each, "areal-jax").exists()]
        path = ":".join([str(folder / "bin"), *others])
        # Modules are compiled on import: to compile all of them takes as long as to install them.
        # To pip, 0 turns --no-compile on.
        self.env = {**kept, "PATH": path, "VIRTUAL_ENV": str(folder), "PIP_NO_COMPILE": "0"}

    def copied_to(self, folder: Path) -> Environment:
        """Its packages are links to the same files, which pip replaces and never writes into."""
        shutil.copytree(self.folder, folder, symlinks=True, copy_function=os.link)
        for script in (folder / "bin").iterdir():
            text = b"" if script.is_symlink() else script.read_bytes()
            if str(self.folder).encode() in text:  # a link no more: this file is the copy's own
                script.unlink()
                script.write_bytes(text.replace(str(self.folder).encode(), str(folder).encode()))
                script.chmod(0o755)
        return Environment(folder)

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


@pytest.fixture(scope="module")
def empty(tmp_path_factory: pytest.TempPathFactory) -> Environment:
    """Not to be installed into: copies are."""
    folder = tmp_path_factory.mktemp("environments") / "empty"
    subprocess.run([sys.executable, "-m", "venv", folder], check=True, timeout=120)
    return Environment(folder)


@pytest.fixture(scope="module")
def plain(empty: Environment, tmp_path_factory: pytest.TempPathFactory) -> Environment:
    """An empty environment in which the documentation's command without extras was run, and works."""
    environment = empty.copied_to(empty.folder.parent / "plain")
    environment.run(PLAIN, checkout_in(tmp_path_factory.mktemp("built")))
    works(environment, tmp_path_factory.mktemp("elsewhere"))
    return environment


@pytest.fixture(scope="module")
def requirements(plain: Environment) -> Environment:
    """What `plain` got without our package."""
    environment = plain.copied_to(plain.folder.parent / "requirements")
    environment.run("pip uninstall --yes areal-jax", environment.folder)
    missing = "! python3 -c 'import areal_jax' && ! command -v areal-jax"
    environment.run(missing, environment.folder)
    return environment


def works(environment: Environment, elsewhere: Path) -> None:
    """Our package is imported from the environment, and its command runs."""
    place = environment.run("python3 -c 'import areal_jax; print(areal_jax.__file__)'", elsewhere)
    assert Path(place.strip()).is_relative_to(environment.folder)
    assert "quickstart" in environment.run("areal-jax --help", elsewhere)


def test_an_empty_environment_becomes_one_that_runs_the_quickstart(plain: Environment, tmp_path: Path):
    """By the command without extras."""
    printed = plain.run("areal-jax quickstart run.steps=8", tmp_path)
    assert printed.splitlines()[-1] == "report: runs/quickstart/report.html"
    assert "</html>" in (tmp_path / "runs" / "quickstart" / "report.html").read_text()


@pytest.mark.soak
def test_a_bundle_that_was_made_here_verifies_there_and_a_changed_moment_is_refused_by_name(
    plain: Environment, tmp_path: Path
):
    run(
        load_config("configs/quickstart.yaml", "run.steps=3", f"run.dir={tmp_path / 'run'}"),
        stream=io.StringIO(),
    )
    bundle = make_bundle(tmp_path / "run", 2, tmp_path / "step.bundle")
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    printed = plain.run(f"areal-jax bundle verify {tmp_path / 'step.bundle'}", elsewhere).splitlines()
    assert f"digest of the parameters after step 2: {bundle.about['digest_after']}" in printed
    assert printed[-1] == "every bit is equal"
    name = next(name for name in bundle.tensors if ".mu." in name)
    content, moment = (tmp_path / "step.bundle").read_bytes(), bundle.tensors[name].tobytes()
    assert content.count(moment) == 1
    changed = bytes([moment[0] ^ 1]) + moment[1:]
    (tmp_path / "changed.bundle").write_bytes(content.replace(moment, changed))
    refused = plain.run(f"! areal-jax bundle verify {tmp_path / 'changed.bundle'} 2>&1", elsewhere)
    assert f"the tensor {name} was changed after the bundle was made" in refused


OWN = [command for command in COMMANDS if command != PLAIN and not OTHERS.search(command)]


@pytest.mark.soak
@pytest.mark.parametrize("command", OWN)
def test_the_documentations_install_commands_work_in_an_environment_without_our_package(
    command: str, empty: Environment, requirements: Environment, tmp_path: Path
):
    # Without the constraints pip would find other versions in an empty environment.
    begun_from = requirements if "--constraint constraints.txt" in command else empty
    environment = begun_from.copied_to(tmp_path / "environment")
    script = command.replace("venv/bin/pip", "pip")  # the page makes an environment; this is one
    if GIGABYTES.search(command):
        script = script.replace("pip install", "pip install --dry-run")
    environment.run(script, checkout_in(tmp_path))
    if "--no-deps" not in command and not GIGABYTES.search(command):
        works(environment, tmp_path)
