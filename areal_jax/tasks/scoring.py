"""Scores a group, the completions of one prompt; the result contains the rewards, or the task's error."""

from __future__ import annotations

import math
import numbers
from collections.abc import Iterable, Sequence
from typing import Any, Literal

from areal_jax.control.events import RewardFailed, RewardScored
from areal_jax.sandbox.errors import SandboxError
from areal_jax.tasks.errors import VerifierError, raised
from areal_jax.tasks.plain_json import readable
from areal_jax.tasks.task import Task
from areal_jax.types import Completion, Prompt, Reward

Outcome = RewardScored | RewardFailed
Cause = Literal["policy", "task", "infrastructure"]

GROUP = -1
"""The value of `RewardFailed.member` if the failure concerns the whole group."""

MESSAGE_CHARS = 500
"""Maximum length of a message about a reward or a prompt in the journal."""

INFRASTRUCTURE = (OSError, MemoryError, SandboxError, VerifierError)
"""Errors that neither a task nor a policy's text causes: files, network, memory, and what scores run in."""

_FLOAT32_MAX = 3.4028234663852886e38  # rewards are float32 in a batch


class _BadRewardError(Exception):
    """A task returned a reward that is not a finite number, or too few or too many rewards."""


def score_group(
    task: Task, prompt: Prompt, completions: Sequence[Completion], ordinal: int, attempt: int = 0
) -> Outcome:
    """Scores a group in this process; returns RewardScored with the rewards in the order of `completions`.

    Returns RewardFailed, with its cause, if the task raises an exception, returns too few or too many
    rewards, or returns a reward that is not a finite float32. `ordinal`: the prompt's place in the run's
    order; `attempt`: how often its group was sampled again. The result repeats these two numbers.
    """
    rewards: list[Reward] | None = None
    try:
        # Scores may be computed in the loop: if one raises, len(rewards) is the number of its member.
        values = _values(task, prompt, completions)
        rewards = []
        for value in values:
            rewards.append(checked(value))
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # noqa: BLE001 - users' code, and it may exit: counted as failed, never as 0
        member = GROUP if rewards is None else len(rewards)
        cause = _cause(task, prompt, completions, member, error)
        return failed(ordinal, attempt, member, _describe(task, error), cause)
    has_parts, has_notes = any(reward.parts for reward in rewards), any(reward.note for reward in rewards)
    return RewardScored(
        ordinal,
        attempt,
        tuple(reward.value for reward in rewards),
        tuple(tuple(reward.parts.items()) for reward in rewards) if has_parts else (),
        tuple(reward.note for reward in rewards) if has_notes else (),
    )


def failed(ordinal: int, attempt: int, member: int, message: str, cause: Cause = "task") -> RewardFailed:
    return RewardFailed(ordinal, attempt, member, "failed", readable(message)[:MESSAGE_CHARS], cause)


def _cause(
    task: Task, prompt: Prompt, completions: Sequence[Completion], member: int, error: BaseException
) -> Cause:
    """Returns what made the scoring of sample number `member` raise `error`.

    The policy's text did if the task can score another sample of the prompt, or else the task's own code.
    """
    if isinstance(error, INFRASTRUCTURE):
        return "infrastructure"
    if member == GROUP or isinstance(error, _BadRewardError):
        return "task"
    # The samples before `member` have been scored.
    can_score = member > 0 or any(_is_scored(task, prompt, one) for one in completions[1:])
    return "policy" if can_score else "task"


def _is_scored(task: Task, prompt: Prompt, completion: Completion) -> bool:
    try:
        checked(task.score(prompt, completion))
    except KeyboardInterrupt:
        raise
    except BaseException:  # noqa: BLE001 - users' code, which may raise anything, and has done so before
        return False
    return True


def _values(task: Task, prompt: Prompt, completions: Sequence[Completion]) -> Iterable[Any]:
    """Returns the completions' scores, in order, by the task's own `score_group` if the task defines one.

    Otherwise the result is a generator that calls `score` for one completion at a time, so that the caller
    knows which completion an error concerns. Raises _BadRewardError if `score_group` returns too few or too
    many scores.
    """
    if type(task).score_group is Task.score_group:
        return (
            task.score(prompt, completion) if completion.reward is None else completion.reward
            for completion in completions
        )
    values = list(task.score_group(prompt, completions))
    if len(values) != len(completions):
        raise _BadRewardError(
            f"score_group returned {len(values)} rewards for {len(completions)} completions; return "
            "one reward per completion"
        )
    return values


def checked(value: Any) -> Reward:
    """Returns a task's score as a Reward of plain floats.

    Raises _BadRewardError unless the value and all named parts are numbers that are finite in float32.
    """
    if not isinstance(value, Reward):
        return Reward(_number(value, "the reward"))
    named = {readable(str(name)): part for name, part in value.parts.items()}
    parts = {name: _number(part, f"the part {name!r} of a reward") for name, part in named.items()}
    return Reward(_number(value.value, "the reward"), parts, readable(str(value.note))[:MESSAGE_CHARS])


def _number(value: Any, what: str) -> float:
    # Zero-dimensional arrays of any library count as numbers.
    plain = value.item() if getattr(value, "ndim", None) == 0 and hasattr(value, "item") else value
    if not isinstance(plain, numbers.Real):
        raise _BadRewardError(
            f"{what} is {value!r:.80}, a {type(value).__name__}; return a number or a Reward"
        )
    number = float(plain)
    if not (math.isfinite(number) and abs(number) <= _FLOAT32_MAX):
        raise _BadRewardError(f"{what} is {plain}; return a finite number in the range of float32")
    return number


def _describe(task: Task, error: BaseException) -> str:
    """Returns a message with the task, the error, and the file and line that raised it."""
    if isinstance(error, _BadRewardError):
        return f"{type(task).__name__}: {error}"
    return f"{type(task).__name__} raised {raised(error)}"
