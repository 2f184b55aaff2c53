"""A tool-use game in turns; each turn is a prompt, which begins with the rules and all earlier turns."""

from __future__ import annotations

from typing import NamedTuple

from areal_jax.tasks.chat import check_split
from areal_jax.tasks.datasets.drawn import Drawn, Draws, first_drawn, is_in_split
from areal_jax.tasks.datasets.warehouse import (
    LETTERS,
    ROOMS,
    Game,
    GameCall,
    GameState,
    after,
    building,
    by_progress,
    distance,
)
from areal_jax.tasks.datasets.warehouse_texts import (
    ALPHABET,
    ASK,
    END,
    RESULT,
    CompactTexts,
    PlainTexts,
    all_calls,
)
from areal_jax.tasks.errors import TaskError
from areal_jax.tasks.tokenizers import CharTokenizer
from areal_jax.types import Completion, Prompt, Reward

_GRAIN = 1_000_000
"""The setting `useless` counts in steps of 1 / _GRAIN."""


class PlayedCall(NamedTuple):
    """A call of the scripted player, and the state after it."""

    call: GameCall
    state: GameState


class ToolGame(Drawn):
    """Bring a parcel through a warehouse by tool calls, one call a prompt: procedural, no files.

    The parcel is in a locked case, to be opened with a key, and must be brought to a room. Each turn of a
    game is a prompt of its own: the rules, the game's task, and all earlier turns, whose calls a scripted
    player made. The completion is the next call, and nothing else. So the prompts of a game begin with each
    other, and all prompts with the rules: with trainer.compute=tree a batch computes them once. The turns of
    a game come one after another; choose trainer.batch_size as a multiple of `turns`, so that a batch has
    complete games.
    """

    def __init__(
        self,
        *,
        rooms: int = 8,
        turns: int = 8,
        useless: float = 0.25,
        compact: bool = False,
        split: str = "train",
        size: int = 100_000,
    ) -> None:
        """Each game has `turns` prompts, and needs at least so many calls.

        `rooms`: number of rooms, whose corridors are the same in all games. `useless`: fraction of the
        scripted player's calls that do not reduce the distance to the game's end. `compact`: a turn is
        ">gB=B-ACE/k/;", and the task has a tokenizer of its own, for small models without pretraining; else
        prompts are chats with long rules. `split`: train or test, about one game in ten; `size`: number of
        prompts, rounded up to complete games.
        """
        if rooms not in ROOMS:
            raise TaskError(f"rooms={rooms} is out of range; give {ROOMS[0]} to {ROOMS[-1]}")
        check_split(split)
        if turns < 1 or size < 1:
            raise TaskError(f"turns={turns} and size={size} must be positive")
        if not 0 <= useless <= 1:
            raise TaskError(f"useless={useless} is not a fraction; give 0 to 1")
        self.successive = self._turns = turns
        super().__init__(-(-size // turns) * turns)
        self._building, self._rooms = building(rooms), rooms
        self._useless, self._split, self._is_compact = useless, split, compact
        self._texts = CompactTexts() if compact else PlainTexts()
        self.rules = self._texts.rules(self._building)
        self.calls = all_calls(self._texts)
        self.tokenizer = CharTokenizer(ALPHABET) if compact else None
        # From one end of the building to the other for the key, back for the parcel, and there again.
        longest = 3 * max(map(max, self._building.steps)) + 3
        if turns > longest:
            raise TaskError(
                f"turns={turns} is more than the longest game of {rooms} rooms needs, {longest} calls; give "
                "more rooms or fewer turns"
            )
        # A split without such a game: an error now, not in a run.
        self._game(Draws.of(0))

    def _prompt(self, i: int) -> Prompt:
        number, turn = divmod(i, self._turns)
        draws = Draws.of(number)
        game = self._game(draws)
        played = self._played(draws, game, turn)
        info = {"goal": game.goal, "state": played[-1].state if played else game.start, "turn": turn + 1}
        if self._is_compact:
            return Prompt(self._symbols(game, played), info=info)
        return Prompt(messages=self._messages(game, played), info=info)

    def score(self, prompt: Prompt, completion: Completion) -> Reward:
        """Returns 1 if the call reduces the distance to the game's end, 0 if not, -1 if it is illegal.

        Illegal is a call that the state does not allow, any text beside the call (in chats, except white
        space around it), and a completion without an end.
        """
        state, goal = GameState(*prompt.info["state"]), prompt.info["goal"]
        call = self.calls.get(completion.text.strip()) if completion.stop_reason == "stop" else None
        then = None if call is None else after(self._building, state, call)
        if then is None:
            why = "no call of a tool" if call is None else "a call that the state does not allow"
            return Reward(-1.0, {"legal": 0.0, "progress": 0.0}, why)
        before, left = (distance(self._building, each, goal) for each in (state, then))
        progress = float(left < before)
        note = f"{left} calls from the end, {before} before"
        return Reward(progress, {"legal": 1.0, "progress": progress}, note)

    def reference(self, prompt: Prompt) -> str:
        good, _ = by_progress(self._building, GameState(*prompt.info["state"]), prompt.info["goal"])
        return self._texts.call(good[0])

    def _game(self, draws: Draws) -> Game:
        """Returns a drawn game of this task's split that needs at least as many calls as it has turns."""

        def draw() -> Game | None:
            room, key, parcel, goal = (draws.below(self._rooms) for _ in range(4))
            game = Game(GameState(room, key, parcel, is_open=False), goal)
            is_long = distance(self._building, game.start, goal) >= self._turns
            content = "".join(LETTERS[place] for place in (room, key, parcel, goal))
            return game if is_long and is_in_split(content, self._split) else None

        return first_drawn(draw, self._split)

    def _played(self, draws: Draws, game: Game, turns: int) -> list[PlayedCall]:
        """Returns the scripted player's first turns; the draws of a turn do not depend on their number."""
        played, state = [], game.start
        for _ in range(turns):
            good, useless = by_progress(self._building, state, game.goal)
            call = draws.one(useless if draws.below(_GRAIN) < self._useless * _GRAIN else good)
            then = after(self._building, state, call)
            assert then is not None
            played.append(PlayedCall(call, then))
            state = then
        return played

    def _symbols(self, game: Game, played: list[PlayedCall]) -> str:
        texts = self._texts
        turns = (
            ASK + texts.call(turn.call) + RESULT + texts.seen(self._building, turn.state) + END
            for turn in played
        )
        return self.rules + texts.game(self._building, game) + "".join(turns) + ASK

    def _messages(self, game: Game, played: list[PlayedCall]) -> tuple[dict[str, str], ...]:
        texts = self._texts
        said = [("system", self.rules), ("user", texts.game(self._building, game))]
        for turn in played:
            said += [
                ("assistant", texts.call(turn.call)),
                ("user", texts.seen(self._building, turn.state)),
            ]
        return tuple({"role": role, "content": content} for role, content in said)
