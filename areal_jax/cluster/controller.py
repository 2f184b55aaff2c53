"""The controller of a run on a cluster: exchanges messages with all processes of the run through Redis.

Only the controller makes the run's decisions, in its control plane, and writes the journal. Processes may
start and end at any time: a process registers, and the controller sends it the message Begin. A process
without a heartbeat is declared lost, and the samples of a lost host go to other hosts. If it was only paused
or slow, its next heartbeat brings it back: it is sent Begin again. A restarted controller rebuilds its state
from the journal and starts a new epoch: it sends Begin again to every process. The processes keep their
weights and train state, and hosts the samples that they decode: what no other host has been given since, a
host goes on with.

Everything in Redis can be restored. If Redis loses its data, the controller no longer finds its claim on the
run there. It then claims the run again and starts a new epoch, in which every process sends all events again
that were not confirmed as journaled.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from areal_jax.assembly.committed import is_dealt_with
from areal_jax.assembly.parts import Inputs
from areal_jax.assembly.run_folder import CHECKPOINTS
from areal_jax.cluster import messages as m
from areal_jax.cluster.broker import Broker, BrokerError
from areal_jax.cluster.membership import HEARTBEAT_S, LOST_S, Member, Membership, mailbox_of
from areal_jax.cluster.messages import CONTROL
from areal_jax.cluster.owner import RunOwner
from areal_jax.cluster.payloads import Held, Posted
from areal_jax.cluster.remote import RemoteHosts
from areal_jax.cluster.reward_placement import WORKFLOW_EVENTS, PlacedGroups, PlacedWorkflows
from areal_jax.control import events as e
from areal_jax.episodes.conversation import Conversation
from areal_jax.observe.waits import WaitTimeout
from areal_jax.runtime.compute_choice import plan_groups, plan_new, recorded_choice
from areal_jax.runtime.context import RunContext
from areal_jax.runtime.core import Incoming
from areal_jax.runtime.driver import Driver
from areal_jax.runtime.recovery import Journaled, journaled_batches, journaled_groups
from areal_jax.trajectories.codec import decode
from areal_jax.trajectories.plan import BatchPlan
from areal_jax.types import ArealError, Completion, Group, Prompt, SampleId, Trajectory
from areal_jax.weights.manifest import committed

MOST = 256
"""Maximum number of messages that the controller takes, and journals, in one iteration of its loop."""

RETURN_S = 120.0
"""Seconds that the controller waits, at the end of a run, for a lost evaluation process to start again."""

TRAINER = "trainer-0"
"""The only trainer process that reports events; the trainer's other processes only compute."""


class Controller:
    """Drives a run: `run()` returns when the run is complete, or raises the error that ended the run."""

    def __init__(self, inputs: Inputs, context: RunContext, broker: Broker, owner: RunOwner) -> None:
        """`inputs`: the run's config, tasks, model. `context`: the run's folder, journal and control plane.

        `broker`: the connection to Redis. `owner`: this controller's claim on the run, after `owner.claim()`.
        """
        self._config, self._broker, self._view = context.config, broker, context.view
        self._deadline_s, self._timeline = context.config.runtime.deadline_s, context.timeline
        self._inputs, self._folder, self._journal = inputs, context.folder, context.journal
        self._owner, self._held = owner, Held(broker, owner.token)
        self._epochs: list[str] = []
        """The epochs since Redis last lost its data, the newest last; no message of these epochs was lost."""
        self._confirmed: dict[str, int] = {}
        """Mailbox of a process -> number of the newest event of that process that is journaled."""
        self._membership = Membership()
        self._clock = self._timeline.clock("control", "decide")
        self._remote = RemoteHosts(self._timeline)
        self._driver = Driver(inputs, context, self, self._remote.hosts, self._remote.take_totals)
        self._control = context.control
        self._scoring = PlacedGroups(self._command_reward, 2 * context.config.runtime.reward_workers)
        self._workflows = PlacedWorkflows(self._command_reward)
        self.answer, self.call, self.end = self._workflows.answer, self._workflows.call, self._workflows.end
        self._weights = ""
        self._shares_prompts = True
        self._has_begun = False
        self._early: list[Incoming] = []
        """Hosts' events that mention a version for which VersionCommitted has not arrived yet."""
        self._journaled: list[Journaled] = []
        """Journaled batches that a restarted trainer still has to train again."""
        self._again: tuple[Group, ...] = ()
        """The groups of the journaled batch that is being trained again."""
        self._news_s = time.monotonic()
        self._heartbeat_s = 0.0
        self._error = ""
        self._dismissed: set[str] = set()
        """Roles with no work left; a process of such a role that registers again is sent End."""
        self._unfinished = self._pending()
        """Name -> role of each process with work left, whether it is live, lost or not registered yet."""
        self._out: dict[str, list[Any]] = defaultdict(list)
        """Mailbox -> the messages to post at the end of this turn."""
        self._evaluated: dict[str, int] = {}
        """Mailbox of an evaluation process -> number of steps that it evaluated, from its heartbeat."""

    def _pending(self) -> dict[str, str]:
        """Returns name -> role of the processes for which the end of the run waits, registered or not.

        These are trainer-0, until it has written the last checkpoint, and, if the config has evaluation or
        exports, the evaluation process (as "evaluate"), until that checkpoint is evaluated and exported.
        """
        done = committed(self._folder / CHECKPOINTS)
        last = done[-1] if done else -1
        is_saved = last == self._control.state.trained_version
        pending = {} if self._is_finished and is_saved else {TRAINER: "trainer"}
        observe = self._config.observe
        if (observe.evaluate or observe.exports) and (
            pending or not is_dealt_with(self._folder, last, self._config)
        ):
            pending["evaluate"] = "evaluate"  # the name of the process is not known yet
        return pending

    @property
    def _is_finished(self) -> bool:
        """Whether run.steps steps are trained; False for a finished run resumed with a larger run.steps."""
        state = self._control.state
        return state.is_finished and state.trained_version >= self._config.run.steps

    # --- from start to end ----------------------------------------------------------------------------------

    def run(self) -> None:
        """Drives the run to its end, then sends End to all processes.

        After the last batch, waits until the trainer has written its last checkpoint. Only then sends End to
        the evaluation process, and waits until this process has ended too. Raises the error that ended the
        run, or WaitTimeout if the trainer needs longer than runtime.deadline_s for its checkpoint.
        """
        self._start_epoch()
        try:
            while not self._is_finished:
                self._turn()
            self._await_trainer()
            self._await_evaluation()
        except BaseException as error:
            if self._is_owner():
                self._post_end(self._membership.members.values(), f"the run ended: {error}")
                self._send()
            raise
        finally:
            self._timeline.close()

    def _is_owner(self) -> bool:
        """Returns whether this controller still owns the run; only the owner may send End to processes."""
        try:
            return self._owner.renew(self._confirmed)
        except BrokerError:
            return False

    def _start_epoch(self) -> None:
        """Claims the run and starts a new epoch, in which all commands of earlier epochs are void.

        Called at the controller's start, and after Redis lost its data. Sends Begin to every live process
        again: to the trainer's processes now, to all others once the trainer's processes have sent Ready.
        """
        # This comes first: a replaced controller may find Redis empty too, and must not claim the run.
        self._journal.require_owner()
        self._epochs = self._owner.claim()
        self._has_begun = False
        self._out.clear()
        self._scoring.clear()
        self._workflows.clear()
        self._early.clear()
        self._held.read()
        # A trainer that is catching up waits for these payloads before it reads its mailbox again.
        self._held.put_back(self._again)
        if self._is_finished:  # an Ended may be lost with the other messages
            self._unfinished = self._pending()
        self._membership.wait_for_all(time.monotonic())  # heartbeats may be lost
        for member in self._membership.members.values():
            member.ready = None
            if member.hello.role == "trainer":
                self._begin(member)
        self._send()

    @property
    def _epoch(self) -> str:
        return self._epochs[-1]

    def _turn(self) -> None:
        """One iteration of `run`: takes messages, acts on them, declares processes without a heartbeat lost.

        Waits at most HEARTBEAT_S / 2 seconds for a message. Raises ArealError if a trainer process reported
        an error that would occur again after a restart.
        """
        with self._clock.doing("wait: a message from the processes"):
            found = self._broker.take(CONTROL, timeout_s=HEARTBEAT_S / 2, most=MOST)
        messages = [m.from_plain(message.body) for message in found]
        payloads = self._held.posted([one for message in messages if (one := _announced(message))])
        # After the reads: if Redis was emptied before them, data are missing, and `renew` is False.
        if not self._owner.renew(self._confirmed):
            self._view.note(
                "Redis lost its data; the run continues, and all processes send their lost messages again"
            )
            self._start_epoch()
        early, self._early = self._early, []
        events: list[Incoming] = []
        for event, payload in early:
            events += self._in_time(event, payload)
        for message in messages:
            if isinstance(message, m.EventReport):
                events += self._valid(message, payloads)
                # Whether later samples of this host are late depends on what it has taken over.
                if not isinstance(message.event, e.SamplesMoved):
                    continue
            self._driver.handle(events)  # the journal keeps the order of the messages
            events = []
            if not isinstance(message, m.EventReport):
                self._receive(message)
        self._driver.handle(events + self._driver.placement_due())
        self._held.settle(self._control.state.groups.keys() | {group.ordinal for group in self._again})
        self._confirmed |= {
            mailbox_of(message.name, message.incarnation): message.number
            for message in messages
            # Events of an epoch before Redis was emptied were refused: their process has to repeat them.
            if isinstance(message, m.EventReport) and message.epoch in self._epochs
        }
        self._send()
        # Last: until their events are journaled, messages must reach a restarted controller again.
        self._broker.done(CONTROL, found)
        if self._error:
            raise ArealError(self._error)
        self._watch(bool(found))
        self._send()

    def _watch(self, has_news: bool) -> None:
        """Reads the heartbeats; declares each process lost that has sent none for LOST_S seconds.

        A process that was lost in this way comes back with its next heartbeat. `has_news`: whether this
        iteration took a message. Raises WaitTimeout if no message arrived for runtime.deadline_s seconds.
        """
        now = time.monotonic()
        self._news_s = now if has_news else self._news_s
        if now - self._news_s > self._deadline_s:
            raise WaitTimeout(
                f"the controller ends, because no process sent it a message for {self._deadline_s:g} s "
                f"(runtime.deadline_s). {'; '.join(self._control.waits())}. Live processes: "
                f"{self._names()}; see in the logs in {self._folder / 'logs'} what they wait for"
            )
        if now - self._heartbeat_s < HEARTBEAT_S:
            return
        if now - self._heartbeat_s > LOST_S / 2:
            # This process was paused, or Redis was away: heartbeats may have expired unread.
            self._membership.wait_for_all(now)
        self._heartbeat_s = now
        members = [*self._membership.members.values(), *self._membership.silent.values()]
        heartbeats = self._broker.heartbeats([member.mailbox for member in members])
        self._remote.take_in(heartbeats)
        steps = {mailbox: figures["steps"] for mailbox, figures in heartbeats.items() if "steps" in figures}
        if steps != self._evaluated:
            self._evaluated = steps
            self._news_s = now if "evaluate" in self._dismissed else self._news_s
        lost = self._membership.without_heartbeat(heartbeats.keys(), now)
        # A Redis that was emptied just now holds no heartbeats: then no process is lost, and the next turn
        # claims the run again.
        for name in lost if lost and self._is_owner() else ():
            self._lost(name, f"no heartbeat for {LOST_S:g} s", is_silent=True)
        for hello in self._membership.heard_again(heartbeats.keys()):
            self._register(hello)

    def _post_end(self, members: Iterable[Member], reason: str = "") -> None:
        for member in members:
            self._post(member.mailbox, m.End(self._epoch, reason))

    def _end_of(self, *roles: str) -> None:
        self._dismissed.update(roles)
        for role in roles:
            self._post_end(self._membership.of_role(role))

    def _await_trainer(self) -> None:
        self._end_of("trainer", "generate", "reward")
        end_s = time.monotonic() + self._deadline_s
        while TRAINER in self._unfinished:
            if time.monotonic() > end_s:
                raise WaitTimeout(
                    f"the trainer did not end within {self._deadline_s:g} s (runtime.deadline_s) after the "
                    "last batch; see logs/trainer-0.log, and resume the run to write the last checkpoint"
                )
            self._turn()

    def _await_evaluation(self) -> None:
        """Sends End to the evaluation process and waits until it has ended.

        If that process is lost, and no evaluation process registers within RETURN_S seconds, adds a note to
        the run's log and returns.
        """
        self._end_of("evaluate")
        end_s = time.monotonic() + RETURN_S
        while "evaluate" in self._unfinished.values():
            if self._membership.of_role("evaluate"):
                end_s = time.monotonic() + RETURN_S
            elif time.monotonic() > end_s:
                self._view.note(
                    "the run ends without an evaluation of the last checkpoint, because the evaluation "
                    f"process has been gone for {RETURN_S:g} s; see that process's log in "
                    f"{self._folder / 'logs'}, and resume the run to evaluate the checkpoint"
                )
                return
            self._turn()

    def _names(self) -> str:
        return ", ".join(sorted(self._membership.members)) or "none"

    # --- messages from processes ----------------------------------------------------------------------------

    def _valid(self, message: m.EventReport, payloads: Mapping[Posted, bytes]) -> list[Incoming]:
        """Returns [(event, payload)]; [] if the event is refused or has to wait (`_in_time`).

        `payloads`: posted payload -> the sample's encoded trajectory in Redis. A host's event is refused if
        the host was declared lost, or if the event was sent before the host's answer to its last Begin,
        because the host's samples may have gone to another host. Such an event of the trainer is valid,
        unless Redis has lost its data since; the trainer then sends all its events again, in order. Scores
        are always valid. Raises ArealError if Redis has no trajectory of a finished sample.
        """
        event, mailbox = message.event, mailbox_of(message.name, message.incarnation)
        if isinstance(event, e.RewardScored | e.RewardFailed):
            self._scoring.forget((event.ordinal, event.attempt))
            return [(event, None)]
        if message.number <= self._confirmed.get(mailbox, -1):
            return []  # duplicate delivery, within the life of this controller
        if message.name == TRAINER:
            return [(event, None)] if message.epoch in self._epochs else []
        member = self._membership.of(message.name, message.incarnation)
        is_member = member is not None and member.ready is not None
        is_valid = is_member and message.epoch == self._epoch
        if isinstance(event, e.HostAdopted) and is_valid:
            return self._in_time(event)
        if isinstance(event, WORKFLOW_EVENTS):
            # A process that was declared lost may still run workflows that another one has by now.
            is_valid = is_valid and self._workflows.conducts(mailbox, event.sample)
            if is_valid and isinstance(event, e.EpisodeEnded | e.EpisodeFailed):
                self._workflows.forget(event.sample)
        if not isinstance(event, SAMPLED):
            return [(event, message.ticket or None)] if is_valid else []
        announced = Posted(event.sample, mailbox, message.number)
        if not is_valid or self._control.state.is_stale(event):
            self._held.refuse(announced)
            return [(event, None)] if is_valid else []
        if announced not in payloads:
            raise ArealError(
                f"Redis has no payload of {event.sample}, although {message.name} posted it: another program "
                "deletes keys of this run. Give the run a Redis database of its own (runtime.redis), and "
                "resume the run"
            )
        # What a turn added is journaled as a part of the sample; trainers get that, and not this payload.
        (self._held.accept if isinstance(event, e.SampleFinished) else self._held.refuse)(announced)
        return self._in_time(event, decode(payloads[announced]))

    def _in_time(self, event: e.Event, payload: Trajectory | None = None) -> list[Incoming]:
        """Returns [(event, payload)]; [] if the event mentions a weights version that is not committed yet.

        Such an event is kept until the version is committed. It occurs because a host may read a version's
        files before the trainer's VersionCommitted arrives at the controller.
        """
        if _newest_version(event) <= self._control.state.version:
            return [(event, payload)]
        self._early.append((event, payload))
        return []

    def _receive(self, message: m.AnyMessage) -> None:
        match message:
            case m.Hello():
                self._register(message)
            case m.Ready(name, incarnation, epoch) if epoch == self._epoch:
                if (member := self._membership.of(name, incarnation)) is not None:
                    self._ready(member, message)
            case m.LogLine(name, text):
                self._view.note(f"{name}: {text}")
            case m.Ended(name, incarnation):
                self._membership.forget(name, incarnation)
                if (member := self._membership.of(name, incarnation)) is not None:
                    self._left(member, message)
                elif not message.error:  # an earlier controller sent it End
                    self._unfinished.pop(name, None)

    def _register(self, hello: m.Hello) -> None:
        former = self._membership.members.get(hello.name)
        is_again = former is not None and former.hello.incarnation != hello.incarnation
        refused = self._membership.join(hello, time.monotonic())
        if is_again and hello.role == "trainer":
            for other in self._membership.ready("trainer"):  # the group's processes restart together
                self._membership.leave(other.hello.name)
        if is_again and hello.role == "generate":
            self._handle(e.HostLost(hello.name, "its process started again"))
        if refused is not None:
            self._view.note(refused)
            self._post(mailbox_of(hello.name, hello.incarnation), m.End(self._epoch, refused))
            return
        self._unfinished.pop(hello.role, None)
        self._unfinished[hello.name] = hello.role
        if former is None or is_again:
            self._view.note(
                f"{hello.name} joined the run from machine {hello.machine} (process id {hello.pid})"
            )
        member = self._membership.members[hello.name]
        if hello.role == "trainer" or self._has_begun or hello.role in self._dismissed:
            self._begin(member)

    def _begin(self, member: Member) -> None:
        version = self._control.state.trained_version if member.hello.role == "trainer" else -1
        self._post(member.mailbox, m.Begin(self._epoch, version, self._weights))
        if member.hello.role in self._dismissed and member.hello.role != "trainer":
            self._post(member.mailbox, m.End(self._epoch))

    def _ready(self, member: Member, ready: m.Ready) -> None:
        member.ready = ready
        if member.hello.role == "generate":
            self._remote.join(ready.name)
            self._handle(e.HostJoined(ready.name, ready.slots, ready.samples))
            state = self._control.state
            # A host reports an adoption once, so the one before this message is not reported again.
            if ready.version > state.version or state.digests.get(ready.version, "") == ready.digest != "":
                for event, _ in self._in_time(e.HostAdopted(ready.name, ready.version, ready.digest)):
                    self._handle(event)
        elif member.hello.role == "trainer":
            found = [each.ready for each in self._membership.of_role("trainer") if each.ready is not None]
            # The processes of the group go on together, once all of them are at the same step.
            if [one.next_step for one in found] != [ready.next_step] * self._config.runtime.trainer_processes:
                return
            self._shares_prompts = ready.shares_prompts
            if ready.next_step >= 0:
                self._catch_up(ready.next_step)
            else:
                self._trainer_ready(next(one for one in found if one.name == TRAINER))

    def _catch_up(self, step: int) -> None:
        """Sends the journaled batch of `step`, which the restarted trainer processes must train again."""
        if not self._journaled or self._journaled[0].train.step != step:
            self._journaled = journaled_batches(self._journal, step, self._control.state.trained_version)
            self._view.note(
                f"training steps {step} to {self._control.state.trained_version - 1} again from the journal"
            )
        one = self._journaled.pop(0)
        self._again = journaled_groups(self._inputs, self._journal, one.train)
        trainers = self._membership.of_role("trainer")
        choice = recorded_choice(self._config, one.metrics)
        plan = plan_groups(self._config, self._again, self._shares_prompts, choice)
        self._held.put_back(self._again)
        journaled = [one.digest, one.published, one.metrics, one.steps, one.is_reissued]
        self._send_batch(trainers, one.train, plan, journaled=journaled)

    def _trainer_ready(self, ready: m.Ready) -> None:
        """Starts or continues the run, once all trainer processes are ready; `ready`: trainer-0's message."""
        self._again = ()
        self._weights = ready.weights
        if "trainer" in self._dismissed:
            # Not earlier: an End in its mailbox would stop it before it has caught up with the journal.
            self._post_end(self._membership.of_role("trainer"))
        if not self._has_begun:
            self._start(ready)
            return
        for host in self._membership.ready("generate"):
            self._post(host.mailbox, m.WeightsAddress(self._epoch, ready.weights))
        # A trainer that is back has caught up with the journal; the batch under way is commanded again.
        self._handle(e.VersionCommitted(ready.version, ready.digest))
        self._driver.ask_again()

    def _start(self, ready: m.Ready) -> None:
        """Starts or resumes the run, after the trainer has published weights.

        Sends Begin to the live processes of other roles. A process that registers later is sent Begin then.
        """
        self._has_begun = True
        self._driver.start(ready.version, ready.digest)
        for member in self._membership.members.values():
            if member.hello.role != "trainer":
                self._begin(member)

    def _left(self, member: Member, ended: m.Ended) -> None:
        if not ended.error:
            self._membership.leave(ended.name)
            self._unfinished.pop(ended.name, None)
            if member.hello.role == "generate":
                self._handle(e.HostLost(ended.name, "it ended"))
            return
        if member.hello.role == "trainer" and ended.is_final:
            self._error = (
                f"{ended.name} on {member.hello.machine} ended with an error, so the run ends: {ended.error}"
            )
        self._lost(ended.name, ended.error)

    def _lost(self, name: str, reason: str, is_silent: bool = False) -> None:
        """Declares a process lost; `is_silent`: for want of a heartbeat, so its next one brings it back."""
        lose = self._membership.silence if is_silent else self._membership.lose
        member = lose(name, time.monotonic())
        if member is not None and member.hello.role == "trainer":
            after = (
                "" if self._error else "; the trainer trains its current batch again once it has restarted"
            )
        else:
            after = "; its work goes to another process of its role, or waits until such a process registers"
        self._view.note(f"{name} is lost ({reason}){after}")
        if member is not None:
            # A process that takes its place has a new incarnation, so a new mailbox.
            self._out.pop(member.mailbox, None)
            self._early = [one for one in self._early if getattr(one[0], "host", "") != name]
            # Should it come back: what it was sent is deleted, so it gets its work again.
            self._scoring.lose(member.mailbox)
            self._workflows.lose(member.mailbox)
            self._broker.clear(member.mailbox)
            self._held.delete_posted(member.mailbox)
            if member.hello.role == "generate":
                self._handle(e.HostLost(name, reason))

    def _handle(self, *events: e.Event) -> None:
        self._driver.handle([(event, None) for event in events])

    # --- actions --------------------------------------------------------------------------------------------

    def command(self, action: e.HostCommand, payload: Any = None) -> None:
        """Sends the action and its payload (see `messages.Envelope`) to the action's host.

        Does nothing if that process was lost: the event HostLost informs the control plane of the loss.
        """
        if isinstance(action, e.Continue):
            payload = [payload.tokens, payload.sampling.max_tokens, payload.sampling.stop]
        if (member := self._membership.members.get(action.host)) is not None:
            self._post(member.mailbox, m.Envelope(self._epoch, action, payload))

    def begin(self, sample: SampleId, prompt: Prompt, conversation: Conversation) -> None:
        self._workflows.begin(sample, conversation)

    def _command_reward(
        self, mailbox: str, action: e.Score | e.WorkflowCommand | e.Drop, payload: Any
    ) -> None:
        self._post(mailbox, m.Envelope(self._epoch, action, payload))

    def score(self, action: e.Score, prompt: Prompt, completions: Sequence[Completion]) -> None:
        self._scoring.score(action, completions)

    def train(self, action: e.Train, groups: tuple[Group, ...]) -> None:
        """Sends the batch `action`, which consists of `groups`, to all trainer processes that are ready.

        If no trainer process is ready, does nothing: the batch is sent again once a restarted trainer is
        ready (`Driver.ask_again`).
        """
        if trainers := self._membership.ready("trainer"):
            self._held.put_back(groups)
            plan = plan_new(self._config, groups, self._shares_prompts)
            self._send_batch(trainers, action, plan)

    def hold(self, action: e.Hold) -> None:
        """Tells all trainer processes that are ready what they wait for until their next batch."""
        for member in self._membership.ready("trainer"):
            self._post(member.mailbox, m.Envelope(self._epoch, action))

    def _send_batch(
        self, trainers: Iterable[Member], action: e.Train, plan: BatchPlan, **journaled: list[Any]
    ) -> None:
        command = m.Envelope(self._epoch, action, {"plan": plan.to_wire(), **journaled})
        for member in trainers:
            self._post(member.mailbox, command)

    def _post(self, mailbox: str, message: m.AnyMessage) -> None:
        """Queues a message for `mailbox`; the next `_send` posts all queued messages together."""
        self._out[mailbox].append(m.to_plain(message))

    def _send(self) -> None:
        ready = [member.mailbox for member in self._membership.ready("reward")]
        self._scoring.assign(ready)
        self._workflows.assign(ready)
        out, self._out = self._out, defaultdict(list)
        for mailbox, messages in out.items():
            self._broker.post(mailbox, *messages)


SAMPLED = (e.SampleFinished, e.TurnFinished)
"""The events of hosts that come with a trajectory."""


def _newest_version(event: e.Event) -> int:
    """Returns the newest policy version that a host's event mentions; -1 if the event mentions none."""
    if isinstance(event, e.HostAdopted):
        return event.version
    spans = event.spans if isinstance(event, SAMPLED) else ()
    return max((span.version for span in spans), default=-1)


def _announced(message: m.AnyMessage) -> Posted | None:
    if isinstance(message, m.EventReport) and isinstance(message.event, SAMPLED):
        mailbox = mailbox_of(message.name, message.incarnation)
        return Posted(message.event.sample, mailbox, message.number)
    return None
