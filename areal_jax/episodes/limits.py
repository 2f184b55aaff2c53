"""What an episode may use: tokens, turns, seconds; and how its chats go on."""

from __future__ import annotations

from typing import Literal, NamedTuple

from areal_jax.config.sections import EpisodeConfig

History = Literal["exact", "template"]


class Limits(NamedTuple):
    """What an episode may use; the names are those of the config."""

    length: int
    """generation.length: tokens of the whole episode, the prompt included."""
    max_tokens: int
    """generation.max_tokens: tokens of a turn for which the workflow gives no other number."""
    max_turns: int
    timeout_s: float
    tool_timeout_s: float
    history: History = "exact"


def limits_of(config: EpisodeConfig, length: int, max_tokens: int) -> Limits:
    """Returns the limits of a config's section episode, with generation.length and generation.max_tokens."""
    return Limits(
        length=length,
        max_tokens=max_tokens,
        max_turns=config.max_turns,
        timeout_s=config.timeout_s,
        tool_timeout_s=config.tool_timeout_s,
        history=config.history,
    )
