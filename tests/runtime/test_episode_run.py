"""Runs of episodes: the plain loop at eta = 0, crashes in their middle, tools called once, and replays."""

from __future__ import annotations

import io
import os
import time
from pathlib import Path

import numpy as np
import pytest

from areal_jax.assembly.parts import assemble
from areal_jax.config.tree import Config
from areal_jax.control import events as e
from areal_jax.generation.rollout import rollout
from areal_jax.observe.metrics import read_rows
from areal_jax.runtime.jobs import resume, run
from areal_jax.runtime.reading import audit_run, open_journal
from areal_jax.runtime.replay import replay
from areal_jax.tasks.datasets.guess import Guess
from areal_jax.trajectories.packing import pack
from areal_jax.types import ArealError, Prompt, Reward
from areal_jax.weights.digest import digest
from tests.small_run import killed_at, small

STEPS = 6
WORDS = (
    f"run.steps={STEPS}",
    f"tasks={__name__}:Clerk",
    "trainer.learning_rate=3e-3",
    "generation.max_tokens=4",
)


class Clerk(Guess):
    """Guesses in two turns; a tool writes each call's id into the file $CALLS, and its result is added."""

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
@pytest.mark.parametrize("on_update", ["recompute", "keep"])
def test_a_run_of_episodes_that_crashes_goes_on_calls_no_tool_twice_and_replays(
    tmp_path, monkeypatch, on_update
):
    """It crashes as a turn ends, as a tool returns and as an episode ends; two slots for sixteen samples."""
    folder, file = tmp_path / "run", tmp_path / "calls"
    strategy = "keep" if on_update == "keep" else "interruptible"
    own = (
        *WORDS,
        "generation.slots=2",
        "generation.decode_steps=1",
        f"control.strategy={strategy}",
    )
    monkeypatch.setenv("CALLS", str(file))
    crashes = [
        lambda event: isinstance(event, e.TurnFinished) and event.sample.ordinal >= 5 and event.turn == 0,
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
    assert {row["turns_mean"] for row in rows} == {2.0}
    result = audit_run(folder)
    assert (len(rows), result.violations, result.in_flight) == (STEPS, [], 0)
    with open_journal(folder) as journal:
        events = [row.event for row in journal.rows()]
        in_doubt = [ev for ev in events if isinstance(ev, e.EpisodeFailed) and ev.reason == "tool_in_doubt"]
        check_turns(journal, [ev for ev in events if isinstance(ev, e.SampleFinished)])
    calls = file.read_text().split()
    assert len(calls) == len(set(calls)) > STEPS * 4 * 4 * 2
    assert "failed (tool_in_doubt), so the group starts again" in notes + said.getvalue()
    assert in_doubt  # the second crash: a tool had returned, and the journal did not have it
    mixed = [
        ev for ev in events if isinstance(ev, e.SampleFinished) and len({s.version for s in ev.spans}) > 1
    ]
    assert mixed and sum(isinstance(ev, e.RunResumed) for ev in events) == 3
    found = replay(folder)
    assert (found.difference, found.steps, found.uncompared) == ("", STEPS, 0)
    assert file.read_text().split() == calls


def check_turns(journal, finished: list[e.SampleFinished]) -> None:
    """Each trajectory has the turns that were sampled, and what was added has no loss."""
    for event in finished:
        one = journal.trajectory(event.sample)
        assert set(one.turn_ids.tolist()) == {-1, 0, 1}
        assert (one.loss_mask == (one.turn_ids >= 0)).all() and (one.versions[~one.loss_mask] == -1).all()
        first, second = (np.flatnonzero(one.turn_ids == turn) for turn in range(2))
        assert second[0] - first[-1] == 3  # a digit and a sign
        assert one.spans == event.spans


def test_settings_that_promise_one_version_are_refused(tmp_path):
    for words in (["control.strategy=one_step"], ["control.strategy=pinned"], ["generation.on_update=drain"]):
        with pytest.raises(
            ArealError, match=r"Guess has a workflow: .* set control.strategy to interruptible"
        ):
            assemble(small(tmp_path, *WORDS, *words), [Guess()])
    with pytest.raises(ArealError, match=r"Guess has a workflow, but algorithm.samples=reference"):
        assemble(small(tmp_path, *WORDS, "algorithm.preset=sft"), [Guess()])
