"""The controller of a cluster: the driver's loop between one Redis and any number of processes.

It alone has the control plane and writes the journal. Processes come and go: whoever says hello is told to
begin, whoever falls silent is lost, and its samples go to others. When the controller itself comes back it
folds the journal, begins a new epoch, and everybody begins anew with what they hold; nothing is lost but the
tokens of half-decoded samples, which the same keys draw again.
"""

from __future__ import annotations

import secrets
import time
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from areal_jax.control import events as e
from areal_jax.control.machine import ControlPlane
from areal_jax.observe.live import View
from areal_jax.observe.metrics import MetricsWriter
from areal_jax.observe.waits import Timeline, WaitTimeout
from areal_jax.runtime.assembly import Inputs
from areal_jax.runtime.broker import Broker
from areal_jax.runtime.committed import CHECKPOINTS, is_dealt_with
from areal_jax.runtime.driver import Driver, Told
from areal_jax.runtime.membership import BEAT_S, SILENT_S, Member, Membership, box_of
from areal_jax.runtime.messages import (
    CONTROL,
    REWARD,
    Begin,
    Cancelled,
    Decode,
    End,
    Ended,
    Hello,
    Judge,
    Message,
    Noted,
    Ready,
    TrainOn,
    Weights,
    from_plain,
    to_plain,
)
from areal_jax.runtime.messages import Told as Word
from areal_jax.runtime.remote import RemoteHosts
from areal_jax.runtime.rows import RowMaker
from areal_jax.runtime.trainer import plan_groups
from areal_jax.trajectories.journal import Journal
from areal_jax.types import ArealError, Completion, Group, Prompt
from areal_jax.weights.staged import committed

MOST = 256
"""Messages that are handled, and journaled, together."""

RETURN_S = 120.0
"""How long the end of a run waits for an evaluation host that was lost: it may be started again."""

TRAINER = "trainer-0"
"""The process of the trainer's group that tells events; the others only compute."""


class Controller:
    """`run()` returns when the run is complete, and raises what ended it otherwise."""

    def __init__(
        self,
        inputs: Inputs,
        control: ControlPlane,
        journal: Journal,
        broker: Broker,
        folder: Path,
        view: View,
        metrics: MetricsWriter,
        timeline: Timeline,
        start_s: float = 0.0,
        trained: Iterable[tuple[int, tuple[int, ...]]] = (),
    ) -> None:
        """As `LocalRun`, with a broker for threads."""
        c = inputs.config
        self._config, self._broker, self._view = c, broker, view
        self._deadline_s, self._timeline = c.runtime.deadline_s, timeline
        self._epoch = secrets.token_hex(8)
        self._membership = Membership()
        self._clock = timeline.actor("control", "decide")
        self._remote = RemoteHosts(timeline)
        rows = RowMaker(
            self._remote.take_totals,
            self._remote.hosts,
            start_s,
            tuple(inputs.tasks),
            lambda o: inputs.prompts.place(o)[0],
        )
        self._driver = Driver(inputs, control, journal, folder, view, metrics, timeline, rows, self, trained)
        self._control = control
        self._judged: dict[tuple[int, int], Judge] = {}
        self._weights = ""
        self._shares_prompts = True
        self._has_begun = False
        self._first: Ready | None = None
        self._heard_s = time.monotonic()
        self._beaten_s = 0.0
        self._error = ""
        self._dismissed: set[str] = set()
        """Roles whose work is done: one that starts again is told so."""
        self._unfinished = self._owed(folder)
        """Name -> role of those that have not ended well: lost ones too, and who is yet to come."""
        self._out: dict[str, list[Any]] = defaultdict(list)
        """What this turn has to say so far, by box."""
        self._evaluated: dict[str, int] = {}
        """By box: how far evaluations got, as signs of life say."""

    def _owed(self, folder: Path) -> dict[str, str]:
        """Whose work is not done, whoever was there under the controller before this one."""
        done, is_finished = committed(folder / CHECKPOINTS), self._control.is_finished
        last = done[-1] if done else -1
        owed = {} if is_finished and last == self._control.trained_version else {TRAINER: "trainer"}
        asked = self._config.observe
        if (asked.evaluate or asked.exports) and (owed or not is_dealt_with(folder, last, self._config)):
            owed["evaluate"] = "evaluate"  # by whatever name
        return owed

    # --- from start to end ----------------------------------------------------------------------------------

    def run(self) -> None:
        self._broker.beat(CONTROL, {"epoch": self._epoch}, SILENT_S)
        try:
            while not self._control.is_finished:
                self._turn()
            self._dismiss("")
        except BaseException as error:
            self._dismiss(f"the run ended: {error}")
            raise

    def _turn(self) -> None:
        """Hear what waits, act on it, see who is still there."""
        with self._clock.doing("wait: any word from the processes"):
            found = self._broker.take(CONTROL, CONTROL, timeout_s=BEAT_S / 2, most=MOST)
        told: list[Told] = []
        for said in (from_plain(message.body) for message in found):
            if isinstance(said, Word):
                told += [(said.event, said.trajectory)] if self._counts(said) else []
                continue
            self._driver.handle(told)  # what was said before it
            told = []
            self._heard(said)
        self._driver.handle(told)
        self._send()
        self._broker.done(CONTROL, found)
        if self._error:
            raise ArealError(self._error)
        self._watch(bool(found))
        self._send()

    def _watch(self, has_news: bool) -> None:
        """Signs of life, in both directions; silence of everybody ends the run."""
        now = time.monotonic()
        self._heard_s = now if has_news else self._heard_s
        if now - self._heard_s > self._deadline_s:
            raise WaitTimeout(
                f"the control plane heard no event for {self._deadline_s:g} s. "
                f"{'; '.join(self._control.waits())}. There are: {self._there()}"
            )
        if now - self._beaten_s < BEAT_S:
            return
        self._beaten_s = now
        self._broker.beat(CONTROL, {"epoch": self._epoch}, SILENT_S)
        beats = self._broker.beats()
        self._remote.hear(beats)
        steps = {box: beat["steps"] for box, beat in beats.items() if "steps" in beat}
        if steps != self._evaluated:
            self._evaluated = steps
            self._heard_s = now if "evaluate" in self._dismissed else self._heard_s
        for name in self._membership.silent(beats.keys(), now):
            self._lost(name, f"no sign of life for {SILENT_S:g} s")

    def _dismiss(self, reason: str) -> None:
        """Tell everybody to end. The trainer writes its last checkpoint first, and that one is evaluated."""
        if reason:
            self._say_end(self._membership.members.values(), reason)
            self._send()
        else:
            self._await_trainer()
            self._await_evaluation()
        self._timeline.close()

    def _say_end(self, members: Iterable[Member], reason: str = "") -> None:
        for member in members:
            self._say(member, End(self._epoch, reason))

    def _end_of(self, *roles: str) -> None:
        self._dismissed.update(roles)
        for role in roles:
            self._say_end(self._membership.of_role(role))

    def _await_trainer(self) -> None:
        self._end_of("trainer", "generate", "reward")
        end_s = time.monotonic() + self._deadline_s
        while TRAINER in self._unfinished:
            if time.monotonic() > end_s:
                raise WaitTimeout(f"the trainer did not end within {self._deadline_s:g} s of the last batch")
            self._turn()

    def _await_evaluation(self) -> None:
        """For as long as it gets on, and for a while where it was lost: it may be on its way back."""
        self._end_of("evaluate")
        end_s = time.monotonic() + RETURN_S
        while "evaluate" in self._unfinished.values():
            if self._membership.of_role("evaluate"):
                end_s = time.monotonic() + RETURN_S
            elif time.monotonic() > end_s:
                self._view.note(
                    f"the last checkpoint is not evaluated: who does it is away for {RETURN_S:g} s"
                )
                return
            self._turn()

    def _there(self) -> str:
        return ", ".join(sorted(self._membership.members)) or "nobody"

    # --- what they say --------------------------------------------------------------------------------------

    def _counts(self, said: Word) -> bool:
        """Not the word of a process that was given up, or of what another controller asked for; but a batch
        is trained, and a group scored, whoever asked.
        """
        if isinstance(said.event, e.RewardScored | e.RewardFailed):
            self._judged.pop((said.event.ordinal, said.event.attempt), None)
            return True
        is_there = self._membership.of(said.name, said.incarnation) is not None
        return said.name == TRAINER or (is_there and said.epoch == self._epoch)

    def _heard(self, message: Message) -> None:
        match message:
            case Hello():
                self._welcome(message)
            case Ready(name, incarnation, epoch) if epoch == self._epoch:
                if (member := self._membership.of(name, incarnation)) is not None:
                    self._ready(member, message)
            case Noted(name, text):
                self._view.note(f"{name}: {text}")
            case Ended(name, incarnation):
                if self._membership.of(name, incarnation) is not None:
                    self._left(message)
                elif not message.error:  # told to by the controller before this one
                    self._unfinished.pop(name, None)
            case _:
                pass

    def _welcome(self, hello: Hello) -> None:
        former = self._membership.members.get(hello.name)
        is_again = former is not None and former.hello.incarnation != hello.incarnation
        refused = self._membership.join(hello, time.monotonic())
        if is_again and hello.role == "trainer":
            for other in self._membership.ready("trainer"):  # a group ends, and begins, as one
                self._membership.leave(other.hello.name)
        if is_again and hello.role == "generate":
            self._tell(e.HostLost(hello.name, "its process started again"))
        if refused is not None:
            self._view.note(refused)
            self._post(box_of(hello.name, hello.incarnation), End(self._epoch, refused))
            return
        self._unfinished.pop(hello.role, None)
        self._unfinished[hello.name] = hello.role
        if former is None or is_again:
            self._view.note(f"{hello.name} joined from {hello.machine} (process {hello.pid})")
        member = self._membership.members[hello.name]
        if hello.role == "trainer" or self._has_begun or hello.role in self._dismissed:
            self._begin(member)

    def _begin(self, member: Member) -> None:
        version = self._control.trained_version if member.hello.role == "trainer" else -1
        self._say(member, Begin(self._epoch, version, self._weights))
        if member.hello.role in self._dismissed:
            self._say(member, End(self._epoch))

    def _ready(self, member: Member, said: Ready) -> None:
        member.is_ready = True
        if member.hello.role == "generate":
            self._remote.join(said.name)
            self._tell(e.HostJoined(said.name, said.slots))
        elif member.hello.role == "trainer":
            self._first = said if said.name == TRAINER else self._first
            processes = len(self._membership.ready("trainer"))
            if self._first is not None and processes == self._config.runtime.trainer_processes:
                self._trainer_ready(self._first)

    def _trainer_ready(self, said: Ready) -> None:
        """All its processes are; `said` is the first one's word."""
        self._first = None
        self._weights, self._shares_prompts = said.weights, said.shares_prompts
        if not self._has_begun:
            self._start(said)
            return
        for host in self._membership.ready("generate"):
            self._say(host, Weights(self._epoch, said.weights))
        self._trainer_is_back(said)

    def _start(self, said: Ready) -> None:
        """There are weights: the run starts, or goes on, and whoever waited begins."""
        self._has_begun = True
        steps = self._config.run.steps
        first: list[e.Event] = [e.RunStarted(said.digest, steps)]
        if self._control.version >= 0:
            first = [e.RunResumed(steps), e.VersionCommitted(said.version, said.digest)]
        self._tell(*first)
        for member in self._membership.members.values():
            if member.hello.role != "trainer":
                self._begin(member)

    def _trainer_is_back(self, said: Ready) -> None:
        """It trained again what its checkpoint did not hold; the batch it was at is asked for once more."""
        self._tell(e.VersionCommitted(said.version, said.digest))
        self._driver.ask_again()

    def _left(self, said: Ended) -> None:
        member = self._membership.members[said.name]
        if not said.error:
            self._membership.leave(said.name)
            self._unfinished.pop(said.name, None)
            if member.hello.role == "generate":
                self._tell(e.HostLost(said.name, "it ended"))
            return
        if member.hello.role == "trainer" and said.is_final:
            self._error = f"{said.name} on {member.hello.machine} ended by an error: {said.error}"
        self._lost(said.name, said.error)

    def _lost(self, name: str, reason: str) -> None:
        self._view.note(f"{name} is lost: {reason}")
        member = self._membership.lose(name, time.monotonic())
        if member is not None:
            self._out.pop(member.box, None)
            self._broker.clear(member.box)
            if member.hello.role == "generate":
                self._tell(e.HostLost(name, reason))
            elif member.hello.role == "reward":
                for asked in list(self._judged.values()):  # whatever it was at; another one may be, too
                    self._post(REWARD, asked)

    def _tell(self, *events: e.Event) -> None:
        self._driver.handle([(event, None) for event in events])

    # --- actions --------------------------------------------------------------------------------------------

    def dispatch(self, action: e.Dispatch, prompt: tuple[int, ...]) -> None:
        self._say_to(action.host, Decode(self._epoch, action.samples, prompt, action.min_version))

    def cancel(self, action: e.Cancel) -> None:
        self._say_to(action.host, Cancelled(self._epoch, action.samples))

    def score(self, action: e.Score, prompt: Prompt, completions: Sequence[Completion]) -> None:
        asked = Judge(self._epoch, action.ordinal, action.attempt, tuple(completions))
        self._judged[action.ordinal, action.attempt] = asked
        self._post(REWARD, asked)

    def train(self, action: e.Train, groups: tuple[Group, ...]) -> None:
        """To every process of the trainer's group; one that is not ready is asked when it is."""
        plan = plan_groups(self._config, groups, self._shares_prompts)
        asked = TrainOn(self._epoch, action.step, action.ordinals, action.attempts, plan.to_wire())
        for member in self._membership.ready("trainer"):
            self._say(member, asked)

    def _say_to(self, name: str, message: Message) -> None:
        """Nothing where it is gone: then its samples are, or will be, somebody else's."""
        if (member := self._membership.members.get(name)) is not None:
            self._say(member, message)

    def _say(self, member: Member, message: Message) -> None:
        self._post(member.box, message)

    def _post(self, box: str, message: Message) -> None:
        """With all else that this turn has for the box."""
        self._out[box].append(to_plain(message))

    def _send(self) -> None:
        out, self._out = self._out, defaultdict(list)
        for box, messages in out.items():
            self._broker.post(box, *messages)
