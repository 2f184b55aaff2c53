"""The counter of code lines: what counts as code, and that it knows each room of this checkout."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tools.code_lines import CountError, code_lines, lines_of_rooms

ROOT = Path(__file__).parents[2]

MODULE = '''"""A docstring
of two lines."""

import os  # 1


# a comment
SIZES = (  # 2
    1,  # 3

    # another comment
    2,  # 4
)
"""What an attribute means."""

TEXT = """a value  # 5

of three lines"""  # 6, and 7 for the empty line


class Kind:  # 8
    """One line."""

    size: int  # 9
    "Of one more attribute."

    def of(  # 10
        self,  # 11
    ) -> dict:  # 12
        """Two strings """ "are one docstring."
        return {  # 13
            "a": [  # 14
                os.sep,  # 15
            ],
        }


def one_line(): "a docstring beside its function"  # 16
'''


def small_package(folder: Path, *rooms: str) -> Path:
    """Makes a checkout whose package has a module of three code lines in each of `rooms`."""
    for room in rooms:
        path = folder / "areal_jax" / room
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text('"""A docstring."""\n\na = 1\nb = [\n    a\n]\n')
    return folder


def test_no_docstring_comment_blank_or_bracket_line_counts():
    assert code_lines(MODULE) == 16


def test_lines_add_up_by_room_and_group(tmp_path: Path):
    small_package(
        tmp_path, "types.py", "control/gate.py", "control/deep/er.py", "cli/main.py", "lab/any/thing.py"
    )
    small_package(
        tmp_path, "serving/http.py", "serving/proto/rollout_pb2.py", "serving/proto/rollout_pb2_grpc.py"
    )
    assert lines_of_rooms(tmp_path) == {
        "core": {"types": 3, "control": 6},
        "wings": {"cli": 3, "serving": 3},
        "lab": {"lab": 3},
    }


def test_a_room_of_no_group_is_an_error_that_names_it(tmp_path: Path):
    small_package(tmp_path, "types.py", "attic/old.py")
    with pytest.raises(CountError, match=r"the room attic .*add it to ROOMS"):
        lines_of_rooms(tmp_path)


def test_a_folder_without_the_package_is_an_error(tmp_path: Path):
    with pytest.raises(CountError, match="name the root folder of a checkout"):
        lines_of_rooms(tmp_path)


def test_the_table_has_the_totals(tmp_path: Path):
    small_package(tmp_path, "types.py", "control/gate.py", "control/drops.py", "lab/any.py")
    command = [sys.executable, ROOT / "tools" / "code_lines.py", tmp_path]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert [line.split() for line in done.stdout.splitlines()] == [
        *(["core", "9"], ["control", "6"], ["types", "3"]),
        *(["wings", "0"], ["lab", "3"], ["lab", "3"], ["all", "12"]),
    ]


def test_every_room_of_this_checkout_is_in_a_group():
    groups = lines_of_rooms(ROOT)
    assert min(sum(rooms.values()) for rooms in groups.values()) > 0
