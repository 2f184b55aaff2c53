"""Sessions: whatever a client does to its messages, turns continue exact tokens, and edits begin branches."""

from __future__ import annotations

import copy
import json
from typing import Any

import numpy as np
import pytest

from areal_jax.episodes.session import AskedTurn, ChatSession
from areal_jax.tasks.errors import TaskError
from areal_jax.tasks.hf_tokenizer import HFTokenizer
from areal_jax.tasks.tool_calls import Notation
from tests.episodes.chat_templates import tokenizer_of

TOOLS: Any = [
    {"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": {}}}}
    for name in ("add", "look")
]
FIRST: Any = [{"role": "system", "content": "Count."}, {"role": "user", "content": "the hell"}]
FAMILIES: dict[str, Notation] = {"smollm": "none", "qwen": "hermes", "llama": "llama"}


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, HFTokenizer]:
    folder = tmp_path_factory.mktemp("tokenizers")
    return {family: tokenizer_of(folder / family, family) for family in FAMILIES}


def session_of(tokenizers: dict[str, HFTokenizer], family: str, history: Any = "exact") -> ChatSession:
    assert tokenizers[family].notation == FAMILIES[family]
    return ChatSession(tokenizers[family], history)


# --- a policy and a client ----------------------------------------------------------------------------------


def random_text(rng: np.random.Generator) -> str:
    return "".join(rng.choice(list('ab {}":<>\n\t\\é☃07the'), rng.integers(0, 12)))


def random_value(rng: np.random.Generator, depth: int = 2) -> Any:
    kinds = [
        lambda: random_text(rng),
        lambda: int(rng.integers(-5, 1000)),
        lambda: float(rng.integers(-5, 5)),
        lambda: float(rng.normal()),
        lambda: bool(rng.integers(2)),
        lambda: None,
        lambda: [random_value(rng, depth - 1) for _ in range(rng.integers(0, 3))],
        lambda: {random_text(rng): random_value(rng, depth - 1) for _ in range(rng.integers(0, 4))},
    ]
    return kinds[rng.integers(len(kinds) if depth else 6)]()


def random_call(rng: np.random.Generator, notation: Notation) -> str:
    """A tool call as a policy writes it: keys in any order, with any white space."""
    arguments = {random_text(rng): random_value(rng) for _ in range(rng.integers(0, 4))}
    name = "parameters" if notation == "llama" else "arguments"
    items = [("name", str(rng.choice(["add", "look"]))), (name, arguments)]
    return json.dumps(dict(items), ensure_ascii=bool(rng.integers(2)), indent=[None, 1][rng.integers(2)])


def sampled_by(rng: np.random.Generator, tokenizer: HFTokenizer, notation: Notation) -> list[int]:
    """A random answer, of tokens that the tokenizer may never choose; some end by their length."""
    thought = (
        f"<think>\n{random_text(rng)}\n</think>\n\n" if rng.random() < 0.4 and notation == "hermes" else ""
    )
    text = random_text(rng)
    if rng.random() < 0.7 and notation != "none":
        calls = [random_call(rng, notation) for _ in range(1 if notation == "llama" else rng.integers(1, 4))]
        text = (
            calls[0]
            if notation == "llama"
            else text + "".join(f"\n<tool_call>\n{call}\n</tool_call>" for call in calls)
        )
    tokens = [token for one in thought + text for token in tokenizer.encode(one)]  # one character at a time
    if rng.random() < 0.5:
        tokens = tokenizer.encode(thought + text)
    is_cut = rng.random() < 0.2
    return tokens if is_cut else [*tokens, tokenizer.eos_id]


def in_javascript(value: Any) -> Any:
    """JSON has one kind of number there: 1.0 is written as 1."""
    if isinstance(value, dict):
        return {name: in_javascript(item) for name, item in sorted(value.items(), reverse=True)}
    if isinstance(value, list):
        return [in_javascript(item) for item in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value


def kept_by_client(rng: np.random.Generator, message: dict[str, Any]) -> dict[str, Any]:
    """The answer as clients send it back: other white space, no thoughts, fields that say nothing."""
    kept = copy.deepcopy(message)
    if rng.random() < 0.7:
        kept.pop("reasoning_content", None)
    if kept["content"] in (None, ""):
        kept["content"] = [None, "", []][rng.integers(3)] if kept.get("tool_calls") else ""
    elif rng.random() < 0.3:
        kept["content"] = [{"type": "text", "text": kept["content"]}]
    for call in kept.get("tool_calls", ()):
        parsed = in_javascript(json.loads(call["function"]["arguments"]))
        call["function"]["arguments"] = (
            json.dumps(parsed, separators=(",", ":")) if rng.random() < 0.7 else parsed
        )
        call["index"] = 0
    return kept | {"refusal": None, "annotations": [], "audio": None, "function_call": None}


def reply(rng: np.random.Generator, answer: dict[str, Any]) -> list[dict[str, Any]]:
    """What a client says to an answer: results of its tools, or a question."""
    calls = answer.get("tool_calls", ())
    results = [{"role": "tool", "tool_call_id": call["id"], "content": random_text(rng)} for call in calls]
    return results or [{"role": "user", "content": random_text(rng)}]


def play(rng: np.random.Generator, session: ChatSession, tokenizer: HFTokenizer, turns: int) -> list[Any]:
    """Talks for so many turns, each of which must continue the tokens of the last; returns the messages."""
    said, last = list(FIRST), None
    for _ in range(turns):
        turn = session.ask(said, TOOLS if tokenizer.notation != "none" else ())
        if last is not None:
            assert turn.parent is last and session.branches == 0
            before = [*last.prompt, *last.sampled]
            assert turn.prompt[: len(before)] == before and len(turn.prompt) > len(before)
        answer = session.answered(turn, sampled_by(rng, tokenizer, tokenizer.notation))
        said += [kept_by_client(rng, answer), *reply(rng, answer)]
        last = turn
    return said


# --- tests --------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_five_hundred_turns_of_ten_conversations_continue_exact_tokens(tokenizers, family):
    for seed in range(10):
        rng, session = np.random.default_rng(seed), session_of(tokenizers, family)
        play(rng, session, tokenizers[family], 50)
        assert session.branches == 0 and len(session.turns) == 50
        exact: list[int] = []
        for turn in session.turns:
            assert turn.prompt == [*exact, *turn.added]
            exact = [*turn.prompt, *turn.sampled]


def edited(rng: np.random.Generator, said: list[Any]) -> tuple[list[Any], int]:
    """The conversation with one change, and the index of the first message that differs."""
    at = int(rng.integers(0, len(said)))
    other = copy.deepcopy(said)
    message = other[at]
    calls = message.get("tool_calls")
    if calls and rng.random() < 0.7:
        function = calls[rng.integers(len(calls))]["function"]
        arguments = function["arguments"]
        arguments = json.loads(arguments) if isinstance(arguments, str) else arguments
        function["arguments"] = json.dumps(arguments | {"more": 1})
    elif isinstance(message["content"], str):
        message["content"] += "!"
    else:
        message["content"] = "!"
    return other, at


@pytest.mark.parametrize("family", FAMILIES)
def test_edited_histories_branch_where_they_differ(tokenizers, family):
    """No token that was sampled after the edit is in the branch's prompt."""
    branched = 0
    for seed in range(50):
        rng, session = np.random.default_rng(seed), session_of(tokenizers, family)
        said = play(rng, session, tokenizers[family], int(rng.integers(2, 7)))
        other, at = edited(rng, said)
        if at == len(said) - 1 and at + 1 == len(other) and other[at]["role"] == "assistant":
            continue
        ends, end = [], 0  # of each turn's answer, in messages
        for turn in session.turns:
            end += len(turn.said) + 1
            ends.append(end)
        kept = [turn for turn, end in zip(session.turns, ends, strict=True) if end <= at]
        branch = session.ask(other, TOOLS if FAMILIES[family] != "none" else ())
        assert branch.parent is (kept[-1] if kept else None)
        is_edit = at < ends[-1]  # the last question is no turn yet
        session.answered(branch, sampled_by(rng, tokenizers[family], FAMILIES[family]))
        assert session.branches == int(is_edit)
        branched += session.branches
        before = [*kept[-1].prompt, *kept[-1].sampled] if kept else []
        assert branch.prompt == [*before, *branch.added]
    assert branched > 30


def answered(
    session: ChatSession, tokenizer: HFTokenizer, said: list[Any], text: str
) -> tuple[AskedTurn, dict[str, Any]]:
    turn, tokens = session.ask(said), [*tokenizer.encode(text), tokenizer.eos_id]
    return turn, session.answered(turn, tokens)


def test_equal_questions_branch_and_the_newest_of_equal_answers_goes_on(tokenizers):
    session, tokenizer = session_of(tokenizers, "smollm"), tokenizers["smollm"]
    one, same = (answered(session, tokenizer, FIRST, "yes")[0] for _ in range(2))
    assert (one.parent, same.parent, session.branches) == (None, None, 1)
    said = [*FIRST, {"role": "assistant", "content": "yes"}, {"role": "user", "content": "go on"}]
    assert session.ask(said).parent is same


def test_an_answer_with_its_thoughts_changed_is_another(tokenizers):
    session, tokenizer = session_of(tokenizers, "qwen"), tokenizers["qwen"]
    turn, answer = answered(session, tokenizer, FIRST, "<think>\nhm\n</think>\n\n7")
    assert answer == {"role": "assistant", "content": "7", "reasoning_content": "hm"}
    for thought, parent in (("hm", turn), (None, turn), ("other", None)):
        said = [*FIRST, answer | {"reasoning_content": thought}, {"role": "user", "content": "go on"}]
        assert session.ask(said).parent is parent


def test_with_history_template_a_dropped_thought_begins_a_branch(tokenizers):
    for family, text, is_dropped in (("qwen", "<think>\nhm\n</think>\n\n7", True), ("smollm", "7", False)):
        session, tokenizer = session_of(tokenizers, family, "template"), tokenizers[family]
        turn, answer = answered(session, tokenizer, FIRST, text)
        said = [*FIRST, answer, {"role": "user", "content": "go on"}]
        following, _ = answered(session, tokenizer, said, "8")
        assert following.parent is (None if is_dropped else turn)
        assert following.prompt == tokenizer.encode_chat(tokenizer.chat_text(said))
        assert session.branches == int(is_dropped)


def test_with_history_template_a_branch_shares_the_answers_before_the_dropped_thought(tokenizers):
    session, tokenizer = session_of(tokenizers, "qwen", "template"), tokenizers["qwen"]
    said, turns = list(FIRST), []
    for text in ("7", "<think>\nhm\n</think>\n\n8", "9", "10"):
        turn, answer = answered(session, tokenizer, said, text)
        turns.append(turn)
        said += [answer, {"role": "user", "content": "go on"}]
    assert [turn.parent for turn in turns] == [None, turns[0], turns[0], turns[2]]
    assert turns[3].prompt == tokenizer.encode_chat(tokenizer.chat_text(said[:-2]))
    assert session.branches == 1
    first, second = (tokenizer.decode([*turn.prompt, *turn.sampled]) for turn in (turns[1], turns[3]))
    assert "hm" in first and "hm" not in second


def test_other_tools_or_template_arguments_begin_another_conversation(tokenizers):
    session, tokenizer = session_of(tokenizers, "qwen"), tokenizers["qwen"]
    answer = answered(session, tokenizer, FIRST, "7")[1]
    said = [*FIRST, answer, {"role": "user", "content": "go on"}]
    assert session.ask(said, TOOLS).parent is None
    quiet = session.ask(said, arguments={"enable_thinking": False})
    assert quiet.parent is None and tokenizer.decode(quiet.prompt).endswith("</think>\n\n")


def test_what_cannot_be_answered_is_refused(tokenizers):
    session = session_of(tokenizers, "smollm")
    for said in ([], [*FIRST, {"role": "assistant", "content": "x"}]):
        with pytest.raises(TaskError, match="gives nothing to answer; end it with"):
            session.ask(said)
    with pytest.raises(TaskError, match="lacks role or content"):
        session.ask([{"role": "user"}])
    assert session.turns == []
