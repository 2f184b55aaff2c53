"""The core of every driver: what it records, which payload counts, and where groups come from."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import pytest

from areal_jax.config.loading import make_config
from areal_jax.config.tree import Config
from areal_jax.control import events as e
from areal_jax.control.machine import ControlError, ControlPlane
from areal_jax.control.reward_gate import Gates
from areal_jax.lab.simulation.machines import EmptyPrompts
from areal_jax.lab.simulation.memory_journal import MemoryJournal
from areal_jax.lab.simulation.schedule import Schedule
from areal_jax.runtime.core import DriverCore, Incoming
from areal_jax.tasks.errors import PromptError
from areal_jax.types import ArealError, Completion, Group, Prompt, SampleId, Sampling, Trajectory, VersionSpan

CONFIG = make_config(
    {
        "run": {"steps": 2},
        "algorithm": {"group_size": 2},
        "trainer": {"batch_size": 1},
        "control": {"max_staleness": 1},
    }
)


def trajectory(sample: SampleId, token: int) -> Trajectory:
    """One token: it tells payloads apart."""
    ones, zeros = np.ones(1, bool), np.zeros(1, np.int32)
    tokens = np.full(1, token, np.int32)
    return Trajectory(sample, tokens, ones, zeros, zeros, zeros, Sampling(), "stop")


def finished(member: int, token: int, host: str = "a") -> Incoming:
    sample = SampleId(0, member)
    return e.SampleFinished(sample, host, (VersionSpan(0, 0, 1),), "stop"), trajectory(sample, token)


class Recorder:
    """Endpoints and rows that keep what they get."""

    def __init__(self) -> None:
        self.dispatched: list[e.Dispatch] = []
        self.fetched: list[tuple[e.Fetch, object]] = []
        self.scored: list[e.Score] = []
        self.trained: list[tuple[Group, ...]] = []
        self.rows: list[tuple[int, list[int]]] = []
        self.gates: list[Gates] = []
        self.seen: list[e.Event] = []

    def command(self, action: e.HostCommand, payload: object = None) -> None:
        if isinstance(action, e.Dispatch):
            self.dispatched.append(action)
        if isinstance(action, e.Fetch):
            self.fetched.append((action, payload))

    def score(self, action: e.Score, prompt: Prompt, completions: Sequence[Completion]) -> None:
        self.scored.append(action)

    def train(self, action: e.Train, groups: tuple[Group, ...]) -> None:
        self.trained.append(groups)

    def end(self, ordinal: int) -> None:
        pass

    def see(self, event, actions) -> None:
        self.seen.append(event)

    def make(self, step, groups, trained, digest, gates) -> dict[str, float]:
        self.rows.append((step, [group.ordinal for group in groups]))
        self.gates.append(gates)
        return trained | {"step": step}


class Started:
    """A core with one host of two slots, a member of the first group already finished."""

    def __init__(self, config: Config = CONFIG) -> None:
        self.config, self.journal, self.out = config, MemoryJournal(), Recorder()
        self.core = self.make(ControlPlane(config))
        self.deliver((e.RunStarted("d0", 2), None), (e.HostJoined("a", 2), None))
        self.deliver((e.HostAdopted("a", 0, "d0"), None))
        assert self.out.dispatched[0].samples == (SampleId(0, 0), SampleId(0, 1))
        self.deliver(finished(0, token=10))

    def make(self, control: ControlPlane) -> DriverCore:
        return DriverCore(self.config, control, self.journal, EmptyPrompts(), self.out, self.out)

    def deliver(self, *incoming: Incoming) -> None:
        entries = self.core.record(incoming)
        self.core.act(action for entry in entries for action in entry.actions)

    def restart(self) -> None:
        """A new process: the journal is all that is left."""
        self.core = self.make(ControlPlane.fold(self.config, [event for _, event, _ in self.journal.rows]))

    def kinds(self) -> list[str]:
        return [type(event).__name__ for _, event, _ in self.journal.rows]

    def tokens(self) -> list[list[tuple[int, float | None]]]:
        """(token, reward) of every sample of every batch that the trainer was asked for."""
        return [
            [(int(t.tokens[0]), t.reward) for group in groups for t in group.trajectories]
            for groups in self.out.trained
        ]


class BadPrompts(EmptyPrompts):
    """Prompts of which some methods fail for group 0."""

    def __init__(self, *methods: str) -> None:
        super().__init__()
        for name in methods:
            setattr(self, name, partial(self.fail, getattr(self, name)))

    def fail(self, method: Callable[..., Any], asked: int | Trajectory) -> Any:
        ordinal = asked.sample.ordinal if isinstance(asked, Trajectory) else asked
        if ordinal == 0:
            raise PromptError("a bad row " * 100)
        return method(asked)


@pytest.mark.parametrize("method", ["prompt_tokens", "has_workflow", "prompt", "completion"])
def test_a_prompt_that_fails_costs_its_group_and_no_other(method: str):
    """Whether at its dispatch or at its score: the event is recorded next, and nothing else is lost."""
    run = object.__new__(Started)
    run.config, run.journal, run.out = CONFIG, MemoryJournal(), Recorder()
    run.core = DriverCore(CONFIG, ControlPlane(CONFIG), run.journal, BadPrompts(method), run.out, run.out)
    entries = run.core.record([(e.RunStarted("d0", 2), None), (e.HostJoined("a", 8), None)])
    incoming = run.core.act(action for entry in entries for action in entry.actions)
    sent = [action.samples[0].ordinal for action in run.out.dispatched]
    if method in ("prompt_tokens", "has_workflow"):
        assert sent == [1]
    else:
        assert (sent, incoming) == ([0, 1], [])
        entries = run.core.record([finished(0, 10), finished(1, 11)])
        incoming = run.core.act(action for entry in entries for action in entry.actions)
        assert run.out.scored == []
    assert incoming == [(e.PromptFailed(0, 0, ("a bad row " * 100)[:500]), None)]
    entries = run.core.record(incoming)
    assert run.core.act(action for entry in entries for action in entry.actions) == []
    assert [action.samples[0].ordinal for action in run.out.dispatched] == [*sent, 2]
    assert run.core.control.state.dropped == {"failed_prompt": 1}


def test_the_host_of_an_episode_knows_of_it_before_its_workflow_does():
    """So a host that drains waits for the first turn, however late the workflow asks for it."""
    calls: list[object] = []
    out = Recorder()
    out.command = lambda action, payload=None: calls.append((action, payload))
    out.begin = lambda sample, prompt, conversation: calls.append(sample)
    prompts = EmptyPrompts(Schedule(turns=1.0))
    core = DriverCore(CONFIG, ControlPlane(CONFIG), MemoryJournal(), prompts, out, out)
    entries = core.record([(e.RunStarted("d0", 2), None), (e.HostJoined("a", 2), None)])
    core.act(action for entry in entries for action in entry.actions)
    members = SampleId(0, 0), SampleId(0, 1)
    assert calls[:3] == [(e.Dispatch(members, "a", 0), None), *members]


def test_too_many_unusable_prompts_end_the_run_with_how_many_of_how_many_and_the_last_message():
    run = Started()
    abort = e.Abort((("failed_prompt", 26),), 256)
    run.core._problem = "tasks.own could not read its prompt at index 7: KeyError: 'text'"
    count = "26 of the newest 256 prompts cannot be used, more than control.max_failed_prompts"
    with pytest.raises(ArealError, match=count) as caught:
        run.core.act([abort])
    assert run.core._problem in str(caught.value) and "raise generation.length" in str(caught.value)


def test_a_prompt_that_fails_while_its_group_is_trained_ends_the_run():
    """Then its samples are complete, and part of a batch: another process could read it."""
    run = Started()
    run.core._prompts = BadPrompts("prompt")
    with pytest.raises(PromptError, match="a bad row"):
        run.core.act([e.Train(0, (0,), (0,))])


SCORED = (e.RewardScored(0, 0, (1.0, 0.5)), None)
TRAINED = (e.BatchTrained(0, (0,), "d1", {"loss": 2.0}), None)


def test_the_first_payload_of_a_sample_counts_and_a_late_one_is_not_recorded():
    run = Started()
    run.deliver(finished(0, token=99))
    run.deliver(finished(1, token=11), finished(1, token=98))
    run.deliver(SCORED)
    assert run.tokens() == [[(10, 1.0), (11, 0.5)]]
    assert [int(t.tokens[0]) for t in run.journal.group(0, 0, 2)] == [10, 11]


def test_a_payload_of_a_lost_host_does_not_replace_that_of_the_host_that_took_over():
    run = Started()
    run.deliver((e.HostLost("a", "silent"), None), (e.HostJoined("b", 2), None), finished(1, 97, "a"))
    run.deliver(finished(1, token=11, host="b"), SCORED)
    assert run.tokens() == [[(10, 1.0), (11, 0.5)]]
    assert [int(t.tokens[0]) for t in run.journal.group(0, 0, 2)] == [10, 11]


@pytest.mark.parametrize("moment", ["before the last sample", "before the rewards", "while it trains"])
def test_after_a_restart_the_groups_come_from_the_journal(moment: str):
    run = Started()
    moments = {
        "before the last sample": [finished(1, 11)],
        "before the rewards": [SCORED],
        "while it trains": [],
    }
    for name, incoming in moments.items():
        if name == moment:
            run.restart()
            run.out.trained.clear()
            run.deliver((e.RunResumed(2), None), (e.HostJoined("a", 2), None))
        run.deliver(*incoming)
    assert run.tokens() == [[(10, 1.0), (11, 0.5)]]


def test_a_batch_that_is_delivered_again_leaves_no_second_row():
    run = Started()
    run.deliver(finished(1, 11), SCORED)
    run.deliver(TRAINED, TRAINED)
    run.deliver(TRAINED)
    run.restart()
    run.deliver(TRAINED)
    assert run.out.rows == [(0, [0])]
    assert run.kinds().count("BatchTrained") == 1
    (row,) = [event for _, event, _ in run.journal.rows if isinstance(event, e.BatchTrained)]
    assert row.metrics == {"loss": 2.0, "step": 0}


def test_a_batch_that_the_control_plane_refuses_makes_no_row():
    run = Started()
    run.deliver(finished(1, 11), SCORED)
    with pytest.raises(ControlError, match=r"batch 0 of groups \(1,\) was trained"):
        run.core.record([(e.BatchTrained(0, (1,), "d1", {"loss": 2.0}), None)])
    assert run.out.rows == [] and run.kinds()[-1] == "RewardScored"
    run.deliver(TRAINED)
    assert run.out.rows == [(0, [0])]


def test_events_before_a_refused_one_are_in_the_journal_and_it_is_not():
    run, refused = Started(), (e.VersionCommitted(7, "d7"), None)
    with pytest.raises(ControlError, match="version 7 was committed"):
        run.core.record([finished(1, 11), refused, SCORED])
    assert run.kinds()[-1] == "SampleFinished"
    run.restart()
    assert not run.core.control.state.is_stale(SCORED[0])


def test_nothing_is_acted_on_before_it_is_recorded():
    run = Started()
    rows = len(run.journal.rows)
    entries = run.core.record([finished(1, 11)])
    assert (len(run.journal.rows), run.out.scored) == (rows + 1, [])
    run.core.act(action for entry in entries for action in entry.actions)
    assert run.out.scored == [e.Score(0, 0)]


def test_commits_survive_a_power_cut_and_no_other_event_waits_for_the_disk():
    """Files of a version or checkpoint that the journal does not know are deleted or refused at a resume."""
    run, synced = Started(), []
    append = run.journal.append

    def watched(entries, durable=False):
        synced.append(([type(entry.event).__name__ for entry in entries], durable))
        return append(entries, durable)

    run.journal.append = watched  # type: ignore[method-assign]
    run.deliver(finished(1, 11), SCORED)
    run.deliver(TRAINED)
    run.deliver((e.VersionCommitted(1, "d1"), None))
    run.deliver((e.HostAdopted("a", 1, "d1"), None), (e.CheckpointCommitted(1), None))
    assert synced == [
        (["SampleFinished", "RewardScored"], False),
        (["BatchTrained"], False),
        (["VersionCommitted"], True),
        (["HostAdopted", "CheckpointCommitted"], True),
    ]


def test_a_closed_gate_withholds_its_part_from_trainer_and_row_and_a_restart_too():
    gate = {"part": "intermediate", "first": "closed"}
    config = CONFIG.model_dump() | {"algorithm": {"group_size": 2, "gate": gate}}
    run = Started(make_config(config))
    parts = ((("correct", 1.0), ("intermediate", 0.5)), (("correct", 0.0), ("intermediate", 0.0)))
    run.deliver(finished(1, 11), (e.RewardScored(0, 0, (3.5, -0.5), parts), None))
    assert run.tokens() == [[(10, 3.0), (11, -0.5)]]
    run.restart()
    run.out.trained.clear()
    run.deliver((e.RunResumed(2), None))
    assert run.tokens() == [[(10, 3.0), (11, -0.5)]]
    assert [t.reward for t in run.journal.group(0, 0, 2)] == [3.5, -0.5]  # the journal has them as scored
    run.deliver(TRAINED)
    assert run.out.gates == [(("intermediate", False),)]
