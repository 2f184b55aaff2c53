"""What a process of a cluster does in its role: generate, or train. Each begins when the controller says.

A process that is told to begin again, by a controller that came back, forgets what the last one asked for and
keeps what it holds: weights, compiled programs, the train state.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack, closing
from functools import cached_property
from pathlib import Path
from typing import Any

import jax

from areal_jax.config import Config
from areal_jax.control.events import Event, SampleFailed, SampleFinished
from areal_jax.generation.canary import canary
from areal_jax.generation.commands import Start, Stop
from areal_jax.generation.engine import Engine
from areal_jax.generation.host import Host
from areal_jax.observe.waits import Timeline, process_timeline
from areal_jax.parallel.mesh import make_mesh
from areal_jax.runtime.assembly import Parts, assemble_on, make_engine, open_inputs
from areal_jax.runtime.devices import Devices, use_virtual_cpus
from areal_jax.runtime.meeting import connect, open_journal, own_address, secret
from areal_jax.runtime.member import Post
from areal_jax.runtime.messages import Begin, Cancelled, Decode, Ready, TrainOn, Weights
from areal_jax.runtime.processes import joined
from areal_jax.runtime.recovery import start_state, train_again
from areal_jax.runtime.remote import COUNTS
from areal_jax.runtime.trainer import TrainBatch, Trainer
from areal_jax.runtime.turns import OwnDevices
from areal_jax.trainer.checkpoint import Checkpointer
from areal_jax.trajectories.plan import BatchPlan
from areal_jax.trajectories.redis import RedisQueue
from areal_jax.types import SampleId, Trajectory
from areal_jax.weights.orbax import OrbaxStore
from areal_jax.weights.prefetch import Prefetcher
from areal_jax.weights.reader import TransferReader
from areal_jax.weights.store import ParamPublisher, ParamReader
from areal_jax.weights.transfer import TransferStore

GAPS = 1000
"""Decode gaps that a sign of life carries at most."""


# --- generate -----------------------------------------------------------------------------------------------


def generate(config: Config, folder: Path, name: str) -> None:
    """A generation host, until told to end. Raises ArealError."""
    inputs = open_inputs(config)
    use_virtual_cpus(config.runtime.host_tensor)
    mesh = make_mesh({"tensor": config.runtime.host_tensor}, jax.devices(), name)
    engine = make_engine(config.generation, inputs.model, mesh)
    timeline = process_timeline(folder, name)
    spent = _Spent(name, timeline)
    work: _Hosting | None = None
    beat = lambda: spent() | (work.figures() if work is not None else {})  # noqa: E731
    with (
        closing(timeline),
        connect(config) as broker,
        Post(broker, "generate", name, config.runtime.deadline_s, beat) as post,
        ExitStack() as running,
    ):
        for command in post.commands():
            match command:
                case Begin(_, _, weights):
                    if work is None:
                        work = _Hosting(config, folder, engine, weights, timeline, post)
                        running.callback(work.end)
                    work.begin(weights)
                case Weights(_, address) if work is not None:
                    work.find_weights(address)
                case Decode(_, samples, prompt, min_version) if work is not None:
                    work.start(Start(samples, prompt, min_version))
                case Cancelled(_, samples) if work is not None:
                    work.stop(samples)


class _Hosting:
    """A host's thread and what it was asked for, from its first Begin on; made, it compiles nothing more."""

    def __init__(
        self, config: Config, folder: Path, engine: Engine, weights: str, timeline: Timeline, post: Post
    ) -> None:
        c, self._post, self._slots = config, post, engine.slots
        self._reader = _reader(config, folder, weights, engine)
        engine.warm(engine.load_params(engine.blank(config.weights.wire_dtype)))
        self._store = Prefetcher(self._reader, engine.param_shardings, engine.load_params)
        self._asked: dict[SampleId, None] = {}  # and not ended
        self._beats = itertools.count()
        self._host = Host(
            post.name,
            engine,
            self._store,
            self._tell,
            seed=c.run.seed,
            sampling=c.generation.sampling,
            on_update=c.on_update,
            versions=c.parameter_sets,
            clock=timeline.actor(post.name),
            deadline_s=c.runtime.deadline_s,
            is_server=True,
        )
        self._deadline_s = c.runtime.deadline_s
        self._thread = threading.Thread(
            target=_guarded(self._host.run, post.fail), name=post.name, daemon=True
        )
        self._thread.start()

    def begin(self, weights: str) -> None:
        self.stop(tuple(self._asked))
        self.find_weights(weights)
        post = self._post
        post.say(Ready(post.name, post.incarnation, post.epoch, slots=self._slots))

    def find_weights(self, address: str) -> None:
        if isinstance(self._reader, TransferReader) and address != self._reader.address:
            self._reader.address = address
            self._store.forget()

    def start(self, command: Start) -> None:
        self._asked |= dict.fromkeys(command.samples)
        self._host.inbox.put(command)

    def stop(self, samples: tuple[SampleId, ...]) -> None:
        for sample in samples:
            self._asked.pop(sample, None)
        if samples:  # without any, Stop would end the host
            self._host.inbox.put(Stop(samples))

    def end(self) -> None:
        """A process that ends while a thread of it computes is aborted."""
        self._host.inbox.put(Stop())
        self._thread.join(self._deadline_s)
        self._store.close(self._deadline_s)

    def figures(self) -> dict[str, Any]:
        """Since its start, for its signs of life."""
        gaps, said = self._host.gaps_s, self._host.statistics()
        return {
            "number": next(self._beats),
            "at_s": time.monotonic(),
            "gaps_s": [gaps.popleft() for _ in range(min(len(gaps), GAPS))],
            "statistics": {count: getattr(said, count) for count in COUNTS},
        }

    def _tell(self, event: Event, trajectory: Trajectory | None) -> None:
        if isinstance(event, SampleFinished | SampleFailed):
            self._asked.pop(event.sample, None)
        self._post.tell(event, trajectory)


def _reader(config: Config, folder: Path, address: str, engine: Engine) -> ParamReader:
    c, deadline_s = config, config.runtime.deadline_s
    if c.weights_backend == "transfer":
        return TransferReader(address, engine.canary, deadline_s, secret())
    return OrbaxStore(folder / "weights", engine.canary, c.weights.wire_dtype, deadline_s=deadline_s)


# --- train --------------------------------------------------------------------------------------------------


def train(
    config: Config, folder: Path, index: int, processes: int, coordinator: str, beat: Callable[[str], None]
) -> None:
    """Process `index` of the trainer's group, until told to end; then its newest state is checkpointed.

    `coordinator`: host:port of process 0, where there are several. `beat` hears each of its activities.
    Raises ArealError.
    """
    use_virtual_cpus(-(-config.trainer.mesh.devices // processes))
    with joined(coordinator, processes, index):
        _train(config, folder, f"trainer-{index}", beat)


def _train(config: Config, folder: Path, name: str, beat: Callable[[str], None]) -> None:
    mesh = make_mesh(config.trainer.mesh.shape, jax.devices(), "the trainer")
    parts = assemble_on(Devices("split", mesh, ()), open_inputs(config))
    deadline_s = config.runtime.deadline_s
    timeline = process_timeline(folder, name)
    timeline.actor("trainer").follow(beat)
    spent, work = _Spent("trainer", timeline), None
    with (
        closing(timeline),
        connect(config) as broker,
        Post(broker, "trainer", name, deadline_s, spent) as post,
        ExitStack() as running,
    ):
        for command in post.commands():
            match command:
                case Begin(_, version):
                    if work is None:
                        work = _Training(parts, folder, version, timeline, post)
                        running.callback(work.end)
                    work.begin(version)
                case TrainOn() if work is not None:
                    work.take(command)


class _Training:
    """The trainer's thread and what it holds, from its first Begin on."""

    def __init__(self, parts: Parts, folder: Path, version: int, timeline: Timeline, post: Post) -> None:
        c = parts.config
        self._parts, self._post, self._folder = parts, post, folder
        self._deadline_s = c.runtime.deadline_s
        state, restored = start_state(parts, folder, version, post.note)
        self._store = _publisher(parts, folder, post.fail)
        checkpointer = Checkpointer(folder / "checkpoints", restored, post.fail)
        clock = timeline.actor("trainer")
        self._trainer = Trainer(
            parts, state, self._store, checkpointer, post.tell, OwnDevices(), clock, post.note
        )
        self._thread = threading.Thread(
            target=_guarded(self._trainer.run, post.fail), name="trainer", daemon=True
        )
        self._asked = -1

    def begin(self, version: int) -> None:
        """Be at the journal's version and have it published; a version beyond it is told of already."""
        if not self._thread.is_alive():
            if version >= 0:
                last, journal = max(version, 0), self._journal
                for event in train_again(self._parts, self._trainer, journal, last, self._post.note):
                    self._post.tell(event)
            self._wire = self._store.publish(self._parts.learner.versioned(self._trainer.state))
            self._store.wait(self._deadline_s)
            self._thread.start()
        self._post.say(
            Ready(
                self._post.name,
                self._post.incarnation,
                self._post.epoch,
                version=self._wire.version,
                digest=self._wire.digest,
                weights=getattr(self._store, "address", ""),
                shares_prompts=self._parts.learner.takes_shared_prompts,
            )
        )

    def take(self, asked: TrainOn) -> None:
        """Nothing where it was asked for before: then it is trained, or on its way."""
        if asked.step <= self._asked or asked.step < int(self._wire.version):
            return
        self._asked = asked.step
        plan = BatchPlan.from_wire(asked.plan)
        self._trainer.inbox.put(TrainBatch(asked.step, asked.ordinals, plan, self._read))

    def _read(self, places: Mapping[int, SampleId]) -> dict[int, Trajectory]:
        """Trajectories of this process's rows."""
        found = self._journal.trajectories(list(places.values()))
        return {place: found[sample] for place, sample in places.items()}

    def end(self) -> None:
        """Once what it was asked for is trained, its newest state is checkpointed."""
        self._trainer.inbox.put(None)
        if self._thread.is_alive():
            self._thread.join(self._deadline_s)
        if "_journal" in vars(self):
            self._journal.close()

    @cached_property
    def _journal(self) -> RedisQueue:
        """To read from the first Begin on: there is one by then."""
        return open_journal(self._parts.config, self._folder, readonly=True)


def _publisher(parts: Parts, folder: Path, fail: Callable[[BaseException], None]) -> ParamPublisher:
    c = parts.config
    probe = canary(parts.model)
    if c.weights_backend == "transfer":
        deadline_s = c.runtime.deadline_s
        address = f"{own_address(c)}:0"
        return TransferStore(probe, c.weights.wire_dtype, address, deadline_s, secret(), on_failure=fail)
    keep = c.weights.keep_versions
    return OrbaxStore(folder / "weights", probe, c.weights.wire_dtype, keep, c.runtime.deadline_s, fail)


class _Spent:
    """An actor's seconds by activity since its start, in its signs of life."""

    def __init__(self, actor: str, timeline: Timeline) -> None:
        self._actor, self._timeline = actor, timeline
        self._totals: dict[str, float] = {}

    def __call__(self) -> dict[str, Any]:
        for activity, seconds in self._timeline.take_totals().get(self._actor, {}).items():
            self._totals[activity] = self._totals.get(activity, 0.0) + seconds
        self._timeline.flush()
        return {"totals": dict(self._totals)}


def _guarded(body: Callable[[], Any], fail: Callable[[BaseException], None]) -> Callable[[], None]:
    def run() -> None:
        try:
            body()
        except Exception as error:  # noqa: BLE001 - handed to the main thread, which raises it
            fail(error)

    return run
