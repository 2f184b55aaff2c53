"""Evaluation: the first prompts in their order, every figure from the rewards that came, failures apart."""

from __future__ import annotations

import json
import string
import urllib.request
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from areal_jax.assembly.parts import make_engine
from areal_jax.config.sections import EpisodeConfig, GenerationConfig, RunConfig, RuntimeConfig
from areal_jax.config.tree import Config
from areal_jax.evaluation.result import (
    Failure,
    PassResult,
    ScoredPrompt,
    TaskResult,
    overall,
    task_figures,
)
from areal_jax.evaluation.run import EvalSettings, evaluate
from areal_jax.generation.engine import Engine
from areal_jax.models.attention import PackedAttention
from areal_jax.models.config import model_config
from areal_jax.models.model import Model
from areal_jax.serving.run_services import make_gateway
from areal_jax.tasks.source import WeightedTask
from areal_jax.tasks.task import Task
from areal_jax.tasks.tokenizers import CharTokenizer
from areal_jax.types import ArealError, Completion, Prompt, Reward, VersionedParams
from tests.hangs import HANG_S

LETTERS, LENGTH, MAX_TOKENS = "abcdefghijklmnop", 24, 8

GENERATION = GenerationConfig(slots=4, length=LENGTH, max_tokens=MAX_TOKENS, decode_steps=2, prefill_chunk=8)
CONFIG = Config(
    run=RunConfig(seed=3),
    generation=GENERATION,
    runtime=RuntimeConfig(reward_timeout_s=2.0, deadline_s=HANG_S),
)
SETTINGS = EvalSettings(CONFIG, limit=10, samples=4)


class Indexed(Task):
    """Prompt i says its index in the letters a to j; every second prompt is answered right."""

    def __len__(self) -> int:
        return 12

    def __getitem__(self, i: int) -> Prompt:
        return Prompt("k" + "".join(LETTERS[int(digit)] for digit in f"{i:02}"), info={"i": i})

    def score(self, prompt: Prompt, completion: Completion) -> float:
        return 1.0 if prompt.info["i"] % 2 else 0.01 * prompt.info["i"]


class FirstOnly(Indexed):
    """Of a prompt's samples the first is right."""

    def score_group(self, prompt: Prompt, completions: Sequence[Completion]) -> list[float]:
        return [1.5] + [0.0] * (len(completions) - 1)


class Fragile(Indexed):
    """Prompt 3 cannot be scored, 5 hangs, 4 fits nowhere, 6 leaves two tokens of room."""

    def __getitem__(self, i: int) -> Prompt:
        prompt = super().__getitem__(i)
        long = {4: LENGTH, 6: LENGTH - 2}.get(i)
        return replace(prompt, text="a" * long) if long else prompt

    def score(self, prompt: Prompt, completion: Completion) -> float:
        if prompt.info["i"] == 3:
            raise RuntimeError("no judge for three")
        while prompt.info["i"] == 5:  # it has two seconds of CPU time; asleep it would have eight
            pass
        return super().score(prompt, completion)


class Spoken(Indexed):
    """The reward is a number made of the sampled tokens, so that the tokens show in the figures."""

    def score(self, prompt: Prompt, completion: Completion) -> float:
        return sum(token * 19**place for place, token in enumerate(completion.tokens))


TASKS = {"indexed": Indexed(), "first": FirstOnly(), "fragile": Fragile(), "spoken": Spoken()}


@pytest.fixture(scope="module")
def model() -> Model:
    return tiny(LETTERS)


def tiny(alphabet: str) -> Model:
    tokenizer = CharTokenizer(alphabet)
    sizes = dict(width=16, heads=2, kv_heads=2, head_dim=8, mlp_width=32)
    return Model(model_config("tiny", tokenizer.vocab_size, **sizes), tokenizer)


@pytest.fixture(scope="module")
def params(model: Model) -> VersionedParams:
    return VersionedParams(7, model.init(1), "d" * 16)


@pytest.fixture(scope="module")
def engine(model: Model) -> Engine:
    return make_engine(GENERATION, model)


@pytest.fixture(scope="module")
def heard() -> list[tuple]:
    return []


@pytest.fixture(scope="module")
def result(engine: Engine, params: VersionedParams, heard: list[tuple]) -> dict[str, TaskResult]:
    tasks = {name: WeightedTask(task) for name, task in TASKS.items()}
    return evaluate(engine, params, tasks, SETTINGS, progress=lambda *words: heard.append(words))


def figures(result: dict[str, TaskResult], task: str) -> dict[str, Any]:
    return task_figures(result[task])


@pytest.mark.slow
def test_the_first_prompts_are_asked_in_their_order(result: dict[str, TaskResult]):
    expected = [1.0 if i % 2 else 0.01 * i for i in range(10)]
    found = result["indexed"]
    assert found.prompts == 10
    rewards = {way: [prompt.rewards for prompt in one.prompts] for way, one in found.passes.items()}
    assert rewards == {
        "greedy": [(reward,) for reward in expected],
        "sampled": [(reward,) * 4 for reward in expected],
    }
    shown = figures(result, "indexed")
    assert shown["greedy"]["accuracy"]["value"] == 0.5
    assert shown["greedy"]["reward_mean"]["value"] == pytest.approx(np.mean(expected))
    assert {k: shown["sampled"][f"pass@{k}"]["value"] for k in (1, 2, 4)} == {1: 0.5, 2: 0.5, 4: 0.5}


def test_one_right_sample_in_four(result: dict[str, TaskResult]):
    shown = figures(result, "first")["sampled"]
    assert [shown[f"pass@{k}"]["value"] for k in (1, 2, 4)] == [0.25, 0.5, 1.0]
    assert shown["reward_mean"]["value"] == 1.5 / 4
    assert figures(result, "first")["greedy"]["accuracy"]["value"] == 1.0


def test_a_failed_reward_is_no_wrong_answer_and_what_does_not_fit_is_named(result: dict[str, TaskResult]):
    shown = figures(result, "fragile")
    assert (shown["prompts"], shown["too_long"], shown["too_long_prompts"]) == (10, 1, ["fragile/4"])
    assert shown["cramped"] == 1
    right, left = {1, 7, 9}, {0, 1, 2, 6, 7, 8, 9}
    for way in ("greedy", "sampled"):
        one = shown[way]
        assert (one["scored"], one["failed"], one["timed_out"]) == (len(left), 1, 1)
        first, second = one["failures"]
        assert (first["prompt"], first["outcome"]) == ("fragile/3", "failed")
        assert "no judge for three" in first["message"]
        assert (second["prompt"], second["outcome"]) == ("fragile/5", "timed_out")
    assert shown["greedy"]["accuracy"]["value"] == pytest.approx(len(right) / len(left))


def test_overall_counts_every_prompt_once(result: dict[str, TaskResult]):
    shown = task_figures(overall(result))
    assert (shown["prompts"], shown["too_long"], shown["cramped"]) == (40, 1, 1)
    assert shown["greedy"]["scored"] == 37 and shown["greedy"]["failed"] == 1
    tokens = [figures(result, name)["sampled"]["tokens"] for name in TASKS]
    assert shown["sampled"]["tokens"] == sum(tokens)


def test_greedy_answers_are_the_likeliest_tokens(
    model: Model, params: VersionedParams, result: dict[str, TaskResult]
):
    """Token by token against dense forwards."""

    @jax.jit
    def likeliest(row: jax.Array, last: jax.Array) -> jax.Array:
        positions = jnp.arange(LENGTH)[None]
        hidden, _ = model.hidden(
            params.params, row[None], positions, PackedAttention(jnp.ones_like(row[None]))
        )
        return model.logits(params.params, hidden[0, last][None]).argmax()

    for index, prompt in list(enumerate(result["spoken"].passes["greedy"].prompts))[:3]:
        tokens, said = model.tokenizer.encode(Spoken()[index].text), []
        while len(said) < MAX_TOKENS and model.tokenizer.eos_id not in said:
            row = np.zeros(LENGTH, np.int32)
            row[: len(tokens) + len(said)] = [*tokens, *said]
            said.append(int(likeliest(row, len(tokens) + len(said) - 1)))
        assert prompt.rewards == (float(Spoken().score(Spoken()[index], Completion("", tuple(said), ""))),)
        assert prompt.lengths == (len(said),)
        assert prompt.truncated == (model.tokenizer.eos_id not in said,)


@pytest.mark.slow
def test_samples_of_a_prompt_differ_and_the_same_evaluation_gives_them_again(
    engine: Engine, params: VersionedParams, result: dict[str, TaskResult]
):
    """Alone, of fewer prompts, the task's samples are those that it had among the others."""
    spoken = result["spoken"].passes
    assert all(len(set(prompt.rewards)) > 1 for prompt in spoken["sampled"].prompts)
    again = evaluate(engine, params, {"spoken": WeightedTask(Spoken())}, replace(SETTINGS, limit=5))
    for way in ("greedy", "sampled"):
        assert again["spoken"].passes[way].prompts == spoken[way].prompts[:5]


def test_progress_counts_every_prompt(heard: list[tuple], result: dict[str, TaskResult]):
    for name in TASKS:
        for way in ("greedy", "sampled"):
            done = [words[3] for words in heard if words[:3] == (name, way, 10)]
            assert done[0] in (0, 1) and done[-1] == 10 and done == sorted(done)


@pytest.mark.parametrize(("changes", "says"), [({"limit": 0}, "limit=0"), ({"samples": -1}, "samples=-1")])
def test_settings_that_ask_nothing(changes, says):
    with pytest.raises(ArealError, match=says):
        replace(SETTINGS, **changes)


def test_a_prompt_that_raises_is_named(engine, params):
    class BadRow(Indexed):
        second = ""

        def __getitem__(self, i: int) -> Prompt:
            return Prompt({0: "k", 1: self.second}[i])

    for second, limit, message in (
        ("?", 2, r"prompt 1 of task own cannot be encoded: the character '\?' .*leave it out"),
        ("k", 3, r"tasks.own could not read its prompt at index 2: KeyError: 2"),
    ):
        BadRow.second = second
        with pytest.raises(ArealError, match=message):
            evaluate(engine, params, {"own": WeightedTask(BadRow())}, replace(SETTINGS, limit=limit))


def test_figures_of_nothing_scored():
    """All rewards failed: no figure claims to be 0."""
    lost = PassResult(1, 0.0, failures=(Failure("x/0", "failed", "boom"),), tokens=3, seconds=1.0)
    shown = task_figures(TaskResult(1, (), 0, {"greedy": lost}))
    assert "sampled" not in shown
    assert shown["greedy"]["accuracy"] == {"value": None, "low": None, "high": None}
    assert shown["greedy"]["reward_mean"]["value"] is None
    assert shown["greedy"]["completion_tokens_mean"] is shown["greedy"]["truncated_share"] is None


def test_right_is_a_reward_of_one_or_more():
    found = PassResult(3, 1.0, prompts=(ScoredPrompt((0.999, 1.0, 2.5), (1, 1, 1), (False,) * 3),))
    shown = task_figures(TaskResult(1, (), 0, {"sampled": found}))
    assert shown["sampled"]["pass@1"]["value"] == pytest.approx(2 / 3)


class Talkative(Indexed):
    """Episodes of 1 + i % 3 turns of a token each; prompt 4 is rejected, and the workflow of 7 fails."""

    async def workflow(self, prompt: Prompt, episode: Any) -> Reward | None:
        i = prompt.info["i"]
        for turn in range(1 + i % 3):
            await episode.generate(max_tokens=1)
            episode.add("user", LETTERS[turn])
        if i == 7:
            raise ValueError("no such room")
        return None if i == 4 else Reward(0.1 * i, {"correct": float(i > 5)})


def test_episodes_are_conducted_and_their_turns_counted(engine, params):
    result = evaluate(engine, params, {"own": WeightedTask(Talkative())}, SETTINGS)["own"]
    for way, samples in (("greedy", 1), ("sampled", 4)):
        found = result.passes[way]
        indices = [i for i in range(10) if i not in (4, 7)]
        assert [one.rewards for one in found.prompts] == [(0.1 * i,) * samples for i in indices]
        assert [one.lengths for one in found.prompts] == [(1 + i % 3,) * samples for i in indices]
        parts = [{"correct": float(i > 5), "turns": 1.0 + i % 3} for i in indices]
        assert [one.parts for one in found.prompts] == [(part,) * samples for part in parts]
        said = {failure.prompt: failure.message for failure in found.failures}
        assert said["own/4"] == "its workflow rejected it"
        assert said["own/7"] == "the workflow raised ValueError: no such room"
        assert len(said) == 2 and found.tokens == sum(sum(one.lengths) for one in found.prompts)


class Chatted(Indexed):
    def __getitem__(self, i: int) -> Prompt:
        return Prompt(messages=[{"role": "user", "content": LETTERS[i]}], info={"i": i})


def agent(base_url: str, messages: list[dict[str, str]]) -> None:
    """Asks as often as its prompt's letter says, 1 to 3 times, for a token."""
    for _ in range(1 + LETTERS.index(messages[0]["content"]) % 3):
        body = json.dumps({"messages": messages, "max_tokens": 1}).encode()
        sent = urllib.request.Request(f"{base_url}/chat/completions", body)
        with urllib.request.urlopen(sent, timeout=HANG_S) as answer:
            said = json.load(answer)["choices"][0]["message"]
        messages = [*messages, said, {"role": "user", "content": "k"}]


@pytest.mark.slow
def test_agents_are_evaluated():
    model, generation = tiny(string.printable), GENERATION.model_copy(update={"length": 160})
    engine, params = make_engine(generation, model), VersionedParams(7, model.init(1), "d" * 16)
    episode = EpisodeConfig(agent=f"{__name__}:agent")
    config = CONFIG.model_copy(update={"episode": episode, "generation": generation})
    settings = EvalSettings(config, limit=6, samples=2, make_gateway=make_gateway)
    result = evaluate(engine, params, {"own": WeightedTask(Chatted())}, settings)["own"]
    for way, samples in (("greedy", 1), ("sampled", 2)):
        found = result.passes[way].prompts
        rewards = [(1.0 if i % 2 else 0.01 * i,) * samples for i in range(6)]
        assert [one.rewards for one in found] == [pytest.approx(one) for one in rewards]
        assert [one.parts for one in found] == [({"turns": 1.0 + i % 3},) * samples for i in range(6)]
    alone = evaluate(engine, params, {"own": WeightedTask(Chatted())}, EvalSettings(config, limit=1))["own"]
    (failure,) = alone.passes["greedy"].failures
    assert "agents with a base_url are served in runs and by `areal-jax eval` only" in failure.message
