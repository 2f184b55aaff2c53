"""Problem sets of JSONL files: prepared once as array_record through tensorflow-datasets, read by index."""

from __future__ import annotations

import contextlib
import hashlib
import os
import tempfile
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from areal_jax.tasks.task import TaskError

COLUMNS = ("problem", "solution", "answer")

ParseRow = Callable[[Mapping[str, Any], str], dict[str, str]]
"""A line's object and its place -> its COLUMNS. Raises TaskError that begins with the place."""

_REACH_S = 15.0


class Problems:
    """The problems of one split, in the order of their lines. Opened when the first one is read.

    What travels to another process is the folder's name: a reward worker opens nothing.
    """

    def __init__(self, folder: Path, split: str) -> None:
        """Raises TaskError for a folder that cannot be read."""
        self._folder = folder
        self._split = split
        self._source: Any = None
        with self._readable():
            self._size: int = _builders().size(folder, split)

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, i: int) -> dict[str, str]:
        if not 0 <= i < self._size:
            raise IndexError(f"problem {i} of {self._size}")
        if self._source is None:
            with self._readable():
                self._source = _builders().source(self._folder, self._split)
        row = self._source[i]
        return {name: row[name].decode() for name in COLUMNS}

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_source": None}

    @contextlib.contextmanager
    def _readable(self) -> Iterator[None]:
        try:
            yield
        except (OSError, KeyError, ValueError) as error:
            raise TaskError(
                f"the prepared data set {self._folder} cannot be read ({error!r:.200}); remove that folder, "
                "and it is made again"
            ) from error


def from_folder(name: str, folder: str, split: str, parse: ParseRow) -> Problems:
    """The problems of a folder's <split>*.jsonl files, in order of name.

    Prepared in the user's cache under a digest of the files, so that changed files are prepared again. Raises
    TaskError for a missing folder, missing files, and for what `parse` does not accept.
    """
    files = _files(name, Path(folder), split)
    digest = hashlib.blake2b(digest_size=16)
    for path in files:
        digest.update(f"{path.name} {path.stat().st_size}\n".encode())
        digest.update(path.read_bytes())
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "areal-jax" / "datasets"
    config = _builders().Files(name=f"{name}-{split}-{digest.hexdigest()}", files={split: files}, parse=parse)
    return Problems(_prepared(config, cache), split)


def from_web(name: str, urls: Mapping[str, str], split: str, parse: ParseRow) -> Problems:
    """The problems at `urls` (one a split), downloaded and prepared once in tensorflow-datasets' own folder.

    Raises TaskError that says to give data_dir where they cannot be downloaded.
    """
    builders = _builders()
    root = Path(builders.tfds.core.constants.DATA_DIR).expanduser()  # TFDS_DATA_DIR
    digest = hashlib.blake2b(repr(sorted(urls.items())).encode(), digest_size=4).hexdigest()
    config = builders.Files(name=f"{name}-{digest}", urls=dict(urls), parse=parse)
    try:
        return Problems(_prepared(config, root), split)
    except TaskError as error:
        raise TaskError(
            f"{error}; or give tasks.{name}.data_dir=FOLDER, a folder with train.jsonl and test.jsonl"
        ) from error


def _files(name: str, folder: Path, split: str) -> list[Path]:
    key = f"tasks.{name}.data_dir"
    if not folder.is_dir():
        raise TaskError(f"{key}={folder} is no folder; give one that holds {split}*.jsonl")
    files = sorted(folder.glob(f"{split}*.jsonl"))
    if files:
        return files
    there = sorted(path.name for path in folder.glob("*.jsonl"))
    other = "test" if split == "train" else "train"
    hint = f"set tasks.{name}.split={other}, or add {split}.jsonl"
    if not any(file.startswith(other) for file in there):
        hint = f"add {split}.jsonl"
    raise TaskError(
        f"{key}={folder} holds no {split}*.jsonl; its files are {', '.join(there) or 'none'}: {hint}"
    )


def _prepared(config: Any, root: Path) -> Path:
    """The folder of the prepared data set below `root`, made if it is not there yet.

    It is built aside and renamed, so it is whole or absent, whoever else prepares it at the same time.
    """
    builders = _builders()
    folder = root / builders.ArealProblems.name / config.name / builders.VERSION
    if folder.is_dir():
        return folder
    for url in config.urls.values():
        _reach(url)
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".incomplete-", dir=root) as aside:
            _rename(builders.prepare(config, Path(aside)), folder)
    except OSError as error:
        raise TaskError(f"{config.name} cannot be prepared in {root}: {error}") from error
    return folder


def _rename(built: Path, folder: Path) -> None:
    """Where another process was first, its folder stays: the digest in the name says it holds the same."""
    try:
        built.rename(folder)
    except OSError:
        if not folder.is_dir():
            raise


def _reach(url: str) -> None:
    """Ask once, with a deadline, since tensorflow-datasets tries ten times over minutes."""
    try:
        urllib.request.urlopen(url, timeout=_REACH_S).close()
    except OSError as error:
        raise TaskError(f"{url} cannot be downloaded: {error}") from error


def _builders() -> ModuleType:
    try:
        from areal_jax.tasks import builders
    except ModuleNotFoundError as error:
        raise TaskError(
            f"problem sets are prepared by tensorflow-datasets, which lacks here ({error.name}): "
            "pip install 'areal-jax[tasks]'"
        ) from error
    return builders
