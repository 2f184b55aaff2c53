from __future__ import annotations

import re
from collections import Counter
from itertools import permutations, product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal_jax.tasks.blocks import parse
from areal_jax.tasks.datasets.knights import Claim, Compound, Knights, Statement, solutions
from areal_jax.tasks.errors import TaskError
from areal_jax.types import Prompt
from tests.tasks.responses import judge, perfect

STEPS = ("Ann is a knight", "Bob is a knave")
TWO = Prompt("?", info={"people": ("Ann", "Bob"), "steps": STEPS, "answer": ", ".join(STEPS)})


def statements(people: int) -> st.SearchStrategy[Statement]:
    claims = st.builds(Claim, st.integers(0, people - 1), st.booleans())
    connectives = st.sampled_from(["and", "or", "if", "iff"])
    return st.recursive(claims, lambda inner: st.builds(Compound, connectives, inner, inner), max_leaves=4)


def worlds_in_which(statement: Statement, people: int) -> set[tuple[bool, ...]]:
    """The worlds in which a statement is true, by set algebra."""
    everywhere = set(product((False, True), repeat=people))
    if isinstance(statement, Claim):
        return {world for world in everywhere if world[statement.person] is statement.is_knight}
    left, right = worlds_in_which(statement.left, people), worlds_in_which(statement.right, people)
    if statement.connective == "if":
        return everywhere - (left - right)
    return {"and": left & right, "or": left | right, "iff": everywhere - (left ^ right)}[statement.connective]


@given(st.integers(2, 4).flatmap(lambda n: st.tuples(*[statements(n)] * n)))
def test_solutions_are_the_worlds_in_which_knights_alone_speak_the_truth(said: tuple[Statement, ...]):
    people = len(said)
    consistent = set(product((False, True), repeat=people))
    for speaker, statement in enumerate(said):
        true = worlds_in_which(statement, people)
        consistent = {world for world in consistent if world[speaker] == (world in true)}
    found = solutions(said, people)
    assert len(found) == len(set(found))
    assert set(found) == consistent


def solved(expressions: dict[str, str]) -> list[dict[str, bool]]:
    """The consistent kinds, by Python's own operators: name -> Python expression over the names."""
    found = []
    for kinds in product((True, False), repeat=len(expressions)):
        world = dict(zip(expressions, kinds, strict=True))
        if all(bool(eval(said, {}, world)) == world[name] for name, said in expressions.items()):
            found.append(world)
    return found


def read_symbols(text: str) -> dict[str, str]:
    """A compact prompt as Python expressions; booleans are compared by <= for if-then."""
    marks = {"&": " and ", "|": " or ", ">": " <= ", "=": " == "}
    expressions = {}
    for line in text.removesuffix("?").split(";"):
        name, said = line.split(":")
        said = re.sub("[&|>=]", lambda mark: marks[mark[0]], said)
        expressions[name] = re.sub("([A-H])([kn])", lambda m: m[1] if m[2] == "k" else f"(not {m[1]})", said)
    return expressions


def read_words(text: str) -> dict[str, str]:
    expressions = {}
    for name, said in re.findall(r'^(\w+) says: "(.*)\."$', text, re.MULTILINE):
        said = said.replace("If ", "if ").replace("I am", f"{name} is")
        said = said.replace(" if and only if ", " == ").replace("if ", "").replace(", then ", " <= ")
        said = re.sub(r"(\w+) is a knave", r"(not \1)", said)
        expressions[name] = said.replace(" is a knight", "")
    return expressions


@pytest.mark.parametrize(("people", "depth"), [(2, 1), (3, 1), (5, 1), (4, 2), (8, 2)])
def test_compact_problems_have_exactly_the_solution_of_their_info(people: int, depth: int):
    task = Knights(people=people, depth=depth, compact=True)
    seen = set()
    for i in range(10 if people == 8 else 60):
        prompt = task[i]
        (world,) = solved(read_symbols(prompt.text))
        assert list(world) == list(prompt.info["people"]) == list("ABCDEFGH"[:people])
        truth = tuple(f"{name}={'k' if kind else 'n'}" for name, kind in world.items())
        assert (prompt.info["steps"], prompt.info["answer"]) == (truth, ",".join(truth))
        seen |= set(prompt.text) & set("&|>=(")
    assert seen == set("&|>=(") - (set("(") if depth == 1 else set())


@pytest.mark.parametrize(("people", "depth"), [(2, 1), (5, 1), (4, 2)])
def test_chats_have_exactly_the_solution_of_their_info(people: int, depth: int):
    task = Knights(people=people, depth=depth)
    names = set()
    for i in range(60):
        prompt = task[i]
        (world,) = solved(read_words(prompt.messages[1]["content"]))
        assert len(world) == people
        truth = tuple(f"{name} is a {'knight' if kind else 'knave'}" for name, kind in world.items())
        assert (prompt.info["steps"], prompt.info["answer"]) == (truth, ", ".join(truth))
        names |= set(world)
    assert len(names) == 13


def test_the_problem_in_the_docstring_is_one():
    assert '"A:Bn;B:Ak&Bk?", to be\n        answered by "A=k,B=n"' in (Knights.__init__.__doc__ or "")
    assert solved(read_symbols("A:Bn;B:Ak&Bk?")) == [{"A": True, "B": False}]


def test_a_person_alone_makes_claims_about_others():
    task = Knights(people=3, compact=True)
    for i in range(200):
        assert not re.search(r"A:A[kn];|B:B[kn];|C:C[kn]\?", task[i].text)


def test_the_number_of_persons_is_drawn_uniformly():
    """Problems of few persons are drawn again more often; that must not make them rarer."""
    task = Knights(people=4, min_people=2, compact=True)
    counts = Counter(len(task[i].info["people"]) for i in range(1500))
    assert sorted(counts) == [2, 3, 4]
    assert min(counts.values()) > 430


def renamed(text: str, order: tuple[str, ...]) -> str:
    """The same problem with the persons in another order."""
    text = re.sub("[A-C]", lambda letter: order["ABC".index(letter[0])], text.removesuffix("?"))
    return ";".join(sorted(text.split(";"))) + "?"


@pytest.mark.parametrize("people", [2, 3])
def test_a_problem_in_any_order_of_persons_is_in_one_split(people: int):
    tasks = (Knights(people=people, compact=True, split=split) for split in ("train", "test"))
    train, test = ({task[i].text for i in range(2000)} for task in tasks)
    orders = list(permutations("ABC"[:people]))
    test |= {re.sub(r"([A-C][kn])([&|=])([A-C][kn])", r"\3\2\1", text) for text in test}
    assert not train & {renamed(text, order) for text in test for order in orders}
    if people == 2:
        assert 0.06 < len(test) / len(train | test) < 0.18
        assert {renamed(text, ("B", "A")) for text in test} == test


@pytest.mark.parametrize("template", ["interleave", "delayed"])
@pytest.mark.parametrize("compact", [True, False])
def test_a_right_response_gets_format_final_and_all_of_the_sub_answers(compact: bool, template: str):
    task = Knights(people=5, min_people=2, compact=compact, template=template)
    for i in range(20):
        reward = perfect(task, task[i], template)
        assert reward.value == 1 + 2 + 0.5
        assert (reward.parts["sub_correct"], reward.parts["first_correct"]) == (1.0, 1.0)


def test_a_right_response_without_sub_answers_gets_format_and_final():
    task = Knights(template="think_answer")
    assert perfect(task, task[0], "think_answer").value == 1 + 2


@pytest.mark.parametrize(
    "text",
    [
        "Ann is a knight, Bob is a knave",
        "ann IS a Knight and bob is a knave.",
        "  Bob is a knave,\n and   Ann is a knight. ",
        "Ann is a knight. Bob is a knave.",
        "Ann is knight; Bob is knave",
        "Ann is a knight\nBob is a knave\n",
        "Ann=k,Bob=n",
        "bob = n, ann: knight",
    ],
)
def test_forms_of_the_right_final_answer(text: str):
    assert judge(Knights(), TWO, [text]).value == 1 + 2


@pytest.mark.parametrize(
    ("text", "final"),
    [
        ("Ann is a knight, Bob is a knight", -1.5),
        ("Bob is a knight, Ann is a knave", -1.5),
        ("Ann is a knight", -2.0),
        ("Ann is a knight, Bob is a knave, Ann is a knight", -2.0),
        ("Ann is a knight, Bob is a knave, Bob is a knight", -2.0),
        ("Ann is a knight, Bob is a knave, Cid is a knave", -2.0),
        ("Ann is a knight, Cid is a knave", -2.0),
        ("Ann and Bob are knights", -2.0),
        ("Ann is a knight or Ann is a knave, Bob is a knave", -2.0),
        ("Ann is not a knight, Bob is a knave", -2.0),
        ("Ann is a knightly knight, Bob is a knave", -2.0),
        ("so Ann is a knight, Bob is a knave", -2.0),
        ("Ann is a knight, Bob is a knave, I believe", -2.0),
        (" , and .", -2.0),
        ("a " * 100_000, -2.0),
    ],
)
def test_other_final_answers_are_wrong_or_unparseable(text: str, final: float):
    assert judge(Knights(), TWO, [text]).value == 1 + final


@pytest.mark.parametrize(
    ("sub", "intermediate"),
    [
        ("Ann is a knight", 0.25),
        ("ann is a knight.", 0.25),
        ("Ann is a knave", 0.0),
        ("Ann is a knight, Ann is a knave", 0.0),
        ("Ann is a knight, Bob is a knave", 0.0),
        ("I believe Ann is a knight", 0.0),
        ("...", 0.0),
    ],
)
def test_a_sub_answer_is_one_verdict(sub: str, intermediate: float):
    """By hand: two sub-answers share 0.5, and the first of them comes first."""
    reward = judge(Knights(), TWO, [sub, TWO.info["answer"]])
    assert reward.parts["intermediate"] == intermediate
    assert reward.parts["first_correct"] == float(intermediate > 0)


@pytest.mark.parametrize("compact", [True, False])
def test_a_reference_has_a_verdict_for_each_person_and_half_of_them_are_right(compact: bool):
    task = Knights(people=4, min_people=2, compact=compact)
    right = Counter()
    for i in range(400):
        prompt = task[i]
        parsed = parse([task.reference(prompt)])
        *subs, final = (block.text for block in parsed.answers)
        assert final == ("," if compact else ", ").join(subs)
        assert task.parsed_answer(prompt, final) is not None
        right.update(one == other for one, other in zip(subs, prompt.info["steps"], strict=True))
    assert 0.45 < right[True] / right.total() < 0.55


def test_a_compact_reference_thinks_through_the_statements():
    task = Knights(compact=True)
    prompt = task[5]
    thoughts = [block.text for block in parse([task.reference(prompt)]).blocks if block.kind == "think"]
    assert thoughts == [*prompt.text[:-1].split(";"), "ABC"]


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"people": 1}, "people=1"),
        ({"people": 9}, "people=9"),
        ({"people": 3, "min_people": 4}, "min_people=4 and people=3"),
        ({"depth": 0}, "depth=0"),
        ({"depth": 3}, "depth=3"),
    ],
)
def test_settings_that_cannot_work_are_named(settings: dict, problem: str):
    with pytest.raises(TaskError, match=problem):
        Knights(**settings)
