"""The file of `bench gpu`: a line of JSON for each measurement, written as soon as it ends."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any


def write_line(file: Path, line: dict[str, Any]) -> None:
    """Appends a line of JSON to `file`, and waits until it is on the disk."""
    with file.open("a") as out:
        out.write(json.dumps(line) + "\n")
        out.flush()
        os.fsync(out.fileno())


def read_lines(file: Path) -> list[dict[str, Any]]:
    """Returns the lines of `file` that were written in full; an empty list if there is no such file."""
    if not file.exists():
        return []
    whole = (line for line in file.read_text().splitlines(keepends=True) if line.endswith("\n"))
    return [json.loads(line) for line in whole]
