"""The conversations of a client that sends token ids: a tree of turns, found by their tokens."""

from __future__ import annotations

from collections.abc import Sequence

from areal_jax.episodes.session import AskedTurn, longest_path


class TokenPaths:
    """The turns of one episode that were asked for by token ids; not thread-safe."""

    def __init__(self) -> None:
        self._roots: list[AskedTurn] = []
        self._count = 0

    def ask(self, tokens: Sequence[int]) -> AskedTurn:
        """Adds a turn that follows `tokens`, and returns it.

        It continues the longest path of answered turns with which the tokens begin, of equal paths the
        newest. Without such a path it has no parent.
        """
        tokens = tuple(tokens)

        def end_of(turn: AskedTurn, start: int) -> int | None:
            own = None if turn.sampled is None else (*turn.added, *turn.sampled)
            return None if own is None or tokens[start : start + len(own)] != own else start + len(own)

        parent, length = longest_path(self._roots, end_of)
        turn = AskedTurn(self._count, parent, (), tokens[length:])
        self._count += 1
        (self._roots if parent is None else parent.children).append(turn)
        return turn

    def answered(self, turn: AskedTurn, sampled: list[int]) -> None:
        """Records a turn's answer."""
        turn.sampled = sampled
