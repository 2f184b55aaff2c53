"""Problem sets from JSONL files, stored once as array_record by tensorflow-datasets and read by index."""

from __future__ import annotations

import hashlib
import os
import tempfile
import urllib.request
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from areal_jax.tasks.errors import TaskError, import_extra

if TYPE_CHECKING:
    from areal_jax.tasks.datasets.builders import ParseRow

_REACH_S = 15.0


class Problems:
    """The problems of one split, in the order of the files' lines; each is read when it is needed.

    A pickled copy has no open file, so a reward worker, which reads no problems, opens no file.
    """

    def __init__(self, folder: Path, split: str) -> None:
        """`folder`: a prepared data set; `split`: train or test. Raises TaskError if reading fails."""
        self._folder = folder
        self._split = split
        _ = self._source  # a damaged folder fails now, not at the first prompt

    def __len__(self) -> int:
        return len(self._source)

    def __getitem__(self, i: int) -> dict[str, str]:
        if not 0 <= i < len(self):
            raise IndexError(f"there is no problem {i}: the data set has {len(self)}, numbered from 0")
        row = self._source[i]
        return {name: row[name].decode() for name in _builders().COLUMNS}

    def __getstate__(self) -> dict[str, Any]:
        return {"_folder": self._folder, "_split": self._split}

    @cached_property
    def _source(self) -> Any:
        try:
            return _builders().tfds.builder_from_directory(self._folder).as_data_source(split=self._split)
        except (OSError, KeyError, ValueError) as error:
            raise TaskError(
                f"the prepared data set {self._folder} cannot be read ({error!r:.200}); delete that "
                "folder, and the next run prepares it again"
            ) from error


def from_folder(name: str, folder: str, split: str, parse: ParseRow) -> Problems:
    """Returns the problems of a folder's <split>*.jsonl files, in order of file name, then of line.

    `name` is the data set's name, for messages and the cache; `parse` makes a problem from a line's object.
    The prepared form is kept in the user's cache folder under a digest of the files, so changed files are
    prepared again. Raises TaskError if the folder or the files are missing, or `parse` rejects a line.
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
    """Returns the problems of the split `split` of the data set `name`; `urls`: split -> URL of its file.

    The first use downloads all splits, makes their problems by `parse`, and stores them in
    tensorflow-datasets' data folder. Raises TaskError if that fails; the message names the setting data_dir
    as an alternative.
    """
    builders = _builders()
    root = Path(builders.tfds.core.constants.DATA_DIR).expanduser()  # set by TFDS_DATA_DIR
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
        raise TaskError(f"{key}={folder} is not a folder; give a folder with {split}*.jsonl")
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
    """Returns the folder below `root` of the prepared data set; prepares a data set that is missing.

    `config`: the data set, a builders.Files. The data set is built in a temporary folder, which is then
    renamed, so the folder is complete or absent even if several processes build it at once.
    """
    builders = _builders()
    folder = root / builders.ArealProblems.name / config.name / builders.VERSION
    if folder.is_dir():
        return folder
    for url in config.urls.values():
        _reach(url)
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        # Below `root` as well: a rename is atomic only within one file system.
        with tempfile.TemporaryDirectory(prefix=".incomplete-", dir=root) as aside:
            builders.prepare(config, Path(aside)).rename(folder)
    except OSError as error:
        if folder.is_dir():  # another process was first; its folder has the same digest
            return folder
        raise TaskError(
            f"the data set {config.name} cannot be prepared in {root}: {error}; check "
            "that folder's permissions and free space"
        ) from error
    return folder


def _reach(url: str) -> None:
    """Raises TaskError if `url` does not open within 15 s.

    Without this check, tensorflow-datasets would retry the download for minutes.
    """
    try:
        urllib.request.urlopen(url, timeout=_REACH_S).close()
    except OSError as error:
        raise TaskError(f"{url} cannot be downloaded: {error}; check the network") from error


def _builders() -> Any:
    what = "problem sets are prepared by tensorflow-datasets"
    return import_extra("areal_jax.tasks.datasets.builders", what, "tasks")
