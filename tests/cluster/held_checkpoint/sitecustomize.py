"""First on PYTHONPATH, so that Python imports it in every process; a trainer's checkpoints wait for a file.

Before a checkpoint the trainer makes the file $HELD_CHECKPOINT/held and waits for $HELD_CHECKPOINT/go.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from pathlib import Path
from typing import Any

EVERY_S = 0.02
MODULE = "areal_jax.trainer.checkpoint"


def hold(place: Path) -> None:
    """Once the module has been imported, which a run does long before its last step."""
    while not hasattr(sys.modules.get(MODULE), "restore_params"):  # its last function
        time.sleep(EVERY_S)
    kind = sys.modules[MODULE].Checkpointer
    save = kind.save

    def held(*words: Any) -> None:
        (place / "held").touch()
        while not (place / "go").exists():
            time.sleep(EVERY_S)
        save(*words)

    kind.save = held


if found := os.environ.get("HELD_CHECKPOINT"):
    threading.Thread(target=hold, args=(Path(found),), daemon=True).start()
