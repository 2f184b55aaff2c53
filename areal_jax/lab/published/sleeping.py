"""Executors that sleep for the modelled time instead of computing, for hardware that is not there.

`sleeping_parts` takes the place of `assembly.parts.assemble`; everything else of a run is the real thing:
threads, driver, control plane, journal, reward workers and clocks. The times are those of a `Schedule`, and a
sample has the length that the simulator draws for it (`machines.drawn_work`), so a run and its simulation do
the same work.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from areal_jax.assembly.devices import Devices
from areal_jax.assembly.parts import Parts, open_inputs
from areal_jax.config.loading import load_config
from areal_jax.config.tree import Config
from areal_jax.generation.engine import Engine, Prefilling, PrefillingPrompt
from areal_jax.generation.programs import ResultTokens
from areal_jax.generation.slots import ExistingPrefix, Prefix
from areal_jax.lab.published.sleeping_task import SleepingTask
from areal_jax.lab.simulation.machines import drawn_work
from areal_jax.lab.simulation.schedule import Schedule
from areal_jax.models.model import Model
from areal_jax.parallel.mesh import make_mesh, one_device, replicated
from areal_jax.trainer.compiled import Forecast
from areal_jax.trainer.learner import Learner
from areal_jax.trainer.state import TrainState
from areal_jax.types import Batch, PolicyVersion, SampleId, VersionedParams
from areal_jax.weights.digest import digest
from areal_jax.weights.errors import VersionGoneError
from areal_jax.weights.publishing import Outgoing, Publisher, PublisherSettings
from areal_jax.weights.store import ParamStore, Probe
from areal_jax.weights.writer import OnFailure

REQUIRED_OF_TRAINER = (
    "logp_gap_mean", "logp_gap_p999", "logp_gap_max", "mismatch_kl", "support_mass_outside",
    "off_policy_weight_mean", "off_policy_capped_share", "effective_token_share", "effective_sequence_share",
    "grad_norm", "entropy",
)  # fmt: skip
"""The fields of a metrics row that an update makes; an update that only sleeps reports 0 for them."""

TOKEN = 1
"""Id of every token that a sleeping engine returns."""


def sleeping_parts(config: Config, schedule: Schedule) -> Parts:
    """Returns the parts of a run: engines, learner, weight store and task that sleep as `schedule` says.

    Sizes, strategy and bounds are those of `config`. Model, meshes and tasks are not: the model is a tiny one
    that computes nothing, and all roles name one device. Schedule's jitter, failures, faults and delays
    are left out.
    """
    plain = load_config("run.name=sleeping")
    config = config.model_copy(
        update={
            "model": plain.model,
            "generation": config.generation.model_copy(update={"page_tokens": None, "kv_tokens": None}),
            "trainer": config.trainer.model_copy(
                update={"mesh": plain.trainer.mesh, "supervised": plain.trainer.supervised}
            ),
            "runtime": config.runtime.model_copy(update={"host_tensor": 1, "placement": "split"}),
            "observe": plain.observe.model_copy(
                update={"live": False, "tensorboard": False, "report": False}
            ),
        }
    )
    inputs = open_inputs(config, [SleepingTask(schedule.reward_s)])
    # A sleeping executor uses no device, so all may name the same one.
    mesh = one_device()
    host = make_mesh({"tensor": 1}, jax.devices()[:1], "a host")
    devices = Devices("split", mesh, (host,) * config.runtime.hosts)
    own = (inputs.config, inputs.tasks, inputs.prompts, inputs.source, inputs.held_out, inputs.supervised)
    return SleepingParts(*own, devices, SleepingLearner(inputs.model, mesh, schedule), schedule=schedule)


@dataclass(frozen=True)
class SleepingParts(Parts):
    schedule: Schedule = field(default_factory=Schedule)

    def engine(self, host: int) -> Engine:
        g = self.config.generation
        return SleepingEngine(
            self.model,
            self.schedule,
            slots=g.slots,
            length=g.length,
            max_tokens=g.max_tokens,
            decode_steps=g.decode_steps,
            mesh=self.devices.hosts[host],
        )

    def store(self, probe: Probe, folder: Path, on_failure: OnFailure) -> ParamStore:
        settings = PublisherSettings(probe, "float32", self.config.runtime.deadline_s, on_failure)
        return SleepingStore(settings, self.schedule.publish_s)

    def first_state(self) -> TrainState:
        return numbered_state(0)


def numbered_state(version: PolicyVersion) -> TrainState:
    """Returns a train state with its version as the only parameter, so that versions differ in digest."""
    number = jnp.asarray(version, jnp.int32)
    return TrainState(number, number, {"version": jnp.full(1, version, jnp.float32)}, {})


def _sleep_until(instant_s: float) -> None:
    if (rest := instant_s - time.perf_counter()) > 0:
        time.sleep(rest)


# --- generation ---------------------------------------------------------------------------------------------


class Done(np.ndarray):
    """The results of a call that has ended; a host waits for them as for an array on a device."""

    def block_until_ready(self) -> Done:
        return self


class Slots:
    """The decode state of a sleeping engine: tokens of each slot's sample, present and at its end."""

    def __init__(self, slots: int) -> None:
        self.sampled, self.length = np.zeros(slots, np.int64), np.zeros(slots, np.int64)
        self.is_live = np.zeros(slots, bool)
        self.prefills = 0
        """Number of samples inserted since the last decode call."""


class SleepingEngine(Engine):
    """An engine with calls that return made-up tokens after the time that `schedule` gives them.

    As in the simulator, a sample takes `prefill_s` when it gets a slot, a decode step `token_s` times
    1 + live / crowd_slots for each version, an adoption `swap_s`, and a recomputed token `recompute_token_s`.
    """

    def __init__(
        self,
        model: Model,
        schedule: Schedule,
        *,
        slots: int,
        length: int,
        max_tokens: int,
        decode_steps: int,
        mesh: Mesh,
    ) -> None:
        super().__init__(model, slots=slots, length=length, decode_steps=decode_steps, mesh=mesh)
        self._schedule, self._max_tokens = schedule, max_tokens
        self.param_shardings = {"version": replicated(mesh)}
        self.canary = Probe(lambda params: params["version"])

    def _compile(self, programs: Any) -> None:
        """Does nothing: no call of this engine is a program."""

    def load_params(self, value: VersionedParams) -> VersionedParams:
        time.sleep(self._schedule.swap_s)
        return value

    def init_decode_state(self, *args: Any, **kwargs: Any) -> Any:
        return Slots(self.slots)

    def begin_prefill(self, prompts: Sequence[np.ndarray], existing: Any = ()) -> Prefilling:
        # A prompt's time is part of `insert`: the simulator counts samples, not prompts.
        complete = (PrefillingPrompt(tokens, len(tokens), 1, len(tokens)) for tokens in prompts)
        return Prefilling(None, tuple(complete))  # type: ignore[arg-type]

    def prefixes(self, prefilling: Prefilling) -> list[Prefix]:
        return [Prefix(None, one.tokens, np.asarray(one.count)) for one in prefilling.prompts]  # type: ignore[arg-type]

    def insert(
        self, prefix: Prefix, decode_state: Any, slot: int, *, request: Any = None, **settings: Any
    ) -> Any:
        prompt, sample = int(request.prompt_tokens), SampleId(*map(int, request.numbers[1:4]))
        state: Slots = decode_state
        state.sampled[slot] = int(prefix.true_length) - prompt
        state.length[slot] = min(
            drawn_work(self._schedule, sample, self._max_tokens).length, int(request.limit) - prompt
        )
        state.is_live[slot] = True
        state.prefills += int(state.sampled[slot] == 0)
        return state

    def generate(
        self, params: VersionedParams, decode_state: Any, only: Any = None, *settings: Any, **later: Any
    ) -> tuple[Any, ResultTokens]:
        began_s, costs, steps = time.perf_counter(), self._schedule, self.decode_steps
        state: Slots = decode_state
        stepped = state.is_live if only is None else state.is_live & only
        load = 1 + np.count_nonzero(stepped) / costs.crowd_slots
        seconds = state.prefills * costs.prefill_s + costs.token_s * steps * load
        state.prefills = 0
        new = np.where(stepped, np.minimum(steps, state.length - state.sampled), 0)
        state.sampled += new
        state.is_live &= state.sampled < state.length
        results = self._results(state, new, params.version)
        _sleep_until(began_s + seconds)
        return state, results

    def _results(self, state: Slots, new: np.ndarray, version: PolicyVersion) -> ResultTokens:
        steps = self.decode_steps
        data = np.zeros((self.slots, 3 * steps + 5), np.int32).view(Done)
        results = ResultTokens.of(data, steps, 0)
        rows = results.rows
        rows["tokens"], rows["logp"] = TOKEN, 0.0
        rows["valid"] = np.arange(steps) < new[:, None]
        rows["length"], rows["version"] = state.sampled, version
        rows["is_live"], rows["free_pages"] = state.is_live, self.slots - np.count_nonzero(state.is_live)
        return results

    def recompute(self, params: VersionedParams, decode_state: Any, only: Any = None) -> Any:
        rebuilt = decode_state.is_live if only is None else decode_state.is_live & only
        time.sleep(self._schedule.recompute_token_s * float(decode_state.sampled[rebuilt].sum()))
        return decode_state

    def free_resource(self, slot: int, decode_state: Any = None) -> Any:
        decode_state.is_live[slot] = False
        return decode_state

    def extract(self, slot: int, decode_state: Any, filled: int) -> Prefix:
        return Prefix(None, np.zeros(self.length, np.int32), np.asarray(filled))  # type: ignore[arg-type]

    def extract_existing(self, slot: int, decode_state: Any, tokens: np.ndarray) -> ExistingPrefix:
        return ExistingPrefix(None, np.array(tokens[:-1]))  # type: ignore[arg-type]

    def is_own(self, prefix: Prefix) -> bool:
        return prefix.cache is None


# --- training and weights -----------------------------------------------------------------------------------


class SleepingLearner(Learner):
    """A learner that updates in `train_s` of the schedule; the parameters are the version's number."""

    def __init__(self, model: Model, mesh: Mesh, schedule: Schedule) -> None:
        self.model, self.mesh, self._schedule = model, mesh, schedule
        self.compiled = []

    @property
    def takes_shared_prompts(self) -> bool:
        return False

    def forecast(self, state: TrainState, batch: Any, is_alone: bool = True) -> Forecast:
        return Forecast(0, {"update": 0})

    def abstract_state(self) -> TrainState:
        return jax.eval_shape(lambda: numbered_state(0))

    def versioned(self, state: TrainState) -> VersionedParams:
        return VersionedParams(int(state.version), state.params, digest(state.params))

    def own_rows(self, rows: int) -> np.ndarray:
        return np.arange(rows)

    def prepare(self, state: TrainState, batch: Batch, between: Callable[[Any], None] | None = None) -> Batch:
        return batch

    def update(
        self,
        state: TrainState,
        prepared: Any,
        between: Callable[[Any], None] | None = None,
        before_apply: Callable[[Any], None] | None = None,
    ) -> tuple[TrainState, dict[str, Any]]:
        time.sleep(self._schedule.train_s)
        metrics = dict.fromkeys(REQUIRED_OF_TRAINER, 0.0)
        return numbered_state(int(state.version) + 1), metrics | {
            "trained_tokens": float(prepared.loss_mask.sum())
        }


class SleepingStore(Publisher):
    """A store that commits each version `publish_s` after it was published, in a thread of its own."""

    def __init__(self, settings: PublisherSettings, publish_s: float) -> None:
        super().__init__("committing a version", settings)
        self._publish_s = publish_s
        self._latest: VersionedParams | None = None

    def _commit(self, version: Outgoing) -> None:
        time.sleep(self._publish_s)
        version.announce()
        self._latest = version.wire

    def latest(self) -> PolicyVersion | None:
        return None if self._latest is None else self._latest.version

    def load(self, version: PolicyVersion, shardings: Any) -> VersionedParams:
        """Returns the parameters of `version`. Raises VersionGoneError if it is not the latest."""
        if self._latest is None or self._latest.version != version:
            raise VersionGoneError.of(version, self.latest())
        return self._latest
