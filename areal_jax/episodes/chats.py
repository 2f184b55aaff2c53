"""The chats of an agent that knows only a base_url: each request becomes a turn of its episode.

An agent sends messages, or the token ids that it has rendered itself.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping
from typing import Any, NamedTuple

from areal_jax.episodes.episode import Episode, Turn
from areal_jax.episodes.session import Session
from areal_jax.episodes.token_paths import TokenPaths
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


class TokenRequest(NamedTuple):
    """A request that gives all tokens before the answer."""

    tokens: tuple[int, ...]
    max_tokens: int | None
    stop: tuple[str, ...]


class NoRoomError(Exception):
    """The episode has no room for another turn."""


class OverError(Exception):
    """The episode has ended."""


class Chats:
    """The conversations of one episode; requests are answered one after the other."""

    def __init__(self, episode: Episode) -> None:
        self._episode, self._session = episode, Session(episode.tokenizer, episode.limits.history)
        self._paths = TokenPaths()
        self._lock = asyncio.Lock()
        self._answers: dict[Any, asyncio.Task[Any]] = {}
        """A request -> the answer to the last one that was equal, which a retry joins."""
        self._open: set[asyncio.Task[Any]] = set()

    def text_of(self, token: int) -> str:
        return self._episode.tokenizer.decode([token])

    @property
    def vocab_size(self) -> int:
        return self._episode.tokenizer.vocab_size

    @property
    def most_tokens(self) -> int:
        """Maximum number of tokens of a prompt."""
        return self._episode.limits.length - 1

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
        return await self._joined(key, is_retry, lambda: self._sampled(request))

    async def extend(self, request: TokenRequest, is_retry: bool) -> Turn:
        """Returns the turn that follows the request's tokens; a retry gets the turn of the first request.

        The turn continues the longest path, of turns that this method returned, with which the tokens begin;
        if there is none, it begins a branch. Raises NoRoomError if the episode has no room for the turn.
        """
        return await self._joined(request, is_retry, lambda: self._extended(request))

    async def _joined(self, key: Any, is_retry: bool, sample: Callable[[], Coroutine[Any, Any, Any]]) -> Any:
        task = self._answers.get(key) if is_retry else None
        if task is None:
            self._answers[key] = task = asyncio.ensure_future(sample())
            self._open.add(task)
            task.add_done_callback(self._ended)
        try:
            # A client that disconnects does not end the turn: its retry joins it.
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            if task.cancelled():
                raise OverError from None
            raise

    def close(self) -> None:
        """Ends the requests under way."""
        for task in self._open:
            task.cancel()

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._open.discard(task)
        if not task.cancelled():
            task.exception()  # if the client has gone, nothing else asks what became of it

    async def _sampled(self, request: ChatRequest) -> ChatTurn:
        async with self._lock:
            asked = await self._episode.asked(self._session, *request[:3])
            if asked is None:
                raise NoRoomError
            number = self._episode.turns
            turn = await self._episode.chat(self._session, asked, self._limit(request), request.stop)
            if turn is None:
                raise NoRoomError
            assert asked.answer is not None
            return ChatTurn(number, asked.prompt, asked.answer, turn, bool(asked.answer.get("tool_calls")))

    async def _extended(self, request: TokenRequest) -> Turn:
        async with self._lock:
            asked = self._paths.ask(request.tokens)
            turn = await self._episode.chat(self._paths, asked, self._limit(request), request.stop)
            if turn is None:
                raise NoRoomError
            return turn

    def _limit(self, request: ChatRequest | TokenRequest) -> int:
        most = self._episode.limits.max_tokens
        return most if request.max_tokens is None else max(1, min(request.max_tokens, most))
