"""OpenAI's client, unmodified, in long conversations with tools: exact tokens, and a branch for each edit.

The client parses each answer's tool calls and sends them back written differently. AREAL_JAX_TOOL_TURNS sets
the number of tool turns of the slow test.
"""

from __future__ import annotations

import copy
import json
import os
from collections import Counter
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest

from areal_jax.tasks.chat_messages import canonical
from areal_jax.tasks.hf_tokenizer import HFTokenizer
from areal_jax.types import ArealError
from tests.episodes.chat_templates import tokenizer_of
from tests.episodes.test_session import FAMILIES, TOOLS, kept_by_client, random_call, random_text
from tests.serving.tool_agents import ToolRun, logp_of

TOOL_TURNS = int(os.environ.get("AREAL_JAX_TOOL_TURNS", "600"))
TURNS = 20
"""Turns of a conversation before it is edited."""
EDITS = ("user", "assistant", "tool", "argument", "dropped", "swapped", "tools")
CLIENT = openai.OpenAI(base_url="http://localhost", api_key="-", max_retries=0)
FIRST: Any = [{"role": "system", "content": "Count."}, {"role": "user", "content": "the hell"}]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("tokenizers")


# --- the policy ---------------------------------------------------------------------------------------------


def written(tokenizer: HFTokenizer, ordinal: int, segment: int, before: int) -> list[int]:
    """A turn that calls tools, one in ten none; some have thoughts, some lack an end or encode strangely."""
    rng, notation = np.random.default_rng([ordinal, segment, before]), tokenizer.notation
    text = f"{random_text(rng)} {before}"
    if rng.random() < 0.9:
        calls = [random_call(rng, notation) for _ in range(1 + rng.integers(3) * (notation == "hermes"))]
        marked = [f"\n<tool_call>\n{call}\n</tool_call>" for call in calls]
        text = {"llama": calls[0], "hermes": text + "".join(marked), "none": f"CALL {calls[0]}"}[notation]
    if notation == "hermes" and rng.random() < 0.4:
        text = f"<think>\n{random_text(rng)}\n</think>\n\n{text}"
    tokens = tokenizer.encode(text)
    if rng.random() < 0.5:
        tokens = [token for one in text for token in tokenizer.encode(one)]  # one character at a time
    return tokens if rng.random() < 0.2 else [*tokens, tokenizer.eos_id]


# --- the client ---------------------------------------------------------------------------------------------


def sent_back(rng: np.random.Generator, message: Any) -> Any:
    """An answer as clients send it: the client's own object, or arguments in other order and white space."""
    if rng.random() < 0.2:
        return message
    kept = {"content": None, **message.model_dump(exclude_none=True)}
    kept = kept_by_client(rng, kept)
    for call in kept.get("tool_calls", ()):
        arguments = call["function"]["arguments"]
        if isinstance(arguments, dict) or rng.random() < 0.5:
            parsed = json.loads(arguments) if isinstance(arguments, str) else arguments
            spaced = json.dumps(
                dict(reversed(parsed.items())), indent=int(rng.integers(4)), ensure_ascii=False
            )
            call["function"]["arguments"] = spaced
    if not kept["content"] and kept.get("tool_calls") and rng.random() < 0.3:
        del kept["content"]
    return kept


def replies(rng: np.random.Generator, answer: Any, number: int) -> list[Any]:
    """Results of the tools that an answer calls, or a question; no two have the same content."""
    said = f"{number} {random_text(rng)}"
    if calls := answer.tool_calls:
        return [
            {"role": "tool", "tool_call_id": call.id, "content": f"{said} {place}"}
            for place, call in enumerate(calls)
        ]
    if (answer.content or "").startswith("CALL "):  # the template has no tools: the agent reads the text
        json.loads(answer.content.removeprefix("CALL "))
        return [{"role": "tool", "content": said}]
    return [{"role": "user", "content": said}]


def text_after(family: str, is_cut: bool, new: list[Any]) -> str:
    """What the family's template writes between an answer and the next one, as its authors document it."""
    if family == "llama":
        head, end = "<|start_header_id|>{}<|end_header_id|>\n\n".format, "<|eot_id|>"
        shown = [
            head("ipython") + json.dumps(one["content"], ensure_ascii=False)
            if one["role"] == "tool"
            else head("user") + one["content"].strip()
            for one in new
        ]
        return end * is_cut + "".join(text + end for text in shown) + head("assistant")
    end, begun = "<|im_end|>", "\n<|im_start|>"
    if family == "qwen" and new[0]["role"] == "tool":
        results = "".join(f"\n<tool_response>\n{one['content']}\n</tool_response>" for one in new)
        shown = f"{begun}user{results}{end}"
    else:
        shown = "".join(f"{begun}{one['role']}\n{one['content']}{end}" for one in new)
    return end * is_cut + shown + f"{begun}assistant\n"


class Agents:
    """Conversations with OpenAI's client; each request is checked, and each edit's place is noted."""

    def __init__(self, tokenizer: HFTokenizer, family: str, edits: int) -> None:
        self._tokenizer, self._family, self._edits = tokenizer, family, edits
        self.run = ToolRun(tokenizer, self.play, partial(written, tokenizer))
        self.counts: Counter[str] = Counter()
        self.places: dict[int, list[int]] = {}
        """Ordinal -> for each edit, the number of the turn after which it begins a branch; -1: none."""

    def play(self, base_url: str, ordinal: int) -> None:
        """An agent: a conversation of TURNS turns, then requests with an edited history."""
        rng = np.random.default_rng(ordinal)
        ask = partial(self._asked, CLIENT.with_options(base_url=base_url), ordinal)
        said, ends, before, new, is_cut = list(FIRST), [], [], [], False
        for turn in range(TURNS):
            answer, prompt = ask(said, 0)
            # No token is computed again: all before are those of the last turn, and then comes the new text.
            if turn:
                text = text_after(self._family, is_cut, new)
                assert prompt == before + self._tokenizer.encode_rendered(text), (ordinal, turn, text)
            before, is_cut = prompt + answer.token_ids, answer.token_ids[-1] != self._tokenizer.eos_id
            new = replies(rng, answer.message, turn)
            self.counts["tool turns"] += new[0]["role"] == "tool"
            said.append(sent_back(rng, answer.message))
            ends.append(len(said))
            said += new
        said = [one if isinstance(one, dict) else one.model_dump(exclude_none=True) for one in said]
        for kind in range(self._edits):
            self._edit(rng, ask, ordinal, said, ends, kind)

    def _edit(
        self, rng: np.random.Generator, ask: Any, ordinal: int, said: list[Any], ends: list[int], kind: int
    ) -> None:
        possible = list(edited(rng, said, ends[-1], has_tools=self._family != "smollm"))
        name, other, tools, at = possible[(ordinal * self._edits + kind) % len(possible)]
        self.places.setdefault(ordinal, []).append(sum(end <= at for end in ends) - 1)
        self.counts[name] += 1
        answer, prompt = ask(other, 1 + kind, tools)
        other = [*other, sent_back(rng, answer.message), *replies(rng, answer.message, 99)]
        # The branch goes on like any conversation.
        again = ask(other, 1 + kind, tools)[1]
        assert again[: len(prompt) + len(answer.token_ids)] == prompt + answer.token_ids

    def _asked(
        self, client: Any, ordinal: int, said: list[Any], segment: int, tools: Any = TOOLS
    ) -> tuple[Any, list[int]]:
        """Returns the answer and its prompt's tokens; checks them, log-probs and versions."""
        own = {} if self._family == "smollm" else {"tools": tools}
        extra = {"return_token_ids": True}
        got = client.chat.completions.create(
            model="any", messages=said, logprobs=True, extra_body=extra, **own
        )
        (answer,), prompt = got.choices, got.prompt_token_ids
        assert self.run.engine.prompts[ordinal, segment][-1] == prompt
        assert answer.token_ids == written(self._tokenizer, ordinal, segment, len(prompt))
        versions = np.array(answer.versions)
        assert (np.diff(versions) >= 0).all() and versions[-1] <= self.run.version
        positions = len(prompt) + np.arange(len(versions))
        logp = [one.logprob for one in answer.logprobs.content]
        np.testing.assert_array_equal(logp, logp_of(versions, positions))
        self.counts["turns"] += 1
        self.counts["swapped turns"] += len(set(answer.versions)) > 1
        return answer, prompt


def edited(
    rng: np.random.Generator, said: list[Any], end: int, has_tools: bool
) -> Iterator[tuple[str, list[Any], Any, int]]:
    """Yields edits of the messages before `end`: kind, messages, tools, index of the first that differs."""
    for kind in EDITS:
        other, tools = copy.deepcopy(said), TOOLS
        if kind == "tools":
            if has_tools:
                yield kind, other, [*TOOLS[:1], {**TOOLS[1], "strict": True}], -1
            continue
        places = [n for n in range(2, end - (kind == "swapped")) if _is_place(kind, said, n)]
        if not places:
            continue
        at = int(rng.choice(places))
        if kind == "argument":
            function = other[at]["tool_calls"][-1]["function"]
            function["arguments"] = json.dumps({**json.loads(function["arguments"]), "more": 1})
        elif kind == "dropped":
            del other[at]
        elif kind == "swapped":
            other[at : at + 2] = other[at + 1], other[at]
        else:
            content = other[at].get("content") or ""
            content = content if isinstance(content, str) else content[0]["text"]
            other[at]["content"] = f"changed {content}"
        yield kind, other, tools, at


def _is_place(kind: str, said: list[Any], n: int) -> bool:
    if kind == "argument":
        return bool(said[n].get("tool_calls"))
    if kind == "swapped":
        return canonical(said[n]) != canonical(said[n + 1])
    return kind == "dropped" or said[n]["role"] == kind


# --- tests --------------------------------------------------------------------------------------------------


def checked(tokenizer: HFTokenizer, family: str, episodes: int, edits: int) -> Agents:
    """Plays the episodes, and checks which turns begin a branch: each edit, and no other."""
    agents = Agents(tokenizer, family, edits)
    agents.run.play(episodes)
    for ordinal, asked in agents.run.asked.items():
        wanted = [(turn - 1, 0) for turn in range(TURNS)]
        for number, after in enumerate(agents.places.get(ordinal, []), start=1):
            turn = TURNS + 2 * (number - 1)
            wanted += [(after, number), (turn, number)]
            shared = agents.run.talks.of(asked[0].sample).paths[after].tokens.tolist() if after >= 0 else []
            assert agents.run.engine.prompts[ordinal, number][0][: len(shared)] == shared
        assert [(event.after, event.segment) for event in asked] == wanted, ordinal
    assert len(agents.run.asked) == episodes and agents.counts["swapped turns"] > 0
    return agents


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_an_agents_tool_turns_keep_every_token_and_each_edit_branches(folder, family):
    agents = checked(tokenizer_of(folder / family, family), family, episodes=4, edits=4)
    assert agents.counts["turns"] == 4 * (TURNS + 2 * 4) and agents.counts["tool turns"] > 50
    assert sum(agents.counts[kind] for kind in EDITS) == 16


@pytest.mark.parametrize("history", ["exact", "template"])
def test_an_agents_chats_follow_episode_history(folder, history):
    """With template, a question makes Qwen's template drop earlier thoughts; results of tools do not."""
    tokenizer = tokenizer_of(folder / history, "qwen")
    call = '<tool_call>\n{"name": "add", "arguments": {}}\n</tool_call>'
    texts = [f"<think>\nhm\n</think>\n\n{said}" for said in (f"5\n{call}", "6", "7")]

    def write(ordinal: int, segment: int, before: int) -> list[int]:
        return [*tokenizer.encode(texts[len(run.asked[ordinal]) - 1]), tokenizer.eos_id]

    def agent(base_url: str, ordinal: int) -> None:
        client, said = CLIENT.with_options(base_url=base_url), list(FIRST)
        for number in range(3):
            own: Any = dict(messages=said, tools=TOOLS, extra_body={"return_token_ids": True})
            got = client.chat.completions.create(model="any", **own)
            prompts.append(tokenizer.decode(got.prompt_token_ids))
            said += [
                got.choices[0].message,
                *replies(np.random.default_rng(0), got.choices[0].message, number),
            ]

    prompts: list[str] = []
    run = ToolRun(tokenizer, agent, write, history=history)
    run.play(1)
    is_exact = history == "exact"
    places = [(event.after, event.segment) for event in run.asked[0]]
    assert places == [(-1, 0), (0, 0), (1, 0) if is_exact else (-1, 1)]
    assert [prompt.count("hm") for prompt in prompts] == [0, 1, 2 if is_exact else 0]


def real_smollm(folder: Path) -> HFTokenizer:
    """SmolLM2's own tokenizer and template where its package is installed, else ours."""
    from areal_jax.models.io.gguf import cached_folder, smollm2_gguf

    try:
        return HFTokenizer.from_folder(cached_folder(smollm2_gguf()))
    except ArealError:
        return tokenizer_of(folder / "smollm", "smollm")


@pytest.mark.soak
def test_thousands_of_tool_turns_keep_every_token_and_each_of_their_edits_branches(folder):
    """With AREAL_JAX_TOOL_TURNS=10000: 10,000 tool turns and more than 500 edits, of all seven kinds."""
    counts: Counter[str] = Counter()
    for family in FAMILIES:
        tokenizer = real_smollm(folder) if family == "smollm" else tokenizer_of(folder / family, family)
        episodes = -(-TOOL_TURNS // (len(FAMILIES) * (TURNS - 3)))
        found = checked(tokenizer, family, episodes, edits=3).counts
        counts += found
    assert counts["tool turns"] >= TOOL_TURNS and all(counts[kind] > 0 for kind in EDITS)
    assert sum(counts[kind] for kind in EDITS) >= TOOL_TURNS // 20
