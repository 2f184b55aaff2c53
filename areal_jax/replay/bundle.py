"""A bundle: one file with which anybody can train one step of a run again, to attach to a report of a bug.

It holds the train state before the step, the step's batch, and the results: metrics, the digest of the
parameters and the digests of all tensors of the state after it. Leaves that no step changes, such as the
base below adapters, are not stored where `model.source` has them; then their digest is.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast, get_args

import jax
import numpy as np
from pydantic import PositiveInt, TypeAdapter, ValidationError

from areal_jax.assembly.devices import (
    header,
    place,
    repeats_bits,
    training_machine,
    use_compilation_cache,
    use_virtual_cpus,
)
from areal_jax.assembly.gpus import use_gpu_environment
from areal_jax.assembly.parts import Parts, assemble, make_learner, open_inputs, with_steps
from areal_jax.assembly.sources import open_source
from areal_jax.assembly.tokenizer_source import RANDOM
from areal_jax.config.loading import load_config, make_config, resolved
from areal_jax.config.sections import MeshConfig
from areal_jax.config.tree import Config
from areal_jax.models.config import ModelConfig
from areal_jax.models.model import Model
from areal_jax.models.rope import RopeScaling
from areal_jax.observe.waits import Timeline
from areal_jax.parallel.mesh import param_shardings
from areal_jax.plugin import version_of
from areal_jax.replay.bundle_file import (
    STATE,
    About,
    Bundle,
    BundleError,
    groups_from_plain,
    groups_to_plain,
    read_bundle,
    require_unused,
)
from areal_jax.replay.past_versions import OutOfReach, past_batch, past_versions
from areal_jax.replay.reopened import UNREPEATED, Reopened, differences_text, reopened
from areal_jax.replay.replay import Replay
from areal_jax.runtime.compute_choice import recorded_choice
from areal_jax.runtime.differences import MACHINE, Comparison, Difference, same
from areal_jax.runtime.recovery import Journaled, Note, journaled_batches
from areal_jax.runtime.trainer_loop import batch_again, train_batch
from areal_jax.trainer.learner import Learner
from areal_jax.trainer.state import TrainState
from areal_jax.types import ArealError, Group
from areal_jax.weights.digest import digest, leaf_digests, to_plain
from areal_jax.weights.manifest import combine

PARAMS = "params."


@dataclass
class BundleCheck:
    """What training a bundle's step again has given."""

    step: int
    metrics: dict[str, Any]
    """The step's metrics, computed here."""
    digest: str
    """Digest of the parameters after the step, computed here."""
    header: dict[str, tuple[Any, Any]] = field(default_factory=dict)
    """Name of a value on which bits depend -> (where the bundle was made, here), where they differ. Metrics
    are then compared within bounds, and no digest is."""
    largest: dict[str, float] = field(default_factory=dict)
    """Metric -> its relative difference, where metrics were compared within bounds."""
    difference: str = ""
    """The first difference; empty if all is equal, or within its bound."""


# --- making -------------------------------------------------------------------------------------------------


def make_bundle(
    folder: Path, step: int, target: Path, is_redacted: bool = False, note: Note = lambda _: None
) -> Bundle:
    """Writes the bundle of the run's batch `step` to the file `target`.

    `is_redacted`: prompts are left out; `verify_bundle` then takes them from the run's tasks, and needs their
    data. `note(text)` says the size before the file is written. Raises ArealError if the step was not trained
    or has a teacher, or if this machine gives other bits than the run's.
    """
    require_unused(target)
    with reopened(folder) as run:
        one = _journaled(run, step)
        config = run.stretch_of(step).config
        if config.algorithm.teacher:
            raise ArealError(
                f"algorithm.teacher={config.algorithm.teacher}: a bundle has no place for a teacher's "
                f"parameters; `areal-jax replay {folder} --until {step + 1}` trains the step again"
            )
        if differences := run.stretch_of(step).differences(run.stretch_of(step).header):
            raise _elsewhere(differences)
        parts = assemble(config)
        try:
            bundle = _bundle(run, parts, one, is_redacted, note)
        except Difference as difference:
            raise (_elsewhere(reason) if (reason := run.unlike(0, step)) else difference) from None
    note(f"{target}: {bundle.bytes:,} bytes in {len(bundle.tensors)} tensors")
    bundle.write(target)
    return bundle


def _elsewhere(differences: Mapping[str, tuple[Any, Any]]) -> ArealError:
    return ArealError(
        f"this machine differs from the run's ({differences_text(differences)}), so it may give the step "
        "other bits; make the bundle on a machine like the run's"
    )


def _journaled(run: Reopened, step: int) -> Journaled:
    count = sum(1 for _ in run.journal.events("BatchTrained"))
    if not 0 <= step < count:
        raise ArealError(
            f"--step={step}: {run.folder} has trained the steps 0 to {count - 1}; give one of them"
        )
    return journaled_batches(run.journal, step, step + 1)[0]


def _bundle(run: Reopened, parts: Parts, one: Journaled, is_redacted: bool, note: Note) -> Bundle:
    """Trains the step on the state before it, which is the bundle's, and compares it with the journal."""
    step = one.train.step
    state, groups = _before(run, parts, one, note)
    parts = with_steps(parts, one.steps)
    tensors, kept = _state_tensors(parts, state)
    batch, arrays = groups_to_plain(groups, is_redacted)
    before = digest(state.params)
    choice = recorded_choice(parts.config, one.metrics)
    again = batch_again(parts.config, parts.learner, step, groups, choice)
    clock = Timeline(None).clock("replay")
    after, value, metrics = train_batch(parts.config, parts.learner, state, again, clock)
    one.compare(Comparison(parts.config.wire_dtype), metrics, value.digest)
    about = {
        "version": version_of("areal-jax"),
        "run": run.config.run.name,
        "step": step,
        "config": resolved(parts.config),
        "model": _model_to_plain(parts.model),
        "header": header(parts.config) | {MACHINE: training_machine(parts.config)},
        "is_redacted": is_redacted,
        "batch": batch,
        "choice": choice,
        "kept": kept,
        "digest_before": before,
        "digest_after": value.digest,
        "after": leaf_digests(after),
        "metrics": _as_json(metrics),
    }
    return Bundle(cast(About, about), tensors | arrays)


def _before(run: Reopened, parts: Parts, one: Journaled, note: Note) -> tuple[TrainState, tuple[Group, ...]]:
    """Returns the train state before a journaled batch, and the batch's groups."""
    step = one.train.step
    try:
        groups, _ = past_batch(run, parts, one)
        exact = Comparison(parts.config.wire_dtype)
        (past,) = past_versions(run, parts, step, step, exact, note)
        return past.state, groups
    except OutOfReach as reason:
        note(f"replaying the run up to the step, because of this: {reason}")
    found: list[tuple[TrainState, tuple[Group, ...]]] = []

    def take(trained: int, state: TrainState, groups: tuple[Group, ...]) -> None:
        if trained == step:
            found.append((jax.tree.map(lambda leaf: jax.numpy.array(leaf, copy=True), state), groups))

    whole = Replay(run, note, take)
    whole.run(step + 1)
    if whole.found.header:
        raise _elsewhere(whole.found.header)
    return found[0]


def _state_tensors(parts: Parts, state: TrainState) -> tuple[dict[str, np.ndarray], dict[str, str] | None]:
    """Returns the state's tensors by name, and the digests of those that are left out; None if none is."""
    plain = to_plain(state)
    trained = {PARAMS + name for name in to_plain(parts.learner.trainable.of(state.params))}
    frozen = [name for name in plain if name.startswith(PARAMS) and name not in trained]
    # After supervised steps the frozen leaves are nowhere else.
    left_out = [] if parts.config.trainer.supervised.steps else frozen
    digests = leaf_digests({name: plain[name] for name in left_out}) if left_out else None
    return {STATE + name: np.asarray(leaf) for name, leaf in plain.items() if name not in left_out}, digests


# --- verifying ----------------------------------------------------------------------------------------------


def verify_bundle(path: Path, note: Note = lambda _: None) -> BundleCheck:
    """Trains the step of the bundle at `path` again on this machine, and compares the results.

    Raises BundleError if the file was changed, and ArealError if something that the bundle does not hold is
    not there, such as the base below adapters.
    """
    bundle = read_bundle(path)
    about = bundle.about
    note(f"{path}: step {about['step']} of {about['run']}, {bundle.bytes:,} bytes; no tensor was changed")
    use_gpu_environment(make_config(about["config"]))
    use_compilation_cache()
    if about["header"]["device_kind"] == "cpu":
        use_virtual_cpus(about["header"]["devices"])  # XLA divides work by it
    config = _config(about)
    model = _model_from_plain(about["model"])
    learner = make_learner(config, model, place(config), None)
    state = _state(bundle, config, learner)
    before = digest(state.params)
    if before != about["digest_before"]:
        raise BundleError(
            f"{path}: the parameters before the step have digest {before}, but in the run "
            f"{about['digest_before']}; get the file again from where it was made"
        )
    groups = groups_from_plain(bundle, _prompts(about, config))
    again = batch_again(config, learner, about["step"], groups, about["choice"])
    clock = Timeline(None).clock("replay")
    after, value, metrics = train_batch(config, learner, state, again, clock)
    own = header(config)
    differences = {
        name: (then, own.get(name))
        for name, then in about["header"].items()
        if own.get(name) != then and name != MACHINE
    }
    found = BundleCheck(about["step"], _as_json(metrics), value.digest, differences)
    _verify(about, found, config, lambda: leaf_digests(after))
    # An equal header leaves open whether CPU and packages are equal, and whether the device repeats bits.
    if found.difference and not differences and (unlike := _unlike(about, config)):
        found.header, found.difference = unlike, ""
        _verify(about, found, config, dict)
    return found


def _unlike(about: About, config: Config) -> dict[str, tuple[Any, Any]]:
    """Returns why bits may differ here though headers are equal, as `Reopened.unlike` does."""
    recorded, own = about["header"].get(MACHINE), training_machine(config)
    if recorded not in (None, own):
        return {MACHINE: (recorded, own)}
    return {} if repeats_bits() else UNREPEATED


def _verify(about: About, found: BundleCheck, config: Config, after: Callable[[], dict[str, str]]) -> None:
    """Stores the first difference in `found`; compares within bounds if the machines differ."""
    compared = Comparison(config.wire_dtype)
    if found.header:
        compared.loosen()
    try:
        _compare(about, found, compared, after)
    except Difference as difference:
        found.difference = str(difference)
    found.largest = compared.largest


def _compare(
    about: About, found: BundleCheck, compared: Comparison, after: Callable[[], dict[str, str]]
) -> None:
    place = f"step {found.step}"
    is_same_code = about["version"] == version_of("areal-jax")
    if is_same_code:  # another version may have other metrics
        same(place, "names of metrics", sorted(about["metrics"]), sorted(found.metrics))
    compared.metrics(place, about["metrics"], found.metrics)
    if not compared.is_bounded:
        tensors = after()
        same(place, "names of tensors", sorted(about["after"]), sorted(tensors))
        for name, own in sorted(tensors.items()):
            compared.digest(place, f"tensor {name}", about["after"][name], own)
    compared.digest(place, "digest of the parameters", about["digest_after"], found.digest)


def _config(about: About) -> Config:
    """Returns the bundle's config; without the devices of its run, as one device of this machine."""
    config = make_config(about["config"])
    if about["header"]["device_kind"] == jax.devices()[0].device_kind or config.trainer_devices == 1:
        return config
    return load_config(about["config"], *(f"trainer.mesh.{axis}=1" for axis in MeshConfig.model_fields))


def _state(bundle: Bundle, config: Config, learner: Learner) -> TrainState:
    """Returns the train state of a bundle, on the learner's devices."""
    like = learner.abstract_state()
    tensors = {
        name.removeprefix(STATE): leaf for name, leaf in bundle.tensors.items() if name.startswith(STATE)
    }
    kept = bundle.about["kept"]
    if kept:
        tensors |= {PARAMS + name: leaf for name, leaf in _kept(bundle, config, learner, kept).items()}
    leaves = []
    for name, leaf in to_plain(like).items():
        found = f"{tensors[name].dtype}{list(tensors[name].shape)}" if name in tensors else "missing"
        if found != (expected := f"{leaf.dtype}{list(leaf.shape)}"):
            raise BundleError(
                f"the bundle's tensor {name} is {found}, but this areal-jax expects {expected}; use the "
                f"version that made it, {bundle.about['version']}"
            )
        leaves.append(jax.device_put(tensors[name], leaf.sharding))
    return jax.tree.unflatten(jax.tree.structure(like), leaves)


def _kept(bundle: Bundle, config: Config, learner: Learner, kept: Mapping[str, str]) -> dict[str, Any]:
    """Returns the frozen leaves that the bundle left out, from the source of the model."""
    model, mesh = learner.model, learner.mesh
    base = model.base
    shardings = param_shardings(base.logical_axes, base.abstract_params, mesh)
    if config.model.source == RANDOM:
        params = jax.device_put(base.init(config.run.seed), shardings)
    else:
        params = open_source(config, {}).load(shardings)
    plain = to_plain(model.from_base(params, config.run.seed))
    frozen = {name: plain[name.removeprefix(PARAMS)] for name in kept}
    own = leaf_digests(frozen)
    for name, written in kept.items():
        if own[name] != written:
            raise BundleError(
                f"model.source={config.model.source} has another {name} ({own[name]}) than the bundle's run "
                f"({written}; digest of all {combine(dict(kept))}); give the model that the run had"
            )
    return {name.removeprefix(PARAMS): leaf for name, leaf in frozen.items()}


def _prompts(about: About, config: Config) -> dict[int, tuple[int, ...]]:
    """Returns ordinal -> token ids of the prompts that the bundle left out."""
    if not about["is_redacted"]:
        return {}
    inputs = open_inputs(config)
    return {
        ordinal: inputs.prompt_tokens(ordinal) for ordinal in {one["sample"][0] for one in about["batch"]}
    }


# --- plain values -------------------------------------------------------------------------------------------


def _model_to_plain(model: Model) -> dict[str, Any]:
    scaling = model.config.rope_scaling
    kind = {"rope_scaling_kind": type(scaling).__name__} if scaling else {}
    # The trainer needs no more of the tokenizer than the number of its ids.
    return dataclasses.asdict(model.config) | kind | {"known": model.tokenizer.vocab_size}


def _model_from_plain(plain: Mapping[str, Any]) -> Model:
    sizes = dict(plain)
    kind, known = sizes.pop("rope_scaling_kind", None), sizes.pop("known", None)
    fields = {one.name for one in dataclasses.fields(ModelConfig)}
    scalings = {one.__name__: one for one in get_args(RopeScaling)}
    if wrong := sorted(sizes.keys() ^ fields) + [kind] * (kind not in (None, *scalings)):
        raise BundleError(f"the bundle's model has or lacks {wrong[0]!r:.80}; use the version that made it")
    try:
        if kind:
            sizes["rope_scaling"] = TypeAdapter(scalings[kind]).validate_python(sizes["rope_scaling"])
        config = TypeAdapter(ModelConfig).validate_python(sizes)
        return Model(config, _Ids(TypeAdapter(PositiveInt).validate_python(known)))
    except (ValidationError, re.error) as error:
        raise BundleError(
            f"the bundle's model is not valid ({error}); use the version that made it"
        ) from None


@dataclass(frozen=True)
class _Ids:
    """Takes the place of a tokenizer: how many token ids a model knows."""

    vocab_size: int


def _as_json(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """Returns metrics as they are read back from JSON."""
    return json.loads(json.dumps(dict(metrics), default=float))
