"""The file of a bundle: named tensors and one JSON object, as safetensors: reading it executes nothing.

A file may be damaged, and its maker may be an attacker: everything in it is checked for its type before use.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from pathlib import Path
from typing import Annotated, Any, Literal, NotRequired

import numpy as np
from pydantic import ConfigDict, Field, TypeAdapter, ValidationError
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file
from typing_extensions import TypedDict

from areal_jax.file_errors import space_left
from areal_jax.trajectories.codec import ARRAYS, OPTIONAL
from areal_jax.trajectories.paths import paths_of
from areal_jax.types import ArealError, Group, Prompt, SampleId, Sampling, Trajectory

ABOUT = "areal_jax_bundle"
"""Key of the file's metadata that holds the JSON object."""

DIGEST = "areal_jax_bundle_digest"
"""Key of the file's metadata that holds the digest of the JSON object, as it is written there."""

FORMAT = 2
"""Number of the file's format; raised by every change that older programs cannot read."""

MOST_DEVICES = 4096

NAMES = (*ARRAYS, *OPTIONAL)
"""Arrays of a trajectory."""
STATE = "state."
"""The names of the train state's tensors begin with this."""


class BundleError(ArealError):
    """A file is not a bundle, or was changed after it was made; the message names the tensor."""


Count = Annotated[int, Field(ge=0)]


class SamplingFields(TypedDict):
    """The fields of `types.Sampling`."""

    temperature: float
    top_k: int
    top_p: float
    min_p: float
    max_tokens: int
    stop: Sequence[str]


class TrajectoryFields(TypedDict):
    """A trajectory of the batch without its arrays, which are tensors."""

    sample: tuple[Count, Count, Count]
    sampling: SamplingFields
    stop_reason: str
    reward: float | None
    reward_parts: dict[str, float]
    interruptions: Count
    on_update: Literal["recompute", "keep", "pinned", "drain"]
    prompt: Count
    """Number of tokens of the prompt."""
    branches: Sequence[Count]


class ChoiceFields(TypedDict):
    compute: Literal["packed", "tree", "auto"]
    tree_costs: NotRequired[tuple[float, float, float]]


class Header(TypedDict):
    """See `assembly.devices.header`."""

    __pydantic_config__ = ConfigDict(extra="allow")  # pyright: ignore

    device_kind: str
    devices: Annotated[int, Field(ge=1, le=MOST_DEVICES)]


class About(TypedDict):
    """A bundle's JSON object, beside its format and the digests of its tensors."""

    version: str
    """Of the areal-jax that made the bundle."""
    run: str
    step: Count
    config: dict[str, Any]
    model: dict[str, Any]
    header: Header
    is_redacted: bool
    batch: list[TrajectoryFields]
    choice: ChoiceFields
    kept: dict[str, str] | None
    """Leaf that the bundle left out -> its digest."""
    digest_before: str
    """Of the parameters before the step."""
    digest_after: str
    after: dict[str, str]
    """Tensor of the state after the step -> its digest."""
    metrics: dict[str, Any]


class Written(About):
    format: int
    tensors: dict[str, str]
    """Name -> digest."""


_WRITTEN = TypeAdapter(Written)

DTYPES = ("BOOL", "I8", "U8", "I16", "U16", "F16", "I32", "U32", "F32", "I64", "U64", "F64")
"""The dtypes of safetensors that numpy has."""


@dataclass(frozen=True)
class Bundle:
    """What a bundle holds: its JSON object, and tensors by name."""

    about: About
    tensors: dict[str, np.ndarray]

    @property
    def bytes(self) -> int:
        """Size of the tensors in bytes."""
        return sum(tensor.nbytes for tensor in self.tensors.values())

    def write(self, path: Path) -> None:
        """Writes the file under a hidden name, and renames it when it is complete.

        Raises BundleError if `path` exists or cannot be written.
        """
        require_unused(path)
        about = self.about | {
            "format": FORMAT,
            "tensors": {name: _digest(tensor) for name, tensor in self.tensors.items()},
        }
        path.parent.mkdir(parents=True, exist_ok=True)
        new = path.with_name(f".{path.name}.new")
        tensors = {name: _contiguous(tensor) for name, tensor in self.tensors.items()}
        text = json.dumps(about)
        try:
            save_file(tensors, new, {ABOUT: text, DIGEST: _text_digest(text)})
            new.chmod(0o644)  # it is made to be sent to others
            new.rename(path)
        except SafetensorError as error:
            raise BundleError(f"{path} could not be written ({error}): {space_left(path)}") from None
        finally:
            new.unlink(missing_ok=True)


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
            metadata = file.metadata() or {}
            if ABOUT not in metadata:
                raise BundleError(f"{path} is not a bundle; `areal-jax bundle RUN --step N` makes one")
            about = _about(path, metadata)
            names = file.keys()
            if wrong := next(
                (name for name in names if file.get_slice(name).get_dtype() not in DTYPES), None
            ):
                raise BundleError(
                    f"{path}: the tensor {wrong} is {file.get_slice(wrong).get_dtype()}, which no bundle has"
                )
            tensors = {name: file.get_tensor(name) for name in names}
    except (SafetensorError, OSError) as error:
        raise BundleError(f"{path} is cut short or not a bundle ({error}); copy it again") from None
    for name in sorted(about["tensors"].keys() | tensors.keys()):
        written, here = about["tensors"].get(name), _digest(tensors[name]) if name in tensors else None
        if written != here:
            raise BundleError(
                f"{path}: the tensor {name} was changed after the bundle was made ({written or 'not there'}, "
                f"now {here or 'missing'}); get the file again from where it was made"
            )
    return Bundle(about, tensors)


def _about(path: Path, metadata: Mapping[str, str]) -> Written:
    """Returns the JSON object of the bundle at `path`, which has this metadata."""
    again = "get the file again from where it was made"
    try:
        about = json.loads(metadata[ABOUT])
    except (ValueError, RecursionError) as error:
        raise BundleError(f"{path}: its description is not JSON ({error}); {again}") from None
    number = about.get("format") if isinstance(about, dict) else None
    if number != FORMAT:
        maker = f"the version that made it, {about.get('version')}" if number else "the file of a bundle"
        raise BundleError(
            f"{path} has format {number}, but this areal-jax reads format {FORMAT}; use {maker}"
        )
    if metadata.get(DIGEST) != _text_digest(metadata[ABOUT]):
        raise BundleError(f"{path}: its description was changed after the bundle was made; {again}")
    try:
        return _WRITTEN.validate_python(about)
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(map(str, first["loc"]))
        raise BundleError(f"{path}: {key}={first['input']!r:.80}: {first['msg']}; {again}") from None


def _text_digest(text: str) -> str:
    return blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()


def _digest(tensor: np.ndarray) -> str:
    head = f"{tensor.dtype}{list(tensor.shape)}:"
    return head + blake2b(tensor.tobytes(), digest_size=8).hexdigest()


def _contiguous(tensor: np.ndarray) -> np.ndarray:
    # numpy alone would make a scalar an array of one element.
    return np.ascontiguousarray(tensor).reshape(tensor.shape)


# --- groups -------------------------------------------------------------------------------------------------


def groups_to_plain(
    groups: Sequence[Group], is_redacted: bool
) -> tuple[list[TrajectoryFields], dict[str, np.ndarray]]:
    """Returns the trajectories of groups as JSON values, and their arrays by name.

    `is_redacted`: the prompts' token ids are left out, -1 in their place.
    """
    plain, tensors = [], {}
    for one in (one for group in groups for one in group.trajectories):
        for number, path in enumerate(paths_of(one)):
            arrays = {name: getattr(path, name) for name in NAMES}
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
        sampling = Sampling(**{**plain["sampling"], "stop": tuple(plain["sampling"]["stop"])})
        paths = []
        for number, count in enumerate([plain["prompt"], *plain["branches"]]):
            arrays = _arrays(bundle, sample, number)
            if sample.ordinal in prompts:
                arrays["tokens"] = _filled(sample, arrays["tokens"], prompts[sample.ordinal], count)
            paths.append(
                Trajectory(sample, sampling=sampling, on_update=plain["on_update"], **rest, **arrays)
            )
        members.setdefault(sample.ordinal, []).append(replace(paths[0], branches=tuple(paths[1:])))
    # The trainer reads a group's trajectories only.
    return tuple(Group(ordinal, Prompt(tokens=()), tuple(found)) for ordinal, found in members.items())


def _arrays(bundle: Bundle, sample: SampleId, path: int) -> dict[str, Any]:
    """Returns a path's arrays by name; raises BundleError unless each has its dtype, for the same tokens."""
    arrays: dict[str, Any] = {name: bundle.tensors.get(_name(sample, path, name)) for name in NAMES}
    tokens = None if arrays["tokens"] is None else len(np.atleast_1d(arrays["tokens"]))
    for name, array in arrays.items():
        dtype, ndim = _ARRAYS[name]
        if array is None and name in ("support", *OPTIONAL):
            continue
        if array is None or array.dtype != dtype or array.ndim != ndim or len(array) != tokens:
            found = "missing" if array is None else f"{array.dtype}{list(array.shape)}"
            raise BundleError(
                f"the bundle's {_name(sample, path, name)} is {found}, not {dtype} of {ndim} dimensions for "
                f"{tokens} tokens; get the file again from where it was made"
            )
    return arrays


_ARRAYS = dict.fromkeys(NAMES, ("int32", 1)) | {
    "loss_mask": ("bool", 1), "behavior_logp": ("float32", 1), "support": ("int32", 2),
    "experts": ("uint8", 2),
}  # fmt: skip
"""Array of a trajectory -> its dtype and number of dimensions."""


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
