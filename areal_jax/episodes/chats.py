"""The chats of an agent that knows only a base_url: each request becomes a turn of its episode.

An agent sends messages, or the token ids that it has rendered itself.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping
from typing import Any, NamedTuple

from areal_jax.episodes.episode import Episode, Turn
from areal_jax.episodes.session import ChatSession
from areal_jax.episodes.token_paths import TokenPaths
from areal_jax.tasks.chat_messages import Message, frozen
from areal_jax.tasks.errors import TooLongError
from areal_jax.tasks.tokenizers import Tokenizer


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
    """A conversation of `tokens` tokens has no room for a turn within the episode's `length`.

    `tokens`: a number, or "at least" and a number.
    """

    def __init__(self, tokens: int | str, length: int) -> None:
        super().__init__(tokens, length)
        self.tokens, self.length = tokens, length


class NoTurnsError(Exception):
    """The episode has had all `turns` turns that it may have."""

    def __init__(self, turns: int) -> None:
        super().__init__(turns)
        self.turns = turns


class OverError(Exception):
    """The episode has ended."""


class Chats:
    """The conversations of one episode; requests are answered one after the other."""

    def __init__(self, episode: Episode) -> None:
        self._episode, self._session = episode, ChatSession(episode.tokenizer, episode.limits.history)
        self._paths = TokenPaths()
        self._lock = asyncio.Lock()
        self._answers: dict[Any, asyncio.Task[Any]] = {}
        """A request -> the answer to the last one that was equal, which a retry joins."""
        self._open: set[asyncio.Task[Any]] = set()

    @property
    def tokenizer(self) -> Tokenizer:
        return self._episode.tokenizer

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

        Raises TaskError if the messages cannot be rendered, NoRoomError or NoTurnsError if the episode has no
        room for the turn.
        """
        key = frozen([list(value) if isinstance(value, tuple) else value for value in request])
        return await self._joined(key, is_retry, lambda: self._sampled(request))

    async def extend(self, request: TokenRequest, is_retry: bool) -> Turn:
        """Returns the turn that follows the request's tokens; a retry gets the turn of the first request.

        The turn continues the longest path, of turns that this method returned, with which the tokens begin;
        if there is none, it begins a branch. Raises NoRoomError or NoTurnsError if the episode has no room
        for the turn.
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
            try:
                asked = await self._episode.asked(self._session, *request[:3])
            except TooLongError as error:
                raise NoRoomError(f"at least {error.fewest}", self._episode.limits.length) from None
            number = self._episode.turns
            turn = await self._episode.chat(self._session, asked, self._limit(request), request.stop)
            if turn is None:
                raise self._refusal(len(asked.prompt))
            assert asked.answer is not None
            return ChatTurn(number, asked.prompt, asked.answer, turn, bool(asked.answer.get("tool_calls")))

    async def _extended(self, request: TokenRequest) -> Turn:
        async with self._lock:
            asked = self._paths.ask(request.tokens)
            turn = await self._episode.chat(self._paths, asked, self._limit(request), request.stop)
            if turn is None:
                raise self._refusal(len(request.tokens))
            return turn

    def _refusal(self, tokens: int) -> Exception:
        """Returns why there is no turn after so many tokens."""
        limits = self._episode.limits
        if tokens >= limits.length:
            return NoRoomError(tokens, limits.length)
        return NoTurnsError(limits.max_turns)

    def _limit(self, request: ChatRequest | TokenRequest) -> int:
        most = self._episode.limits.max_tokens
        return most if request.max_tokens is None else max(1, min(request.max_tokens, most))
