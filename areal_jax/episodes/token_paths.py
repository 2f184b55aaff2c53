"""The conversations of a client that sends token ids: a tree of turns, found by their tokens."""

from __future__ import annotations

from collections.abc import Sequence

from areal_jax.episodes.session import Sampled, Turn


class TokenPaths:
    """The turns of one episode that were asked for by token ids; not thread-safe."""

    def __init__(self) -> None:
        self._roots: list[Turn] = []
        self._count = 0

    def ask(self, tokens: Sequence[int]) -> Turn:
        """Adds a turn that follows `tokens`, and returns it.

        It continues the longest path of answered turns with which the tokens begin, of equal paths the
        newest. Without such a path it has no parent.
        """
        tokens = tuple(tokens)
        parent, length = self._longest(tokens)
        turn = Turn(self._count, parent, (), tokens[length:])
        self._count += 1
        (self._roots if parent is None else parent.children).append(turn)
        return turn

    def answered(self, turn: Turn, sampled: Sampled) -> None:
        """Records a turn's answer."""
        turn.sampled = sampled

    def _longest(self, tokens: tuple[int, ...]) -> tuple[Turn | None, int]:
        best: tuple[Turn | None, int] = None, 0
        pending = [(turn, 0) for turn in self._roots]
        while pending:
            turn, start = pending.pop()
            if turn.sampled is None:
                continue
            own = (*turn.added, *turn.sampled.tokens.tolist())
            end = start + len(own)
            if tokens[start:end] != own:
                continue
            newest = -1 if best[0] is None else best[0].number
            if (end, turn.number) > (best[1], newest):
                best = turn, end
            pending += [(child, end) for child in turn.children]
        return best
