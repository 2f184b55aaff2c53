"""A small run as processes of one machine, by the command that a user types."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.hangs import HANG_S
from tests.programs import require
from tests.small_run import RECIPE, WORDS

LAUNCH = (sys.executable, "-m", "areal_jax.cli.main", "launch", "local", str(RECIPE))


def launched(folder: Path, *words: str, deadline_s: float = 900) -> Path:
    """Runs to its end, at most `deadline_s` seconds, the small run in `folder` with these settings."""
    require("redis-server")
    own = [*WORDS, *words, "launch.accelerator=cpu", f"run.dir={folder}"]
    env = {name: value for name, value in os.environ.items() if name != "JAX_NUM_CPU_DEVICES"}
    printed = folder.with_suffix(".out")
    with printed.open("w") as out:
        run = subprocess.Popen([*LAUNCH, *own], env=env, stdout=out, stderr=out)
        try:
            code = run.wait(deadline_s)
        finally:
            run.terminate()
            run.wait(HANG_S)
    assert code == 0, printed.read_text()[-4000:]
    return folder
