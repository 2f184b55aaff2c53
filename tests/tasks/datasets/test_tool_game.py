"""The tool game: distances against a search, the reward of every call, and the texts of prompts."""

from __future__ import annotations

import re
from collections import Counter
from itertools import pairwise, product

import pytest

from areal_jax.tasks.datasets.tool_game import ToolGame
from areal_jax.tasks.datasets.warehouse import (
    CALLS,
    HELD,
    LETTERS,
    GameCall,
    GameState,
    after,
    building,
    distance,
)
from areal_jax.tasks.errors import TaskError
from areal_jax.tasks.tokenizers import ByteTokenizer
from areal_jax.types import Completion, Prompt, Reward

GO, TAKE_KEY, TAKE, PUT_KEY, PUT = "go", *(GameCall(t, i) for t in ("take", "put") for i in ("key", "parcel"))


def judged(task: ToolGame, prompt: Prompt, text: str, stop_reason: str = "stop") -> Reward:
    return task.score(prompt, Completion(text, (1,), stop_reason))


def all_states(rooms: int) -> list[GameState]:
    """Every state that a game may reach; a parcel that is carried has left its case."""
    places = [HELD, *range(rooms)]
    states = [GameState(*each) for each in product(range(rooms), places, places, (False, True))]
    return [state for state in states if state.is_open or state.parcel != HELD]


def searched(rooms: int, goal: int) -> dict[GameState, int]:
    """The distance of each state, by a breadth-first search backwards from all ends."""
    states = all_states(rooms)
    before: dict[GameState, list[GameState]] = {state: [] for state in states}
    for state in states:
        for call in CALLS:
            then = after(building(rooms), state, call)
            if then is not None:
                before[then].append(state)
    found = {state: 0 for state in states if state.is_open and state.parcel == goal}
    layer = list(found)
    while layer:
        layer = [
            s for then in layer for s in before[then] if found.setdefault(s, found[then] + 1) > found[then]
        ]
    return found


@pytest.mark.parametrize(("rooms", "goal"), [(4, 0), (6, 3), (7, 6)])
def test_the_distance_is_that_of_a_search_over_all_states(rooms: int, goal: int):
    right = searched(rooms, goal)
    assert right.keys() == set(all_states(rooms)), "every game can be finished"
    assert {state: distance(building(rooms), state, goal) for state in right} == right


def test_what_the_tools_do():
    """In the building of 6 rooms: A joins B, C, D and F, and B joins E."""
    of, start = building(6), GameState(room=0, key=1, parcel=4, is_open=False)
    calls = [
        GameCall("look"),
        GameCall(GO, "B"),
        TAKE_KEY,
        GameCall(GO, "E"),
        TAKE,
        PUT_KEY,
        GameCall(GO, "B"),
        PUT,
    ]
    states = [start]
    for call in calls:
        then = after(of, states[-1], call)
        assert then is not None
        states.append(then)
    assert states == [
        start,
        start,
        (1, 1, 4, False),
        (1, HELD, 4, False),
        (4, HELD, 4, False),
        (4, HELD, HELD, True),
        (4, 4, HELD, True),
        (1, 4, HELD, True),
        (1, 4, 1, True),
    ]
    for refused in (GameCall(GO, "A"), GameCall(GO, "E"), GameCall(GO, "G"), TAKE_KEY, TAKE, PUT_KEY, PUT):
        assert after(of, start, refused) is None, refused
    assert after(of, GameState(4, 1, 4, False), TAKE) is None, "without the key the case stays locked"
    assert after(of, GameState(4, 1, 4, True), TAKE) == (4, 1, HELD, True)


@pytest.mark.parametrize("compact", [True, False])
def test_every_call_is_paid_by_the_distance_of_the_state_that_it_leads_to(compact: bool):
    task = ToolGame(rooms=6, turns=6, compact=compact)
    right, seen = {goal: searched(6, goal) for goal in range(6)}, Counter()
    for i in range(120):
        prompt = task[i]
        state, distances = GameState(*prompt.info["state"]), right[prompt.info["goal"]]
        for text, call in task.calls.items():
            then = after(building(6), state, call)
            legal = float(then is not None)
            progress = float(then is not None and distances[then] < distances[state])
            reward = judged(task, prompt, text)
            assert (reward.value, reward.parts) == (
                progress if legal else -1.0,
                {"legal": legal, "progress": progress},
            )
            seen[reward.value] += 1
        assert judged(task, prompt, task.reference(prompt)).value == 1.0
    assert min(seen[value] for value in (1.0, 0.0, -1.0)) > 100


@pytest.mark.parametrize("compact", [True, False])
def test_any_text_beside_the_call_is_illegal(compact: bool):
    task = ToolGame(compact=compact)
    for i in range(40):
        prompt, right = task[i], task.reference(task[i])
        for text in (right + right, right + "\n" + right, right + ";", ">" + right, right.upper() + ".", ""):
            assert judged(task, prompt, text).parts == {"legal": 0.0, "progress": 0.0}, text
        assert judged(task, prompt, right, "length").value == -1.0, "a completion has an end"


@pytest.mark.parametrize("compact", [True, False])
def test_the_prompts_of_a_game_begin_with_each_other_and_all_with_the_rules(compact: bool):
    task = ToolGame(turns=8, compact=compact)
    render = (task.tokenizer or ByteTokenizer()).render
    rules = render(Prompt(task.rules) if compact else Prompt(messages=task[0].messages[:1]))
    rules = rules if compact else rules[: -len("assistant: ")]
    for game in range(20):
        prompts = [render(task[8 * game + turn]) for turn in range(8)]
        assert prompts[0][: len(rules)] == rules
        for one, longer in pairwise(prompts):
            assert len(one) < len(longer) and longer[: len(one)] == one
    assert render(task[0])[len(rules) :] != render(task[8])[len(rules) :]


@pytest.mark.parametrize("useless", [0.0, 0.25, 1.0])
def test_the_history_is_what_the_environment_answers_to_the_scripted_calls(useless: float):
    """Read from the text of each turn: the call, its result, and which calls made progress."""
    task, made_progress = ToolGame(useless=useless, compact=True), []
    for game in range(30):
        texts = [task[8 * game + turn].text for turn in range(8)]
        states = [GameState(*task[8 * game + turn].info["state"]) for turn in range(8)]
        goal = task[8 * game].info["goal"]
        for turn in range(7):
            call, room, around, lying, held = re.fullmatch(
                r"(\w+)=(\w)-(\w+)/(\w*)/(\w*);>", texts[turn + 1].removeprefix(texts[turn])
            ).groups()
            then = after(building(8), states[turn], task.calls[call])
            assert then == states[turn + 1]
            assert LETTERS.index(room) == then.room
            assert tuple(map(LETTERS.index, around)) == building(8).neighbours[then.room]
            things = {("k", then.key), ("x" if then.is_open else "c", then.parcel)}
            assert set(lying) == {thing for thing, place in things if place == then.room}
            assert set(held) == {thing for thing, place in things if place == HELD}
            near, far = (distance(building(8), each, goal) for each in (then, states[turn]))
            made_progress.append(near < far)
    assert sum(made_progress) / len(made_progress) == pytest.approx(1 - useless, abs=0.08)


def test_the_turns_of_a_game_stay_together_and_a_game_is_complete():
    task = ToolGame(turns=6, size=100, compact=True)
    assert (task.successive, len(task)) == (6, 102)
    with pytest.raises(IndexError, match="there is no prompt 102"):
        task[102]
    assert [task[i].info["turn"] for i in range(96, 102)] == [1, 2, 3, 4, 5, 6]


def test_a_prompt_depends_on_its_index_and_the_settings_alone():
    one, other = ToolGame(size=80), ToolGame()
    assert [one[i] for i in (79, 12, 0)] == [other[i] for i in (79, 12, 0)]
    assert all(
        one[8].info[name] == ToolGame(compact=True)[8].info[name] for name in ("goal", "state", "turn")
    )


def test_rules_in_words_are_long_and_name_every_tool_and_corridor():
    system, user = ToolGame(rooms=6)[0].messages
    assert 500 < len(system["content"].split()) < 1000
    assert system["content"].endswith("A and B; A and C; A and D; A and F; B and E.")
    for tool in ("- go ROOM", "- take THING", "- put THING", "- look"):
        assert tool in system["content"]
    assert user["content"].startswith("The task: bring the parcel to room ")


def test_a_game_is_in_one_split_and_a_tenth_is_for_tests():
    def games(split: str) -> set[str]:
        task = ToolGame(rooms=4, turns=4, compact=True, split=split)
        return {task[i].text for i in range(0, 4 * 1500, 4)}

    train, test = games("train"), games("test")
    assert not train & test
    assert 0.05 < len(test) / len(train | test) < 0.15


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"rooms": 3}, "rooms=3 is out of range; give 4 to 16"),
        ({"rooms": 17}, "rooms=17"),
        ({"turns": 0}, "turns=0"),
        ({"turns": 30}, "turns=30 is more than the longest game of 8 rooms needs"),
        ({"size": 0}, "size=0"),
        ({"useless": 25}, r"useless=25 is not a fraction; give 0 to 1"),
        ({"split": "dev"}, "split='dev'"),
    ],
)
def test_settings_that_cannot_work_are_named(settings: dict, problem: str):
    with pytest.raises(TaskError, match=problem):
        ToolGame(**settings)
