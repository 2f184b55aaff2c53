"""What a workflow gets: an episode, in which it asks for turns, adds to the conversation and calls tools.

A workflow is `async def workflow(prompt, episode) -> Reward | float | None`. After a crash of its process it
runs again from its start. Everything that it asked of its episode is then answered from the journal, so it
must do the same again: what may differ, such as the time, belongs into `Episode.tool` or `Episode.random`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, Protocol

import numpy as np

from areal_jax.control.events import Event, ToolReturned, ToolStarted, TurnAdded
from areal_jax.episodes import tools
from areal_jax.episodes.apart import apart, size_of
from areal_jax.episodes.conversation import Conversation
from areal_jax.episodes.errors import EpisodeError
from areal_jax.episodes.follow_up import follow_ups_of
from areal_jax.episodes.limits import Limits
from areal_jax.episodes.session import AskedTurn, ChatSession
from areal_jax.episodes.token_paths import TokenPaths
from areal_jax.tasks.errors import TooLongError
from areal_jax.tasks.tokenizers import Tokenizer, require_may_fit
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


@dataclass
class _Common:
    """What an episode and its forks have in common."""

    # What was done before a crash: these numbers of turns and calls are answered from the journal.
    known_turns: int
    known_calls: Mapping[int, tuple[ToolStarted, ToolReturned | None]]
    turns: int = 0
    calls: int = 0
    branches: int = 0
    """The number of the branch begun last."""
    open_turn: int | None = None
    """Number of the turn that is asked for and not answered; None: there is none."""
    is_cut: bool = False


class Episode:
    """One sample's episode, or a branch of it (`fork`). Not for several threads."""

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
        self.last: Turn | None = None
        """The last turn that has tokens; of a fork, also one from before it."""
        self._conversation, self._tokenizer, self._port = conversation, tokenizer, port
        self._common = _Common(len(conversation.turns), dict(conversation.calls))
        self._segment, self._at = 0, -1
        """The number of the branch, and of its last turn; -1 before that."""
        self._messages: list[Mapping[str, Any]] = []
        self._texts: list[str] = []
        self._numbers: dict[AskedTurn, int] = {}
        """A session's turn -> its number among the episode's turns."""
        self._session = None
        if limits.history == "template" and prompt.messages is not None:
            self._session = ChatSession(tokenizer, limits.history)
        self._said: list[Mapping[str, Any]] = [*(prompt.messages or ())]
        """With history=template: the complete conversation."""

    @property
    def turns(self) -> int:
        """Number of turns so far, those of forks included."""
        return self._common.turns

    @property
    def is_cut(self) -> bool:
        """Whether a turn was refused for want of tokens or turns."""
        return self._common.is_cut

    @property
    def open_turn(self) -> int | None:
        """Number of the turn that is asked for and not answered yet; None if there is none."""
        return self._common.open_turn

    @property
    def tokenizer(self) -> Tokenizer:
        return self._tokenizer

    def fork(self) -> Episode:
        """Returns a second episode of the same sample, which goes on from here as a branch of its own.

        Its first turn continues this one's last turn and what was added since; from there on, each of the two
        has its own messages and other random keys. The sample is trained on all branches, by its one reward;
        what is before the fork is trained once. A sample has one turn at a time: await the turn of one branch
        before another one asks for the next. Turns, calls and `random` are common to all.
        """
        fork = copy(self)
        fork._segment = self._new_branch()
        fork._messages, fork._texts = self._messages.copy(), self._texts.copy()
        fork._said = self._said.copy()
        return fork

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
        elif self._at < 0:
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
        if self._session is not None:
            return await self._rendered(self._session, limit, stop)
        added = await self._added()
        self._require_idle()  # another turn may have begun meanwhile
        if added is None or self.turns >= self.limits.max_turns or not self._has_room(added):
            return self._cut()
        after = None if self._at == self.turns - 1 else self._at
        if after == -1:  # other branches have had turns since the prompt
            added = (*self._conversation.prompt, *added)
        return await self._sampled(self._next_turn(added, limit, stop, after))

    def _next_turn(
        self, added: tuple[int, ...], limit: int, stop: Sequence[str], after: int | None
    ) -> TurnAdded:
        return TurnAdded(
            self.sample,
            self._segment,
            self.turns,
            tokens=added,
            max_tokens=limit,
            stop=tuple(stop),
            after=after,
        )

    async def _sampled(self, event: TurnAdded) -> Turn:
        common = self._common
        turn, common.turns = common.turns, common.turns + 1
        if turn >= common.known_turns:
            self._port.emit(event)
        elif (asked := self._conversation.turns[turn][0]) != event:
            raise EpisodeError(
                f"turn {turn} was asked for as {asked}, and is now as {event}", "workflow_diverged"
            )
        if turn >= common.known_turns or self._conversation.turns[turn][1] is None:
            common.open_turn = turn
            await self._port.turn_over(turn)
            common.open_turn = None
        self._at, self.last = turn, self._turn_of(self._conversation.paths[turn])
        return self.last

    async def asked(
        self,
        session: ChatSession,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] = (),
        arguments: Mapping[str, Any] | None = None,
    ) -> AskedTurn:
        """Returns the session's turn for a request.

        Raises TooLongError, and the episode is cut, if there is surely no room for the messages.
        """
        work = partial(session.ask, messages, tools, arguments, self.limits.length - 1)
        try:
            return await apart(work, size_of(messages))
        except TooLongError:
            self._common.is_cut = True
            raise

    async def chat(
        self, session: ChatSession | TokenPaths, asked: AskedTurn, limit: int, stop: Sequence[str]
    ) -> Turn | None:
        """Returns the turn that answers a request of a session, which gets the answer, too.

        A turn that does not continue the last one begins a branch. `limit`, `stop`: of its tokens. Returns
        None if there is no room for it.
        """
        self._require_idle()
        after = -1 if asked.parent is None else self._numbers[asked.parent]
        past = len(self._conversation.paths[after].tokens) if after >= 0 else 0
        if self.turns >= self.limits.max_turns or past + len(asked.added) >= self.limits.length:
            self._common.is_cut = True
            return None
        if after != self._at:
            self._segment = self._new_branch()
        self._numbers[asked] = self.turns
        turn = await self._sampled(self._next_turn(tuple(asked.added), limit, stop, after))
        session.answered(asked, turn.tokens.tolist())
        return turn

    @property
    def base_url(self) -> str:
        """The address at which a client of OpenAI's interface has its chats sampled as this episode's turns.

        Raises EpisodeError after a crash: a program that has only this address cannot be run again as it ran.
        """
        if self._common.known_turns:
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
        call, self._common.calls = self._common.calls, self._common.calls + 1
        begun = ToolStarted(self.sample, call, name, tools.digest(name, arguments, named))
        before, returned = self._common.known_calls.get(call, (None, None))
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
        if self.open_turn is not None:
            raise EpisodeError(
                "a turn was asked for before the last one was sampled; await each generate: a sample, with "
                "all its forks, has one turn at a time"
            )

    def _new_branch(self) -> int:
        self._common.branches += 1
        return self._common.branches

    async def _rendered(self, session: ChatSession, limit: int, stop: Sequence[str]) -> Turn:
        """The next turn with history=template, which renders the complete conversation."""
        self._said += self._taken()
        try:
            asked = await self.asked(session, self._said, self.prompt.tools)
        except TooLongError:
            return self._cut()
        turn = await self.chat(session, asked, limit, stop)
        if turn is None:
            return self._cut()
        assert asked.answer is not None
        self._said.append(asked.answer)
        return turn

    def _cut(self) -> Turn:
        """A turn without tokens, for which there was no room."""
        self._common.is_cut, nothing = True, np.zeros(0, np.int32)
        return Turn("", nothing, np.zeros(0, np.float32), nothing, "length")

    def _taken(self) -> list[Mapping[str, Any]]:
        """The messages that were added since the last turn; EpisodeError if there is none."""
        messages, self._messages = self._messages, []
        if self._at >= 0 and not messages:
            raise EpisodeError("nothing was added since the last turn; call episode.add before generate")
        return messages

    async def _added(self) -> tuple[int, ...] | None:
        """The tokens that follow the last turn, or the prompt, by the messages that were added since.

        None if there is surely no room for them.
        """
        texts, self._texts = self._texts, []
        if self.prompt.messages is None:
            text = "".join(texts)
            work, size = partial(self._encoded, text), len(text)
        else:
            messages = self._taken()
            if self._at < 0:
                return ()
            path = self._conversation.paths[self._at]
            answer = path.tokens[path.turn_ids == self._at].tolist()
            follow_ups = follow_ups_of(self._tokenizer, self.prompt.tools)
            work = partial(follow_ups.tokens, messages, answer, self.limits.length - 1)
            size = size_of(messages)
        try:
            return tuple(await apart(work, size))
        except TooLongError:
            return None

    def _encoded(self, text: str) -> list[int]:
        require_may_fit(self._tokenizer.fewest, text, self.limits.length - 1)
        return self._tokenizer.encode(text)

    def _has_room(self, added: tuple[int, ...]) -> bool:
        past = len(self._conversation.prompt)
        if self._at >= 0:
            past = len(self._conversation.paths[self._at].tokens)
        return past + len(added) < self.limits.length

    def _turn_of(self, so_far: Trajectory) -> Turn:
        own = so_far.turn_ids == so_far.turn_ids.max()
        tokens = so_far.tokens[own]
        text = self._tokenizer.decode(tokens.tolist())
        return Turn(text, tokens, so_far.behavior_logp[own], so_far.versions[own], so_far.stop_reason)
