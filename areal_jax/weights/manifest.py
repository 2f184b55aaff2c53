"""The manifest of a version on disk, and the check of the version's files, without jax.

`weights.staged` writes and reads versions, and says what protects what.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from areal_jax.weights.errors import StagedError

MANIFEST, STATE = "manifest.json", "state"

FORMAT = 1
"""Number of the manifest's format; increased with each change that older programs cannot read."""

_CHUNK = re.compile(r"\d+(\.\d+)*")


class Manifest(NamedTuple):
    """The contents of a version's manifest, which `read_manifest` has found undamaged."""

    leaves: dict[str, str]
    """Leaf path -> digest of the leaf, `dtype[shape]:sum`, as `digest.leaf_digests` returns it."""
    files: dict[str, list[Any]]
    """Path of a file below `state` -> [size in bytes, CRC-32 in hex]. A chunk (data of a leaf) has None
    instead of the CRC-32, because the leaf's digest covers these data.
    """
    about: dict[str, Any]
    """Further facts, as plain JSON values: what `about()` returned when the version was written."""


def committed(folder: Path) -> list[int]:
    """Returns the complete versions in `folder` (those with a manifest), oldest first."""
    # No glob: it takes a folder without read permission for an empty one.
    names = os.listdir(folder) if folder.is_dir() else []
    numbers = [int(name) for name in names if name.isascii() and name.isdigit()]
    return sorted(n for n in numbers if (folder / str(n) / MANIFEST).exists())


def render(manifest: Mapping[str, Any]) -> bytes:
    """Returns the bytes of a manifest file: `manifest`, FORMAT, and a digest of both, as sorted JSON."""
    contents = {"format": FORMAT, **{key: manifest[key] for key in manifest if key != "digest"}}
    text = json.dumps(contents, sort_keys=True).encode()
    whole = {**contents, "digest": hashlib.blake2b(text, digest_size=16).hexdigest()}
    return json.dumps(whole, sort_keys=True, indent=1).encode() + b"\n"


def read_manifest(path: Path) -> Manifest:
    """Returns the manifest in a version's folder; raises StagedError if the file is missing or damaged."""
    try:
        data = (path / MANIFEST).read_bytes()
        found = json.loads(data)
        is_whole = isinstance(found, dict) and render(found) == data
    except (OSError, ValueError) as error:
        raise StagedError(
            f"{path} is damaged: {MANIFEST} cannot be read ({brief(error)}); check the disk. An older "
            "version is used if there is one"
        ) from None
    if not is_whole or found["format"] != FORMAT:
        raise StagedError(
            f"{path} is damaged: {MANIFEST} was changed after it was written, or is not of format {FORMAT}; "
            "use the areal-jax version that wrote it. An older version is used if there is one"
        )
    if str(found["version"]) != path.name:
        raise StagedError(
            f"{path} contains version {found['version']}; rename the folder to {found['version']}"
        )
    return Manifest(found["leaves"], found["files"], found["about"])


def checked_manifest(path: Path) -> Manifest:
    """Returns the manifest in a version's folder, which names the folder's files with their sizes and sums.

    Raises StagedError if the manifest or a file is missing or damaged. A chunk of a leaf may have other data.
    """
    manifest = read_manifest(path)
    _require_files(path, manifest)
    return manifest


def _require_files(path: Path, manifest: Manifest) -> None:
    try:
        found = files(path / STATE)
    except OSError as error:
        raise StagedError(
            f"{path} cannot be read ({brief(error)}); check its permissions and the disk"
        ) from None
    for name, was in manifest.files.items():
        if found.get(name) != was:
            what = f"bytes and checksum {found[name]}, but {was} when written" if name in found else "missing"
            raise StagedError(f"{path} is damaged: file {name}: {what}; check the disk")


def files(folder: Path) -> dict[str, list[Any]]:
    paths = sorted(path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): _file(path) for path in paths}


def _file(path: Path) -> list[Any]:
    # Chunks are as large as the parameters, and the leaves' digests, computed on the devices, cover them.
    is_chunk = _CHUNK.fullmatch(path.name) is not None
    return [path.stat().st_size, None if is_chunk else f"{zlib.crc32(path.read_bytes()):08x}"]


def combine(leaves: Mapping[str, str]) -> str:
    # Sorted, so that a tree and the flat map of its leaves in a manifest have the same digest.
    text = "\n".join(f"{name}={value}" for name, value in sorted(leaves.items()))
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def brief(error: Exception) -> str:
    return (str(error) or type(error).__name__).splitlines()[0][:200]
