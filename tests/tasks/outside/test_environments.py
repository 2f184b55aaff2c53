"""Environments of other projects, unchanged, in virtual environments of their own.

AREAL_JAX_VENVS names a folder that keeps these environments between sessions; without it, each session builds
those that it needs.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import string
import subprocess
import sys
from collections import Counter
from contextlib import closing, suppress
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Regex, Tokenizer
from tokenizers.decoders import Fuse
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split

from areal_jax.assembly.run_folder import open_journal
from areal_jax.control import events as e
from areal_jax.episodes.conversation import Conversation
from areal_jax.replay.folder_audit import audit_run
from areal_jax.tasks.outside.environments import TextArenaGame
from areal_jax.tasks.outside.worker_process import INSTALL
from areal_jax.types import SampleId, Trajectory
from tests.hangs import HANG_S
from tests.serving.test_episode_gateway import LIMITS, TOKENIZER, Policy, text_of
from tests.test_docs import rows_of, run_as_printed

pytestmark = pytest.mark.soak

GUESS = Path(__file__).parents[3] / "configs" / "guess.yaml"

SPECIAL = ["<|im_start|>", "<|im_end|>", "<|endoftext|>", "<tool_call>", "</tool_call>"]
SPECIAL += ["<tool_response>", "</tool_response>", "</think>"]
"""The tokens that renderers' qwen3 needs."""

TEMPLATE = (
    "{% for one in messages %}{{ '<|im_start|>' + one.role + '\\n' + one.content + '<|im_end|>\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


@pytest.fixture(scope="session")
def python_of(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A function: kind of environment -> the python of a virtual environment with its package."""

    @cache
    def built(kind: str) -> str:
        kept = os.environ.get("AREAL_JAX_VENVS")
        folder = (Path(kept) if kept else tmp_path_factory.mktemp("venvs")) / kind
        python, done = folder / "bin" / "python", folder / "installed"
        if not done.exists():
            subprocess.run([sys.executable, "-m", "venv", "--clear", folder], check=True, timeout=HANG_S)
            install = [python, "-m", "pip", "install", "-q", "--no-compile", *shlex.split(INSTALL[kind])]
            subprocess.run(install, check=True, timeout=600)
            done.touch()
        return str(python)

    return built


# --- verifiers ----------------------------------------------------------------------------------------------

LEARNT = 9
"""Number of steps in which the reward rises."""

TRAIN_STEPS = int(os.environ.get("AREAL_JAX_TASKSET_STEPS", "3"))
"""Steps of the form that posts token ids; with 9 it learns, too."""


def write_tokenizer(folder: Path) -> None:
    """A tokenizer of single characters with the chat tokens of Qwen3."""
    letters = "\n" + string.digits + string.ascii_lowercase
    backend = Tokenizer(WordLevel({letter: i for i, letter in enumerate(letters)}, unk_token="0"))
    backend.pre_tokenizer, backend.decoder = Split(Regex(r"[\s\S]"), "isolated"), Fuse()
    backend.add_special_tokens(SPECIAL)
    folder.mkdir()
    backend.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": TEMPLATE}
    config |= {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


def running_in(folder: Path) -> list[str]:
    """The processes with this working folder, as those of a run that was started there."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has ended meanwhile
            if (process / "cwd").resolve() == folder.resolve():
                found.append((process / "cmdline").read_text().replace("\0", " "))
    return found


def sampled(folder: Path, read: Any) -> Counter[Any]:
    """How often the run's journal has a sample with this reward and `read(trajectory)`; no turn branches."""
    with open_journal(folder) as journal:
        events = [row.event for row in journal.rows()]
        assert {event.segment for event in events if isinstance(event, e.TurnAdded)} == {0}
        ended = {event.sample: event for event in events if isinstance(event, e.EpisodeEnded)}
        assert all(dict(event.parts) == {"sevens": event.reward} for event in ended.values())
        return Counter((event.reward, read(journal.trajectory(sample))) for sample, event in ended.items())


def exact(one: Trajectory) -> str:
    """All that verifiers' train client knows of a sample."""
    return json.dumps([one.tokens.tolist(), one.loss_mask.tolist(), one.behavior_logp.tolist()])


def by_turns(one: Trajectory) -> str:
    """The ids and log-probs of each turn, as a chat's answer has them."""
    own = [one.turn_ids == turn for turn in range(2)]
    return json.dumps([[one.tokens[turn].tolist(), one.behavior_logp[turn].tolist()] for turn in own])


@pytest.mark.parametrize(("client", "steps"), [("train", TRAIN_STEPS), ("eval", LEARNT)])
def test_a_taskset_of_verifiers_is_trained_unchanged(
    client: str, steps: int, python_of: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Every token and log-prob that the client got is trained, and its reward is the taskset's.

    It rises in a run of LEARNT steps.
    """
    taskset = Path(shutil.copy(Path(__file__).with_name("sevens_taskset.py"), tmp_path))
    assert "areal" not in taskset.read_text()
    write_tokenizer(tmp_path / "tokenizer")
    monkeypatch.setenv("SEVENS_RECORD", str(tmp_path / "record.jsonl"))
    renderer = "renderer.name=qwen3 renderer.thinking_retention=all" if client == "train" else ""
    settings = f"python={python_of('verifiers')} taskset=sevens-taskset tokenizer=tokenizer client={client} "
    words = " ".join(f"tasks.verifiers.{word}" for word in (settings + renderer).split())
    sizes = (
        "generation.slots=16 generation.length=48 generation.max_tokens=1 trainer.length=48 trainer.rows=8"
    )
    rate = "trainer.learning_rate=3e-3 trainer.lr_warmup_steps=0 trainer.lr_schedule=constant"
    run_as_printed(
        f"areal-jax run {GUESS} run.name=sevens run.steps={steps} tasks=verifiers {words} {sizes} {rate} "
        "trainer.batch_size=4 observe.live=false",
        tmp_path,
    )
    folder = tmp_path / "runs" / "sevens"
    rewards = [row["reward_mean"] for row in rows_of(folder)]
    assert steps < LEARNT or sum(rewards[-3:]) / 3 - rewards[0] >= 0.3, rewards
    assert audit_run(folder).ok
    assert not running_in(tmp_path), "the worker ends with the run"

    ours = sampled(folder, exact if client == "train" else by_turns)
    theirs: Counter[Any] = Counter()
    for line in (tmp_path / "record.jsonl").read_text().splitlines():
        _, reward, (branch,) = json.loads(line)
        *tokens, turns = branch
        theirs[reward, json.dumps(tokens if client == "train" else turns)] += 1
    assert ours.total() >= steps * 32 and not ours - theirs
    # Episodes that were under way when the run ended reached the taskset alone.
    assert (theirs - ours).total() <= 64


# --- textarena ----------------------------------------------------------------------------------------------

MOVES = {
    "GuessTheNumber-v0": [f"[{number}]" for number in (10, 5, 15, 3, 8, 13, 18, *range(20))],
    "TicTacToe-v0": ["[4]", "[0]", "[8]", "[2]", "[6]", "[1]", "[7]", "[3]", "[5]"] * 2,
    "KuhnPoker-v0": ["[bet]", "[call]", "[check]", "[call]", "[bet]", "[fold]"] * 5,
}
"""What the policy says at each turn, whatever it has seen; some of it is no legal move."""

ROOM = LIMITS._replace(length=20_000, max_turns=40)
GAMES = 6


def played(python: str, game: str, max_turns: int = 40) -> dict[int, tuple[e.EpisodeEnded, str]]:
    """Number of a game -> its end, and all its text; the games are played at the same time."""
    task = TextArenaGame(python=python, game=game, size=GAMES, seed=3)
    say = MOVES[game].__getitem__
    with closing(Policy(print, say, ROOM._replace(max_turns=max_turns), task)) as policy, closing(task):
        for index in range(GAMES):
            sample, prompt = SampleId(index, 0), replace(task[index], task="own")
            policy.talks[sample] = talk = Conversation(tuple(TOKENIZER.render(prompt)))
            policy.runner.begin(sample, prompt, talk)
        ended = policy.wait(GAMES, within_s=HANG_S)
        texts = {n: text_of(policy.talks[SampleId(n, 0)]) for n in ended}
        assert all(texts[n].startswith(TOKENIZER.decode(TOKENIZER.render(task[n]))) for n in ended)
    return {n: (event, texts[n]) for n, event in ended.items()}


@pytest.mark.parametrize("game", MOVES)
def test_a_game_is_played_to_its_end_and_equally_again(game: str, python_of: Any):
    first = played(python_of("textarena"), game)
    lowest = 0.0 if game.startswith("Guess") else -1.0
    for event, text in first.values():
        assert isinstance(event, e.EpisodeEnded), event
        assert event.reward is not None and lowest <= event.reward <= 1 and event.stop_reason == "stop"
        assert event.note and text.count("assistant: ") >= 2, (
            "the game says why it ended, after several turns"
        )
    assert len({event.reward for event, _ in first.values()}) > 1
    if lowest < 0:
        assert all(f"You are Player {(n + 3) % 2} in" in text for n, (_, text) in first.items())
        assert all(f"Player {(n + 4) % 2}: [" in text for n, (_, text) in first.items()), "an opponent moves"
    assert played(python_of("textarena"), game) == first


def test_a_game_that_is_cut_short_is_lost(python_of: Any):
    for event, _ in played(python_of("textarena"), "TicTacToe-v0", max_turns=1).values():
        assert (event.reward, event.stop_reason) == (-1.0, "length")
