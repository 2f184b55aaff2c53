"""Folders of safetensors files: reads the files' headers, then parts of tensors; writes new folders.

A new folder is written under a hidden name in the same parent folder, and renamed when it is complete.
"""

from __future__ import annotations

import json
import re
import secrets
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from areal_jax.file_errors import space_left
from areal_jax.types import ArealError

SINGLE, INDEX, CONFIG = "model.safetensors", "model.safetensors.index.json", "config.json"
DTYPES: dict[str, Any] = {"float32": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16}
READABLE = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
ABOUT = "areal_jax"
"""Key of `config.json` under which an export records the origin of its parameters."""
SHARD_BYTES = 5 * 10**9
"""Maximum size of a written file in bytes; only a file with a single tensor may be larger."""


class FolderExists(ArealError):
    """Raised if the folder to be written exists already."""


class Stored(NamedTuple):
    """A tensor in a file: the name, dtype and shape from the file's header, without the data."""

    file: Path
    name: str
    dtype: str
    shape: tuple[int, ...]

    def read(self, *index: slice) -> np.ndarray:
        """Returns the tensor's data, or the part `index` of it.

        Each call opens the file anew, so that no memory pages of the file stay mapped afterwards.
        """
        with safe_open(self.file, "np") as file:
            return file.get_slice(self.name)[index or (slice(None),)]


def read_json(path: Path) -> dict[str, Any]:
    """Returns the JSON object in a file.

    Raises ArealError if the file is missing, cannot be read, or is not a JSON object.
    """
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ArealError(f"{path.parent} has no {path.name}; give a Hugging Face model folder") from None
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ArealError(f"{path} is not JSON ({error}); download it again") from None
    if not isinstance(value, dict):
        raise ArealError(f"{path} is not a JSON object; download it again")
    return value


def read_header(folder: Path) -> dict[str, Stored]:
    """Returns the header entry of every tensor in the folder, by name; reads no tensor data.

    A single file is read, as transformers does, though an index of earlier shards may be there. Raises
    ArealError if a file is missing or broken.
    """
    files = [folder / SINGLE]
    if (folder / INDEX).is_file() and not files[0].is_file():
        files = _indexed(folder)
    stored: dict[str, Stored] = {}
    for path in files:
        try:
            with safe_open(path, "np") as file:
                for name in file.keys():  # noqa: SIM118  # a handle, not a mapping
                    piece = file.get_slice(name)
                    stored[name] = Stored(path, name, piece.get_dtype(), tuple(piece.get_shape()))
        except FileNotFoundError:
            raise ArealError(
                f"{folder} has neither {SINGLE} nor {INDEX}; its weights are missing, download them"
            ) from None
        except (SafetensorError, OSError) as error:
            raise ArealError(
                f"{path} is truncated or not a safetensors file ({error}); download it again"
            ) from None
    return stored


def _indexed(folder: Path) -> list[Path]:
    where = read_json(folder / INDEX).get("weight_map")
    if not isinstance(where, dict) or not all(isinstance(name, str) for name in where.values()):
        raise ArealError(f"{folder / INDEX} has no weight_map from tensors to files; download it again")
    files = [folder / name for name in sorted(set(where.values()))]
    for path in files:
        if path.parent != folder or not path.is_file():
            raise ArealError(f"{INDEX} names {path.name}, which is missing in {folder}; download it too")
    return files


class NewTensor(NamedTuple):
    """A tensor to write; `value()` returns the data and is called just before the file is written."""

    name: str
    shape: tuple[int, ...]
    value: Callable[[], np.ndarray]


def write_tensors(folder: Path, entries: Sequence[NewTensor], dtype: str) -> None:
    """Write the tensors to one file, or to several and an index if one file would exceed SHARD_BYTES."""
    width = np.dtype(DTYPES[dtype]).itemsize
    shards = list(_shards(entries, width))
    names = [SINGLE]
    if len(shards) > 1:
        names = [f"model-{n:05}-of-{len(shards):05}.safetensors" for n in range(1, len(shards) + 1)]
    for name, shard in zip(names, shards, strict=True):
        save_tensors(folder / name, shard, dtype)
    if len(shards) > 1:
        where = {entry.name: name for name, shard in zip(names, shards, strict=True) for entry in shard}
        total = sum(width * int(np.prod(entry.shape)) for entry in entries)
        write_json(folder / INDEX, {"metadata": {"total_size": total}, "weight_map": where})


def require_dtype(dtype: str) -> None:
    """Raise ArealError unless files can be written in this dtype (`DTYPES`)."""
    if dtype not in DTYPES:
        raise ArealError(f"dtype={dtype} cannot be exported; choose one of: {', '.join(DTYPES)}")


def save_tensors(path: Path, entries: Iterable[NewTensor], dtype: str) -> None:
    """Write the tensors to one file.

    Raises ArealError if a value exceeds the dtype's range, or if the file cannot be written.
    """
    values = {entry.name: _cast(entry, dtype) for entry in entries}
    path.touch()
    mode = path.stat().st_mode  # the user's default mode; save_file makes a private file
    try:
        save_file(values, path, metadata={"format": "pt"})  # transformers asks for a format
    except SafetensorError as error:
        raise ArealError(
            f"cannot write {path} ({error}): {space_left(path)}; check free disk space"
        ) from None
    path.chmod(mode)


def _cast(entry: NewTensor, dtype: str) -> np.ndarray:
    try:
        with np.errstate(over="raise"):
            return np.ascontiguousarray(entry.value(), DTYPES[dtype])
    except FloatingPointError:
        raise ArealError(f"{entry.name} has values beyond {dtype}'s range; use --dtype float32") from None


def _shards(entries: Iterable[NewTensor], width: int) -> Iterator[list[NewTensor]]:
    shard: list[NewTensor] = []
    filled = 0
    for entry in entries:
        size = width * int(np.prod(entry.shape))
        if shard and filled + size > SHARD_BYTES:
            yield shard
            shard, filled = [], 0
        shard.append(entry)
        filled += size
    yield shard


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


@contextmanager
def staged(folder: Path) -> Iterator[Path]:
    """Yields a hidden folder, which is renamed to `folder` after the `with` block, or removed on an error.

    Raises FolderExists if `folder` exists before or after the block; ArealError if the folder cannot be
    written.
    """
    there = FolderExists(f"{folder} exists already; give another folder")
    if folder.exists():
        raise there
    stage = folder.with_name(f".{folder.name}.{secrets.token_hex(4)}")
    try:
        stage.mkdir(parents=True)
        yield stage
        stage.rename(folder)
    except OSError as error:
        if folder.exists():
            raise there from error
        space = space_left(folder)
        raise ArealError(
            f"cannot write {folder} ({error.strerror}); check free disk space ({space}) and write permission"
        ) from error
    finally:
        shutil.rmtree(stage, ignore_errors=True)


def remove_unfinished(folder: Path) -> None:
    """Deletes the hidden folders in `folder` that `staged` left, because its process was killed.

    No other process may write a folder into `folder` at the same time.
    """
    for path in folder.glob(".*"):
        if path.is_dir() and re.fullmatch(r"\..+\.[0-9a-f]{8}", path.name):
            shutil.rmtree(path)
