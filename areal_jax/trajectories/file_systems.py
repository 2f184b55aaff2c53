"""Finds whether a folder is on this machine's own disk, which decides how SQLite may write there."""

from __future__ import annotations

import re
from pathlib import Path

MOUNTS = Path("/proc/self/mountinfo")

LOCAL = (
    "bcachefs", "btrfs", "ext2", "ext3", "ext4", "f2fs", "jfs", "overlay", "ramfs", "reiserfs", "tmpfs",
    "xfs", "zfs",
)  # fmt: skip
"""Types of file systems that no other machine can mount at the same time."""


def is_local(folder: str | Path, mounts: Path = MOUNTS) -> bool:
    """Whether the folder's file system is on this machine only; False if this cannot be found out.

    `mounts`: the kernel's table of mounts.
    """
    folder = Path(folder).resolve()
    found = (Path("/"), "")
    try:
        lines = mounts.read_text().splitlines()
    except OSError:  # not Linux
        return False
    for line in lines:
        # "36 35 98:0 /root /mount/point options... - type source options"; spaces are octal
        fields, _, kind = line.partition(" - ")
        point = Path(re.sub(r"\\(\d{3})", lambda octal: chr(int(octal[1], 8)), fields.split()[4]))
        if folder.is_relative_to(point) and len(point.parts) >= len(found[0].parts):
            found = (point, kind.split()[0])  # of two mounts at one place the later one counts
    return found[1] in LOCAL
