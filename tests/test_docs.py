"""The extension page, run as a reader would: its files in an empty folder, its commands in their order."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from areal_jax.jobs.local import resume
from areal_jax.types import ArealError

pytestmark = pytest.mark.slow  # whole processes, a minute of them

DOCS = Path(__file__).parents[1] / "docs"

CACHE = {"JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0", "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1"}
"""As in the Makefile: programs that compile fast are kept too."""


def cache_of(folder: Path) -> str:
    """Where compiled programs are kept: as the environment says, or beside the page's files."""
    return os.environ.get("JAX_COMPILATION_CACHE_DIR") or str(folder / ".cache")


def blocks(page: Path, language: str) -> list[str]:
    """The page's fenced blocks of that language, in order."""
    return re.findall(rf"^```{language}\n(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL)


def run_as_printed(command: str, folder: Path, timeout_s: float = 300) -> str:
    """What the command prints; `python` and `areal-jax` are those of this environment."""
    programs = {"python": [sys.executable], "areal-jax": [sys.executable, "-m", "areal_jax.cli.main"]}
    program, *args = shlex.split(command)
    env = {**CACHE, **os.environ, "JAX_COMPILATION_CACHE_DIR": cache_of(folder)}
    env.pop("JAX_NUM_CPU_DEVICES", None)
    done = subprocess.run(
        [*programs[program], *args], cwd=folder, env=env, capture_output=True, text=True, timeout=timeout_s
    )
    assert done.returncode == 0, f"{command}\n{done.stdout[-2000:]}{done.stderr[-4000:]}"
    return done.stdout


@pytest.fixture(scope="module")
def reader(tmp_path_factory) -> tuple[Path, dict[str, str]]:
    """The folder, with every file written and every command run; what each of these printed."""
    folder = tmp_path_factory.mktemp("reader")
    for block in blocks(DOCS / "extending.md", "python"):
        path = folder / block.splitlines()[0].removeprefix("# ")
        path.parent.mkdir(exist_ok=True)
        path.write_text(block)
    commands = "".join(blocks(DOCS / "extending.md", "sh")).replace("\\\n", "").splitlines()
    return folder, {command: run_as_printed(command, folder) for command in commands}


def rows_of(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.soak
def test_an_own_task_is_trained_by_a_script_without_a_main_guard(reader):
    folder, printed = reader
    rows = rows_of(folder / "runs" / "sums")
    assert [row["step"] for row in rows] == list(range(30))
    assert all(0 <= row["reward_mean"] <= 1 and row["failed_rewards"] == 0 for row in rows)
    assert max(row["reward_mean"] for row in rows) > 0.1  # above what digits alone earn: some sums were right
    assert len({row["params_digest"] for row in rows}) == 30
    reward, report = printed["python train.py"].split()[-2:]
    assert float(reward) == rows[-1]["reward_mean"]
    assert (folder / report).name == "report.html" and "</html>" in (folder / report).read_text()


@pytest.mark.soak
def test_a_task_given_as_an_object_is_read_with_its_own_tokenizer_and_never_replaced(reader):
    folder, printed = reader
    assert "What is" in printed["areal-jax inspect runs/sums 3/1"]
    assert printed["areal-jax audit runs/sums"] == "groups trained 480, dropped none, in flight 0\nok\n"
    with pytest.raises(ArealError, match=r"Python objects \(Sums\).*tasks="):
        resume(folder / "runs" / "sums", ["run.steps=31"])


@pytest.mark.soak
def test_an_own_loss_is_trained_with_and_its_metrics_are_logged(reader):
    folder, _ = reader
    rows = rows_of(folder / "runs" / "my-loss")
    assert len(rows) == 10
    assert all(0.5 < row["my_ratio"] < 1.5 for row in rows)
    assert all("ratio" not in row for row in rows)  # the built-in loss was not used


@pytest.mark.soak
def test_an_own_advantage_is_trained_with(reader):
    folder, _ = reader
    config = (folder / "runs" / "my-advantage" / "config.yaml").read_text()
    assert "advantage: my_pkg.advantages:leave_one_out" in config and "scale: 2" in config
    rows = rows_of(folder / "runs" / "my-advantage")
    assert len(rows) == 10 and all(row["grad_norm"] > 0 for row in rows)


@pytest.mark.soak
def test_the_plain_loop_learns_to_answer_with_digits(reader):
    _, printed = reader
    rewards = [float(x) for x in re.findall(r"reward ([\d.]+)", printed["python loop.py"])]
    assert len(rewards) == 10
    assert rewards[0] < 0.02 and rewards[-1] > 0.05


@pytest.mark.soak
def test_an_own_update_learns_what_the_plain_loop_learns(reader):
    """The same prompts, seeds and optimiser: the rewards are those of loop.py, to the printed digits."""
    _, printed = reader
    rewards, plain = (
        re.findall(r"reward ([\d.]+)", printed[f"python {script}.py"]) for script in ("own_update", "loop")
    )
    assert len(rewards) == 10 and rewards == plain


def test_every_link_between_the_pages_leads_somewhere():
    dead = []
    for page in [*DOCS.glob("*.md"), DOCS.parent / "README.md"]:
        for target in re.findall(r"\]\(([^)#\s]+)", page.read_text()):
            if "://" not in target and not (page.parent / target).exists():
                dead.append(f"{page.name}: {target}")
    assert dead == []
