from __future__ import annotations

import re
from collections import Counter
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from areal_jax.lab.demonstrations import TASKS
from areal_jax.plugin import load_object
from areal_jax.tasks.datasets.countdown import Countdown
from areal_jax.tasks.source import BLOCK, BUILTIN, PromptStream, WeightedTask, load_tasks
from areal_jax.tasks.task import Task
from areal_jax.types import ArealError, Prompt


class Numbered(Task):
    def __init__(self, *, size: int = 10, flavour: str = "plain", successive: int = 1) -> None:
        self.size = size
        self.flavour = flavour
        self.successive = successive

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, i: int) -> Prompt:
        return Prompt(str(i))


def stream(seed: int = 0, **sizes_and_weights: tuple[int, float]) -> PromptStream:
    tasks = {n: WeightedTask(Numbered(size=size), w) for n, (size, w) in sizes_and_weights.items()}
    return PromptStream(tasks, seed)


@settings(max_examples=25)
@given(st.integers(1, 700), st.integers(0, 2**31 - 1))
def test_every_index_comes_once_an_epoch(size: int, seed: int):
    prompts = stream(seed, only=(size, 1.0))
    epochs = [[prompts.place(e * size + i)[1] for i in range(size)] for e in range(3)]
    assert all(sorted(epoch) == list(range(size)) for epoch in epochs)
    if size > 20:
        assert all(one != other for one, other in pairwise(epochs)), "epochs are shuffled anew"


@settings(max_examples=10)
@given(st.integers(0, 2**31 - 1), st.randoms(use_true_random=False))
def test_a_prompt_is_a_function_of_seed_and_ordinal(seed: int, chance):
    """Asked at random, by another object, or in order: the same."""
    sizes = {"one": (13, 2.0), "two": (700, 1.0)}
    in_order = list(map(stream(seed, **sizes).place, range(2500)))
    other = stream(seed, **sizes)
    for ordinal in chance.sample(range(2500), 300):
        assert other.place(ordinal) == in_order[ordinal]


def test_seeds_and_tasks_are_shuffled_differently_and_a_name_changes_nothing():
    def order(prompts: PromptStream, name: str) -> list[int]:
        places = [prompts.place(i) for i in range(200)]
        return [index for task, index in places if task == name][:50]

    def alone(seed: int, name: str) -> list[int]:
        return order(stream(seed, **{name: (100, 1.0)}), name)

    assert alone(0, "a") != alone(1, "a")
    assert alone(0, "a") == alone(0, "b"), "the plain loop names its task otherwise than a run does"
    mixed = stream(0, a=(100, 1.0), b=(100, 1.0))
    assert order(mixed, "a") != order(mixed, "b")


@pytest.mark.parametrize(
    ("weights", "wanted"),
    [
        ((1.0, 1.0, 1.0), (334, 333, 333)),
        ((0.5, 2.5, 7.0), (50, 250, 700)),
        ((1.0, 2.0, 4.0), (143, 286, 571)),
    ],
)
def test_each_block_has_exactly_its_shares(weights: tuple[float, ...], wanted: tuple[int, ...]):
    mixed = stream(3, **{f"t{n}": (17, weight) for n, weight in enumerate(weights)})
    blocks = [[mixed.place(b * BLOCK + i)[0] for i in range(BLOCK)] for b in range(3)]
    for block in blocks:
        counts = Counter(block)
        assert tuple(counts[f"t{n}"] for n in range(3)) == wanted
    assert blocks[0] != blocks[1], "the order within a block is drawn for that block"


def test_in_a_mixture_every_task_still_sees_each_index_once_an_epoch():
    mixed = stream(5, small=(7, 1.0), large=(450, 3.0))
    places = [mixed.place(i) for i in range(3 * BLOCK)]
    for name, size in (("small", 7), ("large", 450)):
        indices = [index for task, index in places if task == name]
        for start in range(0, len(indices) - size + 1, size):
            assert sorted(indices[start : start + size]) == list(range(size))


@settings(max_examples=25)
@given(st.integers(1, 300), st.integers(1, 12), st.integers(0, 2**31 - 1))
def test_successive_prompts_stay_together_and_each_comes_once_an_epoch(size: int, together: int, seed: int):
    """Also in a mixture, where prompts of other tasks come between; the last run may be shorter."""
    own, other = Numbered(size=size, successive=together), Numbered(size=41)
    mixed = PromptStream({"own": WeightedTask(own), "other": WeightedTask(other, 0.5)}, seed)
    places = [mixed.place(i) for i in range(3 * size + BLOCK)]
    indices = [index for name, index in places if name == "own"][: 2 * size]
    assert len(indices) == 2 * size
    for epoch in (indices[:size], indices[size:]):
        assert sorted(epoch) == list(range(size))
        firsts = [at for at, index in enumerate(epoch) if index % together == 0]
        for at in firsts:
            run = range(epoch[at], min(epoch[at] + together, size))
            assert epoch[at : at + len(run)] == list(run)
    if size > 20 * together:
        assert indices[:size] != indices[size:] != list(range(size)), "the runs are shuffled"


def test_an_order_never_changes_between_releases():
    """Typed in: a run that an older release began must get the same prompts when it is resumed."""
    alone, mixed = stream(7, only=(10, 1.0)), stream(3, a=(9, 1.0), b=(100, 2.0))
    assert [alone.place(i)[1] for i in range(12)] == [0, 3, 8, 4, 6, 9, 5, 7, 1, 2, 2, 4]
    names, indices = zip(*map(mixed.place, range(990, 1002)), strict=True)
    assert "".join(names) == "ababbabaabbb"
    assert indices == (1, 55, 0, 81, 22, 8, 77, 5, 7, 6, 60, 49)


def test_runs_of_no_prompts_are_refused():
    with pytest.raises(ArealError, match=r"Numbered\.successive=0 is not positive"):
        PromptStream({"own": WeightedTask(Numbered(successive=0))}, 0)


def test_a_prompt_carries_its_tasks_name():
    prompts = stream(0, one=(5, 1.0), two=(5, 1.0))
    for ordinal in range(50):
        name, index = prompts.place(ordinal)
        assert prompts.prompt(ordinal) == Prompt(str(index), task=name)


def test_a_task_without_prompts_and_one_never_drawn_are_named():
    with pytest.raises(ArealError, match=r"tasks\.empty has no prompts"):
        stream(0, full=(5, 1.0), empty=(0, 1.0))
    with pytest.raises(ArealError, match=r"tasks\.rare\.weight=0\.0001 is below 1/1000"):
        stream(0, full=(5, 1.0), rare=(5, 0.0001))


class Short(Task):
    """Says that it has more prompts than it has."""

    def __len__(self) -> int:
        return 9

    def __getitem__(self, i: int) -> Prompt:
        return [Prompt("a"), Prompt("b")][i]


def test_a_task_with_fewer_prompts_than_its_length_is_named_with_what_to_change():
    prompts = PromptStream({"short": WeightedTask(Short(), 1.0)}, 0)
    with pytest.raises(
        ArealError, match=r"tasks\.short has no prompt at index \d \(IndexError.* returns 9; .*list"
    ):
        for ordinal in range(9):
            prompts.prompt(ordinal)


def test_an_empty_split_is_named():
    empty = WeightedTask(Task.from_rows([], lambda p, c: 0.0), 1.0, "validation")
    with pytest.raises(
        ArealError, match=r"tasks\.rows has no prompts in its split validation; correct .* filter"
    ):
        PromptStream({"rows": empty}, 0)


def test_fewer_prompts_than_a_run_asks_for_come_again_in_another_order():
    prompts = stream(0, one=(3, 1.0))
    epochs = [[prompts.prompt(3 * epoch + i).text for i in range(3)] for epoch in range(8)]
    assert all(sorted(epoch) == ["0", "1", "2"] for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) > 1


# --- load_tasks ---------------------------------------------------------------------------------------


def test_built_in_and_own_tasks_are_made_with_their_settings():
    own = f"{__name__}:Numbered"
    tasks = load_tasks({"countdown": {"size": 9, "weight": 3}, own: {"flavour": "salt"}})
    assert list(tasks) == ["countdown", own]
    assert isinstance(tasks["countdown"].task, Countdown)
    assert (len(tasks["countdown"].task), tasks["countdown"].weight) == (9, 3.0)
    assert (tasks[own].task.flavour, tasks[own].weight) == ("salt", 1.0)


def test_objects_stand_in_for_the_config_and_are_named_by_class():
    tasks = load_tasks(
        {"countdown": {}}, [Numbered(), Numbered(size=3), Task.from_rows([], lambda p, c: 0.0)]
    )
    assert list(tasks) == ["Numbered", "Numbered-2", "Rows"]


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ({"countdwn": {}}, "countdwn.*did you mean countdown"),
        ({"countdown": {"sizes": 3}}, r"tasks\.countdown\.sizes; did you mean tasks\.countdown\.size"),
        ({"jsonl": {}}, r"tasks\.jsonl\.path is required"),
        ({"countdown": {"size": "many"}}, r"tasks\.countdown cannot be made with the settings"),
        ({"countdown": {"weight": 0}}, r"tasks\.countdown\.weight=0 is not a positive number"),
        ({"countdown": {"weight": "much"}}, "weight='much' is not a positive"),
        ({"nowhere.at_all:Task": {}}, "module nowhere.at_all was not found"),
        ({"collections:Counter": {}}, "returned a Counter, not a Task"),
        ({}, "a run needs a task; give tasks=NAME, one of .*countdown, gsm8k"),
    ],
)
def test_what_is_wrong_with_a_config_is_named(given: dict, problem: str):
    with pytest.raises(ArealError, match=problem):
        load_tasks(given)


def test_an_object_that_is_no_task_is_named():
    with pytest.raises(ArealError, match="is not a Task; subclass"):
        load_tasks({}, ["countdown"])


def test_every_built_in_name_leads_to_a_task_and_has_one_line_of_doc():
    for path in (BUILTIN | TASKS).values():
        task = load_object(path, {}, "task")
        assert issubclass(task, Task)
        assert re.match(r".+\.(\n\n|$)", task.__doc__)
