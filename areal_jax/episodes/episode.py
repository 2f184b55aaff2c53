"""What a workflow gets: an episode, in which it asks for turns, adds to the conversation and calls tools.

A workflow is `async def workflow(prompt, episode) -> Reward | float | None`. After a crash of its process it
runs again from its start. Everything that it asked of its episode is then answered from the journal, so it
must do the same again: what may differ, such as the time, belongs into `Episode.tool` or `Episode.random`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol

import numpy as np

from areal_jax.control.events import Event, ToolStarted, TurnAdded
from areal_jax.episodes import tools
from areal_jax.episodes.conversation import Conversation
from areal_jax.episodes.errors import EpisodeError
from areal_jax.episodes.follow_up import follow_ups_of
from areal_jax.episodes.limits import Limits
from areal_jax.tasks.tokenizers import Tokenizer
from areal_jax.types import Prompt, SampleId, Trajectory


class Turn(NamedTuple):
    """A sampled turn of n tokens, the stop token included."""

    text: str
    tokens: np.ndarray  # (n,) int32
    logp: np.ndarray  # (n,) float32: of each token as it was sampled
    versions: np.ndarray  # (n,) int32: the policy version of each token
    stop_reason: str
    """stop | length: ended by max_tokens or generation.length; n = 0 if there was no room for a token."""


class Port(Protocol):
    """The episode's connection to the run."""

    def emit(self, event: Event) -> None: ...

    async def turn_over(self, turn: int) -> None:
        """Waits until a host has sampled this turn, which is then the conversation's last one."""
        ...

    async def call_allowed(self, call: int) -> None:
        """Waits until the tool call's beginning is journaled."""
        ...

    async def in_thread(self, work: Callable[[], Any]) -> Any:
        """Returns `work()`, called in a thread of its own."""
        ...

    def base_url(self, episode: Episode) -> str:
        """Returns the address at which the episode's chats are sampled."""
        ...


class Episode:
    """One sample's episode. Not for several threads."""

    def __init__(
        self,
        sample: SampleId,
        prompt: Prompt,
        conversation: Conversation,
        *,
        tokenizer: Tokenizer,
        limits: Limits,
        port: Port,
        seed: int,
    ) -> None:
        self.sample, self.prompt, self.limits = sample, prompt, limits
        self.random = np.random.default_rng([seed, *sample])
        """A generator of random numbers that are the same each time that the workflow runs."""
        self.is_cut = False
        """Whether a turn was refused for want of tokens or turns."""
        self.last: Turn | None = None
        """The last turn that has tokens."""
        self._conversation, self._tokenizer, self._port = conversation, tokenizer, port
        # What was done before a crash: these numbers of turns and calls are answered from the journal.
        self._turns = self._calls = self._segment = 0
        self._is_sampling = False
        self._known_turns, self._known_calls = len(conversation.turns), dict(conversation.calls)
        self._messages: list[Mapping[str, Any]] = []
        self._texts: list[str] = []

    @property
    def turns(self) -> int:
        """Number of turns so far."""
        return self._turns

    @property
    def tokenizer(self) -> Tokenizer:
        return self._tokenizer

    async def in_thread(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Returns `function(*arguments)`, called in a thread, such as an agent that uses `base_url`.

        Unlike a tool it is called again if the workflow runs again.
        """
        return await self._port.in_thread(partial(function, *arguments))

    def add(self, role: str, content: str, **fields: Any) -> None:
        """Adds a message, which the next turn answers; `fields`: more of it, such as tool_call_id.

        The message is rendered by the tokenizer's chat template if the prompt is a chat. Else `content` is
        added as it is, and `role` says only what it is. Nothing that was added has a loss.
        """
        if self.prompt.messages is None:
            self._texts.append(content)
        elif self._turns == 0:
            raise EpisodeError(
                f"a message of role {role!r} was added before the first turn; put it into the prompt's "
                "messages"
            )
        else:
            self._messages.append({"role": role, "content": content, **fields})

    async def generate(self, *, max_tokens: int | None = None, stop: Sequence[str] = ()) -> Turn:
        """Returns the next turn, sampled by the policy; it ends with a token of `stop`, or its stop token.

        `max_tokens`: at most so many tokens, the stop token included; None: generation.max_tokens. If the
        episode has no room for a token, or has had episode.max_turns turns, the turn has no tokens and the
        stop_reason "length", and the sample counts as truncated.
        """
        if isinstance(stop, str):
            raise EpisodeError(f"stop={stop!r} is a text; give a list of texts")
        self._require_idle()
        limit = self.limits.max_tokens if max_tokens is None else max_tokens
        if limit < 1:
            raise EpisodeError(f"max_tokens={max_tokens} leaves no token for the turn; give at least 1")
        added = self._added()
        if self._turns >= self.limits.max_turns or not self._has_room(added):
            self.is_cut = True
            nothing = np.zeros(0, np.int32)
            return Turn("", nothing, np.zeros(0, np.float32), nothing, "length")
        return await self._sampled(
            TurnAdded(self.sample, self._segment, self._turns, added, limit, tuple(stop))
        )

    async def _sampled(self, event: TurnAdded) -> Turn:
        turn, self._turns = self._turns, self._turns + 1
        if turn >= self._known_turns:
            self._port.emit(event)
        elif (asked := self._conversation.turns[turn][0]) != event:
            raise EpisodeError(
                f"turn {turn} was asked for as {asked}, and is now as {event}", "workflow_diverged"
            )
        if turn >= self._known_turns or self._conversation.turns[turn][1] is None:
            self._is_sampling = True
            await self._port.turn_over(turn)
            self._is_sampling = False
        self.last = self._turn_of(self._conversation.paths[turn])
        return self.last

    async def continued(
        self, after: int, added: Sequence[int], max_tokens: int | None, stop: Sequence[str]
    ) -> Turn | None:
        """Returns a turn that continues turn number `after` (-1: none) by the tokens `added`; for `Chats`.

        A turn that does not continue the last one begins a branch. Returns None if there is no room for it.
        """
        self._require_idle()
        limit = self.limits.max_tokens if max_tokens is None else min(max_tokens, self.limits.max_tokens)
        past = len(self._conversation.paths[after].tokens) if after >= 0 else 0
        if self._turns >= self.limits.max_turns or past + len(added) >= self.limits.length:
            self.is_cut = True
            return None
        self._segment += self._turns > 0 and after != self._turns - 1
        own = self.sample, self._segment, self._turns, tuple(added), max(1, limit), tuple(stop), after
        return await self._sampled(TurnAdded(*own))

    @property
    def base_url(self) -> str:
        """The address at which a client of OpenAI's interface has its chats sampled as this episode's turns.

        Raises EpisodeError after a crash: a program that has only this address cannot be run again as it ran.
        """
        if self._known_turns:
            raise EpisodeError(
                "the process ended while an agent had its turns sampled by base_url, and what the agent did "
                "since is not known",
                "agent_lost",
            )
        return self._port.base_url(self)

    async def tool(
        self,
        function: Callable[..., Any],
        *arguments: Any,
        timeout_s: float | None = None,
        is_idempotent: bool = False,
        **named: Any,
    ) -> Any:
        """Returns `function(*arguments, **named)`, called once: after a crash the journal has the result.

        `function` may be a coroutine function; any other is called in a thread. Arguments and result must be
        values of JSON. `timeout_s`: deadline in seconds, None: episode.tool_timeout_s. If a process dies
        during the call, whether it had an effect is in doubt, and the sample fails, except if it
        `is_idempotent`, so that it may be called again. Raises ToolError if the function raises an error, or
        exceeds its deadline.
        """
        name = getattr(function, "__qualname__", type(function).__name__)
        call, self._calls = self._calls, self._calls + 1
        begun = ToolStarted(self.sample, call, name, tools.digest(name, arguments, named))
        before, returned = self._known_calls.get(call, (None, None))
        if before is not None and before != begun:
            raise EpisodeError(f"call {call} was {before}, and is now {begun}", "workflow_diverged")
        if returned is not None:
            return tools.result(returned, name)
        if before is None:
            self._port.emit(begun)
            await self._port.call_allowed(call)
        elif not is_idempotent:
            raise EpisodeError(
                f"the process ended during call {call}, of {name}, which may have happened or not; give "
                "is_idempotent=True if it may be called again",
                "tool_in_doubt",
            )
        deadline_s = self.limits.tool_timeout_s if timeout_s is None else timeout_s
        work = partial(function, *arguments, **named)
        ended = await tools.called(begun, work, deadline_s, self._port.in_thread)
        self._port.emit(ended)
        return tools.result(ended, name)

    # --- inside ---------------------------------------------------------------------------------------------

    def _require_idle(self) -> None:
        if self._is_sampling:
            raise EpisodeError("a turn was asked for before the last one was sampled; await each generate")

    def _added(self) -> tuple[int, ...]:
        """The tokens that follow the last turn, or the prompt, by the messages that were added since."""
        messages, self._messages = self._messages, []
        texts, self._texts = self._texts, []
        if self.prompt.messages is None:
            return tuple(self._tokenizer.encode("".join(texts)))
        if self._turns == 0:
            return ()
        if not messages:
            raise EpisodeError("nothing was added since the last turn; call episode.add before generate")
        path = self._conversation.paths[self._turns - 1]
        answer = path.tokens[path.turn_ids == self._turns - 1].tolist()
        return tuple(follow_ups_of(self._tokenizer, self.prompt.tools).tokens(messages, answer))

    def _has_room(self, added: tuple[int, ...]) -> bool:
        past = len(self._conversation.prompt)
        if self._turns:
            past = len(self._conversation.paths[self._turns - 1].tokens)
        return past + len(added) < self.limits.length

    def _turn_of(self, so_far: Trajectory) -> Turn:
        own = so_far.turn_ids == so_far.turn_ids.max()
        tokens = so_far.tokens[own]
        text = self._tokenizer.decode(tokens.tolist())
        return Turn(text, tokens, so_far.behavior_logp[own], so_far.versions[own], so_far.stop_reason)
