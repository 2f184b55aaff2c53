from __future__ import annotations

from typing import Any

import cloudpickle
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal_jax.control.events import RewardScored
from areal_jax.tasks.blocks import ANSWER, TEMPLATES, THINK, parse, render
from areal_jax.tasks.errors import TaskError
from areal_jax.tasks.interleaved import (
    PARTS,
    Interleaved,
    RewardSettings,
    intermediate_reward,
    matched_places,
)
from areal_jax.tasks.scoring import score_group
from areal_jax.tasks.tokenizers import CharTokenizer
from areal_jax.types import Completion, Prompt, Reward

STRATEGIES = ("none", "all_or_none", "partial", "time_discounted")


class Sums(Interleaved):
    """Running sums: prompt i has i sub-answers. A final answer must be a number."""

    def __len__(self) -> int:
        return 4

    def __getitem__(self, i: int) -> Prompt:
        return Prompt(f"sum to {i}", info={"steps": tuple(str(n) for n in range(i)), "answer": str(i)})

    def parsed_answer(self, prompt: Prompt, text: str) -> str | None:
        return str(int(text)) if text.strip().isdecimal() else None

    def guess(self, prompt: Prompt, rng: np.random.Generator) -> tuple[list[str], list[str]]:
        drawn = [str(number) for number in rng.integers(10, 99, len(prompt.info["steps"]) + 1)]
        return [f"add {n}" for n in range(len(drawn))], drawn


def prompt_of(*steps: str, answer: str = "42") -> Prompt:
    return Prompt("?", info={"steps": steps, "answer": answer})


def response(*answers: str, template: str = "interleave") -> str:
    if template == "interleave":
        return render([one for answer in answers for one in ((THINK, "so"), (ANSWER, answer))])
    return render([(THINK, "so"), *((ANSWER, answer) for answer in answers)])


def score(prompt: Prompt, text: str, template: str = "interleave", **reward: object) -> Reward:
    return Sums(template=template, reward=reward).score(prompt, Completion(text, (), "stop"))


FOUR = prompt_of("7", "8", "9")
"""N = 4: three right sub-answers, then the final answer 42."""

# Worked by hand from the paper's rules with R_base = 0.5. The first three rewards are those of all_or_none,
# partial and time_discounted with a right final answer; the last is the part `final`.
TRUTH = [
    # all matched: 0.5 in each, whatever the order
    (("7", "8", "9", "42"), (0.5, 0.5, 0.5), 2.0),
    (("9", "7", "8", "42"), (0.5, 0.5, 0.5), 2.0),
    # two of three: partial 2 * 0.5 / 3 = 1/3
    # g1 at 1 and g3 at 3: 0.5 / 3 * (1 + 1/3) = 2/9
    (("7", "1", "9", "42"), (0.0, 0.333333, 0.222222), 2.0),
    # at 1 and 2: 0.5 / 3 * (1 + 1/2) = 1/4
    (("8", "9", "42"), (0.0, 0.333333, 0.25), 2.0),
    # at 2 and 3: 0.5 / 3 * (1/2 + 1/3) = 5/36
    (("1", "9", "7", "42"), (0.0, 0.333333, 0.138889), 2.0),
    # one of three: partial 1/6; at 1: 1/6, at 3: 1/18
    (("9", "42"), (0.0, 0.166667, 0.166667), 2.0),
    (("1", "2", "9", "42"), (0.0, 0.166667, 0.055556), 2.0),
    # none
    (("42",), (0.0, 0.0, 0.0), 2.0),
    (("1", "2", "3", "42"), (0.0, 0.0, 0.0), 2.0),
    # a wrong and an unparseable final answer, after all sub-answers, and at 1 and 3
    (("7", "8", "9", "41"), (0.5, 0.5, 0.5), -1.5),
    (("7", "1", "9", "41"), (0.0, 0.333333, 0.222222), -1.5),
    (("7", "8", "9", "dunno"), (0.5, 0.5, 0.5), -2.0),
]


@pytest.mark.parametrize("pay", ["conditional", "direct"])
@pytest.mark.parametrize(("answers", "paid", "final"), TRUTH)
def test_the_truth_table_of_rewards(
    answers: tuple[str, ...], paid: tuple[float, ...], final: float, pay: str
):
    for strategy, reward in zip(STRATEGIES, (0.0, *paid), strict=True):
        scored = score(FOUR, response(*answers), intermediate=strategy, pay=pay)
        wanted = reward if final == 2.0 or pay == "direct" else 0.0
        assert scored.parts["intermediate"] == pytest.approx(wanted, abs=1e-6)
        assert (scored.parts["format"], scored.parts["final"]) == (1.0, final)
        assert scored.parts["correct"] == (final == 2.0)
        assert scored.value == pytest.approx(1.0 + final + wanted, abs=1e-6)
        assert tuple(scored.parts) == PARTS


def test_totals_of_the_specification():
    """Right 3.2222 and 3.5, wrong 1 - 1.5, unparseable 1 - 2, bad format -1."""
    assert score(FOUR, response("7", "1", "9", "42")).value == pytest.approx(3.2222, abs=5e-5)
    assert score(FOUR, response("7", "8", "9", "42")).value == 3.5
    assert score(FOUR, response("7", "8", "9", "41")).value == -0.5
    assert score(FOUR, response("7", "8", "9", "?")).value == -1.0
    assert score(FOUR, response("7", "8", "9", "42") + "!").value == -1.0


@pytest.mark.parametrize("pay", ["conditional", "direct"])
@pytest.mark.parametrize("weight", [1.0, 0.3, 0.0])
def test_an_invalid_format_costs_exactly_its_weight(weight: float, pay: str):
    scored = score(FOUR, response("7", "8", "9", "42") + "<think>", format_weight=weight, pay=pay)
    assert scored.value == -weight
    zero = dict.fromkeys(PARTS, 0.0)
    assert scored.parts == zero | {"format": -weight, "ttft_share": 1.0}
    assert tuple(scored.parts) == PARTS
    assert scored.note == "block 9, <think>, is not closed"


def test_weights_and_base_scale_their_parts():
    scored = score(FOUR, response("7", "1", "9", "42"), base=0.9, format_weight=0.25, final_weight=3.0)
    assert scored.parts["intermediate"] == pytest.approx(0.4)
    assert scored.value == pytest.approx(0.25 + 6.0 + 0.4)
    assert score(FOUR, response("41"), final_weight=0.5).value == 0.25


def test_think_answer_has_no_intermediate_answers_to_pay():
    for pay in ("conditional", "direct"):
        for strategy in STRATEGIES:
            text = response("42", template="think_answer")
            scored = score(FOUR, text, "think_answer", intermediate=strategy, pay=pay)
            assert (scored.value, scored.parts["intermediate"], scored.parts["sub_correct"]) == (
                3.0,
                0.0,
                0.0,
            )
            assert scored.parts["first_correct"] == 1.0
    assert score(FOUR, response("7", "42"), "think_answer").value == -1.0


def test_delayed_answers_are_paid_like_interleaved_ones():
    scored = score(FOUR, response("7", "1", "9", "42", template="delayed"), "delayed")
    assert scored.value == pytest.approx(3.2222, abs=5e-5)
    assert score(FOUR, response("7", "1", "9", "42"), "delayed").value == -1.0


def test_a_task_without_sub_answers_pays_none():
    """Also under all_or_none, where "all of none" might count as all."""
    for strategy in STRATEGIES:
        for answers in (("42",), ("42", "42"), ("1", "42")):
            scored = score(prompt_of(), response(*answers), intermediate=strategy, pay="direct")
            assert scored.parts["intermediate"] == scored.parts["sub_correct"] == 0.0
            assert scored.value == 3.0


# --- attempts to be paid for nothing --------------------------------------------------------------------


@pytest.mark.parametrize("listed", ["7 or 8", "7, 8", "7 8 9", "x = 7", "7 = 7", "not 7"])
def test_several_candidates_in_one_answer_match_nothing(listed: str):
    for strategy in STRATEGIES:
        scored = score(FOUR, response(listed, "42"), intermediate=strategy)
        assert (scored.value, scored.parts["first_correct"], scored.parts["sub_correct"]) == (3.0, 0.0, 0.0)
    assert score(FOUR, response("41 or 42")).value == -1.0
    assert score(FOUR, response("41, 42")).value == -1.0


def test_a_repeated_sub_answer_is_paid_once():
    once = score(FOUR, response("7", "1", "2", "42"))
    for repeated in (("7", "7", "42"), ("7", "7", "7", "42"), ("7", " 7\n", "42")):
        scored = score(FOUR, response(*repeated))
        assert scored.parts["intermediate"] == once.parts["intermediate"] == pytest.approx(1 / 6)
        assert scored.parts["sub_correct"] == pytest.approx(1 / 3)
        assert score(FOUR, response(*repeated), intermediate="all_or_none").parts["intermediate"] == 0.0


def test_every_candidate_in_an_answer_of_its_own_earns_nothing():
    """The three right sub-answers are among ten; only as many answers as there are right ones may be paid."""
    digits = map(str, range(10))
    text = response(*digits, "42")
    for strategy in STRATEGIES:
        for pay in ("conditional", "direct"):
            scored = score(FOUR, text, intermediate=strategy, pay=pay)
            assert (scored.parts["intermediate"], scored.parts["sub_correct"]) == (0.0, 1.0)
    assert score(FOUR, response("7", "8", "9", "9", "42")).parts["intermediate"] == 0.0


def test_a_first_answer_without_content_gains_nothing():
    """It may lower `ttft_share`, so `first_correct` stands beside it; later answers are discounted more."""
    for empty in ("...", "Let me see", "-"):
        scored = score(FOUR, response(empty, "7", "42"))
        assert scored.parts["first_correct"] == 0.0
        assert scored.parts["intermediate"] == pytest.approx(0.5 / 3 / 2)
        assert scored.parts["intermediate"] < score(FOUR, response("7", "42")).parts["intermediate"]
        assert score(FOUR, response(empty, "42")).parts["intermediate"] == 0.0
        assert score(prompt_of(), response(empty, "42")).parts["first_correct"] == 0.0
    blank = score(FOUR, response(" ", "7", "42"))
    assert (blank.value, blank.parts["first_correct"], blank.parts["ttft_share"]) == (-1.0, 0.0, 1.0)


@given(st.lists(st.sampled_from("789123"), max_size=8), st.sampled_from(["42", "41", "?"]))
def test_the_intermediate_reward_is_within_its_bounds(subs: list[str], final: str):
    for pay in ("conditional", "direct"):
        for strategy in STRATEGIES:
            scored = score(FOUR, response(*subs, final), intermediate=strategy, pay=pay)
            assert 0.0 <= scored.parts["intermediate"] <= 0.5
            if len(subs) > 3 or (final != "42" and pay == "conditional"):
                assert scored.parts["intermediate"] == 0.0
            assert scored.value == sum(scored.parts[name] for name in ("format", "final", "intermediate"))


# --- what counts as a match -----------------------------------------------------------------------------


def test_each_answer_matches_one_truth_and_each_truth_one_answer():
    assert matched_places(["5", "3", "5"], ["5", "5", "3"]) == (1, 3, 2)
    assert matched_places(["5"], ["5", "5"]) == (1, 0)
    assert matched_places(["5", "5", "5"], ["5", "4"]) == (1, 0)
    assert matched_places([], ["5"]) == (0,)
    assert matched_places(["5"], []) == ()


@given(st.lists(st.sampled_from("abc"), max_size=6), st.lists(st.sampled_from("abc"), max_size=6))
def test_as_many_truths_are_matched_as_possible(answers: list[str], truths: list[str]):
    places = matched_places(answers, truths)
    used = [place for place in places if place]
    assert len(set(used)) == len(used) == sum(min(answers.count(one), truths.count(one)) for one in "abc")
    assert all(answers[place - 1] == truth for place, truth in zip(places, truths, strict=True) if place)
    for one in "abc":
        own = [place for place, truth in zip(places, truths, strict=True) if truth == one and place]
        first = [place for place, answer in enumerate(answers, 1) if answer == one]
        assert own == first[: len(own)], "the first answers match, in order"


def test_equal_truths_are_paid_one_after_the_other():
    """Truths 5, 5, 3; answers 5, 3 at places 1 and 2: 0.5 / 3 * (1 + 1/2)."""
    twice = prompt_of("5", "5", "3")
    assert score(twice, response("5", "3", "42")).parts["intermediate"] == pytest.approx(0.25)
    assert score(twice, response("5", "3", "5", "42")).parts["intermediate"] == 0.5


def test_more_answers_than_truths_are_never_paid():
    settings = RewardSettings()
    assert intermediate_reward((1, 2), 2, settings) == 0.5
    assert intermediate_reward((1, 2), 3, settings) == 0.0


def test_case_and_whitespace_do_not_count():
    class Words(Sums):
        def parsed_answer(self, prompt: Prompt, text: str) -> str | None:
            return Interleaved.parsed_answer(self, prompt, text)

    prompt = prompt_of("Ann is a knight", answer="Ann")
    text = response("\n ann  IS a\tknight ", " ANN")
    assert Words().score(prompt, Completion(text, (), "stop")).value == 3.5
    dotted = Words().score(prompt, Completion(response("Ann is a knight.", "Ann"), (), "stop"))
    assert dotted.parts["intermediate"] == 0.0


# --- parts beside the reward ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("steps", "answers", "first", "subs"),
    [
        ("789", ("7", "42"), 1.0, 1 / 3),
        ("789", ("9", "8", "41"), 1.0, 2 / 3),  # also if the final answer is wrong
        ("789", ("1", "7", "42"), 0.0, 1 / 3),
        ("789", ("42", "42"), 0.0, 0.0),  # the final answer is not a sub-answer
        ("789", ("42",), 1.0, 0.0),
        ("789", ("7",), 0.0, 0.0),  # the only answer is the final one
        ("", ("42", "41"), 1.0, 0.0),
        ("", ("41", "42"), 0.0, 0.0),
    ],
)
def test_the_first_answer_and_the_share_of_sub_answers(
    steps: str, answers: tuple[str, ...], first: float, subs: float
):
    parts = score(prompt_of(*steps), response(*answers)).parts
    assert (parts["first_correct"], parts["sub_correct"]) == (first, pytest.approx(subs))


def test_the_time_to_the_first_answer_counts_tokens():
    """Of eight tokens, the stop token included, four precede the token of the 7."""
    pieces = ("<think>", "so</", "think><ans", "wer>", " 7", "</answer>", response("42"), "")
    scored = Sums().score(FOUR, Completion("".join(pieces), tuple(range(8)), "stop", pieces))
    assert scored.parts["ttft_share"] == 0.5
    assert scored.value == pytest.approx(3 + 0.5 / 3)
    # Without pieces, 17 + 8 + 1 characters precede the 7 in a text of 36 + 36.
    plain = Sums().score(FOUR, Completion("".join(pieces), tuple(range(8)), "stop"))
    assert plain.parts["ttft_share"] == 26 / 72
    assert Sums().score(FOUR, Completion("", (1,), "stop", ("",))).parts["ttft_share"] == 1.0


def test_the_note_compares_the_answers():
    assert (
        score(FOUR, response("7", "1", "41")).note
        == "found '41', wanted '42'; 1 of 3 sub-answers in 2 answers"
    )


def test_a_right_answer_that_cannot_be_parsed_is_an_error_of_the_task():
    with pytest.raises(TaskError, match=r"Sums\.parsed_answer returns None for the right answer 'forty'"):
        score(prompt_of(answer="forty"), response("42"))


# --- settings and references ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"template": "cot"}, r"template='cot' is unknown; use one of interleave, think_answer, delayed"),
        (
            {"reward": {"bonus": 1}},
            r"reward\.bonus=1: no such key among intermediate, pay, base, format_weight",
        ),
        ({"reward": {"bas": 1}}, r"reward\.bas=1: no such key .*; did you mean reward\.base\?"),
        ({"reward": {"base": -0.5}}, r"reward\.base=-0\.5: .*greater than or equal to 0"),
        ({"reward": {"base": float("nan")}}, r"reward\.base=nan: .*finite"),
        ({"reward": {"final_weight": "much"}}, r"reward\.final_weight='much': .*number"),
        (
            {"reward": {"intermediate": "half"}},
            r"reward\.intermediate='half': .*'none', 'all_or_none', 'partial' or 'time_discounted'",
        ),
        ({"reward": {"pay": "gated"}}, r"reward\.pay='gated': .*'conditional' or 'direct'"),
        ({"reward": "direct"}, r"reward='direct' is not a mapping; give single keys, such as reward\.base"),
        ({"reward": ""}, r"reward='' is not a mapping"),
    ],
)
def test_wrong_settings_are_named_with_their_choices(settings: dict[str, Any], message: str):
    with pytest.raises(TaskError, match=message):
        Sums(**settings)


def test_settings_have_the_papers_defaults():
    assert Sums().reward == RewardSettings(
        intermediate="time_discounted", pay="conditional", base=0.5, format_weight=1.0, final_weight=1.0
    )
    assert (Sums().template, Sums.wants_pieces) == ("interleave", True)


@pytest.mark.parametrize("template", TEMPLATES)
def test_references_have_the_form_of_a_right_response(template: str):
    task = Sums(template=template)
    for i in range(len(task)):
        text = task.reference(task[i])
        parsed = parse([text], template)
        assert parsed.is_valid
        assert len(parsed.answers) == (1 if template == "think_answer" else i + 1)
        assert task.score(task[i], Completion(text, (), "stop")).parts["format"] == 1.0
        # Equal whatever the template and the task's name: the draw depends on the prompt's content alone.
        named = Prompt(task[i].text, info=task[i].info, task="other")
        assert cloudpickle.loads(cloudpickle.dumps(task)).reference(named) == text
        assert parsed.answers[-1].text == parse([Sums().reference(task[i])]).answers[-1].text
    assert task.reference(task[2]) != task.reference(Prompt("other", info=task[2].info))
    assert task.reference(Prompt(tokens=(1, 2), info=task[2].info)) != task.reference(
        Prompt(tokens=(1, 3), info=task[2].info)
    )


def test_a_single_thought_has_all_thoughts_and_sub_answers():
    class Fixed(Sums):
        def guess(self, prompt: Prompt, rng: np.random.Generator) -> tuple[list[str], list[str]]:
            return ["a", "", "c"], ["1", "2", "3"]

    task = {template: Fixed(template=template) for template in TEMPLATES}
    prompt = task["delayed"][2]
    assert task["interleave"].reference(prompt) == (
        "<think>a</think><answer>1</answer><think></think><answer>2</answer><think>c</think><answer>3</answer>"
    )
    assert task["think_answer"].reference(prompt) == "<think>a\n1\n2\nc</think><answer>3</answer>"
    assert task["delayed"].reference(prompt) == (
        "<think>a\n1\n2\nc</think><answer>1</answer><answer>2</answer><answer>3</answer>"
    )


@pytest.mark.parametrize(
    ("guess", "message"),
    [
        ((["a"], []), r"guess returned 1 thoughts and 0 answers; return one thought for each answer"),
        (([], []), r"guess breaks the template: the response is empty"),
        ((["a"], [" "]), r"guess breaks the template: block 2, <answer>, is blank"),
        ((["a</think>"], ["1"]), r"guess breaks the template: .* in '<think>a</think></think>"),
    ],
)
def test_a_guess_that_breaks_the_template_is_an_error(guess: tuple[list[str], list[str]], message: str):
    class Broken(Sums):
        def guess(self, prompt: Prompt, rng: np.random.Generator) -> tuple[list[str], list[str]]:
            return guess

    with pytest.raises(TaskError, match=message):
        Broken().reference(Broken()[0])


def test_a_group_is_scored_by_the_framework():
    chars = CharTokenizer("<>/0123456789" + "".join(sorted(set("thinkanswerso"))))
    texts = [response("0", "1", "2"), response("2"), "2"]
    done = [Completion(text, (*chars.encode(text), chars.eos_id), "stop", (*text, "")) for text in texts]
    outcome = score_group(Sums(), Sums()[2], done, 5)
    assert isinstance(outcome, RewardScored)
    assert outcome.rewards == (3.5, 3.0, -1.0)
    assert [dict(parts)["correct"] for parts in outcome.parts] == [1.0, 1.0, 0.0]
