"""The chats of an agent that knows only a base_url: each request becomes a turn of its episode."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any, NamedTuple

from areal_jax.episodes.episode import Episode, Turn
from areal_jax.episodes.session import Sampled, Session
from areal_jax.tasks.chat_messages import Message, frozen


class ChatRequest(NamedTuple):
    """What of a request decides its answer."""

    messages: tuple[Message, ...]
    tools: tuple[Mapping[str, Any], ...]
    arguments: Mapping[str, Any]
    """Further arguments of the chat template."""
    max_tokens: int | None
    stop: tuple[str, ...]


class ChatTurn(NamedTuple):
    """An answered request."""

    number: int
    prompt: list[int]
    """All tokens before the answer."""
    message: dict[str, Any]
    """The answer in OpenAI's form."""
    turn: Turn
    has_calls: bool


class NoRoomError(Exception):
    """The episode has no room for another turn."""


class Chats:
    """The conversations of one episode; requests are answered one after the other."""

    def __init__(self, episode: Episode) -> None:
        self._episode, self._session = episode, Session(episode.tokenizer)
        self._lock = asyncio.Lock()
        self._turns: dict[int, int] = {}
        """Number of a turn of the session -> that of the episode."""
        self._answers: dict[Any, asyncio.Task[ChatTurn]] = {}

    def text_of(self, token: int) -> str:
        return self._episode.tokenizer.decode([token])

    @property
    def branches(self) -> int:
        """Number of conversations besides the first one."""
        return self._session.branches

    async def answer(self, request: ChatRequest, is_retry: bool) -> ChatTurn:
        """Returns the answer to a request; a retry of an equal request gets the answer of that one.

        Raises TaskError if the messages cannot be rendered, NoRoomError if the episode has no room for the
        turn.
        """
        key = frozen([list(value) if isinstance(value, tuple) else value for value in request])
        task = self._answers.get(key) if is_retry else None
        if task is None:
            self._answers[key] = task = asyncio.ensure_future(self._sampled(request))
            # If the client has gone, nothing else asks what became of it.
            task.add_done_callback(lambda ended: ended.cancelled() or ended.exception())
        # A client that disconnects does not end the turn: its retry joins it.
        return await asyncio.shield(task)

    async def _sampled(self, request: ChatRequest) -> ChatTurn:
        async with self._lock:
            asked = self._session.ask(request.messages, request.tools, request.arguments)
            after = -1 if asked.parent is None else self._turns[asked.parent.number]
            number = self._episode.turns
            turn = await self._episode.continued(after, asked.added, request.max_tokens, request.stop)
            if turn is None:
                raise NoRoomError
            self._turns[asked.number] = number
            sampled = Sampled(turn.tokens, turn.logp, turn.versions, turn.stop_reason)
            message = self._session.answered(asked, sampled)
            return ChatTurn(number, asked.prompt, message, turn, bool(message.get("tool_calls")))
