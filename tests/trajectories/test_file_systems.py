"""File systems by mount table."""

from __future__ import annotations

from pathlib import Path

import pytest

from areal_jax.trajectories.file_systems import is_local

TABLE = """\
21 1 8:1 / / rw,relatime shared:1 - ext4 /dev/sda1 rw
30 21 0:26 / /run rw - tmpfs tmpfs rw
40 21 0:40 / /shared rw,relatime shared:9 master:3 - nfs4 head:/export rw,addr=10.0.0.1
41 40 0:41 / /shared/scratch\\040disk rw - xfs /dev/nvme0n1 rw
42 21 0:42 / /gpfs rw - gpfs gpfs0 rw
43 21 0:43 / /mnt/bucket rw - fuse.gcsfuse bucket rw
44 42 0:44 / /gpfs rw - lustre over rw
"""


@pytest.mark.parametrize(
    ("folder", "expected"),
    [
        ("/data/runs/a", True),
        ("/run/x", True),
        ("/shared/runs", False),
        ("/sharedness", True),
        ("/shared/scratch disk/run", True),
        ("/gpfs/run", False),
        ("/mnt/bucket/run", False),
    ],
)
def test_the_deepest_mount_decides(tmp_path: Path, folder: str, expected: bool):
    table = tmp_path / "mountinfo"
    table.write_text(TABLE)
    assert is_local(folder, table) == expected


def test_an_unknown_system_counts_as_shared(tmp_path: Path):
    assert not is_local("/data", tmp_path / "missing")


def test_this_machine_has_a_mount_table(tmp_path: Path):
    assert isinstance(is_local(tmp_path), bool)
