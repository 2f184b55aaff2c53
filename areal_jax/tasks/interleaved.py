"""Interleaved Reasoning: the rewards of responses that give sub-answers between their thoughts.

Xie et al., "Interleaved Reasoning for Large Language Models via Reinforcement Learning" (arXiv:2505.19640).
"""

from __future__ import annotations

import hashlib
import json
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from areal_jax.plugin import did_you_mean
from areal_jax.tasks.blocks import ANSWER, THINK, check_template, parse, render, ttft_share
from areal_jax.tasks.errors import TaskError
from areal_jax.tasks.task import Task
from areal_jax.types import Completion, Prompt, Reward

RIGHT, WRONG, UNPARSEABLE = 2.0, -1.5, -2.0
"""Rewards of a final answer, to be multiplied by final_weight."""

PARTS = ("correct", "format", "final", "intermediate", "ttft_share", "first_correct", "sub_correct")
"""Names of a reward's parts, explained at `Interleaved.score`. Reward: format + final + intermediate."""


class RewardSettings(BaseModel):
    """How a response is paid: the setting `reward` of a task."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False)

    intermediate: Literal["none", "all_or_none", "partial", "time_discounted"] = "time_discounted"
    """How right sub-answers are paid. all_or_none: `base` if every one was given. partial: an equal share of
    `base` for each. time_discounted: `base` if every one was given, else the share of each / its place among
    the response's answers.
    """
    pay: Literal["conditional", "direct"] = "conditional"
    """conditional: sub-answers are paid only if the final answer is right. direct: in every response of valid
    format.
    """
    base: float = Field(default=0.5, ge=0)
    """Reward of a response with every right sub-answer (R_base)."""
    format_weight: float = Field(default=1.0, ge=0)
    """Reward of a response that follows the template; the reward of any other is minus this."""
    final_weight: float = Field(default=1.0, ge=0)
    """Factor of the final answer's reward: 2 if it is right, -1.5 if wrong, -2 if it cannot be parsed."""


class Interleaved(Task, ABC):
    """A task with responses of think and answer blocks: sub-answers, then the final answer.

    A subclass defines `__len__`, `__getitem__` and `guess`. A prompt's info has the right final answer as
    `answer`, and the right sub-answers as `steps`, a tuple that may be empty.
    """

    wants_pieces = True

    def __init__(self, *, template: str = "interleave", reward: Mapping[str, Any] | None = None) -> None:
        """`template`: one of blocks.TEMPLATES; `reward`: settings that differ from RewardSettings' defaults.

        Raises TaskError if one is unknown or out of range.
        """
        check_template(template)
        self.template = template
        self.reward = reward_settings({} if reward is None else reward)

    @abstractmethod
    def guess(self, prompt: Prompt, rng: np.random.Generator) -> tuple[list[str], list[str]]:
        """Returns (thoughts, answers), equally many, in the form of a right response but with drawn content.

        The supervised steps before RL train on such responses: they teach the format, not the solution.
        """

    def normalized(self, text: str) -> str:
        """Returns the form of an answer in which it must equal the right sub-answer.

        By default letters are folded to lower case, and whitespace to single spaces.
        """
        return " ".join(text.split()).casefold()

    def parsed_answer(self, prompt: Prompt, text: str) -> str | None:
        """Returns the form of a final answer in which it must equal the right one; None: it has no such form.

        By default this is `normalized(text)`, and None if that is empty.
        """
        return self.normalized(text) or None

    def thinking(self, thoughts: Sequence[str], answers: Sequence[str]) -> str:
        """Returns the one thought of a guess in the templates think_answer and delayed.

        By default it has a line for each thought and for each answer but the last, so that these templates
        may use as many tokens for the same sub-answers as `interleave`. Override this method if the task's
        tokenizer has no newline.
        """
        lines = [line for pair in zip(thoughts, answers, strict=True) for line in pair]
        return "\n".join(line for line in lines[:-1] if line)

    def reference(self, prompt: Prompt) -> str:
        """Returns a guess as a response in the task's template: its form is right, its content is drawn.

        The draw depends on the prompt's content alone, and on the release of numpy. Raises TaskError if
        `guess` breaks the template.
        """
        thoughts, answers = self.guess(prompt, _stream(prompt))
        if len(thoughts) != len(answers):
            raise TaskError(
                f"{type(self).__name__}.guess returned {len(thoughts)} thoughts and {len(answers)} answers; "
                "return one thought for each answer"
            )
        if self.template == "interleave":
            pairs = zip(thoughts, answers, strict=True)
            blocks = [block for thought, answer in pairs for block in ((THINK, thought), (ANSWER, answer))]
        else:
            given = answers[-1:] if self.template == "think_answer" else answers
            blocks = [(THINK, self.thinking(thoughts, answers)), *((ANSWER, answer) for answer in given)]
        text = render(blocks)
        error = parse([text], self.template).error
        if error:
            raise TaskError(f"{type(self).__name__}.guess breaks the template: {error}, in {text!r:.200}")
        return text

    def score(self, prompt: Prompt, completion: Completion) -> Reward:
        """Returns the reward, format + final + intermediate; all parts are always there.

        `correct`: 1 if the format is valid and the final answer is right. `format`: ± format_weight. `final`:
        final_weight times 2, -1.5 or -2; 0 if the format is invalid. `intermediate`: >= 0, for the right
        sub-answers. `ttft_share`: see `blocks.ttft_share`. `first_correct`: 1 if the first answer is a right
        sub-answer, or a right final answer where no sub-answer can be: an early empty phrase earns nothing.
        `sub_correct`: the share of the right sub-answers that were given. In an invalid format, `correct`,
        `first_correct` and `sub_correct` are 0.
        """
        # A completion without pieces was not sampled by a run: its characters stand for its tokens.
        pieces = completion.pieces or completion.text
        parsed = parse(pieces, self.template)
        share = ttft_share(parsed, len(pieces))
        if not parsed.is_valid:
            # Nothing else is paid: any other part would soften the penalty for a broken format.
            return _reward(parsed.error, format=-self.reward.format_weight, ttft_share=share)
        truths = [self.normalized(step) for step in prompt.info["steps"]]
        *subs, last = (block.text for block in parsed.answers)
        places = matched_places([self.normalized(sub) for sub in subs], truths)
        final, is_right = self._final(prompt, last)
        # Paid for a wrong result too, sub-answers lower the accuracy (paper, 1.5B: 0.392; unpaid: 0.416).
        is_paid = is_right or self.reward.pay == "direct"
        return _reward(
            f"found {last.strip()!r:.60}, wanted {prompt.info['answer']!r:.60}; {_found(places)} of "
            f"{len(truths)} sub-answers in {len(subs)} answers",
            correct=float(is_right),
            format=self.reward.format_weight,
            final=self.reward.final_weight * final,
            intermediate=intermediate_reward(places, len(subs), self.reward) if is_paid else 0.0,
            ttft_share=share,
            first_correct=float(self._is_first_right(prompt, subs, truths) if subs else is_right),
            sub_correct=_found(places) / len(truths) if truths else 0.0,
        )

    def _final(self, prompt: Prompt, text: str) -> tuple[float, bool]:
        """Returns (reward before its weight, whether the answer is right) of a final answer."""
        right = prompt.info["answer"]
        wanted = self.parsed_answer(prompt, right)
        if wanted is None:
            raise TaskError(
                f"{type(self).__name__}.parsed_answer returns None for the right answer {right!r:.80}; it "
                "must accept every right answer"
            )
        found = self.parsed_answer(prompt, text)
        if found is None:
            return UNPARSEABLE, False
        return (RIGHT, True) if found == wanted else (WRONG, False)

    def _is_first_right(self, prompt: Prompt, subs: Sequence[str], truths: Sequence[str]) -> bool:
        """Whether the first sub-answer is right; if the task has none, whether it is the final answer."""
        return self.normalized(subs[0]) in truths if truths else self._final(prompt, subs[0])[1]


def matched_places(answers: Sequence[str], truths: Sequence[str]) -> tuple[int, ...]:
    """Returns for each truth the place, counted from 1, of the answer that matches it; 0 if none does.

    Only equal texts match. Each answer matches at most one truth, and equal truths are matched in order.
    """
    places = [0] * len(truths)
    for place, answer in enumerate(answers, 1):
        # Only equality counts: if an answer matched a truth that it contains, it could list all candidates.
        # Only a truth without a match counts: a right answer that is repeated is paid once.
        open_truths = (j for j, truth in enumerate(truths) if truth == answer and not places[j])
        j = next(open_truths, None)
        if j is not None:
            places[j] = place
    return tuple(places)


def intermediate_reward(places: Sequence[int], answers: int, settings: RewardSettings) -> float:
    """Returns the reward of a response's sub-answers, in 0..base (algorithm 1 of the paper).

    `places`: the result of `matched_places`; `answers`: number of answers before the final one. The paper's
    algorithm divides by N, its text by the number of sub-answers, N - 1, as is done here.
    """
    # Without right sub-answers, none can be given: "all" of them are no merit.
    if settings.intermediate == "none" or not places:
        return 0.0
    # Otherwise a response could try every candidate in an answer of its own, and be paid for the right ones.
    if answers > len(places):
        return 0.0
    if all(places):
        # The order is free: the task's order of sub-answers is not the only one that leads to the answer.
        return settings.base
    if settings.intermediate == "all_or_none":
        return 0.0
    share = settings.base / len(places)
    if settings.intermediate == "partial":
        return share * _found(places)
    # The later a right sub-answer comes, the less it is worth: users should see results early.
    return share * sum(1 / place for place in places if place)


def reward_settings(given: Mapping[str, Any]) -> RewardSettings:
    """Returns the settings with defaults for all keys that are not given.

    Raises TaskError, with key, value and choices, for an unknown key or a value out of range.
    """
    if not isinstance(given, Mapping):
        raise TaskError(f"reward={given!r:.60} is not a mapping; give single keys, such as reward.base=0.5")
    try:
        return RewardSettings.model_validate(dict(given))
    except ValidationError as error:
        problem = error.errors()[0]
        key = ".".join(map(str, problem["loc"]))
        reason = problem["msg"][0].lower() + problem["msg"][1:]
        if problem["type"] == "extra_forbidden":
            known = RewardSettings.model_fields
            hint = did_you_mean(key, known, "give one of these", prefix="reward.")
            reason = f"no such key among {', '.join(known)}; {hint}"
        raise TaskError(f"reward.{key}={problem['input']!r}: {reason}") from None


def _reward(note: str, **parts: float) -> Reward:
    complete = dict.fromkeys(PARTS, 0.0) | parts
    return Reward(complete["format"] + complete["final"] + complete["intermediate"], complete, note)


def _found(places: Sequence[int]) -> int:
    return sum(place > 0 for place in places)


def _stream(prompt: Prompt) -> np.random.Generator:
    """Returns a random stream that depends on the prompt's text, messages or tokens alone.

    The task's name is left out, because a run and `generation.rollout` may name one task differently.
    """
    messages = None if prompt.messages is None else [dict(message) for message in prompt.messages]
    tokens = None if prompt.tokens is None else [int(token) for token in prompt.tokens]
    content = json.dumps([prompt.text, messages, tokens], sort_keys=True)
    key = int.from_bytes(hashlib.blake2b(content.encode(), digest_size=16).digest(), "little")
    return np.random.Generator(np.random.Philox(key=key))
