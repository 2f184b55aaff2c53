"""episode.history: exact keeps every sampled token; template branches where the template drops one."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from areal_jax.assembly.parts import open_inputs
from areal_jax.config.loading import load_config
from areal_jax.control import events as e
from areal_jax.episodes.conversation import Conversation
from areal_jax.episodes.limits import Limits, limits_of
from areal_jax.tasks.hf_tokenizer import HFTokenizer
from areal_jax.tasks.task import Task
from areal_jax.tasks.tokenizers import Tokenizer
from areal_jax.types import ArealError, Completion, Prompt
from tests.episodes.chat_templates import tokenizer_of
from tests.episodes.test_workflow_runner import SAMPLE, Run
from tests.small_run import small

LIMITS = Limits(length=900, max_tokens=99, max_turns=9, timeout_s=20.0, tool_timeout_s=20.0)
CHAT = Prompt(messages=[{"role": "user", "content": "the hell"}], task="own")
SAID = ["7", "<think>\nhm\n</think>\n\n8", "9", "10"]
"""Answers; the second one has a thought."""


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> HFTokenizer:
    return tokenizer_of(tmp_path_factory.mktemp("qwen"), "qwen")


def workflow_of(role: str) -> Any:
    async def workflow(prompt, episode):
        for _ in SAID:
            await episode.generate()
            episode.add(role, "go on")
        return 1.0

    return workflow


def played(tokenizer: HFTokenizer, history: Any, role: str) -> tuple[list[e.TurnAdded], str]:
    """Plays an episode; returns its turns as they were asked for, and the text of the last one's path."""
    limits = LIMITS._replace(history=history)
    with closing(Run(workflow_of(role), CHAT, limits, SAID.__getitem__, tokenizer)) as run:
        run.runner.begin(SAMPLE, CHAT, run.talk)
        assert run.until(e.EpisodeEnded, e.EpisodeFailed) == e.EpisodeEnded(SAMPLE, 1.0)
    asked = [event for event in run.seen if isinstance(event, e.TurnAdded)]
    return asked, tokenizer._backend.decode(run.talk.whole("stop").tokens.tolist(), skip_special_tokens=False)


def block(role: str, text: str) -> str:
    return f"<|im_start|>{role}\n{text}<|im_end|>\n"


def test_exact_keeps_the_thoughts_that_the_template_would_drop(qwen):
    asked, text = played(qwen, "exact", "user")
    assert [(event.after, event.segment) for event in asked] == [(None, 0)] * 4
    asks = [block("user", "the hell"), *[block("user", "go on")] * 3]
    answers = [block("assistant", said) for said in SAID]
    assert text + "<|im_end|>\n" == "".join(ask + said for ask, said in zip(asks, answers, strict=True))


def test_template_branches_exactly_where_the_template_drops_a_thought(qwen):
    """The third turn leaves out the second answer's thought, and shares the first turn's tokens."""
    asked, text = played(qwen, "template", "user")
    assert [(event.after, event.segment) for event in asked] == [(-1, 0), (0, 0), (0, 1), (2, 1)]
    said = [{"role": "assistant", "content": content} for content in ("7", "8", "9")]
    chat = [*CHAT.messages, *[one for each in said for one in (each, {"role": "user", "content": "go on"})]]
    assert text == qwen.chat_text(chat) + "10"
    # Between a question and the results of tools the template keeps thoughts, so nothing branches.
    asked, text = played(qwen, "template", "tool")
    assert [(event.after, event.segment) for event in asked] == [(-1, 0), (0, 0), (1, 0), (2, 0)]
    assert text.count("hm") == 1


def test_after_a_crash_all_branches_are_answered_from_the_journal(qwen):
    limits = LIMITS._replace(history="template")
    with closing(Run(workflow_of("user"), CHAT, limits, SAID.__getitem__, qwen)) as run:
        run.runner.begin(SAMPLE, CHAT, run.talk)
        for _ in SAID:
            run.play(run.until(e.TurnAdded))
    kept = Conversation.from_wire(run.talk.to_wire())
    with closing(Run(workflow_of("user"), CHAT, limits, SAID.__getitem__, qwen)) as again:
        again.runner.begin(SAMPLE, CHAT, kept)
        assert again.until(e.TurnAdded, e.EpisodeEnded, e.EpisodeFailed) == e.EpisodeEnded(SAMPLE, 1.0)
    whole = run.talk.whole("stop")
    assert [qwen.decode(one.tokens[one.loss_mask].tolist()) for one in (whole, *whole.branches)] == [
        "7910",
        SAID[1],
    ]


def test_a_fork_is_rendered_with_its_own_messages(qwen):
    async def workflow(prompt, episode):
        await episode.generate()
        for said in ("one", "two"):
            fork = episode.fork()
            fork.add("user", said)
            await fork.generate()
        episode.add("user", "three")
        return float((await episode.generate()).text)

    limits = LIMITS._replace(history="template")
    with closing(Run(workflow, CHAT, limits, "7658".__getitem__, qwen)) as run:
        run.runner.begin(SAMPLE, CHAT, run.talk)
        assert run.until(e.EpisodeEnded, e.EpisodeFailed) == e.EpisodeEnded(SAMPLE, 8.0)
    asked = [event for event in run.seen if isinstance(event, e.TurnAdded)]
    assert [(event.after, event.segment) for event in asked] == [(-1, 0), (0, 1), (0, 2), (0, 0)]
    for event, said in zip(asked[1:], ("one", "two", "three"), strict=True):
        text = qwen._backend.decode(list(event.tokens), skip_special_tokens=False)
        assert text == "<|im_end|>\n" + block("user", said) + "<|im_start|>assistant\n"


# --- the config ---------------------------------------------------------------------------------------------


class Asked(Task):
    """Chats or texts, with a workflow."""

    def __init__(self, tokenizer: Tokenizer | None, prompt: Prompt) -> None:
        self.tokenizer, self._prompt = tokenizer, prompt

    def __len__(self) -> int:
        return 4

    def __getitem__(self, i: int) -> Prompt:
        return self._prompt

    def score(self, prompt: Prompt, completion: Completion) -> float:
        return 0.0

    workflow = staticmethod(workflow_of("user"))


def test_the_loader_refuses_a_template_with_which_no_exact_history_is_possible(tmp_path: Path):
    counting, words = tokenizer_of(tmp_path, "counting"), ("generation.length=200", "trainer.length=200")
    chat = Prompt(messages=CHAT.messages)
    with pytest.raises(ArealError, match=r"not write the same text .* set episode.history=template"):
        open_inputs(small(tmp_path, *words), [Asked(counting, chat)])
    assert open_inputs(small(tmp_path, *words, "episode.history=template"), [Asked(counting, chat)])
    assert open_inputs(small(tmp_path, *words), [Asked(tokenizer_of(tmp_path / "qwen", "qwen"), chat)])


def test_the_template_of_texts_is_refused(tmp_path: Path):
    text = Asked(None, Prompt("a"))
    with pytest.raises(ArealError, match=r"the prompts of tasks.Asked are texts, .* leave episode.history"):
        open_inputs(small(tmp_path, "episode.history=template"), [text])
    assert open_inputs(small(tmp_path), [text])


def test_the_setting_reaches_the_episodes():
    config = load_config("run.name=x", "episode.history=template")
    assert limits_of(config.episode, 9, 8).history == "template"
    assert limits_of(load_config("run.name=x").episode, 9, 8).history == "exact"
