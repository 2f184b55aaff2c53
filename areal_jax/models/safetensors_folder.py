"""A folder of safetensors files: its header read whole, its tensors a piece at a time; and how one is made.

A folder is written beside its place under a hidden name and renamed when it is whole.
"""

from __future__ import annotations

import json
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

from areal_jax.types import ArealError

SINGLE, INDEX, CONFIG = "model.safetensors", "model.safetensors.index.json", "config.json"
DTYPES: dict[str, Any] = {"float32": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16}
READABLE = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
ABOUT = "areal_jax"
"""Key of `config.json` under which an export says where its parameters are from."""
SHARD_BYTES = 5 * 10**9
"""Largest file written, unless one tensor alone is larger."""


class FolderExists(ArealError):
    """A folder that was to be made is there already."""


class Stored(NamedTuple):
    """What a file's header says of one tensor."""

    file: Path
    name: str
    dtype: str
    shape: tuple[int, ...]

    def read(self, *index: slice) -> np.ndarray:
        """The tensor, or a piece of it. The file is opened anew, so that no page of it stays mapped."""
        with safe_open(self.file, "np") as file:
            return file.get_slice(self.name)[index or (slice(None),)]


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file. Raises ArealError for a file that is missing, unreadable or holds none."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ArealError(f"{path.parent} has no {path.name}; is it a Hugging Face model folder?") from None
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ArealError(f"{path} is no JSON ({error}); download it again") from None
    if not isinstance(value, dict):
        raise ArealError(f"{path} holds no JSON object; download it again")
    return value


def read_header(folder: Path) -> dict[str, Stored]:
    """Every tensor of the folder by name; no data is read. Raises ArealError for files missing or broken."""
    files = [folder / SINGLE]
    if (folder / INDEX).is_file():
        files = _indexed(folder)
    stored: dict[str, Stored] = {}
    for path in files:
        try:
            with safe_open(path, "np") as file:
                for name in file.keys():  # noqa: SIM118  # a handle, not a mapping
                    piece = file.get_slice(name)
                    stored[name] = Stored(path, name, piece.get_dtype(), tuple(piece.get_shape()))
        except FileNotFoundError:
            raise ArealError(f"{folder} has neither {SINGLE} nor {INDEX}; its weights are missing") from None
        except (SafetensorError, OSError) as error:
            raise ArealError(f"{path} is cut or no safetensors file ({error}); download it again") from None
    return stored


def _indexed(folder: Path) -> list[Path]:
    where = read_json(folder / INDEX).get("weight_map")
    if not isinstance(where, dict) or not all(isinstance(name, str) for name in where.values()):
        raise ArealError(f"{folder / INDEX} has no weight_map of tensor to file; download it again")
    files = [folder / name for name in sorted(set(where.values()))]
    for path in files:
        if path.parent != folder or not path.is_file():
            raise ArealError(f"{INDEX} names {path.name}, which {folder} does not hold; download it too")
    return files


class Entry(NamedTuple):
    """A tensor to write; `value` is called when its file is written."""

    name: str
    shape: tuple[int, ...]
    value: Callable[[], np.ndarray]


def write_tensors(folder: Path, entries: Sequence[Entry], dtype: str, limit_bytes: int = SHARD_BYTES) -> None:
    """One file, or several with an index where one would exceed `limit_bytes`; one at a time in memory."""
    width = np.dtype(DTYPES[dtype]).itemsize
    shards = list(_shards(entries, width, limit_bytes))
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
    """Raises ArealError for a dtype that no file is written in."""
    if dtype not in DTYPES:
        raise ArealError(f"dtype={dtype} cannot be exported; there are: {', '.join(DTYPES)}")


def save_tensors(path: Path, entries: Iterable[Entry], dtype: str) -> None:
    """One file. Raises ArealError for a value beyond the dtype, or a disk that does not take it."""
    values = {entry.name: _cast(entry, dtype) for entry in entries}
    path.touch()
    mode = path.stat().st_mode  # the user's, where save_file makes a private file
    try:
        save_file(values, path, metadata={"format": "pt"})  # transformers asks for a format
    except SafetensorError as error:
        raise ArealError(f"cannot write {path} ({error}); is the disk full?") from None
    path.chmod(mode)


def _cast(entry: Entry, dtype: str) -> np.ndarray:
    try:
        with np.errstate(over="raise"):
            return np.ascontiguousarray(entry.value(), DTYPES[dtype])
    except FloatingPointError:
        raise ArealError(f"{entry.name} holds values beyond {dtype}; write bfloat16 or float32") from None


def _shards(entries: Iterable[Entry], width: int, limit_bytes: int) -> Iterator[list[Entry]]:
    shard: list[Entry] = []
    filled = 0
    for entry in entries:
        size = width * int(np.prod(entry.shape))
        if shard and filled + size > limit_bytes:
            yield shard
            shard, filled = [], 0
        shard.append(entry)
        filled += size
    yield shard


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


@contextmanager
def staged(folder: Path) -> Iterator[Path]:
    """A hidden sibling to write into; it becomes `folder` at the end, and is removed after an error.

    Raises FolderExists where there is such a folder, also one that came to exist in the meantime; ArealError
    where the place cannot be written.
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
        raise ArealError(
            f"cannot write {folder} ({error.strerror}); is there room and permission?"
        ) from error
    finally:
        shutil.rmtree(stage, ignore_errors=True)
