"""The warehouse of the tool game: rooms, a key, and a parcel in a locked case; its calls and distances."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from functools import lru_cache
from string import ascii_uppercase
from typing import NamedTuple

from areal_jax.tasks.datasets.drawn import Draws

ROOMS = range(4, 17)
LETTERS = ascii_uppercase[: ROOMS[-1]]
"""Names of the rooms."""

HELD = -1
"""The place of an item that the player carries."""

KEY, PARCEL = "key", "parcel"
ITEMS = (KEY, PARCEL)


class GameCall(NamedTuple):
    """A call of a tool: go to a room, take an item, put an item down, or look (without an argument)."""

    tool: str
    argument: str = ""


LOOK = GameCall("look")
CALLS = (
    *(GameCall("go", room) for room in LETTERS),
    *(GameCall(t, i) for t in ("take", "put") for i in ITEMS),
    LOOK,
)
"""All calls that the tools understand, of which the state allows some."""


class GameState(NamedTuple):
    """Where the player and the items are; HELD: the player carries the item."""

    room: int
    key: int
    parcel: int
    is_open: bool
    """Whether the parcel's case has been opened: from then on the key has no use."""


@dataclass(frozen=True)
class Building:
    """Rooms, numbered from 0, and the corridors between them."""

    neighbours: tuple[tuple[int, ...], ...]
    """The rooms to which corridors lead from each room, in ascending order."""
    steps: tuple[tuple[int, ...], ...]
    """The smallest number of corridors between two rooms."""

    @property
    def corridors(self) -> list[tuple[int, int]]:
        return [(one, two) for one, found in enumerate(self.neighbours) for two in found if one < two]


class Game(NamedTuple):
    """A game in a building: the state at its start, and the room to which the parcel must be brought."""

    start: GameState
    goal: int


@lru_cache(maxsize=len(ROOMS))
def building(rooms: int) -> Building:
    """Returns the building with this number of rooms, always the same: a random tree and some corridors."""
    draws = Draws.of(rooms)
    joined = {(draws.below(room), room) for room in range(1, rooms)}
    for _ in range(rooms // 3):
        one, two = sorted(draws.some(range(rooms), 2))
        joined.add((one, two))
    neighbours = tuple(
        tuple(
            sorted({two for one, two in joined if one == room} | {one for one, two in joined if two == room})
        )
        for room in range(rooms)
    )
    return Building(neighbours, tuple(_steps_from(room, neighbours) for room in range(rooms)))


def _steps_from(start: int, neighbours: tuple[tuple[int, ...], ...]) -> tuple[int, ...]:
    found, waiting = {start: 0}, deque([start])
    while waiting:
        room = waiting.popleft()
        for other in neighbours[room]:
            if other not in found:
                found[other] = found[room] + 1
                waiting.append(other)
    return tuple(found[room] for room in range(len(neighbours)))


def after(of: Building, state: GameState, call: GameCall) -> GameState | None:
    """Returns the state after a call; None if the state does not allow the call, which changes nothing then.

    A corridor must lead to the room. An item must lie in the player's room to be taken, and the parcel's case
    be open, or the key be carried, which opens it. An item must be carried to be put down.
    """
    tool, argument = call
    if tool == "look":
        return state
    if tool == "go":
        room = LETTERS.index(argument)
        return state._replace(room=room) if room in of.neighbours[state.room] else None
    place = state.key if argument == KEY else state.parcel
    if place != (state.room if tool == "take" else HELD):
        return None
    if argument == PARCEL and not (state.is_open or state.key == HELD):
        return None
    new = HELD if tool == "take" else state.room
    return state._replace(key=new) if argument == KEY else state._replace(parcel=new, is_open=True)


def distance(of: Building, state: GameState, goal: int) -> int:
    """Returns the smallest number of calls that end the game; 0 if the unlocked parcel lies at the goal."""
    calls, room = 0, state.room
    if not state.is_open and state.key != HELD:
        calls, room = of.steps[room][state.key] + 1, state.key
    if state.parcel != HELD:
        if state.parcel == goal and state.is_open:
            return 0
        calls, room = calls + of.steps[room][state.parcel] + 1, state.parcel
    return calls + of.steps[room][goal] + 1


def by_progress(of: Building, state: GameState, goal: int) -> tuple[list[GameCall], list[GameCall]]:
    """Returns the allowed calls, in the order of CALLS: those that reduce the distance, and the others."""
    now, good, useless = distance(of, state, goal), [], []
    for call in CALLS:
        then = after(of, state, call)
        if then is not None:
            (good if distance(of, then, goal) < now else useless).append(call)
    return good, useless
