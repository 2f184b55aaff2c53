"""The folder of compiled programs: where it lies, that every checkout shares it, that it stays bounded."""

from __future__ import annotations

import os
import time
from pathlib import Path

from tests.compiled_programs import keep_compiled_programs, prune


def program(folder: Path, name: str, size: int, days_ago: float) -> Path:
    path = folder / f"{name}-cache"
    path.write_bytes(b"x" * size)
    used_at = time.time() - days_ago * 86_400
    os.utime(path, (used_at, used_at))
    return path


def names_in(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def test_the_folder_lies_in_the_users_cache_and_one_variable_moves_it(tmp_path):
    environ = {"XDG_CACHE_HOME": str(tmp_path)}
    assert keep_compiled_programs(environ) == tmp_path / "areal-jax" / "tests"
    assert environ["JAX_COMPILATION_CACHE_DIR"] == str(tmp_path / "areal-jax" / "tests")
    moved = {"XDG_CACHE_HOME": str(tmp_path), "JAX_COMPILATION_CACHE_DIR": "/elsewhere"}
    assert keep_compiled_programs(moved) == Path("/elsewhere")


def test_tests_and_their_processes_use_that_folder():
    import jax

    assert jax.config.jax_compilation_cache_dir == os.environ["JAX_COMPILATION_CACHE_DIR"]
    assert jax.config.jax_persistent_cache_min_compile_time_secs == 0


def test_programs_unused_for_a_month_are_deleted(tmp_path):
    program(tmp_path, "old", 10, days_ago=31)
    program(tmp_path, "new", 10, days_ago=29)
    prune(tmp_path)
    assert names_in(tmp_path) == {"new-cache"}


def test_lock_files_of_killed_processes_are_deleted(tmp_path):
    lock = tmp_path / "killed-lock"
    lock.touch()
    prune(tmp_path)
    assert lock.exists()
    used_at = time.time() - 31 * 86_400
    os.utime(lock, (used_at, used_at))
    prune(tmp_path)
    assert not lock.exists()


def test_the_least_recently_used_programs_go_when_the_folder_is_full(tmp_path):
    for day in range(5):
        program(tmp_path, f"of-day-{day}", 100, days_ago=day)
    (tmp_path / "notes").write_text("no program")
    prune(tmp_path, max_bytes=300)
    assert names_in(tmp_path) == {"of-day-0-cache", "of-day-1-cache", "of-day-2-cache", "notes"}


def test_a_folder_that_does_not_exist_is_no_error(tmp_path):
    prune(tmp_path / "missing")
