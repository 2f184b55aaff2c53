"""Runs of episodes: the plain loop at eta = 0, crashes in their middle, tools called once, and replays."""

from __future__ import annotations

import io
import os
import time
from pathlib import Path

import numpy as np
import pytest

from areal_jax.assembly.parts import assemble
from areal_jax.assembly.run_folder import open_journal
from areal_jax.config.tree import Config
from areal_jax.control import events as e
from areal_jax.generation.rollout import rollout
from areal_jax.jobs.local import resume, run
from areal_jax.observe.metrics import read_rows
from areal_jax.replay.folder_audit import audit_run
from areal_jax.replay.replay import replay
from areal_jax.tasks.datasets.guess import Guess
from areal_jax.tasks.task import Task
from areal_jax.trajectories.packing import pack
from areal_jax.trajectories.paths import paths_of, spans_of
from areal_jax.types import ArealError, Prompt, Reward
from areal_jax.weights.digest import digest
from tests.episodes.chat_templates import tokenizer_of
from tests.small_run import killed_at, small

STEPS = 6
WORDS = (
    f"run.steps={STEPS}",
    f"tasks={__name__}:Clerk",
    "trainer.learning_rate=3e-3",
    "generation.max_tokens=4",
)


class Clerk(Guess):
    """Guesses in two turns; a tool writes each call's id into the file $CALLS, and its result is added.

    Every second sample forks after the first turn, and the fork has a turn of its own before the last one.
    """

    def note(self, name: str, guess: str) -> str:
        with Path(os.environ["CALLS"]).open("a") as file:
            file.write(f"{name}\n")
        time.sleep(float(os.environ.get("CALL_S", "0")))
        return guess[:1] if guess.isdigit() else "0"

    async def workflow(self, prompt: Prompt, episode) -> Reward:
        right = 0.0
        for turn in range(2):
            said = await episode.generate(max_tokens=2 + turn)
            name = "/".join(map(str, (*episode.sample, turn)))
            digit = await episode.tool(self.note, name, said.text)
            episode.add("tool", f"{digit}{'<>'[int(episode.random.integers(2))]}")
            right += int(digit) == prompt.info["number"]
            if turn == 0 and episode.sample.member % 2:
                fork = episode.fork()
                fork.add("tool", "?")
                right += 0.1 * len((await fork.generate(max_tokens=3)).tokens)
        return Reward(right + 0.01 * len(said.tokens))


def plain_loop(config: Config) -> list[str]:
    parts = assemble(config)
    engine, learner, state = parts.engine(0), parts.learner, parts.first_state()
    digests, size = [], config.trainer.batch_size
    for step in range(config.run.steps):
        ordinals = range(step * size, (step + 1) * size)
        own = (engine, learner.publish(state), parts.tasks, ordinals, config.algorithm.group_size)
        groups = rollout(*own, config.run.seed, sampling=config.generation.sampling)
        batch = pack(groups, config.trainer.rows, config.row_length)
        state, _ = learner.update(state, learner.prepare(state, batch))
        digests.append(digest(state.params))
    return digests


@pytest.mark.slow
def test_at_eta_0_a_run_of_episodes_is_the_plain_loop(tmp_path, monkeypatch):
    config = small(tmp_path / "run", *WORDS, "control.max_staleness=0")
    monkeypatch.setenv("CALLS", str(tmp_path / "plain"))
    expected = plain_loop(config)
    monkeypatch.setenv("CALLS", str(tmp_path / "calls"))
    run(config, stream=io.StringIO())
    assert [row["params_digest"] for row in read_rows(tmp_path / "run")] == expected
    assert len(set(expected)) == STEPS
    calls = [sorted((tmp_path / name).read_text().split()) for name in ("plain", "calls")]
    assert calls[0] == calls[1] and len(calls[0]) == len(set(calls[0])) == STEPS * 4 * 4 * 2


@pytest.mark.slow
@pytest.mark.parametrize(
    "strategy",
    [
        pytest.param("interruptible", marks=pytest.mark.soak),
        "pinned",
        pytest.param("keep", marks=pytest.mark.soak),
        pytest.param("one_step", marks=pytest.mark.soak),
    ],
)
def test_a_run_of_episodes_that_crashes_goes_on_calls_no_tool_twice_and_replays(
    tmp_path, monkeypatch, strategy
):
    """It crashes as a fork's turn ends, as a tool returns and as an episode ends.

    There are two slots for sixteen samples, of which eight have a fork.
    """
    folder, file = tmp_path / "run", tmp_path / "calls"
    own = (
        *WORDS,
        "generation.slots=2",
        "generation.decode_steps=1",
        f"control.strategy={strategy}",
    )
    monkeypatch.setenv("CALLS", str(file))
    monkeypatch.setenv("CALL_S", "0.3")  # so that versions change between the turns of a sample
    crashes = [
        lambda event: isinstance(event, e.TurnFinished) and event.sample.ordinal >= 5 and event.segment == 1,
        lambda event: isinstance(event, e.ToolReturned) and event.sample.ordinal >= 10,
        lambda event: isinstance(event, e.EpisodeEnded) and event.sample.ordinal >= 15,
    ]
    with killed_at(monkeypatch, crashes[0]):
        run(small(folder, *own), stream=io.StringIO())
    notes = ""
    for crash in crashes[1:]:
        with killed_at(monkeypatch, crash):
            resume(folder, [], stream=(noted := io.StringIO()))
            notes += noted.getvalue()
    said = io.StringIO()
    rows = resume(folder, [], stream=said).metrics
    assert {(row["turns_mean"], row["branches_mean"]) for row in rows} == {(2.5, 0.5)}
    result = audit_run(folder)
    assert (len(rows), result.violations, result.in_flight) == (STEPS, [], 0)
    with open_journal(folder) as journal:
        events = [row.event for row in journal.rows()]
        in_doubt = [ev for ev in events if isinstance(ev, e.EpisodeFailed) and ev.reason == "tool_in_doubt"]
        restarted = [
            action
            for row in journal.rows()
            for action in row.actions
            if isinstance(action, e.Reissue) and action.reason == "lost_version"
        ]
        check_turns(journal, [ev for ev in events if isinstance(ev, e.SampleFinished)])
    calls = file.read_text().split()
    assert len(calls) == len(set(calls)) > STEPS * 4 * 4 * 2
    may_mix = strategy in ("interruptible", "keep")
    # The second crash: a tool had returned, and the journal did not have it. Episodes of one version start
    # again after a crash, because the new hosts have the newest version only.
    assert bool(in_doubt) == may_mix
    assert ("failed (tool_in_doubt), so the group starts again" in notes + said.getvalue()) == may_mix
    assert bool(restarted) == (not may_mix)
    mixed = [
        ev for ev in events if isinstance(ev, e.SampleFinished) and len({s.version for s in ev.spans}) > 1
    ]
    assert bool(mixed) == may_mix
    assert sum(isinstance(ev, e.RunResumed) for ev in events) == 3
    turns = [ev for ev in events if isinstance(ev, e.TurnFinished) and ev.turn]
    assert sum(bool(ev.reused) for ev in turns) > len(turns) / 2
    assert (sum(row["prefilled_tokens"] for row in rows), sum(row["reused_tokens"] for row in rows)) > (0, 0)
    found = replay(folder)
    assert (found.difference, found.steps, found.uncompared) == ("", STEPS, 0)
    assert file.read_text().split() == calls


def check_turns(journal, finished: list[e.SampleFinished]) -> None:
    """Each trajectory has the turns that were sampled, once each, and what was added has no loss."""
    for event in finished:
        one, has_fork = journal.trajectory(event.sample), event.sample.member % 2
        assert [set(path.turn_ids.tolist()) for path in paths_of(one)] == [
            {-1, 0, 1 + has_fork},
            *[{-1, 1}] * has_fork,
        ]
        for path in paths_of(one):
            is_sampled = path.turn_ids >= 0
            assert (path.loss_mask == is_sampled).all() and (path.versions[~is_sampled] == -1).all()
        first, second = (np.flatnonzero(one.turn_ids == turn) for turn in (0, 1 + has_fork))
        assert second[0] - first[-1] == 3  # a digit and a sign
        for fork in one.branches:  # a digit, a sign and a question mark after the first turn
            begin = first[-1] + 1
            assert (fork.tokens[: begin + 2] == one.tokens[: begin + 2]).all()
            assert np.flatnonzero(fork.loss_mask)[0] == begin + 3
        assert spans_of(one) == event.spans


class Chatter(Task):
    """Two questions; a random policy samples tokens that its own text does not encode to."""

    def __init__(self) -> None:
        self.tokenizer = tokenizer_of(Path(os.environ["TOKENIZER"]), "qwen")

    def __len__(self) -> int:
        return 4

    def __getitem__(self, i: int) -> Prompt:
        return Prompt(messages=[{"role": "user", "content": f"{i}"}])

    async def workflow(self, prompt: Prompt, episode) -> float:
        first = await episode.generate()
        episode.add("user", "and")
        second = await episode.generate()
        return float(first.tokens[0] < second.tokens[0])


@pytest.mark.slow
def test_a_run_branches_where_its_template_renders_answers_otherwise_and_replays(tmp_path, monkeypatch):
    """Few answers of an untrained policy are rendered as they were sampled."""
    monkeypatch.setenv("TOKENIZER", str(tmp_path / "tokenizer"))
    words = (
        "run.steps=3",
        f"tasks={__name__}:Chatter",
        "episode.history=template",
        "generation.max_tokens=6",
        "generation.length=120",
        "trainer.length=120",
        "trainer.rows=16",
    )
    folder = tmp_path / "run"
    rows = run(small(folder, *words), stream=io.StringIO()).metrics
    with open_journal(folder) as journal:
        events = [row.event for row in journal.rows()]
        again = [event for event in events if isinstance(event, e.TurnAdded) and event.turn == 1]
        branched = [event for event in again if event.after == -1]
        samples = {event.sample for event in branched}
        for event in events:
            if isinstance(event, e.SampleFinished):
                assert len(journal.trajectory(event.sample).branches) == (event.sample in samples)
    assert branched and sum(row["branches_mean"] for row in rows) > 0
    assert {event.segment for event in branched} == {1}
    assert {(event.after, event.segment) for event in again} <= {(-1, 1), (0, 0)}
    assert audit_run(folder).violations == []
    found = replay(folder)
    assert (found.difference, found.steps, found.uncompared) == ("", 3, 0)


def test_episodes_need_samples_of_the_policy(tmp_path):
    with pytest.raises(ArealError, match=r"Guess has a workflow, but algorithm.samples=reference"):
        assemble(small(tmp_path, *WORDS, "algorithm.preset=sft"), [Guess()])
