"""A session: from a client's messages, which are text alone, to the exact tokens of its conversation.

A session is a tree of turns. A turn adds to its parent the messages since the parent's answer, and an
answer that was sampled; it holds the exact tokens of both. A request continues the longest path of turns
with messages equal to its own in canonical form (`chat_messages.canonical`). What extends no path begins a
branch. So a client may edit, shorten or repeat a conversation, and no token is ever trained that was not
sampled.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from areal_jax.episodes.follow_up import FollowUps, follow_ups_of
from areal_jax.episodes.limits import History
from areal_jax.tasks.chat_messages import Canonical, Message, canonical, frozen, same_answer
from areal_jax.tasks.errors import TaskError
from areal_jax.tasks.tokenizers import Tokenizer, chat_tokens
from areal_jax.tasks.tool_calls import is_in_thought, message_of, parsed_answer


@dataclass(eq=False)
class AskedTurn:
    """One request and, once it is there, its answer."""

    number: int
    """Place in the order of the session's requests, from 0."""
    parent: AskedTurn | None
    said: tuple[Canonical, ...]
    """The messages since the parent's answer."""
    added: tuple[int, ...]
    """The tokens since the parent's answer, up to the beginning of this turn's answer."""
    sampled: list[int] | None = None
    """The tokens of the answer, the stop token included; None before it is there."""
    answer: dict[str, Any] | None = None
    """The answer as the message that the client got."""
    children: list[AskedTurn] = field(default_factory=list)

    @property
    def path(self) -> list[AskedTurn]:
        """The turns from the first one of the conversation to this one."""
        turns: list[AskedTurn] = []
        turn: AskedTurn | None = self
        while turn is not None:
            turns.append(turn)
            turn = turn.parent
        return turns[::-1]

    @property
    def prompt(self) -> list[int]:
        """All tokens before this turn's answer."""
        tokens: list[int] = []
        for turn in self.path[:-1]:
            tokens += (*turn.added, *(turn.sampled or ()))
        return [*tokens, *self.added]


@dataclass
class _Root:
    """The conversations with the same tools and template arguments."""

    follow_ups: FollowUps | None
    """None with history=template."""
    tools: Sequence[Mapping[str, Any]]
    arguments: Mapping[str, Any]
    turns: list[AskedTurn] = field(default_factory=list)


class ChatSession:
    """The conversations of one sample; not thread-safe."""

    def __init__(self, tokenizer: Tokenizer, history: History = "exact") -> None:
        """`history`: as episode.history.

        "exact" continues the tokens of a conversation. "template" continues those that the chat template,
        given the complete conversation, renders again: a branch begins after the last answer of which this
        is true.
        """
        self._tokenizer, self._history = tokenizer, history
        self._roots: dict[Any, _Root] = {}
        self.turns: list[AskedTurn] = []

    @property
    def branches(self) -> int:
        """Number of conversations besides the first one."""
        return max(0, len(self._leaves()) - 1)

    def ask(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] = (),
        arguments: Mapping[str, Any] | None = None,
        most: int | None = None,
    ) -> AskedTurn:
        """Adds a turn for a request and returns it; its `prompt` is to be continued.

        `tools`, `arguments`: schemas of tools, and arguments of the chat template. Raises TaskError if there
        is no message, the last one is an assistant's, or the messages cannot be rendered; TooLongError,
        before encoding, if the prompt surely has more than `most` tokens.
        """
        if not messages or messages[-1].get("role") == "assistant":
            raise TaskError(
                f"the conversation {[message.get('role') for message in messages]} gives nothing to answer; "
                "end it with a message of role user or tool"
            )
        root = self._root(tools, arguments or {})
        said = tuple(map(canonical, messages))
        place = longest_path(root.turns, partial(_end_of, messages, said))
        parent, used, added = self._placed(root, messages, *place, most)
        turn = AskedTurn(len(self.turns), parent, said[used:], tuple(added))
        (root.turns if parent is None else parent.children).append(turn)
        self.turns.append(turn)
        return turn

    def answered(self, turn: AskedTurn, sampled: list[int]) -> dict[str, Any]:
        """Records a turn's answer; returns it as an assistant message in OpenAI's form."""
        text, end = (self._tokenizer.decode(tokens) for tokens in (sampled, turn.added[-8:]))
        answer = parsed_answer(text, self._tokenizer.notation, is_in_thought(end))
        ids = [f"call_{turn.number}_{place}" for place in range(len(answer.calls))]
        turn.sampled, turn.answer = sampled, message_of(answer, ids)
        return turn.answer

    def _leaves(self) -> list[AskedTurn]:
        """The answered turns that no answered turn continues, in their order."""
        answered = [turn for turn in self.turns if turn.sampled is not None]
        continued = {id(turn.parent) for turn in answered}
        return [turn for turn in answered if id(turn) not in continued]

    def _root(self, tools: Sequence[Mapping[str, Any]], arguments: Mapping[str, Any]) -> _Root:
        key = frozen([list(tools), arguments])
        if key not in self._roots:
            is_exact = self._history == "exact"
            follow_ups = follow_ups_of(self._tokenizer, tools, arguments) if is_exact else None
            self._roots[key] = _Root(follow_ups, tools, arguments)
        return self._roots[key]

    def _placed(
        self, root: _Root, messages: Sequence[Message], parent: AskedTurn | None, used: int, most: int | None
    ) -> tuple[AskedTurn | None, int, Sequence[int]]:
        """Returns the turn to continue, its number of messages, and the tokens after its answer.

        `parent`, `used`: the last turn of the path that the messages continue, and its number of messages.
        """
        if parent is not None and root.follow_ups is not None:
            return parent, used, root.follow_ups.tokens(messages[used:], parent.sampled or (), most)
        rendered = chat_tokens(self._tokenizer, messages, root.tools, root.arguments, most)
        while parent is not None:
            before = [*parent.prompt, *(parent.sampled or ())]
            if rendered[: len(before)] == before:
                return parent, used, rendered[len(before) :]
            parent, used = parent.parent, used - len(parent.said) - 1
        return None, 0, rendered


def longest_path(
    turns: Sequence[AskedTurn], end_of: Callable[[AskedTurn, int], int | None]
) -> tuple[AskedTurn | None, int]:
    """Returns the last turn of the longest path that is continued, and that path's length.

    Of equal paths, the newest; (None, 0) if none is. `turns`: the first ones of conversations.
    `end_of(turn, start)`: the place, in messages or in tokens, at which a turn ends that begins at `start`;
    None if it is not continued.
    """
    best: tuple[AskedTurn | None, int] = None, 0
    pending = [(turn, 0) for turn in turns]
    while pending:
        turn, start = pending.pop()
        if (end := end_of(turn, start)) is None:
            continue
        newest = -1 if best[0] is None else best[0].number
        if (end, turn.number) > (best[1], newest):
            best = turn, end
        pending += [(child, end) for child in turn.children]
    return best


def _end_of(
    messages: Sequence[Message], said: tuple[Canonical, ...], turn: AskedTurn, start: int
) -> int | None:
    """Returns how many of the messages are a turn, which begins at number `start`, and all before it."""
    end = start + len(turn.said)
    # At least one message must follow the answer, which is message number `end`.
    if turn.answer is None or end + 1 >= len(said) or said[start:end] != turn.said:
        return None
    is_same = messages[end].get("role") == "assistant" and same_answer(messages[end], turn.answer)
    return end + 1 if is_same else None
