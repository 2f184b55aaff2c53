"""Processes that need one program at the same time compile it once; no lock ever stops or fails a process."""

from __future__ import annotations

import errno
import fcntl
import os
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from jax._src import compiler
from jax.experimental.compilation_cache import compilation_cache

from areal_jax.parallel import compile_once as waiting
from areal_jax.parallel.compile_once import compile_once, locked
from areal_jax.parallel.private_jax import NAMES, Private

ROOT = Path(__file__).parents[2]
NUMBERS = jnp.arange(5.0)
PURPOSE = "compiling a program once for several processes"


def use_folder(folder: str | None) -> None:
    jax.config.update("jax_compilation_cache_dir", folder)
    compilation_cache.reset_cache()  # jax opens its folder only once, unless it is reset


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """An empty folder of compiled programs for this process."""
    compile_once()
    former = jax.config.jax_compilation_cache_dir  # type: ignore[attr-defined]
    jax.block_until_ready(NUMBERS)
    use_folder(str(tmp_path))
    yield tmp_path
    use_folder(former)


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch, folder: Path) -> list[list[str]]:
    """Per program that jax compiles, the endings of the folder's files at that time."""
    calls: list[list[str]] = []
    compiles = compiler.backend_compile_and_load

    def counted(*args):
        calls.append(endings(folder))
        return compiles(*args)

    monkeypatch.setattr(compiler, "backend_compile_and_load", counted)
    return calls


def endings(folder: Path) -> list[str]:
    return sorted(path.name.rpartition("-")[2] for path in folder.iterdir())


def squares() -> float:
    """A program that this process has not compiled or loaded yet."""
    return jax.jit(lambda x: (x * x).sum())(NUMBERS).item()


def process(folder: Path, compile_s: float, running: ExitStack) -> subprocess.Popen[str]:
    """A process that is ready to need the program; see tests/parallel/compiling.py."""
    command = [sys.executable, "-m", "tests.parallel.compiling", str(compile_s)]
    env = {**os.environ, "JAX_PLATFORMS": "cpu", "JAX_COMPILATION_CACHE_DIR": str(folder)}
    pipe = subprocess.PIPE
    found = subprocess.Popen(command, cwd=ROOT, env=env, stdin=pipe, stdout=pipe, text=True)
    running.callback(found.wait)
    running.callback(found.kill)
    return found


def line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def begin(process: subprocess.Popen[str]) -> None:
    assert process.stdin is not None
    process.stdin.write("\n")
    process.stdin.flush()


def test_a_program_that_a_full_disk_cut_short_is_stored_again(folder: Path):
    """jax never replaces a file that is there, so each later start would compile, and warn."""
    assert squares() == 30.0
    (stored,) = folder.glob("*-cache")
    stored.write_bytes(b"")
    with pytest.warns(UserWarning, match="Error reading persistent compilation cache"):
        assert squares() == 30.0
    whole = stored.read_bytes()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert squares() == 30.0
    assert stored.read_bytes() == whole != b""


@pytest.mark.slow
def test_two_processes_that_start_together_compile_a_program_once(tmp_path: Path):
    with ExitStack() as running:
        both = [process(tmp_path, 2.0, running) for _ in range(2)]
        assert [line(each) for each in both] == ["ready", "ready"]
        for each in both:
            begin(each)
        said = sorted(each.communicate(timeout=60)[0].split() for each in both)
    assert said == [["30.0"], ["compiles", "30.0"]]
    assert "lock" not in endings(tmp_path)


@pytest.mark.slow
def test_a_process_that_is_killed_while_it_compiles_holds_up_no_other(tmp_path: Path):
    with ExitStack() as running:
        killed, other = process(tmp_path, 600.0, running), process(tmp_path, 0.0, running)
        assert [line(killed), line(other)] == ["ready", "ready"]
        begin(killed)
        assert line(killed) == "compiles"
        begin(other)
        with pytest.raises(subprocess.TimeoutExpired):  # it waits
            other.wait(1.0)
        killed.kill()
        assert other.communicate(timeout=60)[0].split() == ["compiles", "30.0"]
    assert "lock" not in endings(tmp_path)


def test_a_program_is_compiled_under_its_lock_and_a_stored_one_is_loaded(folder: Path, compiled: list):
    assert [squares(), squares()] == [30.0, 30.0]
    assert compiled == [["lock"]] and endings(folder) == ["cache"]


def test_a_lock_that_is_never_released_costs_the_bound(folder: Path, compiled: list, monkeypatch):
    monkeypatch.setattr(waiting, "WAIT_S", 0.5)
    squares()
    (stored,) = folder.glob("*-cache")
    stored.unlink()
    with stored.with_name(stored.name.removesuffix("cache") + "lock").open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        began = time.monotonic()
        assert squares() == 30.0
        assert 0.5 <= time.monotonic() - began < 60
    assert len(compiled) == 2 and stored.exists()


def test_a_program_that_cannot_be_compiled_releases_its_lock(folder: Path, monkeypatch):
    def fails(*args):
        raise RuntimeError("too large")

    with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="too large"):
        patch.setattr(compiler, "backend_compile_and_load", fails)
        squares()
    assert endings(folder) == []
    began = time.monotonic()
    assert squares() == 30.0
    assert time.monotonic() - began < waiting.WAIT_S / 2


def test_a_program_that_is_not_stored_releases_its_lock(folder: Path, compiled: list):
    former = jax.config.jax_persistent_cache_min_compile_time_secs  # type: ignore[attr-defined]
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 1000)
    try:
        assert [squares(), squares()] == [30.0, 30.0]
    finally:
        jax.config.update("jax_persistent_cache_min_compile_time_secs", former)
    assert compiled == [["lock"], ["lock"]] and endings(folder) == []


@pytest.mark.skipif(not Path("/proc/self").is_dir(), reason="needs a folder that even root cannot write")
def test_in_a_folder_that_cannot_be_written_programs_are_compiled_as_before(compiled: list):
    use_folder("/proc/self")
    with pytest.warns(UserWarning, match="Error writing persistent compilation cache"):
        assert squares() == 30.0
    assert len(compiled) == 1


def test_processes_of_one_world_take_no_lock(compiled: list, monkeypatch):
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    assert squares() == 30.0
    assert compiled == [[]]


def test_without_a_folder_there_is_no_lock(compiled: list):
    use_folder(None)
    assert squares() == 30.0
    assert compiled == [[]]


def test_a_jax_without_the_private_names_compiles_as_before(monkeypatch):
    def compiles(cache_key): ...

    monkeypatch.setattr(compiler, "_compile_and_write_cache", compiles)
    compile_once()  # jax's function that reads takes arguments that this one lacks
    assert compiler._compile_and_write_cache is compiles
    monkeypatch.setitem(NAMES, PURPOSE, Private("jax._src.compiler", ("_gone",)))
    compile_once()
    assert compiler._compile_and_write_cache is compiles


def test_this_jax_can_compile_once():
    compile_once()
    once = compiler._compile_and_write_cache
    assert once.__module__ == waiting.__name__
    compile_once()
    assert compiler._compile_and_write_cache is once


# --- the lock alone -----------------------------------------------------------------------------------------


def test_what_another_process_has_not_stored_is_not_waited_for_again(tmp_path: Path, monkeypatch):
    """If the two took the lock one after the other, the second would wait for the first."""
    meet = threading.Barrier(2, timeout=20)
    asked, met = set(), []
    flock = fcntl.flock

    def noted(*args) -> None:
        asked.add(threading.get_ident())
        flock(*args)

    def needs() -> None:
        with locked(tmp_path / "lock", 60):
            meet.wait()
            met.append(True)

    monkeypatch.setattr(fcntl, "flock", noted)
    threads = [threading.Thread(target=needs) for _ in range(2)]
    with locked(tmp_path / "lock", 60):
        for thread in threads:
            thread.start()
        end_s = time.monotonic() + 20
        while len(asked) < 3 and time.monotonic() < end_s:
            time.sleep(0.01)
    for thread in threads:
        thread.join()
    assert met == [True, True] and endings(tmp_path) == []


def no_locks(*args) -> None:
    raise OSError(errno.ENOLCK, "No locks available")


@pytest.mark.parametrize("lacks", ["locks", "fcntl", "folder"])
def test_where_files_cannot_be_locked_the_block_runs_without(tmp_path: Path, lacks: str, monkeypatch):
    if lacks == "locks":
        monkeypatch.setattr(fcntl, "flock", no_locks)
    if lacks == "fcntl":
        monkeypatch.setitem(sys.modules, "fcntl", None)
    path = (tmp_path / "missing" if lacks == "folder" else tmp_path) / "lock"
    with locked(path, 60), pytest.raises(ValueError, match="the block"):
        raise ValueError("the block")
    assert endings(tmp_path) == []
