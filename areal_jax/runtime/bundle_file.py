"""The file of a bundle: named tensors and one JSON object, as safetensors: reading it executes nothing."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from areal_jax.trajectories.codec import ARRAYS
from areal_jax.trajectories.paths import paths_of
from areal_jax.types import ArealError, Group, Prompt, SampleId, Sampling, Trajectory

ABOUT = "areal_jax_bundle"
"""Key of the file's metadata that holds the JSON object."""

FORMAT = 1
"""Number of the file's format; raised by every change that older programs cannot read."""

STATE = "state."
"""The names of the train state's tensors begin with this."""


class BundleError(ArealError):
    """A file is not a bundle, or was changed after it was made; the message names the tensor."""


@dataclass(frozen=True)
class Bundle:
    """What a bundle holds. `about` is its JSON object; `runtime.bundle` says what is in it."""

    about: dict[str, Any]
    tensors: dict[str, np.ndarray]

    @property
    def bytes(self) -> int:
        """Size of the tensors in bytes."""
        return sum(tensor.nbytes for tensor in self.tensors.values())

    def write(self, path: Path) -> None:
        """Writes the file under a hidden name, and renames it when it is complete.

        Raises BundleError if `path` exists.
        """
        require_unused(path)
        about = self.about | {
            "format": FORMAT,
            "tensors": {name: _digest(tensor) for name, tensor in self.tensors.items()},
        }
        path.parent.mkdir(parents=True, exist_ok=True)
        new = path.with_name(f".{path.name}.new")
        tensors = {name: _contiguous(tensor) for name, tensor in self.tensors.items()}
        save_file(tensors, new, {ABOUT: json.dumps(about)})
        new.chmod(0o644)  # it is made to be sent to others
        new.rename(path)


def require_unused(path: Path) -> None:
    """Raises BundleError if `path` exists."""
    if path.exists():
        raise BundleError(f"{path} exists; give another file, or delete this one")


def read_bundle(path: Path) -> Bundle:
    """Reads a bundle; raises BundleError if it is none, or for the first tensor that was changed."""
    if not path.is_file():
        raise BundleError(f"there is no file {path}; `areal-jax bundle RUN --step N` makes one")
    try:
        with safe_open(path, "np") as file:
            about = (file.metadata() or {}).get(ABOUT)
            if about is None:
                raise BundleError(f"{path} is not a bundle; `areal-jax bundle RUN --step N` makes one")
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  # a handle
    except (SafetensorError, OSError) as error:
        raise BundleError(f"{path} is cut short or not a bundle ({error}); copy it again") from None
    about = json.loads(about)
    if about.get("format") != FORMAT:
        raise BundleError(
            f"{path} has format {about.get('format')}, but this areal-jax reads format {FORMAT}; use the "
            f"version that made it, {about.get('version')}"
        )
    for name in sorted(about["tensors"].keys() | tensors.keys()):
        written, here = about["tensors"].get(name), _digest(tensors[name]) if name in tensors else None
        if written != here:
            raise BundleError(
                f"{path}: the tensor {name} was changed after the bundle was made ({written or 'not there'}, "
                f"now {here or 'missing'}); get the file again from where it was made"
            )
    return Bundle(about, tensors)


def _digest(tensor: np.ndarray) -> str:
    head = f"{tensor.dtype}{list(tensor.shape)}:"
    return head + blake2b(tensor.tobytes(), digest_size=8).hexdigest()


def _contiguous(tensor: np.ndarray) -> np.ndarray:
    # numpy alone would make a scalar an array of one element.
    return np.ascontiguousarray(tensor).reshape(tensor.shape)


# --- groups -------------------------------------------------------------------------------------------------


def groups_to_plain(
    groups: Sequence[Group], is_redacted: bool
) -> tuple[list[dict[str, Any]], dict[str, np.ndarray]]:
    """Returns the trajectories of groups as JSON values, and their arrays by name.

    `is_redacted`: the prompts' token ids are left out, -1 in their place.
    """
    plain, tensors = [], {}
    for one in (one for group in groups for one in group.trajectories):
        for number, path in enumerate(paths_of(one)):
            arrays = {name: getattr(path, name) for name in ARRAYS}
            if is_redacted:
                arrays["tokens"] = np.concatenate(
                    [np.full(n := _prompt_tokens(one, path), -1, np.int32), path.tokens[n:]]
                )
            found = {name: array for name, array in arrays.items() if array is not None}
            tensors |= {_name(one.sample, number, name): array for name, array in found.items()}
        plain.append(
            {
                "sample": list(one.sample),
                "sampling": vars(one.sampling),
                "stop_reason": one.stop_reason,
                "reward": one.reward,
                "reward_parts": dict(one.reward_parts),
                "interruptions": one.interruptions,
                "on_update": one.on_update,
                "prompt": _prompt_tokens(one, one),
                "branches": [_prompt_tokens(one, path) for path in one.branches],
            }
        )
    return plain, tensors


def groups_from_plain(bundle: Bundle, prompts: Mapping[int, Sequence[int]]) -> tuple[Group, ...]:
    """Returns a bundle's groups. `prompts`: ordinal -> token ids, where the bundle was made without them.

    Raises BundleError if such a prompt has another length than the one that was left out.
    """
    members: dict[int, list[Trajectory]] = {}
    for plain in bundle.about["batch"]:
        sample = SampleId(*plain["sample"])
        rest: dict[str, Any] = {
            name: plain[name] for name in ("stop_reason", "reward", "reward_parts", "interruptions")
        }
        sampling = Sampling(**plain["sampling"] | {"stop": tuple(plain["sampling"]["stop"])})
        paths = []
        for number, count in enumerate([plain["prompt"], *plain.get("branches", ())]):
            arrays: dict[str, Any] = {
                name: bundle.tensors.get(_name(sample, number, name)) for name in ARRAYS
            }
            if sample.ordinal in prompts:
                arrays["tokens"] = _filled(sample, arrays["tokens"], prompts[sample.ordinal], count)
            paths.append(
                Trajectory(sample, sampling=sampling, on_update=plain["on_update"], **rest, **arrays)
            )
        members.setdefault(sample.ordinal, []).append(replace(paths[0], branches=tuple(paths[1:])))
    # The trainer reads a group's trajectories only.
    return tuple(Group(ordinal, Prompt(tokens=()), tuple(found)) for ordinal, found in members.items())


def _name(sample: SampleId, path: int, array: str) -> str:
    return f"batch.{'.'.join(map(str, sample))}." + (f"branch_{path}." if path else "") + array


def _prompt_tokens(one: Trajectory, path: Trajectory) -> int:
    """Returns the number of a path's tokens before the first sampled one, of the sample `one`."""
    count = int(np.logical_not(np.logical_or.accumulate(one.loss_mask)).sum())
    if np.array_equal(one.tokens[:count], path.tokens[:count]):
        return count  # in a branch, sampled tokens of an earlier path follow
    return int(np.logical_not(np.logical_or.accumulate(path.loss_mask)).sum())


def _filled(sample: SampleId, tokens: Any, prompt: Sequence[int], count: int) -> np.ndarray:
    if len(prompt) != count:
        raise BundleError(
            f"the bundle was made without its prompts, and the prompt of group {sample.ordinal} has "
            f"{len(prompt)} tokens here, but {count} in the run; use the run's data and tokenizer"
        )
    return np.concatenate([np.asarray(prompt, tokens.dtype), tokens[count:]])
