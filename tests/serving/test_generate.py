"""Agents that post token ids, as vLLM's clients do: continuations, branches, retries and bad requests."""

from __future__ import annotations

import json
import re
import urllib.error
import urllib.request
from typing import Any

import numpy as np
import pytest

from areal_jax.control import events as e
from areal_jax.episodes.token_paths import TokenPaths
from tests.hangs import HANG_S
from tests.serving.test_episode_gateway import LIMITS, TOKENIZER, client_of, playing, text_of


def generate(base_url: str, body: dict[str, Any], retries: int = 0) -> dict[str, Any]:
    """What renderers' client sends: the address is the base_url's, without its /v1."""
    address = f"{base_url.removesuffix('/v1')}/inference/v1/generate"
    headers = {"content-type": "application/json", "x-stainless-retry-count": str(retries)}
    request = urllib.request.Request(address, json.dumps(body).encode(), headers)
    try:
        with urllib.request.urlopen(request, timeout=HANG_S) as answer:
            return json.load(answer)
    except urllib.error.HTTPError as error:
        return {"status": error.code, "message": json.load(error)["error"]["message"]}


def posted(tokens: list[int], **sampling: Any) -> dict[str, Any]:
    own = {"stop_token_ids": [0], "logprobs": 1, "skip_special_tokens": False, "temperature": 0.3} | sampling
    return {"model": "policy", "token_ids": tokens, "sampling_params": own, "cache_salt": None}


def test_posted_tokens_that_extend_a_path_continue_it_exactly():
    seen: list[Any] = []

    def agent(base_url, messages):
        tokens = TOKENIZER.encode("ask:")
        for more in ("-", "+", ""):
            answer = generate(base_url, posted(tokens, max_tokens=5))
            (choice,) = answer["choices"]
            seen.append((list(tokens), choice))
            tokens += choice["token_ids"] + TOKENIZER.encode(more)
            assert answer["usage"]["total_tokens"] == len(seen[-1][0]) + len(choice["token_ids"])
            assert answer["request_id"] and choice["index"] == 0 and choice["finish_reason"] == "stop"
        return "done"

    with playing(agent, ["ab", "c", "de"].__getitem__) as policy:
        talk = policy.begin(0)
        assert isinstance(policy.wait()[0], e.EpisodeEnded)
    whole = talk.whole("stop")
    assert TOKENIZER.decode(whole.tokens.tolist()) == "ask:ab-c+de"
    assert [(event.after, event.segment) for event in policy.asked] == [(-1, 0), (0, 0), (1, 0)]
    assert [len(event.tokens) for event in policy.asked] == [4, 1, 1]
    sent = [token for _, choice in seen for token in choice["token_ids"]]
    assert sent == whole.tokens[whole.loss_mask].tolist() == TOKENIZER.encode("abcde")
    pairs = [pair for _, choice in seen for pair in choice["logprobs"]["content"]]
    assert [pair["token"] for pair in pairs] == [f"token_id:{token}" for token in sent]
    logps = np.array([pair["logprob"] for pair in pairs], np.float32)
    assert (logps == whole.behavior_logp[whole.loss_mask]).all()
    assert [choice["versions"] for _, choice in seen] == [[0, 0], [1], [2, 2]]


def test_other_tokens_begin_a_branch_and_an_equal_retry_joins():
    answers: list[list[int]] = []

    def agent(base_url, messages):
        def ask(tokens: list[int], retries: int = 0) -> list[int]:
            answers.append(generate(base_url, posted(tokens), retries)["choices"][0]["token_ids"])
            return [*tokens, *answers[-1]]

        first = ask(TOKENIZER.encode("q"))
        ask([*first, 5])
        ask([*first[:-1], 7, 5])  # an answer that was not sampled
        assert ask([*first, 5], retries=1) == [*first, 5, *answers[1]]
        ask([*first, 6])
        return None

    with playing(agent) as policy:
        talk = policy.begin(0)
        assert isinstance(policy.wait()[0], e.EpisodeEnded)
    steps = [(event.after, event.segment) for event in policy.asked]
    assert steps == [(-1, 0), (0, 0), (-1, 1), (0, 2)]
    assert answers[3] == answers[1]
    assert text_of(talk) == "qa" + TOKENIZER.decode([6]) + "d"


def test_an_answer_cut_by_its_length_can_be_continued_without_new_tokens():
    def agent(base_url, messages):
        first = generate(base_url, posted([1, 2], max_tokens=1))["choices"][0]["token_ids"]
        generate(base_url, posted([1, 2, *first], max_tokens=1))
        return "done"

    with playing(agent) as policy:
        talk = policy.begin(0)
        assert isinstance(policy.wait()[0], e.EpisodeEnded)
    assert policy.asked[1].tokens == () and policy.asked[1].after == 0
    assert talk.whole("stop").tokens.tolist() == [1, 2, *TOKENIZER.encode("ab")]


def test_the_longest_of_several_paths_is_continued_and_of_equal_ones_the_newest():
    paths = TokenPaths()

    def turn(said: list[int], answer: list[int]) -> tuple[int, int | None, tuple[int, ...]]:
        asked = paths.ask(said)
        paths.answered(asked, answer)
        return asked.number, None if asked.parent is None else asked.parent.number, asked.added

    assert turn([1], [2]) == (0, None, (1,))
    assert turn([1, 2, 3], [4]) == (1, 0, (3,))
    assert turn([1], []) == (2, None, (1,))
    assert turn([1, 2, 3, 4], [9]) == (3, 1, ())
    assert turn([1, 2, 5], [6]) == (4, 0, (5,))
    assert turn([1], [2, 3, 4]) == (5, 2, ())
    assert turn([1, 2, 3, 4, 8], []) == (6, 5, (8,))
    assert turn([2], [2]) == (7, None, (2,))
    unanswered = paths.ask([2, 2, 7])
    assert unanswered.parent is not None and paths.ask([2, 2, 7]).parent is unanswered.parent


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"token_ids": []}, "token_ids: List should have at least 1 item"),
        ({"token_ids": [1, 4000]}, r"token_ids contains 4000, but the policy's ids are 0 to "),
        ({"token_ids": [1], "features": {"mm_hashes": {}}}, "the policy reads text alone"),
        ({"token_ids": [1], "stream": True}, "stream=true: a turn is sent once it is complete"),
        ({"token_ids": [1], "sampling_params": {"n": 2}}, "sampling_params.n: .* 2"),
        ({"token_ids": "abc"}, "token_ids: .* 'abc'"),
        ({"token_ids": [1] * 400}, "maximum context length is 400 tokens .* the conversation has 400 tokens"),
        ({"token_ids": [1], "sampling_params": {"stop": ["a", ""]}}, r"sampling_params.stop.1: .* ''"),
        ({"token_ids": [1], "sampling_params": 5}, "sampling_params: .* 5"),
    ],
)
def test_a_bad_request_is_refused_and_the_episode_goes_on(body: dict[str, Any], message: str):
    def agent(base_url, messages):
        answer = generate(base_url, body)
        assert answer["status"] == 400 and re.search(message, answer["message"]), answer
        client_of(base_url).chat.completions.create(model="", messages=messages)
        return "done"

    with playing(agent) as policy:
        policy.begin(0)
        assert isinstance(policy.wait()[0], e.EpisodeEnded), policy.ended


def test_a_client_learns_the_longest_prompt_and_an_ended_episode_answers_no_more():
    seen: list[str] = []

    def agent(base_url, messages):
        seen.append(base_url)
        (model,) = client_of(base_url).models.list()
        assert model.max_model_len == LIMITS.length - 1
        assert generate(base_url, posted([1]))["choices"][0]["token_ids"]
        return "done"

    with playing(agent) as policy:
        policy.begin(0)
        policy.wait()
        assert generate(seen[0], posted([1]))["status"] == 404
