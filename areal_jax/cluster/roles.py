"""The generate, trainer and evaluate roles. A process starts to work when the controller sends Begin.

The controller sends Begin again after its own restart, after Redis lost its data, and to a process that was
lost and is back. A process then forgets all commands from before this Begin, but keeps its weights, its
compiled programs, its train state and the samples that only it can have.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack, closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax

from areal_jax.assembly.device_memory_remedies import HOST, explained
from areal_jax.assembly.devices import (
    host_mesh,
    params_bytes,
    place_trainer,
    use_compilation_cache,
    use_virtual_cpus,
)
from areal_jax.assembly.parts import Parts, assemble_on, open_inputs, training_engine
from areal_jax.cluster.meeting import own_address, secret
from areal_jax.cluster.member import ControllerLink
from areal_jax.cluster.messages import Begin, Envelope, WeightsAddress
from areal_jax.cluster.remote import COUNTS
from areal_jax.cluster.trainer_group import joined
from areal_jax.config.tree import Config
from areal_jax.control.events import (
    Cancel,
    Continue,
    Dispatch,
    Event,
    Fetch,
    Hold,
    HostAdopted,
    HostCommand,
    Move,
    MoveFailed,
    SampleFailed,
    SampleFinished,
    TakeBack,
    Train,
)
from areal_jax.episodes.conversation import TurnRequest
from areal_jax.evaluation.follower import Follower
from areal_jax.generation.canary import canary
from areal_jax.generation.commands import HostSample, Stop, command_of
from areal_jax.generation.engine import Engine
from areal_jax.generation.moving.forecast import is_move_cheaper, prefill_tokens_per_s
from areal_jax.generation.moving.page_runs import used_bytes
from areal_jax.generation.moving.receiver import Receiver
from areal_jax.generation.moving.sender import make_sender
from areal_jax.generation.moving.ticket import MoveError
from areal_jax.generation.moving.ticket import decode as decode_ticket
from areal_jax.observe.threads import reporting_thread
from areal_jax.observe.waits import Timeline, process_timeline
from areal_jax.parallel.agreement import leads
from areal_jax.runtime.recovery import Journaled, Repetition, require_one_run, start_state
from areal_jax.runtime.talking import training_host
from areal_jax.runtime.trainer_loop import TrainBatch, Trainer
from areal_jax.serving.run_services import make_endpoint, make_gateway
from areal_jax.trainer.checkpoint import Checkpointer
from areal_jax.trajectories.codec import decode
from areal_jax.trajectories.plan import BatchPlan
from areal_jax.types import ArealError, SampleId, Trajectory, VersionedParams
from areal_jax.weights.folder import weights_folder
from areal_jax.weights.orbax import OrbaxReader, OrbaxStore
from areal_jax.weights.prefetch import Prefetcher
from areal_jax.weights.publishing import PublisherSettings
from areal_jax.weights.store import FetchingReader, ParamPublisher
from areal_jax.weights.transfer.publisher import TransferStore
from areal_jax.weights.transfer.reader import TransferReader

FETCH_S = 30.0
"""Seconds after which samples that another host offers, and does not deliver, stay on that host."""

MOVES = "moves"
"""Folder in the run's folder with the KV of samples on the move, where it cannot go from device to device."""

GAPS = 1000
"""Maximum number of decode gaps (times between two decode calls) that one heartbeat reports."""


# --- generate -----------------------------------------------------------------------------------------------


def generate(config: Config, folder: Path, name: str) -> None:
    """Runs the generation host `name` (generate-INDEX) until the controller sends End.

    Raises ArealError if the host fails, if End contains an error as its reason, or if the controller has
    shown no heartbeat for runtime.deadline_s seconds.
    """
    use_compilation_cache()
    inputs = open_inputs(config)
    mesh = host_mesh(config, name)
    engine = training_engine(config.generation, config, inputs.model, mesh)
    timeline = process_timeline(folder, name)
    work: _Hosting | None = None
    with closing(timeline), ControllerLink(config, "generate", name) as link, ExitStack() as running:
        for message in link.commands():
            match message:
                case Begin(_, _, weights):
                    if work is None:
                        work = _Hosting(config, folder, engine, weights, timeline, link)
                        running.callback(work.end)
                        link.figures = work.figures
                    work.begin(weights)
                case WeightsAddress(_, address) if work is not None:
                    work.find_weights(address)
                case Envelope(_, action, payload) if work is not None and isinstance(action, HostCommand):
                    work.command(action, payload)


class _Hosting:
    """The thread of a generation host, and the samples that the host has to decode.

    The constructor compiles all of the host's programs and starts the thread.
    """

    def __init__(
        self,
        config: Config,
        folder: Path,
        engine: Engine,
        weights: str,
        timeline: Timeline,
        link: ControllerLink,
    ) -> None:
        c, self._link, self._slots = config, link, config.generation.rollout_slots
        self._sampling = config.generation.sampling
        self._reader = _reader(config, folder, weights, engine)
        with explained(HOST, config, engine.model.config):
            blank = engine.load_params(engine.blank(config.wire_dtype))
            engine.warm(blank)
            self._moves = _Moves(c, folder, engine, link.name, blank) if c.places_versions else None
            del blank
        self._store = Prefetcher(self._reader, engine.param_shardings, engine.load_params)
        self._unfinished: dict[SampleId, bool] = {}
        """The samples that the host has to decode, and whether it goes on with them after a Begin.

        It does with those that only it can have: not with episodes, and not with samples on the move.
        """
        self._guard = threading.Lock()
        """Held so that a sample is either reported as ended before a Ready, or named in it."""
        self._adopted = HostAdopted(link.name, -1, "")
        self._spent = _Spent(link.name, timeline)
        own = (c, _index(link.name), engine, self._store, self._report)
        clock = timeline.clock(link.name)
        endpoint = make_endpoint(c, own[1], engine)
        self._host, run = training_host(
            *own, name=link.name, clock=clock, endpoint=endpoint, is_idle_bounded=False
        )
        self._deadline_s = c.runtime.deadline_s
        self._thread = reporting_thread(link.name, run, link.fail)
        self._thread.start()

    def begin(self, weights: str) -> None:
        self.find_weights(weights)
        with self._guard:
            # The controller sends these to a host again, to this one or to another.
            left = tuple(sample for sample, is_kept in self._unfinished.items() if not is_kept)
            if self._moves is not None:
                self._moves.release(left)
            self.stop(left)
            self._link.ready(
                slots=self._slots,
                # The host reports a version once, when it adopts it.
                version=self._adopted.version,
                digest=self._adopted.digest,
                samples=tuple(self._unfinished),
            )

    def find_weights(self, address: str) -> None:
        if isinstance(self._reader, TransferReader) and address != self._reader.address:
            self._reader.move_to(address)
            self._store.forget()

    def command(self, action: HostCommand, payload: Any) -> None:
        """Passes a command to the host; a Fetch once the samples' KV has arrived.

        Fetching here and not in the host's thread, the host decodes meanwhile, and commands keep their order.
        """
        if isinstance(action, Fetch):
            try:
                payload = self._moving.fetch(payload)
            except MoveError as error:
                self._link.report(MoveFailed(action.samples, action.host, action.source, str(error)))
                return
        if isinstance(action, Continue):
            tokens, max_tokens, stop = payload
            sampling = replace(self._sampling, max_tokens=max_tokens, stop=tuple(stop))
            payload = TurnRequest(tuple(tokens), sampling)
            self._unfinished[action.sample] = False
        if isinstance(action, Dispatch):
            self._unfinished |= dict.fromkeys(action.samples, payload is not None)
        if isinstance(action, Fetch):
            self._unfinished |= dict.fromkeys(action.samples, False)
        if isinstance(action, Move):
            self._unfinished |= dict.fromkeys(self._unfinished.keys() & set(action.samples), False)
        if isinstance(action, Cancel | TakeBack) and self._moves is not None:
            self._moves.release(action.samples)
        if isinstance(action, Cancel):
            self.stop(action.samples)
        else:
            self._host.inbox.put(command_of(action, payload, self._answer))

    @property
    def _moving(self) -> _Moves:
        if self._moves is None:
            raise ArealError(
                "the controller moves samples between hosts, but this host's config keeps each where it is; "
                "start every process with the config.yaml in the run's folder"
            )
        return self._moves

    def _answer(self, event: Event, works: list[HostSample] | None) -> None:
        """Reports the host's answer to a Move, with a ticket for the samples `works`, or to a Fetch."""
        if works is None:
            with self._guard:
                if isinstance(event, MoveFailed):
                    for sample in event.samples:
                        self._unfinished.pop(sample, None)
                self._link.report(event)
            return
        try:
            ticket = self._moving.offer(works)
        except MoveError as error:  # the target cannot read the empty ticket, and the samples stay here
            self._link.note(str(error))
            ticket = b""
        self._link.report(event, ticket=ticket)

    def stop(self, samples: tuple[SampleId, ...]) -> None:
        for sample in samples:
            self._unfinished.pop(sample, None)
        if samples:  # Stop without samples would end the host
            self._host.inbox.put(Stop(samples))

    def end(self) -> None:
        """Stops the host and waits for its thread.

        The wait is needed because a process that exits while a thread computes is aborted.
        """
        self._host.inbox.put(Stop())
        self._thread.join(self._deadline_s)
        self._store.close(self._deadline_s)
        if self._moves is not None:
            self._moves.close()

    def figures(self) -> dict[str, Any]:
        """Returns the body of a heartbeat: the host's counts since its start, and its decode gaps.

        A decode gap is the time between two decode calls, in seconds; each gap is reported once.
        """
        gaps, statistics = self._host.gaps_s, self._host.statistics()
        return {
            "at_s": time.monotonic(),
            "gaps_s": [gaps.popleft() for _ in range(min(len(gaps), GAPS))],
            "statistics": {count: getattr(statistics, count) for count in COUNTS},
            **self._spent(),
        }

    def _report(self, event: Event, trajectory: Trajectory | None) -> None:
        with self._guard:
            # After a turn the host keeps the sample's KV, until a Cancel.
            if isinstance(event, SampleFinished | SampleFailed):
                self._unfinished.pop(event.sample, None)
            if isinstance(event, HostAdopted):
                self._adopted = event
            self._link.report(event, trajectory)


class _Moves:
    """The host's side of moves between processes: offers samples, and fetches those of other hosts."""

    def __init__(
        self, config: Config, folder: Path, engine: Engine, name: str, blank: VersionedParams
    ) -> None:
        """`blank`: parameters with which a prefill is timed."""
        is_direct = config.weights_backend == "transfer"
        # The address of the machine is needed only where other machines connect to it.
        address = f"{own_address(config)}:0" if is_direct else "127.0.0.1:0"
        self._sender = make_sender(
            name, folder / MOVES, is_direct=is_direct, address=address, secret=secret()
        )
        self._receiver = Receiver(engine, folder / MOVES, secret(), min(FETCH_S, config.runtime.deadline_s))
        self._prefill_tokens_per_s = prefill_tokens_per_s(engine, blank)
        self.offer, self.release, self.close = self._sender.offer, self._sender.release, self._sender.close

    def fetch(self, ticket: bytes) -> list[HostSample]:
        """Returns another host's samples: with their KV, or with KV to recompute where that takes less time.

        Raises MoveError if they cannot be fetched.
        """
        kvs = [work.so_far.kv for work in decode_ticket(ticket).works if work.so_far is not None]
        is_cheaper = is_move_cheaper(
            sum(map(used_bytes, kvs)),
            sum(int(kv.true_length) for kv in kvs),
            bytes_per_s=self._receiver.bytes_per_s,
            prefill_tokens_per_s=self._prefill_tokens_per_s,
        )
        return self._receiver.fetch(ticket) if is_cheaper else self._receiver.without_kv(ticket)


def _reader(config: Config, folder: Path, address: str, engine: Engine) -> FetchingReader:
    c, deadline_s = config, config.runtime.deadline_s
    if c.weights_backend == "transfer":
        return TransferReader(address, engine.canary, deadline_s, secret())
    return OrbaxReader(weights_folder(config, folder), engine.canary)


# --- train --------------------------------------------------------------------------------------------------


def train(config: Config, folder: Path, name: str, coordinator: str, beat: Callable[[str], None]) -> None:
    """Runs trainer process `name` (trainer-INDEX) until the controller sends End, then writes a checkpoint.

    `coordinator`: host:port of process 0; needed if runtime.trainer_processes > 1. `beat` is called with the
    name of each activity that begins. Raises ArealError if training fails, if the other processes do not
    join, if End contains an error as its reason, or if the controller has shown no heartbeat for
    runtime.deadline_s seconds.
    """
    use_compilation_cache()
    processes = config.runtime.trainer_processes
    use_virtual_cpus(-(-config.trainer_devices // processes))
    with joined(coordinator, processes, _index(name)):
        _train(config, folder, name, beat)


def _train(config: Config, folder: Path, name: str, beat: Callable[[str], None]) -> None:
    parts = assemble_on(place_trainer(config, jax.devices()), open_inputs(config))
    timeline = process_timeline(folder, name)
    timeline.clock("trainer").follow(beat)
    work: _Training | None = None
    with closing(timeline), ControllerLink(config, "trainer", name) as link, ExitStack() as running:
        link.figures = _Spent("trainer", timeline)
        for message in link.commands():
            match message:
                case Begin(_, version):
                    if work is None:
                        work = _Training(parts, folder, version, timeline, link)
                        running.callback(work.end)
                    work.begin(version)
                case Envelope(_, Train() as action, payload) if work is not None:
                    work.take(action, payload)
                case Envelope(_, Hold() as action, _) if work is not None:
                    work.hold(action)


class _Training:
    """The trainer's thread and train state, created when the controller's first message Begin arrives."""

    def __init__(
        self, parts: Parts, folder: Path, version: int, timeline: Timeline, link: ControllerLink
    ) -> None:
        c = parts.config
        self._parts, self._link = parts, link
        self._deadline_s = c.runtime.deadline_s
        state, restored = start_state(parts, folder, version, link.note)
        self._store = _publisher(parts, folder, link.fail)
        checkpointer = Checkpointer(folder / "checkpoints", restored, link.fail)
        clock = timeline.clock("trainer")
        own = (parts, state, self._store, checkpointer, link.report)
        self._trainer = Trainer(*own, clock=clock, note=link.note)
        self._again = Repetition(parts, self._trainer, link.note)
        self._thread = reporting_thread("trainer", self._trainer.run, link.fail)
        self._newest: int | None = None
        """Step of the newest batch that is trained or queued; None until the trainer has caught up."""
        self._goal = 0
        self._wire: VersionedParams | None = None

    def begin(self, version: int) -> None:
        """Trains journaled batches again up to `version`, the newest trained version in the journal.

        Then starts the trainer's thread and sends Ready. If the thread was started by an earlier call, only
        sends Ready.
        """
        self._goal = max(version, 0)
        if self._newest is not None:
            self._send_ready()
        else:
            require_one_run(int(self._trainer.state.version), self._goal)
            self._catch_up()

    def _catch_up(self) -> None:
        """Requests the next journaled batch to train again, by sending Ready with the batch's step.

        If no such batch is left, publishes the weights, starts the trainer's thread and sends Ready without a
        step.
        """
        version = int(self._trainer.state.version)
        if version < self._goal:
            self._send_ready(next_step=version)
            return
        self._wire = self._store.publish(self._parts.learner.versioned(self._trainer.state))
        self._store.wait(self._deadline_s)
        self._newest = version - 1
        self._thread.start()
        self._send_ready()

    def _send_ready(self, next_step: int = -1) -> None:
        wire = self._wire
        self._link.ready(
            next_step=next_step,
            version=-1 if wire is None else wire.version,
            digest="" if wire is None else wire.digest,
            weights=getattr(self._store, "address", ""),
            shares_prompts=self._parts.learner.takes_shared_prompts,
        )

    def take(self, action: Train, payload: Mapping[str, Any]) -> None:
        """Queues a batch for the trainer's thread; while catching up with the journal, trains it at once.

        `payload`: as in `messages.Envelope`. Ignores a batch that is trained or queued already, because a
        restarted controller sends the current batch again.
        """
        plan = BatchPlan.from_wire(payload["plan"])
        batch = TrainBatch(action.step, action.ordinals, plan, self._fetch)
        if self._newest is not None:
            if action.step > self._newest:
                self._newest = action.step
                self._trainer.inbox.put(batch)
        elif action.step == int(self._trainer.state.version):
            reissued = self._again.train(Journaled(action, *payload["journaled"]), batch)
            # All processes of the group trained the batch; one reports the new digest.
            if reissued is not None and leads():
                self._link.report(reissued)
            self._catch_up()

    def hold(self, action: Hold) -> None:
        """Passes a Hold to the trainer's thread, which then counts its wait by that cause."""
        self._trainer.inbox.put(action)

    def _fetch(self, places: Mapping[int, SampleId]) -> dict[int, Trajectory]:
        """Returns the trajectories of the samples in `places`, under the same keys.

        Waits until Redis has the trajectories. The keys are the samples' indices in the batch's plan.
        """
        found = self._link.payloads.wait_for(list(dict.fromkeys(places.values())))
        return {place: decode(found[sample]) for place, sample in places.items()}

    def end(self) -> None:
        """Waits until the trainer's thread has trained the queued batches and written a checkpoint."""
        self._trainer.inbox.put(None)
        if self._thread.is_alive():
            self._thread.join(self._deadline_s)


def _publisher(parts: Parts, folder: Path, fail: Callable[[BaseException], None]) -> ParamPublisher:
    c = parts.config
    dtype = c.wire_dtype
    settings = PublisherSettings(canary(parts.model), dtype, c.runtime.deadline_s, fail)
    if c.weights_backend == "transfer":
        return TransferStore(settings, f"{own_address(c)}:0", secret())
    return OrbaxStore.of_run(c, folder, settings, params_bytes(parts.model, dtype))


def _index(name: str) -> int:
    """Returns the number after the last "-" of a process's name. Raises ArealError if there is none."""
    index = name.rpartition("-")[2]
    if not index.isdecimal():
        raise ArealError(
            f"--name={name} does not end with an index; use a name such as trainer-0 or generate-0"
        )
    return int(index)


class _Spent:
    """Makes the entry `totals` of a heartbeat: activity -> seconds that `component` spent on it so far."""

    def __init__(self, component: str, timeline: Timeline) -> None:
        self._component, self._timeline = component, timeline
        self._totals: dict[str, float] = {}

    def __call__(self) -> dict[str, Any]:
        for activity, seconds in self._timeline.take_totals().get(self._component, {}).items():
            self._totals[activity] = self._totals.get(activity, 0.0) + seconds
        self._timeline.flush()
        return {"totals": dict(self._totals)}


# --- evaluate ----------------------------------------------------------------------------------------------


def evaluate(config: Config, folder: Path, name: str) -> None:
    """Runs evaluation process `name` until the controller sends End.

    While the run trains, the process evaluates checkpoints (if observe.evaluate is set) and exports them in
    Hugging Face format (if observe.exports is set). After End it evaluates and exports the last checkpoint.
    Raises ArealError if evaluation fails, if End contains an error, or if the controller has shown no
    heartbeat for runtime.deadline_s seconds.
    """
    use_compilation_cache()
    inputs, deadline_s = open_inputs(config), config.runtime.deadline_s
    mesh = host_mesh(config, name) if config.observe.evaluate else None
    with ControllerLink(config, "evaluate", name) as link, ExitStack() as running:
        work = Follower(inputs, folder, mesh, link.note, link.fail, make_gateway=make_gateway)
        link.figures = lambda: {"steps": work.steps}
        running.callback(work.stop, deadline_s)
        for message in link.commands():
            if isinstance(message, Begin):
                work.start()
                link.ready()
        work.finish(deadline_s)
